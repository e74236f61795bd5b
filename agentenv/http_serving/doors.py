"""What an HTTP server of ours lets in: hosts and origins that it knows, a token, JSON of a limited size."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import json
import math
import os
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.errors import ConfigError, DataError

if TYPE_CHECKING:
    from starlette.requests import Request

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_HEADER_BYTES = 16384
BODY_S = 30.0
"""For a body to arrive."""
_NAME = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::([0-9]{1,5}))?")
"""Of a host, with or without a port."""


class Refused(DataError):
    """A request that is not answered, for a reason that lies in it."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Doors:
    """Who may ask.

    Raises:
        ConfigError: others than this machine could, without a token or under any name.
    """

    host: str = "127.0.0.1"
    token: str | None = None
    """Sent as `Authorization: Bearer`, or as the password of a basic one, which clients make of an address."""
    hosts: tuple[str, ...] = ()
    """Names beside the loopback's and `host` under which it is asked, as `node7` or `node7:80`; `*` is any."""
    without_token: Collection[str] = ("/v1/ping",)
    variable: str = ""
    """Where a command opens them: the environment variable of its token. Errors then name that, and flags."""

    def __post_init__(self) -> None:
        if self.host in LOOPBACK:
            return
        unnamed = self.host in ("", "0.0.0.0", "::") and not self.hosts
        host, token, hosts = self._names
        named = f"; and the names under which it is asked by {hosts}, as node7" * unnamed
        if not self.token:
            raise ConfigError(
                f"{host}: expected a token where others than this machine can ask, got none for {self.host!r}. "
                f"Set {token}{named}; or listen on 127.0.0.1."
            )
        if unnamed:
            raise ConfigError(
                f"{hosts}: expected the names under which {self.host!r} is asked, got none. Name them, as node7."
            )

    @property
    def _names(self) -> tuple[str, str, str]:
        """What host, token and hosts are called where they are set."""
        if self.variable:
            return "--host", f"{self.variable} or --token_file", "--allowed_hosts"
        return "Doors.host", "Doors.token", "Doors.hosts"

    def problem(self, scope: Scope, port: int) -> tuple[int, str] | None:
        """Why a request is not let in, as a status and a text; None where it is."""
        headers = {name: [value for key, value in scope["headers"] if key == name] for name, _ in scope["headers"]}
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or not self._knows(hosts[0].decode("latin-1"), port):
            return 400, f"Host: expected a name of this server. Start it with {self._names[2]} NAME."
        for origin in headers.get(b"origin", []):
            scheme, _, place = origin.decode("latin-1").partition("://")
            if scheme not in ("http", "https") or not self._knows(place, port):
                return 403, "Origin: expected this server's own."
        if any(site in (b"cross-site", b"same-site") for site in headers.get(b"sec-fetch-site", [])):
            return 403, "Sec-Fetch-Site: expected no other site's page."
        if self.token and scope["path"] not in self.without_token:
            given = headers.get(b"authorization", [])
            if len(given) != 1 or not hmac.compare_digest(_token(given[0]), self.token.encode()):
                return 401, "Authorization: expected this server's token as Bearer."
        return None

    def _knows(self, name: str, port: int) -> bool:
        """Whether this is a name of ours, with the port that we listen on where the name is not given with another."""
        match = _NAME.fullmatch(name.lower())
        if match is None:
            return False
        host, digits = match[1].strip("[]").rstrip("."), match[2] or ""
        allowed = {entry.lower() for entry in self.hosts}
        if "*" in allowed or f"{host}:{digits}" in allowed:
            return True
        own = digits == str(port) or (not digits and port in (80, 443))
        return own and host in {*LOOPBACK, self.host.lower(), *allowed}


def _token(header: bytes) -> bytes:
    """The token in a header; no token's where there is none."""
    scheme, _, value = header.partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        with contextlib.suppress(binascii.Error, ValueError):
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    return b""


def token_of(path: str | None, variable: str) -> str | None:
    """The token in a file, or else in the environment variable; None where neither is given.

    Raises:
        ConfigError: the file cannot be read, or holds none.
    """
    if path is None:
        return os.environ.get(variable) or None
    try:
        token = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token_file: expected a file with a token, got {error}. Check the path.") from None
    if not token:
        raise ConfigError(f"--token_file: expected a token, got nothing in {path!r}. Write one.")
    return token


def guarded(app: App, doors: Doors, port: Callable[[], int]) -> App:
    """The application behind its doors."""

    async def guard(scope: Scope, receive: Any, send: Any) -> None:
        """Let a request in, or answer why not."""
        problem = doors.problem(scope, port()) if scope["type"] == "http" else None
        if problem is None:
            await app(scope, receive, send)
            return
        from starlette.responses import JSONResponse

        status, text = problem
        headers = {"connection": "close", **({"www-authenticate": "Bearer"} if status == 401 else {})}
        await JSONResponse({"detail": text}, status, headers=headers)(scope, receive, send)

    return guard


async def read_json(request: Request, max_bytes: int) -> Any:
    """The JSON of a request's body.

    Raises:
        Refused: it is none, another type, compressed, too large or too slow.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused("content-type: expected application/json. Send JSON.", 415)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refused("content-encoding: expected none. Send it uncompressed.", 415)
    length = request.headers.get("content-length", "0")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            if not length.isdecimal() or int(length) <= max_bytes:
                async for part in request.stream():
                    body += part
                    if len(body) > max_bytes:
                        break
    except TimeoutError:
        raise Refused(f"body: expected all of it within {BODY_S:g} s. Send it faster.", 408) from None
    if len(body) > max_bytes or (length.isdecimal() and int(length) > max_bytes):
        raise Refused(f"body: expected at most {max_bytes} bytes, got more. Shorten it.", 413)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"body: expected JSON, got {type(error).__name__}. Mend it.", 400) from error


def cut_off(request: Request, error: Refused, max_bytes: int) -> dict[str, str]:
    """Headers that end the connection where the rest of a refused body is not to be read.

    A body without end is cut off; who sends one that is somewhat too large shall hear why.
    """
    length = request.headers.get("content-length", "")
    known = length.isdecimal() and int(length) <= 4 * max_bytes
    return {"connection": "close"} if error.status == 408 or (error.status == 413 and not known) else {}


def retry_after(wait_s: float) -> dict[str, str]:
    """The header that says when to ask again: in 1 s to 60 s."""
    return {"retry-after": str(min(max(math.ceil(wait_s), 1), 60))}
