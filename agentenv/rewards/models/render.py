"""Conversations as token ids or text for a reward model, by its own tokenizer and template.

A conversation is rendered at once, as in the model's training: without a generation prompt, and independent of the
policy's template. Roles that are out of order or dropped by the template are refused: the score of another conversation
would be worse than none. Message contents cannot forge the template's tokens (`agentenv.chat.encoding`) unless they
have `"trusted": True`; text is encoded unchanged, special tokens included.

`ThreadedRenderer` loads a tokenizer at its first use, and renders off the event loop.

Example:
    >>> renderer = ConversationRenderer(tokenizer, max_length=2048)
    >>> renderer.ids([{"role": "user", "content": "Hi"}, {"role": "assistant", …}])
    Rendered(token_ids=[151644, 872, …, 151645, 198], truncated=False)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from agentenv._util.brief import brief
from agentenv._util.calls import waiting
from agentenv._util.off_loop import off_loop, size_of
from agentenv._util.paths import PACKAGE
from agentenv.chat.encoding import encode_of, encoder_of
from agentenv.chat.template import render
from agentenv.core.arguments import one_of, whole_number
from agentenv.core.engine import Tokenizer
from agentenv.core.messages import normalized
from agentenv.core.types import Message
from agentenv.errors import ConfigError, DataError
from agentenv.rewards.models.types import Conversation
from agentenv.rewards.workers.threads import Threads

_T = TypeVar("_T")
Overflow = Literal["error", "left", "right"]
"""Treatment of a conversation that is too long: refuse it, or cut its beginning or its end."""
OVERFLOWS = ("error", "left", "right")
BEFORE: Mapping[str, tuple[str, ...]] = {
    "system": ("",),
    "developer": ("",),
    "user": ("", "system", "developer", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
"""The roles that may directly precede each role; "" is the beginning."""
_MAX_KNOWN = 256
_SHIPPED = PACKAGE / "_assets"
_LIMIT_S = 3600.0
NO_LIMIT = 1_000_000_000
"""transformers gives tokenizers without a limit a far larger number."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as token ids."""

    token_ids: list[int]
    """At least one, and at most `max_length`."""
    truncated: bool = False
    """Whether the conversation was too long and was cut."""


