"""The property `blocking`: no call holds up the event loop, on which all episodes of a process run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from agentenv.check_watch import Seen
from agentenv.conformance.cases import Case, script
from agentenv.conformance.driven import Driven
from agentenv.conformance.problems import Problem, place_of_method, problem_at
from agentenv.conformance.scene import Scene

BLOCKS_S = 0.05
"""Longest that a call may go on without waiting for anything."""
_NUM_TRIES = 4
"""A busy machine holds up one try or two; what blocks does so in each."""
_LOOK_EVERY_S = 0.01
_LONG = "x = 1 + 2\n" * 250
"""The first action of an episode: what reads an action may take long for this one."""
_MEND = "Make it a plain `def`, which runs in a thread, or await instead."


@dataclass
class _Stretches:
    """How long the methods of one episode went on without waiting, and where."""

    file: str
    longest_s: dict[str, float] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    _method: str = ""
    _since: float | None = None

    async def around(self, agent: Any, method: str, given: Any, work: Coroutine[Any, Any, Any]) -> Any:
        """Time a call."""

        def goes_on() -> None:
            """A stretch begins."""
            self._method, self._since = method, time.perf_counter()

        def ends() -> None:
            """A stretch ends."""
            seconds = time.perf_counter() - (self._since or 0.0)
            self._since = None
            self.longest_s[method] = max(seconds, self.longest_s.get(method, 0.0))

        return await Driven(work, goes_on=goes_on, ends=ends)

    @contextmanager
    def lines_seen(self) -> Iterator[None]:
        """Look where this thread is while a stretch is too long."""
        over, looked_at = threading.Event(), threading.get_ident()

        def look() -> None:
            """Keep the line, from another thread."""
            while not over.wait(_LOOK_EVERY_S):
                since, method = self._since, self._method
                if since is not None and time.perf_counter() - since > BLOCKS_S / 2:
                    line = _line_in(self.file, sys._current_frames().get(looked_at))
                    if line:
                        self.lines[method] = line

        thread = threading.Thread(target=look, name="agentenv-check-lines", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def blocking(scene: Scene) -> list[Problem]:
    """An `async def` never goes on for 50 ms without awaiting; a plain `def` may, in its thread."""
    scene.needs_steps()
    cls = scene.agent_cls
    file = place_of_method(cls, "step")[0]
    tries = [_stretches(scene, file)]
    while len(tries) < _NUM_TRIES and _too_long(tries):
        tries.append(_stretches(scene, file))
    problems = []
    for method, seconds in _too_long(tries).items():
        expected = f"less than {BLOCKS_S * 1000:.0f} ms between two awaits"
        problem = problem_at(cls, method, expected, f"{seconds * 1000:.0f} ms, which hold up all episodes", _MEND)
        line = next((one.lines[method] for one in tries if method in one.lines), problem.line)
        problems.append(replace(problem, line=line))
    return problems


def _too_long(tries: list[_Stretches]) -> dict[str, float]:
    """The methods that were too long in every try, with the least of their times; constructors are another property."""
    methods = set.intersection(*(set(one.longest_s) for one in tries)) - {"__init__"}
    least = {method: min(one.longest_s[method] for one in tries) for method in sorted(methods)}
    return {method: seconds for method, seconds in least.items() if seconds > BLOCKS_S}


def _stretches(scene: Scene, file: str) -> _Stretches:
    """The episodes of all cases, timed."""
    stretches, seen = _Stretches(file), list[Seen]()

    async def run() -> None:
        """In their order."""
        for case in (*scene.cases, Case(scene.tasks[0], "long", script([_LONG]))):
            await scene.episode(case, source=scene.spied(seen, stretches.around))

    _ = scene.chat.template  # found out before: it takes long, and is no fault of the environment's
    with stretches.lines_seen():
        scene.run(run())
    return stretches


def _line_in(file: str, frame: FrameType | None) -> int:
    """The innermost line of a file in a stack."""
    while frame is not None:
        if frame.f_code.co_filename == file:
            return frame.f_lineno
        frame = frame.f_back
    return 0
