"""`agentenv launch openrlhf`: the command line that trains as a TrainConfig says, for one version of OpenRLHF.

`launch_limits.py` knows what a version cannot do and where it is known to go wrong.
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentenv.config import parse_json_object
from agentenv.errors import ConfigError
from agentenv.trainer.config import TrainConfig
from agentenv.trainer.config_checks import FOR_GAE
from agentenv.trainer.launch_limits import refuse, traps
from agentenv.trainer.openrlhf_flags import CRITIC_TOO, DEFAULTS, DOTTED, DOTTED_SINCE, PLACEMENT, SINCE, VERSIONS

ENTRY = ("python3", "-m", "openrlhf.cli.train_ppo_ray")
ONLY_WITH = {
    "eval_split": "eval_dataset", "eval_steps": "eval_dataset", "eval_temperature": "eval_dataset",
    "eval_n_samples_per_prompt": "eval_dataset", "lora_alpha": "lora_rank", "lora_dropout": "lora_rank",
    "target_modules": "lora_rank", "overlong_penalty_factor": "overlong_buffer_len", "kl_estimator": "init_kl_coef",
    "train_max_tokens_per_gpu": "use_dynamic_batch", "dynamic_filtering_reward_range": "dynamic_filtering",
    "wandb_org": "use_wandb", "wandb_group": "use_wandb", "wandb_project": "use_wandb", "wandb_run_name": "use_wandb",
}  # fmt: skip
"""Flags that OpenRLHF reads only where another one is set."""
BY_ERA = ("max_len", "max_new_tokens", "param_dtype")
"""Fields whose flags changed with more than their names."""
LEVEL_AND_MODE = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}


@dataclass(frozen=True)
class LaunchConfig(TrainConfig):
    """Print the command that trains the same with OpenRLHF. What follows -- is added to it as it is."""

    version: str = VERSIONS[-1]
    """OpenRLHF's version: 0.8.9 to 0.11.2, or 0.9.x for the last of its kind."""
    actor_num_nodes: int = 1
    actor_num_gpus_per_node: int = 8
    """GPUs that train; the reference model and the critic get as many."""
    colocate_all_models: bool = False
    """They share their GPUs, with the engines too without --async_train."""
    job_address: str = "http://127.0.0.1:8265"
    """Where Ray takes jobs."""
    credit: Literal["turn", "episode"] = "episode"
    """OpenRLHF knows only episode: all rewards of an episode, summed."""

    def __post_init__(self) -> None:
        """Refuse also what the version cannot do."""
        super().__post_init__()
        for name in ("actor_num_nodes", "actor_num_gpus_per_node"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"--{name}: expected an integer >= 1, got {value!r}. Change the value.")
        refuse(self, self.release)

    @property
    def release(self) -> str:
        """The release that --version means."""
        text = self.version.removeprefix("v")
        if text in VERSIONS:
            return text
        series = text.removesuffix(".x")
        of_series = [version for version in VERSIONS if f"{version}.".startswith(f"{series}.")]
        if of_series and "." in series:
            return of_series[-1]
        close = difflib.get_close_matches(text, VERSIONS, n=1)
        meant = f"Did you mean {close[0]}?" if close else "Name one of them, or 0.9.x for the last of its kind."
        raise ConfigError(
            f"--version: expected a release of OpenRLHF from {VERSIONS[0]} to {VERSIONS[-1]}, got {self.version!r}. "
            + meant
        )

    @property
    def dotted(self) -> bool:
        """Whether its flags have dots."""
        return VERSIONS.index(self.release) >= VERSIONS.index(DOTTED_SINCE)

    def warnings(self) -> list[str]:
        """What is known to go wrong in this version with these flags, and what the file has to say instead of them."""
        return traps(self, self.release)


def command(config: LaunchConfig, more: Sequence[str] = ()) -> list[str]:
    """Arguments of OpenRLHF's `train_ppo_ray`, `more` of them last; each flag begins with --."""
    flags: list[str] = []
    for name in DOTTED:
        value = _value(config, name)
        if name in BY_ERA or not _is_said(config, name, value):
            continue
        flags += _flag(DOTTED[name] if config.dotted else name, value)
        if name in CRITIC_TOO and config.dotted and config.advantage_estimator == "gae":
            flags += _flag(DOTTED[name].replace("actor.", "critic.", 1), value)
    for name, value in (*_lengths(config), *_dtype(config), *_correction(config), *_placement(config)):
        flags += _flag(name, value)
    return [*flags, *more]


def shell(config: LaunchConfig, more: Sequence[str] = ()) -> str:
    """The whole command as one that a shell takes, one flag per line."""
    submit = ["ray", "job", "submit", f"--address={config.job_address}"]
    runtime = parse_json_object("--ray_runtime_env", config.ray_runtime_env)
    if runtime:
        submit.append(f"--runtime-env-json={json.dumps(runtime)}")
    lines = [shlex.join(submit), shlex.join(["--", *ENTRY])]
    for argument in command(config, more):
        if argument.startswith("--"):
            lines.append(argument)
        else:
            lines[-1] += f" {shlex.quote(argument)}"
    return " \\\n    ".join(lines) + "\n"


