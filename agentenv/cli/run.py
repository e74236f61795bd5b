"""`agentenv run`: the flags, those of the run in --out if it is resumed, and the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from agentenv.cli.flags import parse
from agentenv.errors import ConfigError
from agentenv.runs.config import RunConfig
from agentenv.runs.config_file import stored_config
from agentenv.runs.display.progress import OnScreen


def run(args: Sequence[str]) -> int:
    """Run episodes and return the exit code, as `agentenv.runs.run`."""
    config = parse(RunConfig, "run", args)
    if config.output.resume and config.output.out is None:
        raise ConfigError("--resume: expected --out DIR with it, got none. Pass the run directory.")
    stored = stored_config(config, "run") if config.output.resume else None
    if stored is not None:
        config = parse(RunConfig, "run", args, default=stored)
    logging.basicConfig(level=config.output.log_level.upper(), handlers=[OnScreen()])
    from agentenv.runs.run import run as run_episodes

    return run_episodes(config)
