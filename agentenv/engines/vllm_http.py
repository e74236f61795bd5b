"""Any vLLM server, over HTTP: token ids in and out, bounded retries, one deadline per generation."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import socket
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from agentenv.engines import is_plain
from agentenv.engines._vllm_wire import completion_of, field_of, request_body, score_body, scores_of
from agentenv.errors import ConfigError, EngineError
from agentenv.types import Completion, SamplingParams

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
KEEPALIVE_S = 4.0
"""Idle connections are dropped before vLLM's server drops them (5 s), which would cost a retry."""


class VLLMHTTPEngine:
    """An engine over a vLLM server, which the first `generate` looks at once: its model, endpoints and log-prob mode.

    `vllm serve MODEL --logprobs-mode processed_logprobs` is enough; with `--enable-scale-out` the token-level endpoint
    is used, which saves the server all work on text, counts policy versions and names each log-probability's token.
    Connection errors and the statuses 408, 429, 500, 502, 503 and 504 are retried with exponential backoff and full
    jitter, or after the server's `Retry-After`. Proxies of the environment are not used.

    Example::

        engine = VLLMHTTPEngine("http://localhost:8000")
        completion = await engine.generate(prompt_ids, SamplingParams(max_tokens=64), request_id="0/0")
        await engine.close()

    Args:
        base_url: with or without the trailing /v1.
        model: the served model's name; None asks the server.
        api_key: sent as a bearer token; None takes AGENTENV_API_KEY.
        timeout_s: deadline of one `generate`, with the wait for a connection, all retries and their pauses.
        connect_timeout_s: longest wait for a connection to open.
        max_retries: further attempts after the first.
        max_connections: requests in flight at once; more wait their turn.
        transport: another way to reach the server, for tests.
    """

    logprobs_mode: Literal["processed", "raw"] | None = None
    """What the server was seen to answer; None before the first `generate`."""

    served_names: tuple[str, ...] = ()
    """Name and origin of the model as the server tells them; known after `start`."""

    max_model_len: int | None = None
    """The server's context, where it tells it; known after `start`."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 10.0,
        max_retries: int = 5,
        max_connections: int = 256,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        import httpx

        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        key = api_key or os.environ.get("AGENTENV_API_KEY")
        limits = httpx.Limits(
            max_connections=max_connections, max_keepalive_connections=max_connections, keepalive_expiry=KEEPALIVE_S
        )
        self._client = httpx.AsyncClient(
            base_url=_checked(self.base_url),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, connect=connect_timeout_s),
            transport=transport or httpx.AsyncHTTPTransport(limits=limits, socket_options=_keepalive_options()),
        )
        self._tokens_endpoint = False
        self._probing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look at the server now instead of at the first `generate`.

        Raises:
            ConfigError: nothing answers there, or it is no server that can be sampled from.
            EngineError: the server fails.
        """
        import httpx

        try:
            await self._client.get("/health")
        except httpx.TransportError as error:
            raise ConfigError(
                f"--base_url: expected a vLLM server at {self.base_url}, got {type(error).__name__}: {error}. "
                "Start it, or change the address."
            ) from error
        await self._look_once()

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.agent.Engine`. Cancelling it closes the connection: the server aborts.

        Raises:
            EngineError: no valid answer within `timeout_s` and `max_retries`.
            ConfigError: the address, key, model or version of the server is wrong; retrying cannot help.
        """
        prompt = list(prompt_token_ids)
        async with self._deadline():
            await self._look_once()
            return await self._sample(prompt, sampling, request_id)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """The log-probability of each token after those before it, by `/v1/completions`; see `agentenv.engines.Scorer`.

        vLLM samples a token after what it scores: of a sequence as long as its context, the last token gets NaN.

        Raises:
            EngineError: no valid answer within `timeout_s` and `max_retries`.
            ConfigError: the address, key, model or version of the server is wrong; retrying cannot help.
        """
        ids = list(token_ids)
        async with self._deadline():
            await self._look_once()
            full = len(ids) == self.max_model_len
            scored = ids[:-1] if full else ids
            body = {"model": self.model, **score_body(scored)}
            answer = await self._request("POST", "/v1/completions", body=body, request_id="score")
        return scores_of(_json(answer), scored) + [math.nan] * full

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.timeout_s):
                yield
        except TimeoutError as error:
            raise EngineError(
                f"{self.base_url}: expected an answer within {self.timeout_s:g} s, got none. "
                "Look at the server's load, or raise timeout_s."
            ) from error

    async def close(self) -> None:
        """Close all connections; calling it again does nothing."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        await self._client.aclose()

    async def _look_once(self) -> None:
        """Wait for the look at the server that all calls share; begin one where there is none or the last failed."""
        task = self._probing
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._probing = asyncio.create_task(self._look())
        await asyncio.shield(task)

    async def _look(self) -> None:
        """Find the model, the endpoint and the log-prob mode."""
        if self.model is None:
            listed = _json(await self._request("GET", "/v1/models"))
            models = [entry for entry in field_of(listed, "data", list) if isinstance(entry, dict)]
            if not models or not isinstance(models[0].get("id"), str):
                raise ConfigError(f"{self.base_url}/v1/models: expected a model, got {listed!r}. Pass its name.")
            self.model = models[0]["id"]
            self.served_names = tuple(name for key in ("id", "root") if isinstance(name := models[0].get(key), str))
            self.max_model_len = length if isinstance(length := models[0].get("max_model_len"), int) else None
        # An empty request costs nothing: 400 or 422 where the endpoint is on, 403 or 404 where it is not.
        answer = await self._request("POST", "/inference/v1/generate", body={}, refusable=True)
        self._tokens_endpoint = answer.status_code in (400, 422)
        # With top_k=1 the one token left has probability 1 after processing, so a raw log-probability shows.
        sampling = SamplingParams(top_k=1, max_tokens=4)
        seen = await self._sample([1, 2, 3], sampling, "agentenv-look/0")
        raw = any(abs(logprob) > 1e-3 for logprob in seen.logprobs or ())
        self.logprobs_mode = "raw" if raw else "processed"
        if raw:
            logger.warning(
                "%s answers log-probabilities before temperature and truncation; they are not those of the policy "
                "that sampled. Start the server with --logprobs-mode processed_logprobs.",
                self.base_url,
            )

    async def _sample(self, prompt: list[int], sampling: SamplingParams, request_id: str) -> Completion:
        headers = {"X-Session-ID": quote(request_id.rpartition("/")[0] or request_id, safe="/:@#=+, ")}
        path = "/inference/v1/generate" if self._tokens_endpoint else "/v1/completions"
        body = {"model": self.model, **request_body(prompt, sampling, tokens_endpoint=self._tokens_endpoint)}
        answer = await self._request("POST", path, body=body, headers=headers, request_id=request_id)
        completion = completion_of(_json(answer), prompt, tokens_endpoint=self._tokens_endpoint)
        if self.logprobs_mode == "raw" and not is_plain(sampling):
            # Those of the model, not of the distribution that was sampled from: missing, rather than wrong.
            completion = replace(completion, logprobs=(math.nan,) * len(completion.token_ids))
        return completion

    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        request_id: str = "",
        refusable: bool = False,
    ) -> httpx.Response:
        """One request with its retries; `refusable` returns the answer also where it is a refusal."""
        import httpx

        problem = ""
        for attempt in range(self.max_retries + 1):
            wait_s = random.uniform(0.0, min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**attempt))
            if request_id and body is not None:  # a server may still know the id of a failed attempt
                body = {**body, "request_id": f"{request_id}-{uuid.uuid4().hex[:8]}"}
            try:
                response = await self._client.request(method, path, json=body, headers=headers)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}({error})"
            except (RuntimeError, httpx.HTTPError) as error:  # RuntimeError: the client has been closed
                raise EngineError(f"{self.base_url}{path}: expected an answer, got {error!r}.") from error
            else:
                retried = response.status_code in RETRIED_STATUSES
                if response.is_success or (refusable and not retried):
                    return response
                problem = f"status {response.status_code} ({_server_message(response)})"
                if not retried:
                    raise _refusal(response.status_code, f"{self.base_url}{path}", problem)
                wait_s = _retry_after_s(response.headers.get("Retry-After"), default=wait_s)
            if attempt < self.max_retries:
                logger.info("%s%s: %s; attempt %d in %.1f s", self.base_url, path, problem, attempt + 2, wait_s)
                await self._sleep(wait_s)
        raise EngineError(
            f"{self.base_url}{path}: expected an answer in {self.max_retries + 1} attempts, got {problem} at the last. "
            "Look at the server's log."
        )

    _sleep = staticmethod(asyncio.sleep)


def _checked(base_url: str) -> str:
    import httpx

    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"base_url: expected an address such as http://localhost:8000, got {base_url!r}. Change it.")
    return base_url


def _keepalive_options() -> list[tuple[int, int, int]]:
    """TCP keep-alive: a server that vanished without a word is noticed after about a minute, not at the deadline."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


def _retry_after_s(value: str | None, *, default: float) -> float:
    if not value:
        return default
    try:
        seconds = float(value) if value.strip().isdecimal() else parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):
        return default
    return min(max(seconds, 0.0), MAX_BACKOFF_S)


def _server_message(response: httpx.Response) -> str:
    try:
        answer = response.json()
        message = (answer.get("error") or answer).get("message") or answer.get("detail") or response.text
    except (ValueError, AttributeError):
        message = response.text
    return str(message)[:500] or response.reason_phrase


def _refusal(status: int, url: str, problem: str) -> ConfigError | EngineError:
    advice = {401: "Check the API key.", 403: "Check the API key and its rights.", 404: "Check base_url and model."}
    message = f"{url}: expected an answer, got {problem}. {advice.get(status, 'Change the request.')}"
    return ConfigError(message) if status in advice else EngineError(message)


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise EngineError(f"{response.url}: expected a JSON object, got {response.text[:200]!r}. Is it a vLLM server?")
    return answer
