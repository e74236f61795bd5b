"""What a version of OpenRLHF cannot do, which is refused, and where it is known to go wrong, which is warned of."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from agentenv.errors import ConfigError
from agentenv.trainer.openrlhf_flags import DEFAULTS, DOTTED, VERSIONS

if TYPE_CHECKING:
    from agentenv.trainer.launch import LaunchConfig

IN_THE_FILE = {
    "max_steps": "limits", "step_timeout_s": "limits", "episode_timeout_s": "limits", "generate_timeout_s": "limits",
    "concurrency": "max_concurrent", "text_feedback": "chat_options", "open_reasoning": "chat_options",
    "tool_role": "chat_options", "long_observation": "chat_options", "max_observation_tokens": "chat_options",
    "chat_template_kwargs": "chat_options",
}  # fmt: skip
"""Fields that no version has a flag for: the attribute of agentenv's AgentExecutor that says them."""
OURS_ALONE = {
    "max_retries", "max_error_share", "engine_cpus", "engine_gpus", "env_actors", "env_actor_cpus", "ray_address",
    "ray_runtime_env", "ray_placement", "ray_wait_s", "progress", "log_level", "max_staleness",
    "save_samples", "reward_batch_size",
}  # fmt: skip
"""Fields about how agentenv runs, which nothing of OpenRLHF's depends on, or which are checked below."""
SHIPPED = ("math_retry", "guess_number", "code_sandbox", "verify")
"""Environments that the repository has an agent_func.py for, of the same name."""
LAST = VERSIONS[-1]


def refuse(config: LaunchConfig, release: str) -> None:
    """Refuse what this release cannot do.

    Raises:
        ConfigError: all of it, each with the first release that can, or with what to do instead.
    """
    at, refused = VERSIONS.index(release), []
    for flag, needs, got, first, mend in (*_of_versions(config), *_of_nobody(config)):
        if first is None:
            refused.append(f"--{flag}: expected {needs} for OpenRLHF, got {got}. {mend}")
        elif at < VERSIONS.index(first):
            what = f"expected {needs} for OpenRLHF {release}, got {got}"
            refused.append(f"--{flag}: {what}. Use --version {first} or later{mend}.")
    if config.param_dtype == "fp32" and at >= VERSIONS.index("0.9.2"):
        what = f"expected bf16 or fp16 for OpenRLHF {release}, got fp32"
        refused.append(f"--param_dtype: {what}. Use --version 0.9.1.post1 or earlier.")
    if config.param_dtype == "fp16" and at < VERSIONS.index("0.9.2"):
        what = f"expected bf16 or fp32 for OpenRLHF {release}, got fp16"
        refused.append(f"--param_dtype: {what}. Use --version 0.9.2 or later.")
    if refused:
        raise ConfigError(" ".join(refused))


def _of_versions(config: LaunchConfig) -> list[tuple[str, str, str, str | None, str]]:
    """What later releases can: flag, what is expected, what was got, the first that can, and another way."""
    kind, low = config.is_correction, config.is_correction_threshold[0]
    queue = config.async_queue_size
    penalty = "" if not config.agent_func_path else " (before it, the flag has no effect on agents of several turns)"
    rules = (
        (queue != 1, "async_queue_size", "1", queue, "0.9.1", ""),
        (config.partial_rollout, "partial_rollout", "none", "it", "0.9.7", ""),
        (config.async_train and config.eval_dataset, "eval_dataset", "none with --async_train", "it", "0.9.7", ""),
        (
            (config.stop_properly_penalty_coef or 0) < 0, "stop_properly_penalty_coef", "a number in [0, 1]",
            config.stop_properly_penalty_coef, "0.9.8", "",
        ),
        (
            config.stop_properly_penalty_coef is not None, "stop_properly_penalty_coef", "none", "it",
            "0.11.1" if config.agent_func_path else "0.9.2", penalty,
        ),
        (config.loss_agg_mode != "token-mean" and config.policy_loss_type == "ppo", "loss_agg_mode", "token-mean",
            config.loss_agg_mode, "0.11.2", ""),
        (config.advantage_estimator == "flash_reinforce", "advantage_estimator", "another one", "flash_reinforce",
            "0.11.2", ""),
        (config.lr_scheduler in ("linear", "cosine"), "lr_scheduler", "constant or cosine_with_min_lr",
            config.lr_scheduler, "0.10.4", " (before it, every scheduler is given a least rate, and fails)"),
        (kind == "icepop", "is_correction", "off or tis", kind, "0.9.1", ""),
        (kind == "seq-mask-tis", "is_correction", "off, tis or icepop", kind, "0.9.4", ""),
        (kind == "tis" and low > 0, "is_correction_threshold", "0 as the low bound", low, "0.9.1", ", or write 0 HIGH"),
        ((config.vllm_generate_batch_size or 0) > config.rollout_batch_size, "vllm_generate_batch_size",
            "at most --rollout_batch_size", config.vllm_generate_batch_size, "0.10.0", ""),
    )  # fmt: skip
    return [(flag, needs, str(got), first, mend) for used, flag, needs, got, first, mend in rules if used]


