"""Watches the calls that `agentenv check` makes: tells of slow ones, and ends one that holds up the event loop.

The check runs in a thread; this looks at it from the main one, which no code of the agent's can hold up.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, MethodType
from typing import Any

from agentenv.agent import call
from agentenv.endpoint.agent import owns_its_loop
from agentenv.types import Limits
from agentenv.watchdog import frames_of

ENV_METHODS = ("reset", "step", "on_truncate", "close")
OWN_LOOP_METHODS = ("run", "on_truncate", "close")
TELL_EVERY_S = 5.0
TELL_OF_ALL_S = 10.0
_TICK_S = 0.05
_GRACE_S = 3.0
"""What awaits is ended by its own deadline, and then has a second to let go."""


class Hung(Exception):
    """A call went on after its limit, which means that it holds the event loop up."""

    def __init__(self, call: WatchedCall) -> None:
        super().__init__(call.method)
        self.call = call


@dataclass(eq=False, slots=True)
class WatchedCall:
    """One call in progress."""

    method: str
    """Its name, or "import"."""
    file: str
    """Whose lines tell where it is."""
    code: CodeType | None
    limit_s: float
    task: asyncio.Task[Any] | None = None
    started: float = field(default_factory=time.monotonic)
    line: int | None = None
    """Where it was when last looked at."""
    num_told: int = 0


class CallWatch:
    """Knows which call is in progress, for how long, and at which line.

    Args:
        tell: shows a line to the person who waits.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.lines: dict[str, int] = {}
        """The line where each method was last seen at work."""
        self._current: WatchedCall | None = None

    @contextmanager
    def during(self, method: str, function: Any, limit_s: float) -> Iterator[None]:
        """Say that a function, or the import of a file by its path, is at work; in the thread that it works for."""
        code = getattr(function, "__code__", None)
        file = code.co_filename if code is not None else str(Path(str(function)).absolute())
        task = None
        with suppress(RuntimeError):
            task = asyncio.current_task()
        mine, before = WatchedCall(method, file, code, limit_s, task), self._current
        self._current = mine
        try:
            yield
        finally:
            if self._current is mine:
                self._current = before

    async def over(self, function: Callable[[], Any], name: str = "") -> Any:
        """Run the check in a thread, and watch it; `name` is what is told of one that takes long.

        Raises:
            Exception: what it raised.
            Hung: a call holds it up; its thread is left behind.
        """
        work = asyncio.ensure_future(call(function))
        started, num_told = time.monotonic(), 0
        while not work.done():
            await asyncio.wait({work}, timeout=_TICK_S)
            current = self._current
            if current is not None and not work.done():
                self._look(current)
            seconds = time.monotonic() - started
            if name and seconds >= TELL_OF_ALL_S * (num_told + 1):
                num_told += 1
                self.tell(f"{name}: {seconds:.0f} s so far.")
        return work.result()

    def _look(self, current: WatchedCall) -> None:
        seconds = time.monotonic() - current.started
        if seconds < 2 * _TICK_S:
            return
        line = _line_of(current)
        if line is not None:
            current.line = self.lines[current.method] = line
        if seconds > current.limit_s + _GRACE_S:
            raise Hung(current)
        if seconds >= TELL_EVERY_S * (current.num_told + 1):
            current.num_told += 1
            at = f" at {Path(current.file).name}:{current.line}" if current.line else ""
            name = current.code.co_qualname if current.code is not None else current.method
            self.tell(f"{name} goes on for {seconds:.0f} s{at}; it may take {current.limit_s:g} s.")


@dataclass(frozen=True, slots=True)
class Seen:
    """One call of an agent's method."""

    method: str
    value: Any = None
    error: BaseException | None = None


Around = Callable[[Any, str, Any, Coroutine[Any, Any, Any]], Awaitable[Any]]
"""What goes around a call: the agent instance, the method's name, its argument (the constructor's: its arguments by
name), and the call itself, which it awaits and whose value it gives."""


def watched_class(
    cls: type[Any], watch: CallWatch, limits: Limits, seen: list[Seen], *, around: Around | None = None
) -> type[Any]:
    """The same agent class, whose calls are watched, and which notes what its methods give and raise."""

    def watched(name: str) -> Callable[..., Any]:
        """A method of it."""
        method = getattr(cls, name)
        limit_s = limits.episode_timeout_s if name == "run" else limits.step_timeout_s

        async def noted(self: Any, *args: Any) -> Any:
            """The method as the loop calls it."""
            with watch.during(name, inspect.unwrap(method), limit_s), _raised_in(name, seen):
                work = call(MethodType(method, self), *args)
                value = await (work if around is None else around(self, name, args[0] if args else None, work))
            seen.append(Seen(name, value))
            return value

        return noted

    async def made(self: Any, **kwargs: Any) -> None:
        """The constructor."""
        with watch.during("__init__", cls.__init__, limits.step_timeout_s), _raised_in("__init__", seen):
            work = _constructed(cls, self, kwargs)
            await (work if around is None else around(self, "__init__", kwargs, work))

    names = OWN_LOOP_METHODS if owns_its_loop(cls) else ENV_METHODS
    body: dict[str, Any] = {name: watched(name) for name in names if hasattr(cls, name)} | {"__init__": made}
    return type(cls.__name__, (cls,), body | {"__signature__": inspect.signature(cls)})


async def _constructed(cls: type[Any], instance: Any, kwargs: Mapping[str, Any]) -> None:
    started: Any = cls.__init__(instance, **kwargs)
    if inspect.isawaitable(started):
        await started


@contextmanager
def _raised_in(method: str, seen: list[Seen]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        seen.append(Seen(method, error=error))
        raise


def _line_of(current: WatchedCall) -> int | None:
    """The innermost line of the call's file, in a thread or in what its task awaits."""
    for stack in (*map(_stack, sys._current_frames().values()), list(frames_of(current.task))):
        own = [frame.f_lineno for frame in stack if frame.f_code.co_filename == current.file]
        if own and (current.code is None or any(frame.f_code is current.code for frame in stack)):
            return own[-1]
    return None


def _stack(frame: FrameType | None) -> list[FrameType]:
    """The frames of a thread from the outermost in."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]
