"""`agentenv list`: the installed environments, data and models, each with a line and its origin."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypedDict

from rich.table import Table
from rich.text import Text

from agentenv._util.plurals import counted
from agentenv._util.terminal import wide_console
from agentenv.cli.flags import parse, print_json
from agentenv.engines.models import resolve_model, shipped_models
from agentenv.episode.registry import GUESTS, load_env, offered_datasets, offered_envs
from agentenv.errors import ConfigError

_PIPE_COLUMNS = 10_000


@dataclass(frozen=True)
class ListConfig:
    """List the environments, data and models that are installed, or the environments of another library."""

    ALIASES: ClassVar[Mapping[str, str]] = {"from": "library"}

    library: str | None = None
    """List the environments that --env KIND:NAME loads from this library, such as textarena."""
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
    """Print a table, or JSON, of what is installed, or of what a library has."""
    config = parse(ListConfig, "list", args)
    rows = catalog() if config.library is None else guest_catalog(config.library)
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


def guest_catalog(kind: str) -> list[Row]:
    """Return a row for every environment that `--env KIND:NAME` loads from a library.

    Raises:
        ConfigError: no such kind.
        MissingDependency: the library is not installed.
    """
    if kind not in GUESTS:
        raise ConfigError(f"--from: expected one of {', '.join(GUESTS)}, got {kind!r}. Choose one of them.")
    names: Mapping[str, str] = importlib.import_module(GUESTS[kind]).names()
    return [
        {"kind": "env", "name": f"{kind}:{name}", "summary": summary, "origin": kind} for name, summary in names.items()
    ]


def catalog() -> list[Row]:
    """Return a row for every name that the command line accepts here, and one for each package that offers it."""
    rows: list[Row] = []
    for entry in offered_envs():
        try:
            summary = (load_env(entry.value).__doc__ or "no description").strip().splitlines()[0]
        except ConfigError as error:
            summary = f"cannot be imported: {error}"
        rows.append(
            {"kind": "env", "name": entry.name, "summary": summary, "origin": f"{entry.distribution} ({entry.value})"}
        )
    for name, path in sorted(offered_datasets()):
        try:
            with path.open("rb") as file:
                summary = counted(sum(1 for _ in file), "task")
        except OSError as error:
            summary = f"cannot be read: {error.strerror}"
        rows.append({"kind": "data", "name": name, "summary": summary, "origin": str(path)})
    for name in shipped_models():
        folder = Path(resolve_model(name))
        config = json.loads((folder / "config.json").read_text())
        size_mb = (folder / "model.safetensors").stat().st_size / 1e6
        summary = f"{config.get('model_type')}, {config.get('num_hidden_layers')} layers, {size_mb:.1f} MB"
        rows.append({"kind": "model", "name": name, "summary": summary, "origin": str(folder)})
    return rows
