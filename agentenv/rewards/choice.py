r"""Rewards for multiple choice: exactly one option, committed to; never the first capital letter of some prose.

Example:
    >>> await ChoiceReward().grade(Response(r"So \boxed{The correct one is B}.", label="B"))
    RewardResult(reward=1.0, score=1.0, …, components={'correct': 1.0, 'boxed': 1.0}, extracted='B', …)

The label is a letter, an index or an option's text. Where the row has the options, in metadata["options"], an answer
may be an option's text too. What counts as naming an option is in `_choice_text.letters_of`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from agentenv.errors import ConfigError
from agentenv.rewards._arguments import label_error, number, one_of, shown, whole_number
from agentenv.rewards._choice_text import ALPHABET, clean, final_answer, letters_of, read_label, read_options
from agentenv.rewards.length import Count, LengthReward
from agentenv.rewards.repetition import RepetitionReward
from agentenv.rewards.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status

NUM_OPTIONS = 10
"""Options of a question whose row does not list them: MMLU-Pro has ten."""
GENERAL_VAL_TAGS = ("ceval", "race_high", "mmlu_pro", "commonsense_qa")
SCALES = {
    "loose": (1.0, 1.0, -1.0, -1.0),
    "soft": (1.0, 0.5, -0.5, -1.0),
    "strict": (1.0, -1.0, -1.0, -1.0),
}
"""What an answer is worth that is right and boxed, right, boxed, and neither. Source: ROLL's three reward types."""


class _Judged(NamedTuple):
    """What a response answered."""

    correct: bool
    boxed: bool
    status: Status = Status.OK
    extracted: str | None = None
    detail: str = ""

    @property
    def components(self) -> dict[str, float]:
        """The two facts as numbers."""
        return {"correct": float(self.correct), "boxed": float(self.boxed)}


class _Judge:
    """Compares the option that a response commits to with the row's."""

    def __init__(self, where: str, *, require_box: bool, num_options: int, index_base: int) -> None:
        if not isinstance(require_box, bool):
            raise ConfigError(f"{where}.require_box: expected a bool, got {require_box!r}. Correct the argument.")
        self._require_box = require_box
        self._letters = ALPHABET[: whole_number(f"{where}.num_options", num_options, low=2, high=len(ALPHABET))]
        self._index_base = whole_number(f"{where}.index_base", index_base, high=1)

    def judge(self, response: Response) -> _Judged:
        """What the response answered, and whether that is right.

        Raises:
            DataError: the label, or metadata["options"], is none.
        """
        options = read_options(response.metadata.get("options"), self._letters)
        gold = read_label(response.label, options, self._index_base)
        final = final_text(response.text)
        if final is None:
            return _Judged(False, False, Status.NO_ANSWER, detail="the thinking was not ended")
        answer, boxed = final_answer(final, options, require_box=self._require_box)
        if answer is None:
            return _Judged(False, False, Status.NO_ANSWER)
        named = letters_of(answer, options)
        if len(named) == 1:
            letter = next(iter(named))
            return _Judged(letter == gold, boxed, Status.OK, letter)
        detail = f"it names {', '.join(sorted(named))}" if named else "it names no option"
        return _Judged(False, boxed, Status.PARSE_ERROR, shown(clean(answer)), detail)


class ChoiceReward:
    r"""1.0 if the response commits to the right option and to no other, else 0.0; ROLL's boxed multiple choice.

    It has to be in a `\boxed{…}` unless `require_box` is False; then `GeneralValReward` says what else is an answer.
    A label that is a number counts from `index_base`, 0 or 1. `num_options` is for rows that do not list them.
    """

    bounds = (0.0, 1.0)

    def __init__(self, *, require_box: bool = True, num_options: int = NUM_OPTIONS, index_base: int = 0) -> None:
        where = type(self).__name__
        self._judge = _Judge(where, require_box=require_box, num_options=num_options, index_base=index_base)

    async def grade(self, response: Response) -> RewardResult:
        """Whether the answer is right; components `correct` and `boxed`.

        Raises:
            DataError: the label, or metadata["options"], is none.
        """
        judged = self._judge.judge(response)
        return _result(float(judged.correct), judged, judged.correct)


