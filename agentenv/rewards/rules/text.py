r"""Split a response into thoughts, answer and fenced blocks, and remove the tokens that end a turn.

One reader does it for all environments and rewards. Text in a thought is never an answer: a thought may have the marks
of any family of models, and the prompt may have opened it. Marks in fenced blocks and in quotes are text.

The words next to an answer may take it back: `\boxed{42}` is wrong, it is not `\boxed{42}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentenv.chat.tool_calls.syntax import REASONING
from agentenv.core.types import Message

_END_REVERSED = re.compile(r"(?:\s|>[|｜][^<>|｜\s]{1,40}[|｜]<|>(?:s|soe|sob|dap|nrut_fo_dne|txet_fo_dne)/?<)++")
"""White space and special tokens, matched from the reversed text's start in one pass."""
_INVISIBLE = frozenset(
    map(
        chr,
        (0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x180E), 0x180F, 0x2800, 0x3164, 0xFFA0,
         *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)),
    )
)  # fmt: skip
"""Fillers, joiners, variation selectors and a blank, which Python takes for printable."""
FONTS = (
    r"(?:bf|it|rm|sf|tt|sc|em|bfseries|itshape|(?:display|text|script)style|tiny|scriptsize|footnotesize|small"
    r"|normalsize|large|Large|LARGE|huge|Huge)(?![A-Za-z])"
)
"""Pattern of LaTeX's commands, without the backslash, that change the font of what follows."""
INK = re.compile(r"\\(?:(?:text)?color ?(?:\[[A-Za-z]{1,8}\] ?)?|(?:tag\*?|label) ?)\{[^{}]{0,60}\}")
"""Colors, and the names of equations, in LaTeX."""
_BOXED_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)

_NAMES = [spell(name) for name in ("think", "thinking", "thought") for spell in (str.lower, str.title, str.upper)]
_CLOSES = {**dict(REASONING), **{f"<{name}>": f"</{name}>" for name in _NAMES}}
"""What closes a thought, by what opens it."""
_OPENS = {close: begin for begin, close in _CLOSES.items()}
_END = "<|end|>"
"""It closes a thought of gpt-oss, and ends ordinary turns of other models."""
_FINAL = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>")
_MARKS = [re.escape(mark) for mark in {*_CLOSES, *_CLOSES.values()} - {_END}]
_MARK = re.compile("|".join(mark for mark in _MARKS if mark[0] == "<"))
_BRACKETED = re.compile(r"\[/?THINK\]")
_FENCE, _TILDES = re.compile("```+"), re.compile("~~~+")
"""Patterns that begin with one literal, which `re` finds fast."""
_HEADER = re.compile(r"(?:\A|[>\]])\s*(?:assistant|model)?\s*\Z")
_TURN = re.compile(rf"{'|'.join(_MARKS)}|<[|｜]|[|｜]>|</s>|\[/?INST\]|turn>")
_STRINGLESS = re.compile(r"[^\"'#]*")
_QUOTES = frozenset("\"'`")
_TAG = re.compile(r"[\w+.{}-]{1,20}")
_STRING = re.compile(r'("""|\'\'\')|#[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|\\.', re.DOTALL)
_MAX_PREFILLED, _MAX_PROSE, _MAX_QUOTED, _MAX_TOKENS = 4000, 200, 200, 5000
"""Characters that are looked at: at the end of a prompt, on both sides of a fence, and of a thought in quotes; marks
and fences of a text that has an answer."""


def final_text(text: str, prompt: str | Sequence[Message] = "") -> str | None:
    """Return the answer: the text after the last thought, without special tokens at its end.

    None for a thought without an end: the response does not commit to an answer in it. The `prompt` may have opened the
    thought (see `with_opened_thought`).
    """
    text = with_opened_thought(text, prompt) if prompt else text
    if not _marks(text):
        return without_special_tokens(text).strip()
    reading = read(text)
    return None if reading.is_thinking else without_special_tokens(reading.parts[-1]).strip()


def thought_text(text: str, prompt: str | Sequence[Message] = "") -> str:
    """Return the first thought, without its marks; empty if there is none.

    It may lack its opening mark, which some chat templates put into the prompt, and its closing one, if a limit cut it.
    """
    text = with_opened_thought(text, prompt)
    return next(iter(read(text).thoughts), "").strip() if _marks(text) else ""


def with_opened_thought(text: str, prompt: str | Sequence[Message]) -> str:
    """Return the response with the mark of the thought that its prompt opened, if it did; at most once.

    The prompt ends with `<think>`, as in some chat templates, or the assistant's turn that it ends with begins so.
    Without that mark, a thought that a limit cut off would pass for an answer.
    """
    prompt = begun_turn(prompt)
    marks = _marks(prompt[-_MAX_PREFILLED:])
    mark = marks[-1][0] if marks else ""
    if mark not in _CLOSES or text.lstrip().startswith(mark):
        return text
    before, _, behind = prompt.rpartition(mark)
    is_begun = _HEADER.search(before[-80:]) and not _TURN.search(behind)
    return mark + text if is_begun or not behind.strip() else text


