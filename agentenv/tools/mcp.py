"""McpServer: the tools of an MCP server, over stdio or HTTP, as a source of a `Toolset`. Requires `agentenv-rl[mcp]`.

Example::

    Toolset(McpServer(command=("python", "server.py")), McpServer(url="http://127.0.0.1:8000/mcp", prefix="web_"))

Connections are shared by an event loop and close with it, or belong to one episode. If a server dies or stops
responding, the episodes that use it raise InfraError, and the next episode reconnects: a lost call never becomes a
result. With the older server-sent events, a result has at most 1 MiB.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import IO, Any, Literal

from agentenv._util.http.json_bodies import parse_body, parse_json
from agentenv._util.per_loop import PerLoop
from agentenv._util.task_bound import TaskBoundContext, first_error
from agentenv._util.virtual_time import external_work
from agentenv.errors import AgentEnvError, ConfigError, InfraError, MissingDependency
from agentenv.tools.calling import ToolError
from agentenv.tools.toolset import Tool, chosen

logger = logging.getLogger(__name__)
LOST = -32000
"""JSON-RPC: the package's own code for an answer that was lost with its connection."""
_CALLS = ("tools/call", "ping")
_MAX_PAGES = 1000
_TAIL_BYTES = 2000
_MAX_REFUSAL_BYTES = 65_536
_LAST_WORDS_S = 0.5
_MAX_LEVELS = 100
"""Maximum nesting, as in parsed calls. The package (2.3) writes about 250 levels and reads fewer than 200."""
_MODEL_ERRORS = (-32601, -32602, -32603)
"""JSON-RPC codes of one call's errors: method not found, invalid arguments, tool failed."""
_MAX_EVENT_BYTES = 64 * 2**20
"""Maximum size of one result over HTTP; the package's default of 1 MiB would end the connection."""
_PING_LIMIT_S = 5.0
"""Seconds to wait for a ping from a server whose tool returned no result."""
_GRACE_S = 5.0
"""Extra seconds beyond the waiting times."""


@dataclass(frozen=True, slots=True)
class McpServer:
    """How to reach a server, and which of its tools to offer."""

    command: Sequence[str] = ()
    """A program that speaks MCP on stdin and stdout, and its arguments; or `url`."""
    url: str = ""
    """URL of a server that speaks MCP over HTTP."""
    transport: Literal["http", "sse"] = "http"
    """Protocol of `url`: streamable HTTP, or the older server-sent events."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the program. It inherits only HOME, LOGNAME, PATH, SHELL, TERM and USER."""
    pass_env: Sequence[str] = ()
    """Names of further environment variables that the program inherits, such as secrets that must not be in configs."""
    cwd: str | None = None
    """Working directory of the program; None: the current one."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """HTTP headers of each request to `url`."""
    headers_env: Mapping[str, str] = field(default_factory=dict)
    """HTTP headers, with the names of environment variables that hold their values."""
    per_episode: bool = False
    """Give each episode its own connection (and process, for `command`); for servers that keep state."""
    tools: Sequence[str] | None = None
    """Names of the tools to offer; all if None."""
    prefix: str = ""
    """Prefix of the tools' names, for servers with the same names."""
    timeout_s: float = 30.0
    """Time limit of one call in seconds; a smaller `timeout_s` of the toolset takes precedence."""
    open_timeout_s: float = 30.0
    """Time limit in seconds for the server to start and list its tools."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: naming the invalid field.
        """
        if isinstance(self.command, str) or any(not isinstance(part, str) for part in self.command):
            raise ConfigError(
                f"McpServer.command: expected a list of texts, got {self.command!r}. Split it into a list."
            )
        if bool(self.command) == bool(self.url):
            raise ConfigError(
                f"McpServer: expected command or url, got {self.command!r} and {self.url!r}. Set exactly one."
            )
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"McpServer.url: expected http://… or https://…, got {self.url!r}.")
        if self.transport not in ("http", "sse"):
            raise ConfigError(f"McpServer.transport: expected http or sse, got {self.transport!r}.")
        for name, value in {"timeout_s": self.timeout_s, "open_timeout_s": self.open_timeout_s}.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigError(f"McpServer.{name}: expected seconds > 0, got {value!r}.")
        missing = [name for name in (*self.pass_env, *self.headers_env.values()) if name not in os.environ]
        if missing:
            raise ConfigError(f"McpServer: expected environment variables {missing}, got none. Set them.")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> McpServer:
        """Return the server that settings describe, as read from JSON.

        Raises:
            ConfigError: a field is unknown or invalid.
        """
        known = [each.name for each in fields(cls)]
        wrong = sorted(set(settings) - set(known)) if isinstance(settings, Mapping) else [settings]
        if wrong:
            raise ConfigError(f"mcp: expected an object with some of {', '.join(known)}, got {wrong}.")
        return cls(**settings)

    @property
    def name(self) -> str:
        """For people."""
        return self.url or " ".join(self.command)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[Tool]]:
        """Yield the server's tools for one episode; see `ToolSource`.

        Raises:
            InfraError: the server cannot be reached or does not speak MCP.
            ConfigError: the program or a requested tool does not exist.
            MissingDependency: the package mcp is not installed.
        """
        if self.per_episode:
            connection = await Connection.opened(self)
            try:
                yield connection.tools
            finally:
                await connection.aclose()
            return
        # One for all episodes of the running loop; a new one if it failed. It needs no explicit close: before an event
        # loop ends, it cancels its remaining tasks, including the connection's.
        slot = _SLOTS.here().setdefault(json.dumps(asdict(self), sort_keys=True, default=repr), _Slot())
        num_failed = slot.num_failed
        async with slot.lock:
            if slot.failure is not None and slot.num_failed != num_failed:
                # Another task just tried: one attempt per waiting task would take too long.
                raise InfraError(str(slot.failure))
            if slot.connection is not None and not slot.connection.is_open:
                dead, slot.connection = slot.connection, None
                await dead.aclose()
            if slot.connection is None:
                try:
                    slot.connection = await Connection.opened(self)
                except InfraError as error:
                    slot.num_failed, slot.failure = slot.num_failed + 1, error
                    raise
            connection = slot.connection
        yield connection.tools


