"""Calls of user-written functions, with deadlines: async ones are awaited, each plain one runs in its own thread."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from dis import opname
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from agentenv._util.virtual_time import external_work
from agentenv.errors import ContractError, InfraError

_Instance = TypeVar("_Instance")
_Result = TypeVar("_Result")

_CANCEL_GRACE_S = 1.0
"""Time for a cancelled call of an agent to release its resources, and for its thread to end."""
_THREADS_END_S = 5.0
"""Longest time in which `close` waits for threads that continue."""
MAX_GIVEN_BACK = 2.0
"""Largest part of its limit that a method, or a program of the sandbox, gets again because others took the time."""
_SETS = ("BUILD", "CACHE", "LOAD", "RESUME", "RETURN", "STORE")
"""How instructions begin that load, make and store values; LOAD_ATTR and STORE_SUBSCR may run code of others."""
_THREAD_WAITS_S = (0.05, 0.2, 0.8)
"""Waits before further attempts to start a thread: others may end in the meantime."""


def accepted_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that `function` names, or all of them if it has `**kwargs`."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


class AgentThreads:
    """The threads of plain functions that the methods of one agent started and that still run.

    `close` waits for them: a database that is closed while a thread reads it ends the process.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = set[asyncio.Future[None]]()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the threads that `call` starts in the block and in tasks that the block makes."""
        self._loop, outer = asyncio.get_running_loop(), _THREADS.set(self)
        try:
            yield
        finally:
            _THREADS.reset(outer)

    def add(self, ended: asyncio.Future[None]) -> None:
        """Note a thread until `ended` has a result, unless it works for another event loop than the block."""
        if ended.get_loop() is self._loop:
            self._running.add(ended)
            ended.add_done_callback(self._running.discard)

    async def then(self, close: Callable[[], Awaitable[_Result]]) -> _Result:
        """Await `close()` after the threads, or after 5 s: `close` may be what ends a thread that waits."""
        try:
            if self._running:
                with external_work():
                    await asyncio.wait(self._running, timeout=_THREADS_END_S)
        finally:
            result = await close()
        return result


_OF_NO_AGENT = AgentThreads()
_THREADS: ContextVar[AgentThreads] = ContextVar("threads", default=_OF_NO_AGENT)


async def call(
    function: Callable[..., Any], *args: Any, on_late: Callable[[], asyncio.Future[Any] | None] | None = None
) -> Any:
    """Await `function(*args)` if it is async; run it in its own thread if it is plain.

    Each call has a daemon thread instead of a pool's: a call that never returns costs its thread, but blocks neither a
    pool slot that other episodes need nor the exit of the interpreter. A cancelled call waits a little for the end of
    its thread. `on_late` is called if a plain function has returned and its call is cancelled; what it returns is
    waited for as well.

    Raises:
        InfraError: no thread could be started; the function was not called.
    """
    if inspect.iscoroutinefunction(function):
        with _typed(function):
            return await function(*args)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    ended: asyncio.Future[None] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        late = on_late() if future.cancelled() and error is None and on_late is not None else None
        _settle(future, result, error)
        if late is not None:
            late.add_done_callback(lambda _: ended.set_result(None))
        elif not ended.done():
            ended.set_result(None)

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(function, *args)
        except BaseException as raised:  # noqa: BLE001 - carried to the caller, not handled here
            can_cross = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if can_cross else _as_error(function, raised)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    try:
        with external_work():
            await _start_thread(run, getattr(function, "__qualname__", "call"))
            _THREADS.get().add(ended)
            result = await future
    except asyncio.CancelledError:
        if future.cancelled():
            await asyncio.wait({ended}, timeout=_CANCEL_GRACE_S)
        elif on_late is not None and future.done() and future.exception() is None:  # it returned at the same moment
            late = on_late()
            await asyncio.wait({late} if late is not None else {ended}, timeout=_CANCEL_GRACE_S)
        raise
    if not inspect.isawaitable(result):
        return result
    with _typed(function):
        return await result


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


_NEED_THE_LOOP: WeakSet[type] = WeakSet()
"""Classes whose plain constructor asks for the running event loop."""


async def create(cls: type[_Instance], kwargs: Mapping[str, Any]) -> _Instance:
    """Return a new instance of `cls`, whose constructor runs as `call` runs a function.

    An instance that is made after its call was cancelled is closed. A plain constructor that only sets attributes, or
    asks for the running event loop, such as one that makes an `aiohttp.ClientSession`, runs on it instead. An `async
    def __init__`, as OpenRLHF's queue-era files write it, is awaited.
    """
    init: Any = cls.__init__
    hashable: Any = cls  # mypy takes no type variable for one
    if init is object.__init__ or inspect.iscoroutinefunction(init) or cls in _NEED_THE_LOOP or _only_sets(hashable):
        return await create_here(cls, kwargs)
    instance = cls.__new__(cls)

    @functools.wraps(init)
    def construct() -> Any:
        return init(instance, **kwargs)

    try:
        await call(construct, on_late=partial(_close, instance))
    except RuntimeError as error:
        if "event loop" not in str(error):
            raise
        _NEED_THE_LOOP.add(cls)
        return await create_here(cls, kwargs)
    return instance


@functools.lru_cache(maxsize=64)
def _only_sets(cls: Any) -> bool:
    """Return True if a constructor cannot block: it sets plain attributes, without a call, a loop or an import."""
    code = getattr(cls.__init__, "__code__", None)
    if code is None or cls.__setattr__ is not object.__setattr__:
        return False
    names = {opname[each] for each in code.co_code[::2]}
    only_sets = names.isdisjoint(("LOAD_ATTR", "STORE_SUBSCR")) and all(name.startswith(_SETS) for name in names)
    return only_sets and not any(hasattr(getattr(cls, name, None), "__set__") for name in code.co_names)


async def create_here(cls: type[_Instance], kwargs: Mapping[str, Any]) -> _Instance:
    """Return a new instance of `cls`, whose constructor runs in this thread."""
    instance = cls.__new__(cls)
    with _typed(cls.__init__):
        started = cls.__init__(instance, **kwargs)
        if inspect.isawaitable(started):
            await started
    return instance


def _close(late: Any) -> asyncio.Future[Any] | None:
    """Close an instance that no one waits for any more."""
    close = getattr(late, "close", None)
    if close is None:
        return None
    work = asyncio.ensure_future(call(close))
    _CLOSING.add(work)
    work.add_done_callback(_CLOSING.discard)
    work.add_done_callback(retrieve_exception)
    return work


_CLOSING: set[asyncio.Future[Any]] = set()
"""asyncio itself keeps weak references only."""


async def _start_thread(run: Callable[[], None], name: str) -> None:
    for wait_s in (*_THREAD_WAITS_S, None):
        try:
            return threading.Thread(target=run, name=f"agentenv-{name}", daemon=True).start()
        except RuntimeError as error:
            if wait_s is None:
                raise InfraError(
                    f"{name}: expected a thread to run in, got {error} ({threading.active_count()} are running). "
                    "Lower --concurrency, or raise the limit on processes (ulimit -u)."
                ) from error
        await asyncio.sleep(wait_s)


@contextmanager
def _typed(function: Callable[..., Any]) -> Iterator[None]:
    """Turn exceptions of `function` that would end the event loop, or look like its end, into errors.

    A KeyboardInterrupt in the main thread is kept, since it may be the user's; in other threads it cannot be. A
    GeneratorExit from outside the task is kept too: it ends a coroutine that is no longer awaited.
    """
    task = _current_task()
    try:
        yield
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as stopped:
        if isinstance(stopped, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        if isinstance(stopped, GeneratorExit) and (task is None or task is not _current_task()):
            raise
        raise _as_error(function, stopped) from stopped


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs
        return None


def _as_error(function: Callable[..., Any], stopped: BaseException) -> Exception:
    # These cannot cross a future: they would end the event loop, pass for a cancellation or be refused.
    name = getattr(function, "__qualname__", repr(function))
    why = ": sys.exit would end the whole run" if isinstance(stopped, SystemExit) else ""
    error = ContractError(f"{name}: expected a return value, got {stopped!r}. Raise an Exception instead{why}.")
    error.__cause__ = stopped
    return error


class StepTimeout(Exception):
    """A method of the agent took longer than its limit."""


class _Clock:
    """A timer that ends a wait, and can be paused."""

    def __init__(self, limit_s: float, end: Callable[[None], None], outer: _Clock | None) -> None:
        self._loop, self._outer = asyncio.get_running_loop(), outer
        self._end, self._left_s, self._waits = end, limit_s, 0
        self._timer = self._loop.call_later(limit_s, end, None)
        self._more_s = MAX_GIVEN_BACK * limit_s
        self.over = False

    @contextmanager
    def still(self) -> Iterator[None]:
        """Pause this clock and the ones around it. If several callers pause it, the last one resumes it."""
        self._waits += 1
        if self._waits == 1 and not self.over:
            self._left_s = self._timer.when() - self._loop.time()
            self._timer.cancel()
        try:
            with nullcontext() if self._outer is None else self._outer.still():
                yield
        finally:
            self._waits -= 1
            if not self._waits and not self.over:
                self._timer = self._loop.call_later(max(self._left_s, 0.0), self._end, None)

    def give_back(self, seconds: float) -> None:
        """Add time to this clock and the ones around it, to each as much as it still takes."""
        more_s = min(seconds, self._more_s)
        self._more_s -= more_s
        if self._waits:
            self._left_s += more_s
        elif not self.over:
            self._timer.cancel()
            self._timer = self._loop.call_at(self._timer.when() + more_s, self._end, None)
        if self._outer is not None:
            self._outer.give_back(seconds)

    @property
    def left_s(self) -> float:
        """Seconds until this clock or one around it ends the wait."""
        own_s = self._left_s if self._waits else self._timer.when() - self._loop.time()
        return own_s if self._outer is None else min(own_s, self._outer.left_s)

    def cancel(self) -> None:
        """Stop the timer for good."""
        self.over = True
        self._timer.cancel()


_CLOCK: ContextVar[_Clock | None] = ContextVar("clock", default=None)


def waiting() -> AbstractContextManager[object]:
    """Return a context in which the running method's limit is paused, for waits until it is its turn."""
    clock = _CLOCK.get()
    return nullcontext() if clock is None else clock.still()


