"""Scorers with their own event loop, which callers on any event loop may use."""

from __future__ import annotations

import asyncio
import os
import threading
from abc import abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentenv._util.calls import retrieve_exception, waiting
from agentenv.errors import AgentEnvError, ConfigError, InfraError, MissingDependency
from agentenv.rewards.models.types import Conversation, CountingScorer, Scored, closed_error

_T = TypeVar("_T")
_JOIN_S = 5.0


class WorkerDied(InfraError):
    """The scoring process is gone; another one may score the conversation."""


class ScorerLoop:
    """An event loop in a daemon thread, for callers on other loops; `end` ends it."""

    def __init__(self, name: str) -> None:
        self._pid, self._name = os.getpid(), name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._lock = threading.Lock()  # guards `_ended`: nothing is submitted after it is set
        self._ended = False
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a coroutine, run on this loop; cancelling this cancels it.

        Raises:
            InfraError: the loop ended, or it belongs to the process that this one was forked from.
            BaseException: raised by the coroutine.
        """
        with self._lock:
            if self._ended or self._pid != os.getpid():
                work.close()
                raise self._gone()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._gone() from None  # that loop ended; the caller was not cancelled

    async def end(self) -> None:
        """End the loop and its thread; running work is cancelled, and its callers get an InfraError."""
        with self._lock:
            if self._ended or self._pid != os.getpid():
                return
            self._ended = True
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        await asyncio.to_thread(self._thread.join, _JOIN_S)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        self._loop.call_soon(self._loop.stop)

    def _gone(self) -> InfraError:
        return InfraError(f"{self._name}: expected an open scorer of this process, got a closed one. Make a new one.")


class LoopScorer(CountingScorer):
    """A scorer with its own event loop, which starts at the first score; callers may use any event loop.

    Args:
        where: the scorer's name, for errors.
        name: name of the thread.
    """

    def __init__(self, where: str, name: str) -> None:
        super().__init__()
        self._where, self._name = where, name
        self._opening = threading.Lock()  # guards `_home`, which is not opened again after `close`
        self._home: ScorerLoop | None = None
        self._starting: asyncio.Task[None] | None = None  # this and the next belong to the loop of `_home`
        self._refused: AgentEnvError | None = None
        self._closed = False

    async def score(self, conversation: Conversation) -> Scored:
        """Return the model's raw score of a conversation; cancelling it cancels the request.

        Raises:
            DataError: the conversation cannot be rendered, or has a token unknown to the model.
            InfraError: the model failed or died, returned no finite number in time, or the scorer was closed.
            ConfigError: the model cannot be loaded.
        """
        await self._started()
        return await self._at_home().run(self._counted(conversation))

    async def close(self) -> None:
        """Fail waiting callers, and end the model and this scorer's thread; calling it again is harmless."""
        with self._opening:
            self._closed = True
            home, self._home = self._home, None
        if home is None:
            return
        try:
            await home.run(self._close())
        finally:
            await home.end()

    async def _started(self) -> None:
        """Start the model unless it runs; the deadline of an agent's step is paused meanwhile."""
        home = self._at_home()
        if not self._alive:
            with waiting():
                await home.run(self._ready())

    def _at_home(self) -> ScorerLoop:
        with self._opening:
            if self._closed:
                raise closed_error(self._where)
            if self._home is None:
                self._home = ScorerLoop(self._name)
            return self._home

    # --- at home ------------------------------------------------------------------------------------------------------

    async def _ready(self) -> None:
        """Wait until the model runs; all callers share one start, and wrong arguments are not tried again."""
        if self._refused is not None:
            raise self._refused
        if self._alive:
            return
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start_once())
            self._starting.add_done_callback(retrieve_exception)
        try:
            await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self._closed:
                raise closed_error(self._where) from None
            raise

    async def _start_once(self) -> None:
        try:
            await self._start()
        except (ConfigError, MissingDependency) as error:
            self._refused = error
            raise

    async def _close(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await self._end()

    @property
    @abstractmethod
    def _alive(self) -> bool:
        """Whether the model can score."""

    @abstractmethod
    async def _start(self) -> None:
        """Start the model, or wait until it runs again; if it cannot start, release what was started."""

    @abstractmethod
    async def _end(self) -> None:
        """Release the model, if it was started."""
