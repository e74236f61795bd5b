"""AgentEnv: an agent environment as a `gymnasium.Env`, one episode of the one loop at a time."""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any

import gymnasium

from agentenv._util.loop_thread import run_sync, submit_detached
from agentenv.core.trajectory import Trajectory
from agentenv.episode.loop import AgentFactory
from agentenv.episode.stepping import SteppedEpisode
from agentenv.errors import ConfigError, ContractError
from agentenv.gym.config import EpisodeMaker, GymConfig, Outcome, Start, transcript
from agentenv.gym.registration import spec_of

_OPTIONS = ("task",)


class AgentEnv(gymnasium.Env[Any, Any]):
    """An agent environment as a Gymnasium environment: `reset` draws a task, `step` takes an action.

    `obs_mode` selects the observations: "text" is the latest observation, "messages" the conversation so far in a chat
    API's form, "tokens" all ids so far, int64[T]. Actions are texts; with "tokens" they are ids (including the
    terminator) or a `Completion`, whose log-probabilities the trajectory keeps. Only `np_random` decides the task and
    the environment's seed; `reset(options={"task": index_or_id})` selects the task.

    `info` holds the environment's facts as floats and texts, `score` if the environment returned one, and at the end
    `stop_reason`. A failure of the environment raises EpisodeFailed: the reward is unknown; `reset` recovers.

    `max_episode_steps` truncates an episode after that many actions and notifies the environment, which may still
    return a reward (`on_truncate`). Gymnasium's TimeLimit, which `gymnasium.make` adds, truncates without notifying
    it; use `agentenv.gym.make` if that reward matters.

    A pickle, a copy or a forked process has no episode until its own `reset`, which continues the random numbers.
    Plain calls work inside a running event loop (Jupyter, Ray actors): episodes run on a loop in the library's own
    thread. Async code can await `begin` and `act` of an `EpisodeMaker` instead.

    Example::

        env = gymnasium.make("agentenv.gym:agentenv/MathRetry-v0")
        observation, info = env.reset(seed=0)
        observation, reward, terminated, truncated, info = env.step("#### 42")
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "human"], "render_fps": 4}  # noqa: RUF012 - Gymnasium's

    def __init__(self, env: str, *, render_mode: str | None = None, **settings: Any) -> None:
        """Load the environment and its tasks.

        Args:
            env: an installed environment's name, `module:Attr` or `file.py:Class`.
            render_mode: None, "ansi" (`render` returns the episode as text) or "human" (writes it to stdout).
            **settings: the other fields of `agentenv.gym.GymConfig`.

        Raises:
            ConfigError: an argument is wrong.
            DataError: a row of the data is invalid.
        """
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ConfigError(f"AgentEnv.render_mode: expected None, ansi or human, got {render_mode!r}.")
        self._maker = EpisodeMaker(GymConfig.of(env, settings))
        self.render_mode = render_mode
        self.observation_space, self.action_space = self._maker.observation_space, self._maker.action_space
        self.spec = spec_of(env, settings if render_mode is None else {**settings, "render_mode": render_mode})
        self._make_agent: AgentFactory | None = None
        """Makes the agents of a vector elsewhere than in this process."""
        self._episode: SteppedEpisode | None = None
        self._pid = 0
        self._abandoned: Any = None
        """The finalizer that closes the episode of an environment that is garbage-collected."""
        self._num_written = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_episode": None, "_abandoned": None}

    @property
    def trajectory(self) -> Trajectory:
        """Record of the episode so far; complete once the episode is over.

        Raises:
            ContractError: `reset` was not called yet.
        """
        return self._running("trajectory").trajectory

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; return the first observation and its info, which holds the `task_id`.

        Args:
            seed: seed of `np_random`, which draws tasks and the environment's seeds; None continues its stream.
            options: {"task": index or id} selects the task.

        Raises:
            ConfigError: an option is unknown or names an unknown task.
            EpisodeFailed: the environment failed.
        """
        first = run_sync(self._begin(self._draw(seed, options)))
        self._show()
        return first

    def _draw(self, seed: int | None, options: dict[str, Any] | None) -> Start:
        """Draw the start of the next episode."""
        super().reset(seed=seed)
        unknown = [name for name in options or {} if name not in _OPTIONS]
        if unknown:
            raise ConfigError(f"AgentEnv.reset: expected options of {_OPTIONS}, got {unknown}. Leave them out.")
        return self._maker.draw(self.np_random, (options or {}).get("task"))

    async def _begin(self, start: Start) -> tuple[Any, dict[str, Any]]:
        """End the current episode and begin the next, on the background loop."""
        former, self._num_written = self._release(), 0
        episode = self._episode = self._maker.episode(start, self._make_agent)
        self._pid = os.getpid()
        self._abandoned = weakref.finalize(self, _abandon, episode, self._pid)
        if former is not None:
            await former.aclose()
        return await self._maker.begin(episode)

    def step(self, action: Any) -> Outcome:
        """Take an action; return observation, reward, terminated, truncated and info.

        Raises:
            ContractError: no episode is running, or the action does not fit the mode (the episode continues).
            EpisodeFailed: the environment failed; the reward is unknown. Call `reset`.
        """
        episode, taken = self._running("step"), self._maker.action(action)
        if episode.over:
            raise ContractError("AgentEnv.step: expected a running episode, got one that is over. Call reset.")
        outcome = run_sync(self._maker.take(episode, taken))
        self._show()
        return outcome

    def render(self) -> str | None:
        """Return the episode so far as text with "ansi"; None with "human", as `reset` and `step` wrote it already."""
        if self.render_mode is None:
            gymnasium.logger.warn("AgentEnv.render: expected a render_mode, got None. Make it with render_mode='ansi'.")
        return transcript(self.trajectory) if self.render_mode == "ansi" else None

    def close(self) -> None:
        """End the episode in any state. Repeated calls are harmless."""
        episode = self._release()
        if episode is not None:
            run_sync(episode.aclose())

    def _release(self) -> SteppedEpisode | None:
        """Detach the episode; return it if this process has to close it."""
        episode, self._episode = self._episode, None
        if episode is None or self._pid != os.getpid():  # forked: the episode's loop belongs to the parent
            return None
        self._abandoned.detach()
        return None if episode.over else episode

    def _running(self, where: str) -> SteppedEpisode:
        if self._episode is None or self._pid != os.getpid():
            raise ContractError(f"AgentEnv.{where}: expected an episode, got none. Call reset.")
        return self._episode

    def _show(self) -> None:
        """Write the new part of the episode if the mode is "human"."""
        if self.render_mode == "human":
            text = transcript(self.trajectory)
            sys.stdout.write(text[self._num_written :])
            sys.stdout.flush()
            self._num_written = len(text)


def _abandon(episode: SteppedEpisode, pid: int) -> None:
    """Close an episode whose environment was garbage-collected."""
    if pid == os.getpid() and not episode.over:
        submit_detached(episode.aclose())
