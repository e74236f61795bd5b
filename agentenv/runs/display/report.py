"""The header and the final table of `agentenv run`, its results in a notebook, and the streams to print on."""

from __future__ import annotations

import contextlib
import html
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from agentenv._util.estimates import Estimate
from agentenv._util.plurals import counted, decimal, histogram
from agentenv._util.terminal import safe
from agentenv.core.trajectory import Trajectory
from agentenv.runs.config import RunConfig
from agentenv.runs.display.conversation import number_text
from agentenv.runs.display.progress import clock
from agentenv.runs.metrics import Metrics, Summary
from agentenv.runs.records.tables import episode_row
from agentenv.sandbox.types import Isolation

_ERROR_CHARS = 500
_REASON_CHARS = 150
_CELL_CHARS = 400
"""Maximum length of a text in a notebook."""
_MIN_CORRELATED = 10
"""Episodes below which no correlation is shown: two points always lie on a line."""
_MAX_EPISODES, _MAX_SEEN = 16, 512
"""Maximum number of episodes to show in a notebook, and to look at for them."""


class FailureKinds:
    """Describes the first failed episode of each kind: the others would repeat its line."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()

    def first(self, summary: Summary) -> str:
        """Return a line about the episode if it failed, and is the first with this error at this place; else ""."""
        kind = summary.error_type, summary.error_place
        if summary.error_kind is None or kind in self._known:
            return ""
        self._known.add(kind)
        message = " ".join(summary.error_message.split())[:_ERROR_CHARS]
        place = f" ({summary.error_place})" if summary.error_place else ""
        return safe(f"{summary.episode_id} failed ({summary.error_kind}): {summary.error_type}: {message}{place}")


def header(config: RunConfig, facts: Mapping[str, str]) -> Table:
    """Return a table of the facts found at the start and the flags that differ from their defaults."""
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(Text(name, style="bold"), Text(value))
    in_header = {"env", "agent_func_path", "data", "model", "engine", "out", "resume", "progress", "json"}
    defaults = RunConfig(env=("_",)).to_dict()
    changed = {
        k: v for k, v in config.to_dict().items() if k not in in_header and v != defaults[k] and v not in (None, [])
    }
    if changed:
        grid.add_row(Text("flags", style="bold"), Text("  ".join(f"--{k} {v}" for k, v in changed.items())))
    return grid


def final_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of results, each with its name."""
    table = Table(title="Result", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(safe(name)), Text(safe(value)))
    return table


