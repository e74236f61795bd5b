"""What a reward server counts, in Prometheus' text format 0.0.4."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0)
"""Upper bounds of the latency histogram's buckets, in seconds."""
_PREFIX = "agentenv_rm"
_Sample = tuple[str, Mapping[str, str], float]
"""What follows a metric's name, its labels, and its value."""


class Meters:
    """Counters of one server."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """Answers by path and status."""
        self.conversations: Counter[str] = Counter({"scored": 0, "failed": 0, "refused": 0, "cancelled": 0})
        """By what became of them: a score, an InfraError, a DataError, or a client that went away."""
        self.truncated = 0
        self.turned_away = 0
        """Conversations that there was no room for; a request that was not read yet counts as one."""
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def answered(self, path: str, status: int, seconds: float, *, timed: bool) -> None:
        """Count an answer; `timed`: its seconds are for the histogram."""
        self.requests[path, status] += 1
        if timed:
            self._buckets[bisect_left(BOUNDS_S, seconds)] += 1
            self._sum_s += seconds

    def text(self, scorer: Any, *, waiting: int, ready: bool) -> str:
        """All of it, with what the scorer itself counts."""
        by_status = [("", {"path": p, "status": str(s)}, float(n)) for (p, s), n in sorted(self.requests.items())]
        by_result = [("", {"result": result}, float(num)) for result, num in self.conversations.items()]
        lines = [
            *_metric("requests_total", "counter", "Answered HTTP requests.", by_status),
            *_metric("conversations_total", "counter", "Conversations by what became of them.", by_result),
            *_metric("truncated_total", "counter", "Conversations that were cut.", [("", {}, float(self.truncated))]),
            *_metric(
                "turned_away_total", "counter", "Conversations answered 429.", [("", {}, float(self.turned_away))]
            ),
            *_metric("waiting", "gauge", "Conversations without an answer yet.", [("", {}, float(waiting))]),
            *_metric("ready", "gauge", "1 once the model is loaded, until the stop.", [("", {}, float(ready))]),
            *_metric("request_seconds", "histogram", "Time to an answer with rewards.", self._histogram()),
            *_batches(scorer),
            *_own(scorer),
        ]
        return "\n".join(lines) + "\n"

    def _histogram(self) -> Iterable[_Sample]:
        total = 0
        for bound, num in zip((*(f"{each:g}" for each in BOUNDS_S), "+Inf"), self._buckets, strict=True):
            total += num
            yield "_bucket", {"le": bound}, float(total)
        yield "_sum", {}, self._sum_s
        yield "_count", {}, float(total)


def _metric(name: str, kind: str, says: str, samples: Iterable[_Sample]) -> list[str]:
    lines = [f"# HELP {_PREFIX}_{name} {says}", f"# TYPE {_PREFIX}_{name} {kind}"]
    for suffix, labels, value in samples:
        shown = ",".join(f'{key}="{text}"' for key, text in labels.items())
        lines.append(f"{_PREFIX}_{name}{suffix}{f'{{{shown}}}' if shown else ''} {value!r}")
    return lines


def _batches(scorer: Any) -> list[str]:
    """Batches and their sizes, of scorers that form them here."""
    batcher = getattr(scorer, "batcher", None)
    if batcher is None:
        return []
    num, items = float(batcher.num_batches), float(batcher.num_scored)
    return [
        *_metric("batches_total", "counter", "Calls of the model.", [("", {}, num)]),
        *_metric(
            "batch_size", "summary", "Scored conversations of a call.", [("_sum", {}, items), ("_count", {}, num)]
        ),
    ]


def _own(scorer: Any) -> list[str]:
    """What `scorer.metrics()` gives, under names that Prometheus takes."""
    given: Mapping[str, float] = scorer.metrics() if hasattr(scorer, "metrics") else {}
    return [
        line
        for name, value in given.items()
        for line in _metric(
            "model_" + re.sub(r"\W", "_", name.removeprefix("rm/")), "gauge", "As the scorer says.", [("", {}, value)]
        )
    ]