class Connection:
    """An open session with a server, held by a separate task."""

    def __init__(self, server: McpServer, held: TaskBoundContext[tuple[Any, list[Any]]], log: Tail) -> None:
        self.server, self._held, self._log = server, held, log
        self.is_dead = False
        """True if the connection must not be used any more."""
        self.tools: list[Tool] = []

    @classmethod
    async def opened(cls, server: McpServer) -> Connection:
        """Connect and list the tools. Raises like `McpServer.open`."""
        log = Tail()
        held = TaskBoundContext(_session(server, log))
        connection = cls(server, held, log)
        try:
            with external_work():
                session, found = await held.open(limit_s=server.open_timeout_s)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise ConfigError(f"MCP server {server.name}: expected a program, got {error}. Fix the command.") from error
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
        """True if calls can be made."""
        return not self.is_dead and not self._held.task.done()

    async def aclose(self) -> None:
        """End the session and the program behind it; safe to call again."""
        self.is_dead = True
        error = await self._held.aclose()
        if error is not None:  # a failed connection; its callers have already received the error
            logger.debug("MCP server %s: closing: %s", self.server.name, _error_text(error))

    def _tool(self, session: Any, found: Any, most_s: float = math.inf) -> Tool:
        limit_s = min(self.server.timeout_s, most_s)
        name = self.server.prefix + found.name
        function = {"name": name, "description": found.description or "", "parameters": found.input_schema}
        return Tool(
            name, {"type": "function", "function": function}, partial(self._call, session, found.name, limit_s),
            f"MCP server {self.server.name}", limit_s + _PING_LIMIT_S + _GRACE_S, checks_types=False,
            within=lambda most_s: self._tool(session, found, min(limit_s, most_s)),
        )  # fmt: skip

    async def _call(self, session: Any, tool_name: str, limit_s: float, /, **arguments: Any) -> str:
        """Return the tool's result as text.

        Raises:
            ToolError: the tool reported a failure or timed out, or the arguments cannot be sent.
            InfraError: the connection is lost, or the answer was lost.
        """
        refuse_unsendable(tool_name, arguments)
        if not self.is_open:
            raise await self._failure("a connection")
        work = await self._ended(session.call_tool(tool_name, arguments), limit_s)
        error = None if work is None else work.exception()
        if _code(error) in _MODEL_ERRORS:
            raise ToolError(str(error)) from error
        if work is None or error is not None:
            # If the server still answers, only this call failed, and the connection stays usable.
            ping = await self._ended(session.send_ping(), _PING_LIMIT_S)
            lost = None if ping is None else ping.exception()
            if ping is None or (lost is not None and _code(lost) not in _MODEL_ERRORS):
                raise await self._failure("an answer" if error else "a sign of life", error) from error
        if work is None:
            raise ToolError(f"{tool_name} returned no result within {limit_s:g} s.")
        if error is not None:
            raise InfraError(f"MCP server {self.server.name}: expected an answer, got {_error_text(error)}.") from error
        result = work.result()
        text = result_text(result)
        if result.is_error:
            raise ToolError(text.removeprefix("Error: "))
        return text

    async def _ended(self, request: Any, limit_s: float) -> asyncio.Future[Any] | None:
        """Return the completed request, or None if it did not complete in time.

        Raises:
            InfraError: the connection is lost.
        """
        work = asyncio.ensure_future(request)
        try:
            with external_work():
                await asyncio.wait({work, self._held.task}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            late = not work.done()
            if late:
                work.cancel()
                await asyncio.wait({work}, timeout=1.0)
        if self._held.task.done() or (work.cancelled() and not late):
            raise await self._failure("an answer")
        return None if late else work

    async def _failure(self, expected: str, error: BaseException | None = None) -> InfraError:
        """Return the error to raise for a connection that will not be used again."""
        self.is_dead = True
        if error is None and self._held.task.done() and not self._held.task.cancelled():
            error = self._held.task.exception()
        if self.server.command:
            await self._log.end()
        got = "none" if error is None else _error_text(error)
        tail = self._log.text()
        return InfraError(
            f"MCP server {self.server.name}: expected {expected}, got {got}. The next episode reconnects."
            + (f" Last output: {tail}" if tail else "")
        )


@asynccontextmanager
async def _session(server: McpServer, log: Tail) -> AsyncIterator[tuple[Any, list[Any]]]:
    """Yield a session with a server, and the tools that it lists."""
    try:
        import mcp
        from mcp.client.sse import sse_client
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client
    except ImportError as error:
        raise MissingDependency(
            "tools of MCP servers: expected the package mcp >= 2, got none. Run: pip install 'agentenv-rl[mcp]'"
        ) from error
    errors: Any
    streams: Any
    async with AsyncExitStack() as stack:
        if server.command:
            errors = await stack.enter_async_context(log.opened())
            env = {**server.env, **{name: os.environ[name] for name in server.pass_env}}
            command, *args = server.command
            asked = mcp.StdioServerParameters(command=command, args=args, env=env, cwd=server.cwd)
            streams = await stack.enter_async_context(stdio_client(asked, errlog=errors))
            errors.close()
        else:
            variables = server.headers_env.items()
            headers = {**server.headers, **{name: os.environ[variable] for name, variable in variables}}
            if server.transport == "sse":
                limits: Any = {"timeout": server.open_timeout_s, "sse_read_timeout": None}
                opened: Any = sse_client(server.url, headers=headers, **limits)
            else:
                client = await stack.enter_async_context(http_client(headers, connect_s=server.open_timeout_s))
                opened = streamable_http_client(server.url, http_client=client, max_sse_event_size=_MAX_EVENT_BYTES)
            streams = await stack.enter_async_context(opened)
        session = await stack.enter_async_context(mcp.ClientSession(streams[0], streams[1]))
        await session.initialize()
        yield session, await listed(session)


def _code(error: BaseException | None) -> Any:
    """Return the code of a JSON-RPC error; None for other errors."""
    return getattr(getattr(error, "error", None), "code", None)


def _error_text(error: BaseException) -> str:
    error = first_error(error)
    return f"{type(error).__name__}: {str(error).rstrip('.')}" if str(error) else type(error).__name__


class _Slot:
    """The connection to one server, shared by all episodes of an event loop."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # guards the fields below: one task connects, the others wait
        self.connection: Connection | None = None
        self.num_failed = 0
        self.failure: InfraError | None = None
        """The error of the last attempt."""


_SLOTS: PerLoop[dict[str, _Slot]] = PerLoop(dict)


async def close_shared() -> None:
    """Close the connections that the running loop shares; they reopen when needed."""
    for slot in (_SLOTS.drop() or {}).values():
        async with slot.lock:
            if slot.connection is not None:
                await slot.connection.aclose()


def refuse_unsendable(tool_name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the package cannot write: over stdio they would end the connection for all calls.

    Raises:
        ToolError: the arguments are not JSON, cannot be encoded as UTF-8, or are nested too deep.
    """
    problem = f"more than {_MAX_LEVELS} levels of nesting"
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        problem = "half of a character (a lone surrogate)"
    except RecursionError:
        pass
    except (TypeError, ValueError) as error:
        problem = str(error)
    else:
        level: list[Any] = [arguments]
        for _ in range(_MAX_LEVELS + 1):
            inner: list[Any] = []
            for each in level:
                if isinstance(each, Mapping | list | tuple):
                    inner += each.values() if isinstance(each, Mapping) else each
            if not inner:
                return
            level = inner
    raise ToolError(
        f"wrong arguments for {tool_name}: expected JSON that can be sent as UTF-8, got {problem}. Write them again."
    )


def http_client(headers: Mapping[str, str], *, connect_s: float) -> Any:
    """Return a client for the calls of all episodes, of the package's own library.

    No call waits for another's connection; a call ends only at its caller's deadline. If the network or a gateway
    refuses a call, its answer is the JSON-RPC error LOST: the package would report the status as the tool's failure,
    and drop all other calls when a connection breaks.
    """
    import httpx2  # with which mcp comes

    client: Any = httpx2.AsyncClient(
        headers=dict(headers),
        timeout=httpx2.Timeout(connect_s, read=None, pool=None),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20),
    )
    client.send = partial(_sent, httpx2, client.send)
    return client


