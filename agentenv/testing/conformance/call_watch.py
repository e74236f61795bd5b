"""Watches the calls that `agentenv check` makes: reports slow ones, and abandons one that blocks the event loop.

The check runs in a thread; the watch runs in the main thread, which the environment's code cannot block.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_stack
from types import CodeType, MethodType
from typing import Any

from agentenv._util.brief import brief
from agentenv._util.calls import call
from agentenv._util.paths import current_frames
from agentenv.core.types import Limits
from agentenv.episode.endpoint.agent import owns_its_loop
from agentenv.errors import InfraError
from agentenv.runs.watchdog import frames_of
from agentenv.testing.conformance.child import CheckProgress
from agentenv.testing.conformance.probes import line_in

ENV_METHODS = ("reset", "step", "on_truncate", "close")
OWN_LOOP_METHODS = ("run", "on_truncate", "close")
NOTIFY_CALL_EVERY_S = 5.0
NOTIFY_CHECK_EVERY_S = 10.0
_TICK_S = 0.05
_STALL_S = 0.5
"""A longer tick means that the machine gave this process no time, so the rest does not count for the call."""
SLOW_S = 3.0
"""A call of `step` that takes longer is left out of later episodes if others are quicker."""
_GRACE_S = 3.0
"""Extra time for a call that awaits, which its own deadline ends first."""
_MAX_HANGS = 3
"""After so many calls that hang, the check does not avoid further ones."""


class Hung(Exception):
    """A call exceeded its limit and did not end at its deadline, so it blocks the event loop."""

    def __init__(self, call: WatchedCall) -> None:
        super().__init__(call.method)
        self.call = call


class _Abandoned(BaseException):
    """Ends the thread of a check whose call blocked it, as soon as the call lets it."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """A `time.sleep` in a call on the event loop."""

    seconds: float
    line: int
    action: str | None


@dataclass(eq=False, slots=True)
class WatchedCall:
    """One call in progress."""

    method: str
    """Its name, or "import"."""
    file: str
    """The file whose lines show the progress of the call."""
    code: CodeType | None
    limit_s: float
    task: asyncio.Task[Any] | None = None
    action: str | None = None
    started: float = field(default_factory=time.monotonic)
    line: int | None = None
    """The last line seen."""
    stalled_s: float = 0.0
    """Seconds in which the process had no time to run."""
    num_notices: int = 0
    is_noted: bool = False
    """Its end has been noted."""


_CALL: ContextVar[WatchedCall | None] = ContextVar("watched_call", default=None)
"""The call that runs, in its task or thread."""


class CallWatch:
    """Tracks which call is in progress, for how long, and at which line.

    Args:
        notify: called with a line about each slow call.
        progress: where to record the call in progress, for the case that this process ends without an answer.
        limit_s: the limit of code that is not in such a call.
    """

    def __init__(
        self, notify: Callable[[str], None], progress: CheckProgress | None = None, limit_s: float = 30.0
    ) -> None:
        self.notify = notify
        self.progress = progress
        self.limit_s = limit_s
        self.lines: dict[str, int] = {}
        """The last line seen of each method."""
        self.slow: dict[str, float] = {}
        """Seconds of the actions whose `step` took longer than `SLOW_S`, or hung."""
        self.quick: dict[str, None] = {}
        """Actions whose `step` was quicker, in the order of the first calls."""
        self.num_hangs = 0
        """Number of calls of `step` that exceeded their limit."""
        self.sleeps: dict[str, Sleep] = {}
        """The longest `time.sleep` of each method on the event loop."""
        self.is_stuck = False
        """A call hangs that no choice of actions avoids."""
        self._current: WatchedCall | None = None
        self._thread = 0
        self._abandoned: set[int] = set()

    @contextmanager
    def during(self, method: str, function: Any, limit_s: float, given: Any = None) -> Iterator[None]:
        """Mark a function, or the import of a file by its path, as the call in progress; `given` is its argument."""
        code = getattr(function, "__code__", None)
        file = code.co_filename if code is not None else str(Path(str(function)).absolute())
        task = None
        with suppress(RuntimeError):
            task = asyncio.current_task()
        action = given.get("action_text") if isinstance(given, Mapping) else None
        mine, before = WatchedCall(method, file, code, limit_s, task, action), self._current
        self._current = mine
        outer = _CALL.get()
        _CALL.set(mine)
        if self.progress is not None:
            where, line = (code.co_qualname, code.co_firstlineno) if code is not None else (method, 0)
            text = None if action is None else brief(action)
            self.progress.write(where=where, file=file, line=line, limit_s=limit_s, action=text)
        try:
            yield
        finally:
            _CALL.set(outer)  # a reset fails in the context of another task, which may collect this one
            self._note_end(mine)
            if self._current is mine:
                self._current = before
            if self.progress is not None:
                self.progress.write(where="", action=None)

    def _note_end(self, ended: WatchedCall, *, hangs: bool = False) -> None:
        """Note whether a call was slow; a call that was abandoned counts once."""
        if ended.is_noted:
            return
        ended.is_noted = True
        seconds = time.monotonic() - ended.started - ended.stalled_s
        hangs = hangs or seconds > ended.limit_s
        is_step = ended.method == "step" and isinstance(ended.action, str)
        if is_step and (hangs or seconds > SLOW_S):
            self.slow[str(ended.action)] = seconds
        elif is_step:
            self.quick.setdefault(str(ended.action))
        if hangs:
            self.num_hangs += 1
            self.is_stuck = not is_step or self.num_hangs > _MAX_HANGS or not self.quick

    def require_thread(self) -> None:
        """End the thread of the caller if it was abandoned."""
        if threading.get_ident() in self._abandoned:
            raise _Abandoned

    def note_sleep(self, seconds: float) -> bool:
        """Record a `time.sleep` on the event loop, and return True unless an import or a constructor calls it."""
        call = _CALL.get()
        if call is None or call.method in ("import", "__init__"):
            return call is None
        known = self.sleeps.get(call.method)
        if known is None or known.seconds < seconds:
            self.sleeps[call.method] = Sleep(seconds, line_in(call.file, sys._getframe()), call.action)
        return True

    async def run(self, function: Callable[[], Any], name: str = "") -> Any:
        """Run the check in a thread and watch it; notices about a slow check use `name`.

        Raises:
            Exception: the check raised it.
            Hung: a call blocks the check; its thread is abandoned.
        """

        def in_thread() -> Any:
            self._thread = threading.get_ident()
            self._abandoned.discard(self._thread)  # of an earlier thread that has ended
            return function()

        work = asyncio.ensure_future(call(in_thread))
        started, num_notices = time.monotonic(), 0
        if self.progress is not None:
            self.progress.write(property=name)
        while not work.done():
            if self.progress is not None:
                self.progress.alive(max(self.limit_s, 0.0 if self._current is None else self._current.limit_s))
            ticked = time.monotonic()
            await asyncio.wait({work}, timeout=_TICK_S)
            current = self._current
            if current is not None:
                current.stalled_s += max(0.0, time.monotonic() - ticked - _STALL_S)
            if current is not None and not work.done():
                self._inspect(current)
            seconds = time.monotonic() - started
            if name and seconds >= NOTIFY_CHECK_EVERY_S * (num_notices + 1):
                num_notices += 1
                self.notify(f"{name}: {seconds:.0f} s so far.")
        if self.progress is not None:
            self.progress.pause()
        return work.result()

    def _inspect(self, current: WatchedCall) -> None:
        seconds = time.monotonic() - current.started - current.stalled_s
        if seconds < 2 * _TICK_S:
            return
        line = _line_of(current)
        if line is not None:
            current.line = self.lines[current.method] = line
        if seconds > current.limit_s + _GRACE_S:
            self._note_end(current, hangs=True)
            self._current = None
            self._abandoned.add(self._thread)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(_Abandoned))
            raise Hung(current)
        if seconds >= NOTIFY_CALL_EVERY_S * (current.num_notices + 1):
            current.num_notices += 1
            at = f" at {Path(current.file).name}:{current.line}" if current.line else ""
            name = current.code.co_qualname if current.code is not None else current.method
            self.notify(f"{name} has been running for {seconds:.0f} s{at}; its limit is {current.limit_s:g} s.")


@dataclass(frozen=True, slots=True)
class MethodCall:
    """One call of a method of the environment or agent, with its result or exception."""

    method: str
    value: Any = None
    error: BaseException | None = None


Around = Callable[[Any, str, Any, Coroutine[Any, Any, Any]], Awaitable[Any]]
"""A wrapper of a call. It gets the instance, the name of the method, the argument (for the constructor: the arguments
by name) and the call, which it awaits; it returns the value of the call."""


def watched_class(
    cls: type[Any], watch: CallWatch, limits: Limits, seen: list[MethodCall], *, around: Around | None = None
) -> type[Any]:
    """Return a subclass whose calls are watched and recorded in `seen`."""

    def watched(name: str) -> _RecordedMethod:
        method = getattr(cls, name)
        limit_s = limits.episode_timeout_s if name == "run" else limits.step_timeout_s

        async def recorded(self: Any, *args: Any) -> Any:
            _CALLED.set(self)  # never reset: each call has its own task
            with watch.during(name, inspect.unwrap(method), limit_s, *args[:1]), _raised_in(name, seen):
                work = call(MethodType(method, self), *args)
                value = await (work if around is None else around(self, name, args[0] if args else None, work))
            seen.append(MethodCall(name, value))
            return value

        return _RecordedMethod(recorded, method)

    async def construct(self: Any, **kwargs: Any) -> None:
        async def constructed() -> None:
            started: Any = cls.__init__(self, **kwargs)
            if inspect.isawaitable(started):
                await started

        with watch.during("__init__", cls.__init__, limits.step_timeout_s), _raised_in("__init__", seen):
            await (constructed() if around is None else around(self, "__init__", kwargs, constructed()))

    names = OWN_LOOP_METHODS if owns_its_loop(cls) else ENV_METHODS
    body: dict[str, Any] = {name: watched(name) for name in names if hasattr(cls, name)} | {"__init__": construct}
    return type(cls.__name__, (cls,), body | {"__signature__": inspect.signature(cls)})


_CALLED: ContextVar[Any] = ContextVar("called", default=None)
"""The instance whose method runs, in the task or thread of the call."""


class _RecordedMethod:
    """A method that is recorded if the loop calls it, and called as it is by the other methods of its instance."""

    def __init__(self, recorded: Callable[..., Any], method: Callable[..., Any]) -> None:
        self._recorded, self._method = recorded, method

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is None:
            return self._method
        return MethodType(self._method if _CALLED.get() is instance else self._recorded, instance)


@contextmanager
def _raised_in(method: str, seen: list[MethodCall]) -> Iterator[None]:
    try:
        yield
    except InfraError:
        raise  # the outside failed, not the method
    except BaseException as error:
        seen.append(MethodCall(method, error=error))
        raise


def _line_of(current: WatchedCall) -> int | None:
    """Return the innermost line of the call's file, in any thread or in what its task awaits; None if absent."""
    # The outermost frame comes first, as in `frames_of`.
    stacks = [[frame for frame, _ in walk_stack(top)][::-1] for top in current_frames().values()]
    for stack in (*stacks, list(frames_of(current.task))):
        own = [frame.f_lineno for frame in stack if frame.f_code.co_filename == current.file]
        if own and (current.code is None or any(frame.f_code is current.code for frame in stack)):
            return own[-1]
    return None
