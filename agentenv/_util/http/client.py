"""The HTTP client of this library: answers of bounded size, failures as errors of this library, one retry policy.

Engines, judges, reward models and sandboxes send their requests through `HTTPClient`, one attempt per call, and repeat
failed attempts by a `RetryPolicy`. Retryable are connections that fail or break, attempts that take too long, and the
statuses 408, 409, 429 and 500 and above. Proxies of the environment are not used, and redirections are not followed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from agentenv._util.http.json_bodies import json_text, parse_body, parse_json
from agentenv._util.off_loop import off_loop, size_of
from agentenv._util.per_loop import PerLoop
from agentenv.errors import AgentEnvError, ConfigError, DataError, InfraError

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
MAX_ANSWER_BYTES = 8 << 20
"""Longer answers are an error unless a caller sets another bound."""
MAX_PAUSE_S = 30.0
"""Longest pause between two attempts, unless a server asks for more."""
_LASTS_AFTER = 3
_LONG_PAUSE_S = 10.0
_MAX_EXCERPT = 300
_MAX_REFUSAL_BYTES = 65_536
_OVERLOADED = frozenset({408, 409, 429, 502, 503, 504})
"""Statuses that say nothing about the request. Other statuses from 500 on may mean that the server failed on it."""
NO_CREDIT = "The account has no credit: add some."
"""The end of the error where that is why a server refused."""
_ADVICE = {
    403: "Check the API key and its rights.",
    404: "Check the address, its path and the model's name.",
    405: "Check the address and its path.",
}


@dataclass(frozen=True, slots=True)
class HTTPAnswer:
    """A server's answer."""

    status: int
    body: bytes
    """Without the API key, unless the status is 200."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Header names are matched without regard to case."""
    is_cut: bool = False
    """Whether the body was longer than the bound."""

    @property
    def excerpt(self) -> str:
        """The beginning of the body, for errors."""
        return excerpt(self.body)

    @property
    def retry_after_s(self) -> float:
        """Least wait that the server asks for."""
        return retry_after_s(self.headers.get("Retry-After"))


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """The reason why an attempt produced no answer."""

    error: AgentEnvError
    retryable: bool = False
    """Whether another attempt may succeed."""
    suspect: bool = False
    """Whether one of several items that were sent together may have caused it."""
    suspect_if_repeated: bool = False
    """Whether one of the items may have caused it if it happens again: status 503 may mean a busy server, or one whose
    model failed."""
    retry_after_s: float = 0.0
    """Least wait that the server asks for."""
    status: int | None = None
    """Status of the answer; 200 if its content is wrong, None without an answer."""

    def __post_init__(self) -> None:
        """Tell the error, too."""
        self.error.http_status = self.status


