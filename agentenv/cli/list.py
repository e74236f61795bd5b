"""`agentenv list`: the installed environments, data and models, each with a line and its origin."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from rich.table import Table
from rich.text import Text

from agentenv.cli.flags import parse, print_json
from agentenv.engines.models import resolve_model, shipped_models
from agentenv.episode.registry import builtin_datasets, installed_envs, load_env
from agentenv.errors import ConfigError
from agentenv.runs.display.report import wide_console

_PIPE_COLUMNS = 10_000


@dataclass(frozen=True)
class ListConfig:
    """List the environments, data and models that are installed."""

    json: bool = False
    """Print JSON."""


class Row(TypedDict):
    """An installed environment, dataset or model."""

    kind: str
    """env, data or model."""
    name: str
    summary: str
    origin: str


def list_installed(args: Sequence[str]) -> int:
    """Print a table, or JSON, of what is installed."""
    config = parse(ListConfig, "list", args)
    rows = catalog()
    if config.json:
        print_json(rows)
        return 0
    table = Table("kind", "name", "what it is", "from", box=None, header_style="bold")
    for row in rows:
        table.add_row(row["kind"], row["name"], Text(row["summary"]), Text(row["origin"], overflow="fold"))
    console = wide_console()
    if not console.is_terminal:  # what reads it wants paths in one piece
        console.width = _PIPE_COLUMNS
    console.print(table)
    return 0


def catalog() -> list[Row]:
    """Return a row for every name that the command line accepts here."""
    rows: list[Row] = []
    for entry in installed_envs().values():
        try:
            summary = (load_env(entry.name).__doc__ or "no description").strip().splitlines()[0]
        except ConfigError as error:
            summary = f"cannot be imported: {error}"
        rows.append(
            {"kind": "env", "name": entry.name, "summary": summary, "origin": f"{entry.distribution} ({entry.value})"}
        )
    for name, path in sorted(builtin_datasets().items()):
        with path.open("rb") as file:
            num_tasks = sum(1 for _ in file)
        rows.append({"kind": "data", "name": name, "summary": f"{num_tasks} tasks", "origin": str(path)})
    for name in shipped_models():
        folder = Path(resolve_model(name))
        config = json.loads((folder / "config.json").read_text())
        size_mb = (folder / "model.safetensors").stat().st_size / 1e6
        summary = f"{config.get('model_type')}, {config.get('num_hidden_layers')} layers, {size_mb:.1f} MB"
        rows.append({"kind": "model", "name": name, "summary": summary, "origin": str(folder)})
    return rows
