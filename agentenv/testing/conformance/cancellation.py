"""The property `cancel`: an episode that is cancelled at any wait leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentenv.errors import InfraError
from agentenv.testing.conformance.call_watch import MethodCall
from agentenv.testing.conformance.cases import EpisodeCase
from agentenv.testing.conformance.context import ConformanceContext
from agentenv.testing.conformance.probes import TEMP_EVENTS, Event, InstrumentedCoroutine, record_events
from agentenv.testing.conformance.problems import (
    Problem,
    exception_problem,
    own_files,
    place_of_method,
    problem_at,
    relative_path,
)
from agentenv.tools import calling

_MAX_POINTS = 40
_MAX_TURNS = 2
"""Later turns wait at the same places."""
_NUM_GROWTHS = 3
"""Growth in this many runs in a row is a leak; growth in one run may be a pool that starts."""
_SETTLE_S = 2.0
"""Time for cancelled work to end: threads cannot be cancelled, and end when their call does."""
_MAX_SETTLE = 15
"""Maximum time for threads that still run, as a multiple of `_SETTLE_S`."""
_COLLECT_AFTER_S = 0.05
_NAMES = {
    "tasks": "a task", "threads": "a thread", "files": "an open file", "children": "a process",
    "temps": "a file on disk",
}  # fmt: skip


class _CancelledCoroutine(InstrumentedCoroutine):
    """A coroutine that notes the lines of `folder` whose wait is cancelled, if it returns a value all the same."""

    def __init__(self, work: Coroutine[Any, Any, Any], swallows: list[tuple[str, int]], folder: str, **on: Any) -> None:
        super().__init__(work, **on)
        self._swallows, self._folder = swallows, folder
        self._cancelled_at: tuple[str, int] | None = None

    def stretch(self, go: Callable[..., Any], *args: Any) -> Any:
        """See `InstrumentedCoroutine`."""
        if any(isinstance(each, asyncio.CancelledError) or each is asyncio.CancelledError for each in args):
            self._cancelled_at = self.own_line() or self._cancelled_at
        try:
            return super().stretch(go, *args)
        except StopIteration:
            task = asyncio.current_task()
            # A deadline of asyncio takes its own cancellation back.
            if self._cancelled_at is not None and task is not None and task.cancelling():
                self._swallows.append(self._cancelled_at)
            raise

    def own_line(self) -> tuple[str, int] | None:
        """Return file and line of the innermost frame of the folder that waits."""
        found, part = None, self.work
        while part is not None:
            frame = getattr(part, "cr_frame", None)
            if frame is not None and os.path.dirname(frame.f_code.co_filename) == self._folder:
                found = frame.f_code.co_filename, frame.f_lineno
            part = getattr(part, "cr_await", None)  # type: ignore[assignment]
        return found


@dataclass
class _Cancelled:
    """One episode that is cancelled at wait number `at`; 0: it is not cancelled."""

    context: ConformanceContext
    case: EpisodeCase
    at: int
    known: Sequence[Problem] = ()
    """Exceptions of an episode that is not cancelled: the property `rewards` reports them."""
    num_turns: int = _MAX_TURNS
    num_waits: int = 0
    places: dict[Hashable, int] = field(default_factory=dict)
    """The number of the first wait at each place of the environment's code."""
    tools: list[_CancelledCoroutine] = field(default_factory=list)
    """The calls of tools."""
    method: str = "__init__"
    """The method that ran last, except for `close`, which follows every cancellation."""
    is_closing: bool = False
    """The episode was cancelled during `close`."""
    task: asyncio.Task[Any] | None = None
    closes: Counter[int] = field(default_factory=Counter)
    made: list[Any] = field(default_factory=list)
    seen: list[MethodCall] = field(default_factory=list)
    ended: bool = True
    temps: list[Event] = field(default_factory=list)
    swallows: list[tuple[str, int]] = field(default_factory=list)
    """Files and lines whose wait was cancelled, in calls that returned a value all the same."""
    holds: dict[str, str] = field(default_factory=dict)
    """The first method after which there are more resources of a kind than before, by kind."""

    async def run(self) -> None:
        """Run the episode until it ends."""
        source = self.context.recording_source(self.seen, self._around)
        limits = self.context.limits
        turns = min(self.num_turns, limits.max_turns)
        episode = self.context.episode(
            self.case, source=source, limits=type(limits)(limits.max_length, turns, limits.step_timeout_s)
        )
        self.task = asyncio.get_running_loop().create_task(InstrumentedCoroutine(episode, on_wait=self._waits))
        asyncio.get_running_loop().set_task_factory(self._make_task)
        try:
            _, still = await asyncio.wait({self.task}, timeout=limits.step_timeout_s)
        finally:
            asyncio.get_running_loop().set_task_factory(None)
        self.ended = not still
        if self.ended and not self.task.cancelled() and isinstance(error := self.task.exception(), InfraError):
            raise error

    @property
    def _folder(self) -> str:
        return os.path.dirname(place_of_method(self.context.agent_cls, "step")[0])

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        """Return a task; a task factory of asyncio. Those of tool calls note a cancellation that they swallow."""
        code = getattr(work, "cr_code", None)
        if code is not None and code.co_filename == calling.__file__:
            work = _CancelledCoroutine(work, self.swallows, self._folder)
            self.tools.append(work)
        return asyncio.Task(work, loop=loop, **options)

    def _waits(self) -> None:
        self.num_waits += 1
        if self.num_waits == self.at and self.task is not None:
            self.task.cancel()
            self.is_closing = self.closes.total() > 0

    async def _around(self, agent: Any, method: str, given: Any, work: Coroutine[Any, Any, Any]) -> Any:
        if method == "__init__":
            self.made.append(agent)
        if method == "close":
            self.closes[id(agent)] += 1
        else:
            self.method = method
        before = inventory(self.temps)

        def waits() -> None:
            place = method, watched.own_line(), *(line for tool in self.tools if (line := tool.own_line()))
            self.places.setdefault(place, self.num_waits + 1)
            self._waits()

        watched = _CancelledCoroutine(work, self.swallows, self._folder, on_wait=waits)
        try:
            value = await watched
        except InfraError:
            if method == "__init__":
                self.made.remove(agent)
            raise
        for kind in _growth(before, inventory(self.temps)):
            self.holds.setdefault(kind, method)
        return value

    @property
    def at_fault(self) -> str:
        """The method that was cancelled."""
        return "close" if self.is_closing else self.method

    def exceptions(self) -> list[Problem]:
        """Return one problem for each call that raised."""
        cls, errors = self.context.agent_cls, [(one.method, one.error) for one in self.seen]
        return [exception_problem(cls, method, error) for method, error in errors if isinstance(error, Exception)]

    def problems(self) -> list[Problem]:
        """Return the problems of how the episode ended, without leaks."""
        cls, at = self.context.agent_cls, f"cancelled at wait {self.at} (in {self.at_fault})"
        found = [each for each in self.exceptions() if each not in self.known]
        if not self.ended:
            expected = "an end soon after the cancellation"
            found.append(problem_at(cls, self.method, expected, f"none, {at}", "Let CancelledError pass."))
        if self.swallows and self.at and not found:
            file, line = self.swallows[0]
            expected, got = "CancelledError to pass", f"a result of the call, {at}"
            fix = "Catch Exception, or raise it again: otherwise time limits and the end of a run do not end the call."
            problem = problem_at(cls, self.method, expected, got, fix)
            found.append(replace(problem, file=relative_path(file), line=line))
        odd = [self.closes[id(agent)] for agent in self.made if self.closes[id(agent)] != 1]
        if odd and self.ended:
            expected = "one call of `close` for each instance"
            found.append(problem_at(cls, "close", expected, f"{odd[0]}, {at}", "Leave the call to the loop."))
        return found


