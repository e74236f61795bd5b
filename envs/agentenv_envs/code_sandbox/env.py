"""CodeSandbox: a programming task, a few attempts, and visible tests' results between them; hidden tests decide."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from agentenv.core.agent import AgentInstance, ResetState, StepState
from agentenv.core.arguments import settings_from
from agentenv.core.types import StepResult
from agentenv.errors import InfraError
from agentenv.rewards.rules.code.forms import code_task, comparison, program_of, question_of
from agentenv.rewards.rules.code.reward import INSTRUCTION, LIMITS, feedback_text, passed_share, sandbox_for
from agentenv.rewards.rules.code.task import CodeTask
from agentenv.sandbox.grading import GradeResult, grade
from agentenv.sandbox.types import ExecLimits, Sandbox
from agentenv_envs.common import attempts_text, check, check_count, with_question


class CodeSandbox(AgentInstance):
    """The environment's side of a programming task: runs each attempt against tests and reports what failed.

    The program is the last Python block of the action (`extract`); it runs in the process's shared sandbox. The text
    after an attempt covers visible tests only: the first that failed, its input, the expected and the actual output, or
    the traceback. Of hidden tests it only says that some failed, once all visible ones pass. Hidden tests do not run if
    a visible one ran out of time, or the program could not be loaded.

    Credit of an attempt: the share of the hidden tests that it passes, at most the share of all tests; without
    `partial_credit`, 1 for passing all tests, else 0. Reward: with `reward_at` end, the last attempt's credit; with
    turn, what an attempt adds to the best credit so far; both times `attempt_discount` to the power of the earlier
    attempts. An attempt without a program earns `no_code_reward`, at the end or at each. Score: the credit of the last
    attempt. A failure of the sandbox raises: it is never a failed test.

    info per turn: correct (0/1), attempts (so far, including this one), has_code (0/1), first_correct (0/1, on the
    first attempt only), passed_share, visible_share and hidden_share (0 to 1, if there are such tests), tamper
    (signals), tamper_signals, verdicts (number of tests by verdict), integrity and isolation (texts).
    """

    datasets: ClassVar[Mapping[str, str | Path]] = {"code_sandbox": Path(__file__).parent / "data/code_sandbox.jsonl"}
    hacks: ClassVar[Mapping[str, str]] = {
        "prints_every_number": "```python\nfor number in range(1000):\n    print(number)\n```",
        "leaves": "```python\nimport os\nos._exit(0)\n```",
        "no_program": "The tests pass. All of them passed.",
        "empty_program": "```python\n\n```",
        "prompt_as_program": '```python\n"""All tests passed."""\n```',
        "catches_everything": "```python\nimport sys\nsys.excepthook = lambda *error: None\nraise SystemExit(0)\n```",
    }

    default_limits: ClassVar[ExecLimits] = LIMITS
    """Limits of one test. Tests for which `--step_timeout_s` leaves no time are timeouts: set it for all together."""

    def __init__(  # noqa: PLR0913 - one option for each rule
        self,
        max_attempts: int = 3,
        *,
        partial_credit: bool = True,
        reward_at: Literal["end", "turn"] = "end",
        attempt_discount: float = 1.0,
        no_code_reward: float = 0.0,
        instruction: str = INSTRUCTION,
        limits: Mapping[str, Any] | ExecLimits | None = None,
        sandbox: Mapping[str, Any] | Sandbox | None = None,
        strict: bool = False,
        official: bool = False,
    ) -> None:
        """Set the rules.

        Args:
            max_attempts: programs that may be submitted; 1 is a task of a single turn.
            partial_credit: reward a share of the tests; False ends grading at the first test that fails.
            reward_at: when attempts are paid.
            attempt_discount: factor for each earlier attempt.
            no_code_reward: reward of an attempt without a program.
            instruction: text below the question.
            limits: limits of one test: fields of `ExecLimits` that differ from `default_limits`.
            sandbox: options of `open_sandbox`, such as `{"backend": "sandbox_fusion", "endpoints": […]}`, or an open
                sandbox; None: the process's own `LocalSandbox`.
            strict: compare rows of APPS and LiveCodeBench by types and text.
            official: compare rows of APPS as its evaluator does, for scores: it pays for words in any order.
        """
        check_count("CodeSandbox.max_attempts", max_attempts)
        check("CodeSandbox.reward_at", reward_at, reward_at in ("end", "turn"), "end or turn")
        self.max_attempts = max_attempts
        self.partial_credit = partial_credit
        self.reward_at = reward_at
        self.attempt_discount = attempt_discount
        self.no_code_reward = no_code_reward
        self.instruction = instruction
        self.sandbox = sandbox
        self.comparison = comparison("CodeSandbox", strict=strict, official=official)
        self.limits = settings_from("CodeSandbox.limits", limits, self.default_limits)
        self.num_attempts = 0
        self.best_credit = 0.0
        self._task: CodeTask | None = None
        self._owed: StepResult | None = None

    async def reset(self, states: ResetState) -> ResetState:
        """Append examples and the instruction to the question; a prompt that is already rendered stays unchanged.

        Raises:
            DataError: the label and the row's other columns have no tests of a known form.
            SandboxUnavailable: programs cannot be isolated here.
        """
        task = self._task_of(states, states["observation"])
        await sandbox_for(task.suite, self.sandbox)
        return with_question(
            states, lambda question: question_text(question, task.examples, task.starter_code, self.instruction)
        )

    async def step(self, states: StepState) -> StepResult:
        """Run an attempt against the tests.

        Raises:
            InfraError: the sandbox failed, so that the program's result is unknown.
            DataError: see `reset`.
        """
        prompt = states.get("observation_text", "")
        task = self._task_of(states, prompt)
        code = await asyncio.to_thread(program_of, task, states["action_text"], prompt)
        result: GradeResult | None = None
        if code is not None:
            result = await grade(
                await sandbox_for(task.suite, self.sandbox),  # shared: not an attribute, which would be pickled
                code,
                task.suite,
                limits=self.limits,
                stop_on_fail=not self.partial_credit,
            )
            if result.score is None:
                raise InfraError(
                    f"CodeSandbox.step: expected a grade, got none: {result.infra_detail or 'no detail'}. Retry; "
                    "`agentenv sandbox doctor` shows what the sandbox lacks."
                )
        self.num_attempts += 1
        correct = result is not None and bool(result.all_passed)
        done = correct or self.num_attempts >= self.max_attempts
        credit = passed_share(result) if self.partial_credit else float(correct)
        # What the attempt adds to the best credit, and what it earns as the last one.
        discount = self.attempt_discount ** (self.num_attempts - 1)
        missing = self.no_code_reward if code is None else 0.0
        gained = max(0.0, credit - self.best_credit) * discount + missing
        earned = credit * discount + missing
        self.best_credit = max(credit, self.best_credit)
        feedback = "" if done else f"{feedback_text(result)}\n\n{attempts_text(self.max_attempts - self.num_attempts)}"
        self._owed = None if done or self.reward_at == "turn" else StepResult(reward=earned, score=credit)
        return StepResult(
            [{"role": "user", "content": feedback}] if feedback else "",
            reward=gained if self.reward_at == "turn" else earned if done else 0.0,
            terminated=done,
            score=credit,
            info=self._info(result, correct=correct),
        )

    async def on_truncate(self, states: StepState) -> StepResult | None:
        """Pay the last attempt if a limit ends the episode before all attempts are used."""
        owed, self._owed = self._owed, None
        return owed

    async def gold(self, states: StepState) -> str | None:
        """Return the solution in the row's column `reference`, or that of a shipped task; None for other rows."""
        from agentenv_envs.code_sandbox.problems import answer, load_problems

        code = (states["metadata"] or {}).get("reference")
        if code is None:
            code = next((one.reference for one in load_problems() if one.label == states["label"]), None)
        return answer(code) if isinstance(code, str) else None

    def _task_of(self, states: Mapping[str, Any], prompt: Any) -> CodeTask:
        if self._task is None:
            row = {"prompt": question_of(prompt), **(states.get("metadata") or {})}
            self._task = code_task(states.get("label"), row, **self.comparison)
        return self._task

    def _info(self, result: GradeResult | None, *, correct: bool) -> dict[str, float | str]:
        info: dict[str, float | str] = {
            "correct": float(correct),
            "attempts": float(self.num_attempts),
            "has_code": float(result is not None),
            "passed_share": passed_share(result),
            "tamper": 0.0 if result is None else float(len(result.tamper_signals)),
        }
        if self.num_attempts == 1:
            info["first_correct"] = float(correct)
        if result is None:
            return info
        shares = {"visible_share": result.share(visible=True), "hidden_share": result.share(visible=False)}
        counts = Counter(test.verdict.value for test in result.tests)
        return {
            **info,
            **{name: share for name, share in shares.items() if share is not None},
            "tamper_signals": " ".join(result.tamper_signals),
            "verdicts": " ".join(f"{name}={count}" for name, count in sorted(counts.items())),
            "integrity": result.integrity.value,
            "isolation": result.isolation.value,
        }


def question_text(question: str, examples: Sequence[str], starter_code: str, instruction: str) -> str:
    """Return the user message of the first turn: the question, the starter code, examples, and the instruction."""
    parts = [question.rstrip()]
    if starter_code.strip():
        parts.append(f"Start from this:\n```python\n{starter_code.strip()}\n```")
    if examples:
        parts.append("Examples:\n" + "\n".join(examples))
    return "\n\n".join(part for part in [*parts, instruction] if part)
