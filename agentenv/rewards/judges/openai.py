"""A judge behind any server that speaks OpenAI's chat completions: vLLM, SGLang, and those that are paid for."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentenv.agent import call
from agentenv.errors import ConfigError, InfraError
from agentenv.rewards._arguments import number, whole_number
from agentenv.rewards._http import Answer, HTTPClient, checked_url, key_fits, pause_s
from agentenv.rewards.judges._turns import Turns
from agentenv.rewards.judges._wire import MAX_AT_ONCE, answer_of, request_bytes, sampling_fields
from agentenv.rewards.judges.draws import Draw
from agentenv.rewards.judges.failures import (
    JudgeMisaddressed,
    JudgeRefused,
    JudgeTimeout,
    JudgeUnavailable,
    JudgeUnreadable,
)
from agentenv.rewards.judges.usage import Usage
from agentenv.types import Message, SamplingParams

JUDGING = SamplingParams(temperature=0.0, max_tokens=2048)
"""How a judge samples unless said otherwise; give votes a temperature above 0."""
_RETRIED = frozenset({408, 409, 429})
_ADVICE = {401: "Check the API key.", 403: "Check the API key and its rights.", 404: "Check base_url and model."}


@dataclass(frozen=True, slots=True)
class Sending:
    """How requests are sent."""

    limit_s: float = 300.0
    """Longest that one reply may take, with all its attempts and the waits between; a wait for its turn not counted."""
    request_s: float = 120.0
    """Longest that one attempt may take."""
    connect_s: float = 10.0
    max_retries: int = 5
    """Further attempts after the first."""
    first_pause_s: float = 0.5
    """Longest wait before the second attempt; twice as long before each further one, at most 30 s. What the server asks
    for with Retry-After is waited for in any case."""
    max_concurrent: int = 64
    """Requests in flight at once, on each event loop; more wait their turn."""
    max_body_bytes: int = 1 << 20
    """Longer answers are not read to their end."""

    def __post_init__(self) -> None:
        """Refuse what cannot be kept to."""
        for name in ("limit_s", "request_s", "connect_s"):
            number(f"Sending.{name}", getattr(self, name), low=0.001)
        number("Sending.first_pause_s", self.first_pause_s, low=0.0)
        whole_number("Sending.max_retries", self.max_retries)
        whole_number("Sending.max_concurrent", self.max_concurrent, low=1)
        whole_number("Sending.max_body_bytes", self.max_body_bytes, low=1000)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why an attempt gave no answer."""

    error: InfraError
    may_pass: bool
    """Whether another attempt may give one."""
    retry_after_s: float = 0.0