def _of_nobody(config: LaunchConfig) -> list[tuple[str, str, str, None, str]]:
    """What no release can, and what to do instead."""
    passes = config.rollout_batch_size * (config.max_train_steps or 0)
    stale = config.max_staleness
    groups = config.num_samples // config.micro_rollout_batch_size
    gpus = config.actor_num_nodes * config.actor_num_gpus_per_node
    engines = config.vllm_num_engines * config.vllm_tensor_parallel_size
    shared = config.colocate_all_models and not config.async_train
    rules = (
        (config.env, "env", "--agent_func_path instead", "--env", _in_a_file(config.env)),
        (config.credit == "turn", "credit", "episode", "turn", "It sums the rewards of an episode on its last action."),
        (config.engine == "hf", "engine", "auto or vllm", "hf", "It samples with vLLM only."),
        (not config.ray, "no_ray", "Ray", "none", "Leave --no_ray out."),
        (config.loss_agg_mode == "seq-mean-token-sum-norm", "loss_agg_mode", "token-mean or seq-mean-token-mean",
            config.loss_agg_mode, "It has those two."),
        (config.use_mlflow, "use_mlflow", "--use_wandb or --use_tensorboard", "MLflow", "It logs to those."),
        (config.max_train_steps is not None, "max_train_steps", "none", str(config.max_train_steps),
            f"It counts tasks and passes: use --max_samples {passes} --num_episodes 1."),
        (stale is not None and stale < config.async_queue_size, "max_staleness", "at least --async_queue_size",
            str(stale), "The queue is its only bound; make that shorter."),
        (groups < gpus, "micro_rollout_batch_size", f"at most {config.num_samples // gpus}, for {gpus} GPUs to train",
            str(config.micro_rollout_batch_size), "Else some GPU has no samples; lower it, or the number of GPUs."),
        (shared and gpus != engines, "colocate_all_models", "as many GPUs of engines as of training",
            f"{engines} and {gpus}", "Change --vllm_num_engines, or --actor_num_gpus_per_node."),
        (config.vllm_enable_sleep and not config.colocate_all_models, "vllm_enable_sleep",
            "--colocate_all_models beside it", "none", "Add it."),
    )  # fmt: skip
    return [(flag, needs, got, None, mend) for used, flag, needs, got, mend in rules if used]


def _in_a_file(env: str | None) -> str:
    """How an environment becomes the file that OpenRLHF takes."""
    shipped = f", as agent_funcs/{env}.py of agentenv's repository" if env in SHIPPED else ""
    return f"Name a file with a class AgentExecutor{shipped}."


def _oversamples(config: LaunchConfig) -> bool:
    return (config.vllm_generate_batch_size or 0) > config.rollout_batch_size


def _discounts(config: LaunchConfig) -> bool:
    return config.advantage_estimator == "gae" and (config.lambd < 1 or config.gamma < 1)


