"""GuessNumber: a hidden number, few guesses, and after each whether the number is larger or smaller."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from agentenv.agent import AgentInstance, ResetState, StepState
from agentenv.errors import ConfigError, DataError
from agentenv.types import StepResult
from agentenv_envs.guess_number.texts import hint_text, invalid_text, rules_text

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?![\w]|\.\d)")
_MOST_DIGITS = 9  # longer ones are out of any range, and int() of thousands of digits is slow


class GuessNumber(AgentInstance):
    """Guess a number; hear whether it is larger or smaller, and guess again until it is found or guesses run out.

    The number is the task's label, or, where it has none, drawn evenly from `low` to `high` with the task's seed.
    Nothing in the prompt tells it, so one guess finds it once in `high - low + 1` times. With 2**k - 1 numbers and k
    guesses, as by default, halving what is left finds every one of them, and nothing else does.
    The last whole number in the action is the guess. An action without one, or out of range, costs a guess.

    Reward per guess: `correct_reward` when it is right; `information_reward` times the share of all information that
    it brought: log2(possible numbers before / after) / log2(all numbers), so that what a guess earns in the mean is
    what it finds out, over an episode at most `information_reward`; `invalid_reward` when it is no number in range.
    Score: 1.0 when the number was found, else 0.0.

    info per turn: correct (0/1), guesses (so far), valid (0/1), possible (0/1, the guess agrees with all hints so far),
    bits (information that it brought).
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
        _check(low, high, max_guesses)
        self.low, self.high, self.max_guesses = low, high, max_guesses
        self.correct_reward, self.information_reward = correct_reward, information_reward
        self.invalid_reward = invalid_reward
        self.num_guesses = 0
        self.possible = range(low, high + 1)
        """The numbers that agree with all hints so far."""

    async def reset(self, states: ResetState) -> ResetState:
        """Put the rules under the prompt; one that is already rendered text is left as it is.

        Raises:
            DataError: the label is no number in range.
        """
        _ = self._number(states)
        observation = states["observation"]
        if isinstance(observation, str) or not observation:
            return states
        last = observation[-1]
        if last.get("role") != "user" or not isinstance(last.get("content"), str):
            return states
        content = f"{last['content']}\n{rules_text(self.low, self.high, self.max_guesses)}"
        return {**states, "observation": [*observation[:-1], {**last, "content": content}]}

    async def step(self, states: StepState) -> StepResult:
        """Compare a guess with the number.

        Raises:
            DataError: the label is no number in range.
        """
        number, guess = self._number(states), self._guess(states["action_text"])
        self.num_guesses += 1
        left = self.max_guesses - self.num_guesses
        was_possible, bits = guess in self.possible, self._learn(guess, number)
        correct = guess == number
        said = "" if correct or left <= 0 else self._said(guess, number)
        return StepResult(
            [{"role": "user", "content": said}] if said else "",
            reward=self._reward(guess, bits, correct=correct),
            terminated=correct or left <= 0,
            score=float(correct),
            info={
                "correct": float(correct),
                "guesses": float(self.num_guesses),
                "valid": float(guess is not None),
                "possible": float(was_possible),
                "bits": bits,
            },
        )

    async def gold(self, states: StepState) -> str | None:
        """The number.

        Raises:
            DataError: the label is no number in range.
        """
        return str(self._number(states))

    def _number(self, states: Mapping[str, Any]) -> int:
        label = states.get("label")
        if label is None:
            return Random(states.get("seed") or 0).randint(self.low, self.high)
        number = _read(str(label))
        if number is None or not self.low <= number <= self.high:
            raise DataError(
                f"GuessNumber: label: expected a whole number from {self.low} to {self.high}, got {label!r:.60}. "
                "Mend the data, or set low and high in --env_kwargs."
            )
        return number

    def _guess(self, text: str) -> int | None:
        guess = _read(text)
        return guess if guess is not None and self.low <= guess <= self.high else None

    def _learn(self, guess: int | None, number: int) -> float:
        """Leave the numbers that the hint allows; gives the bits that it brought."""
        if guess is None:
            return 0.0
        before = len(self.possible)
        first, last = self.possible[0], self.possible[-1]
        if guess == number:
            first = last = number
        elif guess < number:
            first = max(first, guess + 1)
        else:
            last = min(last, guess - 1)
        self.possible = range(first, last + 1)
        return math.log2(before / len(self.possible))

    def _reward(self, guess: int | None, bits: float, *, correct: bool) -> float:
        if guess is None:
            return self.invalid_reward
        share = bits / math.log2(self.high - self.low + 1)
        return self.information_reward * share + self.correct_reward * correct

    def _said(self, guess: int | None, number: int) -> str:
        return invalid_text(self.low, self.high) if guess is None else hint_text(guess, number)


def _read(text: str) -> int | None:
    """The last whole number in a text."""
    found = _NUMBER.findall(text)
    return int(found[-1]) if found and len(found[-1]) <= _MOST_DIGITS else None


def _check(low: int, high: int, max_guesses: int) -> None:
    for name, value in (("low", low), ("high", high), ("max_guesses", max_guesses)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"GuessNumber.{name}: expected an integer, got {value!r}. Change it.")
    if not low < high:
        raise ConfigError(f"GuessNumber.high: expected more than low ({low}), got {high}. Change it.")
    if max_guesses < 1:
        raise ConfigError(f"GuessNumber.max_guesses: expected an integer >= 1, got {max_guesses}. Change it.")
