"""The property `determinism`: an episode is a function of its task, its seed and its actions."""

from __future__ import annotations

import inspect
import random
import re
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from agentenv.core.trajectory import Trajectory
from agentenv.testing.conformance.call_watch import MethodCall
from agentenv.testing.conformance.cases import EpisodeCase, yielding
from agentenv.testing.conformance.context import ConformanceContext
from agentenv.testing.conformance.problems import Problem, problem_at, unique
from agentenv.testing.conformance.records import culprit, difference, own_classes, same_number
from agentenv.testing.shifted_clock import elapsing_clock, modules_of, reads_clocks

_DELAY_S = 61.0
"""Time that an engine with much else to do may take for an action; an episode may have a deadline of an hour."""
_DRAWS = re.compile(r"\b(np|numpy)\.random\.\w|\brandom\.(?!Random\b)\w+\(|\btorch\.(manual_seed|rand)")


def determinism(context: ConformanceContext) -> list[Problem]:
    """Check that the same task, seed and actions produce the same episode, without global random generators."""
    context.require_steps()
    drawn = context.run(_drawn(context))
    if drawn:
        return unique(drawn)  # the cause if episodes differ
    records, again = context.separate_episodes, context.run(_again(context))
    problems = []
    for case, one, other in zip(context.cases, records, again, strict=True):
        found = difference(one, other, ("the first time", "the second time"))
        if found is not None:
            problems.append(
                problem_at(
                    context.agent_cls, culprit(found, other), "the same episode for the same task, seed and actions",
                    f"{found} (the policy {case.policy!r})",
                    "Draw from `Random(states['seed'])`; do not use clocks, earlier episodes or the order of sets.",
                )
            )  # fmt: skip
    return unique(problems) or _with_delays(context, records)


def _with_delays(context: ConformanceContext, records: list[Trajectory]) -> list[Problem]:
    """Return the problem of a reward or score that differs if more time passes before each action.

    An episode may be cut off after some time: what differs then is not judged.
    """
    cls, modules = context.agent_cls, modules_of(own_classes(context.agent_cls))
    if not reads_clocks(modules):
        return []
    for case, one in zip(context.cases, records, strict=True):
        other = context.run(_delayed(context, case, modules))
        for number, (turn, later) in enumerate(zip(one.turns, other.turns, strict=False), 1):
            if turn.result is None or later.result is None or later.result.truncated or turn.result.truncated:
                break
            for name in ("reward", "score"):
                was, now = getattr(turn.result, name), getattr(later.result, name)
                if not same_number(was, now):
                    expected = f"the same {name} if {_DELAY_S:g} s more pass before each action"
                    got = f"{now!r} for {was!r} at turn {number} (the policy {case.policy!r})"
                    fix = "Count turns or tokens: the time depends on the engine and on what else it serves."
                    return [problem_at(cls, "step", expected, got, fix)]
    return []


async def _delayed(context: ConformanceContext, case: EpisodeCase, modules: Sequence[ModuleType]) -> Trajectory:
    """Return the trajectory of a case in which the clocks of modules jump before each action."""
    with elapsing_clock(modules) as add:

        async def around(agent: Any, method: str, given: Any, work: Coroutine[Any, Any, Any]) -> Any:
            if method == "step":
                add(_DELAY_S)
            return await work

        return await context.episode(case, source=context.recording_source([], around))


async def _again(context: ConformanceContext) -> list[Trajectory]:
    """Return the trajectories of all cases, run in the opposite order."""
    cases = list(reversed(context.cases))
    found = [await context.episode(case, engine=yielding(case, context.tokenizer)) for case in cases]
    return list(reversed(found))


async def _drawn(context: ConformanceContext) -> list[Problem]:
    """Return the problems of methods that change the state of a global generator."""
    problems: list[Problem] = []

    async def around(agent: Any, method: str, given: Any, work: Coroutine[Any, Any, Any]) -> Any:
        before = _generators()
        value = await work
        after = _generators()
        problems.extend(
            _global(context.agent_cls, method, name) for name in before if name in after and before[name] != after[name]
        )
        return value

    seen: list[MethodCall] = []
    for case in context.cases:
        await context.episode(case, source=context.recording_source(seen, around))
        if problems:
            break
    return problems


def _global(cls: type[Any], method: str, name: str) -> Problem:
    """Return the problem of a method that changed a global generator, at the line that draws from it if found."""
    problem = problem_at(
        cls, method, f"no use of the global generator `{name}`", "a changed state",
        "Draw from a generator of the episode, `Random(states['seed'])`: other code uses the global one.",
    )  # fmt: skip
    for part in (getattr(cls, method, None), *own_classes(cls)):
        try:
            lines, first = inspect.getsourcelines(part)  # type: ignore[arg-type]
        except (TypeError, OSError):
            continue
        for number, line in enumerate(lines, first):
            if _DRAWS.search(line):
                return replace(problem, line=number or problem.line)
    return problem


def _generators() -> dict[str, Any]:
    """Return the states of the global generators of all imported modules."""
    states: dict[str, Any] = {"random": random.getstate()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if hasattr(numpy, "random"):
        kind, keys, *rest = numpy.random.get_state()  # type: ignore[union-attr]
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    if hasattr(torch, "get_rng_state"):
        states["torch"] = torch.get_rng_state().numpy().tobytes()  # type: ignore[union-attr]
    return states
