"""A penalty for texts that repeat themselves: how few of the n-grams are different ones; linear in the text's length.

Example:
    >>> create_ngram_penalty_reward(ngram_size=5, max_penalty=-1.0, min_scaling=0.1)(["a b c a b c a b c a b c"])
    [-0.5833333333333334]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from agentenv.rewards._arguments import number, one_of, whole_number
from agentenv.rewards.length import part_of
from agentenv.rewards.pool import WorkerTimeout, shared_pool
from agentenv.rewards.types import Response, RewardResult, Status

MAX_CHARS = 1 << 18
"""Of a longer text only the end is looked at: it is the end that runs in circles."""
MODES = ("soft", "hard")
UNITS = ("auto", "words", "chars")
SCOPES = {"full": "all", "thought": "thought", "final": "final"}
_HARD_THRESHOLD = 0.3
_INLINE_CHARS = 8192
_CPU_LIMIT_S = 10.0
_MAX_NGRAM = 32
_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3"
_AUTO_WORD = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")


def repeated_share(text: str, ngram_size: int, *, unit: str = "auto") -> float:
    """`1 - different n-grams / n-grams`, in [0, 1); 0 for fewer than `ngram_size` tokens.

    Tokens are lower-case words; with `auto` a Chinese, Japanese or Korean character is one of its own, and with `chars`
    every character that is no white space.
    """
    tokens = _tokens(text[-MAX_CHARS:].lower(), unit)
    num_ngrams = len(tokens) - ngram_size + 1
    if num_ngrams <= 0:
        return 0.0
    different = set(zip(*(tokens[start:] for start in range(ngram_size)), strict=False))
    return 1.0 - len(different) / num_ngrams


def _tokens(text: str, unit: str) -> Sequence[str]:
    if unit == "words":
        return text.split()
    return "".join(text.split()) if unit == "chars" else _AUTO_WORD.findall(text)


class RepetitionReward:
    """A penalty in [max_penalty, 0] for the share of repeated n-grams.

    `soft`: `max_penalty` times the share, scaled so that it begins at `min_scaling`. With `min_scaling=0.0` it is
    ROLL's and open-r1's. `hard`: nothing up to a share of 0.3, then the share beyond it, times `-max_penalty`.

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

    @property
    def bounds(self) -> tuple[float, float]:
        """From `max_penalty` to 0."""
        return self._max_penalty, 0.0

    def penalty(self, text: str) -> float:
        """The penalty of a response, without an event loop: milliseconds for a long one."""
        return self._scaled(repeated_share(part_of(text, self._part), self._size, unit=self._unit))

    async def grade(self, response: Response) -> RewardResult:
        """The penalty; its component is the `repeated` share of the n-grams.

        Raises:
            InfraError: the worker that looks at long texts failed.
        """
        text = part_of(response.text, self._part)
        try:
            share = await self._share(text)
        except WorkerTimeout as error:
            return RewardResult(
                self._max_penalty, status=Status.TIMEOUT, components={"repeated": 1.0}, detail=str(error)
            )
        return RewardResult(self._scaled(share), components={"repeated": share})

    async def _share(self, text: str) -> float:
        if len(text) <= _INLINE_CHARS:
            return repeated_share(text, self._size, unit=self._unit)
        request = {"task": f"{__name__}:handle", "text": text[-MAX_CHARS:], "size": self._size, "unit": self._unit}
        reply = await shared_pool().run(request, cpu_limit_s=_CPU_LIMIT_S)
        return float(reply["share"])

    def _scaled(self, share: float) -> float:
        if self._mode == "hard":
            return self._max_penalty * max(share - _HARD_THRESHOLD, 0.0) + 0.0
        return self._max_penalty * max(share - self._min_scaling, 0.0) / (1.0 - self._min_scaling) + 0.0


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """In a worker: the repeated share of a long text."""
    return {"share": repeated_share(request["text"], request["size"], unit=request["unit"])}


def create_ngram_penalty_reward(
    ngram_size: int = 5, max_penalty: float = -1.0, min_scaling: float = 0.1
) -> Callable[[Sequence[str]], list[float]]:
    """The seed's function: responses in, one penalty in [max_penalty, 0] each out.

    Raises:
        ConfigError: `max_penalty` is above 0, or another argument is out of its range.
    """
    reward = RepetitionReward(ngram_size=ngram_size, max_penalty=max_penalty, min_scaling=min_scaling)

    def penalties(responses: Sequence[str]) -> list[float]:
        """The penalty of each response, in order."""
        return [reward.penalty(response) for response in responses]

    return penalties
