"""The property `cancel`: an episode that is cancelled, wherever it waits, leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from agentenv.check_watch import Seen
from agentenv.conformance.cases import Case
from agentenv.conformance.driven import Driven
from agentenv.conformance.leftovers import inventory, settled, told
from agentenv.conformance.problems import Problem, place_of_method, problem_at, raised, unique
from agentenv.conformance.scene import Scene
from agentenv.conformance.system_calls import TEMP_EVENTS, Event, watching

_MAX_POINTS = 40
_MAX_TURNS = 2
"""Later turns wait where the first do."""
_NUM_GROWTHS = 3
"""What is left three times in a row is left each time; what is left once may be a pool that warmed up."""
_NOT_CLOSED = "Close it in `close`, or in a `finally`: a run cancels episodes at its end and where time is out."


@dataclass
class _Cancelled:
    """One episode that is cancelled at the wait with the number `at`."""

    scene: Scene
    case: Case
    at: int
    num_waits: int = 0
    method: str = "__init__"
    """Of the agent, which was last at work, `close` aside: what is cancelled is closed."""
    is_closing: bool = False
    """The episode was cancelled while it was closed."""
    task: asyncio.Task[Any] | None = None
    closes: Counter[int] = field(default_factory=Counter)
    made: list[Any] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    ended: bool = True
    temps: list[Event] = field(default_factory=list)
    holds: dict[str, str] = field(default_factory=dict)
    """What there is more of after a method than before it: its kind, and the first such method."""

    async def run(self) -> None:
        """Run it until it has ended, one way or the other."""
        source = self.scene.spied(self.seen, self._around)
        limits = self.scene.limits
        turns = min(_MAX_TURNS, limits.max_turns)
        episode = self.scene.episode(
            self.case, source=source, limits=type(limits)(limits.max_length, turns, limits.step_timeout_s)
        )
        self.task = asyncio.get_running_loop().create_task(Driven(episode, waits=self._waits))
        _, still = await asyncio.wait({self.task}, timeout=limits.step_timeout_s)
        self.ended = not still

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
        value = await Driven(work, waits=self._waits)
        for kind in inventory(self.temps).grown(before):
            self.holds.setdefault(kind, method)
        return value

    @property
    def at_fault(self) -> str:
        """The method that was cancelled."""
        return "close" if self.is_closing else self.method

    def problems(self) -> list[Problem]:
        """What is wrong with how it ended, whatever it left."""
        cls, at = self.scene.agent_cls, f"cancelled at wait {self.at} (in {self.at_fault})"
        errors = [(one.method, one.error) for one in self.seen]
        found = [raised(cls, method, error) for method, error in errors if isinstance(error, Exception)]
        if not self.ended:
            expected = "an end soon after it is cancelled"
            found.append(problem_at(cls, self.method, expected, f"none, {at}", "Let CancelledError pass."))
        odd = [self.closes[id(agent)] for agent in self.made if self.closes[id(agent)] != 1]
        if odd and self.ended:
            expected = "one call of `close` for each agent instance"
            found.append(problem_at(cls, "close", expected, f"{odd[0]}, {at}", "Let the loop call it."))
        return found


def cancel(scene: Scene) -> list[Problem]:
    """An episode that is cancelled at any of its waits is closed once and leaves no task, thread, file or process."""
    scene.needs_steps()
    return unique(scene.run(_at_every_wait(scene)))


async def _at_every_wait(scene: Scene) -> list[Problem]:
    file, case = place_of_method(scene.agent_cls, "step")[0], scene.cases[1]
    with watching(TEMP_EVENTS, file) as temps:
        num_waits = 0
        for _ in range(2):  # what is opened for all episodes is there from now on
            whole = _Cancelled(scene, case, at=0)
            await whole.run()
            num_waits = whole.num_waits
        step = max(1, -(-num_waits // _MAX_POINTS))
        for at in (0, *range(1, num_waits + 1, step)):
            problems = await _leaves(scene, case, at, temps)
            if problems:
                return problems  # at the next wait it would be the same again
    return []


async def _leaves(scene: Scene, case: Case, at: int, temps: list[Event]) -> list[Problem]:
    """What an episode that is cancelled at this wait breaks; 0: one that is not cancelled."""
    grown: dict[str, list[str]] = {}
    for _ in range(_NUM_GROWTHS):
        before = inventory(temps)
        one = _Cancelled(scene, case, at, temps=temps)
        await one.run()
        grown = await settled(before, temps)
        problems = one.problems()
        if problems or not grown:
            return problems
    method = one.at_fault if at else next((one.holds[kind] for kind in grown if kind in one.holds), "step")
    when = f"cancelled at wait {at} (in {method})" if at else "that ends by itself"
    problem = problem_at(
        scene.agent_cls, method, "nothing left behind by an episode",
        f"{told(grown)}, of an episode {when}", _NOT_CLOSED,
    )  # fmt: skip
    lines = [event.line for event in temps if event.subject in grown.get("temps", []) and event.line]
    return [replace(problem, line=lines[0])] if lines else [problem]
