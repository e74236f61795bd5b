"""Measure the similarity of an answer and its references, in [0, 1]; the best of several references counts.

Example:
    >>> await SimilarityReward(metric="token_f1").grade(Response("It is the Eiffel Tower.", "Eiffel Tower"))
    RewardResult(reward=0.666…, score=0.666…, …, components={'token_f1': 0.666…}, …)
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from agentenv.core.arguments import label_error, one_of, shown, whole_number
from agentenv.rewards.rules.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.rewards.workers.pool import WorkerTimeout, shared_pool

MAX_CHARS = 1 << 16
"""Longer references are rejected; the rest of a longer answer counts as dissimilar."""
MAX_REFERENCES = 64
_INLINE_PRODUCT = 1 << 18
_INLINE_CHARS = 2000  # normalizing combining marks takes quadratic time
_CPU_LIMIT_S = 10.0
_ARTICLES = frozenset({"a", "an", "the"})
_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
_PLAIN_WORD = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")
_PUNCTUATION = re.compile(
    r"(?!(?<=[0-9])[./:](?=[0-9])|(?<!\w)\.(?=[0-9])|(?<!\w)-(?=\.?[0-9])|(?<=\w)\^(?=[-0-9]))"
    r"(?:[^\w\s¬±×÷°¢£¥\u20a0-\u20cf\u2190-\u22ff\u2a00-\u2aff]|_)"
)
"""Without the signs outside of ASCII, which SQuAD keeps too."""
_FRACTION = re.compile("[¼½¾⅐-⅞]")
_POWER = re.compile("[⁺⁻]?[⁰¹²³⁴-⁹]+")


def normalize(text: str) -> list[str]:
    """Return the words that count, as in SQuAD: lower case, without punctuation and articles.

    A CJK character is a word. Unlike SQuAD, it keeps points, minuses, slashes, colons and powers in numbers: `3.14` is
    not `314`, `1/2` and `½` are not `12`, `10²` is not `102`. As in SQuAD, `C#` is `C`, and `x<y` is `x>y`. A text of
    articles only keeps them, and one without words is split into characters.
    """
    text = _POWER.sub(r"^\g<0>", _FRACTION.sub(r" \g<0>", text))
    text = unicodedata.normalize("NFKC", text).casefold().replace("\u2212", "-").replace("\u2044", "/")
    words = _PLAIN_WORD.findall(_PUNCTUATION.sub("", text))
    return [word for word in words if word not in _ARTICLES] or words or list("".join(text.split()))


def exact(answer: str, reference: str) -> float:
    """Return 1.0 for the same text, ignoring white space at the ends."""
    return float(answer.strip() == reference.strip())


def normalized_exact(answer: str, reference: str) -> float:
    """Return 1.0 for the same words, see `normalize`."""
    return float(normalize(answer) == normalize(reference))


def token_f1(answer: str, reference: str) -> float:
    """Return SQuAD's F1 of the common words, with their counts."""
    return _dice(normalize(answer), normalize(reference))


def rouge_l(answer: str, reference: str) -> float:
    """Return F1 of the longest common subsequence of words, with articles: ROUGE-L without stemming.

    As in Google's `rouge_score`, signs do not count: `-42` is `42`.
    """
    a, b = (_WORD.findall(text.casefold()) or text.split() for text in (answer, reference))
    if not a and not b:
        return 1.0
    # The longest common subsequence, one row of the table per word, as bits. Source: Hyyrö 2004.
    positions, full = _positions(a), (1 << len(a)) - 1
    row = full
    for word in b:
        matches = row & positions.get(word, 0)
        row = (row + matches | row - matches) & full
    return 2.0 * (len(a) - row.bit_count()) / (len(a) + len(b))


