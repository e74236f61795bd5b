"""A clock for simulations: an event loop whose time jumps to the next timer whenever nothing is left to do.

Sleeps, timeouts and deadlines (`asyncio.sleep`, `asyncio.timeout`, `Limits`) take no real time, in the order in which
they would end. Time never jumps while others work for the loop: plain methods in threads, `asyncio.to_thread`, worker
processes, programs in a local sandbox, calls of MCP tools, and processes that asyncio started, unless they have a stdin
that is open. It stands still for them, so how long they really take changes nothing. For a connection or a pipe it
stands still until half a second goes by without a word: of one that is open nobody knows whether it will ever say
something. Await what takes longer, and threads that somebody else started, within `agentenv.agent.outside()`.

Example:
    >>> async def night():
    ...     await asyncio.sleep(8 * 3600)
    ...     return "morning"
    >>> clock = VirtualClock()
    >>> run_virtual(night(), clock=clock), clock.elapsed_s
    ('morning', 28800.0)
"""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from types import TracebackType
from typing import Any, Self, TypeVar

from agentenv.errors import ContractError

T = TypeVar("T")

PATIENCE_S = 5.0
"""Real seconds for which time stands still at most, without a word from those outside."""
_QUIET_S = 0.5
"""The same where nobody is known to work and there are only open connections, which may well be idle."""


class _JumpingSelector(selectors.DefaultSelector):
    """Gives what is ready; where nothing is, and nobody outside works, moves the loop's time instead of waiting."""

    loop: VirtualLoop
    own: int | None = None
    """The descriptor by which threads wake the loop, the first of all."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: frozenset[int] = frozenset()
        """Descriptors of others: each is somebody who may have something to say."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """As selectors do; whoever had this descriptor before is forgotten."""
        key = super().register(fileobj, events, data)
        if self.own is None:
            self.own = key.fd
        else:
            self._watched |= {key.fd}
            self.loop.expect(key.fd)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """As selectors do."""
        key = super().unregister(fileobj)
        self._watched -= {key.fd}
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready; in virtual time this blocks for those outside only."""
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        return self.loop.idle(timeout, self._watched, super().select)


