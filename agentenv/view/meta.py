"""What the page says about a run before it reads any episode: flags, metrics, tokenizer, files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from agentenv.view.panels import panels_json
from agentenv.view.texts import TokenTexts
from agentenv.view.viewed import CONFIG, INDEX, METRICS, STEPS, TRAIN_METRICS, TRAJECTORIES, ViewedRun

Defaults = Callable[[str], Mapping[str, Any]]
"""Returns the default of each flag of `run` or `train`."""
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
    source = flags.get("env") or flags.get("agent_func_path") or flags.get("remote_rm_url")
    return {
        "run": number,
        "name": run.name,
        "path": run.path,
        "kind": run.kind,
        "is_writing": run.training.is_writing,
        "config": run.training.read_json(CONFIG),
        "metrics": run.read_json(METRICS),
        "env": ", ".join(map(str, source)) if isinstance(source, list) else source and str(source),
        "model": flags.get("model"),
        "changed_flags": changed,
        "tokenizer": {"error": texts}
        if isinstance(texts, str)
        else {"sha256": texts.sha256, "source": str(texts.path)},
        "sizes": {name: run.size(name) for name in (TRAJECTORIES, INDEX, TRAIN_METRICS, STEPS)},
        "panels": panels_json(),
    }
