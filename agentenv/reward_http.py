"""Reward models over HTTP: OpenRLHF's `--remote_rm_url http://HOST/get_reward`."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.openrlhf_rewards import Outcome, Sample, read_rewards

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 180.0
"""Deadline of an answer, with all attempts and pauses; OpenRLHF's."""
MAX_ATTEMPTS = 5
FIRST_PAUSE_S, CONNECT_TIMEOUT_S = 0.5, 10.0
_GRACE_S = 5.0
_PAUSED_STATUSES = frozenset({408, 429})


class RewardServers:
    """Judges by `POST {"query": […], "prompts": […], "labels": […]}`, at the server with the fewest requests in flight.

    It answers `{"rewards": […], "scores": […], "extra_logs": {…}}`. Connections that fail and the statuses 408, 429 and
    from 500 on are tried again, at another server where there is one, with growing pauses. Proxies of the environment
    are not used.
    """

    def __init__(
        self, urls: Sequence[str], *, timeout_s: float = TIMEOUT_S, first_pause_s: float = FIRST_PAUSE_S
    ) -> None:
        wrong = [url for url in urls if not url.startswith(("http://", "https://"))]
        if wrong or not urls:
            raise ConfigError(
                f"--remote_rm_url: expected addresses with http://, split by commas, got {wrong or urls!r}. Mend them."
            )
        self.in_flight = dict.fromkeys(urls, 0)
        """Requests to each server now; those after each other in turn where they are as busy."""
        self.timeout_s, self.first_pause_s = timeout_s, first_pause_s
        self._client: httpx.AsyncClient | None = None

    async def judge(self, samples: Sequence[Sample], limit_s: float) -> Sequence[Outcome]:
        """Ask a server; `limit_s` is not looked at, since reward models have `timeout_s`.

        Raises:
            InfraError: none answered in time, or after so many attempts.
            ContractError: the answer is no such object, or the request is refused.
        """
        body = {
            "query": [each.query for each in samples],
            "prompts": [each.prompt for each in samples],
            "labels": [each.label for each in samples],
        }
        content = json.dumps(body).encode()
        try:
            async with asyncio.timeout(self.timeout_s) as deadline:
                url, answer = await self._answer(content)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise InfraError(
                f"{', '.join(self.in_flight)}: expected rewards within {self.timeout_s:g} s, got none. "
                "Look at the server's load."
            ) from error
        return read_rewards(answer, len(samples), url)

    @property
    def patience_s(self) -> float:
        """A little longer than the deadline of an answer, which says more where it passes."""
        return self.timeout_s + _GRACE_S

    async def close(self) -> None:
        """Close what is open; calling it again does nothing."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _answer(self, content: bytes) -> tuple[str, Any]:
        """A server's answer as JSON, and whose it is."""
        problem, url = "", ""
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await asyncio.sleep(self.first_pause_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
            url = self._next(url)
            self.in_flight[url] += 1
            try:
                response = await self._post(url, content)
            finally:
                self.in_flight[url] -= 1
            if not isinstance(response, str):
                return url, _json(url, response)
            problem = response
        raise InfraError(
            f"{url}: expected rewards after {MAX_ATTEMPTS} attempts, got {problem}. Look at the reward model's log."
        )

    def _next(self, last: str) -> str:
        """The server with the least to do, but where there are others not the one that has just failed."""
        others = [url for url in self.in_flight if url != last] or [last]
        url = min(others, key=self.in_flight.__getitem__)
        self.in_flight[url] = self.in_flight.pop(url)  # to the end of the queue of those as busy
        return url

    async def _post(self, url: str, content: bytes) -> httpx.Response | str:
        """The answer, or what is wrong and may be better next time."""
        import httpx

        if self._client is None:
            # No connection outlives its request: nobody has to close them, and none was closed at the other end.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
            self._client = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(limits=limits), timeout=timeout)
        try:
            response = await self._client.post(url, content=content, headers={"Content-Type": "application/json"})
        except httpx.TransportError as error:
            return f"{type(error).__name__}: {error}"
        if response.status_code in _PAUSED_STATUSES or response.status_code >= 500:
            return f"status {response.status_code}: {response.text[:200]}"
        return response


def _json(url: str, response: httpx.Response) -> Any:
    if response.status_code != 200:
        raise ContractError(
            f"{url}: expected status 200, got {response.status_code}: {response.text[:200]}. Check the address."
        )
    try:
        return response.json()
    except ValueError as error:
        raise ContractError(f"{url}: expected JSON, got {response.text[:200]!r}. Mend the server.") from error