def seconds_left() -> float:
    """Return the rest of the running method's limit; infinity without one."""
    clock = _CLOCK.get()
    return math.inf if clock is None else clock.left_s


def give_back(seconds: float) -> None:
    """Add time that others took to the running method's limit, in all up to twice the limit."""
    clock = _CLOCK.get()
    if clock is not None:
        clock.give_back(seconds)


async def bounded(method: Callable[..., Any], *args: Any, limit_s: float, flag: str = "step_timeout_s") -> Any:
    """Call a method of an agent, for at most `limit_s`.

    The call has its own task: one that ignores its cancellation is abandoned and blocks no one.

    Raises:
        StepTimeout: the method took longer; `flag` names the limit.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()  # as asyncio.wait does, for one task only: this is every turn's

    def end(done: asyncio.Task[Any] | None) -> None:
        if done is not None:
            retrieve_exception(done)
        if not over.done():
            over.set_result(None)

    clock = _Clock(limit_s, end, _CLOCK.get())
    outer = _CLOCK.set(clock)
    work = loop.create_task(call(method, *args))
    _CLOCK.reset(outer)
    work.add_done_callback(end)
    try:
        await over
        if work.done():
            return work.result()
    finally:
        clock.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=_CANCEL_GRACE_S)
    name = getattr(method, "__qualname__", repr(method))
    service = ", or give a client a shorter timeout and raise InfraError from it" if flag == "step_timeout_s" else ""
    raise StepTimeout(f"{name}: expected an answer within {limit_s:g} s, got none. Raise {flag}{service}.")


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Cancel the block after so many seconds and continue behind it."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
            raise


def retrieve_exception(work: asyncio.Future[Any]) -> None:
    """Retrieve the exception of work that is abandoned, if it has one; asyncio would warn about it otherwise."""
    if not work.cancelled():
        work.exception()


async def run_to_completion(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Await `work` to its end, even if this is cancelled meanwhile; then raise the cancellation.

    `asyncio.shield` is not enough: its caller continues, and the end of the event loop cancels the work.

    Raises:
        CancelledError: this was cancelled and the work succeeded. Errors of the work are always raised.
    """
    task, is_cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            is_cancelled = True
    result = task.result()
    if is_cancelled:
        raise asyncio.CancelledError
    return result
