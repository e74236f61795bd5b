"""Text that a chat template has rendered: `RenderedText` recognizes it, `messages_of` takes it apart.

The template must not wrap it once more, and OpenRLHF passes rendered prompts to an agent_func file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from weakref import WeakKeyDictionary

from agentenv.chat.encoding import Encoder, encoder_of
from agentenv.chat.template import Template, says
from agentenv.core.types import Message
from agentenv.errors import ConfigError

if TYPE_CHECKING:
    from agentenv.chat.chat import Chat

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


MAX_USER_MESSAGES = 8
_pieces: WeakKeyDictionary[Chat, list[tuple[tuple[str, ...], list[str]]]] = WeakKeyDictionary()
"""The roles of conversations, and the texts before, between and after their contents."""


def messages_of(text: str, chat: Chat) -> list[Message] | None:
    """Return the messages that the chat's template renders as `text`; None if there are none.

    Looked for are conversations of user and assistant of up to `MAX_USER_MESSAGES`, with a system message or without.
    Contents with added tokens are not taken apart.
    """
    if not chat.has_template:
        return None
    if chat not in _pieces:
        _pieces[chat] = list(_rendered(chat))
    encoder = encoder_of(chat.tokenizer)
    for roles, pieces in _pieces[chat]:
        contents = _between(text, pieces)
        mark = encoder.free_mark(contents or [])
        if contents is not None and encoder.protect(contents, mark) == contents:
            return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    return None


def _rendered(chat: Chat) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield the longest conversations first: a shorter one would take the turns of a longer one for a content.

    Among equals the one without a system message comes first, since some templates add a system message.
    """
    for num in range(MAX_USER_MESSAGES, 0, -1):
        for head in ((), ("system",)):
            roles = (*head, *(("user", "assistant") * num)[:-1])
            contents = [f"qzCONTENT{index}qz" for index in range(len(roles))]
            try:
                text = chat.render(
                    [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
                )
            except ConfigError:  # no such role
                continue
            pieces: list[str] = []
            if all(text.count(content) == 1 for content in contents):
                for content in contents:
                    piece, _, text = text.partition(content)
                    pieces.append(piece)
                if pieces[0] or text:  # else any text would be a content
                    yield roles, [*pieces, text]


def _between(text: str, pieces: Sequence[str]) -> list[str] | None:
    """Return the texts between the pieces, which `text` consists of otherwise."""
    first, *inner, last = pieces
    if not (text.startswith(first) and text.endswith(last) and len(first) + len(last) <= len(text)):
        return None
    rest, contents = text[len(first) : len(text) - len(last)], []
    for piece in inner:
        content, found, rest = rest.partition(piece)
        if not found:
            return None
        contents.append(content)
    return [*contents, rest]