def _addresses(config: LaunchConfig) -> bool:
    return "," in (config.remote_rm_url or "")


def _lacks_images(path: str | None) -> bool:
    """Whether an `execute` in the file takes no `images`; also where the file is not here, or cannot be read."""
    if path is None:
        return False
    try:
        tree = ast.parse(Path(path).expanduser().read_bytes())
    except (OSError, SyntaxError, ValueError):
        return True
    methods = [each for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body]
    return any(
        isinstance(each, ast.AsyncFunctionDef | ast.FunctionDef)
        and each.name == "execute"
        and not _takes_images(each.args)
        for each in methods
    )


def _takes_images(arguments: ast.arguments) -> bool:
    named = [each.arg for each in (*arguments.args, *arguments.kwonlyargs)]
    return arguments.kwarg is not None or "images" in named


_Trap = tuple[str, str, Callable[["LaunchConfig"], object], str]
"""The first and the last release that has it, the flags that it touches, and what it is."""
_TRAPS: tuple[_Trap, ...] = (
    (
        "0.8.9",
        "0.9.0",
        lambda c: c.async_train,
        "OPENRLHF_ASYNC_NUM_TASKS and OPENRLHF_ASYNC_QUEUE_SIZE are read as text and crash it: leave them unset.",
    ),
    (
        "0.9.1",
        "0.9.1",
        lambda c: c.agent_func_path,
        "--agent_func_path: all episodes of an engine share one agent instance "
        "of MultiTurnAgentExecutor's. Use --version 0.9.1.post1.",
    ),
    (
        "0.9.1",
        "0.9.6",
        lambda c: c.eval_dataset,
        "--eval_n_samples_per_prompt: evaluation takes --n_samples_per_prompt instead. Fixed in 0.9.7.",
    ),
    (
        "0.9.4",
        "0.9.4",
        lambda c: c.async_train,
        "--async_train: does not work with its vLLM 0.16. Use --version 0.9.5.",
    ),
    (
        "0.9.8",
        "0.10.1.post2",
        lambda c: c.agent_func_path and c.max_new_tokens is None,
        "--max_new_tokens: left out, "
        "MultiTurnAgentExecutor crashes. {half} is set, half of --max_len; fixed in 0.10.2.",
    ),
    (
        "0.9.1",
        LAST,
        lambda c: c.agent_func_path and c.max_new_tokens is not None,
        "--max_new_tokens: "
        "MultiTurnAgentExecutor reserves room by it and does not limit a turn; agentenv's AgentExecutor does.",
    ),
    (
        "0.10.0",
        LAST,
        lambda c: _lacks_images(c.agent_func_path),
        "--agent_func_path: execute() is called with images=; a file's own must accept it.",
    ),
    (
        "0.9.1",
        "0.11.0",
        _addresses,
        "--remote_rm_url: all but the first address get empty requests, and their rewards are "
        "lost. Name one, or use --version 0.11.2.",
    ),
    ("0.11.1", "0.11.1", _addresses, "--remote_rm_url: only the first address is used. Fixed in 0.11.2."),
    (
        "0.8.9",
        "0.10.0",
        lambda c: c.dynamic_filtering,
        "--dynamic_filtering: a score of 0 counts as missing where rewards come from --remote_rm_url. Fixed in 0.10.1.",
    ),
    (
        "0.8.9",
        "0.11.0",
        lambda c: c.dynamic_filtering,
        "--dynamic_filtering: groups already accepted are lost where the data ends. Fixed in 0.11.1.",
    ),
    (
        "0.10.0",
        "0.11.0",
        _oversamples,
        "--vllm_generate_batch_size: samples generated ahead are drawn anew after a restart. Fixed in 0.11.1.",
    ),
    (
        "0.10.0",
        LAST,
        _oversamples,
        "--vllm_generate_batch_size: samples generated ahead are not in checkpoints, and are "
        "older than --async_queue_size says.",
    ),
    (
        "0.8.9",
        "0.10.4",
        lambda c: not c.async_train,
        "without --async_train the last batch of a pass is dropped: less data "
        "than --rollout_batch_size trains nothing. Fixed in 0.11.0.",
    ),
    (
        "0.9.1",
        "0.11.0",
        lambda c: c.is_correction == "icepop",
        "--is_correction icepop: NaN where a ratio overflows. Fixed in 0.11.1.",
    ),
    (
        "0.9.7",
        LAST,
        lambda c: c.partial_rollout and c.enable_prefix_caching,
        "--partial_rollout: blocks computed with old "
        "weights may stay in the prefix cache. Add --no_enable_prefix_caching.",
    ),
    (
        "0.9.7",
        LAST,
        lambda c: c.async_train and c.eval_dataset,
        "--eval_dataset: with --async_train its metrics stand "
        "beside the next step's weights, and so does the best checkpoint.",
    ),
    (
        "0.8.9",
        LAST,
        lambda c: c.agent_func_path and c.overlong_buffer_len,
        "--overlong_buffer_len: the environment's replies count towards the length.",
    ),
    (
        "0.8.9",
        LAST,
        lambda c: c.agent_func_path and _discounts(c),
        "--lambd and --gamma: below 1 they discount over the environment's tokens too.",
    ),
    (
        "0.8.9",
        "0.11.0",
        lambda c: c.use_kl_loss and c.kl_estimator != "k2",
        "--use_kl_loss: its gradient is not that of the divergence, with k1 none on average. Use --kl_estimator k2.",
    ),
    (
        "0.11.1",
        LAST,
        lambda c: c.use_kl_loss,
        "--use_kl_loss: its gradient is that of the divergence only with `-- --algo.kl.unbiased_gradient`.",
    ),
    (
        "0.8.9",
        LAST,
        lambda c: c.top_p < 1,
        "--top_p: the learner's log-probabilities are those before the cut, so the ratio is not 1 at the start.",
    ),
)


