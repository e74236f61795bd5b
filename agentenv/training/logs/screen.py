"""Progress of a training run on stderr: a line per train step, and on a terminal a live line below."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentenv._util.plurals import counted
from agentenv._util.terminal import wide_console
from agentenv.runs.display.progress import clock, write_event
from agentenv.runs.display.report import FailureKinds, final_table, weakness
from agentenv.runs.metrics import Summary
from agentenv.training.config import TrainConfig
from agentenv.training.logs.journal import finite
from agentenv.training.logs.step_warnings import StepWarning

_ETA_STEPS = 8
"""Number of last steps for the estimate of the remaining time; the first steps are slower."""
_PARTS = (
    ("reward", "rollout/reward", ".3f"),
    ("score", "rollout/score", ".3f"),
    ("no spread", "rollout/reward/zero_spread_share", ".0%"),
    ("grad norm", "train/grad_norm", ".2g"),
    ("entropy", "train/entropy", ".3g"),
    ("kl", "train/kl", ".2g"),
    ("logprob diff", "train/logprob_diff", ".2g"),
    ("stale", "rollout/staleness_mean", ".1f"),
    ("rejected", "rollout/rejection_rate", ".0%"),
)
_FAILURES = (
    ("held-out failed", "eval/num_failed"),
    ("failed", "rollout/num_failed"),
    ("failed tasks left out", "rollout/num_rejected_failed"),
    ("retried", "rollout/num_retries"),
    ("steps repeated", "rollout/num_step_retries"),
    ("failovers", "rollout/num_failovers"),
    ("engine restarts", "rollout/num_engine_restarts"),
)
_SANDBOX = "rollout/sandbox/"
_SECONDS = (("wait", "time/wait_s"), ("train", "time/train_s"), ("sync", "time/sync_s"), ("eval", "time/eval_s"))


class TrainScreen:
    """Shows a training run according to --progress.

    Args:
        config: the flags.
        console: console to write to; None means stderr.
        stdout: stream for the JSON lines of --json; None means sys.stdout.
    """

    def __init__(self, config: TrainConfig, *, console: Console | None = None, stdout: TextIO | None = None) -> None:
        self._json = (stdout or sys.stdout) if config.screen.json else None
        self.console = console if console is not None else wide_console(stderr=True)
        is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.mode = ("live" if is_live else "plain") if config.screen.progress == "auto" else config.screen.progress
        if self._json is not None and self.mode == "live":
            self.mode = "plain"
        self._failures = FailureKinds()
        self._num_samples = config.num_samples
        self._live: Live | None = None
        self._num_steps = self._step = 0
        self._ends_s: list[float] = []
        self._num_ended = self._num_failed = self._num_scores = 0
        self._scores = 0.0

    def start(self, num_steps: int, first_step: int) -> None:
        """Start with step `first_step` of `num_steps`."""
        self._num_steps, self._step = num_steps, first_step - 1
        self._ends_s = [time.monotonic()]
        if self.mode == "live":
            self._live = Live(console=self.console, refresh_per_second=4, get_renderable=self._draw, transient=True)
            self._live.start()

    def launch(self, facts: Mapping[str, str], flags: Mapping[str, Any]) -> None:
        """Show what is about to run: `facts` on the screen, with all `flags` in JSON."""
        if self._json is not None:
            write_event(self._json, "launch", {**facts, "config": flags})
            return
        for name, value in facts.items():
            self.note(f"{name:9} {value}")

    def episode(self, summary: Summary) -> bool:
        """Count a finished episode; counts restart with each train step. Return True if it failed as none before."""
        self._num_ended += 1
        self._num_failed += summary.error_kind is not None
        value = summary.score if summary.score is not None else summary.reward
        if value is not None:
            self._num_scores, self._scores = self._num_scores + 1, self._scores + value
        if line := self._failures.first(summary):
            self.note(line)
        return bool(line)

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show a finished train step with its numbers."""
        self._step = step
        # Step 0 is an evaluation, not a train step, so its time does not count.
        self._ends_s = [*(self._ends_s[-_ETA_STEPS:] if step else ()), time.monotonic()]
        self._num_ended = self._num_failed = self._num_scores = 0
        self._scores = 0.0
        if self._json is not None:
            write_event(self._json, "step", {"step": step, **finite(numbers)})
            return
        seconds, num, left = self._ends_s[-1] - self._ends_s[0], len(self._ends_s) - 1, self._num_steps - step
        eta = f"ETA {clock(left * seconds / num)}" if left > 0 and num else ""
        self.note(" · ".join(filter(None, (self._head(step), describe(numbers), eta))))

    def warn(self, step: int, warning: StepWarning, folder: Path) -> None:
        """Show a warning about a train step, with the command that shows its episodes."""
        show = f"agentenv show {shlex.quote(str(folder))} {warning.show}"
        if self._json is not None:
            write_event(self._json, "warning", {"step": step, "name": warning.name, "text": warning.text, "show": show})
            return
        self.note(f"warning: step {step}: {warning.text}. Episodes: {show}")

    def note(self, text: str) -> None:
        """Show a line of text above the live line."""
        if self.mode != "none":
            self.console.print(Text(text), soft_wrap=True)

    def stop(self) -> None:
        """Remove the live line; further calls do nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def final(self, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, str]) -> None:
        """Stop, and show a table with the results from metrics.jsonl and a row for each other fact."""
        self.stop()
        if self._json is not None:
            write_event(self._json, "done", facts)
        elif self.mode != "none":
            self.console.print(final_table({**results(rows), **facts}.items()))

    def _head(self, step: int) -> str:
        return f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"

    def _draw(self) -> Table:
        bar = ProgressBar(total=max(self._num_steps, 1), completed=self._step, width=16)
        parts = [self._head(min(self._step + 1, self._num_steps)), f"{self._num_ended}/{self._num_samples} episodes"]
        if self._num_scores:
            parts.append(f"score {self._scores / self._num_scores:.3f} so far")
        if self._num_failed:
            parts.append(f"{self._num_failed} failed")
        parts.append(clock(time.monotonic() - self._ends_s[-1]))
        grid = Table.grid(padding=(0, 1))
        grid.add_row(bar, Text(" · ".join(parts), no_wrap=True, overflow="ellipsis"))
        return grid


def describe(numbers: Mapping[str, float]) -> str:
    """Return the numbers of a train step on one line; missing ones are left out."""
    parts = [f"{name} {numbers[key]:{form}}" for name, key, form in _PARTS if key in numbers]
    if "eval/score" in numbers:
        parts.insert(0, f"held-out score {numbers['eval/score']:.3f}")
    parts += [f"{name} {num:.0f}" for name, key in _FAILURES if (num := numbers.get(key))]
    if "throughput/samples_per_s" in numbers:
        parts.append(f"{numbers['throughput/samples_per_s']:.1f} samples/s")
    seconds = [
        f"{name} {value:.1f}s" if value >= 1 else f"{name} {value:.2f}s"
        for name, key in _SECONDS
        if (value := numbers.get(key))
    ]
    return " · ".join([*parts, *([" ".join(seconds)] if seconds else [])])


def results(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the results of a training run from the lines of metrics.jsonl: steps, scores and time."""
    if not rows:
        return {"steps": "none"}
    facts = {"steps": str(rows[-1]["step"])}
    if any(key.startswith("eval/") for row in rows for key in row):
        name = "score" if _points(rows, "eval/score") else "reward"
        facts[f"held-out {name}"] = _first_and_last(rows, f"eval/{name}")
        if held_out := _points(rows, f"eval/{name}"):
            best, highest = max(held_out, key=lambda point: point[1])
            facts["best"] = f"{highest:.3f} at step {best}"
        for each in _names(rows, "eval/set/"):
            own = "score" if _points(rows, f"eval/set/{each}/score") else "reward"
            facts[f"held-out {own}, {each}"] = _first_and_last(rows, f"eval/set/{each}/{own}")
    for name in ("reward", "score"):
        facts |= _early_and_late(rows, f"training {name}", f"rollout/{name}")
    for each in _names(rows, "rollout/env/"):
        for name in ("score", "reward"):
            if found := _early_and_late(rows, f"training {name}, {each}", f"rollout/env/{each}/{name}"):
                facts |= found
                break
    prefixes = {f", {each}": f"rollout/env/{each}/" for each in _names(rows, "rollout/env/")} or {"": "rollout/"}
    failures = {f"training failures{each}": _failures(rows, prefix) for each, prefix in prefixes.items()}
    facts |= {name: told for name, told in failures.items() if told}
    if levels := sorted({key.removeprefix(_SANDBOX) for row in rows for key in row if key.startswith(_SANDBOX)}):
        facts["sandbox"] = ", ".join(levels) + weakness(levels)
    if seconds := sum(value for _, value in _points(rows, "time/wall_s")):
        shares = {name: sum(value for _, value in _points(rows, key)) / seconds for name, key in _SECONDS}
        named = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share)
        facts["time"] = clock(seconds) + (f"  ({named})" if named else "")
    rewards = _points(rows, "rollout/reward")
    num_warned = sum("constant_reward" in row.get("warnings", ()) for row in rows)
    if len({value for _, value in rewards}) == 1 and num_warned == len(rewards):
        facts["warning"] = f"every reward was {rewards[0][1]:.3f}: nothing was learned from them"
    return facts


