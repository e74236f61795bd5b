"""Text that NeMo RL tokenizes: it encodes an observation's text alone, without the chat template (#682, #862).

`ChatObservations` writes the text with the tokens that the template puts between two actions.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.chat.chat import Chat, text_of
from agentenv.chat.encoding import encoder_of
from agentenv.core.types import Message
from agentenv.errors import ConfigError

logger = logging.getLogger(__name__)

NOTHING = "\n"
"""Replacement for an empty observation: some tokenizers encode an empty text as a float
tensor, which NeMo RL's single-sample rollouts append to the ids; all ids then become floats."""
_BREAK = "\u200b"
_MARKERS = re.compile(
    r"<\|[a-z_]{2,40}\|>|<(?:start|end)_of_turn>|</?s>|\[/?INST\]|<\uff5c[^<>\uff5c]{2,40}\uff5c>|<\|turn>"
)
"""Markers that the chat templates of common models put around messages."""


def is_templated(content: object) -> bool:
    """Return True if the content has a chat template's markers, which NeMo RL's data processors leave in (#854)."""
    return isinstance(content, str) and _MARKERS.search(content) is not None


def plain_text(observation: str | Sequence[Message]) -> str:
    """Return an observation as text; messages lose their roles and get an empty line between them."""
    text = observation if isinstance(observation, str) else "\n\n".join(map(text_of, observation))
    return text or NOTHING


class ChatObservations:
    """Observations with the turn boundary before them and the generation prompt after them.

    NeMo RL shows an environment no tokens, so the action is assumed to have closed its turn, unless it ends with a stop
    string that the environment requested. A zero-width space breaks special tokens in the messages' text, because NeMo
    RL would encode them as tokens.
    """

    def __init__(self, chat: Chat) -> None:
        if not chat.has_template:
            raise ConfigError(
                "env.wrap_observation: expected a tokenizer with a chat template for 'chat', got one without. "
                "Set it to 'raw'."
            )
        self.chat = chat
        self._added = sorted(encoder_of(chat.tokenizer).added, key=len, reverse=True)
        ids = self._ids([{"role": "user", "content": "What?"}], closed=True)
        again = self.chat.encode(self.chat.decode(ids))
        if ids != again:
            logger.warning(
                "wrap_observation: expected the text between turns to have the tokens %s, got %s. This tokenizer puts "
                "something before a text that is encoded alone, as NeMo RL encodes it (#2844).",
                ids,
                again,
            )

    def text(self, observation: str | Sequence[Message], *, closed: bool = True) -> str:
        """Return the text for NeMo RL; `closed` means that the action has the end of its turn.

        Raises:
            ConfigError: the template refuses the messages.
        """
        if not observation:
            return NOTHING
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        safe = []
        for message in messages:
            content = text_of(message)
            for token in self._added:
                if len(token) > 1:
                    content = content.replace(token, token[0] + _BREAK + token[1:])
            safe.append({**message, "content": content})
        return self.chat.decode(self._ids(safe, closed=closed))

    def _ids(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        ids = self.chat.bridge([], messages, history=None).ids  # as after an action that did not close its turn
        close, template = list(self.chat.template.close_ids), self.chat.template
        if closed and close and ids[: len(close)] == close:
            return ids[len(close) :]
        if closed and not close and ids and ids[0] in template.markers:
            return ids[1:]  # the next role's marker ended the turn, and was sampled
        return ids


def prompt_of(log: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> Sequence[Message]:
    """Return the part of a bare log before the policy's first action.

    NeMo RL puts an `environment` message after each action: everything before the message that precedes the first of
    those is the prompt, including example messages of an assistant. Without any, the last message is the action.
    """
    first = next((index for index, message in enumerate(log) if message.get("role") == "environment"), len(log))
    return messages[: max(0, first - 1)]
