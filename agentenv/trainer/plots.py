"""Pictures of a training, drawn from its `metrics.jsonl`: `training.png`, and one PNG for each part under `plots/`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agentenv.errors import MissingDependency, RunStopped
from agentenv.trainer.journal import read_metrics

Rows = Sequence[Mapping[str, Any]]

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#9A9A9A"
"""Okabe and Ito's, which colour-blind people tell apart."""
_SMOOTH_FROM = 30
"""Curves of so many steps are drawn faintly, with their running mean over them."""
_STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.7,
    "lines.solid_joinstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",
}


class Curve(NamedTuple):
    """A key of metrics.jsonl and how it is drawn."""

    key: str
    label: str
    colour: str
    marker: str = ""
    """Drawn at every point: for what is measured now and then."""
    smooth: bool = True


def draw(folder: Path) -> list[Path]:
    """Draw a run's `metrics.jsonl`; gives the pictures, `training.png` first, or none where there are no numbers yet.

    Only what was measured is drawn. Readers see whole pictures, old or new.

    Raises:
        MissingDependency: matplotlib is not installed.
        DataError: `metrics.jsonl` is damaged.
        RunStopped: the disk is full or fails.
    """
    rows = read_metrics(folder)
    figure, style = _matplotlib()
    shown = {name: panel for name, (keys, panel) in PANELS.items() if any(_has(rows, key) for key in keys)}
    if not shown:
        return []
    with style(_STYLE):
        paths = [_picture(figure, rows, list(shown.values()), Path(folder) / "training.png")]
        for name, panel in shown.items():
            paths.append(_picture(figure, rows, [panel], Path(folder) / "plots" / f"{name}.png"))
    return paths


def _matplotlib() -> tuple[Any, Any]:
    try:
        import matplotlib
        from matplotlib.figure import Figure  # never pyplot: it would look for a display, and keep every figure
    except ImportError as error:
        raise MissingDependency(
            f"plots: expected matplotlib, got {error}. Install it: pip install matplotlib"
        ) from error
    return Figure, matplotlib.rc_context


def _picture(figure: Any, rows: Rows, panels: Sequence[Callable[[Any, Rows], None]], path: Path) -> Path:
    columns = min(3, len(panels)) if len(panels) <= 6 else 4
    lines = math.ceil(len(panels) / columns)
    width, height = (5.2 * columns, 3.5 * lines) if len(panels) > 1 else (6.6, 3.9)
    picture = figure(figsize=(width, height), dpi=120)
    # Margins in inches: a layout that is looked for would draw everything twice.
    picture.subplots_adjust(
        left=0.75 / width, right=1 - 0.7 / width, bottom=0.55 / height, top=1 - 0.4 / height, wspace=0.34, hspace=0.36
    )
    for number, panel in enumerate(panels, start=1):
        panel(picture.add_subplot(lines, columns, number), rows)
    return _save(picture, path)


def _save(picture: Any, path: Path) -> Path:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        picture.savefig(temporary, format="png")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunStopped(f"{path}: expected a picture written, got {error}. Make room on the disk.") from error
    return path


# --- the panels ----------------------------------------------------------------------------------------------------


def reward(axes: Any, rows: Rows) -> None:
    """What training optimises."""
    _curves(axes, rows, [Curve("rollout/reward", "training", BLUE), Curve("eval/reward", "held-out", RED, "o")])
    _finish(axes, rows, "Reward", "mean reward of an episode")


def score(axes: Any, rows: Rows) -> None:
    """How good episodes are, in training and held-out ones."""
    held_out = [Curve("eval/score", "held-out", RED, "o"), Curve("eval/pass@1", "held-out pass@1", PURPLE, "s")]
    if all(row.get("eval/pass@1", row.get("eval/score")) == row.get("eval/score") for row in rows):
        held_out = held_out[:1]
    _curves(axes, rows, [Curve("rollout/score", "training", BLUE), *held_out])
    _finish(axes, rows, "Score", "mean score of an episode (0–1)")