def edit_ratio(answer: str, reference: str) -> float:
    """Return `1 - Levenshtein distance / length of the longer one`, in characters."""
    a, b = answer.strip(), reference.strip()
    if not a or not b:
        return float(a == b)
    # The distance, one row of the table per character, as bits. Source: Myers 1999; Hyyrö 2003.
    positions, full, last = _positions(a), (1 << len(a)) - 1, 1 << len(a) - 1
    up, down, distance = full, 0, len(a)
    for char in b:
        matches = positions.get(char, 0)
        diagonal = ((matches & up) + up ^ up) | matches | down
        right, left = down | ~(diagonal | up) & full, up & diagonal
        distance += bool(right & last) - bool(left & last)
        right = right << 1 | 1
        up, down = (left << 1 | ~(diagonal | right)) & full, right & diagonal
    return 1.0 - distance / max(len(a), len(b))


def char_ngram(answer: str, reference: str, size: int = 3) -> float:
    """Return F1 of the common character n-grams; a text shorter than `size` is one n-gram."""
    grams = []
    for text in (answer, reference):
        text = " ".join(text.casefold().split())
        grams.append([text[start : start + size] for start in range(max(1, len(text) - size + 1))])
    return _dice(*grams)


METRICS: dict[str, Callable[[str, str], float]] = {
    "exact": exact,
    "normalized_exact": normalized_exact,
    "token_f1": token_f1,
    "rouge_l": rouge_l,
    "edit": edit_ratio,
    "char_ngram": char_ngram,
}


def _dice(a: Sequence[str], b: Sequence[str]) -> float:
    if not a or not b:
        return float(a == b)
    return 2.0 * sum((Counter(a) & Counter(b)).values()) / (len(a) + len(b))


def _positions(items: Sequence[str]) -> dict[str, int]:
    """Return, for each item, an integer with a bit set at each of its positions."""
    positions: dict[str, int] = {}
    for index, item in enumerate(items):
        positions[item] = positions.get(item, 0) | 1 << index
    return positions


class SimilarityReward:
    """The similarity of the final text and the label by one of `METRICS`; with several references, the best counts.

    The label is a text or a list of texts. `ngram_size` is for `char_ngram`.
    """

    bounds = (0.0, 1.0)

    def __init__(self, *, metric: str = "token_f1", ngram_size: int = 3) -> None:
        where = type(self).__name__
        self._metric = one_of(f"{where}.metric", metric, METRICS)
        self._size = whole_number(f"{where}.ngram_size", ngram_size, low=1, high=16)

    async def grade(self, response: Response) -> RewardResult:
        """Return the similarity; its component has the metric's name.

        Raises:
            DataError: the label is not a reference.
            InfraError: the worker for long texts failed.
        """
        label = [response.label] if isinstance(response.label, str) else response.label
        if not isinstance(label, list | tuple) or not 1 <= len(label) <= MAX_REFERENCES:
            raise label_error(f"a text, or a list of 1 to {MAX_REFERENCES} texts", response.label)
        references = [reference for reference in label if isinstance(reference, str) and reference.strip()]
        if len(references) < len(label) or sum(map(len, references)) > MAX_CHARS:
            raise label_error(f"texts with something in them, of at most {MAX_CHARS} characters in all", response.label)
        answer = final_text(response.text, response.prompt)
        if not answer:
            detail = "the thinking has no end" if answer is None else ""
            return self._result(0.0, status=Status.NO_ANSWER, detail=detail)
        if answer in references:
            return self._result(1.0, extracted=shown(answer))
        start = answer[:MAX_CHARS]
        how = {"task": f"{__name__}:handle", "metric": self._metric, "size": self._size}
        request = {**how, "answer": start, "references": references}
        try:
            short = len(start) <= _INLINE_CHARS and len(start) * sum(map(len, references)) <= _INLINE_PRODUCT
            reply = handle(request) if short else await shared_pool().run(request, cpu_limit_s=_CPU_LIMIT_S)
        except WorkerTimeout as error:
            return self._result(0.0, status=Status.TIMEOUT, detail=str(error))
        return self._result(float(reply["value"]) * len(start) / len(answer), extracted=shown(answer))

    def _result(self, value: float, **more: Any) -> RewardResult:
        return RewardResult(value, score=value, components={self._metric: value}, **more)


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Return the best similarity to a reference; for long texts in a worker."""
    metric = METRICS[request["metric"]]
    size = (request["size"],) if request["metric"] == "char_ngram" else ()
    return {"value": max(metric(request["answer"], reference, *size) for reference in request["references"])}
