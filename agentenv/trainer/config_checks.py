"""What TrainConfig refuses: values out of bounds, and flags that contradict each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from agentenv.config import parse_json_object
from agentenv.errors import ConfigError

if TYPE_CHECKING:
    from agentenv.trainer.config import TrainConfig

GROUP_ESTIMATORS = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo")
"""Those that compare the samples of a prompt with each other: with one sample every advantage would be 0."""
COUNTS = (
    "num_episodes", "rollout_batch_size", "n_samples_per_prompt", "max_epochs", "async_queue_size", "concurrency",
    "micro_train_batch_size", "micro_rollout_batch_size", "train_max_tokens_per_gpu", "lora_alpha",
    "vllm_num_engines", "vllm_tensor_parallel_size", "eval_n_samples_per_prompt", "max_ckpt_num", "logging_steps",
    "max_samples", "max_train_steps", "train_batch_size", "vllm_generate_batch_size", "overlong_buffer_len",
    "reward_batch_size",
)  # fmt: skip
"""Integers from 1; None where a flag may be left out."""
FROM_ZERO = (
    "init_kl_coef", "entropy_loss_coef", "overlong_penalty_factor", "l2", "max_norm", "lora_rank", "max_retries",
    "engine_cpus", "engine_gpus", "env_actors", "env_actor_cpus", "eval_temperature", "ray_wait_s", "max_staleness",
    "save_samples",
)  # fmt: skip
ABOVE_ZERO = ("actor_learning_rate", "critic_learning_rate", "temperature", "eps_clip", "value_clip")
SHARES = ("gamma", "lambd", "lr_warmup_ratio", "max_error_share")
OFF_OR_COUNT = ("eval_steps", "save_steps", "freezing_actor_steps")
RANGES = ("dynamic_filtering_reward_range", "reward_clip_range", "is_correction_threshold")
ONLY_WITH: Mapping[str, tuple[str, ...]] = {
    "eval_split": ("eval_dataset",), "eval_steps": ("eval_dataset",), "eval_temperature": ("eval_dataset",),
    "eval_n_samples_per_prompt": ("eval_dataset",), "lora_alpha": ("lora_rank",), "lora_dropout": ("lora_rank",),
    "target_modules": ("lora_rank",), "overlong_penalty_factor": ("overlong_buffer_len",),
    "train_max_tokens_per_gpu": ("use_dynamic_batch",), "dynamic_filtering_reward_range": ("dynamic_filtering",),
    "is_correction_threshold": ("is_correction",), "env_actor_cpus": ("env_actors",), "wandb_org": ("use_wandb",),
    "reward_batch_size": ("remote_rm_url",),
    "wandb_group": ("use_wandb",), "wandb_project": ("use_wandb", "use_mlflow"),
    "wandb_run_name": ("use_wandb", "use_mlflow", "use_tensorboard"),
}  # fmt: skip
"""Flags that say something only where another one is set: one of these."""
TRACKERS = {"use_wandb": "an API key, or True", "use_tensorboard": "a folder", "use_mlflow": "a tracking URI"}
FOR_GAE = ("critic_pretrain", "value_clip", "freezing_actor_steps", "critic_learning_rate", "lambd")
FOR_VLLM = ("vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "enable_prefix_caching", "enforce_eager")
FOR_RAY = ("engine_cpus", "engine_gpus", "ray_runtime_env", "ray_placement", "ray_wait_s")
WHITENED = ("reinforce", "reinforce_baseline", "gae")
"""Estimators whose advantages are divided by their standard deviation over the batch."""


def check(config: TrainConfig) -> None:
    """Refuse the first thing that is wrong.

    Raises:
        ConfigError: it, with the flag to change.
    """
    for wrong in (_bounds, _source, _sizes, _asynchronous, _algorithm, _evaluation):
        for flag, expected, got, mend in wrong(config):
            raise ConfigError(f"--{flag}: expected {expected}, got {got}. {mend}")


def refuse_unread(config: TrainConfig) -> None:
    """Refuse the first flag that was given another value than its default and that nothing would read.

    Raises:
        ConfigError: it, with the flag that it needs beside it, or that takes its place.
    """
    for unread in (_alone, _overridden):
        for flag, expected, got, mend in unread(config):
            raise ConfigError(f"--{flag}: expected {expected}, got {got}. {mend}")


_NO_CRITIC = "Only gae has a critic; leave the flag out."
_Wrong = Iterator[tuple[str, str, str, str]]
"""The flag, what was expected of it, what it is, and what to do."""


def _bounds(config: TrainConfig) -> _Wrong:
    rules = (
        (COUNTS, lambda value: value >= 1, "an integer >= 1"),
        (FROM_ZERO, lambda value: 0 <= value < math.inf, "a number >= 0"),
        (ABOVE_ZERO, lambda value: 0 < value < math.inf, "a number > 0"),
        (SHARES, lambda value: 0 <= value <= 1, "a number in [0, 1]"),
        (OFF_OR_COUNT, lambda value: value == -1 or value >= 1, "an integer >= 1, or -1 for never"),
        (RANGES, lambda value: value[0] < value[1], "LOW HIGH with LOW < HIGH"),
        (("dual_clip",), lambda value: value > 1, "a number > 1"),
        (("vllm_gpu_memory_utilization",), lambda value: 0 < value <= 1, "a number in (0, 1]"),
        (("lora_dropout",), lambda value: 0 <= value < 1, "a number in [0, 1)"),
        (("adam_betas",), lambda value: all(0 <= beta < 1 for beta in value), "two numbers in [0, 1)"),
        (("eps_clip_low_high",), lambda value: all(0 < eps < math.inf for eps in value), "two numbers > 0"),
        (("stop_properly_penalty_coef",), lambda value: -math.inf < value <= 1, "a number <= 1"),
        (("target_modules",), bool, "at least one name"),
    )
    for names, holds, expected in rules:
        for name in names:
            value = getattr(config, name)
            if value is not None and not holds(value):
                yield name, expected, repr(value), "Change the value."
    if config.is_correction_threshold[0] < 0:
        yield "is_correction_threshold", "bounds >= 0", repr(config.is_correction_threshold), "A ratio is positive."
    if config.max_new_tokens is not None and config.max_new_tokens >= config.max_len:
        got = f"{config.max_new_tokens} beside --max_len {config.max_len}"
        yield "max_new_tokens", "less than --max_len", got, "It would leave no room for the prompt."
    bound = "max_len" if config.max_new_tokens is None else "max_new_tokens"
    most = getattr(config, bound)
    if (config.overlong_buffer_len or 0) > most:
        got = str(config.overlong_buffer_len)
        yield "overlong_buffer_len", f"at most --{bound} {most}", got, "Shorten the buffer."


def _source(config: TrainConfig) -> _Wrong:
    given = {name: getattr(config, name) for name in ("agent_func_path", "env", "remote_rm_url")}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        got = ", ".join(f"--{name} {value}" for name, value in given.items()) or "none"
        mend = "Name an agent_func.py, an environment, or a reward function."
        yield "agent_func_path", "one of --agent_func_path, --env and --remote_rm_url", got, mend
    if config.agent_func_path and not config.agent_func_path.endswith(".py"):
        mend = "OpenRLHF loads a file by its path."
        yield "agent_func_path", "a path ending in .py", repr(config.agent_func_path), mend
    if parse_json_object("--env_kwargs", config.env_kwargs) and config.env is None:
        yield "env_kwargs", "--env beside it", "none", "An agent_func.py sets `agent_kwargs` in its AgentExecutor."
    parse_json_object("--ray_runtime_env", config.ray_runtime_env)
    for name, expected in TRACKERS.items():
        if str(getattr(config, name)).lower() in ("", "false", "no", "off", "0"):
            yield name, expected, repr(getattr(config, name)), "Leave the flag out, and nothing is logged there."


def _sizes(config: TrainConfig) -> _Wrong:
    batch, samples = config.optimizer_batch_size, config.num_samples
    product = f"--rollout_batch_size x --n_samples_per_prompt = {samples}"
    if batch > samples:
        yield "train_batch_size", f"at most {product}", str(batch), "Else no optimiser step ever has its samples."
    elif samples % batch:
        yield "train_batch_size", f"a divisor of {product}", str(batch), "Else some samples would be left over."
    generated = config.vllm_generate_batch_size
    if generated is not None and generated < config.rollout_batch_size:
        expected = f"at least --rollout_batch_size {config.rollout_batch_size}"
        yield "vllm_generate_batch_size", expected, str(generated), "Leave it out to generate just as many."
    if not config.ray and (config.vllm_num_engines > 1 or config.env_actors or config.ray_address):
        flags = "--vllm_num_engines 1, no --env_actors and no --ray_address"
        yield "no_ray", flags, "actors of Ray to be used", "Leave --no_ray out."
    if config.vllm_enable_sleep and config.engine == "hf":
        yield "vllm_enable_sleep", "--engine vllm or auto", "hf", "Only vLLM's engines sleep; leave the flag out."


def _asynchronous(config: TrainConfig) -> _Wrong:
    needs = {
        "async_queue_size": config.async_queue_size != 1,
        "max_staleness": config.max_staleness is not None,
        "partial_rollout": config.partial_rollout,
        "vllm_generate_batch_size": (config.vllm_generate_batch_size or 0) > config.rollout_batch_size,
    }
    for name, used in needs.items():
        if used and not config.async_train:
            yield name, "--async_train beside it", "none", f"Add --async_train, or leave --{name} out."
    if config.async_train and config.vllm_enable_sleep:
        mend = "An engine that sleeps cannot generate meanwhile; leave one of them out."
        yield "vllm_enable_sleep", "no --async_train beside it", "both", mend
    if config.async_train and config.max_staleness == 0:
        yield "max_staleness", "an integer >= 1 with --async_train", "0", "0 is training without --async_train."


def _algorithm(config: TrainConfig) -> _Wrong:
    alone = config.n_samples_per_prompt == 1
    if config.advantage_estimator in GROUP_ESTIMATORS and alone:
        mend = "It compares the samples of a prompt: use --advantage_estimator reinforce, or take more."
        yield "n_samples_per_prompt", f"at least 2 for {config.advantage_estimator}", "1", mend
    if config.dynamic_filtering and alone:
        yield "n_samples_per_prompt", "at least 2 with --dynamic_filtering", "1", "It judges the samples of a prompt."
    if config.use_kl_loss and config.init_kl_coef == 0:
        yield "init_kl_coef", "a number > 0 with --use_kl_loss", "0.0", "Set it, e.g. to 0.001."
    if config.is_correction != "off" and config.top_p < 1:
        mend = (
            "The engine's log-probabilities are of the cut distribution, the learner's are not; sample with --top_p 1."
        )
        yield "is_correction", f"off with --top_p {config.top_p}", config.is_correction, mend
    if config.advantage_estimator != "gae":
        for name in _given(config, ("critic_pretrain", "lambd", "freezing_actor_steps")):
            yield name, "--advantage_estimator gae beside it", repr(config.advantage_estimator), _NO_CRITIC


def _evaluation(config: TrainConfig) -> _Wrong:
    if config.eval_steps != -1 and config.eval_dataset is None:
        yield "eval_steps", "--eval_dataset beside it", "none", "Name the held-out tasks."


def _alone(config: TrainConfig) -> _Wrong:
    """Flags that nothing reads, because another one is not set."""
    for name in _given(config, ONLY_WITH):
        if not any(_is_on(config, other) for other in ONLY_WITH[name]):
            needed = " or ".join(f"--{other}" for other in ONLY_WITH[name])
            yield name, f"{needed} beside it", "none", f"Add it, or leave --{name} out."
    groups: tuple[tuple[tuple[str, ...], bool, str, str, str], ...] = (
        (FOR_GAE, config.advantage_estimator != "gae", "--advantage_estimator gae beside it",
            repr(config.advantage_estimator), _NO_CRITIC),
        (FOR_VLLM, config.engine == "hf", "--engine vllm or auto", "hf", "Only vLLM reads it; leave the flag out."),
        (FOR_RAY, not config.ray, "no --no_ray beside it", "both", "Only Ray's actors read it; leave one of them out."),
    )  # fmt: skip
    for names, unread, expected, got, mend in groups:
        for name in _given(config, names) if unread else ():
            yield (f"no_{name}" if getattr(config, name) is False else name), expected, got, mend


def _overridden(config: TrainConfig) -> _Wrong:
    """Flags whose place another one takes."""
    estimator, queue, generated = config.advantage_estimator, config.async_queue_size, config.vllm_generate_batch_size
    rules = (
        ("num_episodes", config.max_train_steps is not None, "no --max_train_steps beside it", "both",
            "That alone says how long it trains; leave one of them out."),
        ("eps_clip", config.eps_clip_low_high is not None, "no --eps_clip_low_high beside it", "both",
            "That says both ranges; leave one of them out."),
        ("loss_agg_mode", config.policy_loss_type == "gspo" and config.loss_agg_mode != "seq-mean-token-mean",
            "seq-mean-token-mean with --policy_loss_type gspo", repr(config.loss_agg_mode),
            "gspo is a mean over samples; leave the flag out."),
        ("max_staleness", config.async_train and config.staleness_bound > queue,
            f"at most --async_queue_size {queue}", str(config.max_staleness),
            "No sample is staler than the queue is long; make that longer, or leave the flag out."),
        ("gamma", config.credit == "episode" and estimator not in ("reinforce", "gae"),
            "--credit turn, or --advantage_estimator reinforce or gae, beside it", f"--credit episode and {estimator}",
            "Sums of whole episodes are not discounted; change one of them."),
        ("no_advantage_std_norm", estimator not in WHITENED, f"one of {', '.join(WHITENED)} beside it", estimator,
            "Its advantages are not divided over the batch anyway; leave the flag out."),
        ("vllm_generate_batch_size", (generated or 0) > config.rollout_batch_size and not config.dynamic_filtering,
            "--dynamic_filtering beside it", "none",
            "Else what is sampled too much grows stale and is thrown away; add it, or leave the flag out."),
    )  # fmt: skip
    for name, used, expected, got, mend in rules:
        if used and _given(config, (name,)):
            yield name, expected, got, mend


def notes(config: TrainConfig) -> list[str]:
    """What has no effect beside these flags and is no error, because OpenRLHF's own command lines have it."""
    rules = (
        ("micro_train_batch_size", config.use_dynamic_batch, "--use_dynamic_batch fills micro-batches by tokens"),
        ("micro_rollout_batch_size", config.use_dynamic_batch, "--use_dynamic_batch fills micro-batches by tokens"),
        ("kl_estimator", config.init_kl_coef == 0, "--init_kl_coef is 0, so there is no reference model"),
    )
    said = [(name, why) for name, used, why in rules if used and _given(config, (name,))]
    return [f"--{name} {getattr(config, name)} has no effect here: {why}" for name, why in said]


def _given(config: TrainConfig, names: Iterable[str]) -> list[str]:
    """Those of the fields that have another value than their default."""
    usual: dict[str, Any] = {field.name: field.default for field in fields(config)}
    return [name for name in names if getattr(config, name) != usual[name]]


def _is_on(config: TrainConfig, name: str) -> bool:
    return getattr(config, name) not in (None, False, 0, "off")
