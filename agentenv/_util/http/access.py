"""Access to this library's HTTP servers: known hosts and origins, a token, JSON bodies of bounded size."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import math
import os
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentenv._util.http.json_bodies import parse_body, parse_json
from agentenv.errors import ConfigError, DataError

if TYPE_CHECKING:
    from starlette.requests import Request

T = TypeVar("T")
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_HEADER_BYTES = 16384
BODY_S = 30.0
"""Deadline for a body to arrive."""
_HOST_AND_PORT = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::([0-9]{1,5}))?")


class RequestRefused(DataError):
    """A request that is not served because of what it contains."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Who may send requests.

    Starlette's TrustedHostMiddleware would check neither ports nor a second Host header, and not where a browser's
    request comes from.

    Raises:
        ConfigError: other machines could send requests without a token or under any name.
    """

    host: str = "127.0.0.1"
    token: str | None = None
    """Expected as `Authorization: Bearer`, or as the password of basic authorization, which clients send for an address
    with a user name and a password."""
    hosts: tuple[str, ...] = ()
    """Names of this server besides the loopback names and `host`, such as `node7` or `node7:80`; `*` allows any."""
    without_token: Collection[str] = ("/v1/ping",)
    """Paths that need no token."""
    navigable: Collection[str] = ()
    """Paths that a browser may open from a link on another site's page."""
    variable: str = ""
    """Environment variable of the token, if a command makes this policy. Errors then name it and the flags."""

    def __post_init__(self) -> None:
        if self.host in LOOPBACK:
            return
        needs_names = self.host in ("", "0.0.0.0", "::") and not self.hosts
        host, token, hosts = self._setting_names
        names = f"; and the names of this server by {hosts}, such as node7" * needs_names
        if not self.token:
            raise ConfigError(
                f"{host}: expected a token if other machines can send requests, got none for {self.host!r}. "
                f"Set {token}{names}; or listen on 127.0.0.1."
            )
        if needs_names:
            raise ConfigError(
                f"{hosts}: expected the names of the server at {self.host!r}, got none. Pass them, such as node7."
            )

    @property
    def _setting_names(self) -> tuple[str, str, str]:
        """Names of the settings of host, token and hosts, for errors."""
        if self.variable:
            return "--host", f"{self.variable} or --token_file", "--allowed_hosts"
        return "AccessPolicy.host", "AccessPolicy.token", "AccessPolicy.hosts"

    def refusal(self, scope: Scope, port: int) -> tuple[int, str] | None:
        """Return the status and text with which a request is refused, None if it is allowed.

        Args:
            scope: of ASGI.
            port: the server's.
        """
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        if self.token and scope["path"] not in self.without_token:
            credentials = headers.get(b"authorization", [])
            if len(credentials) != 1 or not hmac.compare_digest(_token_in(credentials[0]), self.token.encode()):
                return 401, "Authorization: expected this server's token as Bearer."
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or not self._is_own_name(hosts[0].decode("latin-1"), port):
            return 400, f"Host: expected a name of this server. Start it with {self._setting_names[2]} NAME."
        for origin in headers.get(b"origin", []):
            scheme, _, place = origin.decode("latin-1").partition("://")
            if scheme not in ("http", "https") or not self._is_own_name(place, port):
                return 403, "Origin: expected this server's own."
        is_opened = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")) == ([b"navigate"], [b"document"])
        if scope["method"] == "GET" and scope["path"] in self.navigable and is_opened:
            return None
        if any(site in (b"cross-site", b"same-site") for site in headers.get(b"sec-fetch-site", [])):
            return 403, "Sec-Fetch-Site: expected a request from this server's own page."
        return None

    def _is_own_name(self, name: str, port: int) -> bool:
        """Return True if `name` is one of this server's, with its port unless the policy names another port."""
        match = _HOST_AND_PORT.fullmatch(name.lower())
        if match is None:
            return False
        host, digits = match[1].strip("[]").rstrip("."), match[2] or ""
        allowed = {entry.lower() for entry in self.hosts}
        if "*" in allowed or f"{host}:{digits}" in allowed:
            return True
        is_own_port = digits == str(port) or (not digits and port in (80, 443))
        return is_own_port and host in {*LOOPBACK, self.host.lower(), *allowed}

    def protect(self, app: App, port: Callable[[], int]) -> App:
        """Return an application that answers requests which this policy refuses, and passes on all others."""

        async def protected(scope: Scope, receive: Any, send: Any) -> None:
            refusal = self.refusal(scope, port()) if scope["type"] == "http" else None
            if refusal is None:
                await app(scope, receive, send)
                return
            from starlette.responses import JSONResponse

            status, text = refusal
            headers = {"connection": "close", **({"www-authenticate": "Bearer"} if status == 401 else {})}
            await JSONResponse({"detail": text}, status, headers=headers)(scope, receive, send)

        return protected


def _token_in(header: bytes) -> bytes:
    """Return the token in an Authorization header, b"" if there is none."""
    scheme, _, value = header.partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        with contextlib.suppress(binascii.Error, ValueError):
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    return b""


def read_token(path: str | None, variable: str) -> str | None:
    """Return the token in a file or else in an environment variable, None if neither is set.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    if path is None:
        return os.environ.get(variable) or None
    try:
        token = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token_file: expected a file with a token, got {error}. Check the path.") from None
    if not token:
        raise ConfigError(f"--token_file: expected a token, got an empty file {path!r}. Write the token into it.")
    return token


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return a request's body, cut off where it is longer than `max_bytes`.

    Raises:
        RequestRefused: the body is too slow.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    break
    except TimeoutError:
        raise RequestRefused(f"body: expected all of it within {BODY_S:g} s. Send it faster.", 408) from None
    return bytes(body)


async def read_json_body(request: Request, max_bytes: int, read: Callable[[Any], T]) -> T:
    """Return what `read` returns for the JSON of a request's body, called in a thread if the body is large.

    Raises:
        RequestRefused: the body is not JSON, has another content type, is compressed, too large or too slow.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestRefused("content-type: expected application/json. Send JSON.", 415)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestRefused("content-encoding: expected none. Send it uncompressed.", 415)
    length = request.headers.get("content-length", "0")
    too_large = length.isdecimal() and int(length) > max_bytes
    body = b"" if too_large else await read_body(request, max_bytes)
    if too_large or len(body) > max_bytes:
        raise RequestRefused(f"body: expected at most {max_bytes} bytes, got more. Shorten it.", 413)

    def read_whole(body: bytes) -> T:
        try:
            value = parse_json(body)
        except ValueError as error:
            raise RequestRefused(f"body: expected JSON, got an error: {error}.", 400) from error
        return read(value)

    return await parse_body(body, read_whole)


def closing_headers(request: Request, error: RequestRefused, max_bytes: int) -> dict[str, str]:
    """Return headers that close the connection if the rest of a refused body should not be read.

    An endless body is cut off. The client of a body that is somewhat too large gets to read the refusal.
    """
    length = request.headers.get("content-length", "")
    is_bounded = length.isdecimal() and int(length) <= 4 * max_bytes
    closes = error.status == 408 or (error.status == 413 and not is_bounded)
    return {"connection": "close"} if closes else {}


def retry_after_header(wait_s: float) -> dict[str, str]:
    """Return the `Retry-After` header for a wait, bounded to 1 s to 60 s."""
    return {"retry-after": str(min(max(math.ceil(wait_s), 1), 60))}
