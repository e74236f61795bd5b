"""What NeMo RL makes tokens of: it encodes an observation's text as it is, without the chat template (#682, #862).

`ChatObservations` writes the text whose tokens are those that the template puts between two actions.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.chat import Chat, text_of
from agentenv.encoding import encoder_of
from agentenv.errors import ConfigError
from agentenv.types import Message

logger = logging.getLogger(__name__)

NOTHING = "\n"
"""In place of no observation: of an empty text some tokenizers make a float tensor, which NeMo RL's rollouts of single
samples join to the ids, and then all ids are floats."""
_BREAK = "\u200b"
_MARKERS = re.compile(
    r"<\|[a-z_]{2,40}\|>|<(?:start|end)_of_turn>|</?s>|\[/?INST\]|<\uff5c[^<>\uff5c]{2,40}\uff5c>|<\|turn>"
)
"""What the chat templates of common models put around messages."""


def is_templated(content: object) -> bool:
    """Whether a message's content has a chat template's markers in it: NeMo RL's data processors leave it so (#854)."""
    return isinstance(content, str) and _MARKERS.search(content) is not None


def plain_text(observation: str | Sequence[Message]) -> str:
    """An observation as text; messages without their roles, an empty line between two of them."""
    text = observation if isinstance(observation, str) else "\n\n".join(map(text_of, observation))
    return text or NOTHING


class ChatObservations:
    """Observations with the turn boundary before them and the generation prompt behind them.

    NeMo RL shows an environment no tokens: that the action closed its turn is taken for granted, unless it ends with a
    stop string that the environment asked for. Text of added tokens in what messages say is broken by a zero-width
    space, since NeMo RL would make tokens of it.
    """

    def __init__(self, chat: Chat) -> None:
        if not chat.has_template:
            raise ConfigError(
                "env.wrap_observation: expected a tokenizer with a chat template for 'chat', got one without. "
                "Set it to 'raw'."
            )
        self.chat = chat
        self._added = sorted(encoder_of(chat.tokenizer).added, key=len, reverse=True)
        self._check()

    def _check(self) -> None:
        ids = self._ids([{"role": "user", "content": "What?"}], closed=True)
        again = self.chat.encode(self.chat.decode(ids))
        if ids != again:
            logger.warning(
                "wrap_observation: expected the text between turns to have the tokens %s, got %s. This tokenizer puts "
                "something before a text that is encoded alone, as NeMo RL does it (#2844).", ids, again,
            )  # fmt: skip

    def text(self, observation: str | Sequence[Message], *, closed: bool = True) -> str:
        """The text for NeMo RL; `closed` says that the action has the end of its turn.

        Raises:
            ConfigError: the template refuses the messages.
        """
        if not observation:
            return NOTHING
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        safe = [{**message, "content": self._broken(text_of(message))} for message in messages]
        return self.chat.decode(self._ids(safe, closed=closed))

    def _ids(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        ids = self.chat.bridge([], messages).ids  # as after an action without an end
        close, template = list(self.chat.template.close_ids), self.chat.template
        if closed and close and ids[: len(close)] == close:
            return ids[len(close) :]
        if closed and not close and ids and ids[0] in template.markers:
            return ids[1:]  # the next role's marker ended the turn, and was sampled
        return ids

    def _broken(self, text: str) -> str:
        for token in self._added:
            if len(token) > 1:
                text = text.replace(token, token[0] + _BREAK + token[1:])
        return text


def prompt_of(log: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> Sequence[Message]:
    """The part of a bare log before the policy's first action, where that is the log's last message or one before it.

    NeMo RL puts an `environment` message after each action: what stands before the message that precedes the first of
    those is the prompt, examples of an assistant's included.
    """
    first = next((index for index, message in enumerate(log) if message.get("role") == "environment"), len(log))
    return messages[: max(0, first - 1)]
