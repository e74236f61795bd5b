"""Uvicorn inside another program, and answers in JSON."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from agentenv._util.http.json_bodies import json_text
from agentenv._util.off_loop import off_loop
from agentenv.errors import AgentEnvError, InfraError, MissingDependency

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

T = TypeVar("T")
CLIENT_CLOSED = 499
"""Status of an answer whose client has left."""


def require_server(who: str) -> None:
    """Raise MissingDependency, with the command that installs them, if a server's libraries are missing."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependency(
            f"{who}: expected {' and '.join(missing)}, got none. Install: pip install 'agentenv-rl[endpoint]'"
        )


class UvicornServer:
    """Uvicorn on its own socket and the running event loop. It leaves the handling of signals unchanged.

    Args:
        who: name of the server, for messages and its task.
        app: an ASGI application.
        options: of `uvicorn.Config`.
    """

    def __init__(self, who: str, app: Any, **options: Any) -> None:
        import uvicorn

        class SignallessServer(uvicorn.Server):
            """Uvicorn without its signal handlers."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        self._who = who
        quiet: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off", "ws": "none"}
        config = uvicorn.Config(app, **{**quiet, **options})
        self._server = SignallessServer(config)
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port; 0 takes a free one.

        Raises:
            InfraError: the port is taken or cannot be used.
        """
        try:
            family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0][0]
            # asyncio disables Nagle's algorithm only if the protocol is named; with it, every answer takes 40 ms more.
            self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
        except OSError as error:
            self._close_socket()
            raise InfraError(
                f"{self._who}: expected to listen on {host}:{port}, got {error}. Use another --port"
            ) from error
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name=f"agentenv {self._who}")
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise InfraError(f"{self._who}: expected to listen, got an early end. Check uvicorn's log")
            await asyncio.sleep(0.005)
        return int(self._socket.getsockname()[1])

    async def close(self, within_s: float) -> None:
        """Stop listening, and cancel what is still being answered after `within_s`. May be called again."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._server.should_exit = True
            try:
                done, _ = await asyncio.wait({serving}, timeout=within_s)
            finally:
                serving.cancel()
            if not done:
                await asyncio.wait({serving}, timeout=5)
        self._close_socket()

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


async def until_disconnect(request: Request, work: Awaitable[T], cancelled: AgentEnvError) -> T | None:
    """Return the result of `work`; cancel it and return None if the client leaves.

    Raises:
        AgentEnvError: `cancelled`, if something else cancels the work or this call.
    """

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected())
    both: tuple[asyncio.Future[Any], ...] = (answer, gone)
    try:
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the server's grace is over; uvicorn answers what it cancels with a traceback
            raise cancelled from None
        if answer.cancelled():
            raise cancelled
        return answer.result() if answer.done() else None
    finally:
        for task in both:
            task.cancel()
        await asyncio.wait(both)


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with JSON in ASCII: texts of models and programs may hold unpaired surrogates."""
    from starlette.responses import Response

    text = body if isinstance(body, bytes) else json.dumps(body, allow_nan=False)
    return Response(text, status, media_type="application/json", headers=dict(headers or {}))


async def large_response(size: int, make: Callable[[], Any], headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with the JSON of what `make` returns, made in a thread if its size is large; see `off_loop`."""
    text = await off_loop(size, lambda: json_text(make(), allow_nan=False).encode())
    return json_response(text, headers=headers)