class ConversationRenderer:
    """Renders conversations with one tokenizer; safe to call from one thread at a time.

    Args:
        tokenizer: the reward model's tokenizer.
        max_length: maximum number of tokens.
        overflow: treatment of longer conversations. `left` keeps the end and a leading BOS; `right` keeps the beginning
            and, with `add_eos`, the EOS. A text of over 2 x `max_length` x the longest token's characters is too long
            in any case.
        add_bos: add a BOS to conversations that lack it. Otherwise messages have what the template renders; the
            tokenizer never adds a second BOS.
        add_eos: add an EOS to conversations that do not end with it, as OpenRLHF trains its reward models.
        template_kwargs: further variables of the chat template.

    With a chat template, text is treated as a rendering that has its special tokens. Without one (encoders), it gets
    the tokenizer's special tokens, but no second BOS.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        overflow: Overflow = "error",
        add_bos: bool = False,
        add_eos: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.max_length = tokenizer, whole_number("ConversationRenderer.max_length", max_length, low=2)
        self.overflow = one_of("ConversationRenderer.overflow", overflow, OVERFLOWS)
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self._bos = self._wanted("bos", add_bos)
        self._eos = self._wanted("eos", add_eos)
        self._variables = dict(template_kwargs or {})
        self._encode, self._encoder = encode_of(tokenizer), encoder_of(tokenizer)
        self._known: set[tuple[str, ...]] = set()

    def _wanted(self, which: str, add: bool) -> int | None:
        """Return the token id to add to each conversation, or None."""
        token: int | None = getattr(self.tokenizer, f"{which}_token_id", None)
        if add and token is None:
            raise ConfigError(
                f"ConversationRenderer.add_{which}: expected a tokenizer with {which.upper()}, got one without."
            )
        return token if add else None

    def ids(self, conversation: Conversation) -> Rendered:
        """Return the ids of a conversation, at most `max_length`.

        Raises:
            DataError: it is empty, too long, not a conversation, or has roles out of order or dropped by the template.
        """
        if isinstance(conversation, str):
            whole = _encodable(conversation)
            text = self._without_middle(whole)
            ids = list(self._encode(text, add_special_tokens=False)) if text else []
            bos = getattr(self.tokenizer, "bos_token_id", None)
            if text and not self.has_template and (bos is None or ids[:1] != [bos]):
                ids = list(self._encode(text, add_special_tokens=True))
        else:
            messages = checked(conversation)
            if not self.has_template:
                raise DataError(
                    "conversation: expected text for a tokenizer without a chat template, got messages. "
                    "Pass the text that the reward model was trained on, or set the tokenizer's chat_template."
                )
            self._check_kept(messages)
            bare = plain_messages(messages)
            mark = self._encoder.free_mark(bare)
            protected = [
                new if old.get("trusted") is True else self._encoder.protect(new, mark, ends=True)
                for old, new in zip(messages, bare, strict=True)
            ]
            whole = _encodable(self._render(protected))
            text = self._without_middle(whole)
            ids = self._encoder.start(text, mark)
        if not ids:
            raise DataError("conversation: expected something to score, got an empty one. Correct the row.")
        ids = ids if self._bos is None or ids[0] == self._bos else [self._bos, *ids]
        ids = ids if self._eos is None or ids[-1] == self._eos else [*ids, self._eos]
        most = self.max_length
        if len(ids) <= most:
            return Rendered(ids, truncated=len(text) < len(whole))
        if self.overflow == "error":
            raise self._too_long(str(len(ids)))
        if self.overflow == "right":
            return Rendered(ids[:most] if self._eos is None else [*ids[: most - 1], self._eos], truncated=True)
        head = ids[:1] if ids[0] == getattr(self.tokenizer, "bos_token_id", None) else []
        return Rendered(head + ids[len(ids) - most + len(head) :], truncated=True)

    def _without_middle(self, text: str) -> str:
        """Return a text without the middle, which is cut anyway, if either end fills `max_length` longest tokens.

        Encoding a text of megabytes takes seconds, whatever is kept of it.

        Raises:
            DataError: the text is that long, and `overflow` is "error".
        """
        if len(text) <= self.max_length:
            return text
        num = self.max_length * self._encoder.longest_token
        if not num or len(text) <= 2 * num:
            return text
        if self.overflow == "error":
            raise self._too_long(f"{len(text)} characters")
        return text[:num] + text[-num:]

    def _too_long(self, got: str) -> DataError:
        return DataError(
            f"conversation: expected at most {self.max_length} tokens, got {got}. "
            "Drop the row, choose overflow 'left' or 'right', or, where the model takes more, raise max_length."
        )

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return render(self.tokenizer, messages, gen=False, variables=self._variables)
        except ConfigError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"conversation: expected messages that the reward model's chat template takes, got roles {roles}: "
                f"{error.__cause__}. Change the conversation."
            ) from error

    def _check_kept(self, messages: Sequence[Message]) -> None:
        """Raise DataError if the template silently drops a role; checked once per sequence of roles."""
        roles = tuple(str(message["role"]) + "()" * bool(message.get("tool_calls")) for message in messages)
        if roles in self._known:
            return
        texts = [f"qz{index}CONTENTqz" for index in range(len(messages))]
        dummies = [{**message, "content": text} for message, text in zip(messages, texts, strict=True)]
        shown = self._render(dummies)
        lost = [
            str(message["role"])
            for message, text in zip(messages, texts, strict=True)
            if text not in shown and not message.get("tool_calls")
        ]
        if lost:
            raise DataError(
                f"conversation: expected roles that the reward model's chat template renders, got {', '.join(roles)}: "
                f"it drops {', '.join(lost)}. Move their content into another message."
            )
        if len(self._known) < _MAX_KNOWN:
            self._known.add(roles)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"conversation: expected text in Unicode, got half a surrogate pair: {error}") from error
    return text


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages without the key `trusted`, which templates and servers do not know."""
    return [{key: item for key, item in message.items() if key != "trusted"} for message in messages]


