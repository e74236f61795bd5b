"""`agentenv launch openrlhf`: the same flags as a command line of another trainer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentenv.cli_flags import parse
from agentenv.errors import ConfigError

FRAMEWORKS = ("openrlhf",)


def launch(args: Sequence[str]) -> int:
    """Print the command that trains the same with another trainer: `agentenv launch openrlhf --version 0.11.2`."""
    from agentenv.trainer.flags import resolve
    from agentenv.trainer.launch import LaunchConfig, shell

    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write("usage: agentenv launch openrlhf [--version 0.11.2] [flags] [-- OpenRLHF's own flags]\n")
        return 0
    if args[0] not in FRAMEWORKS:
        raise ConfigError(f"agentenv launch: expected {FRAMEWORKS[0]}, got {args[0]!r}. Write it before the flags.")
    end = args.index("--") if "--" in args else len(args)
    more = args[end + 1 :]
    if more and not more[0].startswith("--"):
        raise ConfigError(f"agentenv launch: expected flags after --, got {more[0]!r}. Write --flag VALUE.")
    flags = resolve(args[1:end], LaunchConfig, command="launch openrlhf")
    config = parse(LaunchConfig, "launch openrlhf", flags)
    warnings = config.warnings()
    if "--credit" not in flags and config.agent_func_path and config.max_steps > 1:
        warnings.append("--credit: `agentenv train` has turn where it is left out; OpenRLHF has only episode.")
    for warning in warnings:
        sys.stderr.write(f"agentenv: warning: {warning}\n")
    sys.stdout.write(shell(config, more))
    return 0
