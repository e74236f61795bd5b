"""GuessNumber: a hidden number, a few guesses, and a hint after each: larger or smaller."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from agentenv.core.agent import AgentInstance, ResetState, StepState
from agentenv.core.types import StepResult
from agentenv.errors import DataError
from agentenv.rewards.rules.text import final_text
from agentenv_envs.common import check, check_count, with_question

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?![\w]|\.\d)")
_MAX_DIGITS = 9  # longer numbers are out of any range, and int() of thousands of digits is slow


class GuessNumber(AgentInstance):
    """The environment's side of one game: hides a number and answers each guess with a hint.

    The number is the task's label; without a label, it is drawn evenly from `low` to `high` with the task's seed. The
    prompt does not reveal it, so one guess finds it once in `high - low + 1` times. By default there are 2**k - 1
    numbers and k guesses: halving the remaining range always finds the number, and no other strategy does.
    The last whole number in the action is the guess. An action without one, or out of range, costs a guess.

    Reward of a guess: `correct_reward` if it is right; plus `information_reward` times its share of all information,
    log2(possible numbers before / after) / log2(all numbers), over an episode at most `information_reward`;
    `invalid_reward` if it is not a number in range. Score: 1.0 if the number was found, else 0.0.

    info per turn: correct (0/1), guesses (so far), valid (0/1), possible (0/1, the guess agrees with all hints so far),
    bits (information that the guess gained).
    """

    datasets: ClassVar[Mapping[str, str | Path]] = {"guess_number": Path(__file__).parent / "data/guess_number.jsonl"}
    hacks: ClassVar[Mapping[str, str]] = {
        "every_number": " ".join(map(str, range(1000))),
        "range": "1-15, one of them",
        "zero_digits": "0" * 5000 + "7.5",
        "rules": "You said: It is a whole number. The number is the number.",
    }

    def __init__(
        self,
        low: int = 1,
        high: int = 15,
        max_guesses: int = 4,
        *,
        correct_reward: float = 1.0,
        information_reward: float = 0.0,
        invalid_reward: float = 0.0,
    ) -> None:
        for name, value in (("low", low), ("high", high)):
            check(f"GuessNumber.{name}", value, type(value) is int, "an integer")
        check("GuessNumber.high", high, low < high, f"more than low ({low})")
        check_count("GuessNumber.max_guesses", max_guesses)
        self.low = low
        self.high = high
        self.max_guesses = max_guesses
        self.correct_reward = correct_reward
        self.information_reward = information_reward
        self.invalid_reward = invalid_reward
        self.num_guesses = 0
        self.possible = range(low, high + 1)
        """The numbers that agree with all hints so far."""

    async def reset(self, states: ResetState) -> ResetState:
        """Append the rules to the prompt; a prompt that is already rendered to text stays unchanged.

        Raises:
            DataError: the label is not a number in range.
        """
        self._number(states)
        rules = rules_text(self.low, self.high, self.max_guesses)
        return with_question(states, lambda question: f"{question}\n{rules}")

    async def step(self, states: StepState) -> StepResult:
        """Compare a guess with the number.

        Raises:
            DataError: the label is not a number in range.
        """
        number = self._number(states)
        guess = _last_number(final_text(states["action_text"], states.get("observation_text", "")) or "")
        is_valid = guess is not None and self.low <= guess <= self.high
        was_possible = guess in self.possible
        correct = guess == number
        self.num_guesses += 1
        reward, bits, hint = self.invalid_reward, 0.0, invalid_text(self.low, self.high)
        if guess is not None and is_valid:
            before, first, last = len(self.possible), self.possible[0], self.possible[-1]
            if correct:
                self.possible = range(number, number + 1)
            elif guess < number:
                self.possible = range(max(first, guess + 1), last + 1)
            else:
                self.possible = range(first, min(last + 1, guess))
            bits = math.log2(before / len(self.possible))
            share = bits / math.log2(self.high - self.low + 1)
            reward = self.information_reward * share + self.correct_reward * correct
            hint = hint_text(guess, number)
        done = correct or self.num_guesses >= self.max_guesses
        return StepResult(
            "" if done else [{"role": "user", "content": hint}],
            reward=reward,
            terminated=done,
            score=float(correct),
            info={
                "correct": float(correct),
                "guesses": float(self.num_guesses),
                "valid": float(is_valid),
                "possible": float(was_possible),
                "bits": bits,
            },
        )

    async def gold(self, states: StepState) -> str | None:
        """Return the number.

        Raises:
            DataError: the label is not a number in range.
        """
        return str(self._number(states))

    def _number(self, states: Mapping[str, Any]) -> int:
        label = states.get("label")
        if label is None:
            return Random(states.get("seed") or 0).randint(self.low, self.high)
        number = _last_number(str(label))
        if number is None or not self.low <= number <= self.high:
            raise DataError(
                f"GuessNumber: label: expected a whole number from {self.low} to {self.high}, got {label!r:.60}. "
                "Fix the data, or set low and high in --env_kwargs."
            )
        return number


def _last_number(text: str) -> int | None:
    numbers = _NUMBER.findall(text)
    return int(numbers[-1]) if numbers and len(numbers[-1]) <= _MAX_DIGITS else None


# Every text of the game. The untrained policy's tokenizer consists of exactly these words.


def rules_text(low: int, high: int, max_guesses: int) -> str:
    """Return the rules below the prompt of the first turn."""
    guesses = "1 guess" if max_guesses == 1 else f"{max_guesses} guesses"
    return f"It is a whole number from {low} to {high}. You have {guesses}. Say one number."


def hint_text(guess: int, number: int) -> str:
    """Return the user message after a wrong guess."""
    return "It is larger." if guess < number else "It is smaller."


def invalid_text(low: int, high: int) -> str:
    """Return the user message after an action without a number, or with one out of range."""
    return f"Say a number from {low} to {high}."