def cancel(context: ConformanceContext) -> list[Problem]:
    """An episode that is cancelled at any wait is closed once and leaves no task, thread, file or process."""
    context.require_steps()
    return context.run(_at_every_wait(context))


async def _at_every_wait(context: ConformanceContext) -> list[Problem]:
    cases = context.cases
    first = next((each for each in cases if each.policy == "calls"), cases[1])
    gold = [each for each in cases if each.policy == "gold"][:1]
    known: set[Hashable] = set()
    with record_events(TEMP_EVENTS, own_files(context.agent_cls)) as temps:
        for case in (first, *gold, *(context.reached or ())):
            is_further = case not in (first, *gold)
            turns = max(_MAX_TURNS, case.num_turns) if is_further else _MAX_TURNS
            for _ in range(2):  # resources that all episodes share exist after the first
                complete = _Cancelled(context, case, at=0, num_turns=turns)
                await complete.run()
            step = max(1, -(-complete.num_waits // _MAX_POINTS))
            points = [*range(1, complete.num_waits + 1, step)]
            if is_further:
                points = [at for place, at in complete.places.items() if place not in known][:_MAX_POINTS]
            known |= complete.places.keys()
            for at in (0, *points):
                like = _Cancelled(context, case, at, complete.exceptions(), num_turns=turns)
                problems = await _leaves(like, temps)
                if problems:
                    return problems  # the next waits would repeat it
    return []


async def _leaves(like: _Cancelled, temps: list[Event]) -> list[Problem]:
    """Return the problems of an episode that is cancelled as the given one, which has not started, says."""
    context, at, grown = like.context, like.at, dict[str, list[str]]()
    for _ in range(_NUM_GROWTHS):
        before = inventory(temps)
        one = _Cancelled(context, like.case, at, like.known, num_turns=like.num_turns, temps=temps)
        await one.run()
        grown = await lasting_growth(before, temps)
        problems = one.problems()
        if problems or not grown:
            return problems
    method = one.at_fault if at else next((one.holds[kind] for kind in grown if kind in one.holds), "step")
    when = f"cancelled at wait {at} (in {method})" if at else "that ended by itself"
    left = "; ".join(f"{_NAMES[kind]}: {', '.join(names[:2])}" for kind, names in grown.items())
    expected, got = "nothing left behind by an episode", f"{left}, of an episode {when}"
    fix = "Release it in `close` or in a `finally`: a run cancels episodes at timeouts and when it stops."
    places = ((event.file, event.line) for event in temps if event.line and event.subject in grown.get("temps", []))
    file, line = next(places, ("", None))
    return [problem_at(context.agent_cls, method, expected, got, fix, line=line, file=file)]


Inventory = Mapping[str, Mapping[Any, str]]
"""The resources in use by kind, each with a readable name."""


def _growth(before: Inventory, now: Inventory) -> dict[str, list[str]]:
    """Return the kinds of which there are more than before, each with the names of the new resources."""
    return {
        kind: [name for thing, name in own.items() if thing not in before[kind]]
        for kind, own in now.items()
        if len(own) > len(before[kind])
    }


def inventory(temps: Sequence[Event]) -> Inventory:
    """Return the resources in use now. Call it on an event loop; the current task is not counted."""
    tasks: dict[Any, str] = {}
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        if not task.done():
            stack = task.get_stack(limit=1)
            at = f" at {Path(stack[0].f_code.co_filename).name}:{stack[0].f_lineno}" if stack else ""
            tasks[task] = f"{getattr(task.get_coro(), '__qualname__', task.get_name())}{at}"
    files: dict[Any, str] = {}
    with contextlib.suppress(OSError):  # without /proc they cannot be counted
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{number}")
                files[number, target] = target
    children = {process.pid or 0: process.name for process in multiprocessing.active_children()}
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children.update({int(pid): f"process {pid}" for pid in path.read_text().split()})
    return {
        "tasks": tasks,
        "threads": {thread: thread.name for thread in threading.enumerate()},
        "files": files,
        "children": children,
        "temps": {event.subject: event.subject for event in temps if Path(event.subject).exists()},
    }


async def lasting_growth(before: Inventory, temps: Sequence[Event]) -> dict[str, list[str]]:
    """Return what has grown and stays; return an empty dict as soon as nothing has grown.

    On a busy machine, the call of a cancelled episode takes long to end in its thread. The time to settle starts again
    whenever a new thread has run, up to a limit.
    """
    loop = asyncio.get_running_loop()
    started, has_collected = loop.time(), False
    last_ran, run_times = started, set[str]()
    while grown := _growth(before, now := inventory(temps)):
        times = set[str]()  # of new threads, as the kernel writes them; without /proc, none
        for thread in now["threads"].keys() - before["threads"].keys():
            with contextlib.suppress(OSError):
                times.add(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text())  # noqa: ASYNC240
        if times != run_times:
            last_ran, run_times = loop.time(), times
        seconds = loop.time() - started
        if loop.time() - last_ran > _SETTLE_S or seconds > _MAX_SETTLE * _SETTLE_S:
            return grown
        if seconds > _COLLECT_AFTER_S and not has_collected:
            has_collected = True
            gc.collect()  # the traceback of an error may hold the last reference
        await asyncio.sleep(0.005)
    return {}
