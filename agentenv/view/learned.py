"""What the learner computed for the tokens of a training's episodes, for the page: from `token_stats.jsonl`."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from typing import Any

from agentenv.core.trajectory import Trajectory
from agentenv.errors import DataError
from agentenv.runs.records.token_stats import TOKEN_STATS, TokenStats, hash_actions, sampled_tokens
from agentenv.view.tail import TailPlace, read_lines_after
from agentenv.view.viewed import ViewedRun

_NUMBERS = b',"logprobs":'
"""Begins the numbers of a line; before it are its step and episode."""


class LearnedLines:
    """Finds the line of an episode in a file that may be written meanwhile; may be used from several threads.

    Only where the lines are is in memory.
    """

    def __init__(self, run: ViewedRun) -> None:
        self._run = run
        self._guard = threading.Lock()
        self._place = TailPlace()
        self._lines: dict[str, tuple[int, int]] = {}
        """Offset and length of the last line of each episode."""

    def of(self, trajectory: Trajectory) -> dict[str, Any] | None:
        """Return `step`, and by sampled token `logprobs` and `advantages`, with None for what is not known.

        None if the learner noted nothing of the episode, or noted other tokens: those of an attempt before a resume.
        """
        try:
            with self._guard:
                self._follow()
                offset, length = self._lines.get(trajectory.episode_id, (0, 0))
            with self._run.open(TOKEN_STATS) as file:
                if file is None or not length:
                    return None
                file.seek(offset)
                stats = TokenStats.from_line(file.read(length))
        except DataError:  # a damaged line costs its episode these numbers only
            return None
        if stats.episode_id != trajectory.episode_id or stats.action_hash != hash_actions(sampled_tokens(trajectory)):
            return None
        return {"step": stats.step, "logprobs": _known(stats.logprobs), "advantages": _known(stats.advantages)}

    def _follow(self) -> None:
        """Add the lines that were written since the last call."""
        while True:
            tail = read_lines_after(self._run, TOKEN_STATS, self._place)
            if tail.was_reset:
                self._lines.clear()
            offset = tail.place.offset - len(tail.lines)
            for line in tail.lines.splitlines(keepends=True):
                self._note(line, offset)
                offset += len(line)
            self._place = tail.place
            if not tail.lines:
                return

    def _note(self, line: bytes, offset: int) -> None:
        try:
            episode_id = json.loads(line.partition(_NUMBERS)[0] + b"}")["episode_id"]
        except (KeyError, TypeError, ValueError):
            return
        if isinstance(episode_id, str):
            self._lines[episode_id] = offset, len(line)


def _known(values: Sequence[float]) -> list[float | None]:
    """Return values for the page, with six significant digits; None for those that are not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
