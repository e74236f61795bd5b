"""Endpoints of one service: which to ask next, and which to leave alone for a while."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from agentenv.errors import ConfigError, InfraError

MAX_TROUBLES = 3
"""Failures of an endpoint one after the other, after which it is left alone for a while."""
MAX_PAUSE_S = 60.0
"""Longest that an endpoint is left alone, whatever it asks for."""
_LOG = logging.getLogger(__name__)


class Trouble(InfraError):
    """Something failed that may be better at the next attempt."""

    def __init__(self, message: str, *, broken: bool = True, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.broken = broken
        """Whether it is the endpoint that failed; else it is busy, or did not understand this program."""
        self.pause_s = pause_s
        """How long it asks to be left alone."""


@dataclass(slots=True)
class Endpoint:
    """What is known of one server."""

    url: str
    in_flight: int = 0
    troubles: int = 0
    """Failures since its last answer."""
    closed_until: float = 0.0
    """Time of the event loop before which nothing is sent; after failures, one request then tries it."""

    def open_in(self, now: float) -> float:
        """Seconds until it may be asked; inf while one request tries it."""
        if self.troubles >= MAX_TROUBLES and self.in_flight:
            return math.inf
        return max(0.0, self.closed_until - now)

    def answered(self) -> None:
        """It is well."""
        self.troubles, self.closed_until = 0, 0.0

    def failed(self, trouble: Trouble, now: float, pause_s: float) -> None:
        """It is not: after some failures it is left alone, twice as long each time."""
        pause = trouble.pause_s
        if trouble.broken and now >= self.closed_until:  # requests that were under way together fail once
            self.troubles += 1
            if self.troubles >= MAX_TROUBLES:
                pause = max(pause, pause_s * 2 ** min(self.troubles - MAX_TROUBLES + 1, 16))
                _LOG.warning("%s: %s; left alone for %.1f s", shown(self.url), trouble, min(pause, MAX_PAUSE_S))
        self.closed_until = max(self.closed_until, now + min(pause, MAX_PAUSE_S))


class Endpoints:
    """All of them."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = [Endpoint(_address(url)) for url in dict.fromkeys(urls)]
        if not self.all:
            raise ConfigError("endpoints: expected at least one address, got none. Name one, as http://127.0.0.1:8080")
        self._turn = itertools.count()

    async def free(self, patience_s: float, but: Endpoint | None = None) -> Endpoint | None:
        """The one with the least to do, another one than `but` where there is; None if none is to be asked in time.

        Those that are left alone are waited for, `patience_s` at most.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + patience_s
        while True:
            now = loop.time()
            ready = [each for each in self.all if not each.open_in(now)]
            ready = [each for each in ready if each is not but] or ready
            if ready:
                turn = next(self._turn) % len(ready)  # in turn, where they are as busy
                return min(ready[turn:] + ready[:turn], key=lambda each: each.in_flight)
            wait = min(each.open_in(now) for each in self.all)
            if now >= end or (wait < math.inf and now + wait > end):
                return None
            await asyncio.sleep(min(max(wait, 0.01), 0.1))


def _address(url: str) -> str:
    """An endpoint's address without the path that other clients want in it.

    Raises:
        ConfigError: it is none.
    """
    try:
        parts = urlsplit(url) if isinstance(url, str) else urlsplit("")
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"endpoints: expected addresses like http://127.0.0.1:8080, got {url!r}. Correct it")
    return url.rstrip("/").removesuffix("/run_code")


def shown(url: str) -> str:
    """An address without a name and a password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