def environments_table(environments: Mapping[str, Metrics]) -> Table:
    """Return a table with a row for each environment of a mixture."""
    table = Table(title="Environments", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(style="bold", overflow="fold")
    for name in ("tasks", "failed", "reward", "score", "pass@1", "spread", "turns", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, m in environments.items():
        means = (m.reward.mean, m.score.mean, m.pass_at_k["1"].mean, m.hygiene.std_in_group)
        length = m.tokens.num_action / m.num_episodes if m.num_episodes and not m.tokens.num_uncounted else None
        cells = [_number(value, ".3f") for value in means] + [_number(m.turns_mean, ".2f"), _number(length, ".0f")]
        table.add_row(name, str(m.num_tasks), str(m.num_infra_errors + m.num_env_errors), *cells)
    return table


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def result_rows(m: Metrics, *, is_priced: bool = False) -> list[tuple[str, str]]:
    """Return name and text of episodes, reward, score, pass@k, turns, tokens, time, stop reasons, errors and others.

    With `is_priced`, for --prices, the cost of answers without counts is unknown.
    """
    missing = f" of {m.num_episodes + m.num_missing} planned" if m.num_missing else ""
    failed = m.num_infra_errors + m.num_env_errors
    ends = [f"{m.num_rewarded} rewarded", *([f"{failed} failed"] if failed else [])]
    if num_left := m.num_no_reward - failed:
        ends.append(f"{num_left} ended without a reward")
    size = f"{counted(m.num_tasks, 'task')} × {m.num_samples}"
    rows = [
        ("episodes", f"{m.num_episodes}{missing}  ({size}; {', '.join(ends)})"),
        ("reward", _estimate(m.reward)),
        ("score", _estimate(m.score)),
    ]
    # Up to 8 samples show every k; more show 1, 2, 4 … and the last. metrics.json has all.
    listed = [k for k in m.pass_at_k if m.num_samples <= 8 or int(k) & (int(k) - 1) == 0 or int(k) == m.num_samples]
    rows += [(f"pass@{k}", _estimate(m.pass_at_k[k])) for k in listed if m.pass_at_k[k].mean is not None]
    if m.turns_mean is not None:
        rows.append(("turns", f"mean {m.turns_mean:.2f}, max {m.turns_max}"))
    if m.num_cut:
        rows.append(("cut", f"{counted(m.num_cut, 'action')}, by a limit of tokens"))
    if set(m.bridges) - {"exact", "text", "messages"}:  # actions that did not end as in the template
        rows.append(("replies after", histogram(m.bridges)))
    t = m.time
    shares = f"generate {_share(t.generate_share)}, step {_share(t.step_share)}, wait {_share(t.wait_share)}"
    counts = {
        "in": f"{m.tokens.num_input} in ({_share(m.tokens.cached_share)} cached)",
        "out": f"{m.tokens.num_action} out",
    }
    speeds = {"in": t.input_tokens_per_s, "out": t.action_tokens_per_s}
    known = {"in": m.tokens.num_input or not m.models, "out": m.tokens.num_action or not m.models}
    tokens = ", ".join(text if known[side] else f"unknown {side}" for side, text in counts.items())
    num = m.tokens.num_uncounted if all(known.values()) else 0  # else the row says which sum is unknown
    tokens += "" if all(known.values()) else ": the server sent no valid counts"
    tokens += f" + {counted(num, 'answer')} without valid counts" if num else ""
    speed = "".join(f", {rate or 0.0:.0f} tokens/s {side}" for side, rate in speeds.items() if known[side] and not num)
    rows.append(("tokens", tokens))
    if t.episodes_per_s:  # else no episode ran in this session
        rows.append(("speed", f"{t.episodes_per_s:.1f} episodes/s{speed}"))
    if m.cost_usd is not None:
        num_unknown, mean = m.num_episodes - m.num_priced, m.cost_per_episode_usd
        facts = [] if mean is None else [f"${decimal(mean, 4)} per episode{' that did not fail' if failed else ''}"]
        facts += [f"{counted(num_unknown, 'episode')} unknown"] if num_unknown else []
        rows.append(("policy cost", f"${decimal(m.cost_usd, 4)}" + (f"  ({'; '.join(facts)})" if facts else "")))
    rows += [("policy cost", "unknown")] * (is_priced and m.cost_usd is None and m.tokens.num_uncounted > 0)
    if m.judge_cost is not None:
        rows.append(("judge cost", decimal(m.judge_cost, 4)))
    rows += [
        *([("answered by", histogram(m.models) + ": several models" * (len(m.models) > 1))] if m.models else []),
        ("time", f"{clock(t.wall_s)}  (of the episodes' time: {shares})"),
        ("stop reasons", histogram(m.stop_reasons)),
    ]
    hygiene = m.hygiene.numbers()
    correlations = [
        f"{told} {hygiene[f'{name}_correlation']:+.2f}"
        + (f" ({hygiene[within]:+.2f} within tasks)" if (within := f"{name}_correlation_in_group") in hygiene else "")
        for told, name in (("length", "length"), ("Markdown marks", "format"), ("repetition", "repetition"))
        if f"{name}_correlation" in hygiene
    ]
    if correlations and m.num_rewarded >= _MIN_CORRELATED:
        rows.append(("reward against", ", ".join(correlations)))
    if "std_in_group" in hygiene:
        share = _share(hygiene["zero_spread_share"])
        rows.append(("reward within tasks", f"std {hygiene['std_in_group']:.3f} (mean), none in {share} of the tasks"))
    for key, value in m.info.items():
        num = int(value["num_episodes"])
        part = f"  ({num} of {counted(m.num_rewarded, 'episode')})" if num < m.num_rewarded else ""
        rows.append((f"info {key}", f"last turn {decimal(value['last'])}, sum {decimal(value['sum'])}{part}"))
    return rows + _error_rows(m)


def _error_rows(m: Metrics) -> list[tuple[str, str]]:
    attempts = "attempt failed and was retried", "attempts failed and were retried"
    calls = "call of `step` failed and was repeated", "calls of `step` failed and were repeated"
    failovers = "action was", "actions were"
    requests = "request of a recorded action was sent again", "requests of recorded actions were sent again"
    why = {code: f" ({reason[:_REASON_CHARS]})" for code, reason in m.refusal_reasons.items()}
    refused = [f"{code} {num}{why.get(code, '')}" for code, num in m.refusals.items()]
    rows = [
        ("sandbox", histogram(m.isolation) + weakness(m.isolation) if m.isolation else ""),
        ("errors", f"{m.num_infra_errors} infrastructure, {m.num_env_errors} environment"),
        ("refused requests", "; ".join(refused)),
        ("retries", counted(m.num_retries, *attempts) if m.num_retries else ""),
        ("step retries", counted(m.num_step_retries, *calls) if m.num_step_retries else ""),
        ("request retries", counted(m.num_request_retries, *requests) if m.num_request_retries else ""),
        ("engine restarts", str(m.num_engine_restarts) if m.num_engine_restarts else ""),
        ("failovers", f"{counted(m.num_failovers, *failovers)} sampled by another engine" if m.num_failovers else ""),
        ("retried errors", histogram(m.retried_errors) if m.retried_errors else ""),
        ("error types", histogram(m.error_types) if m.num_infra_errors + m.num_env_errors else ""),
    ]
    return [(name, value) for name, value in rows if value]


def weakness(levels: Iterable[str]) -> str:
    """Return what to add to the levels of a sandbox: a warning if one is weaker than namespaces."""
    weak = {level for level in Isolation if level.strength < Isolation.NAMESPACES.strength}
    return ", weaker than namespaces: `agentenv sandbox doctor` says why" if weak.intersection(levels) else ""


def _estimate(estimate: Estimate) -> str:
    if estimate.mean is None:
        return "none"
    if estimate.ci95_low is None or estimate.ci95_high is None:
        return f"{estimate.mean:.3f}"
    interval = f"[{estimate.ci95_low:.3f}, {estimate.ci95_high:.3f}]"
    return f"{estimate.mean:.3f}  95% CI {interval}  ({counted(estimate.num_tasks, 'task')})"


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def run_html(trajectories: Sequence[Trajectory], metrics: Metrics, out: Path | None) -> str:
    """Return the results and the episodes of the first task. All that models said is escaped."""
    parts = [_html_table("Result", (), result_rows(metrics))]
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
        parts.append(_html_table(title, ("episode", "reward", "stop reason", "turns", "last action"), rows))
    if out is not None:
        parts.append(f"<p><code>{_cell(f'agentenv view {out}')}</code>, or <code>run.view()</code></p>")
    return "\n".join(parts)


def _html_table(title: str, names: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_cell(name)}</th>" for name in names)
    lines = ["".join(f"<td>{_cell(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>\n" for line in [*([head] if head else []), *lines])
    return f"<table>\n<caption>{_cell(title)}</caption>\n{body}</table>"


def _cell(value: str) -> str:
    cut = value if len(value) <= _CELL_CHARS else f"{value[:_CELL_CHARS]}…"
    return html.escape(safe(cut)).replace("\n", "<br>")


class LastingStream:
    """A standard stream that accepts text even if its terminal (EIO) or the reader of its pipe (EPIPE) is gone.

    A run must not end because its output fails. After the first failure, the descriptor is redirected to the null
    device, so that prints of other code and the interpreter's last flush do not fail either.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        try:
            return self._stream.write(text)
        except OSError:
            self._stop_display()
            return len(text)

    def flush(self) -> None:
        """Flush, if the stream still works."""
        try:
            self._stream.flush()
        except OSError:
            self._stop_display()

    def _stop_display(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            self._stream.flush()


def quiet_transformers() -> None:
    """Turn off the progress bars and the advice of transformers."""
    if {"transformers", "huggingface_hub"} & sys.modules.keys():
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
    else:  # read when they are imported, which takes more than a second and may not happen
        os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
