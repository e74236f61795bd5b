"""A tokenizer in its own thread, loaded at its first use: renders conversations off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agentenv._util.calls import waiting
from agentenv._util.off_loop import off_loop, size_of
from agentenv.chat.template import render
from agentenv.core.arguments import one_of, whole_number
from agentenv.core.engine import Tokenizer
from agentenv.core.types import Message
from agentenv.errors import ConfigError
from agentenv.rewards.models.checkpoint import NO_LIMIT, limit_of, tokenizer_of
from agentenv.rewards.models.render import OVERFLOWS, ConversationRenderer, Overflow, Rendered, checked, plain_messages
from agentenv.rewards.models.types import Conversation
from agentenv.rewards.workers.threads import Threads

_T = TypeVar("_T")
_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A conversation as text."""

    query: str
    """The whole text."""
    prompt: str = ""
    """The text before the last answer, a prefix of `query`; "" if unknown."""
    num_tokens: int | None = None
    truncated: bool = False
    messages: Sequence[Message] | None = None
    """The conversation for a server that renders it; the text is then empty."""


async def messages_for_server(conversation: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a conversation for a server that renders it.

    Raises:
        DataError: it is not a valid one.
    """
    return await off_loop(size_of(conversation), lambda: plain_messages(checked(conversation)))


class ThreadedRenderer:
    """Renders with one tokenizer; safe to call from several event loops.

    Args:
        where: the scorer's name, for errors.
        tokenizer: a folder, a name or an object; None takes text as it is.
        max_length: maximum number of tokens. Default: the limit of the tokenizer or of the caller.
        overflow: see ConversationRenderer.

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
        self._renderer: ConversationRenderer | ConfigError | None = None
        if not (tokenizer is None or isinstance(self._given, str) or hasattr(tokenizer, "apply_chat_template")):
            raise ConfigError(f"{where}.tokenizer: expected a folder, a name or a tokenizer, got {tokenizer!r:.200}.")

    @property
    def has_tokenizer(self) -> bool:
        """Whether it can render messages."""
        return self._given is not None

    async def ids(self, conversation: Conversation, most: int | None = None) -> Rendered:
        """Return a conversation's ids, at most `max_length`, or else `most`, which must be the same at each call.

        Raises:
            DataError: the conversation cannot be rendered, or is too long.
            ConfigError: the tokenizer does not exist.
        """
        return await self._run(lambda: self._open(most).ids(conversation))

    async def text(self, conversation: Conversation) -> RenderedText:
        """Return a conversation rendered by the tokenizer's template; text is unchanged. Cut ids are decoded.

        Raises:
            DataError: the conversation cannot be rendered, or is too long.
            ConfigError: the tokenizer does not exist, or none was given for a conversation of messages.
        """
        if self.has_tokenizer:
            return await self._run(partial(self._text, conversation))
        if isinstance(conversation, str):
            return RenderedText(conversation)
        raise self.no_tokenizer()

    async def check(self, most: int | None = None) -> None:
        """Open the tokenizer, if that is not done; `most` as in `ids`.

        Raises:
            ConfigError: the tokenizer does not exist, or none was given.
        """
        if not self.has_tokenizer:
            raise self.no_tokenizer()
        await self._run(lambda: self._open(most))

    def no_tokenizer(self) -> ConfigError:
        """Return the error for messages without a tokenizer."""
        return ConfigError(
            f"{self._where}.tokenizer: expected the reward model's to render messages with, got None. "
            "Pass its folder or name, or score text."
        )

    async def _run(self, work: Callable[[], _T]) -> _T:
        with waiting():
            found: _T = await self._thread.run(work, limit_s=_LIMIT_S)
        return found

    def _text(self, conversation: Conversation) -> RenderedText:
        renderer = self._open(None)
        rendered = renderer.ids(conversation)  # which also refuses what cannot be scored
        num_tokens = len(rendered.token_ids)
        if rendered.truncated:
            tokenizer: Any = renderer.tokenizer
            return RenderedText(tokenizer.decode(rendered.token_ids, skip_special_tokens=False), "", num_tokens, True)
        if isinstance(conversation, str):
            return RenderedText(conversation, "", num_tokens)
        messages = plain_messages(checked(conversation))
        query = render(renderer.tokenizer, messages, gen=False)
        prompt = render(renderer.tokenizer, messages[:-1], gen=True)
        return RenderedText(query, prompt if query.startswith(prompt) else "", num_tokens)

    def _open(self, most: int | None) -> ConversationRenderer:
        """Load in the thread, so never twice at once; a ConfigError is raised again at every call."""
        if self._renderer is None:
            try:
                tokenizer: Any = self._given
                if isinstance(tokenizer, str):
                    tokenizer = tokenizer_of(f"{self._where}.tokenizer", tokenizer, "Check the name.")
                known = self.max_length or most or limit_of(tokenizer) or NO_LIMIT
                self._renderer = ConversationRenderer(tokenizer, max_length=known, overflow=self._overflow)
            except ConfigError as error:
                self._renderer = error
        if isinstance(self._renderer, ConfigError):
            raise self._renderer
        return self._renderer
