"""`agentenv launch openrlhf`: print the command line of another trainer for the same flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from agentenv.cli.flags import parse
from agentenv.errors import ConfigError

FRAMEWORKS = ("openrlhf",)
_HELP = """\
usage: agentenv launch openrlhf [--version 0.11.2] [flags] [-- OpenRLHF's own flags]

Print the command line with which OpenRLHF trains what the flags describe, for
`ray job submit`. Nothing is started. The flags are those of `agentenv train`;
what a release of OpenRLHF cannot do is refused, with what to do instead, and its
known defects are warnings. Words after -- are added as they are.

  agentenv launch openrlhf --agent_func_path agent_func.py --model Qwen/Qwen2.5-0.5B-Instruct
  agentenv launch openrlhf --help      all flags
"""


def launch(args: Sequence[str]) -> int:
    """Print the command for the same training with another trainer."""
    from agentenv.training.config_checks import validate
    from agentenv.training.flags import translate
    from agentenv.training.launch import LaunchConfig, check_launch, shell, warnings

    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(_HELP)
        return 0
    if args[0] not in FRAMEWORKS:
        raise ConfigError(f"agentenv launch: expected {FRAMEWORKS[0]}, got {args[0]!r}. Write it before the flags.")
    end = args.index("--") if "--" in args else len(args)
    more = args[end + 1 :]
    if more and not more[0].startswith("--"):
        raise ConfigError(f"agentenv launch: expected flags after --, got {more[0]!r}. Write --flag VALUE.")
    name, flags = "launch openrlhf", args[1:end]
    config = parse(LaunchConfig, name, flags, translate=partial(translate, config=LaunchConfig, command=name))
    validate(config)
    check_launch(config)
    lines = warnings(config)
    if (
        not any(flag.startswith("--credit") for flag in flags)
        and config.agent_func_path
        and config.limits.for_env().max_turns > 1
    ):
        lines.append("--credit: the default of `agentenv train` is turn; OpenRLHF supports only episode.")
    for warning in lines:
        sys.stderr.write(f"agentenv: warning: {warning}\n")
    sys.stdout.write(shell(config, more))
    return 0
