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
            parsed: T = tyro.cli(config, prog=f"agentenv {name}", args=list(args), use_underscores=True, **more)
            return parsed
    except SystemExit as stopped:
        if not stopped.code:
            raise
        raise ConfigError(_one_line(said.getvalue(), name)) from None


def _one_line(box: str, name: str) -> str:
    """The problem in the first section of tyro's box, and the nearest flag where it offers one.

    Where it cannot draw a box, the title stands above the first rule and not in the frame.
    """
    lines = [line.strip("│ ").strip() for line in box.strip().splitlines() if not line.startswith(("╭", "╰"))]
    sections = " ".join("\n" if line.startswith(("──", "---")) else line for line in lines).split("\n")
    if not box.lstrip().startswith("╭"):
        sections = sections[1:]
    problem = re.sub(r"^Error parsing \w+Config: ", "", "".join(sections[:1]).strip()) or "expected other flags."
    found = re.search(r"Perhaps you meant:\s+(--\w+)", " ".join(sections))
    meant = f" Did you mean {found[1]}?" if found else ""
    end = "" if problem.endswith("?") else "."
    return f"agentenv {name}: {problem.rstrip('.')}{end}{meant} Run `agentenv {name} --help` for the flags."


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
