"""McpServer: the tools of an MCP server, over stdio or HTTP, as a source of a `Toolset`. Needs `agentenv[mcp]`.

Example::

    Toolset(McpServer(command=("python", "server.py")), McpServer(url="http://127.0.0.1:8000/mcp", prefix="web_"))

A server is connected to once per event loop, and closed with it; or once per episode. One that dies, or that no longer
answers, raises InfraError in the episodes that use it, and the next episode connects anew: a call that was lost is
never a result. Works with mcp 1 and 2 (tried: 1.30, 2.3): what they call differently is looked up here. With 1.x a
server is not told of a call that was given up. Of the older server-sent events one result has at most 1 MiB.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import math
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, Literal

from agentenv.agent import outside
from agentenv.errors import AgentEnvError, ConfigError, InfraError, MissingDependency
from agentenv.held import Held, first_error
from agentenv.mcp_wire import Tail, http_client, listed, refuse_unsendable, result_text
from agentenv.rewards.per_loop import PerLoop
from agentenv.tools import ToolError
from agentenv.toolsets import Tool, chosen

logger = logging.getLogger(__name__)
_MODEL_ERRORS = (-32601, -32602, -32603)
"""JSON-RPC: no such method, invalid arguments, the tool failed: the call's own."""
_MAX_EVENT_BYTES = 64 * 2**20
"""Of one result over HTTP; the package's own 1 MiB would end the connection."""
_PING_LIMIT_S = 5.0
"""For a sign of life from a server whose tool gave no result."""
_GRACE_S = 5.0
"""For what is beside the waiting."""


@dataclass(frozen=True, slots=True)
class McpServer:
    """How to reach a server, and which of its tools to take."""

    command: Sequence[str] = ()
    """A program that speaks MCP on stdin and stdout, and its arguments; or `url`."""
    url: str = ""
    transport: Literal["http", "sse"] = "http"
    """Of a `url`: streamable HTTP, or the older server-sent events."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the program. Of ours it has only HOME, LOGNAME, PATH, SHELL, TERM and USER."""
    pass_env: Sequence[str] = ()
    """Names of variables of ours that it gets too: secrets that are to be in no config."""
    cwd: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    headers_env: Mapping[str, str] = field(default_factory=dict)
    """The same, with the names of environment variables that hold the values."""
    per_episode: bool = False
    """Each episode has a connection, and of a `command` a process, of its own: for servers that keep state."""
    tools: Sequence[str] | None = None
    """Names of the tools to take; all when None."""
    prefix: str = ""
    """Put before the names, where several servers have the same."""
    timeout_s: float = 30.0
    """Longest that a call may take; a toolset's `timeout_s` counts too, where it is smaller."""
    open_timeout_s: float = 30.0
    """Longest that the server may take to be there and to list its tools."""

    def __post_init__(self) -> None:
        """Refuse what cannot be reached.

        Raises:
            ConfigError: naming the field.
        """
        if isinstance(self.command, str) or any(not isinstance(part, str) for part in self.command):
            raise ConfigError(f"McpServer.command: expected a list of texts, got {self.command!r}. Split it.")
        if bool(self.command) == bool(self.url):
            raise ConfigError(f"McpServer: expected command or url, got {self.command!r} and {self.url!r}. Give one.")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"McpServer.url: expected http://… or https://…, got {self.url!r}. Change it.")
        if self.transport not in ("http", "sse"):
            raise ConfigError(f"McpServer.transport: expected http or sse, got {self.transport!r}. Change it.")
        for name, value in {"timeout_s": self.timeout_s, "open_timeout_s": self.open_timeout_s}.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigError(f"McpServer.{name}: expected seconds > 0, got {value!r}. Change it.")
        missing = [name for name in (*self.pass_env, *self.headers_env.values()) if name not in os.environ]
        if missing:
            raise ConfigError(f"McpServer: expected environment variables {missing}, got none. Set them.")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> McpServer:
        """The server that settings describe, such as JSON has them.

        Raises:
            ConfigError: there are no such fields, or they describe none.
        """
        known = [each.name for each in fields(cls)]
        wrong = sorted(set(settings) - set(known)) if isinstance(settings, Mapping) else [settings]
        if wrong:
            raise ConfigError(f"mcp: expected an object with some of {', '.join(known)}, got {wrong}. Change it.")
        return cls(**settings)

    @property
    def name(self) -> str:
        """For people."""
        return self.url or " ".join(self.command)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[Tool]]:
        """Its tools, for one episode; see `ToolSource`.

        Raises:
            InfraError: it is not there, or speaks no MCP.
            ConfigError: there is no such program, or a tool that is asked for is not there.
            MissingDependency: the package mcp is not installed.
        """
        if not self.per_episode:
            yield (await _shared(self)).tools
            return
        connection = await Connection.opened(self)
        try:
            yield connection.tools
        finally:
            await connection.aclose()


