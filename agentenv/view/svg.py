"""An episode as SVG, for an issue or a paper: each token on the color of its log-probability; no script, no font."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from agentenv._util.plurals import counted
from agentenv.chat.token_text import escaped
from agentenv.core.trajectory import Trajectory
from agentenv.runs.display.conversation import episode_line, number_text
from agentenv.view.excerpt import LIMITS, TITLES, ShownSpan, shown_spans, turn_facts
from agentenv.view.texts import TokenTexts

COLUMNS = 100
_CELL, _LINE, _MARGIN, _SIZE = 8.0, 19.0, 16.0, 13
_SHADES = ("none", "#fff1cc", "#ffd58a", "#ffac5c", "#f08a4b")
"""Grounds of action tokens, by log-probability from high to low; black text has a contrast above 8 on each."""
_MISSING = "#f3d1f4"
_GROUNDS = {"prompt": "#e8eef4", "feedback": "#fdf3dc", "close": "#f9dbe4", "action": "none"}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(slots=True)
class _Canvas:
    """Lines of cells, filled from left to right."""

    rects: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    row: int = 0
    column: int = 0
    text: str = ""
    """Of the line that is being filled."""

    def add(self, text: str, ground: str = "none") -> None:
        """Add a text without line ends, on a ground; it wraps at the last column."""
        rest = text
        while rest:
            part, width = _fitting(rest, COLUMNS - self.column)
            if not part:
                self.end_line()
                continue
            x, y = _MARGIN + self.column * _CELL, _MARGIN + self.row * _LINE
            if ground != "none":
                self.rects.append(
                    f'<rect x="{x:g}" y="{y:g}" width="{width * _CELL:g}" height="{_LINE:g}" fill="{ground}"/>'
                )
            self.text, self.column = self.text + part, self.column + width
            rest = rest[len(part) :]

    def end_line(self, style: str = "") -> None:
        """Continue at the beginning of the next line."""
        if self.text:
            # The length keeps letters on their grounds where another font is taken.
            place = f'x="{_MARGIN:g}" y="{_MARGIN + self.row * _LINE + 14:g}" textLength="{self.column * _CELL:g}"'
            text = escape(_NOT_XML.sub("\ufffd", self.text))
            self.lines.append(f'<text {place}{style} xml:space="preserve">{text}</text>')
        self.row, self.column, self.text = self.row + 1, 0, ""

    def heading(self, text: str) -> None:
        """Add a line in bold."""
        if self.column:
            self.end_line()
        self.add(escaped(text).replace("\n", " "))
        self.end_line(' font-weight="bold"')


def episode_to_svg(trajectory: Trajectory, texts: TokenTexts) -> str:
    """Return an episode as SVG, with texts that can be selected, wrapped at 100 columns.

    Raises:
        ConfigError: the record has no token ids.
    """
    canvas = _Canvas()
    canvas.heading(episode_line(trajectory))
    if trajectory.error is not None:
        canvas.heading(f"error in {trajectory.error.where or '?'}: {trajectory.error.type}: {trajectory.error.message}")
    _legend(canvas)
    for shown in shown_spans(trajectory, texts):
        canvas.end_line()
        canvas.heading(_title(trajectory, shown))
        for text, ground in _pieces(shown):
            *whole, last = text.split("\n")
            for line in whole:
                canvas.add(f"{line}↵", ground)
                canvas.end_line()
            canvas.add(last, ground)
        if canvas.column:
            canvas.end_line()
    width, height = 2 * _MARGIN + COLUMNS * _CELL, 2 * _MARGIN + (canvas.row + 1) * _LINE
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{_SIZE}" fill="#1a1a1a">',
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>', *canvas.rects, *canvas.lines, "</svg>\n",
    ])  # fmt: skip


def _title(trajectory: Trajectory, shown: ShownSpan) -> str:
    span = shown.span
    size = counted(span.end - span.start, "token")
    where = f"segment {shown.segment} · " if len(trajectory.segments) > 1 else ""
    if span.kind != "action":
        return f"{where}{TITLES[span.kind]} · {size}"
    turn = trajectory.turns[span.turn]
    score = "" if turn.result is None or turn.result.score is None else f" · score {number_text(turn.result.score)}"
    return f"{where}{turn_facts(span.turn, turn)}{score}"


def _pieces(shown: ShownSpan) -> Iterator[tuple[str, str]]:
    """Yield the text of each token and its ground."""
    if shown.span.kind != "action":
        yield escaped("".join(shown.texts)), _GROUNDS[shown.span.kind]
        return
    for text, logprob in zip(shown.texts, shown.logprobs, strict=True):
        shade = _MISSING if math.isnan(logprob) else _SHADES[sum(logprob < limit for limit in LIMITS)]
        yield escaped(text), shade


def _legend(canvas: _Canvas) -> None:
    canvas.add("probability of a sampled token: ")
    bounds = [f"{math.exp(limit):.2g}" for limit in LIMITS]
    for number, (shade, bound) in enumerate(zip(_SHADES, [*bounds, bounds[-1]], strict=True)):
        canvas.add(f" {'>' if number < len(bounds) else '<'} {bound} ", shade)
    canvas.add(" missing ", _MISSING)
    canvas.end_line()


def _fitting(text: str, room: int) -> tuple[str, int]:
    """Return the beginning of a text that fits into columns, and its width: wide characters take two."""
    width = 0
    for at, char in enumerate(text):
        size = 2 if unicodedata.east_asian_width(char) in "WF" else 0 if unicodedata.combining(char) else 1
        if width + size > room:
            return text[:at], width
        width += size
    return text, width
