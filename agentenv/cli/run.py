"""`agentenv run`: the flags, those of the run in --out if it is resumed, and the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentenv.cli.flags import parse
from agentenv.errors import ConfigError
from agentenv.runs.config import SOURCES, RunConfig
from agentenv.runs.config_file import check_command
from agentenv.runs.display.progress import OnScreen


def run(args: Sequence[str]) -> int:
    """Run episodes and return the exit code, as `agentenv.runs.run`."""
    config = parse(RunConfig, "run", args, stored_config)
    logging.basicConfig(level=config.output.log_level.upper(), handlers=[OnScreen()])
    from agentenv.runs.run import run as run_episodes

    return run_episodes(config)


def stored_config(given: Mapping[str, Any]) -> RunConfig | None:
    """Return the config of the run in --out, so that --resume needs no other flag.

    None if no run has started there and the given flags name one: the same command then starts a job and resumes it.
    """
    from agentenv.runs.records.directory import read_config

    if given.get("out") is None:
        raise ConfigError("--resume: expected --out DIR with it, got none. Pass the run directory.")
    out = Path(given["out"])
    if not (out / "config.json").is_file():
        if any(map(given.get, SOURCES)) and (out.is_dir() or not out.exists()):
            return None
        raise ConfigError(
            f"--resume: expected a run directory in --out, got {given['out']!r}. "
            "Check the path, or pass the flags of a new run."
        )
    flags = read_config(out)["config"]["flags"]
    check_command(flags, "run", out)
    try:
        return RunConfig.from_flags(**{**flags, "resume": True})
    except ConfigError as error:
        raise ConfigError(f"--resume: expected a config of this version in {out}, got {error}.") from error
