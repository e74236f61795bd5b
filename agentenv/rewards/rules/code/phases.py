"""Grade the visible tests before the hidden ones, so that a program that hangs costs its first tests only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentenv._util.calls import give_back, seconds_left
from agentenv.sandbox.grading import GradeResult, TestResult, TestSuite, Verdict, grade
from agentenv.sandbox.types import ExecLimits, Isolation, Sandbox

_END_S = 5.0
"""Time before the end of the caller's time limit, in which the last tests are judged."""


async def grade_in_turn(
    sandbox: Sandbox, code: str, suite: TestSuite, *, limits: ExecLimits, all_or_nothing: bool, tenant: str
) -> GradeResult:
    """Return the verdict of every test. Hidden tests are skipped, which is not a pass, if their outcome is known.

    That is the case if a visible test timed out or the program could not be loaded; and, with `all_or_nothing`, if any
    test did not pass. Tests that the caller's time limit leaves no time for are timeouts. See `sandbox.grading.grade`.
    """
    end_s = min(_END_S, 0.1 * seconds_left())
    how: dict[str, Any] = {
        "limits": limits,
        "stop_on_fail": all_or_nothing,
        "tenant": tenant,
        "seconds_left": lambda: seconds_left() - end_s,
        "give_back": give_back,
    }
    whole: Any = suite
    if not suite.visible or not suite.hidden:
        return await grade(sandbox, code, suite, **how)
    first = await grade(sandbox, code, replace(whole, hidden=()), **how)
    known = bool(first.load_error or first.count(Verdict.TIMEOUT)) or (all_or_nothing and not first.all_passed)
    if known or first.sandbox_failed:
        skipped = [TestResult(f"hidden[{index}]", False, Verdict.SKIPPED) for index in range(len(suite.hidden))]
        return replace(first, tests=(*first.tests, *skipped))
    second = await grade(sandbox, code, replace(whole, visible=()), **how)
    return replace(
        first,
        tests=(*first.tests, *second.tests),
        tamper_signals=tuple(sorted({*first.tamper_signals, *second.tamper_signals})),
        infra_detail=first.infra_detail or second.infra_detail,
        isolation=min(first.isolation, second.isolation, key=lambda level: Isolation(level).strength),
        num_executions=first.num_executions + second.num_executions,
        wall_s=first.wall_s + second.wall_s,
        cpu_s=first.cpu_s + second.cpu_s,
        queue_s=first.queue_s + second.queue_s,
    )


def passed_share(result: GradeResult | None) -> float:
    """Return the passed share of the hidden tests, at most that of all, so that memorizing visible tests does not pay.

    The share is 0.0 without a program; the result must have a score.
    """
    shares = () if result is None else (result.share(visible=False), result.score)
    return min((share for share in shares if share is not None), default=0.0)
