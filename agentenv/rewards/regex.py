r"""A regular expression as a reward: it runs on a model's text, so it runs where it can be stopped.

Example:
    >>> await RegexReward(pattern=r"(?m)^- ", how="count", min_count=3, max_count=5).grade(Response("- a\n- b\n- c"))
    RewardResult(reward=1.0, score=1.0, …, components={'matched': 1.0, 'count': 3.0}, extracted='- ', …)
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from agentenv.errors import ConfigError
from agentenv.rewards._arguments import label_error, number, one_of, shown, whole_number
from agentenv.rewards.length import PARTS, part_of
from agentenv.rewards.pool import WorkerTimeout, shared_pool
from agentenv.rewards.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status

MAX_CHARS = 1 << 18
"""Longer texts are refused: status PARSE_ERROR."""
WAYS = ("search", "fullmatch", "count")
CPU_LIMIT_S = 1.0
MIN_CPU_LIMIT_S = 0.01


class Found(NamedTuple):
    """What a pattern found."""

    num_matches: int
    """Matches that do not overlap; at most one unless they were counted."""
    first: str | None
    """The first group of the first match, or all of it where it has none."""


def compiled(where: str, pattern: object) -> str:
    """The pattern, which Python can compile.

    Raises:
        ConfigError: it cannot.
    """
    if not isinstance(pattern, str):
        raise ConfigError(f"{where}: expected a regular expression, got {pattern!r}. Correct the argument.")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{where}: expected a regular expression, got {pattern!r}: {error}. Correct it.") from error
    return pattern


async def find(pattern: str, text: str, how: str, *, cpu_limit_s: float = CPU_LIMIT_S) -> Found:
    """What `pattern` finds in a text, in a worker process.

    Raises:
        WorkerTimeout: it took more than `cpu_limit_s`.
        DataError: it is no regular expression.
        InfraError: the worker failed.
    """
    request = {"task": "regex", "pattern": pattern, "text": text, "how": how}
    reply = await shared_pool().run(request, cpu_limit_s=cpu_limit_s)
    return Found(int(reply["count"]), reply["first"])


def search_in_worker(request: dict[str, Any]) -> dict[str, Any]:
    """In a worker: what `find` asks for.

    Raises:
        DataError: the pattern is no regular expression.
    """
    try:
        pattern = re.compile(request["pattern"])
    except (re.error, RecursionError, OverflowError) as error:
        raise label_error(f"a regular expression ({error})", request["pattern"]) from error
    text = request["text"]
    first = pattern.fullmatch(text) if request["how"] == "fullmatch" else pattern.search(text)
    if first is None:
        return {"count": 0, "first": None}
    count = sum(1 for _ in pattern.finditer(text)) if request["how"] == "count" else 1
    captured = first[1] if first.lastindex else first[0]
    return {"count": count, "first": shown(captured or "")}


class RegexReward:
    """`passed` if the text matches, else `failed`.

    `how`: the pattern is found somewhere (`search`), is all of the text (`fullmatch`), or is found `min_count` to
    `max_count` times (`count`). The pattern is the label where none is given here. `part` is what it is looked for in:
    the `final` text after the thinking, the first `thought`, or `all`. Flags stand in the pattern: `(?is)`. One that
    computes longer than `cpu_limit_s` is a failure of the text.
    """

    def __init__(
        self,
        *,
        pattern: str | None = None,
        how: str = "search",
        part: str = "final",
        min_count: int = 1,
        max_count: int | None = None,
        passed: float = 1.0,
        failed: float = 0.0,
        cpu_limit_s: float = CPU_LIMIT_S,
    ) -> None:
        where = type(self).__name__
        self._pattern = None if pattern is None else compiled(f"{where}.pattern", pattern)
        self._how = one_of(f"{where}.how", how, WAYS)
        self._part = one_of(f"{where}.part", part, PARTS)
        self._min = whole_number(f"{where}.min_count", min_count)
        self._max = None if max_count is None else whole_number(f"{where}.max_count", max_count, low=self._min)
        if how != "count" and (min_count, max_count) != (1, None):
            raise ConfigError(f"{where}.how: expected 'count' with min_count or max_count, got {how!r}. Change one.")
        self._cpu_limit_s = number(f"{where}.cpu_limit_s", cpu_limit_s, low=MIN_CPU_LIMIT_S)
        self._passed, self._failed = number(f"{where}.passed", passed), number(f"{where}.failed", failed)

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and the higher one of `passed` and `failed`."""
        return min(self._passed, self._failed), max(self._passed, self._failed)

    async def grade(self, response: Response) -> RewardResult:
        """Whether it matches; TIMEOUT where the pattern runs away on this text.

        Raises:
            DataError: there is no pattern.
            InfraError: the worker failed.
        """
        pattern = response.label if self._pattern is None else self._pattern
        if not isinstance(pattern, str):
            raise label_error("a regular expression", pattern)
        if self._part == "final" and final_text(response.text) is None:
            return self._result(0, status=Status.NO_ANSWER, detail="the thinking was not ended")
        text = part_of(response.text, self._part)
        if len(text) > MAX_CHARS:
            return self._result(0, status=Status.PARSE_ERROR, detail=f"the text is longer than {MAX_CHARS} characters")
        try:
            found = await find(pattern, text, self._how, cpu_limit_s=self._cpu_limit_s)
        except WorkerTimeout as error:
            return self._result(0, status=Status.TIMEOUT, detail=str(error))
        return self._result(found.num_matches, matched=self._fits(found.num_matches), extracted=found.first)

    def _fits(self, count: int) -> bool:
        return self._min <= count and (self._max is None or count <= self._max)

    def _result(self, count: int, *, matched: bool = False, **more: Any) -> RewardResult:
        components = {"matched": float(matched), "count": float(count)}
        return RewardResult(
            self._passed if matched else self._failed, score=float(matched), components=components, **more
        )
