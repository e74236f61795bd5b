"""`agentenv train`: any spelling of the flags, as a TrainConfig."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from agentenv.cli_flags import parse
from agentenv.trainer.config import TrainConfig
from agentenv.trainer.config_checks import notes, refuse_unread
from agentenv.trainer.flags import resolve


def train(args: Sequence[str]) -> int:
    """Train a model on the episodes of an agent, here or with engines on a Ray cluster."""
    config = configured(args)
    logging.basicConfig(level=config.log_level.upper(), handlers=[_OnScreen()])
    if config.log_level == "warning":  # vLLM sets up its own logging; until then it speaks of the machine
        logging.getLogger("vllm").setLevel(logging.ERROR)
    if config.progress != "none" and os.environ.get("RANK", "0") == "0":
        sys.stderr.writelines(f"agentenv: note: {note}\n" for note in notes(config))
    from agentenv.trainer.train import train as run

    return run(config)


def configured(args: Sequence[str]) -> TrainConfig:
    """The flags as a config.

    Raises:
        ConfigError: one is wrong, or has no effect beside the others.
    """
    config = parse(TrainConfig, "train", resolve(args, TrainConfig))
    refuse_unread(config)
    return config


class _OnScreen(logging.StreamHandler[TextIO]):
    """Writes to what is stderr at that moment: while a live line is shown, that is above it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The stream to write to."""
        return sys.stderr