def traps(config: LaunchConfig, release: str) -> list[str]:
    """What is known to go wrong in this release with these flags, each in a sentence or two."""
    at = VERSIONS.index(release)
    said = [
        text.format(half=config.max_len // 2)
        for first, last, touches, text in _TRAPS
        if touches(config) and VERSIONS.index(first) <= at <= VERSIONS.index(last)
    ]
    return [f"OpenRLHF {release}: {text}" for text in said] + _in_the_file(config) + _elsewhere(config)


def _elsewhere(config: LaunchConfig) -> list[str]:
    """Files that are not here: they may be where the job runs, or nowhere; and actors that nobody would make."""
    paths = {
        name: getattr(config, name) for name in ("agent_func_path", "remote_rm_url", "prompt_data", "eval_dataset")
    }
    said = [
        f"--{name}: {path} is not here; it has to be where the job runs."
        for name, path in paths.items()
        if path is not None and path.endswith((".py", ".jsonl", ".parquet")) and not Path(path).expanduser().is_file()
    ]
    if config.env_actors:
        said.append(f"--env_actors {config.env_actors}: OpenRLHF has none; environments run in the agents' processes.")
    return said


def _in_the_file(config: LaunchConfig) -> list[str]:
    """What was given and only the agent's own file can say."""
    usual = {field.name: field.default for field in fields(config)}
    return [
        f"OpenRLHF has no --{name}: set `{attribute}` in the file's AgentExecutor."
        for name, attribute in IN_THE_FILE.items()
        if getattr(config, name) != usual[name]
    ]


def covered() -> set[str]:
    """The fields that are printed, refused or warned of, so that none is lost in silence."""
    by_rule = {"env", "env_kwargs", "credit", "engine", "ray", "use_mlflow", "max_train_steps", "train_batch_size"}
    corrections = {"is_correction", "is_correction_threshold", "version", "job_address"}
    placement = {"actor_num_nodes", "actor_num_gpus_per_node", "colocate_all_models"}
    return set(DOTTED) | set(IN_THE_FILE) | OURS_ALONE | by_rule | corrections | placement | set(DEFAULTS)
