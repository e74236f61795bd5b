"""`agentenv config run|train`: print the flags of a command as a file for its --config."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from agentenv.cli.commands import Commands, subcommand, summary_of
from agentenv.cli.flags import parse
from agentenv.cli.help import flags_of
from agentenv.cli.train import configured
from agentenv.runs.config import RunConfig
from agentenv.runs.config_file import to_yaml
from agentenv.runs.flat_config import FlatConfig


def config(args: Sequence[str]) -> int:
    """Print the effective flags of `run` or `train` as YAML, each below its help: a file for --config."""
    chosen = subcommand("agentenv config", COMMANDS, args)
    return 0 if chosen is None else chosen(args[1:])


def _of_run(args: Sequence[str]) -> int:
    """Print the flags of `agentenv run`."""
    return _show(parse(RunConfig, "run", args))


def _of_train(args: Sequence[str]) -> int:
    """Print the flags of `agentenv train`."""
    return _show(configured(args))


def _show(config: FlatConfig) -> int:
    flags: dict[str, Any] = config.to_dict()
    sys.stdout.write(to_yaml(flags, {flag.name: flag.text for flag in flags_of(type(config))}))
    return 0


COMMANDS: Commands = {"run": (summary_of(_of_run), _of_run), "train": (summary_of(_of_train), _of_train)}
