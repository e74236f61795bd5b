"""Translate OpenRLHF's flags that are more than another name of a field of TrainConfig; refuse those without one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from agentenv.errors import ConfigError
from agentenv.runs.config_file import Given
from agentenv.runs.flat_config import flag_fields
from agentenv.training.config import TrainConfig
from agentenv.training.openrlhf_flags import NO_COUNTERPART, OLD_NAMES

SUGGESTIONS = {
    "lr": "actor_learning_rate",
    "batch_size": "train_batch_size",
    "kl_coef": "init_kl_coef",
    "num_generations": "n",
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


def translate(given: Sequence[Given]) -> list[Given]:
    """Return the flags with each one under the name of its field in TrainConfig.

    Raises:
        ConfigError: a flag is unknown, or has no counterpart here.
    """
    kinds = {name: kind for name, (_, kind) in flag_fields(TrainConfig).items()}
    own = kinds.keys() | {f"no_{name}" for name, kind in kinds.items() if kind is bool and not name.startswith("no_")}
    known = own | TrainConfig.ALIASES.keys() | set(CORRECTION)
    if ("engine", ["chat"]) in given:
        raise ConfigError(
            "--engine: expected auto, vllm or hf, got 'chat': API models return no token ids to train on. "
            "`agentenv run` runs them."
        )
    flags = [flag.removeprefix("--").replace("-", "_") for flag, _ in given]
    instead = NO_COUNTERPART | OLD_NAMES
    if foreign := dict.fromkeys(flag for flag in flags if flag in instead):
        shown = [f"--{flag}" + f" (here: --{instead[flag]})" * bool(instead[flag]) for flag in foreign]
        num_here = sum(bool(instead[flag]) for flag in foreign)
        advice = f"Leave {'them' if shown[1:] else 'it'} out"
        if num_here:
            advice = "Set those named here" + ", and leave the others out" * (num_here < len(shown))
        if any("gpus" in flag or "colocate" in flag for flag in foreign):
            advice += '. For several GPUs use torchrun: the page "Train on several GPUs" of the documentation'
        raise ConfigError(
            f"agentenv train: expected flags that it has, got {', '.join(shown)}, which only OpenRLHF has. {advice}."
        )
    for flag in flags:
        if flag not in known:
            close = [SUGGESTIONS[flag]] if flag in SUGGESTIONS else []
            close = close or [name for name in sorted(known) if len(flag) > 2 and name.startswith(flag)]
            close = close or difflib.get_close_matches(flag, sorted(known), n=1)
            close = close or [name for name in sorted(own) if len(flag) > 2 and flag in name]
            close = close or difflib.get_close_matches(flag, instead, n=1)
            remedy = f"Did you mean --{close[0]}?" if close else "Run `agentenv train --help` for the flags."
            raise ConfigError(f"agentenv train: expected one of its flags, got --{flag}. {remedy}")
    translated: list[Given] = []
    for flag, values in _translate_correction([(flag.removeprefix("--"), values) for flag, values in given]):
        if flag == "advantage_estimator":
            values = [VALUES.get(value, value) for value in values]
        translated.append((flag, values))
    return translated


def _translate_correction(flags: list[Given]) -> list[Given]:
    """Return the flags with OpenRLHF's correction flags replaced by `is_correction` and its threshold."""
    given = {flag: values for flag, values in flags if flag in CORRECTION}
    rest = [each for each in flags if each[0] not in CORRECTION]
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
        also = f" (0.11.2: --{LEVEL})" if flag == THRESHOLD else ""
        raise ConfigError(f"--{flag}: expected --{needed}{also} with it, got none. Add it, or leave --{flag} out.")
    return first.get(KIND, "tis")
