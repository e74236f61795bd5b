"""Progress of a run: a live line on a terminal, plain lines elsewhere, or JSON lines for programs."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentenv.runs.run_log import Stats

_LINE_EVERY_S = 5.0
_BAR_COLUMNS = 16
_WAIT_LINE_S = 10.0


class Progress:
    """Shows nothing; the base class of the others."""

    def __init__(self, stats: Stats) -> None:
        self.stats = stats

    def start(self) -> None:
        """Start the clock and the display."""
        self.stats.begin()

    def update(self) -> None:
        """Show that an episode was counted."""

    def stop(self) -> None:
        """Show the final state and stop."""


class PlainProgress(Progress):
    """Writes a line every few seconds, and one at the end."""

    def __init__(self, stats: Stats, stream: TextIO | None = None) -> None:
        super().__init__(stats)
        self._stream = stream or sys.stderr
        self._last = time.monotonic()
        self._num_shown = -1

    def update(self) -> None:
        """Write a line if the last one is old enough."""
        if time.monotonic() - self._last >= _LINE_EVERY_S:
            self._write()

    def stop(self) -> None:
        """Write the last line, unless it is there."""
        if self._num_shown != self.stats.num_done:
            self._write()

    def _write(self) -> None:
        self._last, self._num_shown = time.monotonic(), self.stats.num_done
        self._stream.write(self._line() + "\n")
        self._stream.flush()

    def _line(self) -> str:
        return describe(self.stats.facts())


class JSONProgress(PlainProgress):
    """Writes JSON lines with the event "progress"."""

    def _line(self) -> str:
        return json.dumps({"event": "progress", **self.stats.facts()})


class LiveProgress(Progress):
    """A bar that is redrawn a few times a second."""

    def __init__(self, stats: Stats, console: Console) -> None:
        super().__init__(stats)
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._draw)

    def start(self) -> None:
        """Start the clock and the display."""
        super().start()
        self._live.start()

    def stop(self) -> None:
        """Stop, with the final state on the screen."""
        self._live.stop()

    def _draw(self) -> Table:
        facts = self.stats.facts()
        grid = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(facts["total"], 1), completed=facts["done"], width=_BAR_COLUMNS)
        room = self._console.width - _BAR_COLUMNS - 1
        grid.add_row(bar, Text(describe(facts, room), no_wrap=True, overflow="ellipsis"))
        return grid


def write_event(stream: TextIO, name: str, facts: Mapping[str, Any]) -> None:
    """Write the JSON line of an event."""
    stream.write(json.dumps({"event": name, **facts}) + "\n")
    stream.flush()


@contextmanager
def waiting(what: str, note: Callable[[str], None]) -> Iterator[None]:
    """Note every 10 s how long `what` has taken, also while it blocks the event loop."""
    began, is_over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not is_over.wait(_WAIT_LINE_S):
            note(f"{what}, {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def describe(facts: Mapping[str, Any], max_chars: int | None = None) -> str:
    """Return the facts of `Stats.facts` on one line; what does not fit into `max_chars` is left out."""
    is_going = facts["done"] < facts["total"]
    so_far = " so far" if is_going and max_chars is None else ""
    parts = {"episodes": f"{facts['done']}/{facts['total']} episodes"}
    parts |= {key: f"{key} {facts[key]:.3f}{so_far}" for key in ("reward", "score") if facts[key] is not None}
    parts["errors"] = f"errors {facts['env_errors']} env, {facts['infra_errors']} infra"
    parts["speed"] = f"{facts['episodes_per_s']:.1f} episodes/s"
    if facts["tokens_per_s"]:
        parts["speed"] += f", {facts['tokens_per_s']:.0f} tokens/s"
    parts["elapsed"] = f"elapsed {clock(facts['elapsed_s'])}"
    if facts["eta_s"] is not None and is_going:
        parts["eta"] = f"ETA {clock(facts['eta_s'])}"
    without_errors = () if facts["env_errors"] or facts["infra_errors"] else ("errors",)
    for name in ("elapsed", "speed", *without_errors, "reward", "score"):
        if max_chars is None or len(" · ".join(parts.values())) <= max_chars:
            break
        parts.pop(name, None)
    return " · ".join(parts.values())


def clock(seconds: float) -> str:
    """Return seconds as 42s, 3m05s or 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class OnScreen(logging.StreamHandler[TextIO]):
    """A handler that looks up sys.stderr for each record, so that records appear above a live display."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The current sys.stderr."""
        return sys.stderr
