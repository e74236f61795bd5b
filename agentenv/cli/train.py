"""`agentenv train`: parse the flags and train. `agentenv config run|train`: print the flags as a file for --config."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from functools import partial

from agentenv.cli.flags import parse
from agentenv.cli.help import flags_of
from agentenv.cli.main import Commands, subcommand, summary_of
from agentenv.errors import ConfigError
from agentenv.runs.config import RunConfig
from agentenv.runs.config_file import stored_config, to_yaml
from agentenv.runs.display.progress import OnScreen
from agentenv.training.config import TrainConfig
from agentenv.training.config_checks import check_effective, notes, validate
from agentenv.training.flags import translate


def train(args: Sequence[str]) -> int:
    """Train a model on the episodes of an agent, here or with engines on a Ray cluster."""
    config = configured(args)
    handler = OnScreen()
    if config.screen.log_level == "warning":  # the screen shows one line for each kind of failure
        handler.addFilter(lambda record: record.name != "agentenv.episode.failures")
    logging.basicConfig(level=config.screen.log_level.upper(), handlers=[handler])
    if config.screen.log_level == "warning":  # until vLLM sets up its own logging, it warns about the machine
        logging.getLogger("vllm").setLevel(logging.ERROR)
    if config.screen.progress != "none" and os.environ.get("RANK", "0") == "0":
        sys.stderr.writelines(f"agentenv: note: {note}\n" for note in notes(config))
    from agentenv.training.train import train as run

    return run(config)


def configured(args: Sequence[str]) -> TrainConfig:
    """Return the config for the flags.

    Raises:
        ConfigError: a flag is wrong, or has no effect.
    """
    if launched := next((arg for arg in args if arg.startswith("openrlhf.cli.")), None):
        raise ConfigError(f"agentenv train: expected flags, got {launched!r}. Leave it and the words before it out.")
    stored = partial(stored_config, TrainConfig, "train")
    config = parse(TrainConfig, "train", args, stored, translate=translate)
    validate(config)
    check_effective(config)
    return config


def print_config(args: Sequence[str]) -> int:
    """Print the effective flags of `run` or `train` as YAML, each below its help: a file for --config."""
    chosen = subcommand("agentenv config", CONFIG_COMMANDS, args)
    return 0 if chosen is None else chosen(args[1:])


def _of_run(args: Sequence[str]) -> int:
    """Print the flags of `agentenv run`."""
    return _print(parse(RunConfig, "run", args))


def _of_train(args: Sequence[str]) -> int:
    """Print the flags of `agentenv train`."""
    return _print(configured(args))


def _print(config: RunConfig | TrainConfig) -> int:
    sys.stdout.write(to_yaml(config.to_dict(), {flag.name: flag.text for flag in flags_of(type(config))}))
    return 0


CONFIG_COMMANDS: Commands = {"run": (summary_of(_of_run), _of_run), "train": (summary_of(_of_train), _of_train)}
