"""Files of flags for `--config`: read YAML, TOML, JSON and the config.json of a run; write YAML."""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentenv._util.brief import brief
from agentenv._util.suggest import did_you_mean
from agentenv.errors import ConfigError
from agentenv.runs.config import today
from agentenv.runs.flat_config import FlatConfig, flag_fields

Given = tuple[str, list[str]]
"""A flag and the words after it, as on a command line."""
OF_ONE_RUN = ("out", "resume")
"""Flags of a run's own config.json that another run does not take from it."""


def read_flags(config: type[FlatConfig], path: str) -> list[Given]:
    """Return the flags of a file as a command line has them, so that their values are checked in the same way.

    Raises:
        ConfigError: the file cannot be read, or a key is not a flag of `config`.
    """
    flags = _load(Path(path).expanduser())
    known = flag_fields(config)
    given: dict[str, Given] = {}
    for key, value in flags.items():
        name = str(key).replace("-", "_")
        name = config.ALIASES.get(name, name)
        if name not in known:
            near = did_you_mean(str(key), [*known, *config.ALIASES], "Remove it, or correct it.")
            raise ConfigError(f"{path}: expected flags, got the key {brief(key)}.{near}")
        if name in given:
            raise ConfigError(f"{path}: expected {name} once, got it under two names. Leave one out.")
        if name in config.REPEATABLE and value is None:
            continue  # as config.json has it where the flag was not given
        if known[name][1] is not bool:
            given[name] = (name, _words(value))
        elif not isinstance(value, bool):
            raise ConfigError(f"{path}: expected true or false for {name}, got {brief(value)}. Change the value.")
        elif value or not name.startswith("no_"):
            given[name] = (name if value else f"no_{name}", [])
    return list(given.values())


def _load(path: Path) -> Mapping[str, Any]:
    """Return the flags of a file, without the keys around them in the config.json of a run."""
    form = path.suffix.lower()
    if form not in (".yaml", ".yml", ".toml", ".json"):
        raise ConfigError(f"--config: expected a .yaml, .toml or .json file, got {str(path)!r}. Name another file.")
    import yaml

    parsers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": json.loads}
    try:
        loaded = parsers.get(form, yaml.safe_load)(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: expected a file to read, got {error}. Check the path.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: expected {form[1:].upper()}, got an error: {error}. Correct the file.") from error
    loaded = {} if loaded is None else loaded
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected flags and their values, got {brief(loaded)}. Write FLAG: VALUE.")
    stored = loaded.get("config")
    if isinstance(stored, dict) and isinstance(stored.get("flags"), dict):
        return {name: value for name, value in today(stored["flags"]).items() if name not in OF_ONE_RUN}
    return loaded


def _words(value: Any) -> list[str]:
    """Return a value as the words after a flag."""
    if isinstance(value, list):
        return [each if isinstance(each, str) else json.dumps(each) for each in value]
    if isinstance(value, dict):
        return [json.dumps(value)]
    return [str(value)]


def to_yaml(flags: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Return flags as YAML, each below its comment."""
    import yaml

    parts = []
    for name, value in flags.items():
        lines = textwrap.wrap(comments.get(name, ""), 116, initial_indent="# ", subsequent_indent="# ")
        dumped = yaml.safe_dump({name: value}, allow_unicode=True, width=10_000, sort_keys=False)
        parts.append("\n".join([*lines, dumped]))
    return "\n".join(parts)
