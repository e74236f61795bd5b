"""The plot of a training run, `training.png`, drawn from its `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentenv.errors import MissingDependency, RunStopped
from agentenv.training.logs.journal import read_metrics
from agentenv.view.panels import BY_ENVIRONMENT, PANELS, PREFIXES

Rows = Sequence[Mapping[str, Any]]


def draw(folder: Path) -> Path | None:
    """Draw `training.png` from a run's `metrics.jsonl` and return its path; None before the first numbers.

    The file is replaced in one move, so that readers never see half of it.

    Raises:
        MissingDependency: matplotlib is not installed.
        DataError: `metrics.jsonl` is damaged.
        RunStopped: the disk is full or fails.
    """
    rows = read_metrics(folder)
    try:
        import matplotlib.figure  # not pyplot, which would look for a display and keep every figure
    except ImportError as error:
        raise MissingDependency(
            f"plots: expected matplotlib, got {error}. Install it: pip install 'agentenv-rl[train]'"
        ) from error
    panels = PANELS | panels_by_environment(rows)
    titles = [title for title, (_, keys) in panels.items() if any(_points(rows, key) for key in _labels(rows, keys))]
    if not titles:
        return None
    columns = min(3, len(titles))
    lines = math.ceil(len(titles) / columns)
    figure = matplotlib.figure.Figure(figsize=(5.2 * columns, 3.5 * lines), dpi=120, layout="constrained")
    for number, title in enumerate(titles, start=1):
        _panel(figure.add_subplot(lines, columns, number), rows, title)
    path = Path(folder) / "training.png"
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(temporary, format="png")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunStopped(f"{path}: expected to write a picture, got {error}. Make room on the disk.") from error
    return path


def panels_by_environment(rows: Rows) -> dict[str, tuple[str, dict[str, str]]]:
    """Return panels of the environments of a mixture, and of several held-out sets; empty without them."""
    panels = {}
    for what, prefix in PREFIXES.items():
        for title, (label, end) in BY_ENVIRONMENT.items():
            keys = sorted({key for row in rows for key in row if key.startswith(prefix) and key.endswith(f"/{end}")})
            labels = {key: key.removeprefix(prefix).removesuffix(f"/{end}") for key in keys}
            panels[f"{title} by {what}"] = (label, {key: name for key, name in labels.items() if "/" not in name})
    return panels


def _panel(axes: Any, rows: Rows, title: str) -> None:
    label, keys = (PANELS | panels_by_environment(rows))[title]
    for key, name in _labels(rows, keys).items():
        if points := _points(rows, key):
            marker = "o" if len(points) < 4 or key.startswith("eval/") else ""
            axes.plot(*zip(*points, strict=True), label=name, marker=marker, markersize=4)
    axes.set(title=title, xlabel="train step", ylabel=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(color="#E6E6E6")
    axes.legend(frameon=False)


def _labels(rows: Rows, keys: Mapping[str, str]) -> dict[str, str]:
    """Return the label of each key, with the keys of all k instead of one that ends with @."""
    labels: dict[str, str] = {}
    for key, name in keys.items():
        if key.endswith("@"):
            ks = sorted({int(each.removeprefix(key)) for row in rows for each in row if each.startswith(key)})
            labels |= {f"{key}{k}": f"{name}{k}" for k in ks}
        else:
            labels[key] = name
    return labels


def _points(rows: Rows, key: str) -> list[tuple[int, float]]:
    """Return (step, value) for each row that has a finite value."""
    values = [(row["step"], row.get(key)) for row in rows]
    return [(step, value) for step, value in values if value is not None and math.isfinite(value)]
