"""Flags to frozen configs, by tyro, with errors in one line; and JSON on stdout."""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tyro

from agentenv.config import ALIASES
from agentenv.errors import ConfigError

T = TypeVar("T")
Commands = Mapping[str, tuple[type, Callable[[Sequence[str]], int]]]
"""The commands of a group: their flags, and what runs them with the words after the name."""


def parse(config: type[T], name: str, args: Sequence[str], default: T | None = None) -> T:
    """Flags as a config; what tyro says in a box becomes one line.

    Raises:
        ConfigError: the flags are wrong.
    """
    said = io.StringIO()
    more: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(said):
            parsed: T = tyro.cli(config, prog=f"agentenv {name}", args=_own_names(args), use_underscores=True, **more)
            return parsed
    except SystemExit as stopped:
        if not stopped.code:
            raise
        raise ConfigError(_one_line(said.getvalue(), name, args)) from None


def _own_names(args: Sequence[str]) -> list[str]:
    """The arguments with each flag that has two names by that of its field."""
    given: dict[str, str] = {}
    named: list[str] = []
    for arg in args:
        dashed, equals, value = arg.partition("=")
        flag = dashed.removeprefix("--").replace("-", "_")
        name = ALIASES.get(flag, flag)
        if arg.startswith("--") and given.setdefault(name, flag) != flag:
            raise ConfigError(
                f"--{flag}: expected one name, got --{given[name]} as well, which means the same. Leave one out."
            )
        named.append(f"--{name}{equals}{value}" if arg.startswith("--") and flag in ALIASES else arg)
    return named


def _one_line(box: str, name: str, args: Sequence[str]) -> str:
    """The problem in the first section of tyro's box, in the words of our errors.

    Where it cannot draw a box, the title stands above the first rule and not in the frame.
    """
    lines = [line.strip("│ ").strip() for line in box.strip().splitlines() if not line.startswith(("╭", "╰"))]
    sections = " ".join("\n" if line.startswith(("──", "---")) else line for line in lines).split("\n")
    if not box.lstrip().startswith("╭"):
        sections = sections[1:]
    problem = re.sub(r"^Error parsing \w+Config: ", "", "".join(sections[:1]).strip()) or "expected other flags."
    if re.match(r"\S+: expected ", problem):
        return problem  # the config's own
    close = re.search(r"Perhaps you meant:\s+(--\w+)", " ".join(sections))
    meant = _of_train(problem, name) or (close[1] if close else None)
    mend = f"Did you mean {meant}?" if meant else f"Run `agentenv {name} --help` for the flags."
    said = _of_a_value(problem, args) or _of_the_command(problem, f"agentenv {name}", mend)
    return said or f"agentenv {name}: {problem.rstrip('.')}. {mend}"


def _of_train(problem: str, command: str) -> str | None:
    """What `run` calls a flag of `train` that it was given; None where it is another."""
    from agentenv.trainer.flags import OF_RUN

    found = re.match(r"Unrecognized options?: --([\w-]+)", problem)
    if command != "run" or found is None:
        return None
    return next((f"--{ours}" for ours, theirs in OF_RUN.items() if theirs == found[1].replace("-", "_")), None)


def _of_a_value(problem: str, args: Sequence[str]) -> str | None:
    """What tyro says of a flag's value, with the flag first; None where it is of something else."""
    found = re.search(r"Missing value for argument '(.+?)'\. Expected (\d+)", problem)
    if found:
        what, mend = ("a value", "Give one.") if found[2] == "1" else (f"{found[2]} values", "Give all of them.")
        return f"{found[1]}: expected {what}, got {_given(found[1], args)}. {mend}"
    found = re.search(r"invalid choice '(.*)' for argument '(.+?)'\. Expected one of \((.+?),?\)", problem)
    if found:
        names = found[3].replace("'", "")
        return f"{found[2]}: expected one of {names}, got {found[1]!r}. Choose one of them."
    found = re.search(r"Error parsing (--\w+):", problem)
    if found is None:
        return None
    numbers = re.search(r"Tuple\[((?:(?:float|int)(?:, )?)+)\]", problem)
    if numbers:
        what = f"{numbers[1].count(',') + 1} numbers"
    else:
        what = "an integer" if "for int()" in problem else "a number" if "to float" in problem else "another value"
    or_none = " or None" if "'None'" in problem else ""
    return f"{found[1]}: expected {what}{or_none}, got {_given(found[1], args)}. Change the value."


def _of_the_command(problem: str, command: str, mend: str) -> str | None:
    """What tyro says of words and flags that a command has not, or lacks; None where it is of something else."""
    found = re.match(r"Unrecognized options?: (.+)", problem)
    if found:
        words = re.split(r",? ", found[1])
        flags = [word for word in words if word.startswith("-")]
        what, got = ("one of its flags", flags[0]) if flags else ("flags", repr(words[0]))
        return f"{command}: expected {what}, got {got}. {mend}"
    found = re.match(r"Missing from .+?: (\S+) (.+?)\.? \(required\)", problem)
    if found:
        what = found[2] if found[1] == "STR" else f"{found[1]} ({found[2]})"
        return f"{command}: expected {what}, got none. {mend}"
    return None


def _given(flag: str, args: Sequence[str]) -> str:
    """The words after a flag, as they were given last."""
    words: list[str] = []
    is_its = False
    for arg in args:
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            is_its = name.replace("-", "_") == flag.replace("-", "_")
            words = ([value] if equals else []) if is_its else words
        elif is_its:
            words.append(arg)
    return repr(" ".join(words)) if words else "none"


def subcommand(group: str, commands: Commands, args: Sequence[str]) -> Callable[[Sequence[str]], int] | None:
    """The command of a group that the first word names; None after its help.

    Raises:
        ConfigError: it names none.
    """
    name = args[0] if args else "--help"
    if name in ("-h", "--help"):
        lines = [f"usage: agentenv {group} COMMAND [flags]        agentenv {group} COMMAND --help for the flags", ""]
        lines += [f"  {each:8} {(config.__doc__ or '').splitlines()[0]}" for each, (config, _) in commands.items()]
        sys.stdout.write("\n".join(lines) + "\n")
        return None
    if name not in commands:
        close = difflib.get_close_matches(name, list(commands), n=1)
        raise ConfigError(
            f"agentenv {group}: expected one of {', '.join(commands)}, got {name!r}."
            + (f" Did you mean {close[0]!r}?" if close else f" Run `agentenv {group} --help`.")
        )
    return commands[name][1]


def print_json(value: Any) -> None:
    """A value as indented JSON on stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
