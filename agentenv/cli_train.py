"""`agentenv train`: any spelling of the flags, as a TrainConfig."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from agentenv.cli_flags import parse
from agentenv.trainer.config import TrainConfig
from agentenv.trainer.flags import resolve


def train(args: Sequence[str]) -> int:
    """Train a model on the episodes of an agent, here or with engines on a Ray cluster."""
    config = parse(TrainConfig, "train", resolve(args, TrainConfig))
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    from agentenv.trainer.train import train as run

    return run(config)
