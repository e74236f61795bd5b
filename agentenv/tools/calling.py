"""Tools: calls in a model's own format (`tool_format`), and answers to them (`answer_calls`).

Example::

    class Search(AgentInstance):
        async def step(self, states):
            parsed = FORMAT.parse(states["action_text"], turn_index=states["turn_index"])
            if parsed.items:
                return StepResult(await answer_calls(parsed, {"search": search}))
            return StepResult(reward=grade(parsed.content), terminated=True)

Only actions are parsed: call syntax in a tool's result is plain text. Every error in a call becomes a message that the
model can act on.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from agentenv._util.calls import call as run_function
from agentenv._util.calls import retrieve_exception, seconds_left
from agentenv._util.off_loop import MAX_AT_ONCE, size_of
from agentenv.chat.tool_calls.learn import tool_format
from agentenv.chat.tool_calls.messages import _as_json, assistant_message, result_message
from agentenv.chat.tool_calls.parse import ToolFormat
from agentenv.core.tool_calls import MalformedCall, ParsedAction, ToolCall
from agentenv.core.types import Message
from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.tools.arguments import forms_of, read_arguments

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
    "tool_format",
]

_Part = TypeVar("_Part")

_CANCEL_GRACE_S = 1.0
_MAX_ERROR_CHARS = 2000


class ToolError(Exception):
    """A tool's error, with a message for the model: if a tool raises it, the answer is "Error: " and its message."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of one call."""

    item: ToolCall | MalformedCall
    content: Any
    """The tool's result, or an error message that begins with "Error:"."""
    problem: Literal["", "malformed", "unknown", "arguments", "raised", "timeout", "limit"] = ""
    """The kind of error; limit: not run, since there were too many or earlier ones exceeded their limit."""
    content_json: str = field(default="", repr=False, compare=False)
    """Content that is not text, unchanged from the tool: JSON, or text by `str`."""

    @property
    def message(self) -> Message:
        """Return the answer for the model."""
        is_text = isinstance(self.content, str)
        return result_message(self.item, self.content if is_text else self.content_json or self.content)


async def answer_calls(
    parsed: ParsedAction,
    tools: Mapping[str, Callable[..., Any]] | Sequence[Callable[..., Any]],
    *,
    timeout_s: float = 60.0,
) -> list[Message]:
    """Return one message for each attempted call, in order.

    Read all calls first, then start them in order: await async functions, concurrently with the others, and run plain
    ones in a thread, one after another. After one that exceeds its limit, no other plain one starts, and none starts
    once they took `timeout_s` together. Unknown tools, wrong arguments, exceptions raised by a tool, and a missing
    result after `timeout_s` become messages to the model that begin with "Error:". Arguments are checked against the
    type hints, and become enums, dates and objects of the classes that are hints.

    Args:
        parsed: the calls.
        tools: functions by name, or a list of functions.
        timeout_s: limit of one call, and of all plain ones together, in seconds; less if the step has less left.

    Raises:
        ConfigError: the tools are neither, or two have one name.
        InfraError: a tool raised it; the other calls are cancelled.
    """
    listed = not isinstance(tools, Mapping) and isinstance(tools, Sequence)
    named: Any = {str(getattr(tool, "__name__", "")): tool for tool in tools} if listed else tools
    is_named = isinstance(named, Mapping) and "" not in named and all(callable(tool) for tool in named.values())
    if not is_named or len(named) != len(tools):
        raise ConfigError(
            "answer_calls: expected functions by name, or a list of functions with different names, got "
            f"{tools!r:.200}. Pass {{'name': function}}."
        )
    return [result.message for result in await run_calls(parsed.items, named, timeout_s=timeout_s)]


async def run_calls(
    items: Sequence[ToolCall | MalformedCall],
    tools: Mapping[str, Callable[..., Any]],
    *,
    timeout_s: float | Mapping[str, float] = 60.0,
    parameters: Mapping[str, Mapping[str, Any] | None] = MappingProxyType({}),
) -> list[CallResult]:
    """Like `answer_calls`, but also return the kind of error of each call; `timeout_s` may depend on the tool.

    `parameters` has schemas by tool, against which arguments are checked instead of type hints.

    Raises:
        InfraError: a tool raised it; the other calls are cancelled.
    """
    limits = dict.fromkeys(tools, timeout_s) if isinstance(timeout_s, float | int) else timeout_s
    read = await _together(_read(item, tools, limits, parameters.get(item.name)) for item in items)
    order = _Order()
    return await _together(
        order.run(item, one, limits.get(item.name, 0.0)) for item, one in zip(items, read, strict=True)
    )


async def _together(parts: Iterable[Coroutine[Any, Any, _Part]]) -> list[_Part]:
    """Return the results of all parts, which are started in order; the first exception cancels the others."""
    work = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*work))
    finally:
        left = [task for task in work if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=2 * _CANCEL_GRACE_S)


