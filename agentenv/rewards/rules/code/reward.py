"""Reward the program in a response by the tests of its row, in the sandbox that all graders of a process share.

It is one per event loop and set of options, opened at first use.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agentenv._util.per_loop import PerLoop
from agentenv.core.arguments import one_of, settings_from
from agentenv.errors import InfraError
from agentenv.rewards.rules.code.forms import code_task, comparison, program_of, question_of
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.sandbox.factory import open_sandbox
from agentenv.sandbox.grading import GradeResult, PytestSuite, TestSuite, Verdict, feedback, grade
from agentenv.sandbox.types import ExecLimits, Sandbox, SandboxUnavailable

LIMITS = ExecLimits(cpu_s=2.0)
"""Default limits of one test."""
INSTRUCTION = "Write the whole program in one block between ```python and ```."
NO_CODE = "No program was found. " + INSTRUCTION
HIDDEN_FAILED = "All examples pass, but other tests do not. Think of the cases that the examples leave out."
Scale = Literal["fraction", "binary", "guide", "roll"]
_NO_PROGRAM = ("SyntaxError:", "IndentationError:", "TabError:")


@dataclass(slots=True)
class _SharedSandbox:
    """One sandbox, open or being opened."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # guards the two below: one opens, the others wait
    sandbox: Sandbox | None = None
    holder: AsyncGenerator[Sandbox, None] | None = None


_sandboxes: PerLoop[dict[str, _SharedSandbox]] = PerLoop(dict)


async def shared_sandbox(options: Mapping[str, Any] | None = None) -> Sandbox:
    """Return the running event loop's sandbox with these options of `open_sandbox`; it closes with the loop.

    Raises:
        ConfigError: the backend or an option is unknown.
        SandboxUnavailable: no isolation of the required strength is available.
        InfraError: a remote sandbox is unavailable now, such as when no endpoint answers.
        MissingDependency: the backend needs a package that is not installed.
    """
    settings = dict(options or {})

    async def keep_open() -> AsyncGenerator[Sandbox, None]:
        # An event loop closes open generators before it ends, which is the only hook that runs in time.
        try:
            async with open_sandbox(**settings) as sandbox:
                yield sandbox
        except SandboxUnavailable as error:
            if settings.get("backend", "local") == "local":
                raise
            # A remote backend may recover: InfraError makes the episode retry.
            raise InfraError(f"sandbox: {error}") from error

    key = json.dumps(settings, sort_keys=True, default=repr)
    shared = _sandboxes.here().setdefault(key, _SharedSandbox())
    async with shared.lock:
        if shared.sandbox is None:
            holder = keep_open()
            shared.sandbox, shared.holder = await anext(holder), holder
    return shared.sandbox


async def sandbox_for(suite: TestSuite, own: Mapping[str, Any] | Sandbox | None) -> Sandbox:
    """Return the sandbox for the tests of a suite: `own`, or the shared one with these options."""
    if own is not None and not isinstance(own, Mapping):
        return own
    options = dict(own or {})
    if isinstance(suite, PytestSuite) and options.get("backend", "local") == "local":
        options["preimport"] = ["pytest", *options.get("preimport", ())]
    return await shared_sandbox(options)


