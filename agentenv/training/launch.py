"""`agentenv launch openrlhf`: print the OpenRLHF 0.11.x command that trains what a TrainConfig describes.

Flags that a release cannot express are refused, with what to do instead. Known defects of a release that concern the
flags are returned as warnings.
"""

from __future__ import annotations

import ast
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from agentenv.errors import ConfigError
from agentenv.runs.mixture import source_name
from agentenv.training.config import TrainConfig
from agentenv.training.config_checks import FOR_GAE
from agentenv.training.openrlhf_flags import CRITIC_TOO, DEFAULTS, DOTTED, PLACEMENT, VERSIONS

ENTRY = ("python3", "-m", "openrlhf.cli.train_ppo_ray")
ONLY_WITH = {
    "eval_split": "eval_dataset", "eval_steps": "eval_dataset", "eval_temperature": "eval_dataset",
    "eval_n_samples_per_prompt": "eval_dataset", "lora_alpha": "lora_rank", "lora_dropout": "lora_rank",
    "target_modules": "lora_rank", "overlong_penalty_factor": "overlong_buffer_len", "kl_estimator": "init_kl_coef",
    "train_max_tokens_per_gpu": "use_dynamic_batch", "dynamic_filtering_reward_range": "dynamic_filtering",
    "wandb_org": "use_wandb", "wandb_group": "use_wandb", "wandb_project": "use_wandb", "wandb_run_name": "use_wandb",
}  # fmt: skip
"""Flags that OpenRLHF reads only if another one is set."""
LEVEL_AND_MODE = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
"""Values of --algo.advantage.is_correction_level and _mode in 0.11.2 for each --is_correction."""
IN_THE_FILE = {
    "max_turns": "limits", "step_timeout_s": "limits", "episode_timeout_s": "limits", "generate_timeout_s": "limits",
    "concurrency": "max_concurrent", "text_feedback": "chat_options", "open_reasoning": "chat_options",
    "tool_role": "chat_options", "long_observation": "chat_options", "max_observation_tokens": "chat_options",
    "chat_template_kwargs": "chat_options",
}  # fmt: skip
"""Fields that OpenRLHF has no flag for, and the attribute of agentenv's AgentExecutor that sets them instead."""
ONLY_AGENTENV = {
    "max_retries", "max_error_share", "engine_cpus", "engine_gpus", "env_actors", "env_actor_cpus", "ray_address",
    "ray_runtime_env", "ray_placement", "ray_wait_s", "progress", "log_level", "json", "early_stop", "max_staleness",
    "rollout_workers", "save_samples", "save_samples_by", "save_token_stats", "view", "reward_batch_size",
    "reference_key", "incomplete_groups", "group_timeout_s",
}  # fmt: skip
"""Fields about how agentenv runs. Nothing in OpenRLHF depends on them, or `check_launch` looks at them."""
SHIPPED = ("math_retry", "guess_number", "code_sandbox", "verify")
"""Environments for which the repository has an agent_func.py of the same name."""


@dataclass(frozen=True)
class LaunchConfig(TrainConfig):
    """Print the OpenRLHF command for the same training. Arguments after -- are appended unchanged."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        **TrainConfig.ALIASES,
        **{dotted: name for name, dotted in PLACEMENT.items()},
    }

    data: str = "word_problems_train"
    """Tasks: FILE.jsonl, FILE.parquet, a Hugging Face dataset id, or a built-in name. The file, which is not loaded
    here, does not change the default."""
    version: str = VERSIONS[-1]
    """OpenRLHF's version: 0.11.0, 0.11.1 or 0.11.2."""
    actor_num_nodes: int = 1
    """Nodes for training."""
    actor_num_gpus_per_node: int = 8
    """GPUs per node for training. The reference model and the critic get as many."""
    colocate_all_models: bool = False
    """Put all models on the same GPUs; without --async_train the engines too."""
    job_address: str = "http://127.0.0.1:8265"
    """Address of Ray's job server."""
    credit: Literal["turn", "episode"] = "episode"
    """OpenRLHF supports only `episode`: the sum of an episode's rewards."""


