"""Toolsets: tools of several kinds as one, opened for an episode, with limits, and a record of every call.

Example::

    TOOLS = Toolset(search, Shop, McpServer(command=("npx", "some-server")), max_calls=8)

    class Shopping(AgentInstance):
        async def reset(self, states):
            self.tools = await TOOLS.begin()
            return {**states, "tools": self.tools.schemas}

        async def step(self, states):
            answers = await self.tools.answer(states["tool_calls"].items)
            return StepResult(answers.messages, info=answers.info)

        async def close(self):
            await self.tools.aclose()
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agentenv.agent import call as run_function
from agentenv.errors import ConfigError
from agentenv.held import Held
from agentenv.tools import CallResult, MalformedCall, ToolCall, ToolError, named_call, run_calls, schema_of
from agentenv.types import Message

TIMEOUT_S = 30.0
"""Of a call, where neither the tool nor the toolset says one."""
_OWN_METHODS = ("close", "aclose")
_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool."""

    name: str
    schema: Mapping[str, Any]
    """As chat templates take it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    function: Callable[..., Any]
    """Called with the arguments by name; async, or plain and then run in a thread."""
    origin: str = ""
    """Where it comes from, for people."""
    timeout_s: float | None = None
    """Longest that a call may take; None: as long as the toolset says."""
    checks_types: bool = True
    """Arguments of another type than the schema's are refused here; False: whoever is called looks at them."""
    within: Callable[[float], Tool] | None = None
    """The same tool with calls of so many seconds at most, where it keeps the time itself."""

    @classmethod
    def of(cls, function: Callable[..., Any], *, timeout_s: float | None = None) -> Tool:
        """A function as a tool, with the schema that its type hints and its docstring give.

        Raises:
            ConfigError: as `schema_of`.
        """
        schema = schema_of(function)
        where = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
        return cls(str(schema["function"]["name"]), schema, function, where, timeout_s)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments."""
        return self.schema.get("function", {}).get("parameters") or {}


class ToolSource(Protocol):
    """Where tools come from that need opening: a server, or what an episode has of its own."""

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """Open it for one episode. What is shared is opened once and stays open when this is left.

        Raises:
            InfraError: it cannot be had now.
            ConfigError: it cannot be had at all.
        """


Source = Callable[..., Any] | Tool | ToolSource
"""A function; a class, of which every episode has an instance whose public methods are tools, and whose `close` or
`aclose` is called at its end; a `Tool`; or a `ToolSource`, as `McpServer` and `Toolset` are."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What came of the calls of one turn."""

    results: tuple[CallResult, ...]
    """One for each call that was tried, in order."""
    calls_left: int | None
    """How many more the episode may make; None without a limit."""

    @property
    def messages(self) -> list[Message]:
        """The answers for the model, in order."""
        return [result.message for result in self.results]

    @property
    def info(self) -> dict[str, float]:
        """num_calls (run), num_errors (of these, without a result), num_malformed, num_not_run (over a limit).

        The time they took is in `Turn.step_s`: facts of an episode are to be the same when it is run again.
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
    """Tools of several sources as one. Functions are shared by all episodes, classes made anew for each."""

    def __init__(
        self,
        *sources: Source,
        allowed: Sequence[str] | None = None,
        timeout_s: float | None = None,
        max_chars: int = 8000,
        max_calls: int | None = None,
        max_calls_per_turn: int = 16,
    ) -> None:
        """Nothing is opened yet.

        Args:
            sources: see `Source`.
            allowed: names of the tools to offer; all when None.
            timeout_s: of one call; where a tool or an MCP server has one of its own, the smaller counts. None: theirs,
                and 30 seconds for tools that have none.
            max_chars: of one result; of a longer one the middle is left out, which is said there.
            max_calls: of an episode; what is over it is not run, which the model is told.
            max_calls_per_turn: the same of one turn; its calls run at the same time.

        Raises:
            ConfigError: a function has no schema, two tools share a name, or a limit is none.
        """
        is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
        if timeout_s is not None and not (is_number and 0 < timeout_s < float("inf")):
            raise ConfigError(f"Toolset.timeout_s: expected seconds > 0, got {timeout_s!r}. Change it.")
        numbers = {"max_chars": max_chars, "max_calls_per_turn": max_calls_per_turn, "max_calls": max_calls}
        for name, value in numbers.items():
            is_open = name == "max_calls" and value is None
            if not is_open and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"Toolset.{name}: expected an integer >= 1, got {value!r}. Change it.")
        if isinstance(allowed, str):
            raise ConfigError(f"Toolset.allowed: expected a list of names, got {allowed!r}. Put it in a list.")
        self.timeout_s, self.max_chars = timeout_s, max_chars
        self.max_calls, self.max_calls_per_turn = max_calls, max_calls_per_turn
        self._allowed = None if allowed is None else list(allowed)
        self._sources: list[Tool | ToolSource] = [_source(source) for source in sources]
        _refuse_clashes([source for source in self._sources if isinstance(source, Tool)])

    async def begin(self) -> EpisodeTools:
        """The tools of one episode; close them at its end.

        Raises:
            ConfigError: two tools share a name, or an allowed one is not there.
            InfraError: a source cannot be had now.
        """
        held = Held(self.open())
        return EpisodeTools(await held.open(), self, held)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[Tool]]:
        """Its tools, so that a toolset is a source of another: with its subset, but without its limits on calls."""
        async with AsyncExitStack() as stack:
            tools: list[Tool] = []
            for source in self._sources:
                more = [source] if isinstance(source, Tool) else await stack.enter_async_context(source.open())
                tools += (_limited(tool, self.timeout_s) for tool in more)
            _refuse_clashes(tools)
            yield tools if self._allowed is None else chosen(tools, self._allowed, "Toolset.allowed")


class EpisodeTools:
    """The open tools of one episode, and how many calls it has made; made by `Toolset.begin`."""

    def __init__(self, tools: Sequence[Tool], toolset: Toolset, held: Held[Sequence[Tool]] | None = None) -> None:
        self.tools = {tool.name: tool for tool in tools}
        """By name."""
        self.num_calls = 0
        """Run so far."""
        self._toolset, self._held = toolset, held

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What `reset` offers under the key `tools`."""
        return [dict(tool.schema) for tool in self.tools.values()]

    async def answer(self, items: Sequence[ToolCall | MalformedCall]) -> Answers:
        """Run the calls of a turn at the same time. Everything that is wrong with one is its answer.

        Raises:
            InfraError: a tool raised it; the others are cancelled.
        """
        run, answers = self._within_limits(items)
        self.num_calls += sum(isinstance(item, ToolCall) for _, item in run)
        limits = {name: tool.timeout_s or TIMEOUT_S for name, tool in self.tools.items()}
        functions = {name: _checked(tool) for name, tool in self.tools.items()}
        found = await run_calls([item for _, item in run], functions, timeout_s=limits)
        answers.update((place, self._short(result)) for (place, _), result in zip(run, found, strict=True))
        most = self._toolset.max_calls
        left = None if most is None else most - self.num_calls
        return Answers(tuple(answers[place] for place in sorted(answers)), left)

    async def aclose(self) -> None:
        """Close what was opened for this episode; again is harmless."""
        held, self._held = self._held, None
        if held is not None and (error := await held.aclose()) is not None:
            raise error

    def _within_limits(
        self, items: Sequence[ToolCall | MalformedCall]
    ) -> tuple[list[tuple[int, ToolCall | MalformedCall]], dict[int, CallResult]]:
        """What is to be run, by place, and the answers to the rest."""
        run: list[tuple[int, ToolCall | MalformedCall]] = []
        answers: dict[int, CallResult] = {}
        toolset, num_calls = self._toolset, 0
        for place, item in enumerate(items):
            said = ""
            if isinstance(item, ToolCall):
                if toolset.max_calls is not None and self.num_calls + num_calls >= toolset.max_calls:
                    said = f"Error: not run: no more than {toolset.max_calls} calls can be made."
                elif num_calls >= toolset.max_calls_per_turn:
                    said = f"Error: not run: no more than {toolset.max_calls_per_turn} calls can be made at a time."
                num_calls += not said
            if said:
                answers[place] = CallResult(item, said, "limit")
            else:
                run.append((place, item))
        return run, answers

    def _short(self, result: CallResult) -> CallResult:
        content = str(result.message["content"])
        return replace(result, content=shortened(content, self._toolset.max_chars))