class GeneralValReward:
    """The right option on one of `SCALES`, for validation sets and for training; score 1.0 where that is above 0.

    An answer is, in this order: the last box, the last `<answer>…</answer>`, what follows the last "the answer is" that
    names an option, a last line such as "So B is correct", or a short text that is nothing but an option. Where the row
    has a metadata["tag"], it must be one of `tags`; None takes any.
    """

    bounds = (-1.0, 1.0)

    def __init__(
        self,
        *,
        scale: str = "loose",
        tags: tuple[str, ...] | None = GENERAL_VAL_TAGS,
        num_options: int = NUM_OPTIONS,
        index_base: int = 0,
    ) -> None:
        where = type(self).__name__
        self._scale = SCALES[one_of(f"{where}.scale", scale, SCALES)]
        if tags is not None and not (isinstance(tags, tuple | list) and all(isinstance(tag, str) for tag in tags)):
            raise ConfigError(f"{where}.tags: expected a tuple of strings or None, got {tags!r}. Correct the argument.")
        self._tags = None if tags is None else frozenset(tags)
        self._judge = _Judge(where, require_box=False, num_options=num_options, index_base=index_base)

    async def grade(self, response: Response) -> RewardResult:
        """What the answer is worth; components `correct` and `boxed`.

        Raises:
            DataError: the label, metadata["options"] or metadata["tag"] is none.
        """
        self._check_tag(response)
        judged = self._judge.judge(response)
        worth = _scaled(self._scale, judged)
        return _result(worth, judged, worth > 0.0)

    def _check_tag(self, response: Response) -> None:
        tag = response.metadata.get("tag")
        if tag is None or self._tags is None:
            return
        if not isinstance(tag, str) or tag not in self._tags:
            raise label_error(f"one of {', '.join(sorted(self._tags))}", tag, where="metadata['tag']")


class CrossThinkReward:
    """The right option on one of `SCALES`, minus repetition, plus a share of a length term; ROLL's CrossThink QA.

    `repetition_penalty`, at most 0, is what a text that only repeats itself (in 3-grams) would lose. The length term
    punishes *short* responses: -0.5 from 100 units down, 0 from 400 up, linear between; it is multiplied by
    `length_coefficient`, at least 0. It is measured on the text itself, never on padding: in tokens with a `count`,
    which is a tokenizer's, else in words.
    """

    def __init__(
        self,
        *,
        reward_type: str = "loose",
        repetition_penalty: float = -0.5,
        length_coefficient: float = 0.0,
        count: Count | None = None,
        num_options: int = NUM_OPTIONS,
        index_base: int = 0,
    ) -> None:
        where = type(self).__name__
        self._scale = SCALES[one_of(f"{where}.reward_type", reward_type, SCALES)]
        penalty = number(f"{where}.repetition_penalty", repetition_penalty, high=0.0)
        self._repetition = RepetitionReward(ngram_size=3, max_penalty=penalty)
        self._coefficient = number(f"{where}.length_coefficient", length_coefficient, low=0.0)
        unit = "words" if count is None else "tokens"
        band = LengthReward(min_length=400, max_length=None, rate=0.5 / 300, floor=-0.5, unit=unit, count=count)
        self._length = band
        self._judge = _Judge(where, require_box=False, num_options=num_options, index_base=index_base)

    @property
    def bounds(self) -> tuple[float, float]:
        """From a wrong answer with both penalties to a right one with none."""
        return -1.0 + self._repetition.bounds[0] - 0.5 * self._coefficient, 1.0

    async def grade(self, response: Response) -> RewardResult:
        """The sum; components `choice`, `repetition` and `length`, all raw, and `correct` and `boxed`.

        Raises:
            DataError: the label, or metadata["options"], is none.
            InfraError: `count`, or the worker that looks at long texts, failed.
        """
        judged = self._judge.judge(response)
        choice = _scaled(self._scale, judged)
        repetition = (await self._repetition.grade(response)).reward or 0.0
        length = (await self._length.grade(response)).reward or 0.0
        result = _result(choice + repetition + self._coefficient * length, judged, choice > 0.0)
        terms = {"choice": choice, "repetition": repetition, "length": length}
        return replace(result, components={**terms, **judged.components})


def _scaled(scale: tuple[float, float, float, float], judged: _Judged) -> float:
    return scale[2 * (not judged.correct) + (not judged.boxed)]


def _result(reward: float, judged: _Judged, right: bool) -> RewardResult:
    return RewardResult(
        reward,
        score=float(right),
        status=judged.status,
        components=judged.components,
        extracted=judged.extracted,
        detail=judged.detail,
    )
