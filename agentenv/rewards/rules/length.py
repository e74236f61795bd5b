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


class Meter:
    """A measure of texts in one unit; `count` counts tokens, or the row has `num_tokens` of the whole text."""

    def __init__(self, where: str, unit: str, count: Count | None, part: str = "all") -> None:
        self._unit = one_of(f"{where}.unit", unit, UNITS)
        self._part = one_of(f"{where}.part", part, PARTS)
        self._count = count
        if count is not None and (unit != "tokens" or not callable(count)):
            raise ConfigError(f"{where}.count: expected a function for unit 'tokens', got {count!r}. Leave it out.")
        if unit == "tokens" and count is None and part != "all":
            raise ConfigError(f"{where}.count: expected a function that counts the tokens of a part, got None.")

    async def length(self, response: Response) -> int:
        """Return the length of the measured part.

        Raises:
            DataError: the unit is tokens, and there is neither `count` nor metadata['num_tokens'].
            InfraError: `count` failed.
        """
        if self._unit == "tokens" and self._count is None:
            given = response.metadata.get("num_tokens")
            if isinstance(given, Integral) and not isinstance(given, bool) and 0 <= int(given) <= MAX_WHOLE:
                return int(given)
            raise label_error("the response's number of tokens", given, where="metadata['num_tokens']")
        text = part_of(response.text, self._part, response.prompt)
        if self._count is None:
            return len(text) if self._unit == "chars" else len(text.split())
        try:
            length = await asyncio.to_thread(self._count, text)
        except Exception as error:
            raise InfraError(f"count: expected a number of tokens, got {type(error).__name__}: {error}.") from error
        if isinstance(length, Integral) and 0 <= length <= MAX_WHOLE:
            return int(length)
        raise InfraError(f"count: expected a number of tokens, got {length!r}.")


class LengthReward:
    """Minus `rate` for every unit that the text is shorter than `min_length` or longer than `max_length`, else 0.

    `floor` is the lowest reward: by default a long text loses no more than a right answer is worth; None lifts it.
    `part` is `all` of the response, its `final` text, or its first `thought`, of length 0 without one; the name
    `thought_length` has that.
    The other defaults are RM-Gallery's `length_penalty`, which has none. ROLL's length reward, which falls below 400
    tokens to -0.5 at 100 tokens, is `min_length=400, max_length=None, rate=0.5 / 300, floor=-0.5, unit="tokens"`.
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
        self._meter = Meter(where, unit, count, part)
        self.bounds = (self._floor, 0.0)

    async def grade(self, response: Response) -> RewardResult:
        """Return the penalty; its component is `length`.

        Raises:
            DataError: the row does not have the number of tokens.
            InfraError: `count` failed.
        """
        length = await self._meter.length(response)
        penalty = band_penalty(length, self._min, self._max, self._rate)
        return RewardResult(max(penalty, self._floor), components={"length": float(length)})


class OverlongReward:
    """DAPO's soft punishment: 0 up to `max_length - buffer` tokens, then linearly down to `-factor`.

    Source: DAPO (arXiv 2503.14476), eq. 13; verl's `dapo` reward manager, which never sees more than `max_length`.
    """

    def __init__(self, *, max_length: int, buffer: int, factor: float = 1.0, count: Count | None = None) -> None:
        where = type(self).__name__
        self._max = whole_number(f"{where}.max_length", max_length, low=1)
        self._buffer = whole_number(f"{where}.buffer", buffer, low=1)
        if buffer > max_length:
            raise ConfigError(f"{where}.buffer: expected at most max_length ({max_length}), got {buffer}. Lower it.")
        self._factor = number(f"{where}.factor", factor, low=0.0)
        self._meter = Meter(where, "tokens", count)
        self.bounds = (-self._factor, 0.0)

    async def grade(self, response: Response) -> RewardResult:
        """Return the penalty; its component is `length`, in tokens.

        Raises:
            DataError: the row does not have the number of tokens.
            InfraError: `count` failed.
        """
        length = await self._meter.length(response)
        share = (length - (self._max - self._buffer)) / self._buffer
        return RewardResult(-self._factor * min(max(share, 0.0), 1.0) + 0.0, components={"length": float(length)})


def compute_total_length_reward(
    responses: Sequence[str], *, min_length: int = DEFAULT_MIN, max_length: int = DEFAULT_MAX, max_penalty: float = 1.0
) -> tuple[list[float], list[int]]:
    """Return the penalties, in [-max_penalty, 0], and the lengths of whole responses, in characters."""
    return _penalties(responses, "all", min_length, max_length, max_penalty)


def compute_thought_length_reward(
    responses: Sequence[str], *, min_length: int = DEFAULT_MIN, max_length: int = DEFAULT_MAX, max_penalty: float = 1.0
) -> tuple[list[float], list[int]]:
    """Return the penalties, in [-max_penalty, 0], and the lengths of first thoughts, in characters; 0 without one."""
    return _penalties(responses, "thought", min_length, max_length, max_penalty)


def _penalties(
    responses: Sequence[str], part: str, low: int, high: int, max_penalty: float
) -> tuple[list[float], list[int]]:
    lengths = [len(part_of(response, part)) for response in responses]
    penalties = [band_penalty(length, low, high, DEFAULT_RATE) for length in lengths]
    return [max(penalty, -max_penalty) for penalty in penalties], lengths
