"""The messages of a prompt that a chat template rendered: OpenRLHF passes rendered prompts to an agent_func file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from agentenv.chat.encoding import encoder_of
from agentenv.core.types import Message
from agentenv.errors import ConfigError

if TYPE_CHECKING:
    from agentenv.chat.chat import Chat

MAX_USER_MESSAGES = 8
_CONTENT = "qzCONTENT{}qz"
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
            contents = [_CONTENT.format(index) for index in range(len(roles))]
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
