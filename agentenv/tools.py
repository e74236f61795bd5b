"""Tools: calls in a model's own format (`tool_format`), answers to them (`answer_calls`), and schemas (`schema_of`).

Example::

    class Search(AgentInstance):
        async def step(self, states):
            parsed = FORMAT.parse(states["action_text"], turn_index=states["turn_index"])
            if parsed.items:
                return StepResult(await answer_calls(parsed, {"search": search}))
            return StepResult(reward=grade(parsed.content), terminated=True)

Only actions are parsed: call syntax in a tool's result is text. Whatever goes wrong with a call becomes words that the
model can act on.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentenv.agent import call as run_function
from agentenv.errors import ConfigError, InfraError
from agentenv.tool_formats.calls import MalformedCall, ParsedAction, ToolCall
from agentenv.tool_formats.learn import tool_format
from agentenv.tool_formats.parse import ToolFormat
from agentenv.types import Message

__all__ = [
    "CallResult",
    "MalformedCall",
    "ParsedAction",
    "ToolCall",
    "ToolError",
    "ToolFormat",
    "answer_calls",
    "assistant_message",
    "result_message",
    "run_calls",
    "schema_of",
    "tool_format",
]

_CANCEL_GRACE_S = 1.0
_MAX_ERROR_CHARS = 2000


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """A function as a tool for chat templates: its JSON schema, from its type hints and its Google-style docstring.

    Source: transformers.utils.get_json_schema, 4.56 to 5.19.

    Raises:
        ConfigError: a parameter has no type hint, or no line under `Args:`.
    """
    from transformers.utils import get_json_schema

    try:
        return dict(get_json_schema(function))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigError(
            f"schema_of: expected a function with type hints and a docstring that has a line for every parameter under "
            f"Args:, got {name}: {error}. Complete it, or write the schema by hand."
        ) from error


def result_message(call: ToolCall | MalformedCall, content: Any) -> Message:
    """The answer to a call as a message: text as it is, other values as JSON."""
    return {
        "role": "tool",
        "tool_call_id": call.call_id,
        "name": call.name or "invalid",
        "content": (content if isinstance(content, str) else _as_json(content)).encode("utf-8", "replace").decode(),
    }


def assistant_message(parsed: ParsedAction, *, as_json: bool = False) -> Message:
    """The action as a structured message, for conversations that are rendered anew.

    A malformed call becomes a call of its name (or of "invalid") with its text as the one argument, so that every
    answer finds its call. With `as_json`, arguments are JSON text (`ToolFormat.arguments_as_json`).
    """
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    calls = []
    for item in parsed.items:
        arguments = dict(item.arguments) if isinstance(item, ToolCall) else {"text": item.text}
        function = {"name": item.name or "invalid", "arguments": _as_json(arguments) if as_json else arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})
    return {**message, "tool_calls": calls} if calls else message


class ToolError(Exception):
    """What went wrong, in words for the model: a tool that raises it is answered with "Error: " and its message."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """What came of one call."""

    item: ToolCall | MalformedCall
    content: Any
    """What the tool gave, or words on what went wrong, which begin with "Error:"."""
    problem: Literal["", "malformed", "unknown", "arguments", "raised", "timeout", "limit"] = ""
    """What went wrong; limit: a toolset did not run it, as there were too many."""
    content_json: str = field(default="", repr=False, compare=False)
    """Content that is no text as it was when the tool gave it: JSON, or else as Python writes it."""

    @property
    def message(self) -> Message:
        """The answer for the model."""
        is_text = isinstance(self.content, str)
        return result_message(self.item, self.content if is_text else self.content_json or self.content)


async def answer_calls(
    parsed: ParsedAction, tools: Mapping[str, Callable[..., Any]], *, timeout_s: float = 60.0
) -> list[Message]:
    """One message for each call that was tried, in order; the calls run at the same time.

    Async functions are awaited, plain ones run in a thread. An unknown tool, wrong arguments, what a tool raises, and
    no result within `timeout_s` are told to the model, in a message that begins with "Error:".

    Raises:
        InfraError: a tool raised it; the other calls are cancelled.
    """
    return [result.message for result in await run_calls(parsed.items, tools, timeout_s=timeout_s)]


async def run_calls(
    items: Sequence[ToolCall | MalformedCall],
    tools: Mapping[str, Callable[..., Any]],
    *,
    timeout_s: float | Mapping[str, float] = 60.0,
) -> list[CallResult]:
    """The same as `answer_calls`, and what went wrong with each; `timeout_s` may be one for each tool.

    Raises:
        InfraError: a tool raised it; the other calls are cancelled.
    """
    limits = dict.fromkeys(tools, timeout_s) if isinstance(timeout_s, float | int) else timeout_s
    work = [asyncio.ensure_future(_run(item, tools, limits)) for item in items]
    try:
        return list(await asyncio.gather(*work))
    finally:
        left = [task for task in work if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=2 * _CANCEL_GRACE_S)


async def _run(
    item: ToolCall | MalformedCall, tools: Mapping[str, Callable[..., Any]], limits: Mapping[str, float]
) -> CallResult:
    if isinstance(item, MalformedCall):
        return CallResult(item, f"Error: this call cannot be read: {item.problem}. Write it again.", "malformed")
    function = tools.get(item.name)
    if function is None:
        known = ", ".join(sorted(tools)) or "none"
        return CallResult(item, f"Error: there is no tool {item.name!r}. Tools: {known}.", "unknown")
    wrong = _wrong_arguments(function, item)
    if wrong:
        return CallResult(item, wrong, "arguments")
    try:
        arguments = copy.deepcopy(dict(item.arguments))
    except RecursionError:
        said = f"Error: wrong arguments for {item.name}: they are nested too deep. Write them with fewer levels."
        return CallResult(item, said, "arguments")
    timeout_s = limits[item.name]
    work = asyncio.ensure_future(_given(named_call(item.name, function, arguments), item))
    work.add_done_callback(_forget)
    try:
        await asyncio.wait({work}, timeout=timeout_s)
    finally:
        if not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=_CANCEL_GRACE_S)
            late = True
        else:
            late = False
    if late:
        return CallResult(item, f"Error: {item.name} gave no result within {timeout_s:g} s.", "timeout")
    error = asyncio.CancelledError() if work.cancelled() else work.exception()
    if isinstance(error, InfraError):
        raise error
    return work.result() if error is None else CallResult(item, _described(error), "raised")


def named_call(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """The function with its arguments, under a tool's name: an error about it is told to the model."""
    bound = functools.partial(function, **arguments)
    vars(bound)["__qualname__"] = name
    return bound


