"""A run in a notebook: its results and the episodes of its first task, as static HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from agentenv._util.terminal import safe
from agentenv.core.trajectory import Trajectory
from agentenv.runs.display.conversation import number_text
from agentenv.runs.display.report import result_rows
from agentenv.runs.metrics import Metrics
from agentenv.runs.records.tables import episode_row

_CHARS = 400
"""Maximum length of a text."""
_MAX_EPISODES, _MAX_SEEN = 16, 512
"""Maximum number of episodes to show, and to look at for them."""


def run_html(trajectories: Sequence[Trajectory], metrics: Metrics, out: Path | None) -> str:
    """Return the results and the episodes of the first task. All that models said is escaped."""
    parts = [_table("Result", (), result_rows(metrics))]
    if trajectories:
        first = trajectories[0]
        near = islice(trajectories, _MAX_SEEN)  # the others need not be read
        group = [each for each in near if each.group_id == first.group_id]
        rows = [
            (
                each.episode_id,
                number_text(each.reward),
                each.stop_reason.value if each.stop_reason else "",
                str(len(each.turns)),
                each.turns[-1].action if each.turns else "",
            )
            for each in group[:_MAX_EPISODES]
        ]
        title = f"Task {first.task.task_id}: {episode_row(first)['prompt']}"
        parts.append(_table(title, ("episode", "reward", "stop reason", "turns", "last action"), rows))
    if out is not None:
        parts.append(f"<p><code>{_text(f'agentenv view {out}')}</code>, or <code>run.view()</code></p>")
    return "\n".join(parts)


def _table(title: str, names: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in names)
    lines = ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>\n" for line in [*([head] if head else []), *lines])
    return f"<table>\n<caption>{_text(title)}</caption>\n{body}</table>"


def _text(value: str) -> str:
    cut = value if len(value) <= _CHARS else f"{value[:_CHARS]}…"
    return html.escape(safe(cut)).replace("\n", "<br>")