def times(axes: Any, rows: Rows) -> None:
    """Where the seconds of a step went, on top of each other."""
    parts = [(name, [_or_zero(value) for value in _values(rows, f"time/{name}_s")], colour) for name, colour in _TIMES]
    highest = _stacked(axes, rows, parts, [_or_zero(value) for value in _values(rows, "time/wall_s")], "other")
    speeds = [value for value in _values(rows, "throughput/samples_per_s") if math.isfinite(value)]
    speed = f"  ({sum(speeds) / len(speeds):.3g} samples/s)" if speeds else ""
    axes.set_ylim(0, 1.3 * highest or 1)  # room for the legend
    _finish(axes, rows, f"Time{speed}", "seconds of a train step")
    axes.legend(ncols=3, loc="upper left")


def episodes(axes: Any, rows: Rows) -> None:
    """Where the seconds of the episodes went: the engine, the environments' steps, and waiting for either."""
    parts = [
        (name, [_or_zero(value) for value in _values(rows, f"time/{name}_share")], colour) for name, colour in _SHARES
    ]
    _stacked(axes, rows, parts, [float(any(part[at] for _, part, _ in parts)) for at in range(len(rows))], "wait")
    axes.set_ylim(0, 1.3)  # room for the legend
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "25", "50", "75", "100"])
    _finish(axes, rows, "Episodes", "their seconds, % of all")
    axes.legend(ncols=3, loc="upper left")


def _stacked(
    axes: Any, rows: Rows, parts: Sequence[tuple[str, Sequence[float], str]], total: Sequence[float], rest: str
) -> float:
    """Parts (name, a value for each step, colour) on top of each other, then the rest of the total; the highest top."""
    edges = [edge for step in _steps(rows) for edge in (step - 0.5, step + 0.5)]
    named = [sum(values) for values in zip(*(part for _, part, _ in parts), strict=True)]
    missing = [max(0.0, whole - part) for whole, part in zip(total, named, strict=True)]
    below = [0.0] * len(rows)
    for name, values, colour in (*parts, (rest, missing, GREY)):
        if any(values):
            above = [low + value for low, value in zip(below, values, strict=True)]
            axes.fill_between(edges, _twice(below), _twice(above), color=colour, label=name, linewidth=0, alpha=0.85)
            below = above
    return max(below)


def kl(axes: Any, rows: Rows) -> None:
    """How far the policy moves: from the reference, in a step, and from what the engine computed."""
    _curves(axes, rows, _KL)
    if all(value > 0 or math.isnan(value) for curve in _KL for value in _values(rows, curve.key)):
        axes.set_yscale("log")
    _finish(axes, rows, "KL and mismatch", "nats per token")


def entropy(axes: Any, rows: Rows) -> None:
    """How undecided the policy is."""
    _curves(axes, rows, [Curve("train/entropy", "", BLUE)])
    axes.set_ylim(bottom=0)
    _finish(axes, rows, "Entropy", "nats per token")


def staleness(axes: Any, rows: Rows) -> None:
    """How far samples are behind the policy, and how many prompts were thrown away."""
    _curves(axes, rows, _STALENESS)
    axes.set_ylim(0, 1.25 * max(1.0, axes.get_ylim()[1]))  # room for the legend
    right = _right(axes, rows, Curve("rollout/rejection_rate", "rejected", GREY), "rejected prompts, % of all")
    if right is not None:
        right.set_ylim(0, 1.25)
        right.set_yticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "25", "50", "75", "100"])
    _finish(axes, rows, "Staleness", "policy updates behind")
    axes.legend(ncols=3, loc="upper left")


def throughput(axes: Any, rows: Rows) -> None:
    """Samples and tokens in a second."""
    _curves(axes, rows, [Curve("throughput/samples_per_s", "samples", BLUE)])
    axes.set_ylim(bottom=0)
    right = _right(axes, rows, Curve("throughput/tokens_per_s", "tokens (right)", ORANGE), "tokens per second")
    if right is not None:
        right.set_ylim(bottom=0)
    _finish(axes, rows, "Throughput", "samples per second")