class OpenAIJudge:
    """Asks `POST {base_url}/chat/completions`; safe to ask from several event loops.

    The statuses 408, 409, 429 and from 500 on, connections that fail or break, attempts that take too long and answers
    that are no chat completion are tried again; other statuses are not. A reply that was cut off at `max_tokens` is
    none. What a reasoning model thought, where the server tells it apart, is not its reply. Proxies of the environment
    are not used, and redirections not followed.

    Example::

        judge = OpenAIJudge("http://localhost:8000/v1", "Qwen/Qwen3-8B")
        await PointwiseReward(judge).grade(Response("4", label="4", prompt="2 + 2?"))
        await judge.close()

    Args:
        base_url: what stands before `/chat/completions`, as the openai package wants it.
        model: the served model's name.
        api_key_env: the environment variable that holds the key, read here; None sends none.
        sampling: how it samples; a seed is another one for each vote and attempt.
        extra_body: more fields of the request, in place of ours where they have the same name; None leaves one out.
        sending: deadlines, retries, concurrency.
        usage: where the counts are kept; by default its own, `judge.usage`.

    Raises:
        ConfigError: the address is none, the variable is not set, or an argument is out of range.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        sampling: SamplingParams = JUDGING,
        extra_body: Mapping[str, Any] | None = None,
        sending: Sending | None = None,
        usage: Usage | None = None,
    ) -> None:
        self.url = f"{checked_url('OpenAIJudge.base_url', base_url, path='/v1')}/chat/completions"
        if not isinstance(model, str) or not model:
            raise ConfigError(f"OpenAIJudge.model: expected a name, got {model!r}. Pass the served model's.")
        self.model, self.sampling, self.extra_body = model, sampling, dict(extra_body or {})
        self.sending, self.usage = sending or Sending(), usage or Usage()
        self._http = HTTPClient(self.url, api_key=_key(api_key_env), connect_s=self.sending.connect_s)
        self._turns, self._reading, self._starting = Turns(self.sending.max_concurrent), Turns(1), Turns(1)
        self._closed = False
        request_bytes(model, [], sampling, self.extra_body)

    @property
    def identity(self) -> str:
        """What its replies depend on besides the messages: model and sampling; for `cache.CachedJudge`."""
        return json.dumps([self.model, sampling_fields(self.sampling) | self.extra_body], sort_keys=True)

    async def complete(self, messages: Sequence[Message]) -> str:
        """Its reply.

        Raises:
            InfraError: none can be had; of the class in `failures.py` that says why.
            DataError: the messages are no JSON.
        """
        return await self.draw(messages, Draw())

    async def draw(self, messages: Sequence[Message], draw: Draw) -> str:
        """That one of its replies: its request has a seed of its own, where the sampling has one; see `complete`."""
        sampling = replace(self.sampling, seed=draw.seed(self.sampling.seed))
        content = request_bytes(self.model, messages, sampling, self.extra_body)
        try:
            async with self._turns.one():
                return await self._reply(content)
        except InfraError as error:
            self.usage.fail(error)
            raise

    async def close(self) -> None:
        """Ask nobody any more; what this loop still asks ends. Calling it again does nothing."""
        self._closed = True
        await self._http.close()

    async def _reply(self, content: bytes) -> str:
        """The reply to a request, within its deadline."""
        if self._closed:
            raise JudgeRefused(f"{self.url}: expected a judge, got one that was closed. Make another.")
        try:
            async with asyncio.timeout(self.sending.limit_s) as deadline:
                return await self._tried(content, asyncio.get_running_loop().time() + self.sending.limit_s)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise JudgeTimeout(
                f"{self.url}: expected a reply within {self.sending.limit_s:g} s, got none. Look at the server's load."
            ) from error

    async def _tried(self, content: bytes, end: float) -> str:
        """The reply of the first attempt that gives one, or the error of the last; `end` is a time of the loop."""
        for attempt in range(self.sending.max_retries + 1):
            self.usage.add(requests=1, retries=int(attempt > 0))
            found = await self._attempt(content)
            if isinstance(found, str):
                return found
            wait_s = max(pause_s(attempt + 1, self.sending.first_pause_s), found.retry_after_s)
            if not found.may_pass or attempt == self.sending.max_retries:
                raise found.error
            if asyncio.get_running_loop().time() + wait_s >= end:
                raise type(found.error)(f"{found.error} (The next attempt, in {wait_s:.1f} s, would be too late.)")
            await asyncio.sleep(wait_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _attempt(self, content: bytes) -> str | _Failure:
        """One request."""
        import httpx

        limit_s = self.sending.request_s
        try:
            async with asyncio.timeout(limit_s) as deadline:
                return await self._exchange(content)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            timeout = JudgeTimeout(f"{self.url}: expected an answer within {limit_s:g} s, got none. Raise request_s.")
            timeout.__cause__ = error
            return _Failure(timeout, may_pass=True)
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client has been closed meanwhile
            got = f"{type(error).__name__}: {error}"[:300]
            refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            what = f"cannot connect to {self.url} ({got}). Start it" if refused else f"got {got}. Look at the server"
            unavailable = JudgeUnavailable(f"{self.url}: expected an answer, {what}.")
            return _Failure(unavailable, may_pass=isinstance(error, httpx.TransportError) and not self._closed)

    async def _exchange(self, content: bytes) -> str | _Failure:
        """Send a request and read the answer."""
        async with self._starting.one():
            await asyncio.sleep(0)  # one a round of the loop: 64 that begin in the same one hold it up by 0.1 s
        answer = await self._http.exchange("", content, max_bytes=self.sending.max_body_bytes)
        if answer.status != 200:
            return self._status_failure(answer)
        if answer.is_cut:
            limit = self.sending.max_body_bytes
            error = JudgeUnreadable(f"{self.url}: expected at most {limit} bytes, got more. Look at the server.")
            return _Failure(error, may_pass=False)
        return await self._read(answer.body)

    async def _read(self, body: bytes) -> str | _Failure:
        if len(body) <= MAX_AT_ONCE:
            answer = answer_of(body, self.url)
        else:
            async with self._reading.one():
                answer = await call(answer_of, body, self.url)
        if answer.whole:
            tokens = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
            self.usage.add(replies=1, uncounted=int(not answer.counted), **tokens)
        if answer.failure is None:
            return answer.text
        return _Failure(answer.failure, may_pass=not answer.whole)

    def _status_failure(self, answer: Answer) -> _Failure:
        may_pass = answer.status in _RETRIED or answer.status >= 500
        advice = "Look at the server's log." if may_pass else _ADVICE.get(answer.status, "Change the request.")
        message = f"{self.url}: expected status 200, got {answer.status}: {answer.shown}. {advice}"
        kind = JudgeMisaddressed if answer.status in _ADVICE else JudgeRefused
        error = JudgeUnavailable(message) if may_pass else kind(message)
        return _Failure(error, may_pass, answer.retry_after_s)


def _key(variable: str | None) -> str:
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key_fits(key):
        raise ConfigError(
            f"OpenAIJudge.api_key_env: expected a key in the environment variable {variable!r}, got "
            f"{'other characters than a header may hold' if key else 'none'}. Set it."
        )
    return key
