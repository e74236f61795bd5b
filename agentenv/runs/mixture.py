"""Mixtures: the environments of one job, from `--env` given several times or from a file of entries."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from agentenv._util.brief import brief
from agentenv._util.suggest import did_you_mean
from agentenv.core.arguments import parse_json_object
from agentenv.errors import ConfigError

_SUFFIXES = (".yaml", ".yml", ".json")
_WEIGHT = re.compile(r"(.+):(-?(?:\d+\.?\d*|\.\d+))")
"""ENV:WEIGHT. The name of a class never begins with a digit, a point or a minus."""
_NAME = re.compile(r"[\w.-]+")
_KINDS: Mapping[str, tuple[type, ...]] = {"weight": (int, float), "env_kwargs": (Mapping,)} | dict.fromkeys(
    ("limit", "max_turns", "max_length"), (int,)
)
"""Types of the keys of an entry that are not text."""
_KIND_NAMES: Mapping[tuple[type, ...], str] = {(int,): "an integer", (int, float): "a number", (Mapping,): "an object"}


@dataclass(frozen=True, slots=True)
class MixtureEntry:
    """One environment of a mixture: an entry of its file. What is None is as the flags say."""

    env: str
    """As `--env`."""
    name: str = ""
    """Name in ids of tasks and in metrics. Default: that of the environment, of its class, or of its file."""
    weight: float = 1.0
    """Share of the groups of a training, relative to the other weights. With 0 it is only evaluated."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    """Default: the environment's own."""
    split: str | None = None
    prompt_key: str | None = None
    label_key: str | None = None
    limit: int | None = None
    max_turns: int | None = None
    max_length: int | None = None

    def flags(self) -> dict[str, Any]:
        """Return the flags of `agentenv run` that the entry sets."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {key: value for key, value in values.items() if key not in ("name", "weight") and value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        values = {"env": self.env, "name": self.name, "weight": self.weight, **self.flags()}
        return {key: value for key, value in values.items() if value != {}}


def is_plain(env: Sequence[str]) -> bool:
    """Return True if the values of `--env` are one environment or none, without an entry, a weight or a file."""
    if len(env) != 1:
        return not env
    return not (env[0].startswith("{") or env[0].endswith(_SUFFIXES) or _WEIGHT.fullmatch(env[0]))


def source_name(env: Sequence[str]) -> str:
    """Return the value of `--env`, or the names in a mixture with + between them; raises nothing."""
    if is_plain(env):
        return "".join(env)
    names = []
    for text in env:
        try:
            names.append(_entry(json.loads(text), text).name if text.startswith("{") else _default_name(text))
        except (ConfigError, ValueError):
            names.append("?")
    return "+".join(names)


def _default_name(text: str) -> str:
    match = _WEIGHT.fullmatch(text)
    path, _, attribute = (match[1] if match else text).partition(":")
    return attribute or Path(path).stem


def read_entries(env: Sequence[str]) -> list[MixtureEntry]:
    """Return the entries of a mixture, with files read.

    Raises:
        ConfigError: a file is missing or wrong, an entry has a wrong key or value, or names repeat.
    """
    entries: list[MixtureEntry] = []
    for text in env:
        if text.startswith("{"):
            entries.append(_entry(parse_json_object("--env", text), "--env"))
        elif text.endswith(_SUFFIXES):
            entries += [_entry(each, f"{text}, entry {number}") for number, each in enumerate(_read(text), start=1)]
        else:
            match = _WEIGHT.fullmatch(text)
            entries.append(_entry({"env": match[1], "weight": float(match[2])} if match else {"env": text}, "--env"))
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"--env: expected environments of different names, got {name!r} {names.count(name)} times. "
                "Use a file of entries, and set `name` in them."
            )
    return entries


def mixture_of(flags: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries of the mixture in the flags of a config.json; empty if there is none."""
    env = flags.get("env")
    return [each for each in (env if isinstance(env, list) else [env]) if isinstance(each, Mapping)]


def longest(env: Sequence[str], max_length: int) -> int:
    """Return the largest limit of an episode's tokens: `max_length`, or that of the longest entry in a mixture.

    Raises:
        ConfigError: as `read_entries`.
    """
    return max_length if is_plain(env) else max(entry.max_length or max_length for entry in read_entries(env))


def _read(path: str) -> list[Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))  # JSON is YAML, too
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--env {path}: expected a YAML or JSON file, got {' '.join(str(error).split())}. Fix the file."
        ) from error
    if not isinstance(content, list) or not content:
        raise ConfigError(
            f"--env {path}: expected a list of entries, got {brief(content, 60)}. Begin each one with `- env: NAME`."
        )
    return content


def _entry(values: Any, where: str) -> MixtureEntry:
    values = {"env": values} if isinstance(values, str) else values
    known = [each.name for each in fields(MixtureEntry)]
    if not isinstance(values, Mapping) or "env" not in values:
        raise ConfigError(f"{where}: expected an object with `env`, got {brief(values, 60)}. Name the environment.")
    for key, value in values.items():
        if key not in known:
            advice = did_you_mean(str(key), known, f"The keys are {', '.join(known)}.", cutoff=0.8)
            raise ConfigError(f"{where}: expected a key of an entry, got {key!r}.{advice}")
        kinds = _KINDS.get(key, (str,))
        if not isinstance(value, kinds) or isinstance(value, bool):
            expected = _KIND_NAMES.get(kinds, "text")
            advice = " Write rows to a file, and name it." if key == "data" else ""
            raise ConfigError(f"{where}: expected {expected} as `{key}`, got {brief(value, 60)}.{advice}")
    if values["env"].partition(":")[0].endswith(_SUFFIXES):
        raise ConfigError(
            f"{where}: expected an environment, got {values['env']!r}, a file of entries. Use --env with the file "
            "alone, and write `weight` into its entries."
        )
    if match := _WEIGHT.fullmatch(values["env"]):
        raise ConfigError(
            f"{where}: expected an environment, got {values['env']!r}. Write its weight as `weight: {match[2]}`."
        )
    entry = MixtureEntry(**{"name": _default_name(values["env"]), **values})
    if not 0 <= entry.weight < math.inf:
        raise ConfigError(f"{where}: expected a weight >= 0, got {entry.weight!r}.")
    if not _NAME.fullmatch(entry.name):
        raise ConfigError(
            f"{where}: expected a name of letters, digits, '_', '.' and '-', got {entry.name!r}. Set `name`."
        )
    return entry
