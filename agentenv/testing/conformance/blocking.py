"""The property `blocking`: no call blocks the event loop, on which all episodes of a process run."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from agentenv.testing.conformance.call_watch import MethodCall
from agentenv.testing.conformance.cases import EpisodeCase, script
from agentenv.testing.conformance.context import ConformanceContext
from agentenv.testing.conformance.instrumented import InstrumentedCoroutine
from agentenv.testing.conformance.problems import Problem, place_of_method, problem_at

BLOCKS_S = 0.05
"""Maximum time that a call may run without awaiting."""
_NUM_TRIES = 4
"""A busy machine delays a try or two; code that blocks does so in each."""
_LOOK_EVERY_S = 0.01
_LONG = ("x = 1 + 2\n" * 250, "answer " * 300)
"""First actions that slow parsers and patterns take long to read."""
_METHOD: ContextVar[str] = ContextVar("method", default="")
"""The method that runs, also in the tasks that it creates."""
_FIX = "Make it a plain `def`, which runs in a thread, or await instead of blocking."


@dataclass
class _Stretches:
    """The longest time without awaiting of each method in some episodes, and the line."""

    file: str
    longest_s: dict[str, float] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    _method: str = ""
    _since: float | None = None

    async def around(self, agent: Any, method: str, given: Any, work: Coroutine[Any, Any, Any]) -> Any:
        """Time a call."""
        token = _METHOD.set(method)
        try:
            return await self._timed(work, method)
        finally:
            _METHOD.reset(token)

    def make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        """Return a task whose time counts for the method that created it; a task factory of asyncio."""
        method = _METHOD.get()
        return asyncio.Task(self._timed(work, method) if method else work, loop=loop, **options)

    def _timed(self, work: Coroutine[Any, Any, Any], method: str) -> InstrumentedCoroutine:
        def on_resume() -> None:
            self._method, self._since = method, time.perf_counter()

        def on_pause() -> None:
            seconds = time.perf_counter() - (self._since or 0.0)
            self._since = None
            self.longest_s[method] = max(seconds, self.longest_s.get(method, 0.0))

        return InstrumentedCoroutine(work, on_resume=on_resume, on_pause=on_pause)

    @contextmanager
    def lines_seen(self) -> Iterator[None]:
        """Record the current line of this thread, from another thread, while a stretch is too long."""
        over, watched_thread = threading.Event(), threading.get_ident()

        def look() -> None:
            while not over.wait(_LOOK_EVERY_S):
                since, method = self._since, self._method
                if since is not None and time.perf_counter() - since > BLOCKS_S / 2:
                    line = _line_in(self.file, sys._current_frames().get(watched_thread))
                    if line:
                        self.lines[method] = line

        thread = threading.Thread(target=look, name="agentenv-check-lines", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def blocking(context: ConformanceContext) -> list[Problem]:
    """An `async def` never runs for 50 ms without awaiting; a plain `def` may, in its thread."""
    context.require_steps()
    cls = context.agent_cls
    file = place_of_method(cls, "step")[0]
    tries = [_stretches(context, file)]
    while len(tries) < _NUM_TRIES and _too_long(tries):
        tries.append(_stretches(context, file))
    problems = []
    for method, seconds in _too_long(tries).items():
        expected = f"less than {BLOCKS_S * 1000:.0f} ms between two awaits"
        problem = problem_at(cls, method, expected, f"{seconds * 1000:.0f} ms, which delays all episodes", _FIX)
        line = next((one.lines[method] for one in tries if method in one.lines), problem.line)
        problems.append(replace(problem, line=line))
    return problems


def _too_long(tries: list[_Stretches]) -> dict[str, float]:
    """Return the methods that were too slow in every try, with their shortest time, except for constructors."""
    methods = set.intersection(*(set(one.longest_s) for one in tries)) - {"__init__"}
    least = {method: min(one.longest_s[method] for one in tries) for method in sorted(methods)}
    return {method: seconds for method, seconds in least.items() if seconds > BLOCKS_S}


def _stretches(context: ConformanceContext, file: str) -> _Stretches:
    """Run the episodes of all cases and return their times."""
    stretches, seen = _Stretches(file), list[MethodCall]()

    async def run() -> None:
        longs = [EpisodeCase(context.tasks[0], "long", script([text])) for text in _LONG]
        loop = asyncio.get_running_loop()
        loop.set_task_factory(stretches.make_task)
        try:
            for case in (*context.cases, *longs):
                await context.episode(case, source=context.recording_source(seen, stretches.around))
        finally:
            loop.set_task_factory(None)

    _ = context.chat.template  # computed first: it is slow, and not the environment's work
    with stretches.lines_seen():
        context.run(run())
    return stretches


def _line_in(file: str, frame: FrameType | None) -> int:
    """Return the innermost line of a file in a stack; 0 if there is none."""
    while frame is not None:
        if frame.f_code.co_filename == file:
            return frame.f_lineno
        frame = frame.f_back
    return 0
