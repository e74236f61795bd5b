r"""Use a regular expression as a reward. It runs on a model's text, so a worker process runs it, which can be killed.

Example:
    >>> await RegexReward(pattern=r"(?m)^- ", how="count", min_count=3, max_count=5).grade(Response("- a\n- b\n- c"))
    RewardResult(reward=1.0, score=1.0, …, components={'matched': 1.0, 'count': 3.0}, extracted='- ', …)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentenv._util.brief import brief
from agentenv.core.arguments import label_error, number, one_of, shown, whole_number
from agentenv.errors import ConfigError
from agentenv.rewards.rules.length import PARTS, part_of
from agentenv.rewards.rules.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.rewards.workers.pool import WorkerTimeout, shared_pool

MAX_CHARS = 1 << 18
"""Longer texts are rejected: status PARSE_ERROR."""
WAYS = ("search", "fullmatch", "count")
CPU_LIMIT_S = 1.0
MIN_CPU_LIMIT_S = 0.01
TOO_LONG: Mapping[str, Any] = {
    "status": Status.PARSE_ERROR, "detail": f"the text is longer than {MAX_CHARS} characters",
}  # fmt: skip
"""What a result says of a text that no worker reads."""
_NOT_FOUND = {"matched": 0.0, "count": 0.0}


class PassFail:
    """A reward with one value for texts that pass, and another for those that fail."""

    def __init__(self, passed: float, failed: float) -> None:
        self._passed = number(f"{type(self).__name__}.passed", passed)
        self._failed = number(f"{type(self).__name__}.failed", failed)
        self.bounds = (min(self._passed, self._failed), max(self._passed, self._failed))

    def _result(self, passed: bool, components: Mapping[str, float], **more: Any) -> RewardResult:
        reward = self._passed if passed else self._failed
        return RewardResult(reward, score=float(passed), components=dict(components), **more)


def search_in_worker(request: dict[str, Any]) -> dict[str, Any]:
    """Return the number of matches in a text, and the first group of the first match, or all of it; in a worker.

    Matches do not overlap; unless they are counted there is at most one.

    Raises:
        DataError: the pattern is not a regular expression.
    """
    try:
        pattern = re.compile(request["pattern"])
    except (re.error, RecursionError, OverflowError) as error:
        raise label_error(f"a regular expression ({brief(str(error))})", request["pattern"]) from error
    text = request["text"]
    first = pattern.fullmatch(text) if request["how"] == "fullmatch" else pattern.search(text)
    if first is None:
        return {"count": 0, "first": None}
    count = sum(1 for _ in pattern.finditer(text)) if request["how"] == "count" else 1
    captured = first[1] if first.lastindex else first[0]
    return {"count": count, "first": shown(captured or "")}


class RegexReward(PassFail):
    """`passed` if the text matches, else `failed`.

    `how`: the pattern is found somewhere (`search`), is all of the text (`fullmatch`), or is found `min_count` to
    `max_count` times (`count`). Without a pattern here, the label is the pattern. `part` is the searched text: the
    `final` text after the thinking, the first `thought`, or `all`. Flags are part of the pattern: `(?is)`. If matching
    takes more than `cpu_limit_s`, the text fails.
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
        super().__init__(passed, failed)
        where = type(self).__name__
        if not isinstance(pattern, str | None):
            raise ConfigError(f"{where}.pattern: expected a regular expression, got {pattern!r}.")
        try:
            re.compile(pattern or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(
                f"{where}.pattern: expected a regular expression, got {pattern!r:.200}: {brief(str(error))}."
            ) from error
        self._pattern = pattern
        self._how = one_of(f"{where}.how", how, WAYS)
        self._part = one_of(f"{where}.part", part, PARTS)
        self._min = whole_number(f"{where}.min_count", min_count)
        self._max = None if max_count is None else whole_number(f"{where}.max_count", max_count, low=self._min)
        if how != "count" and (min_count, max_count) != (1, None):
            raise ConfigError(f"{where}.how: expected 'count' with min_count or max_count, got {how!r}. Change one.")
        self._cpu_limit_s = number(f"{where}.cpu_limit_s", cpu_limit_s, low=MIN_CPU_LIMIT_S)

    async def grade(self, response: Response) -> RewardResult:
        """Return the result; TIMEOUT if the pattern takes too long on this text.

        Raises:
            DataError: the pattern is missing.
            InfraError: the worker failed.
        """
        pattern = response.label if self._pattern is None else self._pattern
        if not isinstance(pattern, str):
            raise label_error("a regular expression", pattern)
        if self._part == "final" and final_text(response.text, response.prompt) is None:
            return self._result(False, _NOT_FOUND, status=Status.NO_ANSWER, detail="the thinking has no end")
        text = part_of(response.text, self._part, response.prompt)
        if len(text) > MAX_CHARS:
            return self._result(False, _NOT_FOUND, **TOO_LONG)
        request = {"task": f"{__name__}:search_in_worker", "pattern": pattern, "text": text, "how": self._how}
        try:
            reply = await shared_pool().run(request, cpu_limit_s=self._cpu_limit_s)
        except WorkerTimeout as error:
            return self._result(False, _NOT_FOUND, status=Status.TIMEOUT, detail=str(error))
        count = int(reply["count"])
        matched = self._min <= count and (self._max is None or count <= self._max)
        return self._result(matched, {"matched": float(matched), "count": float(count)}, extracted=reply["first"])
