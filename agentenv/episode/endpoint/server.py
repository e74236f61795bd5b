"""Endpoint: sessions served over HTTP on 127.0.0.1, in OpenAI's form, on the engine's event loop.

Routes: `/s/SESSION/v1/chat/completions`, `…/v1/responses`, `…/v1/models[/MODEL]`, `/health`; without `/s/SESSION`, the
session is the `x-session-id` header or the API key. A stream starts with the answer, or after a second with comments
that keep the connection alive; an error within that second has its HTTP status. The chunks are parts of the finished
response.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from agentenv._util.http.access import RequestRefused, read_body
from agentenv._util.http.json_bodies import parse_body, parse_json
from agentenv._util.http.responses import json_response, large_response, until_disconnect
from agentenv._util.http.server import Server
from agentenv._util.off_loop import off_loop, size_of
from agentenv.episode.endpoint import wire
from agentenv.episode.endpoint.responses import ResponseForm, ResponseLog
from agentenv.episode.endpoint.session import Session
from agentenv.episode.endpoint.wire import (
    BodyTooLarge,
    ChatForm,
    ChatRequest,
    OutOfTurns,
    OutOfTurnsForStream,
    RequestError,
    UnknownSession,
)
from agentenv.errors import AgentEnvError, ContractError, InfraError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

_MAX_BODY_BYTES = 16 << 20
_MAX_ENDED = 10_000
"""Ids of ended sessions that the server keeps, to tell late calls the reason."""
_SESSION_PATH = re.compile("/s/([^/]*)/")
_CLIENT_LEFT = "the client closed the request before its answer."
_STATUS_S = 1.0
"""Seconds for which a stream waits for its answer before it starts."""
_PING_S = 2.0
"""Seconds between the comments in a stream without an answer; clients that wait for bytes give up after more."""
_CLOSE_S = 1.0
"""Seconds that requests in progress have when the server closes."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a session, for an agent."""

    base_url: str
    """URL for OpenAI's SDKs; ends in /v1."""
    api_key: str
    """The session's id, which identifies it on the server's own URL."""


