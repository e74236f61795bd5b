"""The difference of two runs for the page: the numbers of `agentenv diff`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any, get_args

from agentenv.errors import ConfigError, DataError
from agentenv.view.redaction import Redaction
from agentenv.view.viewed import ViewedRun

MEASURES = ("reward", "score", "passed")
"""What runs are compared by."""
MAX_RUNS = 4
"""Runs of a file that are compared with each other."""


def compared(
    a: ViewedRun, b: ViewedRun, by: str = "reward", where: str | None = None, cluster: str | None = None
) -> dict[str, Any]:
    """Return the answer of `/api/diff`: a RunComparison as JSON.

    `cluster` is a key of the tasks' metadata, as of `agentenv diff --cluster`.

    Raises:
        ConfigError: `by` is unknown, or the runs have no task in common.
        DataError: a run cannot be read.
    """
    from agentenv.compare import compare
    from agentenv.compare.sides import By

    known = next((each for each in get_args(By) if each == by), None)
    if known is None:
        raise ConfigError(f"by: expected one of {', '.join(get_args(By))}, got {by[:60]!r}. Change it.")
    return compare(a.folder, b.folder, by=known, where=where, cluster=cluster).to_dict()


def comparisons(
    runs: Sequence[ViewedRun], where: str | None, redaction: Redaction, cluster: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the comparisons of a page that is one file: of two runs by all measures, of more of each two by reward.

    With `cluster` each also comes with the tasks that have the same value of this key as one unit.
    """
    numbers = [number for number, run in enumerate(runs) if not run.is_eval][:MAX_RUNS]
    measures = MEASURES if len(numbers) == 2 else ("reward",)
    units = (None,) if cluster is None else (None, cluster)
    for (a, b), by, unit in product(combinations(numbers, 2), measures, units):
        try:
            value = compared(runs[a], runs[b], by, where, unit)
        except (ConfigError, DataError):  # no task has this measure in both
            continue
        yield {"a": a, "b": b, "by": by, "cluster": unit, "value": redaction.comparison(value)}
