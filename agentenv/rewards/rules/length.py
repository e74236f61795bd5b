"""Penalize responses that are too short or too long, in characters, words or tokens of the text without padding.

Example:
    >>> await LengthReward().grade(Response("abc"))
    RewardResult(reward=-0.07, …, components={'length': 3.0}, …)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from agentenv.core.arguments import MAX_WHOLE, label_error, number, one_of, whole_number
from agentenv.core.types import Message
from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.rules.text import final_text, thought_text, without_special_tokens
from agentenv.rewards.types import Response, RewardResult

Count = Callable[[str], int]
"""Returns the number of tokens of a text; called in threads, also concurrently."""
UNITS = ("chars", "words", "tokens")
PARTS = ("all", "thought", "final")
DEFAULT_MIN, DEFAULT_MAX, DEFAULT_RATE = 10, 1000, 0.01
"""The band of RM-Gallery's `length_penalty`, in characters."""
_MAX_RATE = 1e6


def band_penalty(length: float, low: float, high: float, rate: float) -> float:
    """Return 0 from `low` to `high`, and minus `rate` for every unit outside; in [-inf, 0].

    Source: RM-Gallery 0.1.7, `gallery/rm/format/format.py`, `length_penalty`.
    """
    return -rate * max(low - length, length - high, 0.0) + 0.0


def part_of(text: str, part: str, prompt: str | Sequence[Message] = "") -> str:
    """Return `all` of a response, its first `thought`, or its `final` text (empty if it has none)."""
    if part == "thought":
        return thought_text(text, prompt)
    return without_special_tokens(text) if part == "all" else final_text(text, prompt) or ""


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) <= MAX_WHOLE


class LengthReward:
    """Minus `rate` for every unit that the text is shorter than `min_length` or longer than `max_length`, else 0.

    `floor` is the lowest reward: by default a long text loses no more than a right answer is worth; None lifts it.
    `part` is `all` of the response, its `final` text, or its first `thought`, of length 0 without one; the name
    `thought_length` has that. The other defaults are RM-Gallery's `length_penalty`, which has none. ROLL's length
    reward, which falls below 400 tokens to -0.5 at 100 tokens, is `min_length=400, max_length=None, rate=0.5 / 300,
    floor=-0.5, unit="tokens"`.
    """

    def __init__(
        self,
        *,
        min_length: int = DEFAULT_MIN,
        max_length: int | None = DEFAULT_MAX,
        rate: float = DEFAULT_RATE,
        floor: float | None = -1.0,
        unit: str = "chars",
        count: Count | None = None,
        part: str = "all",
    ) -> None:
        where = type(self).__name__
        self._min = whole_number(f"{where}.min_length", min_length)
        self._max = math.inf if max_length is None else whole_number(f"{where}.max_length", max_length, low=self._min)
        self._rate = number(f"{where}.rate", rate, low=0.0, high=_MAX_RATE)
        self._floor = -math.inf if floor is None else number(f"{where}.floor", floor, high=0.0)
        self._unit = one_of(f"{where}.unit", unit, UNITS)
        self._part = one_of(f"{where}.part", part, PARTS)
        self._count = count
        if count is not None and (unit != "tokens" or not callable(count)):
            raise ConfigError(f"{where}.count: expected a function for unit 'tokens', got {count!r}. Leave it out.")
        if unit == "tokens" and count is None and part != "all":
            raise ConfigError(f"{where}.count: expected a function that counts the tokens of a part, got None.")
        self.bounds = (self._floor, 0.0)

    async def grade(self, response: Response) -> RewardResult:
        """Return the penalty; its component is `length`.

        Raises:
            DataError: the unit is tokens, and there is neither `count` nor metadata['num_tokens'], of the whole text.
            InfraError: `count` failed.
        """
        length: Any
        if self._unit == "tokens" and self._count is None:
            length = response.metadata.get("num_tokens")
            if not _is_count(length):
                raise label_error("the response's number of tokens", length, where="metadata['num_tokens']")
        else:
            text = part_of(response.text, self._part, response.prompt)
            if self._count is None:
                length = len(text) if self._unit == "chars" else len(text.split())
            else:
                try:
                    length = await asyncio.to_thread(self._count, text)
                except Exception as error:
                    got = f"{type(error).__name__}: {error}"
                    raise InfraError(f"count: expected a number of tokens, got {got}.") from error
                if not _is_count(length):
                    raise InfraError(f"count: expected a number of tokens, got {length!r}.")
        penalty = band_penalty(int(length), self._min, self._max, self._rate)
        return RewardResult(max(penalty, self._floor), components={"length": float(length)})


class OverlongReward(LengthReward):
    """DAPO's soft punishment: 0 up to `max_length - buffer` tokens, then linearly down to `-factor`.

    Source: DAPO (arXiv 2503.14476), eq. 13; verl's `dapo` reward manager, which never sees more than `max_length`.
    """

    def __init__(self, *, max_length: int, buffer: int, factor: float = 1.0, count: Count | None = None) -> None:
        where = type(self).__name__
        least = whole_number(f"{where}.max_length", max_length, low=1) - whole_number(f"{where}.buffer", buffer, low=1)
        if least < 0:
            raise ConfigError(f"{where}.buffer: expected at most max_length ({max_length}), got {buffer}. Lower it.")
        floor = -number(f"{where}.factor", factor, low=0.0)
        rate = factor / buffer
        super().__init__(min_length=0, max_length=least, rate=rate, floor=floor, unit="tokens", count=count)


def length_penalties(responses: Sequence[str], part: str) -> tuple[list[float], list[int]]:
    """Return the seed's penalties, in [-1, 0], and the lengths, in characters, of a part of each response."""
    lengths = [len(part_of(response, part)) for response in responses]
    penalties = [band_penalty(length, DEFAULT_MIN, DEFAULT_MAX, DEFAULT_RATE) for length in lengths]
    return [max(penalty, -1.0) for penalty in penalties], lengths