async def _given(bound: Callable[[], Any], item: ToolCall) -> CallResult:
    """What a tool gives, which can be told to the model.

    Raises:
        ToolError: it cannot.
    """
    value = await run_function(bound)
    if isinstance(value, str):
        return CallResult(item, value)
    try:
        return CallResult(item, value, content_json=_as_json(value))
    except Exception as error:
        raise ToolError(
            f"{item.name}: expected a result that can be written as text, got a {type(value).__name__} whose text "
            f"fails with {type(error).__name__}. Call it in another way."
        ) from error


def _forget(work: asyncio.Future[Any]) -> None:
    # Nobody asks for the exception of a call that was given up or cancelled, which asyncio would complain about.
    if not work.cancelled():
        work.exception()


def _wrong_arguments(function: Callable[..., Any], call: ToolCall) -> str:
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # builtins have none
        return ""
    try:
        signature.bind(**call.arguments)
    except TypeError as error:
        takes = signature.replace(return_annotation=inspect.Signature.empty)
        return f"Error: wrong arguments for {call.name}: {error}. It takes {takes}."
    return ""


def _described(error: BaseException) -> str:
    if isinstance(error, ToolError):
        return f"Error: {error}"
    return "Error: " + "".join(traceback.format_exception_only(error)).strip()[:_MAX_ERROR_CHARS]


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are no text, a circle
        return str(value)
