"""An HTTP server inside of somebody else's program; `server.py` is what ours have in common, `doors.py` who may ask."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import socket
from collections.abc import Awaitable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from agentenv.errors import AgentEnvError, InfraError, MissingDependency

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

T = TypeVar("T")
CLIENT_CLOSED = 499
"""Status of an answer that nobody waits for any more."""


def require_server(who: str) -> None:
    """Refuse to go on where the libraries of a server lack; `who` needs them.

    Raises:
        MissingDependency: with the command that installs them.
    """
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependency(
            f"{who}: expected {' and '.join(missing)}, got none. Install: pip install 'agentenv[endpoint]'"
        )


class Serving:
    """Uvicorn on a socket of ours and on the running event loop; signals stay with whoever handles them now."""

    def __init__(self, who: str, app: Any, **options: Any) -> None:
        """Nothing is listened on yet.

        Args:
            who: serves, for messages and the task's name.
            app: an ASGI application.
            options: of `uvicorn.Config`.
        """
        import uvicorn

        class Server(uvicorn.Server):
            """A server inside of somebody else's program."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                """Take no signal."""
                yield

        self._who = who
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", **options)
        self._server = Server(config)
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and give the port; 0 takes a free one.

        Raises:
            InfraError: the port is taken, or the like.
        """
        try:
            family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0][0]
            # asyncio switches Nagle's algorithm off only where the protocol is named; with it every answer waits 40 ms.
            self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
        except OSError as error:
            self._drop_socket()
            raise InfraError(
                f"{self._who}: expected to listen on {host}:{port}, got {error}. Use another --port"
            ) from error
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name=f"agentenv {self._who}")
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise InfraError(f"{self._who}: expected to listen, got an early end. Look at uvicorn's log")
            await asyncio.sleep(0.005)
        return int(self._socket.getsockname()[1])

    async def close(self, within_s: float) -> None:
        """Stop listening; what is still being answered after so long is cancelled. May be called again."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._server.should_exit = True
            try:
                done, _ = await asyncio.wait({serving}, timeout=within_s)
            finally:
                serving.cancel()
            if not done:
                await asyncio.wait({serving}, timeout=5)
        self._drop_socket()

    def _drop_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


async def unless_gone(request: Request, work: Awaitable[T], cancelled: AgentEnvError) -> T | None:
    """What `work` gives; it is cancelled, and None given, when the client goes away.

    Raises:
        AgentEnvError: `cancelled`, where somebody else cancelled it.
    """
    answer = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    both: tuple[asyncio.Future[Any], ...] = (answer, gone)
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if answer.cancelled():
            raise cancelled
        return answer.result() if answer.done() else None
    finally:
        for task in both:
            task.cancel()
        await asyncio.wait(both)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A body as JSON, escaped: what a model or a program says may hold half of a surrogate pair."""
    from starlette.responses import Response

    text = json.dumps(body, allow_nan=False)
    return Response(text, status, media_type="application/json", headers=dict(headers or {}))
