"""Any spelling of a flag to the one of TrainConfig: OpenRLHF's dotted and older names, and those of `agentenv run`.

What comes out is for the parser of frozen configs (`cli_flags.parse`); a flag of nobody is answered with the nearest.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from agentenv.config import ALIASES as BOTH_HAVE
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.trainer.openrlhf_flags import DOTTED, NO_COUNTERPART, PLACEMENT

OF_RUN = {
    "prompt_key": "input_key",
    "max_turns": "max_steps",
    "max_length": "max_len",
    "max_tokens": "max_new_tokens",
    "model": "pretrain",
    "data": "prompt_data",
    "split": "prompt_split",
    "limit": "max_samples",
    "n": "n_samples_per_prompt",
    "out": "save_path",
    "resume": "load_checkpoint",
    "num_engines": "vllm_num_engines",
}
"""Names that `agentenv run` has for the same."""
ALIASES: Mapping[str, str] = {dotted: name for name, dotted in (DOTTED | PLACEMENT).items()} | OF_RUN | BOTH_HAVE
"""Other names of the fields."""
MEANT = {
    "lr": "actor_learning_rate",
    "batch_size": "train_batch_size",
    "kl_coef": "init_kl_coef",
    "num_generations": "n_samples_per_prompt",
    "epochs": "num_episodes",
}
"""What names of other trainers would be here, for the answer to a wrong flag."""
VALUES = {"grpo": "group_norm", "reinforce++": "reinforce", "reinforce++-baseline": "reinforce_baseline"}
"""Names that papers have for --advantage_estimator."""

LENGTHS = ("prompt_max_len", "generate_max_len")
"""OpenRLHF's until 0.9.7: an episode has their sum, and an answer the second."""
SWITCHES = ("enable_vllm_is_correction", "algo.advantage.is_correction_enable")
BARE = (*SWITCHES, "use_icepop", "bf16")
"""Names of older versions that take no value: to be there is to be on."""
TYPES = ("vllm_is_correction_type", "algo.advantage.is_correction_type")
THRESHOLDS = ("vllm_is_truncated_threshold", "algo.advantage.is_correction_threshold")
LEVEL, MODE, GATING = (f"algo.advantage.is_correction_{name}" for name in ("level", "mode", "gating"))
CORRECTION = (*SWITCHES, "use_icepop", *TYPES, *THRESHOLDS, LEVEL, MODE, GATING)
"""Flags that together say `is_correction` and its threshold, in four generations."""
BY_LEVEL = {("token", "clip"): "tis", ("token", "mask"): "icepop", ("seq", "mask"): "seq-mask-tis"}
"""0.11.2's level and mode: the name that they had before."""

_Group = tuple[str, list[str]]


def resolve(args: Sequence[str], config: type[Any], *, command: str = "train") -> list[str]:
    """The arguments with each flag by the name of its field in `config`.

    Raises:
        ConfigError: a flag that nobody has, that has no counterpart here, or that was given by two names.
    """
    head, groups = _split(args)
    groups = [(_field(flag, config, command), values) for flag, values in groups]
    for flag, values in groups:
        if flag in BARE and values:
            raise ConfigError(
                f"--{flag}: expected no value, got {values[0]!r}. Leave it out; without the flag it is off."
            )
    groups = _correction(_lengths(groups))
    given: dict[str, str] = {}
    resolved = list(head)
    for flag, values in groups:
        name = "param_dtype" if flag == "bf16" else ALIASES.get(flag, flag)
        if given.setdefault(name, flag) != flag:
            raise ConfigError(
                f"--{flag}: expected one name, got --{given[name]} as well, which means the same. Leave one out."
            )
        if name == "advantage_estimator":
            values = [VALUES.get(value, value) for value in values]
        values = ["bf16"] if flag == "bf16" else values
        resolved += [f"--{name}", *(values or (["True"] if name == "use_wandb" else []))]
    return resolved


@contextlib.contextmanager
def own_words(**more: str) -> Iterator[None]:
    """Errors of what `agentenv run` does too name the flags of `train`; `more` are names that mean others here."""
    try:
        yield
    except AgentEnvError as error:
        error.args = (worded(str(error), **more),)
        raise


def worded(message: str, **more: str) -> str:
    """A message about flags of `agentenv run`, with those that `train --help` shows."""
    names = OF_RUN | more
    said = re.sub(r"(?<![\w-])--(\w+)", lambda found: f"--{names.get(found[1], found[1])}", message)
    return re.sub(r"^run: ", "train: ", said)