@dataclass(frozen=True, slots=True)
class HTTPErrors:
    """The error classes of one kind of client."""

    unavailable: type[AgentEnvError] = InfraError
    """The server cannot be reached, or answers with a retryable status."""
    timeout: type[AgentEnvError] = InfraError
    """An attempt took too long."""
    misaddressed: type[AgentEnvError] = ConfigError
    """Wrong address or key: redirections and the statuses 401, 403, 404 and 405."""
    refused: type[AgentEnvError] = DataError
    """Other statuses below 500."""
    unreadable: type[AgentEnvError] = InfraError
    """The answer is too long or not JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and after which pauses failed attempts are repeated."""

    max_attempts: int
    timeout_s: float = math.inf
    """Deadline of all attempts and the pauses between them."""
    first_pause_s: float = 0.5
    """Longest pause after the first failure. It doubles with each further failure, up to 30 s, and each pause is random
    between half of it and all of it. `Retry-After` of a server extends a pause."""
    _told: set[int | None] = field(default_factory=set, init=False, compare=False, repr=False)

    def pause_s(self, failure: AttemptFailure, num_failed: int, left_s: float) -> float:
        """Return the pause before the next attempt, and log the failure.

        It is logged as an error, which a run shows, when it lasts, and once for each status.

        Args:
            failure: of the last attempt.
            num_failed: failed attempts so far, at least 1.
            left_s: time until the deadline.

        Raises:
            AgentEnvError: this was the last attempt; it has the class of the failure's error.
        """
        error = failure.error
        if not failure.retryable or self.max_attempts == 1:
            raise error
        attempts = f"{num_failed} attempt{'s' * (num_failed > 1)}"
        if num_failed >= self.max_attempts:
            raise type(error)(f"{error} ({attempts}.)") from error
        longest_s = min(MAX_PAUSE_S, self.first_pause_s * 2.0 ** min(num_failed - 1, 30))
        pause_s = max(random.uniform(0.5, 1.0) * longest_s, failure.retry_after_s)
        if pause_s >= left_s:
            raise type(error)(f"{error} ({attempts}; the next, in {pause_s:.1f} s, would be too late.)") from error
        is_news = (num_failed >= _LASTS_AFTER or pause_s > _LONG_PAUSE_S) and failure.status not in self._told
        if is_news:
            self._told.add(failure.status)
        level = logging.ERROR if is_news else logging.INFO
        _LOG.log(level, "%s Attempt %d follows in %.1f s.", error, num_failed + 1, pause_s)
        return pause_s

    async def run(
        self, attempt: Callable[[int], Awaitable[T | AttemptFailure]], timeout_error: AgentEnvError | None = None
    ) -> T:
        """Call `attempt(1)`, `attempt(2)`, … until one returns a result.

        Args:
            attempt: receives the attempt's number.
            timeout_error: raised if the deadline passes; a policy without one needs none.

        Raises:
            AgentEnvError: the last failure's error; see `pause_s`.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self.timeout_s
        num_failed = 0
        try:
            async with asyncio.timeout_at(end if math.isfinite(end) else None) as deadline:
                while isinstance(result := await attempt(num_failed + 1), AttemptFailure):
                    num_failed += 1
                    await asyncio.sleep(self.pause_s(result, num_failed, end - loop.time()))
                return result
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise (timeout_error or error) from error


def retry_after_s(header: str | None) -> float:
    """Return the wait in seconds that a `Retry-After` header asks for, 0.0 if it is missing or unreadable."""
    value = (header or "").strip()
    try:
        if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
            return float(value)
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time()) if value else 0.0
    except (ValueError, OverflowError, TypeError):
        return 0.0


def excerpt(body: bytes, error: ValueError | None = None) -> str:
    """Return the beginning of a body, quoted, for errors; of one that began as JSON, with the error of reading it."""
    text = repr(body[: 4 * _MAX_EXCERPT].decode(errors="replace")[:_MAX_EXCERPT])
    is_json = error is not None and body.lstrip().startswith((b"{", b"["))
    return f"{len(body)} bytes that are not JSON ({error}): {text}" if is_json else text


def checked_url(where: str, url: object, *, path: str = "") -> str:
    """Return the address without slashes at its end.

    Args:
        where: name of the argument, for errors.
        url: the address.
        path: path of the example in the error.

    Raises:
        ConfigError: it is not an HTTP or HTTPS address.
    """
    import httpx

    try:
        parsed = httpx.URL(url) if isinstance(url, str) else httpx.URL("")
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if not isinstance(url, str) or parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{where}: expected an address such as http://localhost:8000{path}, got {url!r}.")
    return url.rstrip("/")


def is_header_token(key: object) -> bool:
    """Return True if a header can carry `key` as a bearer token."""
    return isinstance(key, str) and re.fullmatch(r"[!-~]+", key) is not None


def json_bytes(body: Any) -> bytes:
    """Return `body` as JSON.

    Raises:
        DataError: JSON cannot represent it.
    """
    try:
        # An unpaired surrogate passes json.dumps and fails here, in encode.
        return json_text(body, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"conversation: expected what JSON can represent, got {error}. Correct the row.") from error


class HTTPClient:
    """A client of one server, usable from any event loop.

    Args:
        url: prefix of all requests. A user name and password in it are sent unless there is a key; the attribute `url`,
            which errors name, is without them.
        api_key: sent as a bearer token and removed from excerpts of refusals; None sends no token.
        key_name: the variable or the argument that has the key, for errors.
        errors: classes of its errors.
        connect_s: longest wait for a connection.
        keepalive_s: how long idle connections stay open. With 0, each request has its own connection: none is left open
            when its loop ends, and none was closed by the server in the meantime.
        max_connections: requests in flight at once, on each event loop; None sets no bound.
        transport: another way to reach the server, for tests.

    Raises:
        ConfigError: a header cannot carry the key.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        key_name: str = "api_key",
        errors: HTTPErrors | None = None,
        connect_s: float = 10.0,
        keepalive_s: float = 0.0,
        max_connections: int | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        import httpx

        if api_key is not None and not is_header_token(api_key):
            raise ConfigError("api_key: expected printable ASCII without spaces, got other text. Correct the key.")
        parsed = httpx.URL(url)
        self.url = str(parsed.copy_with(userinfo=b"")) if parsed.userinfo else url
        self.errors = errors or HTTPErrors()
        self._auth = (parsed.username, parsed.password) if parsed.userinfo and not api_key else None
        self._api_key = api_key
        has_key = api_key or self._auth
        self._key_advice = f"Check the API key ({key_name})." if has_key else f"No API key was sent: set {key_name}."
        self._connect_s = connect_s
        self._limits = httpx.Limits(
            max_connections=max_connections,
            max_keepalive_connections=max_connections if keepalive_s else 0,
            keepalive_expiry=keepalive_s,
        )
        self._transport = transport
        self._clients = PerLoop(self._connect)

    def _connect(self) -> httpx.AsyncClient:
        import httpx

        # Reading certificates takes 50 ms of the loop's time; without TLS they are not needed.
        verify = self.url.startswith("https")
        # With TCP keep-alive, a server that vanished is noticed after about a minute instead of at the deadline.
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
        transport = self._transport or httpx.AsyncHTTPTransport(
            limits=self._limits, verify=verify, socket_options=options
        )
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        timeout = httpx.Timeout(None, connect=self._connect_s)
        return httpx.AsyncClient(
            transport=transport, timeout=timeout, headers=headers, auth=self._auth, trust_env=False
        )

    async def attempt(
        self,
        path: str,
        content: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = math.inf,
        max_bytes: int = MAX_ANSWER_BYTES,
        may_refuse: bool = False,
    ) -> HTTPAnswer | AttemptFailure:
        """Send one request and return the answer, or a failure unless its status is 200.

        Args:
            path: appended to the client's url.
            content: JSON for a POST; None sends a GET.
            headers: more headers.
            timeout_s: deadline of this attempt.
            max_bytes: longer answers are a failure.
            may_refuse: return answers of every status that is not retryable.
        """
        import httpx

        url = self.url + path
        try:
            async with asyncio.timeout(timeout_s if math.isfinite(timeout_s) else None) as deadline:
                answer = await self._exchange(url, content, headers, max_bytes)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            timeout = self.errors.timeout(
                f"{url}: expected an answer within {timeout_s:.4g} s, got none. Check the server's load."
            )
            timeout.__cause__ = error
            return AttemptFailure(timeout, retryable=True, suspect=True)
        except httpx.InvalidURL as error:
            return AttemptFailure(self.errors.misaddressed(f"{url}: expected an address, got {error}."))
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed in the meantime
            is_down = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            advice = "Start the server, or check the address." if is_down else "Check the server's log."
            message = f"{url}: expected an answer, got {f'{type(error).__name__}: {error}'[:300]}. {advice}"
            retryable = isinstance(error, httpx.TransportError)
            unavailable = self.errors.unavailable(message)
            unavailable.__cause__ = error
            return AttemptFailure(unavailable, retryable, suspect=retryable and not is_down)
        if answer.status != 200:
            failure = self._refusal(url, answer)
            return answer if may_refuse and not failure.retryable else failure
        if answer.is_cut:
            message = f"{url}: expected at most {max_bytes} bytes, got more. Check the server."
            return AttemptFailure(self.errors.unreadable(message), suspect=True, status=200)
        return answer

    async def _exchange(
        self, url: str, content: bytes | None, headers: Mapping[str, str] | None, max_bytes: int
    ) -> HTTPAnswer:
        method = "GET" if content is None else "POST"
        async with self._clients.here().stream(method, url, content=content, headers=headers) as response:
            status = response.status_code
            limit = max_bytes if status == 200 else _MAX_REFUSAL_BYTES
            received = bytearray()
            async for chunk in response.aiter_raw():
                received += chunk
                if len(received) > limit:
                    break
        body = bytes(received[:limit])
        if status != 200:
            for secret in filter(None, (self._api_key, *(self._auth or ())[1:])):
                body = body.replace(secret.encode(), b"***")
        return HTTPAnswer(status, body, response.headers, len(received) > limit)

    def _refusal(self, url: str, answer: HTTPAnswer) -> AttemptFailure:
        status = answer.status
        message = f"{url}: expected status 200, got {status}: {answer.excerpt}."
        no_credit = NO_CREDIT if status == 402 or b"insufficient_quota" in answer.body else ""
        if status in _OVERLOADED or status >= 500:
            advice = "Send fewer at a time: lower --concurrency." if status == 429 else "Check the server's log."
            return AttemptFailure(
                self.errors.unavailable(f"{message} {no_credit or advice}"),
                retryable=True,
                suspect=status not in _OVERLOADED,
                suspect_if_repeated=status >= 500,
                retry_after_s=answer.retry_after_s,
                status=status,
            )
        if status == 401 or status in _ADVICE or status < 400:
            advice = self._key_advice if status == 401 else _ADVICE.get(status, "Check the address.")
            return AttemptFailure(self.errors.misaddressed(f"{message} {no_credit or advice}"), status=status)
        refused = self.errors.refused(f"{message} {no_credit or 'Correct the request.'}")
        return AttemptFailure(refused, suspect=True, status=status)

    async def parse_json(self, answer: HTTPAnswer, path: str, read: Callable[[Any], T]) -> T | AttemptFailure:
        """Return what `read` returns for the JSON of an answer, or a failure if it is not JSON.

        Both are read in a thread if the answer is large.
        """

        def read_whole(body: bytes) -> T | AttemptFailure:
            try:
                value = parse_json(body)
            except ValueError as error:
                message = f"{self.url}{path}: expected JSON, got {excerpt(body, error)}. Check the address."
                return AttemptFailure(self.errors.unreadable(message), retryable=True, suspect=True, status=200)
            return read(value)

        return await parse_body(answer.body, read_whole)

    async def attempt_json(
        self, path: str, body: Mapping[str, Any] | None, read: Callable[[Any], T]
    ) -> T | AttemptFailure:
        """Send one request and return what `read` returns for the answer's JSON; the caller sets the deadline.

        Raises:
            DataError: JSON cannot represent the body.
        """
        content = None if body is None else await off_loop(size_of(body), json_bytes, body)
        answer = await self.attempt(path, content, max_bytes=MAX_ANSWER_BYTES)
        return answer if isinstance(answer, AttemptFailure) else await self.parse_json(answer, path, read)

    async def close(self) -> None:
        """Close this loop's connections; calling it again does nothing."""
        client = self._clients.drop()
        if client is not None:
            await client.aclose()
