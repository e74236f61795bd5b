"""The command line, `agentenv COMMAND`: flags to configs.

Exit codes: 0 done, 1 the run failed or --fail_if holds, 2 usage, 3 too many episodes failed, 4 an audit judged
nothing, 130 and 143 interrupted (resumable).
"""

from __future__ import annotations

import io
import logging
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from agentenv._util.suggest import did_you_mean
from agentenv.errors import AgentEnvError, ConfigError

Run = Callable[[Sequence[str]], int]
"""A command: it takes the words after its name and returns the exit code."""
Commands = Mapping[str, tuple[str, str | Run]]
"""A sentence about each command, and the command; as module:function, it is imported only if it is chosen."""

_SUMMARIES = {
    "run": "Run episodes of an environment with a model and report the results.",
    "train": "Train a model on the episodes of an agent, here or with engines on a Ray cluster.",
    "list": "List the environments, data and models that are installed, or the environments of another library.",
    "doctor": "Show what is installed, which engines and isolation levels work here, and how to fix the rest.",
    "check": "Find breaches of the contract in an agent_func.py or an environment before training.",
    "audit": "Play an environment with policies that solve nothing, cheat and break things, and report what they earn.",
    "new": "Make a plugin: an environment with its data and tests, ready to install.",
    "play": "Take the policy's place in an environment, in the terminal.",
    "show": "Read the episodes of a run as conversations: roles, texts, tool calls, rewards, errors with their "
    "traceback.",
    "view": "Look at the episodes of runs in a browser: groups, tokens, training curves, also while they run.",
    "diff": "Compare run B with run A: paired over tasks, with one interval that decides.",
    "rescore": "Grade the episodes of a run again, without a model: by another reward or a new version of the "
    "environment.",
    "export": "Write a run as flat tables of episodes and turns, or as the training records of another framework.",
    "tokens": "Certify a chat template; show the tokens of a run, or score them again.",
    "rm": "Evaluate, check, serve and compare reward models and judges.",
    "sandbox": "Check the isolation of this machine and its speed, and run or serve programs.",
    "serve": "Serve an environment to the clients of OpenEnv: TRL, ms-swift, SkyRL, Unsloth.",
    "config": "Print the effective flags of `run` or `train` as YAML, each below its help: a file for --config.",
    "completion": "Print a script that completes commands, flags and their values: `source <(agentenv completion "
    "bash)`.",
    "help": "Show the help of agentenv, or of a command.",
    "version": "Show the version of agentenv.",
}
"""The summaries are written here too, so that help imports no command; they are the first lines of the docstrings."""
_PLACES: Mapping[str, str | Run] = {
    "list": "agentenv.cli.list:list_installed",
    "config": "agentenv.cli.train:print_config",
    "help": lambda args: main([*args, "--help"]),
    "version": "agentenv.cli.completion:version",
}
"""The commands that are not the function of their name in the module of their name."""
COMMANDS: Commands = {
    name: (summary, _PLACES.get(name, f"agentenv.cli.{name}:{name}")) for name, summary in _SUMMARIES.items()
}


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; an error of agentenv is one line on stderr."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?"
    # Commands report failures themselves. Elsewhere, warnings reach stderr even if the program sets no logging up.
    logging.getLogger("agentenv").addHandler(logging.NullHandler())
    args = ["version", *args[1:]] if args[:1] == ["--version"] else args
    try:
        command = subcommand("agentenv", COMMANDS, args)
        return 0 if command is None else command(args[1:])
    except AgentEnvError as error:
        message = " ".join(str(error).split())
        sys.stderr.write(f"agentenv: error: {message}\n")
        return error.exit_code
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        return 130
