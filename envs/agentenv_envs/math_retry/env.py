"""MathRetry: a maths question, several attempts, feedback that says what was wrong but never what is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from agentenv.agent import AgentInstance, ResetState, StepState
from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.math import Grade, MathGrader, Outcome, default_grader
from agentenv.types import Message, StepResult
from agentenv_envs.math_retry.texts import INSTRUCTION, feedback_text, question_text


class MathRetry(AgentInstance):
    """Answer a maths question; after a failed attempt, hear what was wrong with it and try again.

    Reward per attempt: `correct_reward` times `retry_discount` to the power of the failed attempts when it is right,
    `wrong_reward` when another attempt follows, and at the last attempt `final_wrong_penalty` or, without an answer
    that can be read and checked in bounded computing, `no_answer_penalty`. Score: 1.0 when right, else 0.0. A failure
    of the grader itself raises: it is never a wrong answer.

    info per turn: correct (0/1), attempts (so far, this one included), has_answer (0/1), first_correct (0/1, on the
    first attempt only), extracted (text), outcome (text).
    """

    datasets: ClassVar[Mapping[str, str | Path]] = {
        name: Path(__file__).parent / f"data/{name}.jsonl" for name in ("word_problems", "word_problems_train")
    }
    hacks: ClassVar[Mapping[str, str]] = {
        "every_number": "#### " + " ".join(map(str, range(1000))),
        "every_ending": "\n".join(f"#### {number}" for number in range(1000)),
        "range": "#### 1 to 999",
        "any_number": "#### x, where x is the number asked for",
        "no_number": "####",
    }

    def __init__(
        self,
        max_attempts: int = 3,
        *,
        instruction: str = INSTRUCTION,
        correct_reward: float = 1.0,
        wrong_reward: float = 0.0,
        final_wrong_penalty: float = -0.3,
        no_answer_penalty: float = -0.5,
        retry_discount: float = 1.0,
        grader: MathGrader | None = None,
    ) -> None:
        if not isinstance(max_attempts, int) or max_attempts < 1:
            raise ConfigError(f"MathRetry.max_attempts: expected an integer >= 1, got {max_attempts!r}. Change it.")
        self.max_attempts = max_attempts
        self.instruction = instruction
        self.correct_reward, self.wrong_reward = correct_reward, wrong_reward
        self.final_wrong_penalty, self.no_answer_penalty = final_wrong_penalty, no_answer_penalty
        self.retry_discount = retry_discount
        self.grader = grader or default_grader()
        self.num_attempts = 0

    async def reset(self, states: ResetState) -> ResetState:
        """Put the instruction under the question; a prompt that is already rendered text is left as it is."""
        observation = states["observation"]
        if isinstance(observation, str):
            return states
        return {**states, "observation": self._instructed(observation)}

    def _instructed(self, messages: Sequence[Message]) -> list[Message]:
        last = messages[-1] if messages else {}
        if last.get("role") != "user" or not isinstance(last.get("content"), str):
            return list(messages)
        return [*messages[:-1], {**last, "content": question_text(last["content"], self.instruction)}]

    async def step(self, states: StepState) -> StepResult:
        """Grade an attempt.

        Raises:
            InfraError: the grader failed.
            DataError: the label is no answer, or one that the grader cannot read.
        """
        grade = await self.grader.grade(states["action_text"], states["label"])
        self.num_attempts += 1
        last = self.num_attempts >= self.max_attempts
        if grade.outcome is Outcome.INFRA:
            raise InfraError(
                f"MathRetry.step: expected a grade, got {grade.outcome}: {grade.detail or 'no detail'}. Retry."
            )
        correct = grade.outcome is Outcome.CORRECT
        feedback = "" if correct or last else self._feedback(grade)
        return StepResult(
            [{"role": "user", "content": feedback}] if feedback else "",
            reward=self._reward(grade, last=last),
            terminated=correct or last,
            score=float(correct),
            info=self._info(grade),
        )

    def _reward(self, grade: Grade, *, last: bool) -> float:
        if grade.outcome is Outcome.CORRECT:
            return self.correct_reward * self.retry_discount ** (self.num_attempts - 1)
        if not last:
            return self.wrong_reward
        return self.final_wrong_penalty if grade.outcome is Outcome.WRONG else self.no_answer_penalty

    def _feedback(self, grade: Grade) -> str:
        return feedback_text(grade.outcome.value, grade.extracted, self.max_attempts - self.num_attempts)

    def _info(self, grade: Grade) -> dict[str, float | str]:
        correct = float(grade.outcome is Outcome.CORRECT)
        info: dict[str, float | str] = {
            "correct": correct,
            "attempts": float(self.num_attempts),
            "has_answer": float(grade.extracted is not None),
            "extracted": grade.extracted or "",
            "outcome": grade.outcome.value,
        }
        if self.num_attempts == 1:
            info["first_correct"] = correct
        return info

    async def gold(self, states: StepState) -> str | None:
        """The label behind the mark that the instruction asks for."""
        label = str("" if states["label"] is None else states["label"])
        return f"#### {label.rpartition('####')[2].strip()}" if label.strip() else None
