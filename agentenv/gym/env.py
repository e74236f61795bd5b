"""AgentEnv: an agent environment as a `gymnasium.Env`, one episode of the one loop at a time."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium

from agentenv.errors import ConfigError, ContractError
from agentenv.gym import views
from agentenv.gym.config import EpisodeMaker, GymConfig, Outcome
from agentenv.gym.live import LiveEpisode
from agentenv.gym.registration import spec_of
from agentenv.trajectory import Trajectory

_OPTIONS = ("task",)


class AgentEnv(gymnasium.Env[Any, Any]):
    """An agent environment for whatever drives Gymnasium's: `reset` draws a task, `step` takes an action.

    Observations, by `obs_mode`: "text", what the environment says now; "messages", the conversation so far as a chat
    API takes it; "tokens", all ids so far, int64[T]. Actions are texts, with "tokens" ids (with the terminator) or a
    `Completion`, whose log-probabilities the trajectory keeps then. Which task, and the environment's seed, come from
    `np_random` alone; `reset(options={"task": index_or_id})` names the task.

    `info` has the facts of the environment as floats and texts, `score` where one was given, and at the end
    `stop_reason`. A failure of the environment raises EpisodeFailed: there is no reward then, and `reset` goes on.

    With `max_episode_steps` an episode is truncated after so many actions, and the environment has a last word of
    reward (`on_truncate`). Gymnasium's TimeLimit, which `gymnasium.make` puts around it, cuts without telling it; use
    `agentenv.gym.make` where the last word matters.

    Pickled or copied in the middle of an episode it carries the actions, and takes them again when it is next used.
    Plain calls work where an event loop runs (Jupyter, Ray actors): episodes live on a loop in a thread of their own.
    Async code has no need of this: it awaits `begin` and `act` of an `EpisodeMaker`.

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
            render_mode: None, "ansi" (`render` gives the episode as text) or "human" (it is written to stdout).
            **settings: the other fields of `agentenv.gym.GymConfig`.

        Raises:
            ConfigError: one of them is wrong.
            DataError: a row of the data cannot be used.
        """
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ConfigError(f"AgentEnv.render_mode: expected None, ansi or human, got {render_mode!r}. Change it.")
        self._maker = EpisodeMaker(GymConfig.of(env, settings))
        self.render_mode = render_mode
        self.observation_space, self.action_space = self._maker.observation_space, self._maker.action_space
        self.spec = spec_of(env, settings if render_mode is None else {**settings, "render_mode": render_mode})
        self._live: LiveEpisode | None = None
        self._num_written = 0

    @property
    def trajectory(self) -> Trajectory:
        """The record of the episode so far; whole once it is over.

        Raises:
            ContractError: nothing was reset yet.
            EpisodeFailed: this is a copy, and its episode went another way when it was played again.
        """
        return self._running("trajectory").trajectory

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: the first observation and its info, which has the `task_id`.

        Args:
            seed: of `np_random`, which tasks and the environment's seeds are drawn from; None goes on with it.
            options: {"task": index or id} names the task.

        Raises:
            ConfigError: an option is unknown or names no task.
            EpisodeFailed: the environment failed.
        """
        super().reset(seed=seed)
        unknown = [name for name in options or {} if name not in _OPTIONS]
        if unknown:
            raise ConfigError(f"AgentEnv.reset: expected options of {_OPTIONS}, got {unknown}. Leave them out.")
        start = self._maker.draw(self.np_random, (options or {}).get("task"))
        former, self._live, self._num_written = self._live, LiveEpisode(self._maker, start), 0
        first = self._live.begin(former)
        self._show()
        return first

    def step(self, action: Any) -> Outcome:
        """Take an action: observation, reward, terminated, truncated and info.

        Raises:
            ContractError: no episode is running; or the action is none of this mode's, and the episode goes on.
            EpisodeFailed: the environment failed: nobody knows the reward. The next `reset` begins anew.
        """
        live, taken = self._running("step"), self._maker.action(action)
        if live.over:
            raise ContractError("AgentEnv.step: expected an episode that goes on, got one that is over. Call reset.")
        outcome = live.act(taken)
        self._show()
        return outcome

    def render(self) -> str | None:
        """With "ansi" the episode so far as text; with "human" None: `reset` and `step` have written it to stdout."""
        if self.render_mode is None:
            gymnasium.logger.warn("AgentEnv.render: expected a render_mode, got None. Make it with render_mode='ansi'.")
        return views.transcript(self.trajectory) if self.render_mode == "ansi" else None

    def close(self) -> None:
        """End the episode, wherever it is; again is harmless."""
        live, self._live = self._live, None
        if live is not None:
            live.close()

    def _running(self, where: str) -> LiveEpisode:
        if self._live is None:
            raise ContractError(f"AgentEnv.{where}: expected an episode, got none. Call reset.")
        return self._live

    def _show(self) -> None:
        """With "human", write what was not written yet."""
        if self.render_mode == "human":
            text = views.transcript(self.trajectory)
            sys.stdout.write(text[self._num_written :])
            sys.stdout.flush()
            self._num_written = len(text)