def chosen(tools: Sequence[Tool], names: Sequence[str], where: str, *, prefix: str = "") -> list[Tool]:
    """The tools of these names, which lack the `prefix` that all have.

    Raises:
        ConfigError: there is none of a name.
    """
    by_name = {tool.name.removeprefix(prefix): tool for tool in tools}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise ConfigError(f"{where}: expected tools among {sorted(by_name)}, got {missing}. Mend the names.")
    return [by_name[name] for name in names]


def shortened(text: str, max_chars: int) -> str:
    """A text with no more than so many of its characters: of a longer one the middle is left out, and said to be."""
    if len(text) <= max_chars:
        return text
    head, tail = text[: max_chars - max_chars // 2], text[len(text) - max_chars // 2 :]
    return f"{head}\n[… {len(text) - max_chars} characters left out …]\n{tail}"


@dataclass(frozen=True, slots=True)
class _PerEpisode:
    """A class whose instance every episode has one of."""

    made: Callable[[], Any]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[Tool]]:
        """The public methods of an instance."""
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


def _limited(tool: Tool, timeout_s: float | None) -> Tool:
    """A tool with the smaller of its own limit and a toolset's."""
    if timeout_s is None:
        return replace(tool, timeout_s=tool.timeout_s or TIMEOUT_S)
    if tool.within is not None:
        return tool.within(timeout_s)
    return replace(tool, timeout_s=min(tool.timeout_s or timeout_s, timeout_s))


