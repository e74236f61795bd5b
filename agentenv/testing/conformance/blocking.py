"""The property `blocking`: no call blocks the event loop, on which all episodes of a process run."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sqlite3
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

from agentenv._util.calls import bounded
from agentenv._util.paths import is_own_import
from agentenv.core.types import Limits
from agentenv.testing.conformance.call_watch import MethodCall
from agentenv.testing.conformance.cases import EpisodeCase, script
from agentenv.testing.conformance.context import ConformanceContext
from agentenv.testing.conformance.instrumented import InstrumentedCoroutine
from agentenv.testing.conformance.problems import Problem, after_action, place_of_method, problem_at
from agentenv.testing.conformance.sleeps import BLOCKS_S
from agentenv.testing.tool_calls import calls_with_texts

_NUM_TRIES = 4
"""A busy machine delays a try or two; code that blocks does so in each."""
_LOOK_EVERY_S = 0.01
_LONG = ("x = 1 + 2\n" * 250, "answer " * 300)
"""First actions that slow parsers and patterns take long to read."""
_METHOD: ContextVar[str] = ContextVar("method", default="")
"""The method that runs, also in the tasks that it creates."""
_FIX = "Make it a plain `def`, which runs in a thread, or await instead of blocking."
_TLS_FIX = (
    "It reads the certificates for TLS: call `ssl.create_default_context()` once, at import, and hand it to clients "
    "(httpx: `verify=`)."
)
_SQL = re.compile(r"\bsql|quer(?:y|ies)\b|database", re.IGNORECASE)
_QUERY = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT {}) SELECT count(*) FROM c"
"""A query of SQLite that computes for as long as its number of rows says."""
_QUERY_S, _QUERY_LIMIT_S, _QUERY_WAIT_S = 4.0, 1.0, 20.0
"""Seconds: of the query (CPU time), of the step that waits for it, and of the wait for its end."""
_TLS_CODE = ssl.create_default_context.__code__
_QUERY_FIX = "A policy writes any SQL: end long queries, in sqlite3 with `set_progress_handler`."


@dataclass
class _Stretches:
    """The longest time without awaiting of each method in some episodes, and the line."""

    file: str
    longest_s: dict[str, float] = field(default_factory=dict)
    looks: dict[str, Counter[int]] = field(default_factory=dict)
    """How often each line was seen in the longest stretch of a method that was looked at."""
    tls: set[str] = field(default_factory=set)
    """Methods that were seen reading the certificates for TLS."""
    _method: str = ""
    _since: float | None = None
    _looks: Counter[int] = field(default_factory=Counter)

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
        waited_s = 0.0

        def on_resume() -> None:
            nonlocal waited_s
            waited_s = _waited_for_a_core_s()
            self._method, self._since, self._looks = method, time.perf_counter(), Counter()

        def on_pause() -> None:
            seconds = time.perf_counter() - (self._since or 0.0)
            self._since = None
            if seconds > BLOCKS_S:
                seconds -= _waited_for_a_core_s() - waited_s
            if seconds >= self.longest_s.get(method, 0.0):
                self.longest_s[method] = seconds
                if self._looks:
                    self.looks[method] = self._looks

        return InstrumentedCoroutine(work, on_resume=on_resume, on_pause=on_pause)

    def line(self, method: str) -> int:
        """Return the line at which a method was seen most often; 0 if it was not seen."""
        looks = self.looks.get(method)
        return looks.most_common(1)[0][0] if looks else 0

    @contextmanager
    def lines_seen(self) -> Iterator[None]:
        """Record the current line of this thread, from another thread, while a stretch is too long."""
        over, watched_thread = threading.Event(), threading.get_ident()

        def look() -> None:
            while not over.wait(_LOOK_EVERY_S):
                since, method = self._since, self._method
                seconds = 0.0 if since is None else time.perf_counter() - since
                if seconds > BLOCKS_S / 2:
                    frame = sys._current_frames().get(watched_thread)
                    if is_own_import(frame):
                        self._since = time.perf_counter()  # it happens once
                    if line := _line_in(self.file, frame):
                        self._looks[line] += 1
                    if _reads_certificates(frame):
                        self.tls.add(method)

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
    tries = [_stretches(context, _Stretches(file))]
    expected = f"less than {BLOCKS_S * 1000:.0f} ms between two awaits"
    slept = []
    for method, one in context.watch.sleeps.items():
        got = f"time.sleep({one.seconds:g}){after_action(one.action)}"
        problem = problem_at(cls, method, expected, got, _FIX)
        slept.append(replace(problem, line=one.line or problem.line))
    if slept:
        return slept
    while len(tries) < _NUM_TRIES and _too_long(tries):
        tries.append(_stretches(context, _Stretches(file)))
    problems = _slow_query(context, file)
    for method, seconds in _too_long(tries).items():
        fix = _TLS_FIX if any(method in one.tls for one in tries) else _FIX
        problem = problem_at(cls, method, expected, f"{seconds * 1000:.0f} ms, which delays all episodes", fix)
        line = next((line for one in tries if (line := one.line(method))), problem.line)
        problems.append(replace(problem, line=line))
    return problems


def _too_long(tries: list[_Stretches]) -> dict[str, float]:
    """Return the methods that were too slow in every try, with their shortest time, except for constructors."""
    methods = set.intersection(*(set(one.longest_s) for one in tries)) - {"__init__"}
    least = {method: min(one.longest_s[method] for one in tries) for method in sorted(methods)}
    return {method: seconds for method, seconds in least.items() if seconds > BLOCKS_S}


@dataclass
class _SlowQuery(_Stretches):
    """The times of an episode with a slow query; `close` waits for the query, which it may not do in a run."""

    agent: Any = None
    threads: set[threading.Thread] = field(default_factory=set)
    """Those before the step."""
    cpu_s: float = 0.0
    """CPU time of this process before the step."""
    is_held: bool = False
    """The query still computed when `close` was called."""

    async def around(self, agent: Any, method: str, given: Any, work: Coroutine[Any, Any, Any]) -> Any:
        """Time a call; leave out a `close` that comes before the end of the query, since it may end this process."""
        if method == "step":
            self.agent, self.threads, self.cpu_s = agent, set(threading.enumerate()), time.process_time()
        if method == "close" and self.agent is agent and not self.is_held and self.computes():
            self.is_held = True
            work.close()
            return None
        return await super().around(agent, method, given, work)

    def computes(self) -> bool:
        """Return True if a thread that the step started has not ended."""
        return bool(set(threading.enumerate()) - self.threads)


def _slow_query(context: ConformanceContext, file: str) -> list[Problem]:
    """Return the problem of a slow query, which a policy may write: it blocks, or still computes when `close` runs."""
    cls = context.agent_cls
    tools = [tool for tool in context.tools if _SQL.search(json.dumps(tool, ensure_ascii=False, default=str))]
    calls = [*calls_with_texts(tools, lambda _: _QUERY.format(_num_rows())).values()][:1]
    if not calls or "interrupt" in getattr(inspect.unwrap(cls.close), "__code__", _slow_query.__code__).co_names:
        return []
    cases = [EpisodeCase(task, "query", script(calls), num_turns=1) for task, own in context.offers if own][:1]
    query = _SlowQuery(file)
    _stretches(context, query, cases, replace(context.limits, max_turns=1, step_timeout_s=_QUERY_LIMIT_S))
    if query.longest_s.get("step", 0.0) > _QUERY_LIMIT_S:
        got = f"{query.longest_s['step']:.1f} s of a slow query, which delays all episodes"
        problem = problem_at(cls, "step", f"less than {BLOCKS_S * 1000:.0f} ms", got, f"{_FIX} {_QUERY_FIX}")
        return [replace(problem, line=query.line("step") or problem.line)]
    if not query.is_held:
        return []
    until = time.monotonic() + _QUERY_WAIT_S
    while query.computes() and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
    computed_s = time.process_time() - query.cpu_s
    if not query.computes():
        context.run(bounded(query.agent.close, limit_s=context.limits.step_timeout_s))
    if computed_s < 0.5 * _QUERY_S:  # the environment ended it
        return []
    expected, got = "no query that still computes when `close` is called", f"one of {computed_s:.1f} s"
    return [problem_at(cls, "close", expected, f"{got}, for which `close` waits, or which it crashes", _QUERY_FIX)]


def _num_rows() -> int:
    """Return the number of rows for which `_QUERY` computes for `_QUERY_S` here."""
    num, started = 500_000, time.thread_time()  # fewer end before the time of the machine is measured
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute(_QUERY.format(num)).fetchall()
    return int(num * _QUERY_S / (time.thread_time() - started))


def _stretches(
    context: ConformanceContext, stretches: _Stretches, cases: Sequence[EpisodeCase] = (), limits: Limits | None = None
) -> _Stretches:
    """Run episodes, by default of all cases, and return their times in `stretches`."""
    seen = list[MethodCall]()

    async def run() -> None:
        longs = [EpisodeCase(context.tasks[0], "long", script([text])) for text in _LONG]
        loop = asyncio.get_running_loop()
        loop.set_task_factory(stretches.make_task)
        try:
            for case in cases or (*context.cases, *longs):
                await context.episode(case, source=context.recording_source(seen, stretches.around), limits=limits)
        finally:
            loop.set_task_factory(None)

    _ = context.chat.template  # computed first: it is slow, and not the environment's work
    with stretches.lines_seen():
        context.run(run())
    return stretches


def _waited_for_a_core_s() -> float:
    """Return for how long this thread was ready to run but had no core, on a busy machine; 0 if it is unknown."""
    try:
        return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _reads_certificates(frame: FrameType | None) -> bool:
    """Return True if a stack is in `ssl.create_default_context`."""
    return frame is not None and any(each.f_code is _TLS_CODE for each, _ in walk_stack(frame))


def _line_in(file: str, frame: FrameType | None) -> int:
    """Return the innermost line of a file in a stack; 0 if there is none."""
    while frame is not None:
        if frame.f_code.co_filename == file:
            return frame.f_lineno
        frame = frame.f_back
    return 0
