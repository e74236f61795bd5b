"""Translate every accepted spelling of a flag to its field in TrainConfig.

Accepted are the names of `agentenv run`, OpenRLHF's flat names and the dotted names of OpenRLHF 0.11.x.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentenv.errors import AgentEnvError, ConfigError
from agentenv.runs.flat_config import ALIASES as RUN_ALIASES
from agentenv.runs.flat_config import flag_fields
from agentenv.training.openrlhf_flags import DOTTED, NO_COUNTERPART, PLACEMENT

RUN_NAMES = {
    "prompt_key": "input_key",
    "model": "pretrain",
    "data": "prompt_data",
    "split": "prompt_split",
    "limit": "max_samples",
    "n": "n_samples_per_prompt",
    "out": "save_path",
    "resume": "load_checkpoint",
    "num_engines": "vllm_num_engines",
}
"""Flags of `agentenv run` that are named differently here."""
FLAT = {"max_steps": "max_turns", "max_len": "max_length", "max_new_tokens": "max_tokens"}
"""OpenRLHF's flat names that differ from the names of the fields."""
ALIASES: Mapping[str, str] = (
    {dotted: name for name, dotted in (DOTTED | PLACEMENT).items()} | FLAT | RUN_NAMES | RUN_ALIASES
)
"""Other names of the fields."""
SUGGESTIONS = {
    "lr": "actor_learning_rate",
    "batch_size": "train_batch_size",
    "kl_coef": "init_kl_coef",
    "num_generations": "n_samples_per_prompt",
    "epochs": "num_episodes",
}
"""Fields to suggest for flag names of other trainers."""
VALUES = {"grpo": "group_norm", "reinforce++": "reinforce", "reinforce++-baseline": "reinforce_baseline"}
"""Names of --advantage_estimator in papers."""

_PREFIX = "algo.advantage.is_correction_"
SWITCH, KIND, THRESHOLD, LEVEL, MODE, GATING = (
    f"{_PREFIX}{name}" for name in ("enable", "type", "threshold", "level", "mode", "gating")
)
CORRECTION = (SWITCH, KIND, THRESHOLD, LEVEL, MODE, GATING)
"""Flags that together set `is_correction` and its threshold: enable and type until 0.11.1, level and mode in 0.11.2."""
BY_LEVEL = {("token", "clip"): "tis", ("token", "mask"): "icepop", ("seq", "mask"): "seq-mask-tis"}
"""Values of is_correction for each level and mode."""

_Group = tuple[str, list[str]]


def resolve(args: Sequence[str], config: type[Any], *, command: str = "train") -> list[str]:
    """Return the arguments with each flag replaced by the name of its field in `config`.

    Raises:
        ConfigError: a flag is unknown, has no counterpart here, or is given under two names.
    """
    head: list[str] = []
    groups: list[_Group] = []
    for arg in args:
        if arg.startswith("--"):
            flag, equals, value = arg[2:].partition("=")
            groups.append((flag.replace("-", "_"), [value] if equals else []))
        else:
            (groups[-1][1] if groups else head).append(arg)
    for flag, _ in groups:
        _check_known(flag, config, command)
    names: dict[str, str] = {}
    resolved = list(head)
    for flag, values in _translate_correction(groups):
        name = ALIASES.get(flag, flag)
        if names.setdefault(name, flag) != flag:
            raise ConfigError(
                f"--{flag}: expected one name, got --{names[name]} as well, which means the same. Leave one out."
            )
        if name == "advantage_estimator":
            values = [VALUES.get(value, value) for value in values]
        resolved += [f"--{name}", *(values or (["True"] if name == "use_wandb" else []))]
    return resolved


@contextlib.contextmanager
def with_train_flags(**more: str) -> Iterator[None]:
    """Replace flag names of `agentenv run` in errors by those of `train`; `more` adds names."""
    try:
        yield
    except AgentEnvError as error:
        error.args = (rename_flags(str(error), **more),)
        raise


def rename_flags(message: str, **more: str) -> str:
    """Return a message with the flags of `agentenv run` replaced by those of `train`."""
    names = RUN_NAMES | more
    message = re.sub(r"(?<![\w-])--(\w+)", lambda match: f"--{names.get(match[1], match[1])}", message)
    return re.sub(r"^run: ", "train: ", message)


def _check_known(flag: str, config: type[Any], command: str) -> None:
    """Raise ConfigError with a suggestion if a flag is unknown."""
    kinds = {name: kind for name, (_, kind) in flag_fields(config).items()}
    own = kinds.keys() | {f"no_{name}" for name, kind in kinds.items() if kind is bool}
    others = {name for name, field in ALIASES.items() if field in own} | set(CORRECTION)
    if flag in own | others | {"help", "help_all"}:
        return
    if flag in NO_COUNTERPART:
        remedy = "Put it after --, which passes it on." if command.startswith("launch") else "Leave it out."
        raise ConfigError(f"--{flag}: expected a flag of agentenv {command}, got one that only OpenRLHF has. {remedy}")
    close = [SUGGESTIONS[flag]] if flag in SUGGESTIONS else difflib.get_close_matches(flag, sorted(own | others), n=1)
    close = close or [name for name in sorted(own) if len(flag) > 2 and flag in name]
    remedy = f"Did you mean --{close[0]}?" if close else f"Run `agentenv {command} --help` for the flags."
    raise ConfigError(f"agentenv {command}: expected one of its flags, got --{flag}. {remedy}")


def _translate_correction(groups: list[_Group]) -> list[_Group]:
    """Return the flags with OpenRLHF's correction flags replaced by `is_correction` and its threshold."""
    given = {flag: values for flag, values in groups if flag in CORRECTION}
    rest = [group for group in groups if group[0] not in CORRECTION]
    if not given:
        return rest
    for flag, _ in rest:
        if flag.startswith("is_correction"):
            raise ConfigError(
                f"--{flag}: expected no --{next(iter(given))} with it, got both. They set the same; leave one out."
            )
    rest.append(("is_correction", [_correction_kind(given)]))
    if THRESHOLD in given:
        rest.append(("is_correction_threshold", given[THRESHOLD]))
    return rest


def _correction_kind(given: Mapping[str, list[str]]) -> str:
    first = {flag: values[0] if values else "" for flag, values in given.items()}
    if first.get(SWITCH):
        raise ConfigError(
            f"--{SWITCH}: expected no value, got {first[SWITCH]!r}. Leave it out; without the flag it is off."
        )
    if first.get(GATING, "ratio") != "ratio":
        raise ConfigError(f"--{GATING}: expected 'ratio', got {first[GATING]!r}. `train` supports no other.")
    if LEVEL in first:
        level, mode = first[LEVEL], first.get(MODE, "mask")
        if level != "off" and (level, mode) not in BY_LEVEL:
            raise ConfigError(
                f"--{LEVEL}: expected off, token, or seq with mode mask, got {level!r} with mode {mode!r}. "
                "Change one of them."
            )
        return BY_LEVEL.get((level, mode), "off")
    if SWITCH not in first:
        flag = next(iter(first))
        needed = LEVEL if flag in (MODE, GATING) else SWITCH
        raise ConfigError(f"--{flag}: expected --{needed} with it, got none. Add it, or leave --{flag} out.")
    return first.get(KIND, "tis")
