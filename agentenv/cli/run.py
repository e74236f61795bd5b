"""`agentenv run`: the flags, those of the run in --out if it is resumed, and the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from agentenv.cli.flags import parse
from agentenv.runs.config import RunConfig
from agentenv.runs.config_file import stored_config
from agentenv.runs.display.progress import OnScreen


def run(args: Sequence[str]) -> int:
    """Run episodes and return the exit code, as `agentenv.runs.run`."""
    config = parse(RunConfig, "run", args, partial(stored_config, RunConfig, "run"))
    logging.basicConfig(level=config.output.log_level.upper(), handlers=[OnScreen()])
    from agentenv.runs.run import run as run_episodes

    return run_episodes(config)
