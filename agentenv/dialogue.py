"""The conversation of one episode as the tokens it has become: what the first observation and every reply add.

A reply in messages is joined by `Chat.bridge`. A reply in text is raw tokens where the episode began with raw text, and
a user message where it began with messages (or with a text that ends where the assistant begins: a rendering), with one
exception: the feedback of a step of OpenRLHF's form (a dict) that has role markers in it, such as
`<|im_start|>` or a line that begins `Human:`, is raw, as its author wrote it for OpenRLHF. `ChatOptions.text_feedback`
sets one of the two for good. An empty observation adds nothing: the model goes on with its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from agentenv.chat import Chat, PromptText, text_of
from agentenv.errors import ConfigError, ContractError
from agentenv.tools import ParsedAction, assistant_message
from agentenv.types import BridgeKind, Message

_CHARS_PER_TOKEN = 32
"""More than text has, so that a search for what fits starts above it."""
_NOTE = "\n[… {} characters left out …]\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """What the environment's answer adds to the tokens."""

    ids: list[int]
    """After the action; in a new segment all of it."""
    kind: BridgeKind
    num_synthesised: int = 0
    cut: bool = False
    """The middle of a content was left out."""

    @property
    def opens_segment(self) -> bool:
        """The history was rendered anew, and is other than what the model has seen."""
        return self.kind == "rerendered"


