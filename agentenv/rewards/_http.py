"""HTTP as reward models and judges are asked by it: one exchange at a time, of bounded size, over no proxy."""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from agentenv.errors import ConfigError
from agentenv.rewards.per_loop import PerLoop

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
LONGEST_PAUSE_S = 30.0
_MAX_SHOWN = 300
_MAX_REFUSAL_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said."""

    status: int
    body: bytes
    """At most so many bytes as were asked for; without the key, where the status is not 200."""
    is_cut: bool = False
    """Whether there was more of it."""
    retry_after_s: float = 0.0
    """Least wait that the server asks for."""

    @property
    def shown(self) -> str:
        """The beginning of the body, for errors."""
        return shown(self.body)


def shown(body: bytes) -> str:
    """The beginning of what a server sent, for errors."""
    return repr(body[: 4 * _MAX_SHOWN].decode(errors="replace")[:_MAX_SHOWN])


def pause_s(attempt: int, first_s: float) -> float:
    """How long to wait after so many failed attempts (1, 2, …): doubled each time, and jittered down to its half."""
    return random.uniform(0.5, 1.0) * min(LONGEST_PAUSE_S, first_s * 2.0 ** min(attempt - 1, 30))


def retry_after_s(header: str | None) -> float:
    """The wait that a Retry-After asks for, as seconds or as a date; 0.0 where it asks for none that can be read."""
    value = (header or "").strip()
    try:
        if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
            return float(value)
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time()) if value else 0.0
    except (ValueError, OverflowError, TypeError):
        return 0.0


def checked_url(where: str, url: object, *, path: str = "") -> str:
    """The address, without slashes at its end; an error's example has this path.

    Raises:
        ConfigError: it is none of http or https.
    """
    import httpx

    try:
        found = httpx.URL(url) if isinstance(url, str) else httpx.URL("")
    except httpx.InvalidURL:
        found = httpx.URL("")
    if not isinstance(url, str) or found.scheme not in ("http", "https") or not found.host:
        raise ConfigError(f"{where}: expected an address such as http://localhost:8000{path}, got {url!r}. Change it.")
    return url.rstrip("/")


def key_fits(key: object) -> bool:
    """Whether a header can hold it as a bearer token."""
    return isinstance(key, str) and re.fullmatch(r"[!-~]+", key) is not None


class HTTPClient:
    """Asks one server, from any event loop; proxies of the environment are not used, redirections not followed.

    Args:
        url: the server's; what is asked there begins with it. A name and password in it are sent, where there is no
            key, and are not in `url` here, which errors name.
        api_key: sent as a bearer token, and blotted out of refusals, should the server repeat it; "" sends none.
        connect_s: longest that connecting may take.
    """

    def __init__(self, url: str, *, api_key: str = "", connect_s: float = CONNECT_S) -> None:
        import httpx

        given = httpx.URL(url)
        self.url = str(given.copy_with(userinfo=b"")) if given.userinfo else url
        self._auth = (given.username, given.password) if given.userinfo and not api_key else None
        self._key, self._connect_s = api_key, connect_s
        self._clients = PerLoop(self._client)

    async def exchange(self, path: str, content: bytes | None, *, max_bytes: int) -> Answer:
        """What the server answers to a POST of JSON, or to a GET where there is none; whoever calls bounds its time.

        Args:
            path: behind the server's url.
            content: JSON.
            max_bytes: longer answers are not read to their end; of refusals at most 64 KiB are.

        Raises:
            httpx.HTTPError: there is none.
            RuntimeError: the client was closed meanwhile.
        """
        method = "GET" if content is None else "POST"
        async with self._clients.here().stream(method, self.url + path, content=content) as response:
            status = response.status_code
            limit = max_bytes if status == 200 else _MAX_REFUSAL_BYTES
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > limit:
                    break
        found = bytes(body[:limit])
        for secret in filter(None, (self._key, *(self._auth or ())[1:])) if status != 200 else ():
            found = found.replace(secret.encode(), b"***")
        return Answer(status, found, len(body) > limit, retry_after_s(response.headers.get("Retry-After")))

    async def close(self) -> None:
        """Close this loop's connections; calling it again does nothing."""
        client = self._clients.drop()
        if client is not None:
            await client.aclose()

    def _client(self) -> httpx.AsyncClient:
        import httpx

        # No connection outlives its request: none is left open when its loop ends, none was closed at the other end.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # Certificates take 50 ms to read, in which the loop stands still; without TLS nothing asks for them.
        transport = httpx.AsyncHTTPTransport(limits=limits, verify=self.url.startswith("https"))
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = httpx.Timeout(None, connect=self._connect_s)
        return httpx.AsyncClient(
            transport=transport, timeout=timeout, headers=headers, auth=self._auth, trust_env=False
        )