class _Order:
    """Starts the calls of an action in order, and runs plain functions one after another, with one limit for all."""

    def __init__(self) -> None:
        self._start, self._plain = asyncio.Lock(), asyncio.Lock()  # tasks get a lock in the order in which they ask
        self._late, self._limit_s, self._loop = "", 0.0, asyncio.get_running_loop()
        self._began, left_s = math.inf, seconds_left()
        self._most_s = max(left_s / 2, left_s - 2 * _CANCEL_GRACE_S)  # the step returns the answers in the rest

    async def run(
        self, item: ToolCall | MalformedCall, function: Callable[[], Any] | CallResult, limit_s: float
    ) -> CallResult:
        """Return the result of a call, or what is wrong with it already.

        Raises:
            InfraError: the function raised it; no plain function starts after that.
        """
        if isinstance(function, CallResult):
            return function
        is_plain, limit_s = not inspect.iscoroutinefunction(function), min(limit_s, self._most_s)

        def end_turn() -> None:
            nonlocal is_plain
            if is_plain:
                is_plain = False
                self._plain.release()

        @functools.wraps(function)
        def started() -> Any:
            if inspect.isawaitable(value := function()):  # it is awaited beside the others
                self._loop.call_soon_threadsafe(end_turn)
            return value

        async with self._start:
            if is_plain:
                await self._plain.acquire()
        if is_plain:
            now = self._loop.time()
            self._limit_s, self._began = max(self._limit_s, limit_s), min(self._began, now)
            passed_s = now - self._began
            limit_s = min(limit_s, round(self._limit_s - passed_s, 3))
        if is_plain and (self._late or limit_s <= 0):
            why = f"{self._late} has not ended" if self._late else f"the calls before took {passed_s:.3g} s"
            result = CallResult(item, f"Error: not run: {why}.", "limit")
        else:
            result = await _within(limit_s, item, _result_of(item, started if is_plain else function))
        if is_plain:
            self._late = item.name if result.problem == "timeout" else self._late
        end_turn()
        return result


async def _within(
    limit_s: float, item: ToolCall | MalformedCall, part: Coroutine[Any, Any, _Part]
) -> _Part | CallResult:
    """Return what a part of a call returns, or its error.

    Raises:
        InfraError: the part raised it.
    """
    work = asyncio.ensure_future(part)
    work.add_done_callback(retrieve_exception)
    try:
        await asyncio.wait({work}, timeout=limit_s)
        late = not work.done()
    finally:
        if not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=_CANCEL_GRACE_S)
    if late:
        return CallResult(item, f"Error: {item.name} returned no result within {limit_s:g} s.", "timeout")
    error = asyncio.CancelledError() if work.cancelled() else work.exception()
    if isinstance(error, InfraError):
        raise error
    if error is None:
        return work.result()
    if isinstance(error, ToolError):
        return CallResult(item, f"Error: {error}", "raised")
    sys.audit("agentenv.tool_error", item.name, error)  # `agentenv check` hears it
    text = "".join(traceback.format_exception_only(error)).strip()[:_MAX_ERROR_CHARS]
    return CallResult(item, f"Error: {text}", "raised")


def named_call(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """Bind a function to its arguments under a tool's name, for error messages to the model."""
    bound = functools.partial(function, **arguments)
    vars(bound)["__qualname__"] = name
    return bound


async def _read(
    item: ToolCall | MalformedCall,
    tools: Mapping[str, Callable[..., Any]],
    limits: Mapping[str, float],
    parameters: Mapping[str, Any] | None,
) -> Callable[[], Any] | CallResult:
    """Return the function of a call with its arguments, or what is wrong with the call."""
    if isinstance(item, MalformedCall):
        return CallResult(item, f"Error: this call cannot be read: {item.problem}. Write it again.", "malformed")
    function = tools.get(item.name)
    if function is None:
        known = ", ".join(sorted(tools)) or "none"
        return CallResult(item, f"Error: unknown tool {item.name!r}. Tools: {known}.", "unknown")
    return await _within(limits[item.name], item, _with_arguments(function, item, parameters))


async def _with_arguments(
    function: Callable[..., Any], item: ToolCall, parameters: Mapping[str, Any] | None
) -> Callable[[], Any] | CallResult:
    """Return a function with the arguments of a call, or what is wrong with them.

    Arguments are read in a thread if they are large, or become objects of classes whose code runs then.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # builtins have no signature
        signature = inspect.signature(lambda **_: None)
    try:
        signature.bind_partial(**item.arguments)  # names an unknown argument before a missing one
        signature.bind(**item.arguments)
    except TypeError as error:
        takes = signature.replace(return_annotation=inspect.Signature.empty)
        problem = f"Error: wrong arguments for {item.name}: {error}. It takes {takes}."
        return CallResult(item, problem, "arguments")
    given = {"function": function, "given": item.arguments, "parameters": parameters}
    read = named_call(item.name, read_arguments, given)
    is_large = size_of((item.text, parameters)) > MAX_AT_ONCE
    in_thread = is_large or any(form.make for form in forms_of(function).values())
    try:
        arguments = await run_function(read) if in_thread else read()
    except (ValueError, RecursionError) as error:
        nested = "they are nested too deep. Write them with fewer levels"
        problem = nested if isinstance(error, RecursionError) else str(error)[:_MAX_ERROR_CHARS]
        return CallResult(item, f"Error: wrong arguments for {item.name}: {problem}.", "arguments")
    return named_call(item.name, function, arguments)


async def _result_of(item: ToolCall | MalformedCall, function: Callable[[], Any]) -> CallResult:
    """Return a tool's result as text for the model.

    Raises:
        ToolError: the result cannot be written as text.
        ContractError: the result, or a value in it, has no text but its address in memory.
    """
    value = await run_function(function)
    if isinstance(value, str):
        return CallResult(item, value)
    try:
        return CallResult(item, value, content_json=_as_json(value, item.name))
    except ContractError:
        raise
    except Exception as error:
        raise ToolError(
            f"{item.name}: expected a result that can be written as text, got a {type(value).__name__} whose text "
            f"fails with {type(error).__name__}. Call it in another way."
        ) from error