def command(config: LaunchConfig, more: Sequence[str] = ()) -> list[str]:
    """Return the arguments of OpenRLHF's `train_ppo_ray`, with `more` at the end. Each flag begins with --."""
    flags: list[str] = []
    for name, dotted in DOTTED.items():
        value = _value(config, name)
        if not _is_needed(config, name, value):
            continue
        flags += _flag(dotted, value)
        if name in CRITIC_TOO and config.advantage_estimator == "gae":
            flags += _flag(dotted.replace("actor.", "critic.", 1), value)
    kind, prefix = config.is_correction, "algo.advantage.is_correction_"
    if kind != "off":
        if config.version == "0.11.2":
            level, mode = LEVEL_AND_MODE[kind]
            flags += [*_flag(prefix + "level", level), *_flag(prefix + "mode", mode)]
        else:
            flags += [*_flag(prefix + "enable", True), *_flag(prefix + "type", kind)]
        flags += _flag(prefix + "threshold", config.is_correction_threshold)
    # Nodes and GPUs of each model that is loaded for training.
    models = ["actor"] + ["ref"] * (config.init_kl_coef > 0) + ["critic"] * (config.advantage_estimator == "gae")
    for field in ("actor_num_nodes", "actor_num_gpus_per_node"):
        if getattr(config, field) != DEFAULTS[field]:
            for model in models:
                flags += _flag(PLACEMENT[field].replace("actor", model, 1), getattr(config, field))
    if config.colocate_all_models:
        flags += _flag(PLACEMENT["colocate_all_models"], True)
    return [*flags, *more]


def shell(config: LaunchConfig, more: Sequence[str] = ()) -> str:
    """Return the whole command for a shell, one flag per line."""
    submit = ["ray", "job", "submit", f"--address={config.job_address}"]
    if config.actors.ray_runtime_env:
        submit.append(f"--runtime-env-json={json.dumps(dict(config.actors.ray_runtime_env))}")
    lines = [shlex.join(submit), shlex.join(["--", *ENTRY])]
    for argument in command(config, more):
        if argument.startswith("--"):
            lines.append(argument)
        else:
            lines[-1] += f" {shlex.quote(argument)}"
    return " \\\n    ".join(lines) + "\n"


def _is_needed(config: LaunchConfig, name: str, value: Any) -> bool:
    """Return True if OpenRLHF's default differs from the value and OpenRLHF would read the flag."""
    if value is None or value is False or (name in ONLY_WITH and not config.flags()[ONLY_WITH[name]]):
        return False
    if name in FOR_GAE and config.advantage_estimator != "gae":
        return False
    if name == "eps_clip" and config.eps_clip_low_high is not None:
        return False
    if name == "param_dtype" and value == "auto":
        return False
    if name == "loss_agg_mode" and config.version != "0.11.2":
        return False  # 0.11.2 added the flag
    return name == "max_length" or bool(value != DEFAULTS.get(name, ...))


def _value(config: LaunchConfig, name: str) -> Any:
    """Return the value of a field for OpenRLHF: paths instead of the names of shipped models and datasets."""
    if name == "train_batch_size":
        return config.optimizer_batch_size
    value: Any = config.max_length if name == "max_length" else config.flags()[name]
    if name == "eval_dataset":
        value = next(iter(value), None)  # `check_launch` refuses several
    if value is None:
        return None
    if name == "lr_scheduler" and value == "constant" and config.lr_warmup_ratio > 0:
        return "constant_with_warmup"
    if name in ("data", "eval_dataset", "model", "critic_pretrain"):
        from agentenv.engines.models import resolve_model, shipped_models
        from agentenv.episode.registry import builtin_datasets

        is_model = value in shipped_models()
        return _path(config, resolve_model(value) if is_model else str(builtin_datasets().get(value, value)))
    if name in ("agent_func_path", "remote_rm_url"):
        return _path(config, value)
    if name in ("out", "ckpt_path", "use_tensorboard"):
        return str(Path(value).expanduser().absolute())  # a relative path would end in the job's temporary folder
    return value


