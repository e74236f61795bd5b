"""Slot: one environment of a vector with its random generator and its current episode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.utils import seeding

from agentenv.core.trajectory import Trajectory
from agentenv.episode.loop import AgentFactory
from agentenv.episode.stepping import SteppedEpisode
from agentenv.errors import EpisodeFailed
from agentenv.gym.config import EpisodeMaker, Start

ERROR = "error"
"""Key of the error message in the info of an environment that failed."""

_UNBEGUN = "step: expected an episode, got none: its reset had failed."

Info = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one environment in one call of `reset` or `step`."""

    observation: Any
    info: Info
    reward: float = 0.0
    """NaN if the environment failed."""
    terminated: bool = False
    truncated: bool = False
    final_obs: Any = None
    """Last observation of the episode that ended, if the next one started in the same call."""
    final_info: Info | None = None
    error: str | None = None
    """Error message of the step or the reset that failed; an info holds it too."""

    @property
    def done(self) -> bool:
        """True if the episode ended in this call."""
        return self.terminated or self.truncated


class Slot:
    """One environment of a vector: episodes in sequence, drawn with its own generator.

    `make` makes the agents elsewhere than in this process.
    """

    def __init__(self, maker: EpisodeMaker, make: AgentFactory | None = None) -> None:
        self.maker, self._make = maker, make
        self.np_random: np.random.Generator | None = None
        self.np_random_seed: int | None = None
        self.episode: SteppedEpisode | None = None
        """None before the first reset, and after a reset that failed."""
        self.begun = False
        """True after a reset, also if its episode has ended since or failed."""
        self.ready = False
        """True if a step is allowed: the last one did not end the episode."""
        self.ended: Trajectory | None = None
        """Record of the last episode that ended."""

    def generator(self) -> np.random.Generator:
        """Return the generator that draws tasks and seeds; seeded randomly if no reset has seeded it."""
        if self.np_random is None:
            self.np_random, self.np_random_seed = seeding.np_random()
        return self.np_random

    def draw(self, seed: int | None = None, task: int | str | None = None) -> Start:
        """Draw the start of the next episode.

        Raises:
            ConfigError: the task does not exist.
        """
        if seed is not None:
            self.np_random, self.np_random_seed = seeding.np_random(seed)
        return self.maker.draw(self.generator(), task)

    def observation(self) -> Any:
        """Return the current observation, also after the end; without an episode, the empty observation."""
        return self._empty_observation() if self.episode is None else self.maker.observation(self.episode)

    async def reset(self, start: Start | None = None) -> Outcome:
        """End the current episode and start the next.

        If that fails, the observation is empty and the info holds the error; the next step returns NaN, truncated.
        """
        await self.aclose()
        episode = self.maker.episode(start or self.draw(), self._make)
        self.begun = self.ready = True
        self.episode = episode  # set first, so that a cancelled call can close it
        try:
            observation, info = await self.maker.begin(episode)
        except EpisodeFailed as failed:
            self.ended, self.episode = episode.trajectory, None
            return Outcome(self._empty_observation(), {ERROR: str(failed)}, error=str(failed))
        return Outcome(observation, info)

    async def step(self, action: Any, *, autoreset: bool) -> Outcome:
        """Take an action that `EpisodeMaker.action` returned; with `autoreset`, start the next episode at the end."""
        outcome = await self._act(action)
        self.ready = not outcome.done
        if not (outcome.done and autoreset):
            return outcome
        first = await self.reset()
        return Outcome(
            first.observation, first.info, outcome.reward, outcome.terminated, outcome.truncated,
            final_obs=outcome.observation, final_info=outcome.info, error=outcome.error or first.error,
        )  # fmt: skip

    async def _act(self, action: Any) -> Outcome:
        episode = self.episode
        if episode is None:
            return Outcome(self._empty_observation(), {ERROR: _UNBEGUN}, math.nan, truncated=True, error=_UNBEGUN)
        try:
            observation, reward, terminated, truncated, info = await self.maker.take(episode, action)
        except EpisodeFailed as failed:
            self.ended = episode.trajectory
            message = str(failed)
            return Outcome(self.observation(), {ERROR: message}, math.nan, truncated=True, error=message)
        if episode.over:
            self.ended = episode.trajectory
        return Outcome(observation, info, reward, terminated, truncated)

    async def aclose(self) -> None:
        """End the current episode, if any."""
        episode = self.episode
        self.forget()
        if episode is not None:
            await episode.aclose()

    def _empty_observation(self) -> Any:
        return {"text": "", "messages": [], "tokens": np.zeros(0, np.int64)}[self.maker.config.obs_mode]

    def forget(self) -> None:
        """Drop the episode without closing it, as after a fork: it belongs to another process."""
        self.episode, self.begun, self.ready = None, False, False
