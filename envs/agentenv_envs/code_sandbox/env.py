"""CodeSandbox: a programming task, a few attempts, and visible tests' results between them; hidden ones decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from agentenv.agent import AgentInstance, ResetState, StepState
from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.code.forms import code_task, program_of
from agentenv.rewards.code.phases import grade_in_turn, passed_share
from agentenv.rewards.code.shared import LIMITS, exec_limits, sandbox_for
from agentenv.rewards.code.task import CodeTask
from agentenv.rewards.code.texts import INSTRUCTION, said_of
from agentenv.sandbox.grading import GradeResult
from agentenv.sandbox.types import ExecLimits, Sandbox
from agentenv.types import StepResult
from agentenv_envs.code_sandbox.texts import attempts_text, question_text


class CodeSandbox(AgentInstance):
    """Write a program that passes tests; after a failed attempt, hear what failed and try again.

    The program is the last Python block of the action (`extract`); it runs in the process's one sandbox. What is said
    after an attempt is of visible tests only: the first that failed, its input, what was expected and what came, or the
    traceback. Of hidden tests it says that some failed, once all visible ones pass, and no more. They are not run where
    a visible one ran out of time, or the program could not be loaded.

    Credit of an attempt: the share of the hidden tests that it passes, at most the share of all; or with
    `partial_credit` off 1 for passing all tests, else 0. Reward: with `reward_at` end, the last attempt's
    credit; with turn, what an attempt adds to the best credit so far, so that nothing is earned twice; both times
    `attempt_discount` to the power of the attempts before. An attempt without a program earns `no_code_reward`, in the
    end or at each. Score: the credit of the last attempt. The failure of the sandbox raises: it is never a failed test.

    info per turn: correct (0/1), attempts (so far, this one included), has_code (0/1), first_correct (0/1, on the first
    attempt only), passed_share, visible_share and hidden_share (0 to 1, where there are such tests), tamper (signals),
    tamper_signals, verdicts (how many tests had which), integrity and isolation (texts).
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
    """Of one test. An attempt may take as long as all tests: `--step_timeout_s` is to allow for that."""

    def __init__(
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
    ) -> None:
        """Set the rules.

        Args:
            max_attempts: programs that may be handed in; 1 is a task of a single turn.
            partial_credit: whether a share of the tests counts; off, grading ends at the first test that fails.
            reward_at: when attempts are paid.
            attempt_discount: factor per attempt before.
            no_code_reward: of an attempt without a program.
            instruction: said under the question.
            limits: of one test: fields of `ExecLimits` that differ from `default_limits`.
            sandbox: options of `open_sandbox`, as `{"backend": "sandbox_fusion", "endpoints": […]}`, or one that is
                open; the process's own `LocalSandbox` when None.
        """
        if not isinstance(max_attempts, int) or isinstance(max_attempts, bool) or max_attempts < 1:
            raise ConfigError(f"CodeSandbox.max_attempts: expected an integer >= 1, got {max_attempts!r}. Change it.")
        if reward_at not in ("end", "turn"):
            raise ConfigError(f"CodeSandbox.reward_at: expected end or turn, got {reward_at!r}. Change it.")
        self.max_attempts, self.partial_credit, self.reward_at = max_attempts, partial_credit, reward_at
        self.attempt_discount, self.no_code_reward = attempt_discount, no_code_reward
        self.instruction, self.sandbox = instruction, sandbox
        self.limits = exec_limits("CodeSandbox", limits, default=self.default_limits)
        self.num_attempts = 0
        self.best_credit = 0.0
        self._task: CodeTask | None = None
        self._owed: StepResult | None = None

    async def reset(self, states: ResetState) -> ResetState:
        """Put examples and the instruction under the question; a prompt that is already rendered text is left alone.

        Raises:
            DataError: the label and the row's other columns hold no tests of a known form.
            SandboxUnavailable: programs cannot be isolated here.
        """
        observation = states["observation"]
        task = self._task_of(states, observation)
        await self._opened(task)
        if isinstance(observation, str) or not observation:
            return states
        last = observation[-1]
        if last.get("role") != "user" or not isinstance(last.get("content"), str):
            return states
        content = question_text(last["content"], task.examples, task.starter_code, self.instruction)
        return {**states, "observation": [*observation[:-1], {**last, "content": content}]}

    async def step(self, states: StepState) -> StepResult:
        """Run an attempt against the tests.

        Raises:
            InfraError: the sandbox failed, so that nothing is known of the program.
            DataError: as `reset`.
        """
        task = self._task_of(states, states.get("observation_text", ""))
        code = program_of(task, states["action_text"])
        result = None if code is None else await self._graded(code, task)
        self.num_attempts += 1
        correct = result is not None and bool(result.all_passed)
        done = correct or self.num_attempts >= self.max_attempts
        credit = self._credit(result)
        reward, earned = self._reward(credit, has_code=code is not None)
        said = "" if done else f"{said_of(result)}\n\n{attempts_text(self.max_attempts - self.num_attempts)}"
        self._owed = None if done or self.reward_at == "turn" else StepResult(reward=earned, score=credit)
        return StepResult(
            [{"role": "user", "content": said}] if said else "",
            reward=reward if self.reward_at == "turn" or done else 0.0,
            terminated=done,
            score=credit,
            info=self._info(result, correct=correct),
        )

    async def on_truncate(self, states: StepState) -> StepResult | None:
        """Pay the last attempt where a limit ends the episode before attempts run out."""
        owed, self._owed = self._owed, None
        return owed

    async def gold(self, states: StepState) -> str | None:
        """The solution in the row's column `reference`, or that of a shipped task; None for other rows."""
        from agentenv_envs.code_sandbox.problems import answer, load_problems

        code = (states["metadata"] or {}).get("reference")
        if code is None:
            code = next((one.reference for one in load_problems() if one.label == states["label"]), None)
        return answer(code) if isinstance(code, str) else None

    async def _opened(self, task: CodeTask) -> Sandbox:
        """Never kept: what an instance holds can be pickled, and no instance closes what others use."""
        return await sandbox_for(task.suite, self.sandbox)

    def _task_of(self, states: Mapping[str, Any], prompt: Any) -> CodeTask:
        if self._task is None:
            texts = [prompt] if isinstance(prompt, str) else [each.get("content") for each in prompt]
            row = {"prompt": next((text for text in reversed(texts) if isinstance(text, str)), "")}
            self._task = code_task(states.get("label"), {**row, **(states.get("metadata") or {})})
        return self._task

    async def _graded(self, code: str, task: CodeTask) -> GradeResult:
        result = await grade_in_turn(
            await self._opened(task),
            code,
            task.suite,
            limits=self.limits,
            all_or_nothing=not self.partial_credit,
            tenant=f"{id(self):x}",
        )
        if result.score is None:
            raise InfraError(
                f"CodeSandbox.step: expected a grade, got none: {result.infra_detail or 'no detail'}. Retry; "
                "`agentenv sandbox doctor` says what the sandbox lacks."
            )
        return result

    def _credit(self, result: GradeResult | None) -> float:
        if self.partial_credit:
            return passed_share(result)
        return float(result is not None and bool(result.all_passed))

    def _reward(self, credit: float, *, has_code: bool) -> tuple[float, float]:
        """What this attempt earns by the rule, and what it would earn as the last one."""
        discount = self.attempt_discount ** (self.num_attempts - 1)
        gain, self.best_credit = max(0.0, credit - self.best_credit), max(credit, self.best_credit)
        missing = 0.0 if has_code else self.no_code_reward
        last = credit * discount + missing
        return (gain * discount + missing if self.reward_at == "turn" else last), last

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