class Endpoint(Server):
    """A server of sessions; `async with` starts and stops it.

    Example::

        async with Endpoint() as endpoint:
            with endpoint.open(session) as address:
                client = AsyncOpenAI(base_url=address.base_url, api_key=address.api_key)
    """

    def __init__(self, *, max_body_bytes: int = _MAX_BODY_BYTES) -> None:
        super().__init__("endpoint", None, grace_s=_CLOSE_S)
        self.max_body_bytes = max_body_bytes
        self._sessions: dict[str, Session] = {}
        self._logs = WeakKeyDictionary[Session, ResponseLog]()
        self._ended = deque[str](maxlen=_MAX_ENDED)

    @contextlib.contextmanager
    def open(self, session: Session) -> Iterator[Address]:
        """Serve a session under an unguessable id until the end of the block, which closes it."""
        name = secrets.token_urlsafe(16)
        self._sessions[name] = session
        try:
            yield Address(f"{self.url}/s/{name}/v1", name)
        finally:
            del self._sessions[name]
            self._ended.append(name)
            session.close()

    def _routes(self) -> list[Route]:
        from starlette.routing import Route

        routes = [Route("/health", self._health)]
        for prefix in ("", "/s/{session}"):
            routes += [
                Route(f"{prefix}/v1/models", self._models),
                Route(f"{prefix}/v1/models/{{model:path}}", self._model),
                Route(f"{prefix}/v1/chat/completions", self._completions, methods=["POST"]),
                Route(f"{prefix}/v1/responses", self._responses, methods=["POST"]),
            ]
        return routes

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok", "sessions": len(self._sessions)})

    async def _models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [_model(self._session(request).options.model)]})

    async def _model(self, request: Request) -> Response:
        self._session(request)
        return json_response(_model(request.path_params["model"]))  # requests may use any name

    async def _body(self, request: Request) -> bytes:
        body = await read_body(request, self.max_body_bytes)
        if len(body) > self.max_body_bytes:
            raise BodyTooLarge(f"body: expected at most {self.max_body_bytes} bytes, got more. Shorten it.")
        return body

    async def _completions(self, request: Request) -> Response:
        session = self._session(request)
        read = await parse_body(await self._body(request), lambda body: session.read(_json(body)))
        return await self._answer(request, session, read, ChatForm(read, _base(session, read)))

    async def _responses(self, request: Request) -> Response:
        session = self._session(request)
        log = self._logs.setdefault(session, ResponseLog())
        body, read = await parse_body(await self._body(request), partial(_read_response, session, log))
        try:
            return await self._answer(request, session, read, ResponseForm(log, body, read, _base(session, read)))
        except OutOfTurns as error:
            raise (OutOfTurnsForStream(str(error)) if read.stream else error) from None

    async def _answer(
        self, request: Request, session: Session, read: ChatRequest, form: ChatForm | ResponseForm
    ) -> Response:
        work = asyncio.ensure_future(session.complete(read))
        if not read.stream:
            response = await until_disconnect(request, work, _ended())
            if response is None:
                return await self._client_left(request)
            return await large_response(form.size + size_of(response), lambda: form.whole(response))
        arrived = None
        try:
            arrived = await until_disconnect(request, asyncio.wait({work}, timeout=_STATUS_S), _ended())
        finally:
            if arrived is None:
                work.cancel()
        if arrived is None:
            return await self._client_left(request)
        if work.done():
            _result(work)  # an error has its status
        from starlette.responses import StreamingResponse

        events, headers = self._events(request, work, form), {"cache-control": "no-cache"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def _events(
        self, request: Request, work: asyncio.Future[dict[str, Any]], form: ChatForm | ResponseForm
    ) -> AsyncIterator[str]:
        """Yield the events of a stream; the client's leaving cancels the work."""
        try:
            for event in await off_loop(form.size, lambda: list(form.opening())):
                yield event
            while not work.done():
                await asyncio.wait({work}, timeout=_PING_S)
                if not work.done():
                    yield ": no answer yet\n\n"
            response = _result(work)
            for event in await off_loop(form.size + size_of(response), lambda: list(form.closing(response))):
                yield event
        except AgentEnvError as error:
            status, code = _refusal(error)
            self._count(request, code, str(error))
            yield form.failure(wire.error_body(str(error), kind=wire.error_type(status), code=code))
        finally:
            if not work.done():
                work.cancel()
                self._count(request, "cancelled", _CLIENT_LEFT)

    def _session(self, request: Request) -> Session:
        name = _session_name(request)
        session = self._sessions.get(name)
        if session is None and name in self._ended:
            raise UnknownSession(
                "session: expected an open one, got one that has ended: its episode is over. End here."
            )
        if session is None:
            raise UnknownSession(
                f"session: expected the id of an open session, got {name!r:.80}. Use the given base URL."
            )
        return session

    # --- errors -------------------------------------------------------------------------------------------------------

    async def _failed(self, request: Request, error: Any) -> Response:
        headers = {"connection": "close"} if isinstance(error, RequestRefused) else {}
        status, code = _refusal(error)
        self._count(request, code, str(error))
        return json_response(wire.error_body(str(error), kind=wire.error_type(status), code=code), status, headers)

    def _count(self, request: Request, code: str, reason: str) -> None:
        session = self._sessions.get(_session_name(request))
        if session is not None:
            session.count_refusal(code, reason)

    async def _client_left(self, request: Request, error: Any = None) -> Response:
        self._count(request, "cancelled", _CLIENT_LEFT)
        return await super()._client_left(request, error)

    async def _unexpected(self, request: Request, error: Exception) -> Response:
        self._count(request, "internal", f"{type(error).__name__}: {error}")
        return await super()._unexpected(request, error)

    def _error_body(self, text: str, kind: str) -> Any:
        return wire.error_body(text, kind="server_error" if kind == "internal" else kind, code=kind)

    async def _http_error(self, request: Request, error: Any) -> Response:
        message = str(error.detail)
        if error.status_code == 404:
            message = (
                f"{request.method} {request.url.path}: expected one of /v1/chat/completions, /v1/responses and "
                "/v1/models, got none of them. Use the SDK's chat completions."
            )
        self._count(request, "http_error", message)
        status = error.status_code
        return json_response(wire.error_body(message, kind=wire.error_type(status), code="http_error"), status)


def _session_name(request: Request) -> str:
    """Return the id of the session that a request names, "" if it names none."""
    in_path = _SESSION_PATH.match(request.url.path)
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    named = in_path[1] if in_path else request.headers.get("x-session-id")
    return named or (key.strip() if scheme.lower() == "bearer" else "")


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentenv"}


def _base(session: Session, read: ChatRequest) -> dict[str, Any]:
    """Return what identifies an answer before it is known."""
    name = f"{session.key.episode_id}-{secrets.token_hex(4)}"
    return {"id": name, "created": int(time.time()), "model": read.model or session.options.model}


def _ended() -> UnknownSession:
    return UnknownSession("session: expected an open one, got one that has ended meanwhile. Open another.")


def _result(work: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
    """Return the result of work that is done; it is cancelled with its session."""
    if work.cancelled():
        raise _ended()
    return work.result()


def _refusal(error: AgentEnvError) -> tuple[int, str]:
    """Return an error's status and code: 4xx for a bad request, 500 for a wrong setup, else 503."""
    if isinstance(error, RequestRefused):
        return error.status, "body_too_slow"
    if isinstance(error, RequestError):
        return error.status, error.code
    if isinstance(error, InfraError | ContractError):
        return 503, "engine_failed"
    return 500, "set_up_wrongly"


def _json(body: bytes) -> Any:
    try:
        return parse_json(body)
    except ValueError as error:
        raise RequestError(f"body: expected JSON, got {body[:80]!r}: {error}.") from error


def _read_response(session: Session, log: ResponseLog, body: bytes) -> tuple[dict[str, Any], ChatRequest]:
    value = _json(body)
    return value, session.read(log.chat_body(value))
