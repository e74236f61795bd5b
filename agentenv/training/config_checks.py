"""Checks of a TrainConfig: values out of bounds, flags that contradict each other, and flags without effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from agentenv.errors import ConfigError
from agentenv.runs.flat_config import flag_message
from agentenv.training.best_model import EarlyStop
from agentenv.training.config import TrainConfig

GROUP_ESTIMATORS = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo")
"""Estimators that compare the samples of a prompt: with one sample every advantage would be 0."""
COUNTS = (
    "num_episodes", "rollout_batch_size", "n", "max_epochs", "async_queue_size", "concurrency",
    "micro_train_batch_size", "micro_rollout_batch_size", "train_max_tokens_per_gpu", "lora_alpha",
    "num_engines", "vllm_tensor_parallel_size", "eval_n_samples_per_prompt", "max_ckpt_num", "logging_steps",
    "limit", "eval_limit", "max_train_steps", "train_batch_size", "vllm_generate_batch_size", "overlong_buffer_len",
    "reward_batch_size",
)  # fmt: skip
"""Integers >= 1, or None for flags that are optional."""
FROM_ZERO = (
    "init_kl_coef", "entropy_loss_coef", "overlong_penalty_factor", "l2", "max_norm", "lora_rank",
    "eval_temperature", "max_staleness", "save_samples",
)  # fmt: skip
ABOVE_ZERO = ("actor_learning_rate", "critic_learning_rate", "temperature", "eps_clip", "value_clip")
SHARES = ("gamma", "lambd", "lr_warmup_ratio")
OFF_OR_COUNT = ("eval_steps", "save_steps", "freezing_actor_steps")
RANGES = ("dynamic_filtering_reward_range", "reward_clip_range", "is_correction_threshold")
ONLY_WITH: Mapping[str, tuple[str, ...]] = {
    "eval_split": ("eval_dataset",), "eval_limit": ("eval_dataset",), "eval_steps": ("eval_dataset",),
    "eval_temperature": ("eval_dataset",), "eval_n_samples_per_prompt": ("eval_dataset",),
    "early_stop": ("eval_dataset",),
    "lora_alpha": ("lora_rank",), "lora_dropout": ("lora_rank",),
    "target_modules": ("lora_rank",), "overlong_penalty_factor": ("overlong_buffer_len",),
    "train_max_tokens_per_gpu": ("use_dynamic_batch",), "dynamic_filtering_reward_range": ("dynamic_filtering",),
    "is_correction_threshold": ("is_correction",), "env_actor_cpus": ("env_actors",),
    "reward_batch_size": ("remote_rm_url",),
}  # fmt: skip
"""Flags that have an effect only together with one of these."""
FOR_GAE = ("critic_pretrain", "value_clip", "freezing_actor_steps", "critic_learning_rate", "lambd")
FOR_VLLM = ("vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "enable_prefix_caching", "enforce_eager")
FOR_RAY = ("engine_cpus", "engine_gpus", "ray_runtime_env", "ray_placement", "ray_wait_s")
WHITENED = ("reinforce", "reinforce_baseline", "gae")
"""Estimators whose advantages are divided by their standard deviation over the batch."""


def validate(config: TrainConfig) -> None:
    """Check values and combinations of flags.

    Raises:
        ConfigError: a value is out of bounds, or flags contradict each other. The message names the flag to change.
    """
    try:
        _raise_first(config, _bounds, _contradictions)
        _ = config.sampling
        if config.early_stop is not None:
            EarlyStop.parse(config.early_stop)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(flag_message(str(error))) from error


def check_effective(config: TrainConfig) -> None:
    """Check that every flag that differs from its default has an effect.

    Raises:
        ConfigError: a flag has no effect. The message names the flag that it needs or that overrides it.
    """
    _raise_first(config, _alone, _overridden)


_NO_CRITIC = "Only gae has a critic; leave the flag out."
_Problems = Iterator[tuple[str, str, str, str]]
"""Flag, expected value, actual value and remedy."""
_Rules = Sequence[tuple[str, object, str, str, str]]
"""The same, with a condition after the flag that is true if there is a problem."""


def _raise_first(config: TrainConfig, *checks: Callable[[TrainConfig], _Problems]) -> None:
    for check in checks:
        for flag, expected, got, remedy in check(config):
            raise ConfigError(f"--{flag}: expected {expected}, got {got}. {remedy}")


def _bounds(config: TrainConfig) -> _Problems:
    rules = (
        (COUNTS, lambda value: value >= 1, "an integer >= 1"),
        (FROM_ZERO, lambda value: 0 <= value < math.inf, "a number >= 0"),
        (ABOVE_ZERO, lambda value: 0 < value < math.inf, "a number > 0"),
        (SHARES, lambda value: 0 <= value <= 1, "a number in [0, 1]"),
        (OFF_OR_COUNT, lambda value: value == -1 or value >= 1, "an integer >= 1, or -1 for never"),
        (RANGES, lambda value: value[0] < value[1], "LOW HIGH with LOW < HIGH"),
        (("is_correction_threshold",), lambda value: value[0] >= 0, "bounds >= 0"),
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


def _contradictions(config: TrainConfig) -> _Problems:
    """Yield what cannot be together. Values are within their bounds."""
    given = {name: getattr(config, name) for name in ("agent_func_path", "env", "remote_rm_url")}
    sources = {name: value for name, value in (given | {"env": " ".join(config.env)}).items() if value}
    named = ", ".join(f"--{name} {value}" for name, value in sources.items()) or "none"
    batch, samples, generated = config.optimizer_batch_size, config.num_samples, config.vllm_generate_batch_size
    product = f"--rollout_batch_size x --n = {samples}"
    max_length, tokens, buffer = config.max_length, config.max_tokens, config.overlong_buffer_len
    limit = f"--max_length {max_length}" if tokens is None else f"--max_tokens {tokens}"
    needs_async = {
        "async_queue_size": config.async_queue_size != 1,
        "max_staleness": config.max_staleness is not None,
        "partial_rollout": config.partial_rollout,
        "vllm_generate_batch_size": (generated or 0) > config.rollout_batch_size,
    }
    rules: _Rules = (
        ("agent_func_path", len(sources) != 1, "one of --agent_func_path, --env and --remote_rm_url", named,
            "Name an agent_func.py, an environment, or a reward function."),
        ("agent_func_path", config.agent_func_path and not config.agent_func_path.endswith(".py"),
            "a path ending in .py", repr(config.agent_func_path), "Name a Python file."),
        ("env_kwargs", config.env_kwargs and not config.env, "--env with it", "none",
            "An agent_func.py sets `agent_kwargs` in its AgentExecutor."),
        ("max_tokens", tokens is not None and tokens >= max_length, "less than --max_length",
            f"{tokens} with --max_length {max_length}", "Leave room for the prompt."),
        ("overlong_buffer_len", (buffer or 0) > (tokens or max_length), f"at most {limit}", str(buffer),
            "Shorten the buffer."),
        ("train_batch_size", batch > samples, f"at most {product}", str(batch), "Lower it, or sample more."),
        ("train_batch_size", samples % batch, f"a divisor of {product}", str(batch),
            "Choose a divisor, so that no samples are left over."),
        ("vllm_generate_batch_size", generated is not None and generated < config.rollout_batch_size,
            f"at least --rollout_batch_size {config.rollout_batch_size}", str(generated),
            "Raise it, or leave it out."),
        ("no_ray", not config.ray and (config.num_engines > 1 or config.actors.ray_address),
            "--num_engines 1 and no --ray_address", "flags that use Ray", "Leave --no_ray out."),
        ("vllm_enable_sleep", config.vllm_enable_sleep and config.engine == "hf", "--engine vllm or auto", "hf",
            "Only vLLM engines can sleep; leave the flag out."),
        *((name, used and not config.async_train, "--async_train with it", "none",
            f"Add --async_train, or leave --{name} out.") for name, used in needs_async.items()),
        ("vllm_enable_sleep", config.vllm_enable_sleep and config.async_train, "no --async_train with it", "both",
            "An engine cannot generate while it sleeps; leave one of them out."),
        ("max_staleness", config.async_train and config.max_staleness == 0, "an integer >= 1 with --async_train", "0",
            "Leave --async_train out for synchronous training."),
        ("n", config.n == 1 and config.advantage_estimator in GROUP_ESTIMATORS,
            f"at least 2 for {config.advantage_estimator}", "1",
            "It compares the samples of a prompt; use more, or --advantage_estimator reinforce."),
        ("n", config.n == 1 and config.dynamic_filtering, "at least 2 with --dynamic_filtering", "1",
            "It compares the samples of a prompt; use more."),
        ("init_kl_coef", config.use_kl_loss and config.init_kl_coef == 0, "a number > 0 with --use_kl_loss", "0.0",
            "Set it, for example to 0.001."),
        ("is_correction", config.is_correction != "off" and config.top_p < 1, f"off with --top_p {config.top_p}",
            config.is_correction, "The engine's log-probabilities belong to the cut distribution, the learner's do "
            "not; set --top_p 1."),
        *((name, config.advantage_estimator != "gae", "--advantage_estimator gae with it",
            repr(config.advantage_estimator), _NO_CRITIC)
            for name in changed_flags(config, ("critic_pretrain", "lambd", "freezing_actor_steps"))),
        ("early_stop", config.early_stop is not None and config.eval_dataset and config.eval_steps == -1,
            "--eval_steps with it", "none", "Say how often to evaluate."),
        ("eval_steps", config.eval_steps != -1 and not config.eval_dataset, "--eval_dataset with it", "none",
            "Name the held-out tasks."),
    )  # fmt: skip
    for name, wrong, expected, got, remedy in rules:
        if wrong:
            yield name, expected, got, remedy


def _alone(config: TrainConfig) -> _Problems:
    """Yield flags that nothing reads because another flag is not set."""
    for name in changed_flags(config, ONLY_WITH):
        if all(config.flags()[other] in (None, False, 0, "off", ()) for other in ONLY_WITH[name]):
            needed = " or ".join(f"--{other}" for other in ONLY_WITH[name])
            yield name, f"{needed} with it", "none", f"Add it, or leave --{name} out."
    groups: tuple[tuple[tuple[str, ...], bool, str, str, str], ...] = (
        (FOR_GAE, config.advantage_estimator != "gae", "--advantage_estimator gae with it",
            repr(config.advantage_estimator), _NO_CRITIC),
        (FOR_VLLM, config.engine == "hf", "--engine vllm or auto", "hf", "Only vLLM uses it; leave the flag out."),
        (FOR_RAY, not config.ray, "no --no_ray with it", "both", "Only Ray actors use it; leave one of them out."),
    )  # fmt: skip
    for names, unread, expected, got, remedy in groups:
        for name in changed_flags(config, names) if unread else ():
            yield (f"no_{name}" if config.flags()[name] is False else name), expected, got, remedy


def _overridden(config: TrainConfig) -> _Problems:
    """Yield flags that another flag overrides."""
    estimator, queue, generated = config.advantage_estimator, config.async_queue_size, config.vllm_generate_batch_size
    rules: _Rules = (
        ("num_episodes", config.max_train_steps is not None, "no --max_train_steps with it", "both",
            "It sets the number of train steps; leave one of them out."),
        ("eps_clip", config.eps_clip_low_high is not None, "no --eps_clip_low_high with it", "both",
            "It sets both ranges; leave one of them out."),
        ("loss_agg_mode", config.policy_loss_type == "gspo" and config.loss_agg_mode != "seq-mean-token-mean",
            "seq-mean-token-mean with --policy_loss_type gspo", repr(config.loss_agg_mode),
            "gspo takes the mean over samples; leave the flag out."),
        ("max_staleness", config.async_train and config.staleness_bound > queue,
            f"at most --async_queue_size {queue}", str(config.max_staleness),
            "The length of the queue already bounds staleness; raise it, or leave the flag out."),
        ("gamma", config.credit == "episode" and estimator not in ("reinforce", "gae"),
            "--credit turn, or --advantage_estimator reinforce or gae, with it", f"--credit episode and {estimator}",
            "Rewards summed over an episode are not discounted; change one of them."),
        ("no_advantage_std_norm", estimator not in WHITENED, f"one of {', '.join(WHITENED)} with it", estimator,
            "It never divides advantages by their standard deviation; leave the flag out."),
        ("vllm_generate_batch_size", (generated or 0) > config.rollout_batch_size and not config.dynamic_filtering,
            "--dynamic_filtering with it", "none",
            "Without it, extra samples become stale and are dropped; add it, or leave the flag out."),
    )  # fmt: skip
    changed = changed_flags(config, [name for name, *_ in rules])
    for name, used, expected, got, remedy in rules:
        if used and name in changed:
            yield name, expected, got, remedy


def notes(config: TrainConfig) -> list[str]:
    """Return notes on flags without effect that are accepted because OpenRLHF's own command lines contain them."""
    rules = (
        ("micro_train_batch_size", config.use_dynamic_batch, "--use_dynamic_batch fills micro-batches by tokens"),
        ("micro_rollout_batch_size", config.use_dynamic_batch, "--use_dynamic_batch fills micro-batches by tokens"),
        ("kl_estimator", config.init_kl_coef == 0, "--init_kl_coef is 0, so the reference model is not loaded"),
    )
    return [
        f"--{name} {getattr(config, name)} has no effect here: {why}"
        for name, overridden, why in rules
        if overridden and changed_flags(config, (name,))
    ]


def changed_flags(config: TrainConfig, names: Iterable[str]) -> list[str]:
    """Return the fields whose value is not their default."""
    flags, defaults = config.flags(), type(config)().flags()
    return [name for name in names if flags[name] != defaults[name]]