def _path(config: LaunchConfig, text: str) -> str:
    """Return an existing file's absolute path, unless Ray uploads the working directory."""
    uploads = "working_dir" in config.actors.ray_runtime_env
    return str(Path(text).absolute()) if Path(text).exists() and not uploads else text


def _flag(name: str, value: Any) -> list[str]:
    if value is True:
        return [f"--{name}"]
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [f"--{name}", *(str(each) for each in values)]


# --- what a release cannot do -----------------------------------------------------------------------------------------


def check_launch(config: LaunchConfig) -> None:
    """Check that the release supports every flag.

    Raises:
        ConfigError: the version is unknown, or flags are unsupported. The message lists all of them.
    """
    if config.version not in VERSIONS:
        raise ConfigError(f"--version: expected one of {', '.join(VERSIONS)}, got {config.version!r}. Choose one.")
    for name in ("actor_num_nodes", "actor_num_gpus_per_node"):
        value = getattr(config, name)
        if value < 1:
            raise ConfigError(f"--{name}: expected an integer >= 1, got {value!r}. Change the value.")
    problems = []
    loss, penalty = config.loss_agg_mode, config.stop_properly_penalty_coef
    # What later releases support: condition, flag, expected value, actual value, first release.
    later: tuple[_Rule, ...] = (
        (penalty is not None and config.agent_func_path, "stop_properly_penalty_coef",
            "none with agents of several turns", "a value", "0.11.1"),
        (loss != "token-mean" and config.policy_loss_type == "ppo", "loss_agg_mode", "token-mean", loss, "0.11.2"),
        (config.advantage_estimator == "flash_reinforce", "advantage_estimator", "another one", "flash_reinforce",
            "0.11.2"),
    )  # fmt: skip
    for unsupported, flag, expected, got, first in later:
        if unsupported and VERSIONS.index(config.version) < VERSIONS.index(first):
            what = f"expected {expected} for OpenRLHF {config.version}, got {got}"
            problems.append(f"--{flag}: {what}. Use --version {first} or later.")
    for unsupported, flag, expected, got, remedy in _all_releases(config):
        if unsupported:
            problems.append(f"--{flag}: expected {expected} for OpenRLHF, got {got}. {remedy}")
    if problems:
        raise ConfigError(" ".join(problems))


_Rule = tuple[object, str, str, object, str]


