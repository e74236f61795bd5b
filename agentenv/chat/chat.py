"""Convert text and chat messages to token ids without ever re-tokenizing an action.

`Chat.prompt` returns the ids an episode begins with. `Chat.bridge` (and `reply`, its ids alone) returns the ids to put
after an action. The bridge only inspects a sampled action's last ids, to see whether the turn was closed. Actions are
never decoded and encoded again, and assistant text is never rendered: a bridge is the tail of a rendering in which a
sentinel stands for the assistant's turn, so its cost does not depend on the history; only templates that number turns
or tool results over the conversation are rendered with it.

Message contents are untrusted: added-token strings in them (`<|im_end|>`) become plain text that decodes to the same
characters, unless the message has `"trusted": True`. Text outside messages is used unchanged, tokens included.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from agentenv._util.brief import brief
from agentenv.chat.encoding import Encoder, decode_of, encode_of, encoder_of
from agentenv.chat.rendered_text import RenderedText
from agentenv.chat.template import DUMMY_TOOLS, Template, as_parts, calling, probe, render
from agentenv.chat.tool_calls.learn import tool_format
from agentenv.chat.tool_calls.messages import in_form
from agentenv.chat.tool_calls.parse import ToolFormat
from agentenv.core.engine import Tokenizer
from agentenv.core.messages import check_open, normalized, without_nulls
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import BridgeKind, Message, check_fields
from agentenv.errors import ConfigError, EngineError

_SENTINEL, _PART = "qzSENTINELqz", "qzPARTqz"
_MAX_KNOWN_ROLES = 256
_MAX_PADDING = 4096
"""Ids that a model may have beyond its tokenizer's; the most known is 1,069 (gpt-oss)."""
_ROLE_LINE = re.compile(r"^[ \t#]*(human|user|assistant|system)[ \t]*:", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options for turning an episode's messages into tokens."""

    text_feedback: Literal["auto", "raw", "user"] = "auto"
    """How a step's text is added: as raw tokens, as a user message, or by the rule of `agentenv.chat.dialogue`."""
    history: Literal["keep", "rerender"] = "keep"
    """keep: tokens are only appended; rerender: a template that rewrites the history opens a new segment."""
    open_reasoning: Literal["keep", "close"] = "keep"
    """Whether reasoning that was cut off stays open or is closed for the model."""
    tool_role: Literal["refuse", "user"] = "refuse"
    """Tool results when the template has no role for them: an error, or a user message."""
    long_observation: Literal["end", "cut"] = "end"
    """Messages that do not fit: the episode is truncated, or the middle of the longest content is cut out."""
    max_observation_tokens: int | None = None
    """Maximum number of tokens of an observation's messages; longer ones are always cut."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking`."""

    def __post_init__(self) -> None:
        """Raise ValueError for unknown choices."""
        choices = {k: get_args(kind) for k, kind in get_type_hints(ChatOptions).items() if get_origin(kind) is Literal}
        named = [
            (name, getattr(self, name), known.__contains__, f"one of {', '.join(known)}")
            for name, known in choices.items()
        ]
        most = ("max_observation_tokens", self.max_observation_tokens, lambda number: number is None or number >= 1)
        check_fields("ChatOptions", [*named, (*most, "None or an integer >= 1")])


@dataclass(frozen=True, slots=True)
class Reply:
    """The tokens that an observation adds; `Trajectory.append_observation` masks all of them."""

    ids: list[int]
    """The ids after the action; for a new segment, all of its ids."""
    kind: BridgeKind
    """How the action ended."""
    num_synthesized: int = 0
    """Number of leading ids that close the turn when the model did not."""
    cut: bool = False
    """True if the middle of a content was left out."""

    @property
    def opens_segment(self) -> bool:
        """True if the history was rendered again and differs from the tokens the model has seen."""
        return self.kind == "rerendered"

    def write_to(self, trajectory: Trajectory) -> None:
        """Append the tokens to the record."""
        if self.opens_segment:
            trajectory.open_segment(self.ids, cut=self.cut)
        else:
            trajectory.append_observation(
                self.ids, bridge=self.kind, num_synthesized=self.num_synthesized, cut=self.cut
            )


class PromptText(str):
    """Messages rendered by a chat template. `Chat` protects the messages as long as the text is unchanged."""

    messages: Sequence[Message]

    def __new__(cls, text: str, messages: Sequence[Message]) -> Self:
        """Create the text and attach the messages it was rendered from."""
        self = super().__new__(cls, text)
        self.messages = messages
        return self

    def __getnewargs__(self) -> tuple[str, Sequence[Message]]:  # type: ignore[override]
        """Return the constructor's arguments, for copies."""
        return str(self), self.messages


class Chat:
    """A tokenizer with its chat template: the only place that converts between text and ids.

    Without a template, messages become `User: …` and `Assistant:` paragraphs (`has_template` is False).
    `stop_token_ids` are the ids besides EOS on which the engine stops; without them, every special token that the
    template does not put after the assistant's turn counts as one. `tools` are rendered in every prompt.
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
        self._encode = encode_of(tokenizer)
        self._decode = decode_of(tokenizer)
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.special_ids = frozenset([*tokenizer.all_special_ids, *eos])
        self._stop_token_ids = tuple(stop_token_ids)
        self._num_ids = len(tokenizer) + _MAX_PADDING if isinstance(tokenizer, Sized) else math.inf
        self._tools = tools
        self._known_roles: set[tuple[str, ...]] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments: what was learned of the tokenizer holds functions, and is learned again."""
        keywords = {"stop_token_ids": self._stop_token_ids, "tools": self._tools, "options": self.options}
        return partial(Chat, **keywords), (self.tokenizer,)

    @cached_property
    def _encoder(self) -> Encoder:
        return encoder_of(self.tokenizer)

    @cached_property
    def template(self) -> Template:
        """What the chat template does; probed at the first use."""
        return probe(self.tokenizer, self._stop_token_ids, self.options.chat_template_kwargs)

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How the model writes tool calls; learned at the first use."""
        return tool_format(self.tokenizer, self._stop_token_ids, self.options.chat_template_kwargs)

    def prompt(self, observation: str | Sequence[Message], tools: Any = None) -> list[int]:
        """Return the first ids of an episode: text unchanged, messages rendered up to where the assistant begins.

        A rendering gets no BOS except the template's own. `tools` are schemas that replace the constructor's.

        Raises:
            ConfigError: as `rendering` does, or a user's message is a rendering already.
        """
        if isinstance(observation, PromptText):
            observation = observation.messages
        if isinstance(observation, str):
            return self.encode(observation)
        markers = [*self._role_markers, self.template.generation_prompt.strip()] if self.has_template else []
        for content in (text_of(message) for message in observation if message.get("role") == "user"):
            if any(marker and marker in content for marker in markers) and self._rendered_text.matches(content):
                raise ConfigError(
                    "prompt: expected text or messages without the chat template's markers, got text that is rendered "
                    f"already: {brief(content, 60)}. Write the messages into the row, or set --no_apply_chat_template."
                )
        return self.start(*self.rendering(observation, tools))

    def rendering(self, messages: Sequence[Message], tools: Any = None) -> tuple[str, str]:
        """Return protected messages as text, up to where the assistant begins, and the mark in it.

        Raises:
            ConfigError: the template refuses or drops a message or a part.
        """
        self._check_prompt(messages, tools)
        protected, mark = self._protected(messages, tools)
        return self.render(protected, self._encoder.protect(tools, mark, ends=True)), mark

    def start(self, text: str, mark: str) -> list[int]:
        """Return the ids of a `rendering`."""
        return self._encoder.start(text, mark, add_special_tokens=not self.has_template)

    def unmarked(self, text: str, mark: str) -> str:
        """Return a `rendering` as it reads."""
        return self._encoder.unmarked(text, mark)

    def is_prompt(self, text: str) -> bool:
        """Return True if a text is a rendering up to where the assistant begins."""
        if isinstance(text, PromptText):
            return True
        end = self.template.generation_prompt.strip() if self.has_template else "Assistant:"
        return bool(end) and text.rstrip().endswith(end)

    def reply(self, action_ids: Sequence[int], observation: str | Sequence[Message]) -> list[int]:
        """Return the ids that follow an action: those of its `bridge`."""
        return self.bridge(action_ids, observation).ids

    def has_role_marker(self, text: str) -> bool:
        """Return True if a text marks speakers itself: with the template's tokens, or a line like `Human: …`."""
        if _ROLE_LINE.search(text):
            return True
        if not self.has_template:
            return False
        return any(marker in text for marker in self._role_markers)

    @cached_property
    def _role_markers(self) -> tuple[str, ...]:
        template = self.template
        ids = {*template.close_ids, *template.markers, *self._encoder.follow(template.generation_prompt)}
        ways = " ".join(template.reasoning or ())
        names = {name for name, i in self._encoder.added.items() if i in ids and name not in ways}
        return (*names, *template.text_markers)

    def bridge(
        self, action_ids: Sequence[int], observation: str | Sequence[Message], *, history: Sequence[Message] | None = ()
    ) -> Reply:
        """Return the tokens that follow an action: text unchanged; messages after the missing end of the turn, if any.

        The close of the assistant's turn is added if the action did not sample it (a limit or a stop string cut it off)
        and is not repeated if it did. `history` is the conversation before the action, None if unknown; it matters only
        if the template numbers turns over it.

        Raises:
            ConfigError: the template refuses the messages or drops their contents, the last one is an assistant's, or
                it numbers turns over an unknown history.
        """
        if isinstance(observation, str):
            return Reply(self._encoder.follow(observation), "text")
        if not observation:
            return Reply([], "exact")
        check_open(observation)
        messages, mark = self._protected(observation)
        if not self.has_template:
            return Reply(self._encoder.follow("\n\n" + plain_text(messages), mark), "text")
        self._check_roles(messages)
        head = [_USER]
        if any(message.get("role") in self.template.numbered_roles for message in messages):
            if history is None:
                raise ConfigError(
                    "Chat.reply: expected a conversation of messages, because the chat template numbers turns "
                    "over the conversation, got one that is not known. Begin the episode with messages."
                )
            head = self._shaped(history) or head
        bridge = self._joined(action_ids, *self._tail(messages, mark, head))
        ways = self.template.reasoning if self.options.open_reasoning == "close" else None
        if ways is None or bridge.kind != "truncated":
            return bridge
        opens, closes, end = ways
        text = self.template.generation_prompt + self.decode(action_ids)
        if text.rfind(opens) <= text.rfind(closes):
            return bridge
        ids = self._encoder.follow(end)  # the action was cut off within reasoning
        return Reply([*ids, *bridge.ids], bridge.kind, len(ids) + bridge.num_synthesized)

    def _joined(self, action_ids: Sequence[int], ids: list[int], num_close: int, is_shared: bool) -> Reply:
        """Return the part of a tail that the action did not sample; see `_tail`."""
        for num in range(min(num_close, len(action_ids)), 0, -1):
            if list(action_ids[-num:]) == ids[:num]:
                return Reply(ids[num:], "exact" if num == num_close else "partial-close", num_close - num)
        last = action_ids[-1] if action_ids else None
        if last in ids[:num_close]:
            at = ids.index(last) + 1
            return Reply(ids[at:], "non-canonical-close", num_close - at)
        num_synthesized = 0 if is_shared else num_close
        if last in self.template.markers:  # it opens a turn; in a template with a close it ends none
            return Reply(ids, "role-marker-mismatch", num_synthesized)
        ends = last in self.template.terminators
        if not ends and not self._stop_token_ids:  # then every other special token counts as one
            special = last in self._encoder.special_ids and last != getattr(self.tokenizer, "bos_token_id", None)
            ends = special and last not in ids[num_close:]
        if last is not None and ends:
            return Reply(ids[num_synthesized:], "foreign-terminator")
        return Reply(ids, "truncated", num_synthesized)

    def _tail(self, messages: Sequence[Message], mark: str, head: Sequence[Message]) -> tuple[list[int], int, bool]:
        """Return the ids after the assistant's turn that follows `head`, without the syntax of a dummy call.

        With them, how many of them, at the beginning, end the turn, and whether that id is the next role's marker too.
        """
        close = list(self.template.close_ids)
        is_named = all(message.get("name") for message in messages if message.get("role") == "tool")
        others = self._tails(messages, head, tool_name="qzOTHERqz")
        for called, text in self._tails(messages, head):
            if not is_named and (called, text) != next(others, None):
                raise ConfigError(
                    "Chat.reply: expected tool results with a name, because the chat template renders it, got results "
                    "that answer no call of the action. Put the tool's name under 'name'."
                )
            ids = self._encoder.follow(text, mark)
            if called:
                found = self.template.close_of_call(ids)
                if found is None:
                    continue
                begin, end = found
                if ids[end - 1] in close[-1:]:
                    return ids[begin:], end - begin, False
                ids = ids[begin:]
            if close and ids[: len(close)] == close:
                return ids, len(close), False
            shared = ids[0] in self.template.markers if ids else False
            return ids, int(shared or called), shared
        raise ConfigError(
            "Chat.reply: expected the chat template to keep the assistant's text once, got a rendering without it. "
            "Use a tokenizer whose template renders user, assistant and user messages."
        )

    def _tails(
        self, messages: Sequence[Message], head: Sequence[Message], *, tool_name: str = "lookup"
    ) -> Iterator[tuple[bool, str]]:
        """Yield renderings of what follows the assistant's turn, best first: after calls, if tools answer some.

        Results without a name answer calls of `tool_name`.
        """
        sentinel = _SENTINEL
        while any(sentinel in str(message) for message in (*head, *messages)):
            sentinel += _SENTINEL[-1]
        named = [  # some templates require a call id and a name of tool results
            {"tool_call_id": f"callid{i:03d}", "name": tool_name, **m} if m.get("role") == "tool" else m
            for i, m in enumerate(messages)
        ]
        num_results = next((i for i, m in enumerate(messages) if m.get("role") != "tool"), len(messages))
        results = [{**m, "name": m.get("name") or tool_name} for m in messages[:num_results]]
        for follow in (messages, named) if num_results else ():
            for form in self.template.calls:
                try:
                    text = self._render_tail([*head, calling(results, sentinel, form), *follow])
                except ConfigError:
                    continue
                before, _, tail = text.partition(sentinel)
                if before and tail and sentinel not in tail:
                    yield True, tail
        text = self._render_tail([*head, {"role": "assistant", "content": sentinel}, *messages])
        before, found, tail = text.partition(sentinel)
        if before and found and sentinel not in tail:
            yield False, tail

    def _check_roles(self, messages: Sequence[Message]) -> None:
        """Raise ConfigError if the template silently drops a role; checked once for each sequence of roles."""
        roles = tuple(str(message.get("role")) for message in messages)
        if roles in self._known_roles:
            return
        dummies: list[Message] = [{"role": role, "content": f"qz{index}CONTENTqz"} for index, role in enumerate(roles)]
        try:
            text = next((text for _, text in self._tails(dummies, [_USER])), None)
        except ConfigError:
            return  # the real messages may have what the dummies lack; if not, rendering them raises
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

    @cached_property
    def _rendered_text(self) -> RenderedText:
        bos = str(getattr(self.tokenizer, "bos_token", None) or "")
        return RenderedText.of(self.template, self._encoder, self.render, bos)

    def _check_prompt(self, messages: Sequence[Message], tools: Any) -> None:
        """Raise ConfigError if the template silently drops a role; checked once for each sequence of roles."""
        roles = ("prompt", *(str(message.get("role")) for message in messages))
        if roles in self._known_roles or not self.has_template:
            return
        # An assistant's message may have calls only.
        has_text = [isinstance(m.get("content"), str) and not m.get("tool_calls") for m in messages]
        texts = [f"qz{i}CONTENTqz" if says else "" for i, says in enumerate(has_text)]
        dummies = [{**m, "content": text} if text else m for m, text in zip(messages, texts, strict=True)]
        try:
            shown = self.render(dummies, tools)
        except ConfigError:
            return  # rendering the real messages raises the template's own error
        lost = [role for role, text in zip(roles[1:], texts, strict=True) if text not in shown]
        if lost:
            raise ConfigError(
                f"Chat.prompt: expected roles that the chat template renders, got {roles[1:]}: it drops {lost}. "
                "Use other roles or another model."
            )
        if len(self._known_roles) < _MAX_KNOWN_ROLES:
            self._known_roles.add(roles)

    def _protected(self, messages: Sequence[Message], tools: Any = None) -> tuple[list[Message], str]:
        """Return the messages with added-token strings in them broken by a mark, and that mark."""
        bare = self._shaped(messages, tools)
        mark = self._encoder.free_mark([bare, tools])
        protected = [
            new if old.get("trusted") is True else self._encoder.protect(new, mark, ends=True)
            for old, new in zip(messages, bare, strict=True)
        ]
        return protected, mark

    def render(self, messages: Sequence[Message], tools: Any = None) -> str:
        """Return messages as text, up to where the assistant begins; `tools` replace the constructor's.

        Raises:
            ConfigError: the template refuses them; includes the template's own message.
        """
        bare = self._shaped(messages)
        if not self.has_template:
            return plain_text(bare)
        needed: list[Any] | None = [] if self.template.needs_tools else None
        offered = tools or (self._tools if self._tools is not None else needed)
        return self._render(bare, without_nulls(offered))

    def check_parts(self, messages: Sequence[Message]) -> None:
        """Check that the template renders what is not text: images, audio, video and parts of other types.

        Raises:
            ConfigError: it drops a part, or writes it out as data.
        """
        for message in messages:
            content = message.get("content")
            for part in content if isinstance(content, list | tuple) else ():
                if not self._renders_part(str(message.get("role")), part):
                    kind = part.get("type") if isinstance(part, Mapping) else part
                    raise ConfigError(
                        f"messages: expected text, because the chat template renders no {brief(kind)} in the content "
                        f"of {message.get('role')}, got {brief(part)}. Describe it in text, or use another model."
                    )

    def _renders_part(self, role: str, part: Any) -> bool:
        """Return True for text, for what the template renders in some form, and for what it refuses itself."""
        if not isinstance(part, Mapping):
            return False
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return True
        if not self.has_template:
            return False
        text, dummy = {"type": "text", "text": _PART}, {k: v if k == "type" else "qzVALUEqz" for k, v in part.items()}
        before, after = ([_USER] * (role == "assistant"), [_USER] * (role in ("assistant", "system")))
        role = role if after else "user"
        try:
            alone, both = (
                self._render_tail([*before, {"role": role, "content": parts}, *after])
                for parts in ([text], [text, dummy])
            )
        except ConfigError:
            return True
        written = (str(dummy), json.dumps(dummy, ensure_ascii=False))
        return _PART in both and both != alone and not any(each in both for each in written)

    def _shaped(self, messages: Sequence[Message], tools: Any = None) -> list[Message]:
        """Return messages as the template takes them."""
        shaped = normalized(messages, tools or self._tools)
        self.check_parts(shaped)
        if self.has_template and any("tool_calls" in message for message in shaped):
            shaped = in_form(shaped, self.tool_format)
        return [{key: item for key, item in message.items() if key != "trusted"} for message in shaped]

    def _render_tail(self, messages: Sequence[Message]) -> str:
        """Render messages whose head is cut off afterwards; pass tools only if the template requires them."""
        return self._render(messages, (self._tools or DUMMY_TOOLS) if self.template.needs_tools else None)

    def _render(self, messages: Sequence[Message], tools: Any) -> str:
        shaped = [as_parts(message) for message in messages] if self.template.parts else list(messages)
        return render(self.tokenizer, shaped, tools=tools, variables=self.options.chat_template_kwargs)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with nothing added around them."""
        return list(self._encode(text, add_special_tokens=False)) if text else []

    def added_in(self, token_ids: Sequence[int]) -> list[int]:
        """Return the ids that are added tokens."""
        return [i for i in token_ids if i in self._encoder.added_ids]

    def without_close(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return an action's ids without those that end it."""
        return token_ids[: len(token_ids) - self._num_closing(token_ids, ())]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return ids as text, special tokens included."""
        return str(self._decode(token_ids)) if token_ids else ""

    def action_text(self, token_ids: Sequence[int], stop_token_ids: Sequence[int] = ()) -> str:
        """Return an action as text, without the close of the turn or the single terminator at its end."""
        return self.split_action(token_ids, stop_token_ids)[0]

    def split_action(self, token_ids: Sequence[int], stop_token_ids: Sequence[int] = ()) -> tuple[str, str]:
        """Return an action as text, and the text that closes it.

        Raises:
            EngineError: an id belongs to no model with this tokenizer.
        """
        if max(token_ids, default=0) >= self._num_ids:
            raise EngineError(
                f"action: expected ids of the tokenizer's vocabulary, got {max(token_ids)}. "
                "Check that the engine serves the tokenizer's model."
            )
        end = len(token_ids) - self._num_closing(token_ids, stop_token_ids)
        return self.decode(token_ids[:end]), self.decode(token_ids[end:])

    def _num_closing(self, token_ids: Sequence[int], stop_token_ids: Sequence[int]) -> int:
        """Return the number of ids at an action's end that terminate it and are not part of its content."""
        close, ends = self._ends_of_actions
        if close and tuple(token_ids[-len(close) :]) == close:
            return len(close)
        return int(bool(token_ids) and (token_ids[-1] in ends or token_ids[-1] in stop_token_ids))

    @cached_property
    def _ends_of_actions(self) -> tuple[tuple[int, ...], frozenset[int]]:
        """The ids that together close a turn, and the ids that each end an action alone."""
        ends = self.special_ids | {*self._stop_token_ids}
        if not self.has_template:
            return (), ends
        close = tuple(self.template.close_ids)
        return close, ends | self.template.terminators | ({*close} & self._encoder.added_ids)


@functools.cache
def stop_token_ids_of(model: str, *, may_download: bool = False) -> tuple[int, ...]:
    """Return the stop ids in a model's generation config, where engines end a turn; empty if it has none."""
    if not model:  # that of an engine that was given
        return ()
    folder = Path(model).expanduser()
    try:
        if folder.is_dir():  # read the JSON directly: importing transformers takes seconds
            ids = json.loads((folder / "generation_config.json").read_bytes()).get("eos_token_id")
        else:
            from transformers import GenerationConfig

            ids = GenerationConfig.from_pretrained(model, local_files_only=not may_download).eos_token_id
    except (AttributeError, OSError, ValueError):
        return ()
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


_USER: Message = {"role": "user", "content": "."}


def text_of(message: Message) -> str:
    """Return a message's text, with text parts joined."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content or "")


def plain_text(messages: Sequence[Message]) -> str:
    """Return messages as paragraphs, up to where the assistant begins."""
    paragraphs = [f"{str(message.get('role')).capitalize()}: {text_of(message)}" for message in messages]
    return "\n\n".join([*paragraphs, "Assistant:"])
