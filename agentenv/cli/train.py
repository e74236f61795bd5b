"""`agentenv train`: parse the flags and train. `agentenv config run|train`: print the flags as a file for --config."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentenv.cli.flags import parse
from agentenv.cli.help import flags_of
from agentenv.cli.main import Commands, subcommand, summary_of
from agentenv.errors import ConfigError
from agentenv.runs.config import SOURCES, RunConfig
from agentenv.runs.config_file import check_command, to_yaml
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
    config = parse(TrainConfig, "train", args, stored_config, translate=translate)
    validate(config)
    check_effective(config)
    return config


def stored_config(given: Mapping[str, Any]) -> TrainConfig | None:
    """Return the config of the training in --out, so that --resume needs no other flag.

    None if no training has started there and the given flags name one: the same command then starts it and resumes it.

    Raises:
        ConfigError: --out does not hold a training of this version, and no flag says what to train on.
    """
    from agentenv.runs.records.directory import CONFIG, read_config

    out = Path(given.get("out") or "")
    if given.get("out") is None or not (out / CONFIG).is_file():
        if any(map(given.get, SOURCES)):
            return None
        raise ConfigError(
            f"--resume: expected the folder of a training in --out, got {given.get('out')!r}. "
            "Check the path, or pass the flags of a new training."
        )
    flags = read_config(out)["config"]["flags"]
    check_command(flags, "train", out)
    try:
        return TrainConfig.from_flags(**flags)
    except ConfigError as error:
        raise ConfigError(
            f"--resume: expected a training of this version in {out}, got {error} Check the path."
        ) from error


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
