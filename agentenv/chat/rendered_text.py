"""Recognize text that a chat template has rendered, which the template must not wrap once more."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from agentenv.chat.encoding import Encoder
from agentenv.chat.template import Template, says
from agentenv.core.types import Message
from agentenv.errors import ConfigError

_CONTENT = "qzCONTENTqz"
_TALKS: tuple[list[Message], ...] = (
    [says("user", _CONTENT)],
    [says("system", _CONTENT), says("user", ".")],
    [says("user", "."), says("assistant", "."), says("user", _CONTENT)],
)


@dataclass(frozen=True, slots=True)
class RenderedText:
    """What a rendering looks like: a turn begins as the template begins it, and ends, or the answer begins.

    A text that only has such markers in it, such as a question about them, does not match.
    """

    added: re.Pattern[str]
    """An added token."""
    fillers: re.Pattern[str]
    """What may follow the header: whitespace and marks of reasoning."""
    openings: frozenset[str]
    """How turns begin, up to the last added token or the end of its line."""
    header: str
    """How the answer begins."""
    closes: tuple[str, ...]
    """The tokens that end a turn."""

    @classmethod
    def of(cls, template: Template, encoder: Encoder, render: Callable[[Sequence[Message]], str], bos: str) -> Self:
        """Return what renderings by a template look like."""
        tokens = "|".join(re.escape(token) for token in sorted(encoder.added, key=len, reverse=True))
        added = re.compile(tokens or "(?!)")
        marks = [re.escape(way.strip()) for way in template.reasoning or ()]
        fillers = re.compile(rf"(?:{'|'.join([*marks, ' '])}|\s)++")
        header = _without_end(template.generation_prompt, fillers)
        begins = added.match(header)
        closes = {template.close.strip(), begins[0] if begins and begins[0] != header else ""} - {""}
        openings = {*template.text_markers}
        for talk in _TALKS:
            try:
                head = render(talk).partition(_CONTENT)[0].removeprefix(bos)
            except ConfigError:  # the template refuses the roles
                continue
            for piece in re.split("|".join(map(re.escape, closes)) or "(?!)", head):
                last = max((token.end() for token in added.finditer(piece)), default=0)
                line = re.match(r".*(?=\n)" if last else "(?s:.*)", piece[last:])
                openings.add((piece[:last] + (line[0] if line else "")).strip())
        own = frozenset(opening for opening in openings if opening not in header)
        return cls(added, fillers, own, header, tuple(closes))

    def matches(self, text: str) -> bool:
        """Return True if a text is a rendering."""
        text = _without_end(text, self.fillers)
        openings = [opening for opening in self.openings if opening in text]
        if not openings or not self.header:
            return False
        if not (self.header in text or text.endswith(self.closes)):
            return False
        starts = [text.partition(opening)[0] for opening in openings]
        return text.endswith(self.header) or any(not self.added.sub("", start).strip() for start in starts)


def _without_end(text: str, fillers: re.Pattern[str]) -> str:
    """Return a stripped text without the fillers at its end, which one scan finds however many there are."""
    end = next((found.start() for found in fillers.finditer(text) if found.end() == len(text)), len(text))
    return text[:end].strip()
