"""The properties `rewards`, `ends` and `truncation`: what episodes come to."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from agentenv.check_watch import Seen
from agentenv.conformance.passes import Noted, noted
from agentenv.conformance.problems import Problem, problem_at, raised, read_message, short, unique
from agentenv.conformance.scene import NotApplicable, Scene
from agentenv.trajectory import Trajectory
from agentenv.types import MAX_REWARD, StopReason

_SCORE = "Score quality; put the rest in the reward."


def rewards(scene: Scene) -> list[Problem]:
    """Every policy gets finite rewards, a score in [0, 1] and facts that are numbers or text; no call raises."""
    scene.needs_steps()
    return unique(problem for one in noted(scene) for problem in _of_numbers(scene, one))


def ends(scene: Scene) -> list[Problem]:
    """Every policy comes to the end of its episode within so many turns, and nothing follows the end."""
    scene.needs_steps()
    problems = []
    for one in noted(scene):
        trajectory, turns = one.trajectory, scene.limits.max_turns
        if trajectory.stop_reason is StopReason.MAX_TURNS:
            got = f"none where the policy is {one.case.policy!r}"
            mend = "Set terminated or truncated (in a dict: done) after a bounded number of attempts; an environment "
            mend += "whose episodes are longer is checked with a larger --max_turns."
            problems.append(problem_at(scene.agent_cls, "step", f"an end within {turns} turns", got, mend))
        elif trajectory.terminated and len(trajectory.segments[-1]) != trajectory.turns[-1].end:
            got, mend = "further tokens", "Return what `super().execute` gives."
            problems.append(problem_at(scene.agent_cls, "step", "nothing after the last action", got, mend))
    return unique(problems)


def truncation(scene: Scene) -> list[Problem]:
    """Where a limit ends the episode `on_truncate` gives None or a result, and the reward is known."""
    scene.needs_steps()
    problems, num_truncated = [], 0
    for case in scene.cases:
        seen: list[Seen] = []
        limits = replace(scene.limits, max_turns=1)
        trajectory = scene.run(scene.episode(case, source=scene.spied(seen), limits=limits))
        words = [one for one in seen if one.method == "on_truncate"]
        num_truncated += len(words)
        errors = [raised(scene.agent_cls, one.method, one.error) for one in words if one.error is not None]
        problems += errors or (_of_record(scene, trajectory, "on_truncate") if words else [])
    if not num_truncated:
        raise NotApplicable("every episode ends with its first turn")
    return unique(problems)


def _of_numbers(scene: Scene, one: Noted) -> list[Problem]:
    problems = [raised(scene.agent_cls, call.method, call.error) for call in one.seen if call.error is not None]
    return problems or _of_record(scene, one.trajectory, "step")


def _of_record(scene: Scene, trajectory: Trajectory, method: str) -> list[Problem]:
    cls, error = scene.agent_cls, trajectory.error
    if error is not None:
        at = {"create": "__init__", "prompt": "reset"}.get(error.where, error.where)
        where = f"{cls.__name__}.{at}"
        if error.message.startswith(f"{where}: expected "):
            return [problem_at(cls, at, *read_message(error.message, where))]
        problem = problem_at(cls, at, "an episode without an error", f"{error.type}: {error.message}", "Mend it.")
        path, _, line = error.place.rpartition(":")
        return [replace(problem, file=short(path), line=int(line)) if path else problem]
    problems = []
    if trajectory.score is not None and not 0.0 <= trajectory.score <= 1.0:
        problems.append(problem_at(cls, method, "a score in [0, 1]", f"{trajectory.score!r}", _SCORE))
    for turn in trajectory.turns:
        if turn.result is not None:
            problems += _of_facts(cls, method, turn.result.info)
    if trajectory.reward is not None and not abs(trajectory.reward) <= MAX_REWARD:
        mend = "Keep rewards near 1: a sum like this spoils a batch."
        problems.append(problem_at(cls, method, "a finite sum of rewards", f"{trajectory.reward!r}", mend))
    return problems


def _of_facts(cls: type[Any], method: str, info: Any) -> list[Problem]:
    bad = {key: value for key, value in info.items() if not isinstance(value, str) and not math.isfinite(float(value))}
    if not bad:
        return []
    return [problem_at(cls, method, "finite numbers or text in info", f"{bad!r}", "Convert them, or leave them out.")]
