"""Reward models over HTTP: OpenRLHF's `--remote_rm_url http://HOST/get_reward`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from agentenv._util.http.client import AttemptFailure, HTTPAnswer, HTTPClient, HTTPErrors, RetryPolicy
from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.rewards.models.openrlhf_wire import Outcome, Sample, read_rewards

TIMEOUT_S = 180.0
"""Deadline of an answer, including all attempts and pauses; OpenRLHF's."""
MAX_ATTEMPTS = 5
"""OpenRLHF's."""
FIRST_PAUSE_S = 0.5
MAX_ANSWER_BYTES = 64 << 20
_MARGIN_S = 5.0
_ERRORS = HTTPErrors(misaddressed=ContractError, refused=ContractError, unreadable=ContractError)


class RewardServers:
    """Judges by `POST {"query": […], "prompts": […], "labels": […]}` to the server with the fewest requests in flight.

    The answer is `{"rewards": […], "scores": […], "extra_logs": {…}}`. Failed attempts are repeated by
    `agentenv._util.http.client.RetryPolicy`, at another server if there is one; only with a single server is
    `Retry-After` respected.
    """

    def __init__(
        self, urls: Sequence[str], *, timeout_s: float = TIMEOUT_S, first_pause_s: float = FIRST_PAUSE_S
    ) -> None:
        wrong = [url for url in urls if not url.startswith(("http://", "https://"))]
        if wrong or not urls:
            raise ConfigError(
                f"--remote_rm_url: expected addresses with http://, split by commas, got {wrong or urls!r}. Fix them."
            )
        self.in_flight = dict.fromkeys(urls, 0)
        """Current requests to each server. Equally busy servers take turns: the last one asked is at the end."""
        self.timeout_s = timeout_s
        self._policy = RetryPolicy(max_attempts=MAX_ATTEMPTS, timeout_s=timeout_s, first_pause_s=first_pause_s)
        self._clients = {url: HTTPClient(url, errors=_ERRORS) for url in urls}

    async def judge(self, samples: Sequence[Sample], limit_s: float) -> Sequence[Outcome]:
        """Ask a server; `limit_s` is ignored, since reward models have `timeout_s`.

        Raises:
            InfraError: no server answered before the deadline or within the allowed attempts.
            ContractError: the answer has another form, or the server refused the request.
        """
        body = {
            "query": [each.query for each in samples],
            "prompts": [each.prompt for each in samples],
            "labels": [each.label for each in samples],
        }
        content = json.dumps(body).encode()
        url = ""

        async def attempt(number: int) -> HTTPAnswer | AttemptFailure:
            nonlocal url
            others = [each for each in self.in_flight if each != url]  # not the server that just failed
            url = min(others or [url], key=self.in_flight.__getitem__)
            self.in_flight[url] = self.in_flight.pop(url) + 1
            try:
                answer = await self._clients[url].attempt("", content, max_bytes=MAX_ANSWER_BYTES)
            finally:
                self.in_flight[url] -= 1
            if isinstance(answer, AttemptFailure) and len(self._clients) > 1:
                return replace(answer, retry_after_s=0.0)
            return answer

        timeout = InfraError(
            f"{', '.join(client.url for client in self._clients.values())}: expected rewards within "
            f"{self.timeout_s:g} s, got none. Check the server's load."
        )
        answer = await self._policy.run(attempt, timeout)
        client = self._clients[url]
        rewards = await client.parse_json(answer, "", partial(read_rewards, num=len(samples), where=client.url))
        if isinstance(rewards, AttemptFailure):
            raise rewards.error
        return rewards

    @property
    def patience_s(self) -> float:
        """A little more than the deadline of an answer, whose own error is more precise."""
        return self.timeout_s + _MARGIN_S

    async def close(self) -> None:
        """Close all connections; calling it again does nothing."""
        for client in self._clients.values():
            await client.close()
