"""What the servers of this library have in common: where they listen, how they start and stop, what they say of errors.

A subclass has routes and says what becomes of an error of ours; see `rm.serve`, `sandbox.fusion_server`.
"""

from __future__ import annotations

import logging
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from agentenv.errors import AgentEnvError
from agentenv.http_serving import CLIENT_CLOSED, Serving, json_response, require_server
from agentenv.http_serving.connections import impatient
from agentenv.http_serving.doors import MAX_HEADER_BYTES, App, Doors, guarded

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

_LOG = logging.getLogger(__name__)
_CLOSE_S = 5.0
"""Longest that closing waits for connections, after the grace."""


class Server(ABC):
    """A server inside of somebody else's program; `async with` starts and stops it.

    Args:
        who: serves, for messages.
        doors: who may ask; None lets all of this machine in, under any name.
        port: 0 takes a free one.
        grace_s: for what is being answered, when it is closed.
        header_s: for the head of a request to arrive.
    """

    def __init__(
        self, who: str, doors: Doors | None, *, port: int = 0, grace_s: float = 10.0, header_s: float = 10.0
    ) -> None:
        self.port = port
        """Of the running server."""
        self._who, self._doors, self._wanted_port = who, doors, port
        self._host = "127.0.0.1" if doors is None else doors.host
        self._grace_s, self._header_s = grace_s, header_s
        self._closing = False
        self._serving: Serving | None = None

    @property
    def url(self) -> str:
        """Its address on this machine, without a path."""
        host = "127.0.0.1" if self._host in ("", "0.0.0.0", "::") else self._host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen.

        Raises:
            MissingDependency: starlette or uvicorn is not installed.
            InfraError: the port is taken, or the like.
        """
        require_server(self._who)
        self._closing = False
        self._serving = Serving(
            self._who, self._application(), http=impatient(self._header_s), server_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES, timeout_graceful_shutdown=math.ceil(self._grace_s),
        )  # fmt: skip
        self.port = await self._serving.start(self._host, self._wanted_port)

    async def close(self) -> None:
        """Stop listening; what is being answered has its grace and is then cancelled. May be called again."""
        self._closing = True
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.close(self._grace_s + _CLOSE_S)

    def _application(self) -> App:
        """The routes, behind the doors."""
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.requests import ClientDisconnect

        handlers: dict[Any, Any] = {
            AgentEnvError: self._failed, ClientDisconnect: self._gone, HTTPException: self._http_error,
            Exception: self._unexpected,
        }  # fmt: skip
        app = Starlette(routes=list(self._routes()), exception_handlers=handlers)
        return app if self._doors is None else guarded(app, self._doors, lambda: self.port)

    @abstractmethod
    def _routes(self) -> Sequence[Route]: ...

    @abstractmethod
    async def _failed(self, request: Request, error: Any) -> Response:
        """The answer to an error of ours."""

    def _told(self, text: str, kind: str) -> Any:
        """The body of an answer without what was asked for, which is `cancelled`, `internal` or `http`."""
        return {"detail": text}

    async def _gone(self, request: Request, error: Any = None) -> Response:
        """To a client that has left; nobody reads it."""
        return json_response(self._told("the client closed the request", "cancelled"), CLIENT_CLOSED)

    async def _http_error(self, request: Request, error: Any) -> Response:
        """No such path, or no such method."""
        return json_response(self._told(str(error.detail), "http"), error.status_code, error.headers)

    async def _unexpected(self, request: Request, error: Exception) -> Response:
        """A mistake of ours: its text and its traceback stay here."""
        name = secrets.token_hex(4)
        _LOG.error("%s: error %s in %s", self._who, name, request.url.path, exc_info=error)
        return json_response(self._told(f"internal error {name}: {type(error).__name__}", "internal"), 500)
