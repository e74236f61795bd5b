"""The property `blocking`: no call blocks the event loop, on which all episodes of a process run."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv._util.paths import current_frames, is_own_import
from agentenv.testing.conformance.cases import EpisodeCase, Script
from agentenv.testing.conformance.context import ConformanceContext
from agentenv.testing.conformance.probes import BLOCKS_S, InstrumentedCoroutine, line_in
from agentenv.testing.conformance.problems import Problem, after_action, place_of_method, problem_at

_Call = tuple[str, int, int]
"""A method, the number of the episode, and the turn; all tries make the same calls, some again after an outage."""
_NUM_TRIES = 4
"""A busy machine delays a call in a try or two; code that blocks does so in the same call of each."""
_LOOK_EVERY_S = 0.01
_LONG = ("x = 1 + 2\n" * 250, "answer " * 300)
"""First actions that slow parsers and patterns take long to read."""
_CALL: ContextVar[_Call | None] = ContextVar("call", default=None)
"""The call that runs, also in the tasks that it creates."""
_FIX = "Make it a plain `def`, which runs in a thread, or await instead of blocking."


@dataclass
class _Stretches:
    """The longest time without awaiting of each call in some episodes, and the line."""

    file: str
    longest_s: dict[_Call, float] = field(default_factory=dict)
    looks: dict[_Call, Counter[int]] = field(default_factory=dict)
    """How often each line was seen in the longest stretch of a call that was looked at."""
    num_episodes: int = 0
    _since: float | None = None
    _looks: Counter[int] = field(default_factory=Counter)

    async def around(self, agent: Any, method: str, given: Any, work: Coroutine[Any, Any, Any]) -> Any:
        """Time a call."""
        call = method, self.num_episodes, given.get("turn_index", 0) if isinstance(given, Mapping) else 0
        token = _CALL.set(call)
        try:
            return await self._timed(work, call)
        finally:
            _CALL.reset(token)

    def make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        """Return a task whose time counts for the call that created it; a task factory of asyncio."""
        call = _CALL.get()
        return asyncio.Task(self._timed(work, call) if call else work, loop=loop, **options)

    def _timed(self, work: Coroutine[Any, Any, Any], call: _Call) -> InstrumentedCoroutine:
        waited_s = 0.0

        def on_resume() -> None:
            nonlocal waited_s
            waited_s = _waited_for_a_core_s()
            self._since, self._looks = time.perf_counter(), Counter()

        def on_pause() -> None:
            seconds = time.perf_counter() - (self._since or 0.0)
            self._since = None
            if seconds > BLOCKS_S:
                seconds -= _waited_for_a_core_s() - waited_s
            if seconds >= self.longest_s.get(call, 0.0):
                self.longest_s[call] = seconds
                if self._looks:
                    self.looks[call] = self._looks

        return InstrumentedCoroutine(work, on_resume=on_resume, on_pause=on_pause)

    def line(self, call: _Call) -> int:
        """Return the line at which a call was seen most often; 0 if it was not seen."""
        looks = self.looks.get(call)
        return looks.most_common(1)[0][0] if looks else 0

    @contextmanager
    def lines_seen(self) -> Iterator[None]:
        """Record the current line of this thread, from another thread, while a stretch is too long."""
        over, watched_thread = threading.Event(), threading.get_ident()

        def look() -> None:
            while not over.wait(_LOOK_EVERY_S):
                since = self._since
                seconds = 0.0 if since is None else time.perf_counter() - since
                if seconds > BLOCKS_S / 2:
                    frame = current_frames().get(watched_thread)
                    if is_own_import(frame):
                        self._since = time.perf_counter()  # it happens once
                    if line := line_in(self.file, frame):
                        self._looks[line] += 1

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
    expected = f"less than {BLOCKS_S * 1000:.0f} ms between two awaits"
    slept = []
    for method, one in context.watch.sleeps.items():
        got = f"time.sleep({one.seconds:g}){after_action(one.action)}"
        slept.append(problem_at(cls, method, expected, got, _FIX, line=one.line))
    if slept:
        return slept
    while len(tries) < _NUM_TRIES and _too_long(tries):
        tries.append(_stretches(context, file))
    problems = []
    for call, seconds in _too_long(tries).items():
        method = call[0]
        got = f"{seconds * 1000:.0f} ms, which delays all episodes"
        line = next(filter(None, (one.line(call) for one in tries)), None)
        if line is None and not inspect.iscoroutinefunction(getattr(cls, method)):
            continue  # the event loop waited for its thread
        problems.append(problem_at(cls, method, expected, got, _FIX, line=line))
    return problems


def _too_long(tries: list[_Stretches]) -> dict[_Call, float]:
    """Return the slowest call of each method with its shortest time, if it was too slow in every try.

    Constructors are excepted.
    """
    calls = set.intersection(*(set(one.longest_s) for one in tries))
    least = {call: min(one.longest_s[call] for one in tries) for call in calls if call[0] != "__init__"}
    slowest = {call[0]: call for call in sorted(least, key=lambda call: least[call])}
    return {call: least[call] for _, call in sorted(slowest.items()) if least[call] > BLOCKS_S}


def _stretches(context: ConformanceContext, file: str) -> _Stretches:
    """Run the episodes of all cases, and two with long actions, and return their times."""
    stretches = _Stretches(file)

    async def play(case: EpisodeCase) -> None:
        stretches.num_episodes += 1
        await context.episode(case, source=context.recording_source([], stretches.around))

    async def run() -> None:
        longs = [EpisodeCase(context.tasks[0], "long", Script([text])) for text in _LONG]
        loop = asyncio.get_running_loop()
        loop.set_task_factory(stretches.make_task)
        try:
            await context.survivors([*context.cases, *longs], play)
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
