"""Toolsets: tools of several kinds combined, opened for an episode, with limits and a record of every call.

Example::

    TOOLS = Toolset(search, Shop, McpServer(command=("npx", "some-server")), max_calls=8)

    class Shopping(AgentInstance):
        tools = None

        async def reset(self, states):
            self.tools = await TOOLS.begin()
            return {**states, "tools": self.tools.schemas}

        async def step(self, states):
            answers = await self.tools.answer(states["tool_calls"].items)
            return StepResult(answers.messages, info=answers.info)

        async def close(self):
            if self.tools is not None:  # `close` is also called if `reset` failed
                await self.tools.aclose()
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agentenv._util.calls import call as run_function
from agentenv._util.task_bound import TaskBoundContext
from agentenv.core.types import Message
from agentenv.errors import ConfigError
from agentenv.tools.calling import CallResult, MalformedCall, ToolCall, run_calls

TIMEOUT_S = 30.0
"""Time limit of a call in seconds if neither the tool nor the toolset sets one."""
_OWN_METHODS = ("close", "aclose")


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool."""

    name: str
    """The name by which the model calls it."""
    schema: Mapping[str, Any]
    """The schema for chat templates: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    function: Callable[..., Any]
    """Called with keyword arguments; async, or plain and run in a thread."""
    origin: str = ""
    """Where the tool comes from, for messages."""
    timeout_s: float | None = None
    """Time limit of a call in seconds; None: the toolset's."""
    checks_types: bool = True
    """True if arguments are checked against the types in the schema here; False if the callee checks JSON values."""
    within: Callable[[float], Tool] | None = None
    """Return the same tool with a time limit in seconds, for tools that enforce it themselves."""

    @classmethod
    def of(cls, function: Callable[..., Any], *, timeout_s: float | None = None) -> Tool:
        """Return a function as a tool, with the schema from its type hints and docstring.

        Raises:
            ConfigError: as `schema_of`.
        """
        from agentenv.tools.schemas import schema_of

        schema = schema_of(function)
        where = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
        return cls(str(schema["function"]["name"]), schema, function, where, timeout_s)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments."""
        return self.schema.get("function", {}).get("parameters") or {}


class ToolSource(Protocol):
    """A source of tools that must be opened: a server, or state that belongs to one episode."""

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """Open the tools for one episode. Shared resources are opened once and stay open afterwards.

        Raises:
            InfraError: the source is not available now.
            ConfigError: the source cannot be used at all.
        """


Source = Callable[..., Any] | Tool | ToolSource
"""A function; a class, instantiated for every episode, whose public methods are tools and whose `close` or `aclose`
runs at the end of the episode; a `Tool`; or a `ToolSource`, like `McpServer` and `Toolset`."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The results of the calls of one turn."""

    results: tuple[CallResult, ...]
    """One result for each attempted call, in order."""
    calls_left: int | None
    """Number of calls left in the episode; None without a limit."""

    @property
    def messages(self) -> list[Message]:
        """Return the answers for the model, in order."""
        return [result.message for result in self.results]

    @property
    def info(self) -> dict[str, float]:
        """Return num_calls (run), num_errors (of these, failed), num_malformed and num_not_run (see `CallResult`).

        Times are in `Turn.step_s`, not here: an episode's info must be the same when the episode is run again.
        """
        found = Counter(result.problem for result in self.results)
        num_calls = len(self.results) - found["malformed"] - found["limit"]
        return {
            "num_calls": float(num_calls),
            "num_errors": float(num_calls - found[""]),
            "num_malformed": float(found["malformed"]),
            "num_not_run": float(found["limit"]),
        }


class Toolset:
    """Tools of several sources combined. Episodes share functions; each episode gets its own instances of classes."""

    def __init__(
        self,
        *sources: Source,
        allowed: Sequence[str] | None = None,
        timeout_s: float | None = None,
        max_chars: int = 8000,
        max_calls: int | None = None,
        max_calls_per_turn: int = 16,
    ) -> None:
        """Store the settings; nothing is opened.

        Args:
            sources: see `Source`.
            allowed: names of the tools to offer; all if None.
            timeout_s: limit of one call in seconds; if a tool or an MCP server has its own, the smaller one is used. If
                None, their own limits apply, and 30 seconds to tools without one.
            max_chars: maximum length of one result; the middle of a longer one is replaced with a note.
            max_calls: limit for an episode; further calls are not run, and the model receives a message.
            max_calls_per_turn: limit for one turn.

        Raises:
            ConfigError: a function has no schema, two tools share a name, or a limit is invalid.
        """
        is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
        if timeout_s is not None and not (is_number and 0 < timeout_s < float("inf")):
            raise ConfigError(f"Toolset.timeout_s: expected seconds > 0, got {timeout_s!r}.")
        numbers = {"max_chars": max_chars, "max_calls_per_turn": max_calls_per_turn, "max_calls": max_calls}
        for name, value in numbers.items():
            is_open = name == "max_calls" and value is None
            if not is_open and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"Toolset.{name}: expected an integer >= 1, got {value!r}.")
        if isinstance(allowed, str):
            raise ConfigError(f"Toolset.allowed: expected a list of names, got {allowed!r}. Put it in a list.")
        self.timeout_s, self.max_chars = timeout_s, max_chars
        self.max_calls, self.max_calls_per_turn = max_calls, max_calls_per_turn
        self._allowed = None if allowed is None else list(allowed)
        self._sources: list[Tool | ToolSource] = []
        for source in sources:
            if isinstance(source, Tool):
                self._sources.append(source)
            elif inspect.isclass(source):
                self._sources.append(_PerEpisode(source))
            elif hasattr(source, "open"):
                self._sources.append(source)
            elif callable(source):
                self._sources.append(Tool.of(source))
            else:
                raise ConfigError(f"Toolset: expected functions, classes, tools or sources of tools, got {source!r}.")
        _refuse_clashes([source for source in self._sources if isinstance(source, Tool)])

    async def begin(self) -> EpisodeTools:
        """Open the tools of one episode; close them at its end.

        Raises:
            ConfigError: two tools share a name, or an allowed one does not exist.
            InfraError: a source is not available now.
        """
        held = TaskBoundContext(self.open())
        return EpisodeTools(await held.open(), self, held)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[Tool]]:
        """Yield the tools, so that a toolset can be a source of another: with its subset, without its call limits."""
        async with AsyncExitStack() as stack:
            tools: list[Tool] = []
            for source in self._sources:
                more = [source] if isinstance(source, Tool) else await stack.enter_async_context(source.open())
                for tool in more:
                    if self.timeout_s is None:
                        tools.append(replace(tool, timeout_s=tool.timeout_s or TIMEOUT_S))
                    elif tool.within is not None:
                        tools.append(tool.within(self.timeout_s))
                    else:
                        tools.append(replace(tool, timeout_s=min(tool.timeout_s or self.timeout_s, self.timeout_s)))
            _refuse_clashes(tools)
            yield tools if self._allowed is None else chosen(tools, self._allowed, "Toolset.allowed")


