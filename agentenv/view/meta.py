"""What the page says about runs before it reads any episode: flags, metrics, tokenizer, files; and how two differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.errors import ConfigError, DataError
from agentenv.runs.mixture import source_name
from agentenv.view.panels import panels_json
from agentenv.view.redaction import Redaction
from agentenv.view.texts import TokenTexts
from agentenv.view.viewed import CONFIG, INDEX, METRICS, STEPS, TRAIN_METRICS, TRAJECTORIES, ViewedRun

if TYPE_CHECKING:
    from agentenv.compare.sides import By

Defaults = Callable[[str], Mapping[str, Any]]
"""Returns the default of each flag of `run` or `train`."""
MEASURES: tuple[By, ...] = ("reward", "score", "passed")
"""What runs are compared by."""
MAX_RUNS = 4
"""Runs of a file that are compared with each other."""
_FACTS = {"env", "agent_func_path", "data", "model", "engine", "out", "resume", "progress", "json", "log_level", "view"}
"""Flags that the page shows elsewhere, or that say nothing about the episodes."""


def run_meta(number: int, run: ViewedRun, texts: TokenTexts | str, defaults: Defaults | None = None) -> dict[str, Any]:
    """Return the answer of `/api/meta`; `texts` is the reason if there are none."""
    flags = run.flags
    usual = {} if defaults is None or not flags else defaults(run.kind)
    changed = [
        [name, json.dumps(value) if isinstance(value, list | dict) else str(value)]
        for name, value in flags.items()
        if name not in _FACTS and name in usual and value != usual[name] and value not in (None, [], {})
    ]
    env = flags.get("env") or []
    entries = env if isinstance(env, list) else [env]
    changed += [
        [f"env.{entry.get('name')}.{key}", json.dumps(value) if isinstance(value, list | dict) else str(value)]
        for entry in entries
        if isinstance(entry, dict)
        for key, value in entry.items()
        if key != "name" and (key, value) != ("weight", 1)
    ]
    name = source_name([json.dumps(each) if isinstance(each, dict) else str(each) for each in entries])
    source = name or flags.get("agent_func_path") or flags.get("remote_rm_url")
    document = run.training.read_json(CONFIG)
    config = (document or {}).get("config")
    if isinstance(graded := config.get("rescored") if isinstance(config, dict) else None, dict):
        source = f"{source}, {Path(str(graded.get('run'))).name} graded again"
        changed += [["reward", str(graded["reward"])]] if graded.get("reward") else []
    return {
        "run": number,
        "name": run.name,
        "path": run.path,
        "kind": run.kind,
        "is_writing": run.training.is_writing,
        "config": document,
        "metrics": run.read_json(METRICS),
        "env": source and str(source),
        "model": flags.get("model"),
        "changed_flags": changed,
        "tokenizer": {"error": texts}
        if isinstance(texts, str)
        else {"sha256": texts.sha256, "source": str(texts.path)},
        "sizes": {name: run.size(name) for name in (TRAJECTORIES, INDEX, TRAIN_METRICS, STEPS)},
        "panels": panels_json(),
    }


def compared(
    a: ViewedRun, b: ViewedRun, by: By, where: str | None = None, cluster: str | None = None
) -> dict[str, Any]:
    """Return the answer of `/api/diff`: a RunComparison as JSON.

    `cluster` is a key of the tasks' metadata, as of `agentenv diff --cluster`.

    Raises:
        ConfigError: the runs have no task in common.
        DataError: a run cannot be read.
    """
    from agentenv.compare import compare

    return compare(a.folder, b.folder, by=by, where=where, cluster=cluster).to_dict()


def comparisons(
    runs: Sequence[ViewedRun], where: str | None, redaction: Redaction, cluster: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the comparisons of a page that is one file: of two runs by all measures, of more of each two by reward.

    With `cluster` each also comes with the tasks that have the same value of this key as one unit.
    """
    numbers = [number for number, run in enumerate(runs) if not run.is_eval][:MAX_RUNS]
    measures = MEASURES if len(numbers) == 2 else MEASURES[:1]
    units = (None,) if cluster is None else (None, cluster)
    for (a, b), by, unit in product(combinations(numbers, 2), measures, units):
        try:
            value = compared(runs[a], runs[b], by, where, unit)
        except (ConfigError, DataError):  # no task has this measure in both
            continue
        yield {"a": a, "b": b, "by": by, "cluster": unit, "value": redaction.comparison(value)}
