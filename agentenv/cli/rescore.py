"""`agentenv rescore`: a run's episodes, graded again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from agentenv.cli.flags import parse
from agentenv.cli.help import POSITIONAL
from agentenv.errors import ConfigError
from agentenv.runs.config import SOURCES, ErrorOptions, GroupOptions, OutputOptions
from agentenv.runs.display.progress import OnScreen
from agentenv.runs.flat_config import FlatConfig


@dataclass(frozen=True)
class RescoreConfig(FlatConfig):
    """Grade the episodes of a run again, without a model: by another reward or a new version of the environment.

    The environment plays each episode again with the recorded actions, as long as it asks the model what it asked
    then. With --reward, that reward grades each last action instead; with --group_reward alone, the environment's
    rewards stay. All other flags are those of the run.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"reward_func_path": "remote_rm_url"}
    REPEATABLE: ClassVar[tuple[str, ...]] = ("env",)

    run: Annotated[str, POSITIONAL]
    """Run directory, of `agentenv run`."""
    reward: str | None = None
    """What grades the last action of each episode, in place of the environment: a reward's name, FILE.py:name,
    module:name, or {"NAME": {"option": value}}."""
    env: tuple[str, ...] = ()
    """Environment that plays the episodes again."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """JSON object of arguments for the environment's constructor, in place of the run's."""
    agent_func_path: str | None = None
    """OpenRLHF agent_func.py that plays the episodes again."""
    remote_rm_url: str | None = None
    """File with reward_func(queries, prompts, labels), or the URLs of reward servers, separated by commas."""
    groups: GroupOptions = field(default_factory=GroupOptions)
    """A reward of all answers to a task together."""
    pass_score: float | None = None
    """Score from which an episode counts as passed."""
    concurrency: int = 64
    """Maximum number of episodes in progress at once."""
    output: OutputOptions = field(default_factory=OutputOptions)
    """Where results go, and what is shown."""
    errors: ErrorOptions = field(default_factory=ErrorOptions)
    """What happens when episodes fail, or the record does not suffice to grade them."""


def rescore(args: Sequence[str]) -> int:
    """Grade the episodes of a run again, without a model: by another reward or a new version of the environment."""
    config = parse(RescoreConfig, "rescore", args)
    logging.basicConfig(level=config.output.log_level.upper(), handlers=[OnScreen()])
    from agentenv.runs.rescore import Recording
    from agentenv.runs.run import run

    usual = RescoreConfig(config.run, config.reward).flags()
    typed = {arg[2:].partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--")} - {"reward"}
    given = {name: value for name, value in config.flags().items() if name in typed or value != usual[name]}
    if given.keys() & set(SOURCES):
        given = dict.fromkeys(SOURCES) | given
    is_played = bool(given.keys() & {*SOURCES, "env_kwargs"})
    if is_played and config.reward is not None:
        raise ConfigError("--reward: expected no other flag that says what grades, got both. Leave one out.")
    out = config.output.out
    if out is not None and Path(out).resolve() == Path(config.run).resolve():
        raise ConfigError(f"--out: expected another directory than RUN, got {out!r}. The run stays as it is.")
    if is_played or config.reward is not None:  # another class or reward has another range
        given = {"pass_score": None} | given
    keeps_rewards = config.groups.group_reward is not None and config.reward is None and not is_played
    recording = Recording(Path(config.run), config.reward, keeps_rewards=keeps_rewards)
    return run(recording.config.with_flags(**given), recording)
