"""The properties `rewards`, `ends` and `truncation`: rewards and ends of episodes."""

from __future__ import annotations

import math
from dataclasses import replace

from agentenv.core.trajectory import Trajectory
from agentenv.core.types import MAX_REWARD, StopReason
from agentenv.testing.conformance.call_watch import MethodCall
from agentenv.testing.conformance.context import ConformanceContext, NotApplicable
from agentenv.testing.conformance.problems import (
    Problem,
    exception_problem,
    problem_at,
    read_message,
    relative_path,
    unique,
)
from agentenv.testing.conformance.shared_episodes import recorded_episodes


def rewards(context: ConformanceContext) -> list[Problem]:
    """Every policy gets finite rewards, a score within its range, and numbers or text in info; no call raises."""
    context.require_steps()
    cls, problems = context.agent_cls, list[Problem]()
    for one in recorded_episodes(context):
        raised = [exception_problem(cls, call.method, call.error) for call in one.seen if call.error is not None]
        problems += raised or _of_record(context, one.trajectory, "step")
    return unique(problems)


def ends(context: ConformanceContext) -> list[Problem]:
    """Every episode ends within the maximum number of turns for any policy, and nothing follows the end."""
    context.require_steps()
    problems = []
    for one in recorded_episodes(context):
        trajectory, turns = one.trajectory, context.limits.max_turns
        if trajectory.stop_reason is StopReason.MAX_TURNS:
            got = f"none with the policy {one.case.policy!r}"
            fix = "Set terminated or truncated (in a dict: done) after a bounded number of attempts. If episodes are "
            fix += "meant to be longer, set `max_turns` in the class, or pass --max_turns."
            problems.append(problem_at(context.agent_cls, "step", f"an end within {turns} turns", got, fix))
        elif trajectory.terminated and len(trajectory.segments[-1]) != trajectory.turns[-1].end:
            got, fix = "further tokens", "Return the result of `super().execute`."
            problems.append(problem_at(context.agent_cls, "step", "nothing after the last action", got, fix))
    return unique(problems)


def truncation(context: ConformanceContext) -> list[Problem]:
    """If a limit ends the episode, `on_truncate` returns None or a result, and the reward is known."""
    context.require_steps()
    problems, num_truncated = [], 0
    for case in context.cases:
        seen: list[MethodCall] = []
        limits = replace(context.limits, max_turns=1)
        trajectory = context.run(context.episode(case, source=context.recording_source(seen), limits=limits))
        words = [one for one in seen if one.method == "on_truncate"]
        num_truncated += len(words)
        errors = [exception_problem(context.agent_cls, one.method, one.error) for one in words if one.error is not None]
        problems += errors or (_of_record(context, trajectory, "on_truncate") if words else [])
    if not num_truncated:
        raise NotApplicable("every episode ends with its first turn")
    return unique(problems)


def _of_record(context: ConformanceContext, trajectory: Trajectory, method: str) -> list[Problem]:
    cls, error = context.agent_cls, trajectory.error
    if error is not None:
        at = {"create": "__init__", "prompt": "reset"}.get(error.where, error.where)
        where = f"{cls.__name__}.{at}"
        if error.message.startswith(f"{where}: expected "):
            return [problem_at(cls, at, *read_message(error.message, where))]
        problem = problem_at(cls, at, "an episode without an error", f"{error.type}: {error.message}", "Fix it.")
        path, _, line = error.place.rpartition(":")
        return [replace(problem, file=relative_path(path), line=int(line)) if path else problem]
    problems = []
    for turn in trajectory.turns:
        info = turn.result.info if turn.result is not None else {}
        bad = {key: fact for key, fact in info.items() if not isinstance(fact, str) and not math.isfinite(float(fact))}
        if bad:
            expected = "finite numbers or text in info"
            problems.append(problem_at(cls, method, expected, f"{bad!r}", "Convert or omit them."))
    if trajectory.reward is not None and not abs(trajectory.reward) <= MAX_REWARD:
        fix = "Keep rewards near 1: a sum like this distorts the advantages of a batch."
        problems.append(problem_at(cls, method, "a finite sum of rewards", f"{trajectory.reward!r}", fix))
    return problems
