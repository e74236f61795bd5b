"""The common part of this library's HTTP servers: start and stop, access, answers to errors.

A subclass adds routes and answers this library's errors; see `rewards.serving.server` and `sandbox.fusion.server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import h11

from agentenv._util.http.access import MAX_HEADER_BYTES, AccessPolicy, App
from agentenv._util.http.responses import CLIENT_CLOSED, UvicornServer, json_response, require_server
from agentenv.errors import AgentEnvError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

_LOG = logging.getLogger(__name__)
_CONNECTIONS = logging.getLogger(f"{__name__}.connections")
_CONNECTIONS.setLevel(logging.ERROR)  # what a client sends wrongly does not concern the user of a run
_CLOSE_S = 5.0
"""Longest wait for connections when closing, after the grace period."""
_KEEP_ALIVE_S = 75
"""Seconds that a connection may be idle: longer than clients keep one, so that no request meets its end."""
_ANSWER_S = 30.0
"""Deadline for a client to read what was written to it, beyond what the kernel holds."""
_READ_BYTES = 8192
"""Bytes of a connection between two turns of the loop: they may be 1,400 chunks, which take h11 0.03 s."""
_REQUEST_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Server(ABC):
    """A server inside another program; `async with` starts and stops it.

    Args:
        who: name of the server, for messages.
        access: who may send requests; None allows everyone on this machine, under any name.
        port: 0 takes a free one.
        grace_s: time for requests in progress when the server is closed.
        header_s: deadline for the head of a request to arrive.
    """

    def __init__(
        self, who: str, access: AccessPolicy | None, *, port: int = 0, grace_s: float = 10.0, header_s: float = 10.0
    ) -> None:
        self.port = port
        """Port of the running server."""
        self._who = who
        self._access = access
        self._requested_port = port
        self._host = "127.0.0.1" if access is None else access.host
        self._grace_s = grace_s
        self._header_s = header_s
        self._closing = False
        self._uvicorn: UvicornServer | None = None

    @property
    def url(self) -> str:
        """Address on this machine, without a path."""
        host = "127.0.0.1" if self._host in ("", "0.0.0.0", "::") else self._host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start to listen.

        Raises:
            MissingDependency: starlette or uvicorn is not installed.
            InfraError: the port is taken or cannot be used.
        """
        require_server(self._who)
        self._closing = False
        self._uvicorn = UvicornServer(
            self._who,
            self._application(),
            http=_bounded_h11(self._header_s),
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(self._grace_s),
        )
        self.port = await self._uvicorn.start(self._host, self._requested_port)

    async def close(self) -> None:
        """Stop listening; requests in progress are cancelled after the grace period. May be called again."""
        self._closing = True
        uvicorn, self._uvicorn = self._uvicorn, None
        if uvicorn is not None:
            await uvicorn.close(self._grace_s + _CLOSE_S)

    def _application(self) -> App:
        """Return the routes behind the access policy."""
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.requests import ClientDisconnect

        handlers: dict[Any, Any] = {
            AgentEnvError: self._failed,
            ClientDisconnect: self._client_left,
            HTTPException: self._http_error,
            Exception: self._unexpected,
        }
        app = Starlette(routes=list(self._routes()), exception_handlers=handlers)
        return app if self._access is None else self._access.protect(app, lambda: self.port)

    @abstractmethod
    def _routes(self) -> Sequence[Route]: ...

    @abstractmethod
    async def _failed(self, request: Request, error: Any) -> Response:
        """Return the answer to an AgentEnvError."""

    def _error_body(self, text: str, kind: str) -> Any:
        """Return the body of an answer to an error; its kind is `cancelled`, `internal` or `http`."""
        return {"detail": text}

    async def _client_left(self, request: Request, error: Any = None) -> Response:
        return json_response(self._error_body("the client closed the request", "cancelled"), CLIENT_CLOSED)

    async def _http_error(self, request: Request, error: Any) -> Response:
        """Answer a request for an unknown path or method."""
        return json_response(self._error_body(str(error.detail), "http"), error.status_code, error.headers)

    async def _unexpected(self, request: Request, error: Exception) -> Response:
        """Answer a bug of ours; its text and traceback are only logged."""
        name = secrets.token_hex(4)
        _LOG.error("%s: error %s in %s", self._who, name, request.url.path, exc_info=error)
        return json_response(self._error_body(f"internal error {name}: {type(error).__name__}", "internal"), 500)


class _BoundedConnection(h11.Connection):
    """The parser of one connection, which gets no more bytes than it needs to find a head or trailer too long.

    By itself h11 bounds neither of them where all of it arrives at once.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self._unread = bytearray()

    def receive_data(self, data: bytes) -> None:
        """Keep data until events need it."""
        self._unread += data

    def next_event(self) -> Any:
        """Return the next event of the data."""
        while (event := super().next_event()) is h11.NEED_DATA and self._unread:
            room = MAX_HEADER_BYTES + 1 - len(self.trailing_data[0])
            super().receive_data(bytes(self._unread[:room]))
            del self._unread[:room]
        return event


class _Timer:
    """A timer that calls a function after a time unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wait_s: float, callback: Callable[[], object]) -> None:
        self._loop, self._wait_s, self._callback = loop, wait_s, callback
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer unless it runs or has ended."""
        if self._handle is None:
            self._handle = self._loop.call_later(self._wait_s, self._callback)

    def stop(self) -> None:
        """Stop the timer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def _bounded_h11(header_s: float) -> type[Any]:
    """Return uvicorn's h11 protocol with deadlines for the head of a request and for the reading of an answer.

    By itself it waits forever. Bytes that follow an answer but belong to the request before it count as the head of
    the next one.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class BoundedProtocol(H11Protocol):
        """One connection."""

        def connection_made(self, transport: Any) -> None:
            """Start the timer for the first request."""
            self.conn, self.logger = _BoundedConnection(), _CONNECTIONS
            self.head_timer = _Timer(self.loop, header_s, self._time_out)
            self.answer_timer = _Timer(self.loop, _ANSWER_S, transport.abort)
            with contextlib.suppress(AttributeError):  # uvloop's transports have none
                transport.max_size = _READ_BYTES  # by default asyncio reads 256 KiB
            super().connection_made(transport)
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            """Stop the timer once a request is answered, else keep it."""
            super().data_received(data)
            self._wait_for_head()

        def pause_writing(self) -> None:
            """Start the timer for an answer that the client does not read."""
            super().pause_writing()
            self.answer_timer.start()

        def resume_writing(self) -> None:
            """Stop that timer."""
            super().resume_writing()
            self.answer_timer.stop()

        def connection_lost(self, exc: Exception | None) -> None:
            """Stop the timers."""
            super().connection_lost(exc)
            self.head_timer.stop()
            self.answer_timer.stop()

        def _wait_for_head(self) -> None:
            is_answering = self.cycle is not None and not self.cycle.response_complete
            if is_answering:
                self.head_timer.stop()
            elif not self.transport.is_closing():
                self.head_timer.start()

        def _time_out(self) -> None:
            if not self.transport.is_closing():
                self.transport.write(_REQUEST_TIMEOUT)
                self.transport.close()

    return BoundedProtocol