def _marks(text: str) -> list[re.Match[str]]:
    """Return the marks of thoughts, in their order."""
    marks = list(_MARK.finditer(text))
    if "THINK]" in text:
        marks = sorted([*marks, *_BRACKETED.finditer(text)], key=re.Match.start)
    return marks


def begun_turn(prompt: str | Sequence[Message]) -> str:
    """Return a prompt's text; of messages, that of an assistant's turn at their end, which the response continues."""
    if isinstance(prompt, str):
        return prompt
    last = prompt[-1] if isinstance(prompt, Sequence) and prompt else None
    content = last.get("content") if isinstance(last, Mapping) and last.get("role") == "assistant" else ""
    return content if isinstance(content, str) else ""


@dataclass(slots=True)
class Block:
    """A fenced block."""

    fence: str
    info: str
    """The text behind the fence: the language, and possibly more."""
    indent: int
    """Columns before the fence, as in a list."""
    opened: int
    """Where the line of the fence begins."""
    start: int
    end: int | None = None
    """None if the text ends in the block."""
    has_marks: bool = False
    has_fence: bool = False
    """True if a line of it looks like the fence that opens another block."""
    scanned: int = 0
    quote: str = ""
    """The quotes of the string of Python that is open at `scanned`, if it may go over several lines."""


class Reading:
    """Thoughts, answer and fenced blocks of a text."""

    def __init__(self, text: str, *, strings: bool = True) -> None:
        self.text = text
        self.thoughts: list[str] = []
        self.parts: list[str] = []
        """The text outside thoughts: before, between and after them."""
        self.blocks: list[Block] = []
        """The fenced blocks outside thoughts."""
        self.ends: list[int] = []
        """Where thoughts end."""
        self.num_kept = 0
        """Fences that were taken for code because they stand in a string of Python; never without `strings`."""
        self._strings, self._start, self._thought = strings, 0, ""
        ends = re.finditer(re.escape(_END), text)
        tokens = [*_marks(text), *_FENCE.finditer(text), *_TILDES.finditer(text), *ends]
        if len(tokens) > _MAX_TOKENS:  # reading them would take long, and no answer has so many
            tokens, self._thought = [], next(iter(_CLOSES))
        for token in sorted(tokens, key=re.Match.start):
            self._take(token)
        self.is_thinking = bool(self._thought)
        (self.thoughts if self._thought else self.parts).append(text[self._start :])

    @property
    def block(self) -> Block | None:
        """The last block, if nothing has closed it."""
        return self.blocks[-1] if self.blocks and self.blocks[-1].end is None else None

    def _take(self, token: re.Match[str]) -> None:
        mark, block = token[0], self.block
        if self._thought:
            if mark == _CLOSES[self._thought] and not self._is_quoted(token):
                self._end_thought(token)
        elif mark[0] in "`~":
            if block is None:
                self._open_block(token)
            else:
                self._close_block(block, token)
        elif block is not None:
            # Outside strings and comments Python has no marks: this ends a thought with a block that nothing closed.
            block.has_marks |= mark in _CLOSES
            before = self._line(token)[0]
            is_code = block.has_marks or not _STRINGLESS.fullmatch(before)
            if not is_code and mark != _END and not self._in_string(block, token.start() - len(before)):
                self._end_thought(token)
        elif mark == _END or self._is_quoted(token):
            return
        elif mark in _CLOSES:
            self.parts.append(self.text[self._start : token.start()])
            self._start, self._thought = token.end(), mark
        else:
            self._end_thought(token)

    def _is_quoted(self, token: re.Match[str]) -> bool:
        """Return True if a mark stands in quotes, alone or with the other one of its pair."""
        mark, (start, end), text = token[0], token.span(), self.text
        before, after = text[max(0, start - 1) : start], text[end : end + 1]
        if text.endswith("``", 0, start):  # a fence
            return False
        if before == after or mark in _CLOSES:
            rest = text[end : end + _MAX_QUOTED].partition("\n")[0]
            return before in _QUOTES and (before == after or _CLOSES[mark] + before in rest)
        rest = text[max(0, start - _MAX_QUOTED) : start].rpartition("\n")[2]
        return after in _QUOTES and after + _OPENS[mark] in rest

    def _end_thought(self, token: re.Match[str]) -> None:
        """Begin a part; if nothing opened the thought, all before was one."""
        self.thoughts.append(self.text[self._start : token.start()])
        if not self._thought:
            self.parts.clear()
            self.blocks.clear()
        header = _FINAL.match(self.text, token.end())
        self._start, self._thought = header.end() if header else token.end(), ""
        self.ends.append(self._start)

    def _open_block(self, token: re.Match[str]) -> None:
        before, info = self._line(token)
        if "`" in info or "`" in before:
            return
        indent = len(before.expandtabs(4))
        if before.strip():  # a fence at the end of a line of prose has a language
            if token[0] != "```" or _TAG.fullmatch(info.strip()) is None:
                return
            indent = 0
        start = min(token.end() + len(info) + 1, len(self.text))
        self.blocks.append(Block(token[0], info, indent, token.start() - len(before), start, scanned=start))

    def _close_block(self, block: Block, token: re.Match[str]) -> None:
        before, info = self._line(token)
        at, is_far = token.start() - len(before), len(before.expandtabs(4)) > block.indent + 3  # CommonMark: text
        if before.strip() or is_far or not token[0].startswith(block.fence):
            return
        if self._in_string(block, at):
            self.num_kept += 1
        elif info.strip():
            block.has_fence = True
        else:
            block.end = at

    def _line(self, token: re.Match[str]) -> tuple[str, str]:
        """Return the text of a fence's line before it, behind the thought, and behind it."""
        begin = max(self._start, token.start() - _MAX_PROSE)
        before = self.text[begin : token.start()].rpartition("\n")[2]
        return before, self.text[token.end() : token.end() + _MAX_PROSE].partition("\n")[0]

    def _in_string(self, block: Block, at: int) -> bool:
        """Return True if a line of the block begins in a string of Python; read on from where the last call ended."""
        while self._strings and block.scanned < at:
            if block.quote:
                end = self.text.find(block.quote, block.scanned, at)
                block.scanned, block.quote = (at, block.quote) if end < 0 else (end + 3, "")
            else:
                found = _STRING.search(self.text, block.scanned, at)
                block.scanned, block.quote = (found.end(), found[1] or "") if found else (at, "")
        return bool(block.quote)