def _source(source: Source) -> Tool | ToolSource:
    if isinstance(source, Tool):
        return source
    if inspect.isclass(source):
        return _PerEpisode(source)
    if hasattr(source, "open"):
        return source
    if callable(source):
        return Tool.of(source)
    raise ConfigError(f"Toolset: expected functions, classes, tools or sources of tools, got {source!r}. Change it.")


def _refuse_clashes(tools: Sequence[Tool]) -> None:
    seen: dict[str, Tool] = {}
    for tool in tools:
        if (other := seen.setdefault(tool.name, tool)) is not tool:
            raise ConfigError(
                f"Toolset: expected different names, got {tool.name!r} from {other.origin} and from {tool.origin}. "
                "Rename one, leave it out, or give an MCP server a prefix."
            )


def _checked(tool: Tool) -> Callable[..., Any]:
    """The tool's function, which refuses arguments of the wrong type; its signature is still the function's."""
    if not tool.checks_types:
        return tool.function

    @functools.wraps(tool.function)
    async def run(**arguments: Any) -> Any:
        """Look at the arguments, and call the function."""
        properties = tool.parameters.get("properties") or {}
        wrong = [said for name, value in arguments.items() if (said := _wrong(name, value, properties.get(name)))]
        if wrong:
            raise ToolError(f"wrong arguments for {tool.name}: {'; '.join(wrong)}.")
        whole = {n: int(v) for n, v in arguments.items() if isinstance(v, float) and _is_whole(v, properties.get(n))}
        return await run_function(named_call(tool.name, tool.function, {**arguments, **whole}))

    return run


def _is_whole(value: Any, schema: Any) -> bool:
    """Whether it is an integer that JSON has as 3.0."""
    return isinstance(schema, Mapping) and schema.get("type") == "integer" and float(value).is_integer()


def _wrong(name: str, value: Any, schema: Any) -> str:
    """What is wrong with an argument, as far as a plain type or choice in its schema tells."""
    if not isinstance(schema, Mapping):
        return ""
    choices, kind = schema.get("enum"), schema.get("type")
    nothing = value is None and (schema.get("nullable") is True or None in (choices or ()))
    if isinstance(choices, list) and value not in choices and not nothing:
        return f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r:.80}"
    wanted = _KINDS.get(kind) if isinstance(kind, str) else None
    if wanted is None or nothing:
        return ""
    fits = isinstance(value, wanted) and (kind == "boolean" or not isinstance(value, bool))
    fits = fits or (isinstance(value, float) and _is_whole(value, schema))
    return "" if fits else f"{name} must be of type {kind}, got {value!r:.80}"
