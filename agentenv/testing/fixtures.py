"""The objects behind the fixtures of the pytest plugin: episodes for plain and async tests."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from agentenv._util.loop_thread import is_loop_running
from agentenv.core.engine import Tokenizer
from agentenv.core.trajectory import Group, Trajectory
from agentenv.engines.scripted import Script, ScriptedEngine
from agentenv.errors import ConfigError, EpisodeFailed
from agentenv.testing.clock import VirtualClock
from agentenv.testing.episodes import Setup, play, play_all

T = TypeVar("T")


def _no_marker(fixture: str) -> ConfigError:
    return ConfigError(
        f'{fixture}: expected a test with @pytest.mark.agentenv("NAME", …), got one without it. Mark it, or name the '
        "environment: run_episode(NAME, policy)."
    )


class Bench:
    """One test's place to run episodes."""

    def __init__(
        self,
        setup: Setup | None = None,
        *,
        expects_error: bool = False,
        clock: VirtualClock | None = None,
    ) -> None:
        self._setup, self._clock = setup, clock
        self._expects_error = expects_error
        self.tokenizer: Tokenizer = (setup or Setup("")).chat().tokenizer
        self._coroutines: list[Coroutine[Any, Any, Any]] = []
        """Coroutines that async tests must await."""

    @classmethod
    def of_marker(cls, marker: tuple[Sequence[Any], Mapping[str, Any]] | None, **options: Any) -> Bench:
        """Return a bench with the arguments of a test's marker; `marker` is None if there is none.

        Raises:
            ConfigError: the marker's arguments are not `expects_error` and those of `Setup`.
        """
        if marker is None:
            return cls(None, **options)
        if len(marker[0]) > 2:
            raise ConfigError(
                f"pytest.mark.agentenv: expected env and policy, then keywords, got {len(marker[0])} values. Name the "
                "others: data=…, env_kwargs=…."
            )
        try:
            values = dict(marker[1])
            expects_error = bool(values.pop("expects_error", False))
            setup = Setup(*marker[0], **values)
        except TypeError as error:
            names = ", ".join([*(each.name for each in fields(Setup)), "expects_error"])
            raise ConfigError(
                f"pytest.mark.agentenv: expected some of {names}, got {error}. Change the mark."
            ) from error
        return cls(setup, expects_error=expects_error, **options)

    def scripted_engine(self, script: Script, tokenizer: Tokenizer | None = None, **options: Any) -> ScriptedEngine:
        """Return a ScriptedEngine with this test's tokenizer."""
        return ScriptedEngine(script, tokenizer or self.tokenizer, **options)

    def run_episode(self, *args: Any, **options: Any) -> Any:
        """Run one episode and return its Trajectory, or on an event loop a coroutine that returns it."""
        return self._finish(play(self._make_setup(args, options)))

    def run_group(self, *args: Any, n: int = 8, **options: Any) -> Any:
        """Run `n` episodes of the first task and return a Group, or on an event loop a coroutine that returns it."""
        setup = self._make_setup(args, options)

        async def group() -> Group:
            found = await play_all(setup, num_tasks=1, num_samples=n, concurrency=n)
            return Group(found[0].group_id, tuple(found))

        return self._finish(group())

    def run_episodes(
        self, *args: Any, num_tasks: int | None = None, num_samples: int = 1, concurrency: int = 64, **options: Any
    ) -> Any:
        """Run episodes of many tasks and return their trajectories, or on an event loop a coroutine that does."""
        setup = self._make_setup(args, options)
        return self._finish(play_all(setup, num_tasks=num_tasks, num_samples=num_samples, concurrency=concurrency))

    def marked_episode(self) -> Trajectory:
        """Run the episode of the marker.

        Raises:
            ConfigError: the test has no marker.
            EpisodeFailed: the episode failed, and the marker does not have `expects_error=True`.
        """
        if self._setup is None:
            raise _no_marker("episode")
        trajectory = self._run(play(self._make_setup((), {})))
        if (error := trajectory.error) is not None and not self._expects_error:
            place = f" at {error.place}" if error.place else ""
            raise EpisodeFailed(
                f"episode: expected an episode without an error, got {error.type} in {error.where}{place}: "
                f"{error.message}\nFix it, or mark the test with expects_error=True.\n{error.traceback}".rstrip()
            )
        return trajectory

    def marked_env(self) -> Setup:
        """Return the setup of the marker.

        Raises:
            ConfigError: the test has no marker.
        """
        if self._setup is None:
            raise _no_marker("env")
        return self._make_setup((), {})

    def _make_setup(self, args: Sequence[Any], options: Mapping[str, Any]) -> Setup:
        """Return the marker's setup with the values of a call; a call with an environment ignores the marker."""
        positional = dict(zip(("env", "policy"), args, strict=False))
        if len(args) > 2:
            raise ConfigError(
                f"run_episode: expected env and policy, then keywords, got {len(args)} values. Name them."
            )
        values = {**positional, **options}
        if self._setup is None and "env" not in values:
            raise _no_marker("run_episode")
        setup = Setup(**values) if self._setup is None or "env" in values else replace(self._setup, **values)
        self.tokenizer = setup.chat().tokenizer
        return setup

    def _finish(self, work: Coroutine[Any, Any, T]) -> T | Coroutine[Any, Any, T]:
        """Return the result, or the coroutine to await if an event loop is running."""
        if not is_loop_running():
            return self._run(work)
        self._coroutines.append(work)
        return work

    def num_forgotten(self) -> int:
        """Return the number of coroutines that an async test never awaited."""
        forgotten = [work for work in self._coroutines if inspect.getcoroutinestate(work) == inspect.CORO_CREATED]
        for work in forgotten:
            work.close()
        return len(forgotten)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._clock is not None:
            return self._clock.run(work)
        # A new loop that is not set as current: other plugins keep theirs.
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(work)