def _all_releases(config: LaunchConfig) -> tuple[_Rule, ...]:
    """Return what no release supports: condition, flag, expected value, actual value, remedy."""
    env, stale = source_name(config.env), config.max_staleness
    passes = config.rollout_batch_size * (config.max_train_steps or 0)
    groups = config.num_samples // config.micro_rollout_batch_size
    gpus = config.actor_num_nodes * config.actor_num_gpus_per_node
    engines = config.num_engines * config.vllm_tensor_parallel_size
    shared = config.colocate_all_models and not config.async_train
    new_file = "Name a file with a class AgentExecutor, which `agentenv new FILE.py --env ENV` writes"
    agent_func = f", such as agent_funcs/{env}.py in agentenv's repository" if env in SHIPPED else ""
    return (
        (env, "env", "--agent_func_path instead", "--env", f"{new_file}{agent_func}."),
        (config.credit == "turn", "credit", "episode", "turn", "It sums the rewards of an episode on its last action."),
        (config.param_dtype == "fp32", "param_dtype", "bf16 or fp16", "fp32", "Choose one of them."),
        (config.engine == "hf", "engine", "auto or vllm", "hf", "It samples with vLLM only."),
        (not config.ray, "no_ray", "Ray", "none", "Leave --no_ray out."),
        (config.loss_agg_mode == "seq-mean-token-sum-norm", "loss_agg_mode", "token-mean or seq-mean-token-mean",
            config.loss_agg_mode, "Choose one of them."),
        (config.groups.group_reward is not None, "group_reward", "no reward of groups", config.groups.group_reward,
            "Its agents see one episode; use `agentenv train`, or verl with agentenv's reward manager."),
        (len(config.eval_dataset) > 1, "eval_dataset", "one set", " ".join(config.eval_dataset), "Choose one of them."),
        (config.curriculum, "curriculum", "none", config.curriculum, "It trains on one data set; leave the flag out."),
        (config.trackers.use_mlflow, "use_mlflow", "--use_wandb or --use_tensorboard", "MLflow", "Use one of those."),
        (config.trackers.use_trackio, "use_trackio", "--use_wandb or --use_tensorboard", "trackio",
            "Use one of those."),
        (config.max_train_steps is not None, "max_train_steps", "none", config.max_train_steps,
            f"It counts tasks and passes: use --limit {passes} --num_episodes 1."),
        (stale is not None and stale < config.async_queue_size, "max_staleness", "at least --async_queue_size",
            stale, "Only the length of the queue bounds staleness; shorten the queue."),
        (groups < gpus, "micro_rollout_batch_size", f"at most {config.num_samples // gpus} with {gpus} training GPUs",
            config.micro_rollout_batch_size, "Lower it, or use fewer GPUs, so that every GPU gets samples."),
        (shared and gpus != engines, "colocate_all_models", "as many GPUs for engines as for training",
            f"{engines} and {gpus}", "Change --num_engines or --actor_num_gpus_per_node."),
        (config.vllm_enable_sleep and not config.colocate_all_models, "vllm_enable_sleep",
            "--colocate_all_models with it", "none", "Add it."),
    )  # fmt: skip


# --- warnings ---------------------------------------------------------------------------------------------------------


def warnings(config: LaunchConfig) -> list[str]:
    """Return known defects of the release that concern these flags, and flags that only the agent's file can set."""
    at = VERSIONS.index(config.version)
    defects = [
        f"OpenRLHF {config.version}: {text}"
        for last, concerns, text in _DEFECTS
        if concerns(config) and at <= VERSIONS.index(last)
    ]
    flags, defaults = config.flags(), LaunchConfig().flags()
    in_the_file = [
        f"OpenRLHF does not have --{name}: set `{attribute}` in the file's AgentExecutor."
        for name, attribute in IN_THE_FILE.items()
        if flags[name] != defaults[name]
    ]
    paths = {name: flags[name] for name in ("agent_func_path", "remote_rm_url", "data")}
    paths["eval_dataset"] = next(iter(config.eval_dataset), None)
    missing = [
        f"--{name}: {path} does not exist here; the job needs it where it runs."
        for name, path in paths.items()
        if path is not None and path.endswith((".py", ".jsonl", ".parquet")) and not Path(path).expanduser().is_file()
    ]
    if lost := _lost_columns(config):
        missing.append(
            f"--data: OpenRLHF passes the prompt and the label of a row; its environments do not get {', '.join(lost)}."
        )
    if config.actors.env_actors:
        missing.append(
            f"--env_actors {config.actors.env_actors}: OpenRLHF runs environments in the agents' processes; it has no "
            "actors for them."
        )
    return defects + in_the_file + missing


def _lost_columns(config: LaunchConfig) -> list[str]:
    """Return the columns of the data's first row that no environment gets, if the file is here."""
    path = Path(config.data).expanduser()
    if path.suffix != ".jsonl" or not path.is_file():
        return []
    with path.open("rb") as file:
        try:
            row = json.loads(file.readline())
        except ValueError:
            return []
    used = {config.prompt_key, config.label_key, "images", "datasource"}
    return [name for name in row if name not in used] if isinstance(row, dict) else []


def _lacks_images(path: str | None) -> bool:
    """Return True if an `execute` method in the file does not accept `images`, or the file cannot be read."""
    if path is None:
        return False
    try:
        tree = ast.parse(Path(path).expanduser().read_bytes())
    except (OSError, SyntaxError, ValueError):
        return True
    methods = [each for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body]
    for method in methods:
        if isinstance(method, ast.AsyncFunctionDef | ast.FunctionDef) and method.name == "execute":
            named = [each.arg for each in (*method.args.args, *method.args.kwonlyargs)]
            if method.args.kwarg is None and "images" not in named:
                return True
    return False


