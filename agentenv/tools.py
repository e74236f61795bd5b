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
from collections.abc import Callable, Mapping
from typing import Any

from agentenv.agent import call as run_function
from agentenv.errors import ConfigError, InfraError
from agentenv.tool_formats.calls import MalformedCall, ParsedAction, ToolCall
from agentenv.tool_formats.learn import tool_format
from agentenv.tool_formats.parse import ToolFormat
from agentenv.types import Message

__all__ = [
    "MalformedCall",
    "ParsedAction",
    "ToolCall",
    "ToolFormat",
    "answer_calls",
    "assistant_message",
    "result_message",
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


async def answer_calls(
    parsed: ParsedAction, tools: Mapping[str, Callable[..., Any]], *, timeout_s: float = 60.0
) -> list[Message]:
    """One message for each call that was tried, in order; the calls run at the same time.

    Async functions are awaited, plain ones run in a thread. An unknown tool, wrong arguments, what a tool raises, and
    no result within `timeout_s` are told to the model, in a message that begins with "Error:".

    Raises:
        InfraError: a tool raised it; the other calls are cancelled.
    """
    work = [asyncio.ensure_future(_answer(item, tools, timeout_s)) for item in parsed.items]
    try:
        return list(await asyncio.gather(*work))
    finally:
        left = [task for task in work if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=2 * _CANCEL_GRACE_S)


async def _answer(item: ToolCall | MalformedCall, tools: Mapping[str, Callable[..., Any]], timeout_s: float) -> Message:
    if isinstance(item, MalformedCall):
        return result_message(item, f"Error: this call cannot be read: {item.problem}. Write it again.")
    function = tools.get(item.name)
    if function is None:
        known = ", ".join(sorted(tools)) or "none"
        return result_message(item, f"Error: there is no tool {item.name!r}. Tools: {known}.")
    wrong = _wrong_arguments(function, item)
    if wrong:
        return result_message(item, wrong)
    arguments = copy.deepcopy(dict(item.arguments))
    work = asyncio.ensure_future(run_function(functools.partial(function, **arguments)))
    try:
        await asyncio.wait({work}, timeout=timeout_s)
    finally:
        if not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=_CANCEL_GRACE_S)
            work.add_done_callback(_forget)
            late = True
        else:
            late = False
    if late:
        return result_message(item, f"Error: {item.name} gave no result within {timeout_s:g} s.")
    error = work.exception()  # raises what cancelled it
    if isinstance(error, InfraError):
        raise error
    return result_message(item, work.result() if error is None else _described(error))


def _forget(work: asyncio.Future[Any]) -> None:
    # Nobody asks for the exception of a call that was given up, which asyncio would complain about.
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
    return "Error: " + "".join(traceback.format_exception_only(error)).strip()[:_MAX_ERROR_CHARS]


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are no text, a circle
        return str(value)
