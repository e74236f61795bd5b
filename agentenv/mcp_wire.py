"""What a connection to an MCP server is made of: an HTTP client, the end of a program's stderr, lists, texts."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import IO, Any

from agentenv.errors import InfraError
from agentenv.tools import ToolError

LOST = -32000
"""JSON-RPC: the package's own code for an answer that was lost with its connection."""
_CALLS = ("tools/call", "ping")
_MAX_PAGES = 1000
_TAIL_BYTES = 2000
_LAST_WORDS_S = 0.5
_MAX_LEVELS = 100
"""Of nesting, as calls are parsed; the package (2.3) writes some 250 at most, and reads fewer than 200."""


def refuse_unsendable(tool_name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the package could not write: over stdio that would end everybody's connection.

    Raises:
        ToolError: they are no JSON, cannot be UTF-8, or are nested too deep.
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
            level = [inner for each in level for inner in _inside(each)]
            if not level:
                return
    raise ToolError(
        f"wrong arguments for {tool_name}: expected JSON that can be sent as UTF-8, got {problem}. Write them anew."
    )


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def http_client(library: Any, headers: Mapping[str, str], *, connect_s: float) -> Any:
    """A client for the calls of all episodes, of httpx or of the `library` that has its names.

    None of them waits for the connection of another, or ends but by its caller's own deadline. Where the network or a
    gateway refuses one, its answer is the JSON-RPC error LOST: the package would take a status for the tool's failure,
    and drop every other call for a broken connection.
    """
    client = library.AsyncClient(
        headers=dict(headers),
        timeout=library.Timeout(connect_s, read=None, pool=None),
        limits=library.Limits(max_connections=None, max_keepalive_connections=20),
    )
    client.send = partial(_sent, library, client.send)
    return client


async def _sent(library: Any, send: Any, request: Any, **options: Any) -> Any:
    """The response to a request; to a call that came to nothing, one that says so."""
    try:
        response = await send(request, **options)
        if response.status_code < 400 or _call_id(request) is None or _is_answer(await response.aread()):
            return response
        await response.aclose()
        problem = f"HTTP status {response.status_code}"
    except library.TransportError as error:
        if _call_id(request) is None:
            raise
        problem = f"{type(error).__name__}: {error}"
    refusal = {"jsonrpc": "2.0", "id": _call_id(request), "error": {"code": LOST, "message": problem}}
    return library.Response(200, json=refusal, request=request)


def _call_id(request: Any) -> Any:
    """The JSON-RPC id of a request that is a call; None for others, such as those by which a session is opened."""
    message = _object(request.content)
    return message.get("id") if message.get("method") in _CALLS else None


def _is_answer(body: bytes) -> bool:
    """Whether it is a JSON-RPC error, which servers may send with a status."""
    return isinstance(_object(body).get("error"), dict)


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class Tail(asyncio.Protocol):
    """The end of what a program says on stderr, which is shown only where it fails."""

    def __init__(self) -> None:
        self._kept = b""
        self._ended = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody writes any more."""
        self._ended.set()

    async def end(self) -> None:
        """Wait a moment for what a program that has ended said last."""
        await asyncio.wait({waits := asyncio.ensure_future(self._ended.wait())}, timeout=_LAST_WORDS_S)
        waits.cancel()

    def data_received(self, data: bytes) -> None:
        """Keep the last of it."""
        self._kept = (self._kept + data)[-_TAIL_BYTES:]

    def text(self) -> str:
        """What is kept."""
        return self._kept.decode("utf-8", "replace").strip()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[IO[str]]:
        """Where the program is to write; close that once the program has it."""
        ours, theirs = os.pipe()
        with os.fdopen(theirs, "w") as writing:
            reading = os.fdopen(ours, "rb", 0)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, reading)
            try:
                yield writing
            finally:
                writing.close()  # where the program never had it, nobody else would end the pipe
                await self.end()
                transport.close()


async def listed(session: Any) -> list[Any]:
    """All tools of a server, page by page.

    Raises:
        InfraError: the pages have no end.
    """
    params_of = importlib.import_module("mcp.types").PaginatedRequestParams
    found, cursor = [], None
    for _ in range(_MAX_PAGES):
        result = await session.list_tools(params=params_of(cursor=cursor))
        found += result.tools
        cursor = getattr(result, "next_cursor", None) or getattr(result, "nextCursor", None)
        if not cursor:
            return found
    raise InfraError(f"MCP server: expected at most {_MAX_PAGES} pages of tools, got more. Mend the server.")


def result_text(result: Any) -> str:
    """A result as text: what is no text is named."""
    parts = [_part(each) for each in result.content or ()]
    structured = getattr(result, "structured_content", getattr(result, "structuredContent", None))
    if not parts and structured is not None:
        return json.dumps(structured, ensure_ascii=False)
    return "\n".join(parts) or "[No output.]"


def _part(part: Any) -> str:
    within = getattr(part, "resource", part)
    if isinstance(getattr(within, "text", None), str):
        return within.text if within is part else f"[Resource {within.uri}]\n{within.text}"
    kind = getattr(part, "type", "unknown")
    if kind == "resource_link":
        return f"[A resource, not shown: {part.uri}]"
    mime = getattr(within, "mime_type", None) or getattr(within, "mimeType", None) or "of no known type"
    return f"[Content that is no text, not shown: {kind}, {mime}]"
