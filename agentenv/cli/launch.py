"""`agentenv launch`: print what starts the same training in another trainer: OpenRLHF's command, a script for TRL,
verl, tinker-cookbook or SkyRL, or the commands for prime-rl, whose package it writes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from agentenv.cli.flags import parse
from agentenv.errors import ConfigError

FRAMEWORKS = ("openrlhf", "trl", "verl", "tinker", "skyrl", "prime-rl")
_HELP = """\
usage: agentenv launch openrlhf [--version 0.11.2] [flags] [-- OpenRLHF's own flags]

Print the command line with which OpenRLHF trains what the flags describe, for
`ray job submit`. Nothing is started. The flags are those of `agentenv train`;
what a release of OpenRLHF cannot do is refused, with what to do instead, and its
known defects are warnings. Words after -- are added as they are.

  agentenv launch openrlhf --agent_func_path agent_func.py --model Qwen/Qwen2.5-0.5B-Instruct
  agentenv launch openrlhf --help      all flags

agentenv launch trl prints a script for TRL's GRPOTrainer instead, agentenv launch
verl one for verl's trainer, agentenv launch tinker one for tinker-cookbook, and
agentenv launch skyrl one for SkyRL. agentenv launch prime-rl writes a package that
verifiers loads, with prime-rl's rl.toml. --help after any of them shows its flags.

  agentenv launch trl --env math_retry --data word_problems_train --model MODEL > train.py
  agentenv launch verl --env math_retry --data word_problems_train --model MODEL > train.sh
  agentenv launch tinker --env math_retry --data word_problems_train --model MODEL > train.py
  agentenv launch skyrl --env math_retry --data word_problems_train --model MODEL > train.py
  agentenv launch prime-rl --env math_retry --data word_problems_train --model MODEL --out FOLDER
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
        known = " or ".join(FRAMEWORKS)
        raise ConfigError(f"agentenv launch: expected {known}, got {args[0]!r}. Write it before the flags.")
    if args[0] == "trl":
        return _launch_trl(args[1:])
    if args[0] == "verl":
        return _launch_verl(args[1:])
    if args[0] == "tinker":
        return _launch_tinker(args[1:])
    if args[0] == "skyrl":
        return _launch_skyrl(args[1:])
    if args[0] == "prime-rl":
        return _launch_prime_rl(args[1:])
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


def _launch_trl(flags: Sequence[str]) -> int:
    from agentenv.training.launch_trl import TRLLaunchConfig, script

    sys.stdout.write(script(parse(TRLLaunchConfig, "launch trl", flags)))
    return 0


def _launch_verl(flags: Sequence[str]) -> int:
    from agentenv.training.launch_verl import VerlLaunchConfig, verl_script

    sys.stdout.write(verl_script(parse(VerlLaunchConfig, "launch verl", flags)))
    return 0


def _launch_tinker(flags: Sequence[str]) -> int:
    from agentenv.training.launch_tinker import TinkerLaunchConfig, tinker_script

    sys.stdout.write(tinker_script(parse(TinkerLaunchConfig, "launch tinker", flags)))
    return 0


def _launch_skyrl(flags: Sequence[str]) -> int:
    from agentenv.training.launch_skyrl import SkyRLLaunchConfig, skyrl_script

    sys.stdout.write(skyrl_script(parse(SkyRLLaunchConfig, "launch skyrl", flags)))
    return 0


def _launch_prime_rl(flags: Sequence[str]) -> int:
    from agentenv.training.launch_prime_rl import PrimeLaunchConfig, write_package

    sys.stdout.write(write_package(parse(PrimeLaunchConfig, "launch prime-rl", flags)))
    return 0
