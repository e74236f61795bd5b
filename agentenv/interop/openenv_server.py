"""Any environment as a server of OpenEnv: `agentenv serve ENV`. TRL, ms-swift, SkyRL and Unsloth play such servers.

Source: openenv/core/env_server (http_server.py, interfaces.py, types.py), 0.10.0. A session plays an episode at a time,
of the task that `reset` names. An action is text. A failed episode is OpenEnv's error EXECUTION_ERROR, which its client
raises, and never a reward of 0.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentenv.core.messages import as_messages
from agentenv.core.types import Limits, Task
from agentenv.episode.source import EnvSource
from agentenv.episode.stepping import SteppedEpisode
from agentenv.errors import ContractError, DataError
from agentenv.interop.guest import import_library
from agentenv.interop.hosted import text_episode

_CLOSE_S = 60.0
"""Longest wait for the close of an episode."""
SPLIT = "train"
"""Name of the one split of tasks in OpenEnv's task API."""


@dataclass(frozen=True, slots=True)
class ServedTasks:
    """What a server plays."""

    source: EnvSource
    tasks: Sequence[Task]
    limits: Limits = field(default_factory=partial(Limits, max_length=1_000_000))
    """Tokens are characters here; the client's policy has its own limit."""
    max_sessions: int = 64
    """Episodes that may run at the same time."""

    def episode(self, index: int, seed: int | None, episode_id: str) -> SteppedEpisode:
        """Return a new episode of the task `index`; without a seed, the task's, or that of a run with --seed 0.

        Raises:
            DataError: there is no such task.
        """
        if not 0 <= index < len(self.tasks):
            raise DataError(f"reset.index: expected one of {len(self.tasks)} tasks, from 0, got {index!r}.")
        return text_episode(self.source, self.tasks[index], self.limits, episode_id=episode_id, seed=seed)


class ServedSession:
    """One client's session, as OpenEnv's `Environment`; it runs on the server's event loop, and `close` in a thread."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    observation_class: Any
    """The class of observations."""
    state: Any
    """Id of the episode and number of its steps, in OpenEnv's class."""

    def __init__(self, served: ServedTasks) -> None:
        super().__init__()
        self._served = served
        self._episode: SteppedEpisode | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, index: int | None = None
    ) -> Any:
        """Begin an episode of the task `index`; without one, of a task that the seed chooses.

        Raises:
            EpisodeFailed: the environment failed.
        """
        if self._episode is not None:
            await self._episode.aclose()
        index = random.Random(seed).randrange(len(self._served.tasks)) if index is None else index
        self.state.episode_id, self.state.step_count = episode_id or f"openenv-{secrets.token_hex(8)}", 0
        self._loop = asyncio.get_running_loop()
        self._episode = self._served.episode(index, seed, self.state.episode_id)
        return self.observation_class(
            messages=as_messages(await self._episode.begin()),
            tools=[dict(tool) for tool in self._episode.trajectory.tools],
            metadata={"index": index, "task_id": self._served.tasks[index].task_id},
        )

    async def step_async(self, action: Any, timeout_s: float | None = None) -> Any:
        """Play an action.

        Raises:
            EpisodeFailed: the environment failed.
            ContractError: no episode asks for an action.
        """
        if self._episode is None:
            raise ContractError("step: expected an episode, got none. Reset first.")
        result = await self._episode.act(action.message)
        self.state.step_count += 1
        stop = self._episode.trajectory.stop_reason
        facts = {**result.info, "score": result.score, "truncated": result.truncated}
        return self.observation_class(
            messages=as_messages(result.observation),
            done=self._episode.over,
            reward=result.reward,
            metadata=facts if stop is None else {**facts, "stop_reason": stop.value},
        )

    def reset(self, **kwargs: Any) -> Any:
        """Refuse: OpenEnv's servers prefer the async form."""
        raise NotImplementedError(
            "ServedSession: expected calls of reset_async and step_async, got others. Await them."
        )

    step = reset

    def close(self) -> None:
        """Close the episode."""
        if self._episode is not None and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._episode.aclose(), self._loop).result(_CLOSE_S)

    def list_splits(self) -> list[str]:
        """Return the one split."""
        return [SPLIT]

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks."""
        return len(self._served.tasks)

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the id and prompt of a task, without its label."""
        task = self._served.tasks[index]
        return {"id": task.task_id, "index": index, "prompt": task.prompt}

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """Return the tasks of a range, as a slice."""
        return [self.get_task(split, index) for index in range(len(self._served.tasks))[start:stop]]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return all tasks."""
        return self.get_task_range(split)


def openenv_app(served: ServedTasks) -> Any:
    """Return the ASGI application of OpenEnv's server for these tasks.

    Raises:
        MissingDependency: OpenEnv is not installed.
    """
    server = import_library("openenv.core.env_server.http_server", "openenv")
    types = import_library("openenv.core.env_server.types", "openenv")
    interfaces = import_library("openenv.core.env_server.interfaces", "openenv")
    from pydantic import create_model

    listed = (list[dict[str, Any]], ...)
    action = create_model("TextAction", __base__=types.Action, message=(str, ...))
    observation = create_model(
        "MessagesObservation", __base__=types.Observation, messages=listed, tools=(list[dict[str, Any]], [])
    )
    bases = (ServedSession, interfaces.Environment)

    def session() -> Any:
        return type("ServedEnvironment", bases, {"observation_class": observation, "state": types.State()})(served)

    return server.create_app(
        session, action, observation, env_name=served.source.cls.__name__, max_concurrent_envs=served.max_sessions
    )