class CodeReward:
    """Results of the program of a response (see `extract`) on the tests of its label and row (see `forms`).

    Each test runs once in the sandbox, with its own limits, and passes only if its result was verified: an exit code, a
    word in the output or an early exit is never a pass. Scales of the reward:

    - `fraction`: the share of the hidden tests that pass, at most the share of all.
    - `binary`: 1 if all tests pass, else 0.
    - `guide`: as in OpenRLHF's guide: 1.0 if all pass, 0.3 if some do, -0.5 if none does and one timed out, -1.0 if
      the program is missing or does not load, else 0.0.
    - `roll`: 1 if all pass, else -1, as ROLL's with a remote sandbox; its local one is `binary`.

    Score: the fraction. Components: passed_share (the fraction), passed and num_tests (counts of all tests),
    all_passed (0 or 1). Status: NO_ANSWER without a program, TIMEOUT if a test timed out, PARSE_ERROR if the program
    does not load, INFRA if the sandbox failed; a row without tests is a DataError. The feedback is only about visible
    tests.
    """

    def __init__(
        self,
        *,
        scale: Scale = "fraction",
        limits: Mapping[str, Any] | ExecLimits | None = None,
        sandbox: Mapping[str, Any] | Sandbox | None = None,
        strict: bool = False,
        official: bool = False,
    ) -> None:
        """Set the scale, and where programs run.

        Args:
            scale: the scale of the reward.
            limits: limits of one test: fields of `ExecLimits` that differ from `LIMITS`.
            sandbox: options of `open_sandbox`, or an open sandbox; None: that of the process.
            strict: compare rows of APPS and LiveCodeBench by types and text.
            official: compare rows of APPS as its evaluator does, for scores: it pays for words in any order.

        Raises:
            ConfigError: the scale, a limit or the sandbox is unknown, or both `strict` and `official` are set.
        """
        if isinstance(sandbox, Mapping):
            open_sandbox(**sandbox)
        self._reward_of = _SCALES[one_of("CodeReward.scale", scale, _SCALES)]
        self.bounds: tuple[float, float] = _BOUNDS.get(scale, (0.0, 1.0))
        self._sandbox = sandbox
        self._comparison = comparison("CodeReward", strict=strict, official=official)
        self._limits = settings_from("CodeReward.limits", limits, LIMITS)

    async def grade(self, response: Response) -> RewardResult:
        """Return the result of the program of a response.

        Raises:
            DataError: the label and the metadata have no tests of a known form.
            InfraError: the sandbox is unavailable.
        """
        row = {"prompt": question_of(response.prompt), **response.metadata}  # HumanEval has imports and helpers there
        task = await asyncio.to_thread(code_task, response.label, row, **self._comparison)  # tests may be megabytes
        code = await asyncio.to_thread(program_of, task, response.text, response.prompt)
        if code is None:
            return self._result(None, task.suite)
        sandbox = await sandbox_for(task.suite, self._sandbox)
        result = await grade(sandbox, code, task.suite, limits=self._limits)
        if result.score is None:
            return RewardResult.failed(f"CodeReward: the sandbox failed: {result.infra_detail or 'no detail'}"[:500])
        return self._result(result, task.suite, code)

    def _result(self, result: GradeResult | None, suite: TestSuite, code: str | None = None) -> RewardResult:
        share = passed_share(result)
        status = status_of(result)
        detail = ""
        if result is not None:  # counts of verdicts, and signals of tampering
            counts = [f"{verdict.value}={count}" for verdict in Verdict if (count := result.count(verdict))]
            detail = " ".join([*counts, *result.tamper_signals])
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
            feedback=feedback_text(result),
            detail=detail,
            isolation="" if result is None else result.isolation.value,
        )


def status_of(result: GradeResult | None) -> Status:
    """Return the status for a program's result that has a score; None means that the program is missing."""
    if result is None:
        return Status.NO_ANSWER
    if result.count(Verdict.TIMEOUT):
        return Status.TIMEOUT
    lasts = [(test.detail.splitlines() or [""])[-1].removeprefix("E").lstrip() for test in result.tests]
    if result.load_error or all(last.startswith(_NO_PROGRAM) for last in lasts):
        return Status.PARSE_ERROR
    return Status.OK


def guide_reward(result: GradeResult | None, status: Status) -> float:
    """Return the reward of the scale `guide`."""
    if result is not None and result.count(Verdict.PASSED):
        return 1.0 if result.all_passed else 0.3
    return {Status.TIMEOUT: -0.5, Status.OK: 0.0}.get(status, -1.0)


def passed_share(result: GradeResult | None) -> float:
    """Return the passed share of the hidden tests, at most that of all, so that memorizing visible tests does not pay.

    The share is 0.0 without a program; the result must have a score.
    """
    shares = () if result is None else (result.share(visible=False), result.score)
    return min((share for share in shares if share is not None), default=0.0)


def feedback_text(result: GradeResult | None) -> str:
    """Return the feedback on a program, None if there is none; of hidden tests it says only that some failed."""
    if result is None:
        return NO_CODE
    if result.share(visible=True) == 1.0 and not result.all_passed:
        return HIDDEN_FAILED
    return feedback(result, hidden_count=False)


_SCALES: dict[str, Callable[[GradeResult | None, Status], float]] = {
    "fraction": lambda result, _: passed_share(result),
    "binary": lambda result, _: float(result is not None and bool(result.all_passed)),
    "guide": guide_reward,
    "roll": lambda result, _: 1.0 if result is not None and result.all_passed else -1.0,
}
_BOUNDS = {"guide": (-1.0, 1.0), "roll": (-1.0, 1.0)}
