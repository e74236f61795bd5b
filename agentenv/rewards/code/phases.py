"""Grading in two steps, the visible tests and then the hidden ones: a program that hangs costs its first tests only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentenv.sandbox.grading import GradeResult, GradeStatus, TestResult, TestSuite, Verdict, grade
from agentenv.sandbox.types import ExecLimits, Isolation, Sandbox


async def grade_in_turn(
    sandbox: Sandbox, code: str, suite: TestSuite, *, limits: ExecLimits, all_or_nothing: bool, tenant: str
) -> GradeResult:
    """The verdict of every test. Hidden ones are skipped, which is no pass, where the outcome is known before.

    That is so when a visible test ran out of time or the program could not be loaded; and, `all_or_nothing`, when any
    test did not pass. See `grade`.
    """
    how: dict[str, Any] = {"limits": limits, "stop_on_fail": all_or_nothing, "tenant": tenant}
    whole: Any = suite
    if not suite.visible or not suite.hidden:
        return await grade(sandbox, code, suite, **how)
    first = await grade(sandbox, code, replace(whole, hidden=()), **how)
    known = bool(first.load_error or first.count(Verdict.TIMEOUT)) or (all_or_nothing and not first.all_passed)
    if known or first.status is GradeStatus.INFRA:
        skipped = [TestResult(f"hidden[{index}]", False, Verdict.SKIPPED) for index in range(len(suite.hidden))]
        return replace(first, tests=(*first.tests, *skipped))
    return _joined(first, await grade(sandbox, code, replace(whole, visible=()), **how))


def passed_share(result: GradeResult | None) -> float:
    """Of the hidden tests, and not more than of all: who knows the visible ones by heart has nothing of them.

    0 without a program; of a result that has a score.
    """
    shares = () if result is None else (result.share(visible=False), result.score)
    return min((share for share in shares if share is not None), default=0.0)


def _joined(visible: GradeResult, hidden: GradeResult) -> GradeResult:
    return replace(
        visible,
        tests=(*visible.tests, *hidden.tests),
        tamper_signals=tuple(sorted({*visible.tamper_signals, *hidden.tamper_signals})),
        infra_detail=visible.infra_detail or hidden.infra_detail,
        isolation=min(visible.isolation, hidden.isolation, key=lambda level: Isolation(level).strength),
        num_executions=visible.num_executions + hidden.num_executions,
        wall_s=visible.wall_s + hidden.wall_s,
        cpu_s=visible.cpu_s + hidden.cpu_s,
        queue_s=visible.queue_s + hidden.queue_s,
    )
