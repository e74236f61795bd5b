"""JSON over HTTP, one attempt at a time: an answer, or why there is none and whether another attempt may give one.

Statuses: 408, 429 and from 500 on may pass, with what `Retry-After` asks for; 401, 403, 404, 405 and redirections mean
a wrong address or key; what else is below 500 refuses what was sent. Proxies of the environment are not used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentenv.errors import AgentEnvError, ConfigError, DataError, InfraError
from agentenv.rewards._http import Answer, HTTPClient, key_fits

MAX_ANSWER_BYTES = 8 << 20
"""Longer answers are not read to their end."""
_BUSY = frozenset({408, 429, 502, 503, 504})
"""Statuses of a server that has no time or is not there; those of one that fails on what it got are others."""
_ADVICE = {
    401: "Check the API key.",
    403: "Check the API key and its rights.",
    404: "Check the address, its path and the model's name.",
    405: "Check the address and its path.",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt gave no answer."""

    error: AgentEnvError
    may_pass: bool = False
    """Whether another attempt may give one."""
    suspect: bool = False
    """Whether one of several things that were asked together may be to blame."""
    suspect_again: bool = False
    """Whether one may be if it comes again: 503 may mean a busy server, or one whose model failed."""
    retry_after_s: float = 0.0
    """Least wait that the server asks for."""
    status: int | None = None
    """That the server answered with; 200 where it is what it answered that is wrong. None: there was no answer."""


class JSONClient(HTTPClient):
    """Sends JSON to one server and reads its JSON, from any event loop; no redirection is followed.

    Args:
        url: what stands before every path.
        api_key: sent as a bearer token, and blotted out of errors; None sends none.

    Raises:
        ConfigError: the key cannot stand in a header.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        if api_key is not None and not key_fits(api_key):
            raise ConfigError("api_key: expected printable ASCII without spaces, got something else. Correct the key.")
        super().__init__(url, api_key=api_key or "")

    async def attempt(self, path: str, body: Mapping[str, Any] | None = None) -> Any | Failure:
        """What the server answers to a POST of `body`, or to a GET where there is none; whoever calls bounds its time.

        Raises:
            DataError: the body is no JSON.
        """
        import httpx

        url = self.url + path
        content = None if body is None else _as_json(body)
        try:
            answer = await self.exchange(path, content, max_bytes=MAX_ANSWER_BYTES)
        except httpx.InvalidURL as error:
            return Failure(ConfigError(f"{url}: expected an address, got {error}. Change it."))
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client has been closed meanwhile
            got = f"{type(error).__name__}: {error}"[:300]
            message = f"{url}: expected an answer, got {got}. Look at the server."
            refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            passes = isinstance(error, httpx.TransportError)
            return Failure(InfraError(message), may_pass=passes, suspect=passes and not refused)
        return _refused(url, answer) if answer.status != 200 else _read(url, answer)


def _refused(url: str, answer: Answer) -> Failure:
    status = answer.status
    message = f"{url}: expected status 200, got {status}: {answer.shown}."
    if status in _BUSY or status >= 500:
        error = InfraError(f"{message} Look at the server's log.")
        return Failure(
            error, True, suspect=status not in _BUSY, suspect_again=status >= 500,
            retry_after_s=answer.retry_after_s, status=status,
        )  # fmt: skip
    if status in _ADVICE or status < 400:
        return Failure(ConfigError(f"{message} {_ADVICE.get(status, 'Check the address.')}"), status=status)
    return Failure(DataError(f"{message} Correct the row, or the scorer's settings."), suspect=True, status=status)


def _as_json(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False, ensure_ascii=False).encode()  # which half a surrogate pair is not
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"conversation: expected what JSON can hold, got {error}. Correct the row.") from error


def _read(url: str, answer: Answer) -> Any | Failure:
    if answer.is_cut:
        error = InfraError(f"{url}: expected at most {MAX_ANSWER_BYTES} bytes, got more. Look at the server.")
        return Failure(error, suspect=True, status=200)
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        error = InfraError(f"{url}: expected JSON, got {answer.shown}. Check the address.")
        return Failure(error, may_pass=True, suspect=True, status=200)
