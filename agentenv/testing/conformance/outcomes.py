"""The properties `rewards`, `ends` and `truncation`: rewards and ends of episodes."""

from __future__ import annotations

from dataclasses import replace

from agentenv._util.plurals import counted
from agentenv.core.agent import AgentInstance
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import MAX_REWARD, StopReason
from agentenv.testing.conformance.call_watch import MethodCall
from agentenv.testing.conformance.cases import EpisodeCase
from agentenv.testing.conformance.context import ConformanceContext, NotApplicable
from agentenv.testing.conformance.problems import (
    Problem,
    exception_problem,
    info_problems,
    problem_at,
    record_problem,
    unique,
)

_EPS = 1e-4
"""Rewards and scores that differ by less are the same."""


def rewards(context: ConformanceContext) -> list[Problem]:
    """Every policy gets finite rewards, a score within its range, and numbers or text in info; no call raises."""
    context.require_steps()
    cls, problems = context.agent_cls, list[Problem]()
    for one in context.recorded_episodes:
        if one.case.cut:
            continue  # as in `truncation`
        raised = [exception_problem(cls, call.method, call.error) for call in one.seen if call.error is not None]
        problems += raised or _of_record(context, one.trajectory, "step")
    return unique(problems)


def ends(context: ConformanceContext) -> list[Problem]:
    """Every episode ends by itself, or at `max_turns` of the class, for any policy, and nothing follows the end.

    An environment with tools may leave the end to the limit of a run, which is a note.
    """
    context.require_steps()
    problems = []
    # Right calls of tools may continue until the limit of a run ends the episode.
    unjudged = {case.policy for case in context.reached or ()}
    for one in context.recorded_episodes:
        trajectory, turns = one.trajectory, context.limits.max_turns
        is_judged = context.must_end and not one.case.cut and one.case.policy not in unjudged
        if trajectory.stop_reason is StopReason.MAX_TURNS and is_judged:
            got = f"none with the policy {one.case.policy!r}"
            fix = "Set terminated or truncated (in a dict: done) after a bounded number of attempts. If episodes are "
            fix += "meant to be longer, set `max_turns` in the class, or pass --max_turns."
            if context.may_go_on:
                fix = (
                    "Only --max_turns of a run ends it. Set `max_turns` in the class, so that every run does the same."
                )
            problem = problem_at(context.agent_cls, "step", f"an end within {counted(turns, 'turn')}", got, fix)
            problems.append(replace(problem, is_note=context.may_go_on))
        elif trajectory.terminated and len(trajectory.segments[-1]) != trajectory.turns[-1].end:
            got, fix = "further tokens", "Return the result of `super().execute`."
            problems.append(problem_at(context.agent_cls, "step", "nothing after the last action", got, fix))
    return unique(problems)


def truncation(context: ConformanceContext) -> list[Problem]:
    """If a limit ends the episode, `on_truncate` returns None or a result, and pays no more than the whole task."""
    context.require_steps()
    problems, num_truncated = [], 0
    later = {"gold", *(case.policy for case in context.reached or ())}
    for case in context.cases:
        last = case.num_turns - 1 if case.policy in later else 1
        for max_turns in sorted({1, max(1, min(last, context.limits.max_turns))}):
            seen, trajectory = context.run(_cut_off(context, case, max_turns))
            words = [one for one in seen if one.method == "on_truncate"]
            num_truncated += len(words)
            problems += [
                exception_problem(context.agent_cls, one.method, one.error) for one in words if one.error is not None
            ] or (_of_record(context, trajectory, "on_truncate") if words else [])
    if not num_truncated:
        raise NotApplicable("every episode ends with its first turn")
    return unique(problems) or _of_payments(context)


def _of_payments(context: ConformanceContext) -> list[Problem]:
    """Return the problem of gold actions that are cut off and earn more than all of them, or lose what they earned."""
    cls = context.agent_cls
    if cls.on_truncate is AgentInstance.on_truncate:
        return []
    for case in (each for each in context.cases if each.policy == "gold" and each.num_turns > 1):
        whole = context.run(context.episode(case))
        if not whole.terminated or whole.reward is None:
            continue
        for num in range(1, case.num_turns):
            earned = [turn.result for turn in whole.turns[:num] if turn.result is not None]
            _, cut = context.run(_cut_off(context, case, num))
            if cut.reward is None or len(cut.turns) != num or len(earned) != num:
                continue
            paid, after = sum(each.reward for each in earned), f"after {num} of {case.num_turns} gold actions"
            if cut.reward > whole.reward + _EPS and cut.reward > paid + _EPS:
                expected = f"at most the reward of the whole task, {whole.reward:g}, if a limit ends it"
                fix = "Return only what is not paid yet: its reward is added to those of the turns."
                return [problem_at(cls, "on_truncate", expected, f"{cut.reward:g} {after}", fix)]
            score = earned[-1].score
            if score is None or cut.score is None or whole.score is None or score < whole.score - _EPS:
                continue
            if cut.score < score - _EPS:
                expected = f"the score of the last turn, {score:g}, if a limit ends the episode"
                fix = "Return no score, or a lower one in the turns: a score is the quality so far."
                return [problem_at(cls, "on_truncate", expected, f"{cut.score:g} {after}", fix)]
    return []


async def _cut_off(
    context: ConformanceContext, case: EpisodeCase, max_turns: int
) -> tuple[list[MethodCall], Trajectory]:
    """Return the calls and the trajectory of an episode that a limit ends after so many turns."""
    seen: list[MethodCall] = []
    limits = replace(context.limits, max_turns=max_turns)
    return seen, await context.episode(case, source=context.recording_source(seen), limits=limits)


def _of_record(context: ConformanceContext, trajectory: Trajectory, method: str) -> list[Problem]:
    cls, error = context.agent_cls, trajectory.error
    if error is not None:
        return [record_problem(cls, error)]
    infos = [turn.result.info for turn in trajectory.turns if turn.result is not None]
    problems = [problem for info in infos for problem in info_problems(cls, method, info)]
    if trajectory.reward is not None and not abs(trajectory.reward) <= MAX_REWARD:
        fix = "Keep rewards near 1: a sum like this distorts the advantages of a batch."
        problems.append(problem_at(cls, method, "a finite sum of rewards", f"{trajectory.reward!r}", fix))
    return problems
