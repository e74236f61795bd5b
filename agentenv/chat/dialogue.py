"""Dialogue: the tokens of one episode so far, and the tokens that each observation adds.

The loop uses five methods: `begin` takes the first observation, `append_action` takes an action, `reply_to` turns the
next observation into tokens, `append_reply` appends them, and `parse_calls` reads an action's tool calls.

`Chat.bridge` joins messages. Text is appended as raw tokens if the episode began with raw text. If it began with
messages (or with a rendering: text that ends where the assistant begins), text becomes a user message. The one
exception is text of the kind `FeedbackKind.MAY_BE_RENDERED` that contains role markers, such as `<|im_start|>` or a
line that begins `Human:`: it is appended unchanged. `ChatOptions.text_feedback` selects one of the two for all
observations. An empty observation adds nothing: the model continues its turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from agentenv.chat.chat import Chat, PromptText, Reply
from agentenv.chat.tool_calls.messages import assistant_message
from agentenv.chat.tool_roles import bridge_with_tools, check_schemas, check_tools, with_known_roles
from agentenv.core.messages import check_open, named_results, normalized
from agentenv.core.step_dict import FeedbackKind
from agentenv.core.tool_calls import ParsedAction
from agentenv.core.types import Completion, Conversation, Message
from agentenv.errors import ConfigError, ContractError

CHARS_PER_TOKEN = 32
"""More characters than any text has: the upper bound of the search for the longest content that fits."""
_NOTE = "\n[… {} characters left out …]\n"


MakeReply = Callable[[Sequence[Message]], tuple[Reply, int]]
"""Returns the reply that messages become, and the number of tokens that it adds to the episode."""
SizeOf = Callable[[Sequence[Message]], int]
"""Returns the tokens of messages as they follow the action, even if the history is rendered again."""


class Dialogue:
    """The tokens of one episode so far: the engine's next prompt."""

    def __init__(self, chat: Chat, max_length: int) -> None:
        self.chat = chat
        self.max_length = max_length
        self.ids: list[int] = []
        """The prompt of the next generation. It grows in place, so each prompt extends the previous one."""
        self.text = ""
        """The same tokens as text; each piece was decoded when it was added."""
        self.observation: str | Sequence[Message] = ""
        """The first observation, as `begin` received it."""
        self.tools: Any = None
        self.is_raw = True
        """True if the episode began with raw text."""
        self._history: list[Message] = []  # for rendering again; empty once that is impossible or not needed
        self._turn_ids: list[int] = []  # ids of the current assistant turn: all actions since the last non-empty reply
        self.parsed_action: ParsedAction | None = None
        """The calls of the last action, once they were read."""

    @property
    def prompt(self) -> Sequence[int] | Conversation:
        """What the engine is asked next."""
        return self.ids

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return len(self.ids)

    def action_of(self, completion: Completion, stop_token_ids: Sequence[int]) -> tuple[str, str]:
        """Return the text of a generation, and the text that closes it; see `Chat.split_action`."""
        return self.chat.split_action(completion.token_ids, stop_token_ids)

    @property
    def renders_tools(self) -> bool:
        """True if the chat template renders tools and has a role for their results."""
        if not self.chat.has_template:
            return False
        template = self.chat.template
        return template.renders_tools and ("tool" in template.shapes or self.chat.options.tool_role == "user")

    def begin(self, observation: str | Sequence[Message], tools: Any = None, *, after_answer: bool = False) -> None:
        """Take the first observation; with `after_answer`, its last message may be an assistant's.

        Raises:
            ConfigError: the chat template refuses it, or the last message is an assistant's.
            ContractError: tools are not schemas, or come with raw text, which has no place for them.
        """
        if isinstance(observation, PromptText):
            observation = observation.messages
        if tools and isinstance(observation, str):
            raise ContractError(
                f"reset: expected messages with tools, got text {observation[:80]!r}. Return a list of messages."
            )
        if not isinstance(observation, str):
            observation = normalized(observation, tools)
            if not after_answer:
                check_open(observation)
            check_schemas(tools)  # functions may not be copied
        self.observation, self.tools = deepcopy((observation, tools))
        if not isinstance(observation, str):
            observation = with_known_roles(self.chat, observation)
            check_tools(self.chat, observation, tools)
        self.is_raw = isinstance(observation, str) and not self.chat.is_prompt(observation)
        self._history = [] if isinstance(observation, str) else list(deepcopy(observation))
        self.ids = self.chat.prompt(observation, tools)
        self.text = self.chat.decode(self.ids)

    def begin_at(self, ids: Sequence[int], history: Sequence[Message], tools: Any = None) -> None:
        """Take the tokens of a conversation up to an action, and the messages before that action."""
        self.ids, self._history, self.tools = list(ids), list(history), tools

    def append_action(self, action_ids: Sequence[int], text: str | None = None) -> None:
        """Append a sampled action; `text` is its full decoded text, if the caller has it."""
        self._turn_ids += action_ids
        self.ids += action_ids
        self.text += self.chat.decode(action_ids) if text is None else text

    def parse_calls(self, action: str, turn_index: int = 0) -> ParsedAction:
        """Return the last action's tool calls, typed by the schemas if tools were offered."""
        self.parsed_action = self.chat.tool_format.parse(action, turn_index=turn_index, tools=self.tools or None)
        return self.parsed_action

    def reply_to(
        self,
        action_ids: Sequence[int],
        action: str,
        observation: str | Sequence[Message],
        *,
        reserve: int | None = None,
        kind: FeedbackKind = FeedbackKind.PLAIN,
    ) -> Reply | None:
        """Return the tokens that an observation adds after an action; None if it does not fit.

        Args:
            action_ids: the action's tokens.
            action: the action's text.
            observation: text or messages.
            reserve: the number of tokens to leave for the next action when the observation is cut, at most half of the
                room that its contents and the action share.
            kind: how to treat an observation that is text.

        Raises:
            ConfigError: the chat template refuses the messages.
        """
        stays_raw = not observation
        if observation and isinstance(observation, str):
            rule = self.chat.options.text_feedback
            # Markers in a quotation of the action do not show how the author meant the text.
            written = observation.replace(action, "") if action else observation
            is_rendered = (
                kind is FeedbackKind.MAY_BE_RENDERED and not self.is_raw and self.chat.has_role_marker(written)
            )
            stays_raw = rule == "raw" or (rule == "auto" and (self.is_raw or is_rendered))
        if stays_raw:
            return self._raw_reply(action_ids, str(observation or ""), kind)
        new = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        if any(message.get("role") == "tool" and not message.get("name") for message in new):
            answered = self.parsed_action or self.chat.tool_format.parse(action)
            new = named_results(new, [(item.call_id, item.name or "invalid") for item in answered.items])
        messages = with_known_roles(self.chat, new)
        is_rerendered = self.chat.options.history == "rerender" and bool(self._history)
        is_numbered = self.chat.has_template and bool(self.chat.template.numbered_roles)
        before, history = self._history, list[Message]()
        if before and (is_rerendered or is_numbered):
            parsed = self.parsed_action
            if len(self._turn_ids) > len(action_ids):  # empty observations in between: one turn of several actions
                action, parsed = self.chat.action_text(self._turn_ids), None
            if parsed is None and is_numbered:  # the calls of an unparsed action count too
                parsed = self.chat.tool_format.parse(action, tools=self.tools or None)
            sampled = self._turn_ids or action_ids
            has_calls = self.tools or is_numbered
            history = [*before, assistant_turn(self.chat, sampled, action, parsed if has_calls else None)]

        def bridge(new: Sequence[Message]) -> Reply:
            return bridge_with_tools(self.chat, self._turn_ids or action_ids, new, before or None)

        def make(new: Sequence[Message]) -> tuple[Reply, int]:
            added, rendered = bridge(new), None
            if is_rerendered:
                rendered = rendered_again(self.chat, [*history, *new], self.tools, [*self.ids, *added.ids])
            if rendered is not None:
                return Reply(rendered, "rerendered"), len(rendered) - len(self.ids)
            return added, len(added.ids)

        fitting = self.fitted(messages, reserve, make, lambda new: len(bridge(new).ids))
        if fitting is None:
            return None
        shown, reply = fitting
        self._history = [*history, *shown] if history else []
        return replace(reply, cut=shown is not messages)

    def fitted(
        self, messages: Sequence[Message], reserve: int | None, make: MakeReply, bridge_size: SizeOf
    ) -> tuple[Sequence[Message], Reply] | None:
        """Return the messages, cut to the room, with their reply; None if they may not be cut or the room is too small.

        Cut ones leave `reserve` tokens for the next action, at most half of the room that contents and the action
        share.

        Raises:
            ConfigError: not even empty messages fit into `max_observation_tokens`.
        """
        whole = self.without_excess(messages, bridge_size)
        if whole is None:
            return None
        reply, size = make(whole)
        if size <= self._room:
            return whole, reply
        if self.chat.options.long_observation == "end":
            return None
        bare = make([_shorten(message, 0) for message in whole])[1]
        free = max(0, self._room - bare)
        most = self._room - min(free // 2, free if reserve is None else reserve)
        short = _cut(whole, lambda new: make(new)[1] <= most, self.max_length)
        return None if short is None else (short, make(short)[0])

    def without_excess(self, messages: Sequence[Message], bridge_size: SizeOf) -> Sequence[Message] | None:
        """Return the messages, cut to `max_observation_tokens`; None if they are too long to be encoded at all.

        Raises:
            ConfigError: not even empty messages fit into `max_observation_tokens`.
        """
        most = self.chat.options.max_observation_tokens
        # Encoding text that cannot fit would only delay other episodes.
        bound = CHARS_PER_TOKEN * max(self._room, self.max_length, most or 0)
        if any(_length(message) > bound for message in messages):
            if self.chat.options.long_observation == "end" and most is None:
                return None
            messages = [_shorten(message, bound) for message in messages]
        if most is None:
            return messages
        short = _cut(messages, lambda new: bridge_size(new) <= most, most)
        if short is None:
            least = bridge_size([_shorten(message, 0) for message in messages])
            raise ConfigError(
                f"--max_observation_tokens: expected at least {least}, the tokens of the template around the messages "
                f"and of the note about the cut, got {most}. Raise it."
            )
        return short

    def append_reply(self, reply: Reply) -> None:
        """Append a reply made by `reply_to`."""
        if reply.opens_segment:
            self.ids, self.text = list(reply.ids), self.chat.decode(reply.ids)
        else:
            self.ids += reply.ids
            self.text += self.chat.decode(reply.ids)
        if reply.ids:
            self._turn_ids, self.parsed_action = [], None

    def _raw_reply(self, action_ids: Sequence[int], text: str, kind: FeedbackKind) -> Reply | None:
        if kind is FeedbackKind.MAY_BE_RENDERED:
            # Authors of raw text see actions without the close of the turn and write it; the action may already have
            # it.
            close = action_ids[len(self.chat.without_close(action_ids)) :]
            text = text.removeprefix(self.chat.decode(close))
        if text:  # after raw text, the conversation cannot be rendered again
            self._history = []
        if len(text) > CHARS_PER_TOKEN * max(self._room, 0):
            return None
        bridge = self.chat.bridge(action_ids, text)
        return bridge if len(bridge.ids) <= self._room else None

    @property
    def _room(self) -> int:
        """Return how many tokens a reply may add while leaving at least one for an action."""
        return self.max_length - 1 - len(self.ids)


def assistant_turn(chat: Chat, sampled: Sequence[int], action: str, parsed: ParsedAction | None) -> Message:
    """Return the assistant's turn as a message, with its tool calls if `parsed` has any.

    It is trusted only if its text, encoded again, has the added tokens that were sampled: text that merely spells such
    a token must not become one by being encoded.
    """
    is_trusted = chat.added_in(chat.encode(action)) == chat.added_in(chat.without_close(sampled))
    message: Message
    if parsed is not None and parsed.items:
        message = assistant_message(parsed, as_json=chat.tool_format.arguments_as_json)
    else:
        prompt = chat.template.generation_prompt if chat.has_template else ""
        opens, closes, _ = (chat.template.reasoning if prompt else None) or ("", "", "")
        # Reasoning opened by the generation prompt belongs to the assistant's text.
        opened = prompt[prompt.rfind(opens) :] if opens and prompt.rfind(opens) > prompt.rfind(closes) else ""
        message = {"role": "assistant", "content": opened + action}
    return {**message, "trusted": True} if is_trusted else message


def rendered_again(chat: Chat, messages: Sequence[Message], tools: Any, appended: list[int]) -> list[int] | None:
    """Return the ids of the conversation rendered whole; None if they say what `appended` says, or if that fails."""
    try:
        text, mark = chat.rendering(messages, tools)
    except ConfigError:
        return None
    said = chat.decode(appended)
    if chat.unmarked(text, mark) == said:  # nothing to encode
        return None
    rendered = chat.start(text, mark)
    return None if chat.decode(rendered) == said else rendered


def _cut(
    messages: Sequence[Message], fits: Callable[[Sequence[Message]], bool], max_tokens: int
) -> Sequence[Message] | None:
    """Return the messages with the middle of their longest contents cut so that they just fit; None if impossible."""
    if fits(messages):
        return messages
    sizes = range(min(max(map(_length, messages)), CHARS_PER_TOKEN * max_tokens) + 1)
    too_long = bisect_left(sizes, True, key=lambda size: not fits([_shorten(message, size) for message in messages]))
    return [_shorten(message, too_long - 1) for message in messages] if too_long else None


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
