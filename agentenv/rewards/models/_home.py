"""The one event loop on which a scorer lives that many event loops ask."""

from __future__ import annotations

import asyncio
import os
import threading
from abc import abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentenv.deadlines import waiting
from agentenv.errors import AgentEnvError, ConfigError, InfraError, MissingDependency
from agentenv.rewards.models._counting import CountingScorer, closed_error
from agentenv.rewards.models.types import Conversation, Scored

_T = TypeVar("_T")
_JOIN_S = 5.0


class Died(InfraError):
    """The process that scored is gone: it scores nothing any more, another one may."""


class Home:
    """An event loop in a daemon thread, for callers on any other; `end` ends it."""

    def __init__(self, name: str) -> None:
        self._pid, self._name = os.getpid(), name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._lock = threading.Lock()  # guards `_ended`, and that nothing is sent there after it
        self._ended = False
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What a coroutine gives, run there; cancelling this cancels it.

        Raises:
            InfraError: the loop ended, now or meanwhile, or is one of the process that this one was forked from.
            BaseException: what the coroutine raised.
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
            raise self._gone() from None  # what ended was the loop there, not who waits here

    async def end(self) -> None:
        """End the loop and its thread; what still runs there is cancelled, and fails here."""
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


class HomeScorer(CountingScorer):
    """A scorer on an event loop of its own, which starts at the first score; any event loop may ask it.

    Args:
        where: the scorer's name, for errors.
        name: of its thread.
    """

    def __init__(self, where: str, name: str) -> None:
        super().__init__()
        self._where, self._name = where, name
        self._opening = threading.Lock()  # guards the next, and that nobody opens it anew when it is closed
        self._home: Home | None = None
        self._starting: asyncio.Task[None] | None = None  # this and the next are the home's
        self._refused: AgentEnvError | None = None
        self._closed = False

    async def score(self, conversation: Conversation) -> Scored:
        """The model's raw number of a conversation; cancelling it cancels what was asked.

        Raises:
            DataError: the conversation cannot be rendered, or has a token that the model does not know.
            InfraError: the model failed on it, died, gave no finite number or none in time, or the scorer was closed.
            ConfigError: the model cannot be loaded.
        """
        await self._started()
        return await self._at_home().run(self._counted(conversation))

    async def close(self) -> None:
        """Fail what waits, end what was started and this scorer's thread; again is harmless."""
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
        """Start it, if it does not run; no time of an agent's step goes by meanwhile."""
        home = self._at_home()
        if not self._alive:
            with waiting():
                await home.run(self._ready())

    def _at_home(self) -> Home:
        with self._opening:
            if self._closed:
                raise closed_error(self._where)
            if self._home is None:
                self._home = Home(self._name)
            return self._home

    # --- at home ------------------------------------------------------------------------------------------------------

    async def _ready(self) -> None:
        """Wait until it runs; all who wait share one start, and what is wrong with the arguments stays wrong."""
        if self._refused is not None:
            raise self._refused
        if self._alive:
            return
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._begin())
            self._starting.add_done_callback(_heard)
        try:
            await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self._closed:
                raise closed_error(self._where) from None
            raise

    async def _begin(self) -> None:
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
        """Whether it can be asked."""

    @abstractmethod
    async def _start(self) -> None:
        """Start it, or wait until it lives again; where it cannot, free what was started."""

    @abstractmethod
    async def _end(self) -> None:
        """Free what there is, if anything."""


def _heard(task: asyncio.Task[None]) -> None:
    # All who waited may have been cancelled: then nobody asks for the exception, which asyncio would complain about.
    if not task.cancelled():
        task.exception()
