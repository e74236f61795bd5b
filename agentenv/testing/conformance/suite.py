"""The properties by name, and `run_suite`, which checks them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentenv._util.suggest import did_you_mean
from agentenv.errors import ConfigError, InfraError
from agentenv.testing.conformance import results
from agentenv.testing.conformance.blocking import blocking
from agentenv.testing.conformance.call_watch import CallWatch, Hung
from agentenv.testing.conformance.cancellation import cancel
from agentenv.testing.conformance.child import CheckProgress, ChildDeath
from agentenv.testing.conformance.context import ConformanceContext, ConformanceOptions, NotApplicable, SlowCalls
from agentenv.testing.conformance.contract import contract, hung_problem
from agentenv.testing.conformance.probes import shortened_sleeps
from agentenv.testing.conformance.problems import Problem, relative_path, unique
from agentenv.testing.conformance.reach import explore
from agentenv.testing.conformance.repeats import determinism, isolation, portability

Property = Callable[[ConformanceContext], list[Problem]]
PROPERTIES: Mapping[str, Property] = {
    "contract": contract,
    "blocking": blocking,
    "constructor": results.constructor,
    "rewards": results.rewards,
    "ends": results.ends,
    "truncation": results.truncation,
    "feedback": results.feedback,
    "determinism": determinism,
    "portability": portability,
    "isolation": isolation,
    "mutation": results.mutation,
    "close": results.close,
    "cancel": cancel,
    "pickling": results.pickling,
    "data": results.data,
}
"""In the order in which they are checked: first those that make others slow or wrong. The first line of each docstring
states the property."""

_WITHOUT_CASES = ("contract", "constructor", "close", "pickling", "data")
"""Properties that examine no case."""
_MAX_TRIES = 5
"""Times that a property is checked, each time without the actions whose calls were slow."""


@dataclass(frozen=True, slots=True)
class PropertyOutcome:
    """The result of checking one property."""

    name: str
    state: Literal["held", "broken", "skipped", "outside"]
    """`outside`: infrastructure failed, so the property is unknown."""
    problems: Sequence[Problem] = ()
    notes: Sequence[Problem] = ()
    """Advice, which breaks nothing."""
    reason: str = ""
    """Why the property was skipped, or what failed outside."""
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return one line, and one for each problem."""
        mark = {"held": "✓", "broken": "✗", "skipped": "–", "outside": "!"}[self.state]
        text = {"skipped": f"skipped: {self.reason}", "outside": self.reason}.get(self.state) or meaning(self.name)
        notes = [f"  note: {note}" for note in self.notes]
        return "\n".join([f"{mark} {self.name:12} {text}", *(f"  {problem}" for problem in self.problems), *notes])

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, with the number of problems in place of the problems."""
        return {
            "name": self.name, "state": self.state, "reason": self.reason, "num_problems": len(self.problems),
            "seconds": round(self.seconds, 3), "notes": [str(note) for note in self.notes],
        }  # fmt: skip


def meaning(name: str) -> str:
    """Return the sentence that states a property."""
    return (PROPERTIES[name].__doc__ or "").strip().splitlines()[0]


def run_suite(
    context: ConformanceContext,
    *,
    only: Sequence[str] = (),
    skip: Mapping[str, str] | None = None,
    on_outcome: Callable[[PropertyOutcome], None] = lambda outcome: None,
) -> list[PropertyOutcome]:
    """Check the properties one after the other.

    If `contract` is broken, the others are skipped unless `only` names them: they would report the same problems. An
    episode without an end, or an action whose call hangs, skips none.

    Args:
        context: the target and the episodes.
        only: names of properties; empty for all of them.
        skip: reason for each property to skip, by name.
        on_outcome: called with each outcome as soon as it is available.

    Raises:
        ConfigError: a property is unknown, or the target cannot be loaded.
    """
    skip = skip or {}
    check_names(only, "--only")
    check_names(tuple(skip), "--skip")
    outcomes: list[PropertyOutcome] = []
    blocker: str | None = None
    try:
        for name in only or PROPERTIES:
            if blocker is None and outcomes and blocks_others(context, outcomes[-1], only):
                blocker = outcomes[-1].name
            if name in skip:
                outcome = PropertyOutcome(name, "skipped", reason=skip[name])
            elif blocker is not None:
                outcome = PropertyOutcome(name, "skipped", reason=f"fix `{blocker}` first")
            else:
                outcome = check_property(context, name)
            outcomes.append(outcome)
            on_outcome(outcome)
    finally:
        context.close()
    return outcomes


def check_property(context: ConformanceContext, name: str) -> PropertyOutcome:
    """Check one property and report a call that hangs as its problem. The caller closes the context at the end.

    After a call that hangs, or many that are slow, the property is checked again without their actions.
    """

    def examined() -> list[Problem]:
        if name not in _WITHOUT_CASES:
            explore(context)
        return PROPERTIES[name](context)

    started = time.perf_counter()
    found: list[Problem] = []
    context.forget_outage()
    for _ in range(_MAX_TRIES):
        try:
            with nullcontext() if name == "constructor" else shortened_sleeps(context.watch.note_sleep):
                found += asyncio.run(context.watch.run(examined, name))
            break
        except NotApplicable as reason:
            if not found and context.outage is None:
                return PropertyOutcome(name, "skipped", reason=str(reason), seconds=time.perf_counter() - started)
            break
        except InfraError as error:
            if error.ends_run:
                raise
            context.outage = error
            break
        except SlowCalls:
            context.avoid_slow_calls()
        except Hung as hung:
            found.append(hung_problem(context, hung))
            if context.watch.is_stuck:
                break
            context.avoid_slow_calls()
    if context.outage is not None and all(problem.is_note for problem in found):
        return PropertyOutcome(name, "outside", reason=str(context.outage), seconds=time.perf_counter() - started)
    named = [replace(problem, property=name) for problem in unique(found)]
    broken, notes = ([each for each in named if each.is_note is is_note] for is_note in (False, True))
    return PropertyOutcome(name, "broken" if broken else "held", broken, notes, seconds=time.perf_counter() - started)


def check_names(names: Sequence[str], flag: str) -> None:
    """Reject unknown names of properties.

    Raises:
        ConfigError: a name is unknown; the message has the nearest one.
    """
    for name in names:
        if name not in PROPERTIES:
            advice = did_you_mean(name, PROPERTIES, "Omit it.")
            raise ConfigError(f"{flag}: expected one of {', '.join(PROPERTIES)}, got {name!r}.{advice}")


def blocks_others(context: ConformanceContext, outcome: PropertyOutcome, only: Sequence[str] = ()) -> bool:
    """Return True if a broken property must be fixed before the others are checked, unless `only` names them."""
    hangs = [problem for problem in outcome.problems if problem.expected.startswith("an answer within")]
    ends = [problem for problem in outcome.problems if problem.expected.endswith(" turns")]  # a limit ends the others
    if hangs and context.watch.is_stuck:
        return True
    return outcome.name == "contract" and not only and len(hangs) + len(ends) < len(outcome.problems)


def make_context(
    options: ConformanceOptions,
    notify: Callable[[str], None] = lambda line: None,
    progress: CheckProgress | None = None,
) -> ConformanceContext:
    """Return the context for `run_suite`; `notify` gets a line about each slow call, `progress` is of `in_child`."""
    return ConformanceContext(options, CallWatch(notify, progress, options.step_timeout_s))


def outcome_of_death(death: ChildDeath, target: str) -> PropertyOutcome:
    """Return the broken property of a check whose process ended without an answer."""
    doing = death.doing
    file, where = str(doing.get("file", target)), str(doing.get("where") or target)
    action = f" after the action {doing['action']}" if doing.get("action") else ""
    if death.signal_name:
        expected, got = "a process that continues", f"its end by {death.signal_name}{action}"
        fix = (
            "Python code cannot cause this. Look for native code that two threads use at once, or for too much memory."
        )
    else:
        expected, got = f"an answer within {doing.get('limit_s', 0):g} s", f"none{action}"
        fix = "It holds Python's lock, so no limit can end it and all episodes stop. Bound the work: the length of the "
        fix += "text that a pattern reads, the size of numbers, or run it in a process that can be killed."
    line = death.line_in(file) or int(doing.get("line") or 0)
    name = str(doing.get("property") or "contract")
    problem = Problem(relative_path(file), line, where, expected, got, fix, name)
    return PropertyOutcome(name, "broken", [problem])
