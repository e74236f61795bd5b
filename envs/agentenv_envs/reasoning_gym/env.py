"""ReasoningGym: an item of reasoning-gym, one attempt or several, graded by its dataset's own scorer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from agentenv.core.agent import AgentInstance, ResetState, StepState
from agentenv.core.types import StepResult
from agentenv.rewards.grading import grade
from agentenv.rewards.rules.text import with_opened_thought
from agentenv.rewards.types import Response, Status
from agentenv_envs.common import attempts_text, check, check_count, texts_of, with_question
from agentenv_envs.reasoning_gym.reward import INSTRUCTIONS, AnswerForm, ReasoningGymReward, entry_of, oracle, wrapped

_REPORTED = (Status.NO_ANSWER, Status.PARSE_ERROR, Status.TIMEOUT)
_FEEDBACK = {
    "no_answer": "No answer was found. {instruction}",
    "parse_error": "Your answer could not be read in the form that the question asks for. Check its form.",
    "timeout": "Your answer took too long to check. Write it in a simpler form.",
    "ok": "Your answer is not correct. Check each step and try again.",
}


class ReasoningGym(AgentInstance):
    r"""The environment's side of a question of reasoning-gym's 105 datasets: grades attempts and asks for another one.

    The label is the item itself, so that it can be graded anywhere. `python -m agentenv_envs.reasoning_gym` writes
    rows; two of each dataset ship with the environment. A question that is alone in its message gets the instruction on
    how to answer.

    Reward: 1.0 for the scorer's full score, times `retry_discount` to the power of the failed attempts, else 0.0; with
    `partial_credit` the last attempt's credit. Score: the same, without discount. A missing or unreadable answer is
    worth 0.0. If a scorer fails, the step raises: that is never a wrong answer.

    info per turn: correct (0/1), `DATASET/correct`, value (the scorer's own), attempts (so far), no_answer,
    parse_error, timeout (0/1), first_correct (0/1, on the first attempt only); dataset, status, extracted and detail as
    texts.
    """

    datasets: ClassVar[Mapping[str, str | Path]] = {"reasoning_gym": Path(__file__).parent / "data/reasoning_gym.jsonl"}
    hacks: ClassVar[Mapping[str, str]] = {
        "one expression for every puzzle24": "<answer>6*4*1*1</answer>",
        "anything for game_of_life_halting": "<answer>anything</answer>",
        "nought for every coin_flip": "<answer>0/7</answer>",
        "no number for every complex_arithmetic": "<answer>nan</answer>",
        "code that knows the scorer": "<answer>oracle_answer</answer>",
        "code that runs": "<answer>__import__('os').system('true') or 24</answer>",
        "every number": f"<answer>{' '.join(map(str, range(400)))}</answer>",
        "an answer in a thought": "<think><answer>0</answer></think>",
    }

    def __init__(
        self,
        max_attempts: int = 1,
        *,
        answer: AnswerForm = "auto",
        partial_credit: bool = False,
        retry_discount: float = 1.0,
        instruction: str | None = None,
        max_answer_chars: int = 8192,
        cpu_limit_s: float = 5.0,
        limit_s: float = 50.0,
    ) -> None:
        r"""Choose how answers are written and graded.

        Args:
            max_attempts: number of answers that the policy may give.
            answer: tag (`<answer>…</answer>`), boxed (`\boxed{…}`), or auto for either.
            partial_credit: reward nearly right answers as the scorer does; see `ReasoningGymReward`.
            retry_discount: factor of the reward for each earlier failed attempt.
            instruction: text below the question; None: how to answer, by `answer`. Empty for none.
            max_answer_chars: longer answers are not scored.
            cpu_limit_s: CPU time for scoring an answer.
            limit_s: longest time for scoring; less than --step_timeout_s, so that a slow one is tried again.

        Raises:
            ConfigError: a value is out of range.
            MissingDependency: reasoning-gym is not installed.
        """
        check_count("ReasoningGym.max_attempts", max_attempts)
        is_share = isinstance(retry_discount, int | float) and 0.0 <= retry_discount <= 1.0
        check("ReasoningGym.retry_discount", retry_discount, is_share, "0..1")
        self.reward = ReasoningGymReward(
            answer=answer, partial_credit=partial_credit, max_answer_chars=max_answer_chars, cpu_limit_s=cpu_limit_s
        )
        self.max_attempts = max_attempts
        self.retry_discount = retry_discount
        self.answer = answer
        self.limit_s = limit_s
        self.instruction = INSTRUCTIONS[answer] if instruction is None else instruction
        self.num_attempts = 0

    async def reset(self, states: ResetState) -> ResetState:
        """Append the instruction to a question that is alone in its message; refuse a row without an item.

        Raises:
            DataError: the label is not an item.
        """
        question = entry_of(states.get("label")).get("question")

        def instructed(text: str) -> str:
            return f"{text}\n\n{self.instruction}" if self.instruction and text == question else text

        observation = states["observation"]
        if isinstance(observation, str):
            return {**states, "observation": instructed(observation)}
        return with_question(states, instructed)

    async def step(self, states: StepState) -> StepResult:
        """Grade an attempt.

        Raises:
            DataError: the label is not an item.
            InfraError: the scorer failed.
        """
        prompt, label = states.get("observation_text", ""), states.get("label")
        text = with_opened_thought(states["action_text"], prompt)
        result = await grade(self.reward, Response(text, label), limit_s=self.limit_s)
        if result.reward is None or result.score is None:
            raise result.error("ReasoningGym.step: no grade", retry_step=True)
        self.num_attempts += 1
        correct = result.score >= 1.0
        last = correct or self.num_attempts >= self.max_attempts
        cut = states.get("finish_reason") == "length" and not correct
        feedback = feedback_text(result.status.value, self.instruction, self.max_attempts - self.num_attempts)
        dataset = str(entry_of(label)["metadata"].get("source_dataset"))
        info: dict[str, float | str] = {"correct": float(correct), f"{dataset}/correct": float(correct)}
        info |= {"value": result.components["value"] or 0.0, "attempts": float(self.num_attempts)}
        info |= {str(status): float(result.status is status) for status in _REPORTED}
        if self.num_attempts == 1:
            info["first_correct"] = float(correct)
        return StepResult(
            "" if last else [{"role": "user", "content": feedback}],
            reward=result.reward * self.retry_discount ** (self.num_attempts - 1) if last else 0.0,
            score=result.score,
            terminated=last and not cut,
            truncated=last and cut,
            info={**info, "dataset": dataset, **texts_of(result)},
        )

    async def gold(self, states: StepState) -> str | None:
        """Return the item's own answer, or one from its metadata; None for the few items without a known answer."""
        answer = oracle(entry_of(states.get("label")))
        return None if answer is None else wrapped(answer, self.answer)


def feedback_text(status: str, instruction: str, attempts_left: int) -> str:
    """Return the user message after a failed attempt: what was wrong, but not the right answer.

    It does not say how close the answer was: otherwise the policy could search for the answer by attempts.
    """
    return f"{_FEEDBACK[status].format(instruction=instruction).strip()} {attempts_text(attempts_left)}"
