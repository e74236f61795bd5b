"""Slot: the place of one environment in a vector, its generator and the episode that it plays now."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.utils import seeding

from agentenv.errors import EpisodeFailed
from agentenv.gym.config import EpisodeMaker, Start
from agentenv.stepping import SteppedEpisode
from agentenv.trajectory import Trajectory

ERROR = "error"
"""Key of an info whose environment failed: what happened, as text."""

_UNBEGUN = "step: expected an episode, got none: its reset had failed."

Info = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one environment gives in one call of `reset` or `step`."""

    observation: Any
    info: Info
    reward: float = 0.0
    """NaN where the environment failed: nobody knows it."""
    terminated: bool = False
    truncated: bool = False
    final_obs: Any = None
    """Where the episode ended and the next one began in the same call: the last observation of that which ended."""
    final_info: Info | None = None
    error: str | None = None
    """What failed: the step, or the reset; an info has it as well."""

    @property
    def done(self) -> bool:
        """The episode ended in this call."""
        return self.terminated or self.truncated


class Slot:
    """One environment of a vector: episodes one after the other, drawn with a generator of its own."""

    def __init__(self, maker: EpisodeMaker) -> None:
        self.maker = maker
        self.np_random: np.random.Generator | None = None
        self.np_random_seed: int | None = None
        self.episode: SteppedEpisode | None = None
        """None before the first reset, and where it failed."""
        self.begun = False
        """A reset was asked for; what came of it may have ended meanwhile, or failed."""
        self.ready = False
        """A step may come: the last one did not end the episode."""
        self.ended: Trajectory | None = None
        """The record of the episode that ended last."""

    def generator(self) -> np.random.Generator:
        """The generator that tasks and seeds are drawn with; seeded by chance where no reset has seeded it."""
        if self.np_random is None:
            self.np_random, self.np_random_seed = seeding.np_random()
        return self.np_random

    def draw(self, seed: int | None = None, task: int | str | None = None) -> Start:
        """What the next episode begins with.

        Raises:
            ConfigError: there is no such task.
        """
        if seed is not None:
            self.np_random, self.np_random_seed = seeding.np_random(seed)
        return self.maker.draw(self.generator(), task)

    def observation(self) -> Any:
        """What is to be seen now, also after the end; the empty observation where no episode is."""
        return self._nothing() if self.episode is None else self.maker.observation(self.episode)

    async def reset(self, start: Start | None = None) -> Outcome:
        """End the episode that is there, and begin the next.

        Where that fails the observation is empty and the info says so; the next step then gives NaN, truncated.
        """
        await self.aclose()
        episode = self.maker.episode(start or self.draw())
        self.begun = self.ready = True
        self.episode = episode  # at once, so that whoever gives this call up can close it
        try:
            observation, info = await self.maker.begin(episode)
        except EpisodeFailed as failed:
            self.ended, self.episode = episode.trajectory, None
            return Outcome(self._nothing(), {ERROR: str(failed)}, error=str(failed))
        return Outcome(observation, info)

    async def step(self, action: Any, *, autoreset: bool) -> Outcome:
        """Take an action, as `EpisodeMaker.action` gives it; with `autoreset` the next episode begins at the end."""
        outcome = await self._act(action)
        self.ready = not outcome.done
        if not (outcome.done and autoreset):
            return outcome
        begun = await self.reset()
        return Outcome(
            begun.observation, begun.info, outcome.reward, outcome.terminated, outcome.truncated,
            final_obs=outcome.observation, final_info=outcome.info, error=outcome.error or begun.error,
        )  # fmt: skip

    async def _act(self, action: Any) -> Outcome:
        episode = self.episode
        if episode is None:
            return Outcome(self._nothing(), {ERROR: _UNBEGUN}, math.nan, truncated=True, error=_UNBEGUN)
        try:
            observation, reward, terminated, truncated, info = await self.maker.take(episode, action)
        except EpisodeFailed as failed:
            self.ended = episode.trajectory
            said = str(failed)
            return Outcome(self.observation(), {ERROR: said}, math.nan, truncated=True, error=said)
        if episode.over:
            self.ended = episode.trajectory
        return Outcome(observation, info, reward, terminated, truncated)

    async def aclose(self) -> None:
        """End the episode that is there."""
        episode = self.episode
        self.forget()
        if episode is not None:
            await episode.aclose()

    def _nothing(self) -> Any:
        """The empty observation."""
        return {"text": "", "messages": [], "tokens": np.zeros(0, np.int64)}[self.maker.config.obs_mode]

    def forget(self) -> None:
        """Let go of an episode that belongs to another process."""
        self.episode, self.begun, self.ready = None, False, False
