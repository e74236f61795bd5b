"""Reward models over HTTP: OpenRLHF's `--remote_rm_url http://HOST/get_reward`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.openrlhf_rewards import Outcome, Sample, read_rewards
from agentenv.rewards._http import Answer, HTTPClient, pause_s

TIMEOUT_S = 180.0
"""Deadline of an answer, with all attempts and pauses; OpenRLHF's."""
MAX_ATTEMPTS = 5
FIRST_PAUSE_S = 0.5
MAX_ANSWER_BYTES = 64 << 20
"""Longer answers are not read to their end."""
_GRACE_S = 5.0
_PAUSED_STATUSES = frozenset({408, 429})


class RewardServers:
    """Judges by `POST {"query": […], "prompts": […], "labels": […]}`, at the server with the fewest requests in flight.

    It answers `{"rewards": […], "scores": […], "extra_logs": {…}}`. Connections that fail and the statuses 408, 429 and
    from 500 on are tried again, with growing pauses: at another server where there is one, else after what Retry-After
    asks for. Proxies of the environment are not used.
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
        self._clients = {url: HTTPClient(url) for url in urls}

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
        for client in self._clients.values():
            await client.close()

    async def _answer(self, content: bytes) -> tuple[str, Any]:
        """A server's answer as JSON, and whose it is."""
        url, problem, least_s = "", "", 0.0
        end = asyncio.get_running_loop().time() + self.timeout_s
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                wait_s = max(pause_s(attempt, self.first_pause_s), least_s)
                if asyncio.get_running_loop().time() + wait_s >= end:
                    raise InfraError(
                        f"{url}: expected rewards within {self.timeout_s:g} s, got {problem}; the next attempt, in "
                        f"{wait_s:.1f} s, would be too late. Look at the server's load."
                    )
                await asyncio.sleep(wait_s)
            url = self._next(url)
            answer, problem = await self._asked(url, content)
            if answer is not None and not problem:
                return url, _json(url, answer)
            least_s = answer.retry_after_s if answer is not None and len(self._clients) == 1 else 0.0
        raise InfraError(
            f"{url}: expected rewards after {MAX_ATTEMPTS} attempts, got {problem}. Look at the reward model's log."
        )

    def _next(self, last: str) -> str:
        """The server with the least to do, but where there are others not the one that has just failed."""
        others = [url for url in self.in_flight if url != last] or [last]
        url = min(others, key=self.in_flight.__getitem__)
        self.in_flight[url] = self.in_flight.pop(url)  # to the end of the queue of those as busy
        return url

    async def _asked(self, url: str, content: bytes) -> tuple[Answer | None, str]:
        """The answer, if there is one, and what is wrong and may be better next time."""
        import httpx

        self.in_flight[url] += 1
        try:
            answer = await self._clients[url].exchange("", content, max_bytes=MAX_ANSWER_BYTES)
        except httpx.TransportError as error:
            return None, f"{type(error).__name__}: {error}"
        finally:
            self.in_flight[url] -= 1
        may_pass = answer.status in _PAUSED_STATUSES or answer.status >= 500
        return answer, f"status {answer.status}: {answer.shown}" if may_pass else ""


def _json(url: str, answer: Answer) -> Any:
    if answer.status != 200:
        raise ContractError(f"{url}: expected status 200, got {answer.status}: {answer.shown}. Check the address.")
    if answer.is_cut:
        raise ContractError(f"{url}: expected at most {MAX_ANSWER_BYTES} bytes, got more. Mend the server.")
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{url}: expected JSON, got {answer.shown}. Mend the server.") from error