def _has_addresses(config: LaunchConfig) -> bool:
    return "," in (config.remote_rm_url or "")


def _oversamples(config: LaunchConfig) -> bool:
    return (config.vllm_generate_batch_size or 0) > config.rollout_batch_size


_DEFECTS: tuple[tuple[str, Callable[[LaunchConfig], object], str], ...] = (
    ("0.11.2", lambda c: c.agent_func_path and c.max_tokens is not None,
        "--max_tokens: MultiTurnAgentExecutor reserves room by it and does not limit a turn; agentenv's "
        "AgentExecutor does."),
    ("0.11.2", lambda c: _lacks_images(c.agent_func_path),
        "--agent_func_path: execute() is called with images=; the method in the file must accept it."),
    ("0.11.0", _has_addresses,
        "--remote_rm_url: all addresses except the first get empty requests, and their rewards are lost. Name one, or "
        "use --version 0.11.2."),
    ("0.11.1", lambda c: _has_addresses(c) and c.version != "0.11.0",
        "--remote_rm_url: only the first address is used. Fixed in 0.11.2."),
    ("0.11.0", lambda c: c.dynamic_filtering,
        "--dynamic_filtering: groups that were already accepted are lost when the data ends. Fixed in 0.11.1."),
    ("0.11.0", _oversamples,
        "--vllm_generate_batch_size: samples generated ahead are drawn again after a restart. Fixed in 0.11.1."),
    ("0.11.2", _oversamples,
        "--vllm_generate_batch_size: samples generated ahead are not in checkpoints, and are older than "
        "--async_queue_size allows."),
    ("0.11.0", lambda c: c.is_correction == "icepop",
        "--is_correction icepop: NaN if a ratio overflows. Fixed in 0.11.1."),
    ("0.11.2", lambda c: c.partial_rollout and c.enable_prefix_caching,
        "--partial_rollout: the prefix cache may keep blocks that were computed with old weights. Add "
        "--no_enable_prefix_caching."),
    ("0.11.2", lambda c: c.async_train and c.eval_dataset,
        "--eval_dataset: with --async_train its metrics, and the best checkpoint, belong to the next step's weights."),
    ("0.11.2", lambda c: c.agent_func_path and c.overlong_buffer_len,
        "--overlong_buffer_len: the environment's replies count towards the length."),
    ("0.11.2", lambda c: c.agent_func_path and c.advantage_estimator == "gae" and (c.lambd < 1 or c.gamma < 1),
        "--lambd and --gamma: below 1 they also discount over the environment's tokens."),
    ("0.11.0", lambda c: c.use_kl_loss and c.kl_estimator != "k2",
        "--use_kl_loss: its gradient is not that of the divergence; with k1 its mean is 0. Use --kl_estimator k2."),
    ("0.11.2", lambda c: c.use_kl_loss and c.version != "0.11.0",
        "--use_kl_loss: its gradient is that of the divergence only with `-- --algo.kl.unbiased_gradient`."),
    ("0.11.2", lambda c: c.top_p < 1,
        "--top_p: the learner's log-probabilities ignore the cut, so the first ratio is not 1."),
)  # fmt: skip
"""The last release with a defect, the flags that it concerns, and the text of the warning."""


def covered() -> set[str]:
    """Return the fields that are printed, refused or warned about. A test compares them with all fields."""
    by_rule = {
        "group_reward",
        "env",
        "env_kwargs",
        "credit",
        "engine",
        "ray",
        "use_mlflow",
        "use_trackio",
        "max_train_steps",
        "curriculum",
    }
    return (
        DOTTED.keys() | IN_THE_FILE.keys() | ONLY_AGENTENV | by_rule | PLACEMENT.keys()
        | {"is_correction", "is_correction_threshold", "version", "job_address"}
    )  # fmt: skip
