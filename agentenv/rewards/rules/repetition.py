"""Penalize texts that repeat themselves, by the share of repeated n-grams; linear in the text's length.

Example:
    >>> RepetitionReward(ngram_size=5, max_penalty=-1.0, min_scaling=0.1).penalty("a b c a b c a b c a b c")
    -0.5833333333333334
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentenv._util.off_loop import off_loop
from agentenv.core.arguments import number, one_of, whole_number
from agentenv.rewards.rules.length import part_of
from agentenv.rewards.types import Response, RewardResult

MAX_CHARS = 1 << 18
"""Of a longer text only the end is examined, since loops occur at the end."""
MODES = ("soft", "hard")
UNITS = ("auto", "words", "chars")
SCOPES = {"full": "all", "thought": "thought", "final": "final"}
_HARD_THRESHOLD = 0.3
_MAX_NGRAM = 32
_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3"
_MAX_WORD_CHARS, _BLOCK_CHARS = 32, 4
_AUTO_WORD = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")


def repeated_share(text: str, ngram_size: int, *, unit: str = "auto") -> float:
    """Return `1 - different n-grams / n-grams`, in [0, 1); 0 for fewer than `ngram_size` tokens.

    Tokens are lower-case words; with `auto` each Chinese, Japanese or Korean character is a token, and so is each block
    of 4 characters in a word longer than 32, since a word without an end repeats itself too; a rule of dashes or other
    signs is one token. With `chars` every character is one, except white space.
    """
    text = text[-MAX_CHARS:].lower()
    tokens: Sequence[str] = "".join(text.split()) if unit == "chars" else text.split()
    if unit == "auto":
        blocks: list[str] = []
        for word in _AUTO_WORD.findall(text):
            is_short = len(word) <= _MAX_WORD_CHARS or not any(map(str.isalnum, word))
            blocks += [word] if is_short else [word[at : at + _BLOCK_CHARS] for at in range(0, len(word), _BLOCK_CHARS)]
        tokens = blocks
    num_ngrams = len(tokens) - ngram_size + 1
    if num_ngrams <= 0:
        return 0.0
    different = set(zip(*(tokens[start:] for start in range(ngram_size)), strict=False))
    return 1.0 - len(different) / num_ngrams


class RepetitionReward:
    """A penalty in [max_penalty, 0] for the share of repeated n-grams.

    `soft`: `max_penalty` times the share, scaled so that it starts at `min_scaling`. With `min_scaling=0.0` it equals
    ROLL's and open-r1's. `hard`: 0 up to a share of 0.3, then `max_penalty` times the share beyond it.

    Source: RM-Gallery 0.1.7 `ngram_repetition_penalty`; arXiv 2502.03373, appendix C.2.
    """

    def __init__(
        self,
        *,
        ngram_size: int = 3,
        max_penalty: float = -1.0,
        min_scaling: float = 0.0,
        mode: str = "soft",
        scope: str = "full",
        unit: str = "auto",
    ) -> None:
        where = type(self).__name__
        self._size = whole_number(f"{where}.ngram_size", ngram_size, low=1, high=_MAX_NGRAM)
        self._max_penalty = number(f"{where}.max_penalty", max_penalty, high=0.0)
        self._min_scaling = number(f"{where}.min_scaling", min_scaling, low=0.0, high=0.999999)
        self._mode = one_of(f"{where}.mode", mode, MODES)
        self._part = SCOPES[one_of(f"{where}.scope", scope, SCOPES)]
        self._unit = one_of(f"{where}.unit", unit, UNITS)
        self.bounds = (self._max_penalty, 0.0)

    def penalty(self, text: str) -> float:
        """Return the penalty of a response, without an event loop; takes milliseconds for a long one."""
        return self._scale(repeated_share(part_of(text, self._part), self._size, unit=self._unit))

    async def grade(self, response: Response) -> RewardResult:
        """Return the penalty; its component is the `repeated` share of the n-grams."""
        text = part_of(response.text, self._part, response.prompt)
        share = await off_loop(len(text), repeated_share, text, self._size, unit=self._unit)
        return RewardResult(self._scale(share), components={"repeated": share})

    def _scale(self, share: float) -> float:
        if self._mode == "hard":
            return self._max_penalty * max(share - _HARD_THRESHOLD, 0.0) + 0.0
        return self._max_penalty * max(share - self._min_scaling, 0.0) / (1.0 - self._min_scaling) + 0.0
