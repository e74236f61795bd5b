"""Cut the messages of an observation so that they fit into the remaining room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from agentenv.chat.chat import ChatOptions
from agentenv.core.types import Message
from agentenv.errors import ConfigError

_Reply = TypeVar("_Reply")

CHARS_PER_TOKEN = 32
"""More characters than any text has: the upper bound of the search for the longest content that fits."""
_NOTE = "\n[… {} characters left out …]\n"


@dataclass(frozen=True, slots=True)
class ObservationFitter(Generic[_Reply]):
    """Cuts the messages of one observation."""

    options: ChatOptions
    room: int
    """Maximum number of tokens that the observation may add."""
    max_length: int
    make: Callable[[Sequence[Message]], tuple[_Reply, int]]
    """Return the reply that messages become, and the number of tokens that it adds to the episode."""
    bridge_size: Callable[[Sequence[Message]], int]
    """Return the tokens of the messages as they follow the action, even if the history is rendered again."""

    def without_excess(self, messages: Sequence[Message]) -> Sequence[Message] | None:
        """Return the messages, cut to `max_observation_tokens`; None if they are too long to be encoded at all.

        Raises:
            ConfigError: not even empty messages fit into `max_observation_tokens`.
        """
        most = self.options.max_observation_tokens
        # Encoding text that cannot fit would only delay other episodes.
        bound = CHARS_PER_TOKEN * max(self.room, self.max_length, most or 0)
        if any(_length(message) > bound for message in messages):
            if self.options.long_observation == "end" and most is None:
                return None
            messages = [_shorten(message, bound) for message in messages]
        if most is None:
            return messages
        short = _cut(messages, lambda new: self.bridge_size(new) <= most, most)
        if short is None:
            least = self.bridge_size([_shorten(message, 0) for message in messages])
            raise ConfigError(
                f"--max_observation_tokens: expected at least {least}, the tokens of the template around the messages "
                f"and of the note about the cut, got {most}. Raise it."
            )
        return short

    def fit(self, messages: Sequence[Message], reserve: int | None) -> tuple[Sequence[Message], _Reply] | None:
        """Return the messages, cut to the room, with their reply; None if they may not be cut or the room is too small.

        Cut ones leave `reserve` tokens for the next action, at most half of the room that contents and the action
        share.

        Raises:
            ConfigError: not even empty messages fit into `max_observation_tokens`.
        """
        whole = self.without_excess(messages)
        if whole is None:
            return None
        reply, size = self.make(whole)
        if size <= self.room:
            return whole, reply
        if self.options.long_observation == "end":
            return None
        bare = self.make([_shorten(message, 0) for message in whole])[1]
        free = max(0, self.room - bare)
        most = self.room - min(free // 2, free if reserve is None else reserve)
        short = _cut(whole, lambda new: self.make(new)[1] <= most, self.max_length)
        return None if short is None else (short, self.make(short)[0])


def _cut(
    messages: Sequence[Message], fits: Callable[[Sequence[Message]], bool], max_tokens: int
) -> Sequence[Message] | None:
    """Return the messages with the middle of their longest contents cut so that they just fit; None if impossible."""
    if fits(messages):
        return messages
    least, most = 0, min(max(_length(message) for message in messages), CHARS_PER_TOKEN * max_tokens)
    if not fits([_shorten(message, least) for message in messages]):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        if fits([_shorten(message, middle) for message in messages]):
            least = middle
        else:
            most = middle - 1
    return [_shorten(message, least) for message in messages]


def _length(message: Message) -> int:
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return max((len(str(part.get("text") or "")) for part in content), default=0)
    return len(content) if isinstance(content, str) else 0


def _shorten(message: Message, num_chars: int) -> Message:
    """Return the message with at most `num_chars` characters in its content, or in each text part."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        parts = [
            {**p, "text": _shorten_text(p["text"], num_chars)} if isinstance(p.get("text"), str) else p for p in content
        ]
        return message if parts == list(content) else {**message, "content": parts}
    if not isinstance(content, str):
        return message
    short = _shorten_text(content, num_chars)
    return message if short == content else {**message, "content": short}


def _shorten_text(text: str, num_chars: int) -> str:
    """Return at most `num_chars` characters of a text, with a note in place of the omitted middle."""
    if len(text) <= num_chars + len(_NOTE):
        return text
    head, tail = text[: num_chars - num_chars // 2], text[len(text) - num_chars // 2 :]
    return head + _NOTE.format(len(text) - num_chars) + tail
