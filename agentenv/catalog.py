"""What `agentenv list` shows: environments, data and models, each with one line and where it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

from agentenv.errors import ConfigError
from agentenv.loading import builtin_datasets, installed_envs, load_env, resolve_model, shipped_models


class Row(TypedDict):
    """One thing that is installed."""

    kind: str
    """env, data or model."""
    name: str
    summary: str
    origin: str


def catalog() -> list[Row]:
    """Everything that a name on the command line can mean here."""
    rows: list[Row] = []
    for entry in installed_envs().values():
        try:
            summary = _first_line(load_env(entry.name).__doc__)
        except ConfigError as error:
            summary = f"cannot be imported: {error}"
        rows.append(
            {"kind": "env", "name": entry.name, "summary": summary, "origin": f"{entry.distribution} ({entry.value})"}
        )
    for name, path in sorted(builtin_datasets().items()):
        rows.append({"kind": "data", "name": name, "summary": f"{_num_lines(path)} tasks", "origin": str(path)})
    for name in shipped_models():
        rows.append({"kind": "model", "name": name, "summary": _model_summary(name), "origin": resolve_model(name)})
    return rows


def _first_line(doc: str | None) -> str:
    return (doc or "no description").strip().splitlines()[0]


def _num_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _model_summary(name: str) -> str:
    folder = Path(resolve_model(name))
    config = json.loads((folder / "config.json").read_text())
    size_mb = (folder / "model.safetensors").stat().st_size / 1e6
    return f"{config.get('model_type')}, {config.get('num_hidden_layers')} layers, {size_mb:.1f} MB"
