"""The property `cancel`: an episode that is cancelled at any wait leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from agentenv.errors import InfraError
from agentenv.testing.conformance.call_watch import MethodCall
from agentenv.testing.conformance.cases import EpisodeCase
from agentenv.testing.conformance.context import ConformanceContext
from agentenv.testing.conformance.instrumented import InstrumentedCoroutine
from agentenv.testing.conformance.leftovers import describe_growth, inventory, lasting_growth
from agentenv.testing.conformance.problems import Problem, exception_problem, place_of_method, problem_at, unique
from agentenv.testing.conformance.system_calls import TEMP_EVENTS, Event, record_events

_MAX_POINTS = 40
_MAX_TURNS = 2
"""Later turns wait at the same places."""
_NUM_GROWTHS = 3
"""Growth in this many runs in a row is a leak; growth in one run may be a pool that starts."""
_NOT_CLOSED = "Release it in `close` or in a `finally`: a run cancels episodes at timeouts and when it stops."


@dataclass
class _Cancelled:
    """One episode that is cancelled at wait number `at`; 0: it is not cancelled."""

    context: ConformanceContext
    case: EpisodeCase
    at: int
    num_waits: int = 0
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
    holds: dict[str, str] = field(default_factory=dict)
    """The first method after which there are more resources of a kind than before, by kind."""

    async def run(self) -> None:
        """Run the episode until it ends."""
        source = self.context.recording_source(self.seen, self._around)
        limits = self.context.limits
        turns = min(_MAX_TURNS, limits.max_turns)
        episode = self.context.episode(
            self.case, source=source, limits=type(limits)(limits.max_length, turns, limits.step_timeout_s)
        )
        self.task = asyncio.get_running_loop().create_task(InstrumentedCoroutine(episode, on_wait=self._waits))
        _, still = await asyncio.wait({self.task}, timeout=limits.step_timeout_s)
        self.ended = not still
        if self.ended and not self.task.cancelled() and isinstance(error := self.task.exception(), InfraError):
            raise error

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
        try:
            value = await InstrumentedCoroutine(work, on_wait=self._waits)
        except InfraError:
            if method == "__init__":
                self.made.remove(agent)
            raise
        for kind in inventory(self.temps).grown(before):
            self.holds.setdefault(kind, method)
        return value

    @property
    def at_fault(self) -> str:
        """The method that was cancelled."""
        return "close" if self.is_closing else self.method

    def problems(self) -> list[Problem]:
        """Return the problems of how the episode ended, without leaks."""
        cls, at = self.context.agent_cls, f"cancelled at wait {self.at} (in {self.at_fault})"
        errors = [(one.method, one.error) for one in self.seen]
        found = [exception_problem(cls, method, error) for method, error in errors if isinstance(error, Exception)]
        if not self.ended:
            expected = "an end soon after the cancellation"
            found.append(problem_at(cls, self.method, expected, f"none, {at}", "Let CancelledError pass."))
        odd = [self.closes[id(agent)] for agent in self.made if self.closes[id(agent)] != 1]
        if odd and self.ended:
            expected = "one call of `close` for each instance"
            found.append(problem_at(cls, "close", expected, f"{odd[0]}, {at}", "Leave the call to the loop."))
        return found


def cancel(context: ConformanceContext) -> list[Problem]:
    """An episode that is cancelled at any wait is closed once and leaves no task, thread, file or process."""
    context.require_steps()
    return unique(context.run(_at_every_wait(context)))


async def _at_every_wait(context: ConformanceContext) -> list[Problem]:
    file, cases = place_of_method(context.agent_cls, "step")[0], context.cases
    case = next((each for each in cases if each.policy == "calls"), cases[1])
    with record_events(TEMP_EVENTS, file) as temps:
        num_waits = 0
        for _ in range(2):  # resources that all episodes share exist after the first
            complete = _Cancelled(context, case, at=0)
            await complete.run()
            num_waits = complete.num_waits
        step = max(1, -(-num_waits // _MAX_POINTS))
        for at in (0, *range(1, num_waits + 1, step)):
            problems = await _leaves(context, case, at, temps)
            if problems:
                return problems  # the next waits would repeat it
    return []


async def _leaves(context: ConformanceContext, case: EpisodeCase, at: int, temps: list[Event]) -> list[Problem]:
    """Return the problems of an episode that is cancelled at this wait; 0: one that is not cancelled."""
    grown: dict[str, list[str]] = {}
    for _ in range(_NUM_GROWTHS):
        before = inventory(temps)
        one = _Cancelled(context, case, at, temps=temps)
        await one.run()
        grown = await lasting_growth(before, temps)
        problems = one.problems()
        if problems or not grown:
            return problems
    method = one.at_fault if at else next((one.holds[kind] for kind in grown if kind in one.holds), "step")
    when = f"cancelled at wait {at} (in {method})" if at else "that ended by itself"
    problem = problem_at(
        context.agent_cls, method, "nothing left behind by an episode",
        f"{describe_growth(grown)}, of an episode {when}", _NOT_CLOSED,
    )  # fmt: skip
    lines = [event.line for event in temps if event.subject in grown.get("temps", []) and event.line]
    return [replace(problem, line=lines[0])] if lines else [problem]