def _right(axes: Any, rows: Rows, curve: Curve, label: str) -> Any:
    """A curve with an axis of its own on the right, which is given back; None where nothing of it was measured."""
    if not _has(rows, curve.key):
        return None
    right = axes.twinx()
    _curves(right, rows, [curve])
    right.set_ylabel(label, color=curve.colour)
    right.spines["right"].set_visible(True)
    right.grid(visible=False)
    axes.plot([], [], color=curve.colour, label=curve.label)  # for the legend, which is the left axis'
    return right


_TIMES = (("wait", ORANGE), ("train", BLUE), ("sync", RED), ("eval", GREEN), ("save", PURPLE))
_SHARES = (("generate", BLUE), ("step", ORANGE))
_KL = (
    Curve("train/kl", "to the reference", BLUE),
    Curve("train/approx_kl", "within a step", GREEN),
    Curve("train/logprob_diff", "|learner − engine|", ORANGE),
)
_STALENESS = (
    Curve("rollout/staleness_mean", "mean", BLUE),
    Curve("rollout/staleness_max", "max", ORANGE, smooth=False),
)

PANELS: dict[str, tuple[tuple[str, ...], Callable[[Any, Rows], None]]] = {
    "reward": (("rollout/reward", "eval/reward"), reward),
    "score": (("rollout/score", "eval/score", "eval/pass@1"), score),
    "time": (("time/wall_s", *(f"time/{name}_s" for name, _ in _TIMES)), times),
    "episodes": (tuple(f"time/{name}_share" for name, _ in _SHARES), episodes),
    "kl": (tuple(curve.key for curve in _KL), kl),
    "entropy": (("train/entropy",), entropy),
    "staleness": (tuple(curve.key for curve in _STALENESS), staleness),
    "throughput": (("throughput/samples_per_s",), throughput),
}
"""By the picture's name: what it needs one of, and how it is drawn."""


def _curves(axes: Any, rows: Rows, curves: Sequence[Curve]) -> None:
    for curve in curves:
        points = [(step, value) for step, value in zip(_steps(rows), _values(rows, curve.key), strict=True)]
        if not any(math.isfinite(value) for _, value in points):
            continue
        if curve.marker or len(points) < 4:  # now and then: joined over the steps between; a line of one point is none
            points = [(step, value) for step, value in points if math.isfinite(value)]
        xs, ys = [step for step, _ in points], [value for _, value in points]
        marker = curve.marker or ("o" if len(points) < 4 else "")
        if len(points) < _SMOOTH_FROM or curve.marker or not curve.smooth:
            axes.plot(xs, ys, color=curve.colour, label=curve.label, marker=marker, markersize=4)
        else:
            axes.plot(xs, ys, color=curve.colour, alpha=0.28, linewidth=1)
            axes.plot(xs, _smooth(ys), color=curve.colour, label=curve.label)


def _finish(axes: Any, rows: Rows, title: str, label: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("train step")
    axes.set_ylabel(label)
    first, last = rows[0]["step"], rows[-1]["step"]
    room = max(0.5, 0.02 * (last - first))
    axes.set_xlim(first - room, last + room)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if any(axes.get_legend_handles_labels()[1]):
        axes.legend()


def _has(rows: Rows, key: str) -> bool:
    return any(math.isfinite(value) for value in _values(rows, key))


def _steps(rows: Rows) -> list[int]:
    return [row["step"] for row in rows]


def _values(rows: Rows, key: str) -> list[float]:
    return [math.nan if (value := row.get(key)) is None else float(value) for row in rows]


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _twice(values: Sequence[float]) -> list[float]:
    return [value for value in values for _ in range(2)]


def _smooth(values: Sequence[float]) -> list[float]:
    """The mean of the finite values around each, over about a tenth of the curve."""
    half = max(1, len(values) // 20)
    means = []
    for index in range(len(values)):
        near = [value for value in values[max(0, index - half) : index + half + 1] if math.isfinite(value)]
        means.append(sum(near) / len(near) if math.isfinite(values[index]) else math.nan)
    return means