class Dialogue:
    """The tokens of one episode so far: the engine's next prompt, and how it goes on."""

    def __init__(self, chat: Chat, max_length: int) -> None:
        self.chat, self.max_length = chat, max_length
        self.ids: list[int] = []
        """The prompt of the next generation; grows in place, so that it extends the last one."""
        self.text = ""
        """The same as text, each piece decoded as it was added."""
        self.observation: str | Sequence[Message] = ""
        """The first one, as it was given."""
        self.tools: Any = None
        self._messages: list[Message] = []
        self.is_raw = True
        """The episode began with raw text."""
        self._turn_ids: list[int] = []
        """The actions since the last reply that was not empty: one turn of the assistant."""
        self._parsed: ParsedAction | None = None  # the last action's calls

    @property
    def renders_tools(self) -> bool:
        """The chat template has a place for tools, and a role for their results."""
        if not self.chat.has_template:
            return False
        template = self.chat.template
        return template.renders_tools and ("tool" in template.shapes or self.chat.options.tool_role == "user")

    def begin(self, observation: str | Sequence[Message], tools: Any = None) -> None:
        """Take the first observation.

        Raises:
            ConfigError: the chat template refuses it.
            ContractError: tools are offered beside raw text, which has no place for them.
        """
        if isinstance(observation, PromptText):
            observation = observation.messages
        if tools and isinstance(observation, str):
            raise ContractError(
                f"reset: expected messages beside tools, got text {observation[:80]!r}. Return a list of messages."
            )
        self.observation, self.tools = deepcopy((observation, tools))
        if not isinstance(observation, str):
            observation = self._with_known_roles(observation)
            self._check_tools(observation)
        self.is_raw = isinstance(observation, str) and not self.chat.is_prompt(observation)
        self._messages = [] if isinstance(observation, str) else list(deepcopy(observation))
        self.ids = self.chat.prompt(observation, tools)
        self.text = self.chat.decode(self.ids)

    def act(self, action_ids: Sequence[int], text: str | None = None) -> None:
        """Take an action, as it was sampled; `text` is the whole of it, where that is known."""
        self._turn_ids += action_ids
        self.ids += action_ids
        self.text += self.chat.decode(action_ids) if text is None else text

    def parse(self, action: str, turn_index: int = 0) -> ParsedAction:
        """The last action's calls of tools, by their schemas where they were offered."""
        self._parsed = self.chat.tool_format.parse(action, turn_index=turn_index, tools=self.tools or None)
        return self._parsed

    def reply(
        self,
        action_ids: Sequence[int],
        action: str,
        observation: str | Sequence[Message],
        *,
        reserve: int | None = None,
        openrlhf: bool = False,
    ) -> Reply | None:
        """What the answer to the last action adds; None where that does not fit.

        `action` is the action's text. Where an observation is cut, `reserve` tokens are left for the next action, half
        of what its contents and the action share at most. `openrlhf` says that the step had OpenRLHF's form.

        Raises:
            ConfigError: the chat template refuses the messages.
        """
        messages = self._as_messages(observation, action, openrlhf=openrlhf)
        if isinstance(messages, str):
            if openrlhf:
                messages = self._without_close(action_ids, messages)
            if messages:  # from here on there is no conversation that could be rendered anew
                self._messages = []
            if len(messages) > _CHARS_PER_TOKEN * max(self._room, 0):
                return None
            reply = self._joined(action_ids, messages)
            return reply if self._size(reply) <= self._room else None
        is_rerendered = self.chat.options.history == "rerender" and bool(self._messages)
        history = [*self._messages, self._said(action_ids, action)] if is_rerendered else []

        def made(new: Sequence[Message]) -> Reply:
            """What these messages add."""
            reply = self._joined(action_ids, new)
            return self._rerendered(reply, [*history, *new]) if is_rerendered else reply

        short = self._readable(messages)
        if short is None:
            return None
        fitting = self._capped(action_ids, short)
        reply = made(fitting)
        if self._size(reply) > self._room:
            shorter = self._fitted(made, fitting, reserve)
            if shorter is None:
                return None
            fitting, reply = shorter, made(shorter)
        self._messages = [*history, *fitting] if is_rerendered else []
        return replace(reply, cut=fitting is not messages)

    def take(self, reply: Reply) -> None:
        """Take a reply."""
        if reply.opens_segment:
            self.ids, self.text = list(reply.ids), self.chat.decode(reply.ids)
        else:
            self.ids += reply.ids
            self.text += self.chat.decode(reply.ids)
        if reply.ids:
            self._turn_ids = []

    def _as_messages(
        self, observation: str | Sequence[Message], action: str, *, openrlhf: bool
    ) -> str | Sequence[Message]:
        """Raw text as text, everything else as the messages that the template has roles for."""
        if not observation:
            return ""
        if isinstance(observation, str) and self._stays_raw(observation, action, openrlhf=openrlhf):
            return observation
        return self._with_known_roles(
            [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        )

    def _check_tools(self, messages: Sequence[Message]) -> None:
        if not self.tools:
            return
        if not isinstance(self.tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in self.tools):
            raise ContractError(
                f"reset: expected a list of tool schemas under 'tools', got {self.tools!r:.200}. "
                "Make them with agentenv.tools.schema_of(function)."
            )
        # A template that renders tools says the same ones twice when given twice.
        if self.chat.render(messages, self.tools) == self.chat.render(messages, [*self.tools, *self.tools]):
            raise ContractError(
                f"reset: expected no tools for a chat template that renders none, got {len(self.tools)}. Describe them "
                "in a message: states['tool_calls'] reads <tool_call>{…}</tool_call> then; or use another model."
            )

    def _with_known_roles(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Tool results as user messages, where the options and the template's roles want it."""
        if self.chat.options.tool_role == "user" and self.chat.has_template and "tool" not in self.chat.template.shapes:
            return _without_tool_role(messages, merge="2xuser" not in self.chat.template.shapes)
        return messages

    def _stays_raw(self, text: str, action: str, *, openrlhf: bool) -> bool:
        rule = self.chat.options.text_feedback
        if rule != "auto":
            return rule == "raw"
        # What it quotes of the action says nothing about how its author meant it.
        written = text.replace(action, "") if action else text
        return self.is_raw or (openrlhf and self.chat.has_role_marker(written))

    def _without_close(self, action_ids: Sequence[int], text: str) -> str:
        """A text without the close of the turn at its start, where the action has it.

        OpenRLHF's files are shown actions without the close, and add it themselves: it would stand there twice.
        """
        return text.removeprefix(self.chat.closing_text(action_ids))

    @property
    def _room(self) -> int:
        """Tokens that a reply may add, so that at least one is left for an action."""
        return self.max_length - 1 - len(self.ids)

    def _size(self, reply: Reply) -> int:
        return len(reply.ids) - len(self.ids) if reply.opens_segment else len(reply.ids)

    def _joined(self, action_ids: Sequence[int], observation: str | Sequence[Message]) -> Reply:
        try:
            bridge = self.chat.bridge(self._turn_ids or action_ids, observation)
        except ConfigError as error:
            results = not isinstance(observation, str) and any(m.get("role") == "tool" for m in observation)
            if not results or "tool" in self.chat.template.shapes:
                raise
            raise ConfigError(
                f"{error} It has no role for tool results: --tool_role user (ChatOptions.tool_role) makes them user "
                "messages."
            ) from error
        return Reply(bridge.ids, bridge.kind, bridge.num_synthesised)

    def _readable(self, messages: Sequence[Message]) -> Sequence[Message] | None:
        """The messages, without what is so long that encoding it would only hold other episodes up."""
        options = self.chat.options
        bound = _CHARS_PER_TOKEN * max(self._room, self.max_length, options.max_observation_tokens or 0)
        if all(_length(message) <= bound for message in messages):
            return messages
        if options.long_observation == "end" and options.max_observation_tokens is None:
            return None
        return [_shortened(message, bound) for message in messages]

    def _capped(self, action_ids: Sequence[int], messages: Sequence[Message]) -> Sequence[Message]:
        """The messages, cut to `max_observation_tokens`."""
        most = self.chat.options.max_observation_tokens
        if most is None:
            return messages
        short = _cut(messages, lambda new: len(self._joined(action_ids, new).ids) <= most, most)
        if short is None:
            least = len(self._joined(action_ids, [_shortened(message, 0) for message in messages]).ids)
            raise ConfigError(
                f"--max_observation_tokens: expected at least {least}, what the template puts around messages and the "
                f"note of what was left out, got {most}. Raise it."
            )
        return short

    def _fitted(
        self, made: Callable[[Sequence[Message]], Reply], messages: Sequence[Message], reserve: int | None
    ) -> Sequence[Message] | None:
        """The messages, cut to the room that there is, where the options allow it."""
        if self.chat.options.long_observation == "end":
            return None
        total = len(self.ids)
        bare = total + self._size(made([_shortened(message, 0) for message in messages]))
        free = max(0, self.max_length - 1 - bare)  # for contents and the next action
        most = self.max_length - 1 - min(free // 2, free if reserve is None else reserve)
        return _cut(messages, lambda new: total + self._size(made(new)) <= most, self.max_length)

    def _said(self, action_ids: Sequence[int], action: str) -> Message:
        """The assistant's turn as a message.

        It is trusted where its text, encoded, has the added tokens that were sampled: what the model only spelled out
        must not become a token by being encoded.
        """
        if len(self._turn_ids) > len(action_ids):  # empty observations lie between: one turn of several actions
            action, self._parsed = self.chat.action_text(self._turn_ids), None
        message = self._as_message(action)
        sampled = self.chat.added_in(self.chat.without_close(self._turn_ids or action_ids))
        return {**message, "trusted": True} if self.chat.added_in(self.chat.encode(action)) == sampled else message

    def _as_message(self, action: str) -> Message:
        """With its calls apart, or with the reasoning that the generation prompt opens."""
        if self.tools and self._parsed is not None and self._parsed.items:
            return assistant_message(self._parsed, as_json=self.chat.tool_format.arguments_as_json)
        begun = self.chat.template.generation_prompt if self.chat.has_template else ""
        opens, closes, _ = (self.chat.template.reasoning if begun else None) or ("", "", "")
        opened = begun[begun.rfind(opens) :] if opens and begun.rfind(opens) > begun.rfind(closes) else ""
        return {"role": "assistant", "content": opened + action}

    def _rerendered(self, reply: Reply, messages: Sequence[Message]) -> Reply:
        """The reply itself where the template repeats what was said or cannot, else the conversation rendered anew."""
        try:
            anew, kept = self.chat.prompt(messages, self.tools), [*self.ids, *reply.ids]
        except ConfigError:
            return reply
        if anew == kept or self.chat.decode(anew) == self.chat.decode(kept):
            return reply
        return Reply(anew, "rerendered")


def _without_tool_role(messages: Sequence[Message], *, merge: bool) -> list[Message]:
    """Tool results as user messages, all that follow each other as one where the template wants roles to alternate."""
    users: list[Message] = []
    for message in messages:
        content = message.get("content")
        if message.get("role") != "tool" and not (merge and users and message.get("role") == "user"):
            users.append(message)
            continue
        last = users.pop() if merge and users and users[-1].get("role") == "user" else None
        # What is merged is trusted only where both are: a result must not gain the trust of a question beside it.
        trusted = {"trusted": True} if all(m is None or m.get("trusted") is True for m in (last, message)) else {}
        said = content if last is None else f"{text_of(last)}\n\n{text_of(message)}"
        users.append({"role": "user", "content": said, **trusted})
    return users


def _cut(
    messages: Sequence[Message], fits: Callable[[Sequence[Message]], bool], max_tokens: int
) -> Sequence[Message] | None:
    """The messages with the middle of their longest contents left out, so that they just fit; None where none do."""
    if fits(messages):
        return messages
    least, most = 0, min(max(_length(message) for message in messages), _CHARS_PER_TOKEN * max_tokens)
    if not fits([_shortened(message, least) for message in messages]):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        if fits([_shortened(message, middle) for message in messages]):
            least = middle
        else:
            most = middle - 1
    return [_shortened(message, least) for message in messages]


def _length(message: Message) -> int:
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return max((len(str(part.get("text") or "")) for part in content), default=0)
    return len(content) if isinstance(content, str) else 0


def _shortened(message: Message, num_chars: int) -> Message:
    """The message with at most so many characters of its content, or of each part of it that is text."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        parts = [
            {**p, "text": _cut_text(p["text"], num_chars)} if isinstance(p.get("text"), str) else p for p in content
        ]
        return message if parts == list(content) else {**message, "content": parts}
    if not isinstance(content, str):
        return message
    short = _cut_text(content, num_chars)
    return message if short == content else {**message, "content": short}


def _cut_text(text: str, num_chars: int) -> str:
    """At most so many characters of a text, with a note in the place of those left out of its middle."""
    if len(text) <= num_chars + len(_NOTE):
        return text
    head, tail = text[: num_chars - num_chars // 2], text[len(text) - num_chars // 2 :]
    return head + _NOTE.format(len(text) - num_chars) + tail
