"""ChatRenderer: our Chat as a custom renderer of prime-rl, by the import path `agentenv.interop.verifiers_renderer.…`.

Source: renderers/base.py (Renderer) and custom.py, 0.1.12. verifiers' client for training asks it for tokens. Actions
stay as they were sampled, with every chat template, and calls are read as our own loop reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

from agentenv.chat.chat import Chat, stop_token_ids_of
from agentenv.chat.tool_roles import bridge_with_tools, with_known_roles
from agentenv.core.messages import check_open, named_results
from agentenv.core.tool_calls import ToolCall
from agentenv.core.types import Message
from agentenv.errors import ConfigError


class ChatRendering:
    """What ChatRenderer does: messages to tokens and back. All new tokens are attributed to the last message.

    Args:
        tokenizer: of the model, with its chat template; its `name_or_path` is where stop ids are read from.
        config: no options.
    """

    config_class: ClassVar[type]
    supports_tools = True
    is_prefix_stable = False
    effective_thinking_retention = "all"

    def __init__(self, tokenizer: Any, config: Any = None) -> None:
        self.config = config
        self._stops = stop_token_ids_of(tokenizer.name_or_path, may_download=True)
        self._chat = Chat(tokenizer, stop_token_ids=self._stops)

    def render(self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = False) -> Any:
        """Return the tokens of a prompt.

        Raises:
            ConfigError: the tokens are not for a prompt, but a text to learn; the last message is an assistant's; or
                the template refuses the messages.
        """
        if not add_generation_prompt:
            raise ConfigError("ChatRenderer.render: expected a prompt, got a text to learn. Use another renderer.")
        check_open(messages)
        return _rendered(self._chat.prompt(messages, tools), 0, messages)

    def render_ids(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return `render` without its attribution."""
        return list(self.render(messages, **options).token_ids)

    def bridge_to_next_turn(
        self, previous_prompt_ids: list[int], previous_completion_ids: list[int], new_messages: Any, **_: Any
    ) -> Any:
        """Return all tokens up to the next action; None if the template needs the earlier messages, too."""
        called = self._chat.tool_format.parse(self._chat.action_text(previous_completion_ids, self._stops))
        calls = [(item.call_id, item.name or "invalid") for item in called.items]
        messages = with_known_roles(self._chat, named_results(new_messages, calls))
        before = [*previous_prompt_ids, *previous_completion_ids]
        try:
            added = bridge_with_tools(self._chat, previous_completion_ids, messages, None)
        except ConfigError:  # the caller renders the whole conversation then
            return None
        return _rendered([*before, *added.ids], len(before), new_messages)

    def parse_response(self, token_ids: list[int], *, tools: Any = None, prompt_ids: Any = None) -> Any:
        """Return an action's text, and its calls if tools were offered."""
        from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

        text = self._chat.action_text(token_ids, self._stops)
        if not tools:
            return ParsedResponse(content=text)
        parsed = self._chat.tool_format.parse(text, tools=tools)
        calls, wrong = [], ToolCallParseStatus.INVALID_JSON
        for item in parsed.items:
            if isinstance(item, ToolCall):
                given = {"name": item.name, "arguments": dict(item.arguments), "id": item.call_id}
            else:
                given = {"name": item.name or "invalid", "arguments": item.text, "status": wrong}
            calls.append(ParsedToolCall(raw=item.text, **given))
        return ParsedResponse(content=parsed.content, tool_calls=calls)

    def get_stop_token_ids(self) -> list[int]:
        """Return the ids that end an action."""
        eos = self._chat.tokenizer.eos_token_id
        return sorted({*self._stops, *(() if eos is None else (eos,))})


def __getattr__(name: str) -> Any:
    """Return ChatRenderer, whose class of options needs renderers."""
    if name != "ChatRenderer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _renderer_class()


@functools.cache
def _renderer_class() -> type:
    from renderers.configs import BaseRendererConfig

    options = type("ChatRendererConfig", (BaseRendererConfig,), {"__module__": __name__})
    return type("ChatRenderer", (ChatRendering,), {"config_class": options, "__module__": __name__})


def _rendered(ids: list[int], num_before: int, messages: Sequence[Message]) -> Any:
    from renderers.base import RenderedTokens

    return RenderedTokens(
        token_ids=ids,
        message_indices=[-1] * num_before + [len(messages) - 1] * (len(ids) - num_before),
        message_roles=[str(message.get("role")) for message in messages],
    )
