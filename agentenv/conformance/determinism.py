"""The property `determinism`: an episode is a function of its task, its seed and its actions."""

from __future__ import annotations

import inspect
import random
import re
import sys
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from agentenv.check_watch import Seen
from agentenv.conformance.cases import yielding
from agentenv.conformance.passes import alone
from agentenv.conformance.problems import Problem, problem_at, unique
from agentenv.conformance.records import culprit, difference, own_classes
from agentenv.conformance.scene import Scene
from agentenv.trajectory import Trajectory

_DRAWS = re.compile(r"\b(np|numpy)\.random\.\w|\brandom\.(?!Random\b)\w+\(|\btorch\.(manual_seed|rand)")


def determinism(scene: Scene) -> list[Problem]:
    """The same task, seed and actions give the same episode again; global random numbers are left alone."""
    scene.needs_steps()
    drawn = scene.run(_drawn(scene))
    if drawn:
        return unique(drawn)  # which is why episodes differ, where they do
    records, again = alone(scene), scene.run(_again(scene))
    problems = []
    for case, one, other in zip(scene.cases, records, again, strict=True):
        found = difference(one, other, ("the first time", "the second time"))
        if found is not None:
            problems.append(
                problem_at(
                    scene.agent_cls, culprit(found, other), "the same episode for the same task, seed and actions",
                    f"{found} (the policy {case.policy!r})",
                    "Draw from `Random(states['seed'])`; depend on no clock, no earlier episode and no order of sets.",
                )
            )  # fmt: skip
    return unique(problems)


async def _again(scene: Scene) -> list[Trajectory]:
    """The episodes of all cases, the last first."""
    cases = list(reversed(scene.cases))
    found = [await scene.episode(case, engine=yielding(case, scene.tokenizer)) for case in cases]
    return list(reversed(found))


async def _drawn(scene: Scene) -> list[Problem]:
    """Methods that leave a global generator in another state than they found it in."""
    problems: list[Problem] = []

    async def around(agent: Any, method: str, given: Any, work: Coroutine[Any, Any, Any]) -> Any:
        """Compare before and after a call."""
        before = _generators()
        value = await work
        after = _generators()
        problems.extend(
            _global(scene.agent_cls, method, name) for name in before if name in after and before[name] != after[name]
        )
        return value

    seen: list[Seen] = []
    for case in scene.cases:
        await scene.episode(case, source=scene.spied(seen, around))
        if problems:
            break
    return problems


def _global(cls: type[Any], method: str, name: str) -> Problem:
    problem = problem_at(
        cls, method, f"the global generator `{name}` to be left alone", "another state of it than before",
        "Draw from a generator of the episode, `Random(states['seed'])`: others draw from the global one.",
    )  # fmt: skip
    line = _line_that_draws(cls, method)
    return replace(problem, line=line or problem.line)


def _line_that_draws(cls: type[Any], method: str) -> int:
    for part in (getattr(cls, method, None), *own_classes(cls)):
        try:
            lines, first = inspect.getsourcelines(part)  # type: ignore[arg-type]
        except (TypeError, OSError):
            continue
        found = next((first + i for i, line in enumerate(lines) if _DRAWS.search(line)), 0)
        if found:
            return found
    return 0


def _generators() -> dict[str, Any]:
    """The states of the process's own generators, of what is imported."""
    states: dict[str, Any] = {"random": random.getstate()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if hasattr(numpy, "random"):
        kind, keys, *rest = numpy.random.get_state()  # type: ignore[union-attr]
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    if hasattr(torch, "get_rng_state"):
        states["torch"] = torch.get_rng_state().numpy().tobytes()  # type: ignore[union-attr]
    return states
