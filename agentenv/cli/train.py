"""`agentenv train`: parse the flags and train."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TextIO

from agentenv.cli.flags import parse
from agentenv.training.config import TrainConfig
from agentenv.training.config_checks import check_effective, notes, validate
from agentenv.training.flags import translate


def train(args: Sequence[str]) -> int:
    """Train a model on the episodes of an agent, here or with engines on a Ray cluster."""
    config = configured(args)
    logging.basicConfig(level=config.screen.log_level.upper(), handlers=[_OnScreen()])
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
    config = parse(TrainConfig, "train", args, translate=partial(translate, config=TrainConfig))
    validate(config)
    check_effective(config)
    return config


class _OnScreen(logging.StreamHandler[TextIO]):
    """A handler that looks up sys.stderr for each record, so that records appear above a live display."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The current sys.stderr."""
        return sys.stderr
