"""The endpoints of a client: the choice of the next one, and pauses after failures."""

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
"""Consecutive failures of an endpoint after which it is paused."""
MAX_PAUSE_S = 60.0
"""Longest pause of an endpoint, even if it requests more."""
_LOG = logging.getLogger(__name__)


class EndpointFailure(InfraError):
    """A failure of an endpoint that a retry may resolve."""

    def __init__(self, message: str, *, broken: bool = True, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.broken = broken
        """True if the endpoint failed; False if it is busy or cannot run this program."""
        self.pause_s = pause_s
        """Pause that the endpoint requests, in seconds."""


@dataclass(slots=True)
class FusionEndpoint:
    """The state of one server."""

    url: str
    in_flight: int = 0
    troubles: int = 0
    """Failures since its last answer."""
    closed_until: float = 0.0
    """Time of the event loop until which it is paused; then a single request tests it."""

    def open_in(self, now: float) -> float:
        """Return the seconds until it accepts requests; inf while a request tests it."""
        if self.troubles >= MAX_TROUBLES and self.in_flight:
            return math.inf
        return max(0.0, self.closed_until - now)

    def answered(self) -> None:
        """Reset the failures after an answer."""
        self.troubles = 0
        self.closed_until = 0.0

    def failed(self, trouble: EndpointFailure, now: float, pause_s: float) -> None:
        """Count a failure; after MAX_TROUBLES pause the endpoint, twice as long each time."""
        pause = trouble.pause_s
        if trouble.broken and now >= self.closed_until:  # concurrent requests count as one failure
            self.troubles += 1
            if self.troubles >= MAX_TROUBLES:
                pause = max(pause, pause_s * 2 ** min(self.troubles - MAX_TROUBLES + 1, 16))
                _LOG.warning("%s: %s; paused for %.1f s", without_password(self.url), trouble, min(pause, MAX_PAUSE_S))
        self.closed_until = max(self.closed_until, now + min(pause, MAX_PAUSE_S))


class Endpoints:
    """The endpoints of one client."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.all: list[FusionEndpoint] = []
        for url in dict.fromkeys(urls):
            try:
                parts = urlsplit(url) if isinstance(url, str) else urlsplit("")
                valid = parts.scheme in ("http", "https") and parts.hostname and not parts.query and parts.port != 0
            except ValueError:
                valid = False
            if not valid:
                raise ConfigError(f"endpoints: expected addresses like http://127.0.0.1:8080, got {url!r}. Correct it")
            self.all.append(FusionEndpoint(url.rstrip("/").removesuffix("/run_code")))
        if not self.all:
            raise ConfigError(
                "endpoints: expected at least one address, got none. Add one, such as http://127.0.0.1:8080"
            )
        self._turn = itertools.count()

    async def free(self, patience_s: float, but: FusionEndpoint | None = None) -> FusionEndpoint | None:
        """Return the endpoint with the fewest requests, if possible not `but`; None if all stay paused.

        Waits for paused endpoints, at most `patience_s`.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + patience_s
        while True:
            now = loop.time()
            ready = [each for each in self.all if not each.open_in(now)]
            ready = [each for each in ready if each is not but] or ready
            if ready:
                turn = next(self._turn) % len(ready)  # round robin between equally busy ones
                return min(ready[turn:] + ready[:turn], key=lambda each: each.in_flight)
            wait = min(each.open_in(now) for each in self.all)
            if now >= end or (wait < math.inf and now + wait > end):
                return None
            await asyncio.sleep(min(max(wait, 0.01), 0.1))


def without_password(url: str) -> str:
    """Return an address without its user name and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