def _is_said(config: LaunchConfig, name: str, value: Any) -> bool:
    """Whether OpenRLHF has to be told: it would take another value by itself, and it matters."""
    if value is None or value is False or (name in ONLY_WITH and not getattr(config, ONLY_WITH[name])):
        return False
    if name in FOR_GAE and config.advantage_estimator != "gae":
        return False
    if name == "eps_clip" and config.eps_clip_low_high is not None:
        return False
    default = DEFAULTS.get(name, ...)
    since = VERSIONS.index(SINCE.get(name, VERSIONS[0]))
    return bool(value != default) and VERSIONS.index(config.release) >= since


def _value(config: LaunchConfig, name: str) -> Any:
    """A field's value as OpenRLHF needs it: names of what ships with the package are paths there."""
    if name == "train_batch_size":
        return config.optimizer_batch_size
    value = getattr(config, name)
    if name == "lr_scheduler" and value == "constant" and config.lr_warmup_ratio > 0:
        return "constant_with_warmup"
    if name in ("prompt_data", "eval_dataset", "pretrain", "critic_pretrain") and value is not None:
        return _path(config, _shipped(value))
    if name in ("agent_func_path", "remote_rm_url") and value is not None:
        return _path(config, value)
    if name in ("save_path", "ckpt_path", "use_tensorboard") and value is not None:
        return str(Path(value).expanduser().absolute())  # else in the folder that Ray makes for the job
    return value


def _shipped(name: str) -> str:
    from agentenv.loading import builtin_datasets, resolve_model, shipped_models

    if name in shipped_models():
        return resolve_model(name)
    return str(builtin_datasets().get(name, name))


def _path(config: LaunchConfig, text: str) -> str:
    """A file as the job finds it: absolute, unless Ray takes the folder there."""
    travels = "working_dir" in parse_json_object("--ray_runtime_env", config.ray_runtime_env)
    return str(Path(text).absolute()) if Path(text).exists() and not travels else text


def _flag(name: str, value: Any) -> list[str]:
    if value is True:
        return [f"--{name}"]
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [f"--{name}", *(str(each) for each in values)]


_Flags = Iterator[tuple[str, Any]]


def _has(config: LaunchConfig, first: str) -> bool:
    return VERSIONS.index(config.release) >= VERSIONS.index(first)


def _lengths(config: LaunchConfig) -> _Flags:
    """Room for prompt and answer, together or apart."""
    if not _has(config, "0.9.8"):
        answer = config.max_new_tokens or config.max_len // 2
        yield "prompt_max_len", config.max_len - answer
        yield "generate_max_len", answer
        return
    answer_unset = config.max_new_tokens is None
    yield (DOTTED["max_len"] if config.dotted else "max_len"), config.max_len
    if not answer_unset:
        yield (DOTTED["max_new_tokens"] if config.dotted else "max_new_tokens"), config.max_new_tokens
    elif config.agent_func_path and not config.dotted:
        yield "max_new_tokens", config.max_len // 2  # left out, its own loop over turns fails


def _dtype(config: LaunchConfig) -> _Flags:
    if _has(config, SINCE["param_dtype"]):
        if config.param_dtype != "auto":
            yield (DOTTED["param_dtype"] if config.dotted else "param_dtype"), config.param_dtype
    elif config.param_dtype != "fp32":
        yield "bf16", True


def _correction(config: LaunchConfig) -> _Flags:
    """What the ratio of learner and engine is corrected by, in the words of five generations."""
    kind, (low, high) = config.is_correction, config.is_correction_threshold
    if kind == "off":
        return
    if config.dotted:
        prefix = "algo.advantage.is_correction_"
        if _has(config, "0.11.2"):
            yield from zip((prefix + "level", prefix + "mode"), LEVEL_AND_MODE[kind], strict=True)
        else:
            yield from ((prefix + "enable", True), (prefix + "type", kind))
        yield prefix + "threshold", (low, high)
        return
    yield "enable_vllm_is_correction", True
    yield "vllm_is_truncated_threshold", (low, high) if _has(config, "0.9.1") else high
    if _has(config, "0.9.3"):
        yield "vllm_is_correction_type", kind
    elif kind == "icepop":
        yield "use_icepop", True


def _placement(config: LaunchConfig) -> _Flags:
    """Nodes and GPUs of the models that train, and of those beside them."""
    names = {name: (dotted if config.dotted else name) for name, dotted in PLACEMENT.items()}
    models = ["actor"] + ["ref"] * (config.init_kl_coef > 0) + ["critic"] * (config.advantage_estimator == "gae")
    for field in ("actor_num_nodes", "actor_num_gpus_per_node"):
        if getattr(config, field) != DEFAULTS[field]:
            yield from ((names[field].replace("actor", model, 1), getattr(config, field)) for model in models)
    if config.colocate_all_models:
        yield names["colocate_all_models"], True