class Connection:
    """An open session with a server, which a task of its own holds."""

    def __init__(self, server: McpServer, held: Held[tuple[Any, list[Any]]], log: Tail) -> None:
        self.server, self._held, self._log = server, held, log
        self.is_dead = False
        """Nothing that it says can be relied on any more."""
        self.tools: list[Tool] = []

    @classmethod
    async def opened(cls, server: McpServer) -> Connection:
        """Connect, and list the tools. Raises as `McpServer.open`."""
        log = Tail()
        held = Held(_session(server, log))
        connection = cls(server, held, log)
        try:
            with outside():
                session, found = await held.open(limit_s=server.open_timeout_s)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise ConfigError(
                f"MCP server {server.name}: expected a program, got {error}. Mend the command."
            ) from error
        except Exception as error:
            if isinstance(error, AgentEnvError):
                raise
            raise await connection._failure("a server that speaks MCP", error) from error
        try:
            tools = [connection._tool(session, each) for each in found]
            where = f"MCP server {server.name}"
            connection.tools = (
                tools if server.tools is None else chosen(tools, server.tools, where, prefix=server.prefix)
            )
        except AgentEnvError:
            await connection.aclose()
            raise
        return connection

    @property
    def is_open(self) -> bool:
        """Calls can be made."""
        return not self.is_dead and not self._held.task.done()

    async def aclose(self) -> None:
        """End the session, and the program behind it; again is harmless."""
        self.is_dead = True
        error = await self._held.aclose()
        if error is not None:  # of a connection that had broken down: whoever called it was told
            logger.debug("MCP server %s: closing: %s", self.server.name, _said(error))

    def _tool(self, session: Any, found: Any, most_s: float = math.inf) -> Tool:
        limit_s = min(self.server.timeout_s, most_s)
        name = self.server.prefix + found.name
        parameters = getattr(found, "input_schema", None) or getattr(found, "inputSchema", None) or {"type": "object"}
        function = {"name": name, "description": found.description or "", "parameters": parameters}
        return Tool(
            name, {"type": "function", "function": function}, partial(self._call, session, found.name, limit_s),
            f"MCP server {self.server.name}", limit_s + _PING_LIMIT_S + _GRACE_S, checks_types=False,
            within=lambda most_s: self._tool(session, found, min(limit_s, most_s)),
        )  # fmt: skip

    async def _call(self, session: Any, tool_name: str, limit_s: float, /, **arguments: Any) -> str:
        """What the tool says, as text.

        Raises:
            ToolError: it says that it failed, or gave no result in time; or the arguments cannot be sent.
            InfraError: the connection is gone, or the answer was lost.
        """
        refuse_unsendable(tool_name, arguments)
        if not self.is_open:
            raise await self._failure("a connection")
        work = await self._ended(session.call_tool(tool_name, arguments), limit_s)
        error = None if work is None else work.exception()
        if _code(error) in _MODEL_ERRORS:
            raise ToolError(str(error)) from error
        if (work is None or error is not None) and not await self._is_alive(session):
            raise await self._failure("an answer" if error else "a sign of life", error) from error
        if work is None:
            raise ToolError(f"{tool_name} gave no result within {limit_s:g} s.")
        if error is not None:
            raise InfraError(f"MCP server {self.server.name}: expected an answer, got {_said(error)}.") from error
        result = work.result()
        text = result_text(result)
        if getattr(result, "is_error", getattr(result, "isError", False)):
            raise ToolError(text.removeprefix("Error: "))
        return text

    async def _ended(self, request: Any, limit_s: float) -> asyncio.Future[Any] | None:
        """A request that has ended, or None where it had not in time.

        Raises:
            InfraError: the connection is gone.
        """
        work = asyncio.ensure_future(request)
        try:
            with outside():
                await asyncio.wait({work, self._held.task}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            late = not work.done()
            if late:
                work.cancel()
                await asyncio.wait({work}, timeout=1.0)
        if self._held.task.done() or (work.cancelled() and not late):
            raise await self._failure("an answer")
        return None if late else work

    async def _is_alive(self, session: Any) -> bool:
        """Whether the server still answers: then one call came to nothing, and the connection serves the others."""
        ping = await self._ended(session.send_ping(), _PING_LIMIT_S)
        error = None if ping is None else ping.exception()
        return ping is not None and (error is None or _code(error) in _MODEL_ERRORS)

    async def _failure(self, expected: str, error: BaseException | None = None) -> InfraError:
        """What to raise for a connection that is not used again."""
        self.is_dead = True
        if error is None and self._held.task.done() and not self._held.task.cancelled():
            error = self._held.task.exception()
        if self.server.command:
            await self._log.end()
        said = "none" if error is None else _said(error)
        tail = self._log.text()
        return InfraError(
            f"MCP server {self.server.name}: expected {expected}, got {said}. The next episode connects anew."
            + (f" It said last: {tail}" if tail else "")
        )


@asynccontextmanager
async def _session(server: McpServer, log: Tail) -> AsyncIterator[tuple[Any, list[Any]]]:
    """A session with a server, and the tools that it lists."""
    try:
        mcp = importlib.import_module("mcp")
    except ImportError as error:
        raise MissingDependency(
            "tools of MCP servers: expected the package mcp, got none. Run: pip install 'agentenv[mcp]'"
        ) from error
    async with AsyncExitStack() as stack:
        read, write = await (_program(mcp, server, log, stack) if server.command else _web(server, stack))
        session = await stack.enter_async_context(mcp.ClientSession(read, write))
        await session.initialize()
        yield session, await listed(session)


async def _program(mcp: Any, server: McpServer, log: Tail, stack: AsyncExitStack) -> tuple[Any, Any]:
    stdio = importlib.import_module("mcp.client.stdio")
    errors = await stack.enter_async_context(log.opened())
    env = {**server.env, **{name: os.environ[name] for name in server.pass_env}}
    asked = mcp.StdioServerParameters(command=server.command[0], args=list(server.command[1:]), env=env, cwd=server.cwd)
    streams = await stack.enter_async_context(stdio.stdio_client(asked, errlog=errors))
    errors.close()
    return streams[0], streams[1]


async def _web(server: McpServer, stack: AsyncExitStack) -> tuple[Any, Any]:
    headers = {**server.headers, **{name: os.environ[variable] for name, variable in server.headers_env.items()}}
    if server.transport == "sse":
        sse = importlib.import_module("mcp.client.sse")
        limits: Any = {"timeout": server.open_timeout_s, "sse_read_timeout": None}
        streams = await stack.enter_async_context(sse.sse_client(server.url, headers=headers, **limits))
        return streams[0], streams[1]
    http = importlib.import_module("mcp.client.streamable_http")
    library = getattr(http, "httpx2", None) or http.httpx  # mcp 2, and 1
    client = await stack.enter_async_context(http_client(library, headers, connect_s=server.open_timeout_s))
    takes_size = "max_sse_event_size" in inspect.signature(http.streamable_http_client).parameters
    size = {"max_sse_event_size": _MAX_EVENT_BYTES} if takes_size else {}
    streams = await stack.enter_async_context(http.streamable_http_client(server.url, http_client=client, **size))
    return streams[0], streams[1]


def _code(error: BaseException | None) -> Any:
    """The code of a JSON-RPC error; None of others."""
    return getattr(getattr(error, "error", None), "code", None)


def _said(error: BaseException) -> str:
    error = first_error(error)
    return f"{type(error).__name__}: {str(error).rstrip('.')}" if str(error) else type(error).__name__


class _Slot:
    """The place of one server's connection, for all episodes of an event loop."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # guards what follows: one connects, the others wait
        self.connection: Connection | None = None
        self.num_failed = 0
        self.failure: InfraError | None = None
        """Of the last try."""


_SLOTS: PerLoop[dict[str, _Slot]] = PerLoop(dict)


async def _shared(server: McpServer) -> Connection:
    """The running loop's connection to a server; a new one where it broke down.

    Nobody needs to close it: an event loop cancels the tasks that are left before it ends, and so this one's.
    """
    slot = _SLOTS.here().setdefault(json.dumps(asdict(server), sort_keys=True, default=repr), _Slot())
    num_failed = slot.num_failed
    async with slot.lock:
        if slot.failure is not None and slot.num_failed != num_failed:
            raise InfraError(str(slot.failure))  # it was tried meanwhile: another try each would take them all too long
        if slot.connection is not None and not slot.connection.is_open:
            dead, slot.connection = slot.connection, None
            await dead.aclose()
        if slot.connection is None:
            try:
                slot.connection = await Connection.opened(server)
            except InfraError as error:
                slot.num_failed, slot.failure = slot.num_failed + 1, error
                raise
        return slot.connection


async def close_shared() -> None:
    """Close the connections that the running loop shares; they are made anew where they are needed again."""
    for slot in (_SLOTS.drop() or {}).values():
        async with slot.lock:
            if slot.connection is not None:
                await slot.connection.aclose()