def _first_and_last(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return the first and the last value of an evaluation, with their intervals, or how many episodes failed."""
    lows, highs = dict(_points(rows, f"{key}_ci95_low")), dict(_points(rows, f"{key}_ci95_high"))
    nums, failed = (dict(_points(rows, f"{key.rpartition('/')[0]}/{name}")) for name in ("num_episodes", "num_failed"))
    points, shown = _points(rows, key), []
    for step, value in (points[0], points[-1]) if points else ():
        interval = f" [{lows[step]:.3f}, {highs[step]:.3f}]" if step in lows and step in highs else ""
        lost = f" ({failed[step]:.0f} of {nums[step]:.0f} episodes failed)" if failed.get(step) else ""
        shown.append(f"{value:.3f}{interval} at step {step}{lost}")
    return ", ".join(shown) or f"none: {sum(failed.values()):.0f} of {sum(nums.values()):.0f} episodes failed"


def _failures(rows: Sequence[Mapping[str, Any]], prefix: str) -> str:
    """Return how much of the training, or of one of its environments, failed; "" if nothing did."""
    keys = f"{prefix}num_rejected_failed", f"{prefix}num_failed"
    tasks, episodes = (int(sum(value for _, value in _points(rows, key))) for key in keys)
    parts = [f"{counted(tasks, 'task')} left out"] if tasks else []
    return ", ".join([*parts, *([f"{counted(episodes, 'episode')} of tasks trained on"] if episodes else [])])


def _early_and_late(rows: Sequence[Mapping[str, Any]], name: str, key: str) -> dict[str, str]:
    """Return the fact `name`: the mean of a number in the first and in the last quarter of the steps; empty if none."""
    steps = [row for row in rows if row["step"]]  # step 0 is an evaluation
    quarter = max(1, len(steps) // 4)
    values = [[value for _, value in _points(part, key)] for part in (steps[:quarter], steps[-quarter:])]
    early, late = (f"{fmean(each):.3f}" if each else "–" for each in values)
    return {name: f"{early} in the first quarter of the steps, {late} in the last"} if any(values) else {}


def _names(rows: Sequence[Mapping[str, Any]], prefix: str) -> list[str]:
    """Return what stands between a prefix and the name of a number, in order."""
    ends = ("/score", "/reward", "/share", "/num_failed")
    keys = (key for row in rows for key in row if key.startswith(prefix) and key.endswith(ends) and "/info/" not in key)
    return list(dict.fromkeys(key.removeprefix(prefix).rpartition("/")[0] for key in keys))


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]
