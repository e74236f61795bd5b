"""An episode for an issue or a paper: as Markdown, and as SVG with each token on the color of its log-probability.

Texts in Markdown are fenced, so that nothing in them is formatted, linked or run. The SVG has no script and no font.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from agentenv._util.jsonable import jsonable
from agentenv._util.plurals import counted
from agentenv._util.terminal import safe
from agentenv.chat.chat import text_of
from agentenv.chat.token_text import escaped
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Message
from agentenv.core.views import Span, spans_of
from agentenv.runs.display.conversation import SHADE_LIMITS, SPAN_TITLES, episode_line, number_text, turn_usage, usage
from agentenv.view.texts import TokenTexts

_MAX_IMPROBABLE = 8
_IMPROBABLE = -1.0
"""Log-probability below which Markdown lists a token."""
_PING = re.compile(r"@(?=[\w-])|#(?=\d)")
_JOINER = "\u200d"

COLUMNS = 100
_CELL, _LINE, _MARGIN, _SIZE = 8.0, 19.0, 16.0, 13
_SHADES = ("none", "#fff1cc", "#ffd58a", "#ffac5c", "#f08a4b")
"""Grounds of action tokens, by log-probability from high to low; black text has a contrast above 8 on each."""
_MISSING = "#f3d1f4"
_GROUNDS = {"prompt": "#e8eef4", "feedback": "#fdf3dc", "close": "#f9dbe4", "action": "none"}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


# --- Markdown ---------------------------------------------------------------------------------------------------------


def episode_to_markdown(trajectory: Trajectory, texts: TokenTexts | None, run: str) -> str:
    """Return an episode of the run named `run` as Markdown.

    Texts of models and environments are in fences and code spans only. A joiner after `@`, and after `#` before a
    number, keeps sites from notifying people and linking issues; characters that are invisible are escaped.
    """
    reason = trajectory.stop_reason.value if trajectory.stop_reason else "unfinished"
    facts = [
        f"### Episode {_code(trajectory.episode_id)}: reward {number_text(trajectory.reward)}, {_code(reason)}",
        f"Run {_code(run)}, {', '.join(usage(trajectory))}"
        + ("" if trajectory.task.label is None else f", label {_code(str(trajectory.task.label))}"),
    ]
    error = trajectory.error
    if error is not None:
        facts.append(f"Failed in {_code(error.where or '?')}: {_code(f'{error.type}: {error.message}')}")
    prompt = trajectory.prompt or trajectory.task.prompt
    rows = ["| turn | reward | tokens | mean log-prob | finish |", "|---|---|---|---|---|"]
    for number, turn in enumerate(trajectory.turns):
        logprobs = trajectory.segments[turn.segment].logprobs[turn.start : turn.end]
        known = [value for value in logprobs if math.isfinite(value)]
        cells = [
            str(number), number_text(turn.result.reward if turn.result else None),
            str(turn.num_tokens) if turn.is_counted else "",
            f"{math.fsum(known) / len(known):.3f}" if known else "",
            _code(str(turn.finish_reason)).replace("|", "\\|"),
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    table = "\n".join(rows)
    return "\n\n".join([*facts, *_messages("prompt", prompt), table, *_turns(trajectory, texts)]) + "\n"


def _turns(trajectory: Trajectory, texts: TokenTexts | None) -> Iterator[str]:
    for number, turn in enumerate(trajectory.turns):
        result = turn.result
        reward = number_text(result.reward if result else None)
        facts = ", ".join([f"turn {number}", f"reward {reward}", *turn_usage(turn)])
        yield f"<details open><summary>{facts}</summary>"
        yield _fenced(turn.action)
        if texts is not None:
            segment = trajectory.segments[turn.segment]
            found, _ = texts.of(segment.token_ids)
            logprobs = [(segment.logprobs[at], at) for at in range(turn.start, turn.end)]
            low = sorted(each for each in logprobs if each[0] < _IMPROBABLE)[:_MAX_IMPROBABLE]
            named = [f"{_code(found[at])} p {math.exp(value):{'.2g' if value > -9 else '.0e'}}" for value, at in low]
            yield from [f"Least probable: {', '.join(named)}"] if named else []
        if result is not None:
            if result.info:
                info = json.dumps(jsonable(result.info), ensure_ascii=False)
                yield f"info {_code(info)}"
            yield from _messages("observation", result.observation)
        yield "</details>"


def _messages(title: str, messages: str | Sequence[Message]) -> Iterator[str]:
    given = [{"role": "", "content": messages}] if isinstance(messages, str) else messages
    for message in given:
        text = text_of(message)
        calls = message.get("tool_calls")
        if calls:
            text += f"\n{json.dumps(jsonable(calls), ensure_ascii=False)}"
        if text:
            role = str(message.get("role") or "")
            yield f"{title}{f' ({_code(role)})' if role else ''}:"
            yield _fenced(text)


def _fenced(text: str) -> str:
    """Return text between fences that are longer than any in it."""
    shown = _unlinked(safe(text))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence}text\n{shown}\n{fence}"


def _code(text: str) -> str:
    """Return text as a code span on one line."""
    shown = _unlinked(safe(text).replace("\n", "↵").replace("\t", "⇥"))
    ticks = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    pad = " " if not shown or shown[0] in "` " or shown[-1] in "` " else ""
    return f"{ticks}{pad}{shown}{pad}{ticks}"


def _unlinked(text: str) -> str:
    return _PING.sub(lambda match: match[0] + _JOINER, text)


# --- SVG --------------------------------------------------------------------------------------------------------------


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

    def add_lines(self, text: str, ground: str) -> None:
        """Add a text on a ground, each of its line ends as ↵ and a new line."""
        *whole, last = text.split("\n")
        for line in whole:
            self.add(f"{line}↵", ground)
            self.end_line()
        self.add(last, ground)

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
    """Return an episode with token ids as SVG, with texts that can be selected, wrapped at 100 columns."""
    canvas = _Canvas()
    canvas.heading(episode_line(trajectory))
    if trajectory.error is not None:
        canvas.heading(f"error in {trajectory.error.where or '?'}: {trajectory.error.type}: {trajectory.error.message}")
    canvas.add("probability of a sampled token: ")
    bounds = [f"{math.exp(limit):.2g}" for limit in SHADE_LIMITS]
    for number, (shade, bound) in enumerate(zip(_SHADES, [*bounds, bounds[-1]], strict=True)):
        canvas.add(f" {'>' if number < len(bounds) else '<'} {bound} ", shade)
    canvas.add(" missing ", _MISSING)
    canvas.end_line()
    for index, segment in enumerate(trajectory.segments):
        found, _ = texts.of(segment.token_ids)
        for span in spans_of(trajectory, index):
            canvas.end_line()
            canvas.heading(_title(trajectory, index, span))
            if span.kind == "action":
                for at in range(span.start, span.end):
                    logprob = segment.logprobs[at]
                    shade = _SHADES[sum(logprob < limit for limit in SHADE_LIMITS)]
                    canvas.add_lines(escaped(found[at]), _MISSING if math.isnan(logprob) else shade)
            else:
                canvas.add_lines(escaped("".join(found[span.start : span.end])), _GROUNDS[span.kind])
            if canvas.column:
                canvas.end_line()
    width, height = 2 * _MARGIN + COLUMNS * _CELL, 2 * _MARGIN + (canvas.row + 1) * _LINE
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{_SIZE}" fill="#1a1a1a">',
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>', *canvas.rects, *canvas.lines, "</svg>\n",
    ])  # fmt: skip


def _title(trajectory: Trajectory, index: int, span: Span) -> str:
    size = counted(span.end - span.start, "token")
    where = f"segment {index} · " if len(trajectory.segments) > 1 else ""
    if span.kind != "action":
        return f"{where}{SPAN_TITLES[span.kind]} · {size}"
    turn = trajectory.turns[span.turn]
    result = turn.result
    reward = number_text(result.reward if result else None)
    score = "" if result is None or result.score is None else f" · score {number_text(result.score)}"
    return f"{where}turn {span.turn} · reward {reward} · {size} · finish {turn.finish_reason}{score}"


def _fitting(text: str, room: int) -> tuple[str, int]:
    """Return the beginning of a text that fits into columns, and its width: wide characters take two."""
    width = 0
    for at, char in enumerate(text):
        size = 2 if unicodedata.east_asian_width(char) in "WF" else 0 if unicodedata.combining(char) else 1
        if width + size > room:
            return text[:at], width
        width += size
    return text, width
