"""The command line, `agentenv COMMAND`: flags to configs.

Exit codes: 0 done, 1 the run failed, 2 usage, 3 too many episodes failed, 4 an audit judged
nothing, 130 and 143 interrupted (resumable).
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from agentenv._util.version import __version__
from agentenv.cli.audit import audit
from agentenv.cli.check import CheckConfig, check
from agentenv.cli.completion import CompletionConfig, HelpConfig, VersionConfig, completion
from agentenv.cli.config import config
from agentenv.cli.doctor import DoctorConfig, doctor
from agentenv.cli.export import ExportConfig, export
from agentenv.cli.flags import Commands, parse, subcommand
from agentenv.cli.launch import launch
from agentenv.cli.list import ListConfig, list_installed
from agentenv.cli.new import new
from agentenv.cli.play import play
from agentenv.cli.rm import rm
from agentenv.cli.run import run
from agentenv.cli.sandbox import sandbox
from agentenv.cli.show import ShowRunConfig, show
from agentenv.cli.tokens import tokens
from agentenv.cli.train import train
from agentenv.errors import AgentEnvError
from agentenv.runs.config import RunConfig


def version(args: Sequence[str]) -> int:
    """Show the version of agentenv."""
    parse(VersionConfig, "version", args)
    sys.stdout.write(f"agentenv {__version__}\n")
    return 0


COMMANDS: Commands = {
    "run": (RunConfig, run),
    "train": (train, train),
    "list": (ListConfig, list_installed),
    "doctor": (DoctorConfig, doctor),
    "check": (CheckConfig, check),
    "audit": (audit, audit),
    "new": (new, new),
    "play": (play, play),
    "show": (ShowRunConfig, show),
    "export": (ExportConfig, export),
    "tokens": (tokens, tokens),
    "rm": (rm, rm),
    "sandbox": (sandbox, sandbox),
    "launch": (launch, launch),
    "config": (config, config),
    "completion": (CompletionConfig, completion),
    "help": (HelpConfig, lambda args: main([*args, "--help"])),
    "version": (VersionConfig, version),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; an error of agentenv is one line on stderr."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?"
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
