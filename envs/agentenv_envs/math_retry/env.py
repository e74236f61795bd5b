"""MathRetry: a math question, several attempts, feedback that says what was wrong but never what is right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from agentenv.core.agent import AgentInstance, ResetState, StepState
from agentenv.core.types import StepResult
from agentenv.errors import InfraError
from agentenv.rewards.rules.math.reward import MathGrader, default_grader, math_outcome
from agentenv.rewards.rules.text import with_opened_thought
from agentenv.rewards.types import Status
from agentenv_envs.common import attempts_text, check_count, with_question

INSTRUCTION = "Give the final answer after ####."  # english: off (tiny-math was trained with this text)


class MathRetry(AgentInstance):
    """Answer a math question; after a failed attempt, hear what was wrong with it and try again.

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
        check_count("MathRetry.max_attempts", max_attempts)
        self.max_attempts, self.num_attempts = max_attempts, 0
        self.instruction, self.grader = instruction, grader or default_grader()
        self.correct_reward, self.retry_discount, self.wrong_reward = correct_reward, retry_discount, wrong_reward
        self.final_wrong_penalty, self.no_answer_penalty = final_wrong_penalty, no_answer_penalty

    async def reset(self, states: ResetState) -> ResetState:
        """Put the instruction under the question; a prompt that is already rendered text is left as it is.

        Raises:
            DataError: the label is not an answer that the grader can read.
        """
        if "label" in states:
            await self.grader.check_label(states["label"])
        return with_question(states, lambda question: question_text(question, self.instruction))

    async def step(self, states: StepState) -> StepResult:
        """Grade an attempt and reply to it.

        Raises:
            InfraError: the grader failed.
            DataError: the label is not an answer that the grader can read.
        """
        text = with_opened_thought(states["action_text"], states.get("observation_text", ""))
        result = await self.grader.grade(text, states["label"])
        self.num_attempts += 1
        if result.status is Status.INFRA:
            raise InfraError(f"MathRetry.step: expected a result, got infra: {result.detail or 'no detail'}. Retry.")
        is_correct, is_last = result.score == 1.0, self.num_attempts >= self.max_attempts
        outcome = math_outcome(result)
        info: dict[str, float | str] = {
            "correct": float(is_correct),
            "attempts": float(self.num_attempts),
            "has_answer": float(result.extracted is not None),
            "extracted": result.extracted or "",
            "outcome": outcome,
        }
        if self.num_attempts == 1:
            info["first_correct"] = float(is_correct)
        if is_correct:
            reward = self.correct_reward * self.retry_discount ** (self.num_attempts - 1)
            return StepResult(reward=reward, score=1.0, terminated=True, info=info)
        if is_last:
            reward = self.final_wrong_penalty if result.status is Status.OK else self.no_answer_penalty
            return StepResult(reward=reward, score=0.0, terminated=True, info=info)
        feedback = feedback_text(outcome, result.extracted, self.max_attempts - self.num_attempts)
        return StepResult([{"role": "user", "content": feedback}], reward=self.wrong_reward, score=0.0, info=info)

    async def gold(self, states: StepState) -> str | None:
        """Return the label after the mark that the instruction asks for."""
        label = str("" if states["label"] is None else states["label"])
        return f"#### {label.rpartition('####')[2].strip()}" if label.strip() else None


# Every sentence that a policy is sent. The shipped tiny-math policy was trained on exactly these.


def question_text(question: str, instruction: str = INSTRUCTION) -> str:
    """Return the first user message: the question and, unless it is empty, the instruction on its own line."""
    return f"{question}\n{instruction}" if instruction else question


def feedback_text(outcome: str, extracted: str | None, attempts_left: int) -> str:
    """Return the user message after a failed attempt: what was wrong with it, never what is right.

    Args:
        outcome: the grade's outcome: wrong, no_answer, parse_error or timeout.
        extracted: the answer that was read from the attempt, where there was one.
        attempts_left: attempts that remain, at least 1.
    """
    what = {
        "wrong": f"Your answer {extracted} is not correct. Check each step and try again.",
        "no_answer": "No final answer was found. Solve it step by step and end with #### and the answer.",
        "parse_error": f"Your answer {extracted} could not be read. Write one number or expression after ####.",
        "timeout": f"Your answer {extracted} took too long to check. Write it in a simpler form after ####.",
    }[outcome]
    return f"{what} {attempts_text(attempts_left)}"
