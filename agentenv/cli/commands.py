"""The commands of a name: the line that help shows for each one, and the function that runs it."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from agentenv._util.suggest import did_you_mean
from agentenv.errors import ConfigError

Run = Callable[[Sequence[str]], int]
"""A command: it takes the words after its name and returns the exit code."""
Commands = Mapping[str, tuple[str, str | Run]]
"""A sentence about each command, and the command; as module:function, it is imported only if it is chosen."""


def summary_of(described: object) -> str:
    """Return the first line of a docstring."""
    return (described.__doc__ or "").splitlines()[0]


def subcommand(prog: str, commands: Commands, args: Sequence[str]) -> Run | None:
    """Return the command that the first word names; None after printing the help, which is each name with a line.

    tyro's own subcommands would import every command, and its libraries, before one is chosen.

    Raises:
        ConfigError: the word names no command.
    """
    name = args[0] if args else "--help"
    if name in ("-h", "--help", "--help-all"):
        lines = [f"usage: {prog} COMMAND [flags]", f"       {prog} COMMAND --help for the flags", ""]
        columns = max(60, shutil.get_terminal_size().columns)
        for each, (summary, _) in commands.items():
            lines += textwrap.wrap(summary, columns, initial_indent=f"  {each:10} ", subsequent_indent=" " * 13)
        sys.stdout.write("\n".join(lines) + "\n")
        return None
    if name not in commands:
        advice = did_you_mean(name, commands, f"Run `{prog} --help`.")
        raise ConfigError(f"{prog}: expected one of {', '.join(commands)}, got {name!r}.{advice}")
    command = commands[name][1]
    if isinstance(command, str):
        module, _, function = command.partition(":")
        found: Run = getattr(import_module(module), function)
        return found
    return command