class EpisodeTools:
    """The open tools of one episode, with a count of its calls; created by `Toolset.begin`."""

    def __init__(
        self, tools: Sequence[Tool], toolset: Toolset, held: TaskBoundContext[Sequence[Tool]] | None = None
    ) -> None:
        self.tools = {tool.name: tool for tool in tools}
        """By name."""
        self.num_calls = 0
        """Number of calls run so far."""
        self._toolset, self._held = toolset, held

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas that `reset` offers under the key `tools`."""
        return [dict(tool.schema) for tool in self.tools.values()]

    async def answer(self, items: Sequence[ToolCall | MalformedCall]) -> Answers:
        """Run the calls of a turn, as `answer_calls` does. Every error in a call becomes its answer.

        Raises:
            InfraError: a tool raised it; the others are cancelled.
        """
        run: list[tuple[int, ToolCall | MalformedCall]] = []  # the calls to run, by position
        answers: dict[int, CallResult] = {}
        most, most_per_turn, num_calls = self._toolset.max_calls, self._toolset.max_calls_per_turn, 0
        for place, item in enumerate(items):
            message = ""
            if isinstance(item, ToolCall):
                if most is not None and self.num_calls + num_calls >= most:
                    message = f"Error: not run: no more than {most} calls can be made."
                elif num_calls >= most_per_turn:
                    message = f"Error: not run: no more than {most_per_turn} calls can be made at a time."
                num_calls += not message
            if message:
                answers[place] = CallResult(item, message, "limit")
            else:
                run.append((place, item))
        self.num_calls += num_calls
        limits = {name: tool.timeout_s or TIMEOUT_S for name, tool in self.tools.items()}
        functions = {name: tool.function for name, tool in self.tools.items()}
        parameters = {name: tool.parameters if tool.checks_types else {} for name, tool in self.tools.items()}
        found = await run_calls([item for _, item in run], functions, timeout_s=limits, parameters=parameters)
        for (place, _), result in zip(run, found, strict=True):
            content = shortened(str(result.message["content"]), self._toolset.max_chars)
            answers[place] = replace(result, content=content)
        left = None if most is None else most - self.num_calls
        return Answers(tuple(answers[place] for place in sorted(answers)), left)

    async def aclose(self) -> None:
        """Close everything that was opened for this episode; safe to call again."""
        held, self._held = self._held, None
        if held is not None and (error := await held.aclose()) is not None:
            raise error


def chosen(tools: Sequence[Tool], names: Sequence[str], where: str, *, prefix: str = "") -> list[Tool]:
    """Return the tools with these names, given without the `prefix` that all tools share.

    Raises:
        ConfigError: a name does not exist.
    """
    by_name = {tool.name.removeprefix(prefix): tool for tool in tools}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise ConfigError(f"{where}: expected tools among {sorted(by_name)}, got {missing}. Fix the names.")
    return [by_name[name] for name in names]


def shortened(text: str, max_chars: int) -> str:
    """Return at most `max_chars` characters of a text; a note replaces the middle of a longer one."""
    if len(text) <= max_chars:
        return text
    head, tail = text[: max_chars - max_chars // 2], text[len(text) - max_chars // 2 :]
    return f"{head}\n[… {len(text) - max_chars} characters left out …]\n{tail}"


@dataclass(frozen=True, slots=True)
class _PerEpisode:
    """A class that is instantiated for every episode."""

    made: Callable[[], Any]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[Tool]]:
        """Yield the public methods of a new instance."""
        instance = self.made()
        try:
            names = [n for n, _ in inspect.getmembers(type(instance), callable) if not n.startswith("_")]
            tools = [Tool.of(getattr(instance, name)) for name in names if name not in _OWN_METHODS]
            if not tools:
                raise ConfigError(f"{self.made}: expected public methods as tools, got none. Write some.")
            yield tools
        finally:
            for name in _OWN_METHODS:
                if callable(close := getattr(instance, name, None)):
                    await run_function(close)
                    break


def _refuse_clashes(tools: Sequence[Tool]) -> None:
    seen: dict[str, Tool] = {}
    for tool in tools:
        if (other := seen.setdefault(tool.name, tool)) is not tool:
            raise ConfigError(
                f"Toolset: expected different names, got {tool.name!r} from {other.origin} and from {tool.origin}. "
                "Rename one, leave it out, or give an MCP server a prefix."
            )
