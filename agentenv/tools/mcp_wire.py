"""Parts of a connection to an MCP server: an HTTP client, the tail of a program's stderr, tool lists, result texts."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import IO, Any

from agentenv._util.http.json_bodies import parse_body, parse_json
from agentenv.errors import InfraError
from agentenv.tools.calling import ToolError

LOST = -32000
"""JSON-RPC: the package's own code for an answer that was lost with its connection."""
_CALLS = ("tools/call", "ping")
_MAX_PAGES = 1000
_TAIL_BYTES = 2000
_MAX_REFUSAL_BYTES = 65_536
_LAST_WORDS_S = 0.5
_MAX_LEVELS = 100
"""Maximum nesting, as in parsed calls. The package (2.3) writes about 250 levels and reads fewer than 200."""


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
