"""The screen of `agentenv run`: what was asked for on top, the final table at the end."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentenv.config import RunConfig
from agentenv.estimates import Estimate
from agentenv.metrics import Metrics
from agentenv.progress import clock


def header(config: RunConfig, facts: Mapping[str, str]) -> Table:
    """What runs: the facts found at start, then the flags that are not at their defaults."""
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(Text(name, style="bold"), Text(value))
    shown = {"env", "agent_func_path", "data", "model", "engine", "out", "resume", "progress", "json"}
    defaults = RunConfig(env="_").to_dict()
    changed = {k: v for k, v in config.to_dict().items() if k not in shown and v != defaults[k] and v not in (None, [])}
    if changed:
        grid.add_row(Text("flags", style="bold"), Text("  ".join(f"--{k} {v}" for k, v in changed.items())))
    return grid


def final_table(metrics: Metrics) -> Table:
    """Episodes, reward, score, pass@k, turns, tokens, time, stop reasons and errors of a run."""
    table = Table(title="Result", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(metrics):
        table.add_row(name, Text(value))
    return table


def _rows(m: Metrics) -> list[tuple[str, str]]:
    missing = f" of {m.num_episodes + m.num_missing} planned" if m.num_missing else ""
    rows = [
        ("episodes", f"{m.num_episodes}{missing}  ({m.num_tasks} tasks × {m.num_samples}; {m.num_rewarded} rewarded)"),
        ("reward", _estimate(m.reward)),
        ("score", _estimate(m.score)),
    ]
    # All of them where they fit; of many samples 1, 2, 4 … and the last. metrics.json has every one.
    shown = [k for k in m.pass_at_k if m.num_samples <= 8 or int(k) & (int(k) - 1) == 0 or int(k) == m.num_samples]
    rows += [(f"pass@{k}", _estimate(m.pass_at_k[k])) for k in shown if m.pass_at_k[k].mean is not None]
    if m.turns_mean is not None:
        rows.append(("turns", f"mean {m.turns_mean:.2f}, max {m.turns_max}"))
    if set(m.bridges) - {"exact", "text"}:  # what a reader should know: actions that did not end as the template does
        rows.append(("replies after", _histogram(m.bridges)))
    rows += [
        ("tokens", f"{m.tokens.num_input} in ({_share(m.tokens.cached_share)} cached), {m.tokens.num_action} out"),
        ("speed", _speed(m)),
        ("time", _time(m)),
        ("stop reasons", _histogram(m.stop_reasons)),
        *_hygiene(m.hygiene.numbers()),
    ]
    rows += [(f"info {key}", f"last turn {value['last']:.3f}, sum {value['sum']:.3f}") for key, value in m.info.items()]
    failed = m.num_infra_errors + m.num_env_errors
    rows.append(("errors", f"{m.num_infra_errors} infrastructure, {m.num_env_errors} environment"))
    if m.num_retries:
        rows.append(("retries", f"{m.num_retries} attempts failed and were made again"))
    if failed:
        rows.append(("error types", _histogram(m.error_types)))
    return rows


def _estimate(estimate: Estimate) -> str:
    if estimate.mean is None:
        return "none"
    if estimate.ci95_low is None or estimate.ci95_high is None:
        return f"{estimate.mean:.3f}"
    interval = f"[{estimate.ci95_low:.3f}, {estimate.ci95_high:.3f}]"
    return f"{estimate.mean:.3f}  95% CI {interval}  ({estimate.num_tasks} tasks)"


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _speed(m: Metrics) -> str:
    tokens_in, tokens_out = m.time.input_tokens_per_s or 0.0, m.time.action_tokens_per_s or 0.0
    return f"{m.time.episodes_per_s or 0:.1f} episodes/s, {tokens_in:.0f} tokens/s in, {tokens_out:.0f} tokens/s out"


def _time(m: Metrics) -> str:
    t = m.time
    shares = f"generate {_share(t.generate_share)}, step {_share(t.step_share)}, wait {_share(t.wait_share)}"
    return f"{clock(t.wall_s)}  (of the episodes' time: {shares})"


def _hygiene(known: Mapping[str, float]) -> list[tuple[str, str]]:
    """What the rewards go by, and how much the episodes of a task differ; no row where nothing is known."""
    goes_by = [
        f"{name} {known[f'{name}_correlation']:+.2f}"
        + (f" ({known[within]:+.2f} within tasks)" if (within := f"{name}_correlation_in_group") in known else "")
        for name in ("length", "format", "repetition")
        if f"{name}_correlation" in known
    ]
    rows = [("reward against", ", ".join(goes_by))] if goes_by else []
    if "std_in_group" in known:
        spread = f"std {known['std_in_group']:.3f} (mean), none in {_share(known['zero_spread_share'])} of the tasks"
        rows.append(("reward within tasks", spread))
    return rows


def _histogram(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def wide_console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal or COLUMNS, and wide enough for whole sentences where there is neither."""
    console = Console(stderr=stderr)
    known = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console if known else Console(stderr=stderr, width=140)


class LastingStream:
    """A standard stream that takes text even when its terminal is gone (EIO) or nobody reads its pipe (EPIPE).

    A run is worth more than what it shows. From the first failure on all goes to the null device, what other code
    writes to the same descriptor too, so that neither its prints nor the interpreter's last flush fail.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or not."""
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        """Flush, or not."""
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            self._stream.flush()


def quiet_transformers() -> None:
    """Keep its progress bars and advice out of the screen, which is the run's."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