Select = Callable[[float | None], list[tuple[selectors.SelectorKey, int]]]


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop of a `VirtualClock`; its time begins at 0."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._now, self._patience_s = 0.0, patience_s
        self._outside: set[object] = set()
        self._processes: list[asyncio.SubprocessTransport] = []
        self._silent: frozenset[object] = frozenset()  # descriptors, processes, and members of _outside
        self.num_jumps = self.num_stalls = 0
        self.real_wait_s = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)
        self._resolution = time.get_clock_info("monotonic").resolution
        self._clock_resolution = self._resolution  # asyncio's own: a timer that is no further away than this comes now

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As event loops do; a timer that never comes is none, or time would jump towards it for ever."""
        if when == math.inf:
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(when, callback, *args, context=context)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """While others work for this loop, in here, its time stands still."""
        who = object()
        self._outside.add(who)
        try:
            yield
        finally:
            self._outside.discard(who)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """As event loops do; time stands still until it is done."""
        future = super().run_in_executor(executor, func, *args)
        self._outside.add(future)
        future.add_done_callback(self._outside.discard)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """As event loops do; time stands still until its threads have ended, so that no timeout is met."""
        with self.outside():
            await super().shutdown_default_executor()

    async def subprocess_exec(self, *args: Any, **options: Any) -> Any:
        """As event loops do; time stands still until the process ends."""
        transport, protocol = await super().subprocess_exec(*args, **options)
        self._processes.append(transport)
        return transport, protocol

    async def subprocess_shell(self, *args: Any, **options: Any) -> Any:
        """As event loops do; time stands still until the process ends."""
        transport, protocol = await super().subprocess_shell(*args, **options)
        self._processes.append(transport)
        return transport, protocol

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        """As event loops do; an answer is waited for anew after every write."""
        return self._asking(*await super().create_connection(*args, **options))

    async def create_unix_connection(self, *args: Any, **options: Any) -> Any:
        """As event loops do; an answer is waited for anew after every write."""
        return self._asking(*await super().create_unix_connection(*args, **options))

    def _asking(self, transport: Any, protocol: Any) -> tuple[Any, Any]:
        descriptor, write = transport.get_extra_info("socket").fileno(), transport.write

        def asking_write(data: Any) -> None:
            """Whoever is written to may answer."""
            self.expect(descriptor)
            write(data)

        transport.write = asking_write
        return transport, protocol

    def expect(self, descriptor: int) -> None:
        """Wait for this one again."""
        self._silent -= {descriptor}

    def idle(self, timeout: float | None, watched: frozenset[int], select: Select) -> list[Any]:
        """Nothing is ready: wait for those outside, or jump to the next timer.

        Whoever says nothing for the clock's patience is not waited for again: a method that hangs meets its deadline,
        and an idle connection holds nothing up. New work outside is waited for.

        Raises:
            ContractError: no timer and nobody outside is left, so that nothing would ever happen.
        """
        self._processes = [process for process in self._processes if process.get_returncode() is None]
        working = frozenset((*watched, *self._outside, *(each for each in self._processes if not _listens(each))))
        self._silent &= working
        waited_for = working - self._silent
        if timeout is None or waited_for:
            known = timeout is None or not waited_for <= watched
            began = time.monotonic()
            patience_s = None if timeout is None and working else self._patience_s
            ready = select(patience_s if known else min(_QUIET_S, self._patience_s))
            self.real_wait_s += time.monotonic() - began
            if ready:
                self._silent -= {key.fd for key, _ in ready}
                return ready
            self._give_up(working, timeout, known=known)
        self.num_jumps += 1
        self._now += timeout or 0.0
        # After 2**24 s a float has no steps as small as the clock's, and the timer would never be reached.
        self._clock_resolution = max(self._resolution, 2 * math.ulp(self._now))
        return select(0)

    def _give_up(self, working: frozenset[object], timeout: float | None, *, known: bool) -> None:
        if timeout is None:
            raise ContractError(
                "VirtualClock: expected somebody to wait for, got no timer, thread, process or socket: what is awaited "
                "will never come. Look for a future that nobody sets, or two tasks that wait for each other."
            )
        self.num_stalls += known
        self._silent = working


def _listens(process: asyncio.SubprocessTransport) -> bool:
    """It may be waiting for our next word: such as a server, which is heard over its pipes when it has something."""
    stdin: Any = process.get_pipe_transport(0)
    return stdin is not None and not stdin.is_closing()


class VirtualClock:
    """Runs coroutines in virtual time, one after another on one loop; a context manager, or closed by `close`.

    Example::

        with VirtualClock() as clock:
            trajectory = clock.run(episode())
            assert clock.elapsed_s < 60
    """

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        """The loop is made at the first `run`.

        Args:
            patience_s: real seconds after which time goes on although somebody outside still works: a plain method
                that hangs then meets its deadline. Raise it where threads compute for longer.
        """
        self._patience_s = patience_s
        self._runner: asyncio.Runner | None = None
        self._loop: VirtualLoop | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine gives, as `asyncio.run` would; time goes on from where the last one ended.

        Raises:
            ContractError: an event loop runs here already.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._ready().run(work)
        work.close()
        raise ContractError(
            "VirtualClock.run: expected no running event loop, got one. Await the coroutine in a test that is run on "
            "the clock, or call this from a plain function."
        )

    @property
    def elapsed_s(self) -> float:
        """Virtual seconds so far."""
        return 0.0 if self._loop is None else self._loop.time()

    @property
    def num_jumps(self) -> int:
        """How often time jumped to a timer."""
        return 0 if self._loop is None else self._loop.num_jumps

    @property
    def num_stalls(self) -> int:
        """How often patience ended: somebody outside worked for longer, and time went on without them."""
        return 0 if self._loop is None else self._loop.num_stalls

    @property
    def real_wait_s(self) -> float:
        """Real seconds in which the loop waited for threads, processes and sockets."""
        return 0.0 if self._loop is None else self._loop.real_wait_s

    def close(self) -> None:
        """End the loop and what still runs on it; again is harmless."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ready(self) -> asyncio.Runner:
        if self._runner is None:
            self._loop = loop = VirtualLoop(self._patience_s)
            self._runner = asyncio.Runner(loop_factory=lambda: loop)
        return self._runner


def run_virtual(work: Coroutine[Any, Any, T], *, clock: VirtualClock | None = None) -> T:
    """What a coroutine gives, run in virtual time: `asyncio.run` without the waiting.

    With `clock` on that one, which then says how long it took; without, on one of its own.

    Raises:
        ContractError: an event loop runs here already.
    """
    if clock is not None:
        return clock.run(work)
    with VirtualClock() as own:
        return own.run(work)