def read(text: str) -> Reading:
    """Return the thoughts, the answer and the fenced blocks of a text; takes time in proportion to it.

    A thought ends with its closing mark, or at the end of the text. If a closing mark has no opening one, the prompt
    had it: all before is thought. A block ends with a fence that is indented by at most three columns more than the one
    that opened it (CommonMark) and does not stand in a string of several lines; it may lack its end.
    """
    reading = Reading(text)
    # A string without an end would hide the fence that ends its block, and all blocks behind it.
    return Reading(text, strings=False) if reading.block and reading.num_kept else reading


def is_blank(text: str) -> bool:
    """Return True if a text has nothing to see: no characters, or only white space and zero-width ones."""
    return all(char.isspace() or not char.isprintable() or char in _INVISIBLE for char in text)


def without_special_tokens(text: str) -> str:
    """Return the text without white space and special tokens, in the usual spellings, at its end."""
    end = _END_REVERSED.match(text[::-1])
    return text[: len(text) - end.end()] if end else text


class BoxSpan(NamedTuple):
    r"""Where a `\boxed{…}` begins, and where its content does and ends."""

    start: int
    content: int
    end: int


def boxes(text: str) -> list[BoxSpan]:
    r"""Return every nonempty `\boxed{…}` with balanced braces, in the order of their starts; linear in the text."""
    open_braces: list[tuple[int, int] | None] = []  # None for any other group
    found: list[BoxSpan] = []
    for token in _BOXED_TOKEN.finditer(text):
        if token[0] == "}":
            opened = open_braces.pop() if open_braces else None
            if opened is not None and text[opened[1] : token.start()].strip():
                found.append(BoxSpan(*opened, token.start()))
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0][-1] == "{" and len(token[0]) > 2:
            open_braces.append(token.span())
    found.sort()
    return found


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last nonempty `\boxed{…}` with balanced braces, or None."""
    found = boxes(text)
    return text[found[-1].content : found[-1].end] if found else None


_MAX_BEFORE, _MAX_BEHIND = 48, 160
"""How many characters of the words next to an answer may take it back."""
_MAX_BETWEEN, _MAX_BOXES = 80, 16
_HINT = re.compile(r"n[o'’e]|w[ri]|than|fal|in[cvs]|un|mis|an[y]|≠|err|scr|ign|dis|for|str|bac|ret|doub|错|不")
"""A part of each word that takes an answer back: most texts need no more than this look."""
_WRONG = r"(?:wrong|incorrect|false|invalid|untrue|mistaken|inaccurate|nonsense|mistake|error)\b(?! \w{3,}[^s]s\b)"
_RIGHT = (
    r"(?:right|correct|true|valid|accurate|acceptable|answer|solution|result|option|choice|it|work|hold|fit|satisfy)\b"
)
_LONG_FORMS = (("’", "'"), ("can't ", "can not "), ("n't ", " not "), ("cannot ", "can not "), ("'s ", " is "))
_BEHIND = re.compile(
    r"(?:[^\w(]|\b(?:oh|oops|wait|no|hmm+|sorry|well|actually|but|however|and|yet|hold on)\b)*+\(?"
    r"(?:(?!if|for|when|where|unless|some|one|many)[\w' ]{1,40}, )?"
    r"(?:i (?:think|believe|realize|see|know)(?: now| that)* )?"
    r"(?:(?:(?:the|my|this|that) (?:above |boxed |final )*(?:answer|box|result|value)|that|this|it|which) )?"
    r"(?:(?:is|was|are|were|be|seems|looks|can|could|must|would|will|might|may|should|does|did|do|has|have|to) )*"
    r"(?:(?:also|just|still|simply|clearly|obviously|definitely|probably|certainly|actually|completely|totally) )*"
    rf"(?:(?:the |an? )?{_WRONG}|(?:not|never) (?:be )?(?:(?:even|actually|quite|really|the|an?|my|final) )*{_RIGHT}"
    r"|(?:please )?(?:scratch|ignore|disregard|forget|strike|discard) (?:that|this|it|the (?:above|box|answer))\b"
    r"|i (?:(?:take|took) (?:that|this|it) back|retract|withdraw|made an? (?:mistake|error)|was wrong)\b"
    r"|(?:这|那)?(?:个?答案)?是?(?:错|不对|不正确))"
)
_BEFORE = re.compile(
    r"(?:(?:\b(?:not|never|neither|nor) (?:be |equal |to |simply |just )*(?:the (?:answer|value|option) )?"
    r"|\b(?:rather than|instead of|other than|anything but) |\\neq?|≠"
    r"|\b(?:wrong|incorrect|false) (?:answer|result|value|option|choice|solution|one) (?:is|was|would be)[ :]"
    r"|\b(?:wrong|incorrect|false|a mistake) to (?:say|answer|claim|write|conclude|choose) "
    r"|(?:\bi (?:\w+ )?doubt|\b(?:doubtful|unclear|unsure|unlikely|not (?:sure|certain|clear|think|believe|say)))"
    r"(?: (?:that|if|whether))?(?: (?:the|my|this))?(?: (?:final|correct|right|best))?"
    r"(?: (?:answer|result|value|solution|option|choice|it))?(?: (?:is|be|was|equals|would be|could be))?(?: option)?"
    r")(?:[^\w.,;!?]|\\[(\[])*)$"
)
_OR = re.compile(
    r"\b(?:or|otherwise|else|alternatively|maybe|perhaps|possibly)\b\W*"
    r"(?:(?:the|my|final|correct|right|best|answer|option|it|is|could be|might be)\b\W*)*(?:\w{1,3} ?=\W*)?$"
)


def is_taken_back(text: str, start: int, end: int) -> bool:
    """Return True if the words before or behind `text[start:end]` say that it is wrong, or not the answer."""
    first = max(0, start - _MAX_BEFORE)
    if not _HINT.search(text[first : end + _MAX_BEHIND].lower()):
        return False
    before, behind = text[first:start].lower(), text[end : end + _MAX_BEHIND].lower()
    for short, long in _LONG_FORMS:
        before, behind = before.replace(short, long), behind.replace(short, long)
    return _BEFORE.search(before) is not None or _BEHIND.match(behind) is not None


def is_alternative(text: str, end: int, start: int) -> bool:
    """Return True if an "or" leads from an answer that ends at `end` to the next, which starts soon, at `start`."""
    return 0 < start - end <= _MAX_BETWEEN and _OR.search(text[end:start].lower()) is not None


def standing_box(text: str) -> str | None:
    r"""Return the last nonempty `\boxed{…}` that is not taken back; empty if the last 16 are, None if there is none.

    What a later box takes back is taken back. It is "A or B" for `\boxed{A}, or \boxed{B}`.
    """
    found, wrong = boxes(text), set[str]()
    for at in range(len(found) - 1, max(len(found) - 1 - _MAX_BOXES, -1), -1):
        box = found[at]
        content = text[box.content : box.end]
        if is_taken_back(text, box.start, box.end + 1):
            wrong.add(content.strip())
        elif content.strip() not in wrong:
            before = found[at - 1] if at else box
            is_hedge = is_alternative(text, before.end + 1, box.start)
            return f"{text[before.content : before.end]} or {content}" if is_hedge else content
    return "" if found else None
