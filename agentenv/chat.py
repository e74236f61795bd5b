"""Text and chat messages to token ids, never re-tokenizing an action.

`Chat.prompt` gives the ids an episode begins with; `Chat.bridge` (and `reply`, its ids alone) the ids to put after an
action. A sampled action is only looked at (its last ids say whether the turn was closed), never decoded and encoded
again, and no real assistant text is ever rendered: a bridge is the tail of a rendering in which a sentinel stands for
the assistant's turn, so its cost does not depend on the history.

What messages say is untrusted: added-token strings in them (`<|im_end|>`) become plain text that decodes to the same
characters, unless the message has `"trusted": True`. Text that is no message is taken as it is, tokens included.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from agentenv.agent import Tokenizer
from agentenv.encoding import Encoder, decode_of, encode_of, encoder_of
from agentenv.errors import ConfigError
from agentenv.template import DUMMY_TOOLS, Template, as_parts, calling, probe, render
from agentenv.tools import ToolFormat, tool_format
from agentenv.types import BridgeKind, ChatOptions, Message

_SENTINEL = "qzSENTINELqz"
_MAX_KNOWN_ROLES = 256
_ROLE_LINE = re.compile(r"^[ \t#]*(human|user|assistant|system)[ \t]*:", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Bridge:
    """What comes between an action and the next one."""

    ids: list[int]
    num_synthesised: int
    """How many of the first ids close the turn in the model's place."""
    kind: BridgeKind
    """How the action ended."""


@dataclass(frozen=True, slots=True)
class _Tail:
    """What the template puts after an assistant's turn."""

    ids: list[int]
    num_close: int
    """How many of the first ids end the turn."""
    shared: bool
    """The id that ends the turn is also the next role's marker."""


class PromptText(str):
    """Messages as the text that a chat template makes of them; as long as it is this text, `Chat` protects them."""

    messages: Sequence[Message]

    def __new__(cls, text: str, messages: Sequence[Message]) -> Self:
        """The text, with what it was rendered from beside it."""
        self = super().__new__(cls, text)
        self.messages = messages
        return self

    def __getnewargs__(self) -> tuple[str, Sequence[Message]]:  # type: ignore[override]
        """What copies are made of."""
        return str(self), self.messages


