"""A clock for simulations: an event loop whose time jumps to the next timer whenever nothing is left to do.

Sleeps, timeouts and deadlines (`asyncio.sleep`, `asyncio.timeout`, `Limits`) take no real time, in the order in which
they would end. Time never jumps during external work for the loop: plain methods in threads,
`asyncio.to_thread`, worker processes, programs in a local sandbox, calls of MCP tools, and processes that asyncio
started, unless they have an open stdin. It stands still for them, so their real duration changes nothing. For a
connection or a pipe it stands still until half a second passes without data, since an open one may never send any. Wrap
longer waits, and waits for threads that other code started, in `agentenv._util.virtual_time.external_work()`.

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

from agentenv._util.loop_thread import is_loop_running
from agentenv.errors import ContractError

T = TypeVar("T")

PATIENCE_S = 5.0
"""Maximum real seconds for which time stands still without a sign of external work."""
_QUIET_S = 0.5
"""The same if there are only open connections, which may be idle."""


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that moves the loop's time instead of waiting if nothing is ready and no external work runs."""

    loop: VirtualLoop
    own: int | None = None
    """The first descriptor, by which threads wake the loop."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: frozenset[int] = frozenset()
        """Descriptors of connections and pipes, which may receive data."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Register a descriptor; see `selectors`. An earlier user of the number is forgotten."""
        key = super().register(fileobj, events, data)
        if self.own is None:
            self.own = key.fd
        else:
            self._watched |= {key.fd}
            self.loop.expect(key.fd)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Unregister a descriptor; see `selectors`."""
        key = super().unregister(fileobj)
        self._watched -= {key.fd}
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; in virtual time this blocks only for external work."""
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
        self.num_jumps = self.num_stalls = 0  # stalls: external work exceeded the patience, and time continued
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)
        self._resolution = time.get_clock_info("monotonic").resolution
        self._clock_resolution = self._resolution  # asyncio's own: a timer at most this far away is due now

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback; see `asyncio`. An infinite timer is ignored, or time would jump towards it forever."""
        if when == math.inf:
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(when, callback, *args, context=context)

    @contextmanager
    def external_work(self) -> Iterator[None]:
        """Stop the loop's time during external work in the block."""
        who = object()
        self._outside.add(who)
        try:
            yield
        finally:
            self._outside.discard(who)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run a function in an executor; see `asyncio`. Time stands still until it is done."""
        future = super().run_in_executor(executor, func, *args)
        self._outside.add(future)
        future.add_done_callback(self._outside.discard)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Shut the executor down; see `asyncio`. Time stands still until its threads end."""
        with self.external_work():
            await super().shutdown_default_executor()

    async def subprocess_exec(self, *args: Any, **options: Any) -> Any:
        """Start a process; see `asyncio`. Time stands still until the process ends."""
        transport, protocol = await super().subprocess_exec(*args, **options)
        self._processes.append(transport)
        return transport, protocol

    async def subprocess_shell(self, *args: Any, **options: Any) -> Any:
        """Start a process; see `asyncio`. Time stands still until the process ends."""
        transport, protocol = await super().subprocess_shell(*args, **options)
        self._processes.append(transport)
        return transport, protocol

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        """Connect; see `asyncio`. Every write restarts the wait for an answer."""
        return self._asking(*await super().create_connection(*args, **options))

    async def create_unix_connection(self, *args: Any, **options: Any) -> Any:
        """Connect; see `asyncio`. Every write restarts the wait for an answer."""
        return self._asking(*await super().create_unix_connection(*args, **options))

    def _asking(self, transport: Any, protocol: Any) -> tuple[Any, Any]:
        descriptor, write = transport.get_extra_info("socket").fileno(), transport.write

        def asking_write(data: Any) -> None:
            self.expect(descriptor)
            write(data)

        transport.write = asking_write
        return transport, protocol

    def expect(self, descriptor: int) -> None:
        """Wait for this descriptor again."""
        self._silent -= {descriptor}

    def idle(self, timeout: float | None, watched: frozenset[int], select: Select) -> list[Any]:
        """Wait for external work, or jump to the next timer; called if nothing is ready.

        External work that shows nothing for the clock's patience is not waited for again: a method that hangs reaches
        its deadline, and an idle connection delays nothing. New external work is waited for.

        Raises:
            ContractError: no timer and no external work is left, so the loop would wait forever.
        """
        self._processes = [process for process in self._processes if process.get_returncode() is None]
        # A process with an open stdin may wait for input, and its pipes show output.
        stdins = ((each, each.get_pipe_transport(0)) for each in self._processes)
        silent = [each for each, stdin in stdins if stdin is None or stdin.is_closing()]
        working = frozenset((*watched, *self._outside, *silent))
        self._silent &= working
        waited_for = working - self._silent
        if timeout is None or waited_for:
            known = timeout is None or not waited_for <= watched
            patience_s = None if timeout is None and working else self._patience_s
            ready = select(patience_s if known else min(_QUIET_S, self._patience_s))
            if ready:
                self._silent -= {key.fd for key, _ in ready}
                return ready
            if timeout is None:
                raise ContractError(
                    "VirtualClock: expected a timer, thread, process or socket to wait for, got none: the awaited "
                    "result will never come. Look for a future without a setter, or two tasks that wait for each other."
                )
            self.num_stalls += known
            self._silent = working
        self.num_jumps += 1
        self._now += timeout or 0.0
        # After 2**24 s a float has no steps as small as the clock's, and the timer would never be reached.
        self._clock_resolution = max(self._resolution, 2 * math.ulp(self._now))
        return select(0)


class VirtualClock:
    """A clock that runs coroutines in virtual time, one after another on one loop. It is a context manager.

    Example::

        with VirtualClock() as clock:
            trajectory = clock.run(episode())
            assert clock.elapsed_s < 60
    """

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        """Prepare the clock; the first `run` creates the loop.

        Args:
            patience_s: real seconds after which time continues during external work, so that a plain method that
                hangs reaches its deadline. Raise it if threads compute for longer.
        """
        self._patience_s = patience_s
        self._runner: asyncio.Runner | None = None
        self._loop: VirtualLoop | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result, as `asyncio.run` does. Time continues from the end of the last run.

        Raises:
            ContractError: an event loop is already running in this thread.
        """
        if is_loop_running():
            work.close()
            raise ContractError(
                "VirtualClock.run: expected no running event loop, got one. Await the coroutine in a test that is run "
                "on the clock, or call this from a plain function."
            )
        if self._runner is None:
            self._loop = loop = VirtualLoop(self._patience_s)
            self._runner = asyncio.Runner(loop_factory=lambda: loop)
        return self._runner.run(work)

    @property
    def elapsed_s(self) -> float:
        """Virtual seconds so far."""
        return 0.0 if self._loop is None else self._loop.time()

    def close(self) -> None:
        """Close the loop and cancel its tasks. Repeated calls are harmless."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run_virtual(work: Coroutine[Any, Any, T], *, clock: VirtualClock | None = None) -> T:
    """Run a coroutine in virtual time and return its result: `asyncio.run` without the waiting.

    With `clock`, run on that clock, which then has the elapsed time; without, on a new one.

    Raises:
        ContractError: an event loop is already running in this thread.
    """
    if clock is not None:
        return clock.run(work)
    with VirtualClock() as own:
        return own.run(work)
