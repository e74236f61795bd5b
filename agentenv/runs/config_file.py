"""Files of flags for `--config`: read YAML, TOML, JSON and the config.json of a run; write YAML."""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from agentenv._util.brief import brief
from agentenv._util.suggest import did_you_mean
from agentenv.errors import ConfigError
from agentenv.runs.config import SOURCES, SourceConfig
from agentenv.runs.flat_config import FlatConfig, flag_fields

C = TypeVar("C", bound=SourceConfig)
Given = tuple[str, list[str]]
"""A flag and the words after it, as on a command line."""
OF_ONE_RUN = ("out", "resume")
"""Flags of a run's own config.json that another run does not take from it."""


def read_flags(config: type[FlatConfig], path: str) -> list[Given]:
    """Return the flags of a file as a command line has them, so that their values are checked in the same way.

    Raises:
        ConfigError: the file cannot be read, or a key is not a flag of `config`.
    """
    flags, is_of_run = _load(Path(path).expanduser())
    known = flag_fields(config)
    strange = [name for name in flags if name not in known and name not in config.ALIASES]
    command, other = command_of(known), command_of(flags)
    if is_of_run and len(strange) > 1 and other != command:  # one key alone is a slip
        raise ConfigError(
            f"{path}: expected the config.json of `agentenv {command}`, got that of `agentenv {other}`. "
            "Use that command, or a file of the flags that both have."
        )
    given: dict[str, Given] = {}
    for key, value in flags.items():
        name = str(key).replace("-", "_")
        name = config.ALIASES.get(name, name)
        if name not in known:
            near = did_you_mean(str(key), [*known, *config.ALIASES], "Remove it, or correct it.")
            negated = name.removeprefix("no_") if name.startswith("no_") else f"no_{name}"
            if isinstance(value, bool) and negated in known and known[negated][1] is bool:
                near = f" Write {negated}: {json.dumps(not value)}."
            raise ConfigError(f"{path}: expected flags, got the key {brief(key)}.{near}")
        if name in given:
            raise ConfigError(f"{path}: expected {name} once, got it under two names. Leave one out.")
        if name in config.REPEATABLE and value is None:
            continue  # as config.json has it where the flag was not given
        kind = known[name][1]
        is_list = any(get_origin(each) in (tuple, list) for each in (kind, *get_args(kind)))
        if isinstance(value, list) and not is_list:
            raise ConfigError(f"{path}: --{name}: expected one value, got {brief(value)}. Write one.")
        if kind is not bool:
            words = value if isinstance(value, list) else [value]
            given[name] = (name, [json.dumps(each) if isinstance(each, dict | list) else str(each) for each in words])
        elif not isinstance(value, bool):
            raise ConfigError(f"{path}: expected true or false for {name}, got {brief(value)}.")
        elif value or not name.startswith("no_"):
            given[name] = (name if value else f"no_{name}", [])
    return list(given.values())


def command_of(flags: Iterable[str]) -> str:
    """Return the command whose flags these are: `train` or `run`."""
    return "train" if "advantage_estimator" in flags else "run"


def stored_config(cls: type[C], command: str, given: Mapping[str, Any]) -> C | None:
    """Return the config of the run directory in --out, so that --resume needs no other flag.

    None if nothing has started there and the given flags name what to run: the same command then starts it and resumes
    it.

    Raises:
        ConfigError: --out does not hold a directory of `command` in this version, and no flag says what to run.
    """
    from agentenv.runs.records.directory import CONFIG, read_config

    path = given.get("out")
    if path is None and command == "run":
        raise ConfigError("--resume: expected --out DIR with it, got none. Pass the run directory.")
    out = Path(path or "")
    if path is None or not (out / CONFIG).is_file():
        if any(map(given.get, SOURCES)) and (path is None or out.is_dir() or not out.exists()):
            return None
        raise ConfigError(
            f"--resume: expected a directory of `agentenv {command}` in --out, got {path!r}. "
            "Check the path, or pass the flags of a new one."
        )
    stored = read_config(out)["config"]
    flags = stored["flags"]
    if (other := "rescore" if "rescored" in stored else command_of(flags)) != command:
        raise ConfigError(
            f"--resume: expected a directory of `agentenv {command}` in --out, got one of `agentenv {other}`, "
            f"{str(out)!r}. Resume it with that command, or check the path."
        )
    try:
        return cls.from_flags(**{**flags, "resume": True})
    except ConfigError as error:
        raise ConfigError(f"--resume: expected a config of this version in {out}, got {error}.") from error


def _load(path: Path) -> tuple[Mapping[str, Any], bool]:
    """Return the flags of a file, and whether it is the config.json of a run, which has keys around them."""
    form = path.suffix.lower()
    if form not in (".yaml", ".yml", ".toml", ".json"):
        raise ConfigError(f"--config: expected a .yaml, .toml or .json file, got {str(path)!r}. Name another file.")
    import yaml

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _check_once(path, (key for key, _ in pairs))
        return dict(pairs)

    def read_yaml(text: str) -> Any:
        nodes = [yaml.compose(text, yaml.SafeLoader)]
        while nodes:
            node = nodes.pop()
            if isinstance(node, yaml.MappingNode):
                _check_once(path, (key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)))
                nodes += [value for _, value in node.value]
        return yaml.safe_load(text)

    parsers: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".json": lambda text: json.loads(text, object_pairs_hook=read_object),
    }
    try:
        loaded = parsers.get(form, read_yaml)(path.read_text(encoding="utf-8"))
    except ConfigError:  # a ValueError too
        raise
    except OSError as error:
        raise ConfigError(f"--config: expected a file to read, got {error}. Check the path.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: expected {form[1:].upper()}, got an error: {error}. Correct the file.") from error
    loaded = {} if loaded is None else loaded
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected flags and their values, got {brief(loaded)}. Write FLAG: VALUE.")
    stored = loaded.get("config")
    if isinstance(stored, dict) and isinstance(stored.get("flags"), dict):
        return {name: value for name, value in stored["flags"].items() if name not in OF_ONE_RUN}, True
    return loaded, False


def _check_once(path: Path, keys: Iterable[str]) -> None:
    """Raise ConfigError if a key repeats: parsers of YAML and JSON take the last one silently."""
    found: set[str] = set()
    for key in keys:
        if key in found:
            raise ConfigError(f"{path}: expected {key} once, got it twice. Leave one out.")
        found.add(key)


def to_yaml(flags: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Return flags as YAML, each below its comment."""
    import yaml

    parts = []
    for name, value in flags.items():
        lines = textwrap.wrap(comments.get(name, ""), 116, initial_indent="# ", subsequent_indent="# ")
        dumped = yaml.safe_dump({name: value}, allow_unicode=True, width=10_000, sort_keys=False)
        parts.append("\n".join([*lines, dumped]))
    return "\n".join(parts)