class Chat:
    """One tokenizer with its chat template; the only place where text becomes ids and ids become text.

    A tokenizer without a template speaks plainly: `User: …` and `Assistant:` paragraphs (`has_template` is False).
    `stop_token_ids` are those on which the engine stops besides EOS; without them every special token that the template
    does not put after the assistant's turn counts as one. `tools` are rendered in every prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_token_ids: Sequence[int] = (),
        tools: Any = None,
        options: ChatOptions | None = None,
    ) -> None:
        self.tokenizer, self.options = tokenizer, options or ChatOptions()
        self._encode, self._decode = encode_of(tokenizer), decode_of(tokenizer)
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.special_ids = frozenset([*tokenizer.all_special_ids, *eos])
        self._stop_token_ids = tuple(stop_token_ids)
        self._tools = tools
        self._known_roles: set[tuple[str, ...]] = set()

    @cached_property
    def template(self) -> Template:
        """What the chat template does; found out at the first use."""
        return probe(self.tokenizer, self._stop_token_ids, self.options.template_kwargs)

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How the model writes calls of tools; found out at the first use."""
        return tool_format(self.tokenizer, self._stop_token_ids, self.options.template_kwargs)

    @cached_property
    def _encoder(self) -> Encoder:
        return encoder_of(self.tokenizer)

    def prompt(self, observation: str | Sequence[Message], tools: Any = None) -> list[int]:
        """The first ids of an episode: text as it is, messages rendered up to where the assistant begins.

        A rendering gets no BOS besides the template's own. `tools` are schemas to offer in place of the constructor's.
        """
        if isinstance(observation, PromptText):
            observation = observation.messages
        if isinstance(observation, str):
            return self.encode(observation)
        self._check_prompt(observation, tools)
        messages, mark = self._protected(observation, tools)
        offered = self._encoder.protect(tools, mark, ends=True)
        return self._encoder.start(self.render(messages, offered), mark, add_special_tokens=not self.has_template)

    def is_prompt(self, text: str) -> bool:
        """Whether a text is a rendering up to where the assistant begins."""
        if isinstance(text, PromptText):
            return True
        end = self.template.generation_prompt.strip() if self.has_template else "Assistant:"
        return bool(end) and text.rstrip().endswith(end)

    def reply(self, action_ids: Sequence[int], observation: str | Sequence[Message]) -> list[int]:
        """The ids that follow an action: those of its `bridge`."""
        return self.bridge(action_ids, observation).ids

    def has_role_marker(self, text: str) -> bool:
        """Whether a text says itself who speaks: with the template's tokens for it, or with a line like `Human: …`."""
        if _ROLE_LINE.search(text):
            return True
        if not self.has_template:
            return False
        template = self.template
        ids = {*template.close_ids, *template.markers, *self._encoder.follow(template.generation_prompt)}
        ways = " ".join(template.reasoning or ())
        names = {name for name, i in self._encoder.added.items() if i in ids and name not in ways}
        return any(marker in text for marker in (*names, *template.text_markers))

    def bridge(self, action_ids: Sequence[int], observation: str | Sequence[Message]) -> Bridge:
        """What follows an action: text as it is; messages with whatever the turn still lacks before them.

        The close of the assistant's turn is added where the action did not sample it (it was cut by a limit or a stop
        string) and is not repeated where it did.

        Raises:
            ConfigError: the template refuses the messages or drops what they say.
        """
        if isinstance(observation, str):
            return Bridge(self._encoder.follow(observation), 0, "text")
        if not observation:
            return Bridge([], 0, "exact")
        messages, mark = self._protected(observation)
        if not self.has_template:
            return Bridge(self._encoder.follow("\n\n" + _plain(messages), mark), 0, "text")
        self._check_roles(messages)
        bridge = self._joined(action_ids, self._tail(messages, mark))
        return self._thought(action_ids, bridge) if self.options.open_reasoning == "close" else bridge

    def _thought(self, action_ids: Sequence[int], bridge: Bridge) -> Bridge:
        """The bridge with the end of reasoning before it, where the action was cut within."""
        ways = self.template.reasoning
        if ways is None or bridge.kind != "truncated":
            return bridge
        opens, closes, end = ways
        text = self.template.generation_prompt + self.decode(action_ids)
        if text.rfind(opens) <= text.rfind(closes):
            return bridge
        ids = self._encoder.follow(end)
        return Bridge([*ids, *bridge.ids], len(ids) + bridge.num_synthesised, bridge.kind)

    def _joined(self, action_ids: Sequence[int], tail: _Tail) -> Bridge:
        """The part of a tail that the action has not sampled."""
        ids, num_close = tail.ids, tail.num_close
        for num in range(min(num_close, len(action_ids)), 0, -1):
            if list(action_ids[-num:]) == ids[:num]:
                return Bridge(ids[num:], num_close - num, "exact" if num == num_close else "partial-close")
        last = action_ids[-1] if action_ids else None
        if last in ids[:num_close]:
            at = ids.index(last) + 1
            return Bridge(ids[at:], num_close - at, "non-canonical-close")
        num_synthesised = 0 if tail.shared else num_close
        if last in self.template.markers:  # it opens a turn, and closes none in a template with a close
            return Bridge(ids, num_synthesised, "role-marker-mismatch")
        if last is not None and self._ends(last, ids[num_close:]):
            return Bridge(ids[num_synthesised:], 0, "foreign-terminator")
        return Bridge(ids, num_synthesised, "truncated")

    def _ends(self, last: int, following: Sequence[int]) -> bool:
        """Whether an action with this last id was ended by it, in another way than the template's."""
        if last in self.template.terminators:
            return True
        if self._stop_token_ids:
            return False
        special = last in self._encoder.special_ids and last != getattr(self.tokenizer, "bos_token_id", None)
        return special and last not in following

    def _tail(self, messages: Sequence[Message], mark: str = "") -> _Tail:
        """The ids after the assistant's turn, without the syntax of a dummy call."""
        close = list(self.template.close_ids)
        for called, text in self._tails(messages):
            ids = self._encoder.follow(text, mark)
            if called:
                end = next((i for i, token in enumerate(ids) if token in self.template.terminators), None)
                if end is None:
                    continue
                ids = [*close, *ids[end + 1 :]] if close and ids[end] == close[-1] else ids[end:]
            if close and ids[: len(close)] == close:
                return _Tail(ids, len(close), False)
            shared = ids[0] in self.template.markers if ids else False
            return _Tail(ids, int(shared or called), shared)
        raise ConfigError(
            "Chat.reply: expected the chat template to keep the assistant's text once, got a rendering without it. "
            "Use a tokenizer whose template renders user, assistant and user messages."
        )

    def _tails(self, messages: Sequence[Message]) -> Iterator[tuple[bool, str]]:
        """Renderings of what follows the assistant's turn, the best first: after calls, where tools answer some."""
        sentinel = _SENTINEL
        while any(sentinel in str(message) for message in messages):
            sentinel += _SENTINEL[-1]
        num_results = next((i for i, m in enumerate(messages) if m.get("role") != "tool"), len(messages))
        for follow in (messages, _named(messages)) if num_results else ():
            for form in self.template.calls:
                try:
                    text = self._render_tail([_USER, calling(follow[:num_results], sentinel, form), *follow])
                except ConfigError:
                    continue
                before, _, tail = text.partition(sentinel)
                if before and tail and sentinel not in tail:
                    yield True, tail
        text = self._render_tail([_USER, {"role": "assistant", "content": sentinel}, *messages])
        before, found, tail = text.partition(sentinel)
        if before and found and sentinel not in tail:
            yield False, tail

    def _check_roles(self, messages: Sequence[Message]) -> None:
        """Refuse roles whose messages the template drops silently; once for each sequence of roles."""
        roles = tuple(str(message.get("role")) for message in messages)
        if roles in self._known_roles:
            return
        dummies: list[Message] = [{"role": role, "content": f"qz{index}CONTENTqz"} for index, role in enumerate(roles)]
        try:
            text = next((text for _, text in self._tails(dummies)), None)
        except ConfigError:
            return  # the messages themselves may have what these lack; if not, they are refused in their own words
        if text is None:
            return
        found = [text.find(str(message["content"])) for message in dummies]
        if min(found) < 0 or found != sorted(found):
            lost = [role for role, at in zip(roles, found, strict=True) if at < 0]
            raise ConfigError(
                f"Chat.reply: expected roles that the chat template renders after an assistant's turn, got {roles}: it "
                f"drops or moves {lost or 'some'}. Use other roles or another model, or give Chat the engine's stops."
            )
        if len(self._known_roles) < _MAX_KNOWN_ROLES:
            self._known_roles.add(roles)

    def _check_prompt(self, messages: Sequence[Message], tools: Any) -> None:
        """Refuse roles whose messages the template drops silently; once for each sequence of roles."""
        roles = ("prompt", *(str(message.get("role")) for message in messages))
        if roles in self._known_roles or not self.has_template:
            return
        said = [isinstance(m.get("content"), str) and not m.get("tool_calls") for m in messages]  # calls may be all
        texts = [f"qz{i}CONTENTqz" if says else "" for i, says in enumerate(said)]
        dummies = [{**m, "content": text} if text else m for m, text in zip(messages, texts, strict=True)]
        try:
            shown = self.render(dummies, tools)
        except ConfigError:
            return  # the messages themselves are refused in the template's own words
        lost = [role for role, text in zip(roles[1:], texts, strict=True) if text not in shown]
        if lost:
            raise ConfigError(
                f"Chat.prompt: expected roles that the chat template renders, got {roles[1:]}: it drops {lost}. "
                "Use other roles or another model."
            )
        if len(self._known_roles) < _MAX_KNOWN_ROLES:
            self._known_roles.add(roles)

    def _protected(self, messages: Sequence[Message], tools: Any = None) -> tuple[list[Message], str]:
        """The messages as the template may see them, and the mark that breaks the added-token strings in them."""
        bare = [{key: item for key, item in message.items() if key != "trusted"} for message in messages]
        mark = self._encoder.free_mark([bare, tools])
        protected = [
            new if old.get("trusted") is True else self._encoder.protect(new, mark, ends=True)
            for old, new in zip(messages, bare, strict=True)
        ]
        return protected, mark

    def render(self, messages: Sequence[Message], tools: Any = None) -> str:
        """Messages as text, up to where the assistant begins; `tools` are offered in place of the constructor's.

        Raises:
            ConfigError: the template refuses them; with the template's own message.
        """
        bare = [{key: item for key, item in message.items() if key != "trusted"} for message in messages]
        if not self.has_template:
            return _plain(bare)
        needed: list[Any] | None = [] if self.template.needs_tools else None
        offered = tools or (self._tools if self._tools is not None else needed)
        return self._render(bare, offered)

    def _render_tail(self, messages: Sequence[Message]) -> str:
        """A rendering of which the head, where tools are, is cut off: they are given only to a template in need."""
        return self._render(messages, (self._tools or DUMMY_TOOLS) if self.template.needs_tools else None)

    def _render(self, messages: Sequence[Message], tools: Any) -> str:
        shaped = [as_parts(message) for message in messages] if self.template.parts else list(messages)
        return render(self.tokenizer, shaped, tools=tools, variables=self.options.template_kwargs)

    def encode(self, text: str) -> list[int]:
        """Text as ids: nothing is put around them."""
        return list(self._encode(text, add_special_tokens=False)) if text else []

    def added_in(self, token_ids: Sequence[int]) -> list[int]:
        """Those of the ids that are added tokens."""
        return [i for i in token_ids if i in self._encoder.added_ids]

    def without_close(self, token_ids: Sequence[int]) -> Sequence[int]:
        """An action's ids without those that end it."""
        return token_ids[: len(token_ids) - self._num_closing(token_ids, ())]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids as text, special tokens included."""
        return str(self._decode(list(token_ids))) if token_ids else ""

    def action_text(self, token_ids: Sequence[int], stop_token_ids: Sequence[int] = ()) -> str:
        """An action as text: decoded from its ids, without the close of the turn or the one terminator at its end."""
        return self.decode(token_ids[: len(token_ids) - self._num_closing(token_ids, stop_token_ids)])

    def closing_text(self, token_ids: Sequence[int], stop_token_ids: Sequence[int] = ()) -> str:
        """The rest of an action's text: what `action_text` leaves out."""
        return self.decode(token_ids[len(token_ids) - self._num_closing(token_ids, stop_token_ids) :])

    def _num_closing(self, token_ids: Sequence[int], stop_token_ids: Sequence[int]) -> int:
        """How many of an action's last ids end it and are no part of what it says."""
        close, ends = self._ends_of_actions
        if close and tuple(token_ids[-len(close) :]) == close:
            return len(close)
        return int(bool(token_ids) and (token_ids[-1] in ends or token_ids[-1] in stop_token_ids))

    @cached_property
    def _ends_of_actions(self) -> tuple[tuple[int, ...], frozenset[int]]:
        """The ids that close a turn together, and those of which each ends an action alone."""
        ends = self.special_ids | {*self._stop_token_ids}
        if not self.has_template:
            return (), ends
        close = tuple(self.template.close_ids)
        return close, ends | self.template.terminators | ({*close} & self._encoder.added_ids)


