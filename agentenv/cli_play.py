"""`agentenv play`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from agentenv.cli_flags import parse
from agentenv.errors import ConfigError

_OF_RUN = (
    "env", "env_kwargs", "data", "prompt_key", "label_key", "max_length", "max_turns", "step_timeout_s", "out",
)  # fmt: skip


@dataclass(frozen=True)
class PlayConfig:
    """Take the policy's place in an environment, in the terminal.

    A line is an action; several lines stand between two lines that are three double quotes. /help names the commands.
    Actions may come from a pipe, one per line.
    """

    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
    """An installed environment (`agentenv list`), module:Attr, or path/file.py[:Attr]."""
    env_kwargs: str = "{}"
    """JSON object of arguments for the environment's constructor."""
    data: str | None = None
    """Tasks, as `agentenv run --data` takes them; default: the environment's own."""
    prompt_key: str = "prompt"
    """Column with the prompt."""
    label_key: str = "label"
    """Column with the label."""
    task: int = 0
    """Which task, from 0."""
    seed: int | None = None
    """Of the environment; default: the task's own, or the one that a run with --seed 0 gives it."""
    model: str | None = None
    """Whose tokens to count and record: a shipped model, a folder or a Hugging Face id. Default: with --out tiny-math;
    else none, and a character counts as a token."""
    out: str | None = None
    """Run directory to write; `agentenv tokens show` reads it."""
    max_length: int = 1_000_000
    """Tokens of a whole episode."""
    max_turns: int = 1_000
    step_timeout_s: float = 60.0
    """Longest one call of the environment may take."""

    def __post_init__(self) -> None:
        """Refuse a task that none can be."""
        if self.task < 0:
            raise ConfigError(f"--task: expected an integer >= 0, got {self.task}. Change the value.")


def play(args: Sequence[str]) -> int:
    """Take the policy's place in an environment, in the terminal."""
    config = parse(PlayConfig, "play", args)
    from agentenv.config import RunConfig
    from agentenv.play import play as play_episodes

    model = config.model or ("tiny-math" if config.out else None)
    flags: dict[str, Any] = {name: getattr(config, name) for name in _OF_RUN}
    if model is not None:
        flags["model"] = model
    return play_episodes(RunConfig(**flags), task_index=config.task, seed=config.seed, with_model=model is not None)
