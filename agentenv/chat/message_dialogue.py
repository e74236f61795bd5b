"""The messages of one episode, for engines that take messages instead of tokens (`--engine chat`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from agentenv.chat.chat import PromptText, Reply, plain_text
from agentenv.chat.tool_calls.messages import in_form
from agentenv.chat.tool_calls.parse import ToolFormat
from agentenv.chat.tool_calls.syntax import Syntax
from agentenv.chat.tool_roles import check_schemas
from agentenv.core.messages import as_messages, check_open, normalized, without_nulls
from agentenv.core.step_dict import FeedbackKind
from agentenv.core.tool_calls import MalformedCall, ParsedAction, ToolCall
from agentenv.core.types import Answer, Completion, Conversation, Message
from agentenv.errors import ContractError, DataError

_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
"""Keys of messages that servers know."""
_SERVERS = Syntax(arguments_as_json=True, content_of_calls=None)
"""How servers take calls."""


class MessageDialogue:
    """The messages of one episode so far: the engine's next prompt. It has the methods that the loop calls of Dialogue.

    An action with calls is sent back as the engine returned it, if the environment answers the calls in messages of
    the role tool; otherwise as its text. Reasoning is not sent back. Where no tools are offered, calls are read from
    the text. Messages of the role tool that answer calls in text, or no call, become user messages.
    """

    renders_tools = True
    is_raw = False

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.ids: list[int] = []
        """Always empty."""
        self.num_tokens = 0
        """Tokens of the last prompt and answer as the server counted them; 0 before, or if it does not count."""
        self.text = ""
        """The conversation as paragraphs."""
        self.observation: str | Sequence[Message] = ""
        """The first observation, as messages."""
        self.tools: Any = None
        self._messages: list[Message] = []
        self._new: list[Message] = []  # of the last reply, until it is appended
        self._answer = Answer("")
        self._calls: list[Mapping[str, Any]] = []  # of the last answer, as they are sent back
        self._parsed_action = ParsedAction("")

    @property
    def prompt(self) -> Conversation:
        """What the engine is asked next."""
        return Conversation(tuple(self._messages), tuple(self.tools or ()))

    def begin(self, observation: str | Sequence[Message], tools: Any = None) -> None:
        """Take the first observation; text becomes a user message.

        Raises:
            DataError: it is empty.
            ConfigError: as `check_open`.
            ContractError: tools are not schemas.
        """
        if not observation:
            raise DataError("prompt: expected a message, got an empty observation. Set the task's prompt.")
        if isinstance(observation, PromptText):
            observation = observation.messages
        messages = normalized(as_messages(observation), tools)
        check_open(messages)
        check_schemas(tools)
        self.observation, self.tools = deepcopy((messages, without_nulls(tools)))
        self._messages = [_for_server(message) for message in in_form(messages, _SERVERS)]
        self.text = plain_text(messages)

    def action_of(self, completion: Completion, stop_token_ids: Sequence[int]) -> tuple[str, str]:
        """Return the text of an answer, with its calls in Hermes' form, and no text that closes it."""
        answer = self._answer = completion.answer or Answer("")
        if answer.num_input_tokens is not None:
            self.num_tokens = answer.num_input_tokens + (answer.num_output_tokens or 0)
        items = tuple(map(_item, answer.tool_calls))
        self._calls = list(map(_sent_back, answer.tool_calls, items))
        self._parsed_action = ParsedAction(answer.content, items)
        return "\n".join(filter(None, [answer.content, *(item.text for item in items)])), ""

    def parse_calls(self, action: str, turn_index: int = 0) -> ParsedAction:
        """Return the last answer's text and calls; text is searched for calls only if no tools were offered."""
        if not self.tools and not self._calls:
            self._parsed_action = ToolFormat().parse(action, turn_index=turn_index)
        return self._parsed_action

    def append_action(self, action_ids: Sequence[int], text: str) -> None:
        """Append the last answer, whose text is `text`."""
        message = {"role": "assistant", "content": self._answer.content}
        calls = {"content": self._answer.content or None, "tool_calls": self._calls} if self._calls else {}
        self._messages.append({**message, **calls})
        self.text += f" {text}"

    def reply_to(
        self,
        action_ids: Sequence[int],
        action: str,
        observation: str | Sequence[Message],
        *,
        reserve: int | None = None,
        kind: FeedbackKind = FeedbackKind.PLAIN,
    ) -> Reply | None:
        """Return the reply that an observation is, without tokens; None if `max_length` is used up.

        Raises:
            ContractError: messages of the role tool do not answer each call of the action once.
            ConfigError: as `check_open`.
        """
        if self.num_tokens >= self.max_length - 1:
            return None
        new = in_form(normalized(as_messages(observation), self.tools), _SERVERS)
        check_open(new)
        results = [message for message in new if message.get("role") == "tool"]
        if not self._calls:  # servers refuse results without calls; calls in words have answers in words
            new = [{"role": "user", "content": m.get("content")} if m.get("role") == "tool" else m for m in new]
            results = []
        calls = [str(call["id"]) for call in self._calls]
        open_ids = iter(calls)
        ids = [str(message.get("tool_call_id") or next(open_ids, "")) for message in results]
        if results and sorted(ids) != sorted(calls):
            raise ContractError(
                f"step: expected one message of the role tool for each call {calls}, got answers to {ids}. "
                "Answer every call, as `answer_calls` does."
            )
        named = iter(ids)
        self._new = [
            _for_server({**message, "tool_call_id": next(named)} if message.get("role") == "tool" else message)
            for message in new
        ]
        if calls and not results:  # servers refuse calls without results
            self._messages[-1] = {"role": "assistant", "content": action}
        return Reply([], "messages")

    def append_reply(self, reply: Reply) -> None:
        """Append the reply that `reply_to` returned."""
        self._messages += self._new
        if self._new:
            self.text += f"\n\n{plain_text(self._new)}"
        self._new = []


def _for_server(message: Message) -> Message:
    """Return a message with the keys that servers know."""
    return {key: deepcopy(message[key]) for key in _KEYS if key in message}


def _item(call: Mapping[str, Any]) -> ToolCall | MalformedCall:
    """Return a call of the API; its arguments may be anything that a model wrote."""
    function = call["function"]
    name, written, problem = function.get("name"), function.get("arguments"), ""
    text = written if isinstance(written, str) else json.dumps(written, ensure_ascii=False)
    try:
        arguments = json.loads(text or "{}", parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        arguments, problem = {}, f"its arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        problem = "its arguments are not a JSON object"
    if not isinstance(name, str) or not name:
        name, problem = "", "it has no name"
    shown = (
        f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {text or "{}"}}}\n</tool_call>'
    )
    return MalformedCall(shown, problem, call["id"], name) if problem else ToolCall(name, arguments, call["id"], shown)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _sent_back(call: Mapping[str, Any], item: ToolCall | MalformedCall) -> Mapping[str, Any]:
    """Return a call for the conversation: unchanged, or with what servers accept in place of what is malformed."""
    if isinstance(item, ToolCall) and isinstance(call["function"].get("arguments"), str):
        return call
    arguments = item.arguments if isinstance(item, ToolCall) else {"text": call["function"].get("arguments")}
    function = {"name": item.name or "invalid", "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {**call, "function": {**call["function"], **function}}
