"""`CodeReward`: what a program in a response is worth, by the tests of its row."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from agentenv.errors import ConfigError
from agentenv.rewards.code.forms import code_task, program_of
from agentenv.rewards.code.phases import grade_in_turn, passed_share
from agentenv.rewards.code.shared import checked, exec_limits, sandbox_for
from agentenv.rewards.code.task import CodeTask
from agentenv.rewards.code.texts import said_of
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.sandbox.grading import GradeResult, TestSuite, Verdict
from agentenv.sandbox.types import ExecLimits, Sandbox

Scale = Literal["fraction", "binary", "guide", "roll"]
_NO_PROGRAM = ("SyntaxError:", "IndentationError:", "TabError:")


class CodeReward:
    """Runs the program of a response (`extract`) in the sandbox, against the tests of its label and row (`forms`).

    Each test runs once, within limits of its own, and counts as passed only where it was seen to pass: an exit code, a
    word in the output or an early end never does. Scales of the reward:

    - `fraction`: the share of the hidden tests that pass, at most the share of all.
    - `binary`: 1 where all tests pass, else 0.
    - `guide`: as in OpenRLHF's guide: 1.0 where all pass, 0.3 where some do, -0.5 where none does and one ran out of
      time, -1.0 where there is no program or it does not load, else 0.0.
    - `roll`: 1 where all pass, else -1, as ROLL's with a sandbox elsewhere; its local one is `binary`.

    Score: the fraction. Components: passed_share (the fraction), passed and num_tests (counts of all tests),
    all_passed (0 or 1). Status: NO_ANSWER without a program, TIMEOUT where a test ran out of time, PARSE_ERROR where
    the program does not load, INFRA where the sandbox failed; a row without tests is a DataError. The feedback is of
    visible tests only.
    """

    def __init__(
        self,
        *,
        scale: Scale = "fraction",
        limits: Mapping[str, Any] | ExecLimits | None = None,
        sandbox: Mapping[str, Any] | Sandbox | None = None,
    ) -> None:
        """Choose the scale, and where programs run.

        Args:
            scale: of the reward.
            limits: of one test: fields of `ExecLimits` that differ from `shared.LIMITS`.
            sandbox: options of `open_sandbox`, or one that is open; the process's own when None.

        Raises:
            ConfigError: there is no such scale, limit or sandbox.
        """
        if scale not in _SCALES:
            known = ", ".join(get_args(Scale))
            raise ConfigError(f"CodeReward.scale: expected one of {known}, got {scale!r}. Choose one.")
        if isinstance(sandbox, Mapping):
            checked(sandbox)
        self.bounds: tuple[float, float] = _BOUNDS.get(scale, (0.0, 1.0))
        self._reward_of, self._sandbox = _SCALES[scale], sandbox
        self._limits = exec_limits("CodeReward", limits)

    async def grade(self, response: Response) -> RewardResult:
        """What the program of a response is worth.

        Raises:
            DataError: the label and the metadata hold no tests of a known form.
            InfraError: the sandbox is not to be had.
        """
        task, code = await asyncio.to_thread(_read, response)  # packed tests may be megabytes
        if code is None:
            return self._result(None, task.suite)
        sandbox = await sandbox_for(task.suite, self._sandbox)
        tenant = f"{hash(code):x}"
        how: dict[str, Any] = {"limits": self._limits, "all_or_nothing": False, "tenant": tenant}
        result = await grade_in_turn(sandbox, code, task.suite, **how)
        if result.score is None:
            return RewardResult.failed(f"CodeReward: the sandbox failed: {result.infra_detail or 'no detail'}"[:500])
        return self._result(result, task.suite, code)

    def _result(self, result: GradeResult | None, suite: TestSuite, code: str | None = None) -> RewardResult:
        share = passed_share(result)
        status = status_of(result)
        return RewardResult(
            self._reward_of(result, status),
            score=share,
            status=status,
            components={
                "passed_share": share,
                "passed": 0.0 if result is None else float(result.count(Verdict.PASSED)),
                "num_tests": float(len(suite.visible) + len(suite.hidden)),
                "all_passed": 0.0 if result is None else float(bool(result.all_passed)),
            },
            extracted=code,
            feedback=said_of(result),
            detail="" if result is None else _counted(result),
        )


def _read(response: Response) -> tuple[CodeTask, str | None]:
    task = code_task(response.label, {**_prompt(response), **response.metadata})
    return task, program_of(task, response.text)


def status_of(result: GradeResult | None) -> Status:
    """How the grading of a program ended, of one that has a score; None is no program."""
    if result is None:
        return Status.NO_ANSWER
    if result.count(Verdict.TIMEOUT):
        return Status.TIMEOUT
    lasts = [(test.detail.splitlines() or [""])[-1].removeprefix("E").lstrip() for test in result.tests]
    if result.load_error or all(last.startswith(_NO_PROGRAM) for last in lasts):
        return Status.PARSE_ERROR
    return Status.OK


def _fraction(result: GradeResult | None, _: Status) -> float:
    return passed_share(result)


def _binary(result: GradeResult | None, _: Status) -> float:
    return float(result is not None and bool(result.all_passed))


def guide_reward(result: GradeResult | None, status: Status) -> float:
    """The reward of the scale `guide`."""
    if result is not None and result.count(Verdict.PASSED):
        return 1.0 if result.all_passed else 0.3
    return {Status.TIMEOUT: -0.5, Status.OK: 0.0}.get(status, -1.0)


def _roll(result: GradeResult | None, _: Status) -> float:
    return 1.0 if result is not None and result.all_passed else -1.0


_SCALES: dict[str, Callable[[GradeResult | None, Status], float]] = {
    "fraction": _fraction,
    "binary": _binary,
    "guide": guide_reward,
    "roll": _roll,
}
_BOUNDS = {"guide": (-1.0, 1.0), "roll": (-1.0, 1.0)}


def _counted(result: GradeResult) -> str:
    """Verdicts and what a program did that none needs, for people."""
    counts = {verdict: result.count(verdict) for verdict in Verdict}
    verdicts = " ".join(f"{verdict.value}={count}" for verdict, count in counts.items() if count)
    return " ".join([verdicts, *result.tamper_signals])


def _prompt(response: Response) -> dict[str, str]:
    """The prompt as a column: rows of HumanEval have imports and helpers there."""
    if isinstance(response.prompt, str):
        return {"prompt": response.prompt}
    texts = [message.get("content") for message in response.prompt]
    return {"prompt": next((text for text in reversed(texts) if isinstance(text, str)), "")}