def _split(args: Sequence[str]) -> tuple[list[str], list[_Group]]:
    """What comes before the first flag, then each flag with its values."""
    head: list[str] = []
    groups: list[_Group] = []
    for arg in args:
        if arg.startswith("--"):
            name, equals, value = arg[2:].partition("=")
            groups.append((name.replace("-", "_"), [value] if equals else []))
        else:
            (groups[-1][1] if groups else head).append(arg)
    return head, groups


def _field(flag: str, config: type[Any], command: str) -> str:
    """The flag, where something here has that name."""
    switches = {field.name for field in fields(config) if field.type in ("bool", bool)}
    known = {field.name for field in fields(config)} | {f"no_{name}" for name in switches}
    others = {name for name, field in ALIASES.items() if field in known} | {*LENGTHS, *CORRECTION, "bf16"}
    if flag in known | others | {"help"}:
        return flag
    if flag in NO_COUNTERPART:
        mend = "Put it after --, which passes it on." if command.startswith("launch") else "Leave it out."
        raise ConfigError(f"--{flag}: expected a flag of agentenv {command}, got one that only OpenRLHF has. {mend}")
    close = [MEANT[flag]] if flag in MEANT else difflib.get_close_matches(flag, sorted(known | others), n=1)
    meant = close or [name for name in sorted(known) if len(flag) > 2 and flag in name]
    mend = f"Did you mean --{meant[0]}?" if meant else f"Run `agentenv {command} --help` for the flags."
    raise ConfigError(f"agentenv {command}: expected one of its flags, got --{flag}. {mend}")


def _lengths(groups: list[_Group]) -> list[_Group]:
    """Prompt and answer, each with its bound, as the bound of both together and that of an answer."""
    lengths = {flag: values for flag, values in groups if flag in LENGTHS}
    if not lengths:
        return groups
    bounds = []
    for name in LENGTHS:
        value = (lengths.get(name) or ["1024"])[0]  # what OpenRLHF took where it was left out
        if not value.isdigit():
            raise ConfigError(f"--{name}: expected a number of tokens, got {value!r}. Change the value.")
        bounds.append(int(value))
    for flag, _ in groups:
        if ALIASES.get(flag, flag) in ("max_len", "max_new_tokens"):
            raise ConfigError(
                f"--{flag}: expected no --{next(iter(lengths))} beside it, got both. Keep --{flag}, the newer name."
            )
    both = [("max_len", [str(sum(bounds))]), ("max_new_tokens", [str(bounds[1])])]
    return [*both, *(group for group in groups if group[0] not in LENGTHS)]


def _correction(groups: list[_Group]) -> list[_Group]:
    """Flags of any version about the correction, as `is_correction` and `is_correction_threshold`."""
    said = {flag: values for flag, values in groups if flag in CORRECTION}
    rest = [group for group in groups if group[0] not in CORRECTION]
    if not said:
        return rest
    for flag, _ in rest:
        if flag.startswith("is_correction"):
            raise ConfigError(
                f"--{flag}: expected no --{next(iter(said))} beside it, got both. They say the same: leave one out."
            )
    kind = _kind(said)
    rest.append(("is_correction", [kind]))
    for name in THRESHOLDS:
        values = said.get(name, [])
        if values:
            low = ["0"] if len(values) == 1 else []  # a single value was, and is again, the upper bound
            rest.append(("is_correction_threshold", [*low, *values]))
    return rest


def _kind(said: Mapping[str, list[str]]) -> str:
    """The name of the correction that a version's flags describe."""
    first = {flag: values[0] if values else "" for flag, values in said.items()}
    if first.get(GATING, "ratio") != "ratio":
        raise ConfigError(f"--{GATING}: expected 'ratio', got {first[GATING]!r}. `train` has no flag for another.")
    if LEVEL in first:
        level, mode = first[LEVEL], first.get(MODE, "mask")
        if level != "off" and (level, mode) not in BY_LEVEL:
            raise ConfigError(
                f"--{LEVEL}: expected off, token, or seq with mode mask, got {level!r} with mode {mode!r}. "
                "Change one of them."
            )
        return BY_LEVEL.get((level, mode), "off")
    if not any(name in first for name in SWITCHES):
        name = next(iter(first))
        switch = LEVEL if name in (MODE, GATING) else SWITCHES[name.startswith("algo.")]
        raise ConfigError(f"--{name}: expected --{switch} beside it, got none. Add it, or leave --{name} out.")
    if "use_icepop" in first:
        return "icepop"
    kind = next((first[name] for name in TYPES if name in first), "tis")
    return "seq-mask-tis" if kind == "mis" else kind