async def _sent(library: Any, send: Any, request: Any, **options: Any) -> Any:
    """Return the response to a request; for a call that failed, a response that reports the failure."""
    try:
        response = await send(request, **options)
        if response.status_code < 400 or (name := await _call_id(request)) is None:
            return response
        body = bytearray()
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > _MAX_REFUSAL_BYTES:
                break
        await response.aclose()
        if isinstance((await parse_body(bytes(body), _object)).get("error"), dict):
            # A JSON-RPC error, which servers may send with an HTTP status.
            kind = {"content-type": response.headers.get("content-type", "")}
            return library.Response(response.status_code, headers=kind, content=bytes(body), request=request)
        problem = f"HTTP status {response.status_code}"
    except library.TransportError as error:
        if (name := await _call_id(request)) is None:
            raise
        problem = f"{type(error).__name__}: {error}"
    refusal = {"jsonrpc": "2.0", "id": name, "error": {"code": LOST, "message": problem}}
    return library.Response(200, json=refusal, request=request)


async def _call_id(request: Any) -> Any:
    """Return the JSON-RPC id of a request that is a call; None for other requests, such as opening a session."""
    message = await parse_body(request.content, _object)
    return message.get("id") if message.get("method") in _CALLS else None


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = parse_json(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class Tail(asyncio.Protocol):
    """The tail of a program's stderr, shown only if the program fails."""

    def __init__(self) -> None:
        self._tail = b""
        self._ended = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that the program closed its stderr."""
        self._ended.set()

    async def end(self) -> None:
        """Wait briefly for the last output of a program that has ended."""
        await asyncio.wait({waits := asyncio.ensure_future(self._ended.wait())}, timeout=_LAST_WORDS_S)
        waits.cancel()

    def data_received(self, data: bytes) -> None:
        """Keep the tail of the output."""
        self._tail = (self._tail + data)[-_TAIL_BYTES:]

    def text(self) -> str:
        """Return the kept text."""
        return self._tail.decode("utf-8", "replace").strip()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[IO[str]]:
        """Yield the file for the program's stderr; close it once the program has started."""
        ours, theirs = os.pipe()
        with os.fdopen(theirs, "w") as writing:
            reading = os.fdopen(ours, "rb", 0)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, reading)
            try:
                yield writing
            finally:
                writing.close()  # if the program never started, nothing else closes the pipe
                await self.end()
                transport.close()


async def listed(session: Any) -> list[Any]:
    """Return all tools of a server, page by page.

    Raises:
        InfraError: the server returns too many pages.
    """
    from mcp.types import PaginatedRequestParams

    found, cursor = [], None
    for _ in range(_MAX_PAGES):
        result = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        found += result.tools
        cursor = result.next_cursor
        if not cursor:
            return found
    raise InfraError(f"MCP server: expected at most {_MAX_PAGES} pages of tools, got more. Fix the server.")


def result_text(result: Any) -> str:
    """Return a result as text; content of other kinds is named."""
    parts = []
    for part in result.content:
        within = getattr(part, "resource", part)
        if isinstance(getattr(within, "text", None), str):
            parts.append(within.text if within is part else f"[Resource {within.uri}]\n{within.text}")
        elif part.type == "resource_link":
            parts.append(f"[A resource, not shown: {part.uri}]")
        else:
            parts.append(f"[Content that is not text, not shown: {part.type}, {within.mime_type or 'unknown type'}]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts) or "[No output.]"