@functools.cache
def stop_token_ids_of(model: str, *, may_download: bool = False) -> tuple[int, ...]:
    """The ids that end a turn by a model's generation config, where engines stop; empty where it has none."""
    folder = Path(model).expanduser()
    try:
        if model and folder.is_dir():  # read as it is: importing transformers for it takes seconds
            ids = json.loads((folder / "generation_config.json").read_bytes()).get("eos_token_id")
        else:
            from transformers import GenerationConfig

            ids = GenerationConfig.from_pretrained(model, local_files_only=not may_download).eos_token_id
    except (AttributeError, OSError, ValueError):
        return ()
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


_USER: Message = {"role": "user", "content": "."}


def _named(messages: Sequence[Message]) -> list[Message]:
    """The messages with a call id and a name on tool results that have none: some templates want them."""
    return [
        {"tool_call_id": f"callid{i:03d}", "name": "lookup", **message} if message.get("role") == "tool" else message
        for i, message in enumerate(messages)
    ]


def text_of(message: Message) -> str:
    """What a message says, its parts of text joined."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content or "")


def _plain(messages: Sequence[Message]) -> str:
    paragraphs = [f"{str(message.get('role')).capitalize()}: {text_of(message)}" for message in messages]
    return "\n\n".join([*paragraphs, "Assistant:"])
