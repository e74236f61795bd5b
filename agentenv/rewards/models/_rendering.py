"""A tokenizer in a thread of its own, loaded at its first use: conversations as ids or as text, off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agentenv.agent import Tokenizer
from agentenv.deadlines import waiting
from agentenv.errors import ConfigError
from agentenv.rewards._arguments import one_of, whole_number
from agentenv.rewards._threads import Threads
from agentenv.rewards.models._model import NO_LIMIT, limit_of, tokenizer_of
from agentenv.rewards.models.render import OVERFLOWS, Overflow, Rendered, Renderer, checked
from agentenv.rewards.models.types import Conversation
from agentenv.template import render
from agentenv.types import Message

_T = TypeVar("_T")
_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Text:
    """A conversation as text."""

    query: str
    """All of it."""
    prompt: str = ""
    """What stands before the last answer, which `query` begins with; empty where that is not known."""
    num_tokens: int | None = None
    truncated: bool = False
    messages: Sequence[Message] | None = None
    """The conversation as it is, for a server that renders it; then there is no text."""


class Rendering:
    """Renders with one tokenizer; safe to call from several event loops.

    Args:
        where: the scorer's name, for errors.
        tokenizer: a folder, a name or an object; None takes text as it is.
        max_length: most tokens; by default what the tokenizer, or who asks, takes.
        overflow: see Renderer.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        where: str,
        tokenizer: str | Path | Tokenizer | None,
        *,
        max_length: int | None,
        overflow: Overflow,
    ) -> None:
        self._where, self._given = where, str(tokenizer) if isinstance(tokenizer, Path) else tokenizer
        self.max_length = None if max_length is None else whole_number(f"{where}.max_length", max_length, low=2)
        self._overflow: Any = one_of(f"{where}.overflow", overflow, OVERFLOWS)
        self._thread = Threads(1)
        self._renderer: Renderer | ConfigError | None = None
        if not (tokenizer is None or isinstance(self._given, str) or hasattr(tokenizer, "apply_chat_template")):
            raise ConfigError(f"{where}.tokenizer: expected a folder, a name or a tokenizer, got {tokenizer!r:.200}.")

    @property
    def has_tokenizer(self) -> bool:
        """Whether it can render messages."""
        return self._given is not None

    async def ids(self, conversation: Conversation, most: int | None = None) -> Rendered:
        """A conversation's ids, of which at most `max_length` or else `most`, the same at each call, are wanted.

        Raises:
            DataError: the conversation cannot be rendered, or is too long.
            ConfigError: there is no such tokenizer.
        """
        return await self._run(lambda: self._open(most).ids(conversation))

    async def text(self, conversation: Conversation) -> Text:
        """A conversation as the tokenizer's template renders it; text as it is. What is cut is decoded again.

        Raises:
            DataError: the conversation cannot be rendered, or is too long.
            ConfigError: there is no such tokenizer, or none and a conversation of messages.
        """
        if self.has_tokenizer:
            return await self._run(partial(self._text, conversation))
        if isinstance(conversation, str):
            return Text(conversation)
        raise self.no_tokenizer()

    async def check(self, most: int | None = None) -> None:
        """Open the tokenizer, if that is not done; `most` as in `ids`.

        Raises:
            ConfigError: there is no such tokenizer, or none was given.
        """
        if not self.has_tokenizer:
            raise self.no_tokenizer()
        await self._run(lambda: self._open(most))

    def no_tokenizer(self) -> ConfigError:
        """What is said of messages without one."""
        return ConfigError(
            f"{self._where}.tokenizer: expected the reward model's to render messages with, got None. "
            "Give its folder or name, or score text."
        )

    async def _run(self, work: Callable[[], _T]) -> _T:
        with waiting():
            found: _T = await self._thread.run(work, limit_s=_LIMIT_S)
        return found

    def _text(self, conversation: Conversation) -> Text:
        renderer = self._open(None)
        rendered = renderer.ids(conversation)  # which also refuses what cannot be scored
        num_tokens = len(rendered.token_ids)
        if rendered.truncated:
            tokenizer: Any = renderer.tokenizer
            return Text(tokenizer.decode(rendered.token_ids, skip_special_tokens=False), "", num_tokens, True)
        if isinstance(conversation, str):
            return Text(conversation, "", num_tokens)
        messages = [
            {key: item for key, item in message.items() if key != "trusted"} for message in checked(conversation)
        ]
        query = render(renderer.tokenizer, messages, gen=False)
        prompt = render(renderer.tokenizer, messages[:-1], gen=True)
        return Text(query, prompt if query.startswith(prompt) else "", num_tokens)

    def _open(self, most: int | None) -> Renderer:
        """In the thread, so never twice at once; a tokenizer that is not there stays so."""
        if self._renderer is None:
            try:
                self._renderer = self._loaded(most)
            except ConfigError as error:
                self._renderer = error
        if isinstance(self._renderer, ConfigError):
            raise self._renderer
        return self._renderer

    def _loaded(self, most: int | None) -> Renderer:
        tokenizer: Any = self._given
        if isinstance(tokenizer, str):
            tokenizer = tokenizer_of(f"{self._where}.tokenizer", tokenizer, "Check the name.")
        known = self.max_length or most or limit_of(tokenizer) or NO_LIMIT
        return Renderer(tokenizer, max_length=known, overflow=self._overflow)