def checked(conversation: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages of a valid conversation, normalized, with text as content.

    Raises:
        DataError: it is empty or not a conversation, or a role is out of order; the message says where.
    """
    if not isinstance(conversation, Sequence) or not conversation:
        raise DataError(f"conversation: expected text or messages, got {brief(conversation)}. Correct the row.")
    messages: list[Message] = []
    before = ""
    for index, message in enumerate(conversation):
        where = f"conversation[{index}]"
        if not isinstance(message, Mapping):
            raise DataError(
                f"{where}: expected a message with role and content, got {brief(message)}. Correct the row."
            )
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in BEFORE:
            raise DataError(f"{where}.role: expected one of {', '.join(BEFORE)}, got {brief(role)}. Correct the row.")
        if content is None and message.get("tool_calls"):
            content = ""
        if isinstance(content, list | tuple):
            parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
            content = None if None in parts else "".join(map(str, parts))
        if not isinstance(content, str):
            raise DataError(f"{where}.content: expected text, got {brief(message.get('content'))}. Correct the row.")
        if before not in BEFORE[role]:
            raise DataError(
                f"{where}: expected roles in order, got {role!r} "
                f"{f'after {before!r}' if before else 'at the beginning'}. "
                "Begin with a user (or a system message), then let assistant and user take turns."
            )
        messages.append({**message, "content": content})
        before = role
    if before != "assistant":
        raise DataError(
            f"conversation[{len(messages) - 1}]: expected the assistant to speak last, got {before!r}. "
            "Score a conversation that ends with the answer."
        )
    return [dict(message) for message in normalized(messages)]


# --- tokenizers in threads --------------------------------------------------------------------------------------------


@cache
def resolved(name: str) -> str:
    """Return the folder of a model that ships with the package, else the name unchanged.

    Cached, since constructors of environments must not read files from their second call on.
    """
    return str(_SHIPPED / name) if name in {each.name for each in _SHIPPED.glob("*/")} else name


def tokenizer_of(where: str, given: str, advice: str) -> Any:
    """Return the tokenizer of a folder or a name; `where` and `advice` are for the error.

    Raises:
        ConfigError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(resolved(given))
    except Exception as error:  # tokenizers raises its own, of no class
        raise ConfigError(f"{where}: expected a tokenizer in {given!r}, got {error}. {advice}") from error


def limit_of(tokenizer: Any) -> int | None:
    """Return the tokenizer's limit on tokens, None if it has none."""
    known: int | None = getattr(tokenizer, "model_max_length", None)
    return known if known and known < NO_LIMIT else None


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
    label: Any = None


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
        if not self.has_tokenizer:
            if isinstance(conversation, str):
                return RenderedText(conversation)
            raise self.no_tokenizer()

        def rendered_text() -> RenderedText:
            renderer = self._open(None)
            rendered = renderer.ids(conversation)  # which also refuses what cannot be scored
            num_tokens = len(rendered.token_ids)
            if rendered.truncated:
                tokenizer: Any = renderer.tokenizer
                text = tokenizer.decode(rendered.token_ids, skip_special_tokens=False)
                return RenderedText(text, "", num_tokens, True)
            if isinstance(conversation, str):
                return RenderedText(conversation, "", num_tokens)
            messages = plain_messages(checked(conversation))
            query = render(renderer.tokenizer, messages, gen=False)
            prompt = render(renderer.tokenizer, messages[:-1], gen=True)
            return RenderedText(query, prompt if query.startswith(prompt) else "", num_tokens)

        return await self._run(rendered_text)

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
