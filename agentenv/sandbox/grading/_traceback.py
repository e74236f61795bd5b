"""What a model may read of its program's standard error: the last exception, and its own frames."""

from __future__ import annotations

import re

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line \d+')
_START = "Traceback (most recent call last):"


def own_traceback(stderr: str, max_chars: int = 1500) -> str:
    """The last traceback without the frames of libraries and of whatever ran the program; else the end of the text."""
    lines = stderr.rstrip("\n").split("\n")
    starts = [index for index, line in enumerate(lines) if line == _START]
    if starts:
        lines = _own_frames(lines[starts[-1] + 1 :])
    text = "\n".join(lines)
    return text if len(text) <= max_chars else f"… {text[-max_chars:]}"


def _own_frames(lines: list[str]) -> list[str]:
    kept: list[str] = []
    own = True
    for line in lines:
        frame = _FRAME.match(line)
        if frame:
            own = not frame["file"].startswith(("/", "<frozen"))
        elif not line.startswith(" "):
            own = True
        if own:
            kept.append(line)
    return kept
