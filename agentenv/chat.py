"""Text and chat messages to token ids, never re-tokenizing an action.

`Chat.prompt` gives the ids an episode begins with; `Chat.reply` the ids to put after an action. A sampled action is
only looked at (its last ids say whether the turn was closed), never decoded and encoded again, and no real assistant
text is ever rendered: a reply is the tail of a rendering in which a sentinel stands for the assistant's turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentenv.agent import Tokenizer
from agentenv.errors import ConfigError
from agentenv.types import Message

_SENTINEL = "qzSENTINELqz"


class Chat:
    """One tokenizer with its chat template; the only place where text becomes ids and ids become text.

    A tokenizer without a template speaks plainly: `User: …` and `Assistant:` paragraphs (`has_template` is False).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.special_ids = frozenset([*tokenizer.all_special_ids, *eos])

    def prompt(self, observation: str | Sequence[Message]) -> list[int]:
        """The first ids of an episode: text as it is, messages rendered up to where the assistant begins."""
        if isinstance(observation, str):
            return self.encode(observation)
        if self.has_template:
            return self.encode(self.render(observation))
        return self.tokenizer.encode(_plain(observation), add_special_tokens=True)

    def reply(self, action_ids: Sequence[int], observation: str | Sequence[Message]) -> list[int]:
        """The ids that follow an action: text as it is; messages with whatever the turn still lacks before them.

        The close of the assistant's turn is added where the action did not sample it (it was cut by a limit or a stop
        string) and is not repeated where it did.
        """
        if isinstance(observation, str):
            return self.encode(observation)
        if not observation:
            return []
        if not self.has_template:
            return self.encode("\n\n" + _plain(observation))
        sentinel = _SENTINEL
        while any(sentinel in str(message) for message in observation):
            sentinel += _SENTINEL[-1]
        stem: list[Message] = [{"role": "user", "content": "."}, {"role": "assistant", "content": sentinel}]
        rendered = self.render([*stem, *observation])
        before, found, tail_text = rendered.partition(sentinel)
        if not found or sentinel in tail_text or not before:
            raise ConfigError(
                "Chat.reply: expected the chat template to keep the assistant's text once, got a rendering without it. "
                "Use a tokenizer whose template renders user, assistant and user messages."
            )
        tail = self.encode(tail_text)
        return tail[self._num_closed(action_ids, tail) :]

    def _num_closed(self, action_ids: Sequence[int], tail: Sequence[int]) -> int:
        """How many ids of `tail`, which begins with the close of the assistant's turn, the action already holds."""
        num_close = next((i + 1 for i, token in enumerate(tail) if token in self.special_ids), 0)
        for num in range(min(num_close, len(action_ids)), 0, -1):
            if list(action_ids[-num:]) == list(tail[:num]):
                return num
        # Another terminator than the template's ended the turn: it stands for the close. One that the template puts
        # elsewhere (it opens a turn) is none: there the action was cut.
        ended = bool(action_ids) and action_ids[-1] in self.special_ids and action_ids[-1] not in tail[num_close:]
        return num_close if ended else 0

    def render(self, messages: Sequence[Message]) -> str:
        """Messages as text, up to where the assistant begins.

        Raises:
            ConfigError: the template refuses them; with the template's own message.
        """
        if not self.has_template:
            return _plain(messages)
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            roles = [message.get("role") for message in messages]
            raise ConfigError(
                f"Chat.render: expected messages that the chat template takes, got roles {roles}: {error}. "
                "Change the messages or use another model."
            ) from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Text as ids that continue a sequence: nothing is put around them."""
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids as text, special tokens included."""
        options: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(token_ids), **options)) if token_ids else ""

    def action_text(self, token_ids: Sequence[int], stop_token_ids: Sequence[int] = ()) -> str:
        """An action as text: decoded from its ids, without the one terminator at its end."""
        closed = bool(token_ids) and (token_ids[-1] in self.special_ids or token_ids[-1] in stop_token_ids)
        return self.decode(token_ids[:-1] if closed else token_ids)


def _plain(messages: Sequence[Message]) -> str:
    paragraphs = [f"{str(message['role']).capitalize()}: {message['content']}" for message in messages]
    return "\n\n".join([*paragraphs, "Assistant:"])
