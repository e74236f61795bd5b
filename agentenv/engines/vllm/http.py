"""Any vLLM server, over HTTP: token ids in and out, bounded retries, one deadline per generation."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import quote

from agentenv._util.brief import brief_json
from agentenv._util.http.client import (
    MAX_ANSWER_BYTES,
    AttemptFailure,
    HTTPAnswer,
    HTTPClient,
    HTTPErrors,
    RetryPolicy,
    checked_url,
)
from agentenv.core.engine import Engine, EngineOptions, is_plain
from agentenv.core.types import Completion, SamplingParams
from agentenv.engines.constraints import Constrainer, missing_xgrammar, with_forced
from agentenv.engines.vllm.wire import completion_of, field_of, request_body, score_body, scores_of, whole
from agentenv.errors import ConfigError, EngineError, PromptTooLong

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
_KEY_ENV = "AGENTENV_API_KEY"
BYTES_PER_TOKEN = 256
"""Longest answer per token of prompt and action, beside `client.MAX_ANSWER_BYTES`; vLLM's take about 150 bytes."""
MAX_TOKENS = 1 << 18
"""Assumed of a request without a maximum."""
KEEPALIVE_S = 4.0
"""Idle connections are dropped before vLLM's server drops them (5 s), which would cost a retry."""

_CALL = re.compile("agentenv-([0-9a-f]{8})")
"""The part of a request's id that tells this library's calls apart."""


class VLLMHTTPEngine(Engine):
    """An engine over `/v1/completions` of a vLLM server: `vllm serve MODEL --logprobs-mode processed_logprobs`.

    The first `generate` looks at the server once: its model and log-prob mode. Failed attempts are repeated as
    `agentenv._util.http.client` says. It takes no new weights: training samples from `VLLMEngine`.

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

    words = "the client of the vLLM server"
    url_example = "http://HOST:8000"
    is_light = True
    logprobs_mode: Literal["processed", "raw"] | None = None
    """Kind of log-probabilities that the server returns; None before the first `generate`."""

    served_names: tuple[str, ...] = ()
    """Name and origin of the model as the server tells them; known after `start`."""

    @classmethod
    def from_options(cls, options: EngineOptions) -> VLLMHTTPEngine:
        """See `Engine`. The server must serve `options.model`: the tokenizer of another one would differ."""
        engine = cls(options.base_url, **options.args)
        engine.tokenizer = options.tokenizer
        engine._expected_model = "" if "model" in options.args else options.model
        return engine

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
        self.base_url = checked_url("base_url", base_url.rstrip("/").removesuffix("/v1"))
        self.model = model
        self.timeout_s = timeout_s
        self._constrainer: Constrainer | None = None
        self._http = HTTPClient(
            self.base_url,
            api_key=api_key or os.environ.get(_KEY_ENV) or None,
            key_name=_KEY_ENV,
            errors=HTTPErrors(
                unavailable=EngineError, timeout=EngineError, refused=EngineError, unreadable=EngineError
            ),
            connect_s=connect_timeout_s,
            keepalive_s=KEEPALIVE_S,
            max_connections=max_connections,
            transport=transport,
        )
        self.base_url = self._http.url
        self._policy = RetryPolicy(max_attempts=max_retries + 1, timeout_s=timeout_s, first_pause_s=FIRST_PAUSE_S)
        self._closed = False
        self._expected_model = ""
        self._probing: asyncio.Task[None] | None = None

    @property
    def constraint_problem(self) -> str:
        """See `Engine`. The tokens that were forced are computed here."""
        return (
            missing_xgrammar() if self.tokenizer is not None else "VLLMHTTPEngine has no tokenizer: set its attribute"
        )

    async def start(self) -> None:
        """Look at the server now instead of at the first `generate`.

        Raises:
            ConfigError: nothing answers at the address, or the server cannot sample from token ids.
            EngineError: the server fails.
        """
        health = await self._http.attempt("/health", timeout_s=self.timeout_s)
        if isinstance(health, AttemptFailure) and health.status is None:
            raise ConfigError(f"--base_url: expected a vLLM server, got none: {health.error}") from health.error
        await self._look_once()
        served, expected = self.served_names, self._expected_model
        if expected and served and Path(expected).name not in {Path(name).name for name in served}:
            raise ConfigError(
                f"--model: expected the served model ({' or '.join(dict.fromkeys(served))}), got {expected!r}. "
                "Change --model; where the server only calls it otherwise, add "
                '--engine_args \'{"model": "ITS NAME"}\'.'
            )

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.core.engine.Engine`. Cancelling it closes the connection: the server aborts.

        Raises:
            PromptTooLong: the prompt leaves no room in the server's context.
            EngineError: no valid answer within `timeout_s` and `max_retries`.
            ConfigError: the address, key, model or version of the server is wrong; retrying cannot help.
        """
        prompt = list(prompt_token_ids)
        if sampling.structural_tag is not None and self.constraint_problem:
            raise ConfigError(
                f"{self.base_url}: expected to follow a structural tag, got none: {self.constraint_problem}."
            )
        async with self._deadline():
            await self._look_once()
            if self.max_model_len is not None and len(prompt) >= self.max_model_len:
                raise PromptTooLong(
                    f"{self.base_url}: expected a prompt shorter than the server's context of {self.max_model_len} "
                    f"tokens, got {len(prompt)} tokens. Shorten it, or start the server with a larger --max-model-len."
                )
            completion = await self._sample(prompt, sampling, request_id)
        if sampling.structural_tag is None or self.tokenizer is None:
            return completion
        if self._constrainer is None:
            self._constrainer = Constrainer(self.tokenizer)
        return await with_forced(completion, sampling, self._constrainer, self.base_url)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token given those before it, by `/v1/completions`; see `Engine`.

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
            read = partial(scores_of, token_ids=scored)
            scores = await self._request_object("/v1/completions", body, read, request_id="score", num_tokens=len(ids))
        return scores + [math.nan] * full

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
        self._closed = True
        await self._http.close()

    async def _look_once(self) -> None:
        """Wait for the look at the server that all calls share; begin one where there is none or the last failed."""
        task = self._probing
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._probing = asyncio.create_task(self._look())
        await asyncio.shield(task)

    async def _look(self) -> None:
        """Find the model and the log-prob mode."""

        def first_model(listed: dict[str, Any]) -> dict[str, Any]:
            models = [entry for entry in field_of(listed, "data", list) if isinstance(entry, dict)]
            if not models or not isinstance(models[0].get("id"), str):
                raise ConfigError(f"expected a model, got {brief_json(listed)}. Pass its name.")
            if models[0].get("max_model_len") is not None:
                whole(models[0]["max_model_len"], "max_model_len")
            return models[0]

        if self.model is None:
            served = await self._request_object("/v1/models", None, first_model)
            self.model, self.max_model_len = served["id"], served.get("max_model_len")
            self.served_names = tuple(name for key in ("id", "root") if isinstance(name := served.get(key), str))
        # With top_k=1 the one token left has probability 1 after processing, so a raw log-probability shows.
        sampling = SamplingParams(top_k=1, max_tokens=4)
        seen = await self._sample([1, 2, 3], sampling, "agentenv-look/0")
        raw = any(abs(logprob) > 1e-3 for logprob in seen.logprobs or ())
        self.logprobs_mode = "raw" if raw else "processed"
        if raw:
            text = "%s answers log-probabilities before temperature and truncation; they are not those of the policy "
            text += "that sampled. Start the server with --logprobs-mode processed_logprobs."
            logger.warning(text, self.base_url)

    async def _sample(self, prompt: list[int], sampling: SamplingParams, request_id: str) -> Completion:
        headers = {"X-Session-ID": quote(request_id.rpartition("/")[0] or request_id, safe="/:@#=+, ")}
        body = {"model": self.model, **request_body(prompt, sampling)}
        num_tokens = len(prompt) + (MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens)

        def read(answer: dict[str, Any]) -> Completion:
            try:
                return completion_of(answer, prompt)
            except ConfigError as error:
                if self.logprobs_mode is None:  # the look at the server
                    raise
                raise EngineError(str(error)) from error  # the server can do it, and failed this once

        completion = await self._request_object(
            "/v1/completions", body, read, headers=headers, request_id=request_id, num_tokens=num_tokens
        )
        if self.logprobs_mode == "raw" and not is_plain(sampling):
            # Those of the model, not of the distribution that was sampled from: missing, rather than wrong.
            completion = replace(completion, logprobs=(math.nan,) * len(completion.token_ids))
        return completion

    async def _request_object(
        self,
        path: str,
        body: dict[str, Any] | None,
        read: Callable[[dict[str, Any]], T],
        *,
        headers: dict[str, str] | None = None,
        request_id: str = "",
        num_tokens: int = 0,
    ) -> T:
        """Return what `read` returns for the JSON object that the server answers, which may speak of so many tokens."""
        call = uuid.uuid4().hex[:8]
        request_id = request_id and f"{request_id}-agentenv-{call}"
        max_bytes = MAX_ANSWER_BYTES + BYTES_PER_TOKEN * num_tokens
        num_sent = 0

        async def attempt(number: int) -> HTTPAnswer | AttemptFailure:
            nonlocal num_sent
            num_sent = number
            if self._closed:
                raise EngineError(f"{self.base_url}{path}: expected an open engine, got a closed one. Make another.")
            # The server may still hold the id of a failed attempt.
            unique = {"request_id": f"{request_id}-{number}"} if request_id else {}
            content = None if body is None else json.dumps({**body, **unique}, separators=(",", ":")).encode()
            return await self._http.attempt(path, content, headers=headers, max_bytes=max_bytes)

        late = f"{self.base_url}{path}: expected an answer within {self.timeout_s:g} s, got none. Raise timeout_s."
        answer = await self._policy.run(attempt, EngineError(late))
        wrong = f"expected a JSON object without an error, got {answer.excerpt}. Is it a vLLM server?"

        def read_object(parsed: Any) -> T:
            if not isinstance(parsed, dict) or parsed.get("error"):
                raise EngineError(wrong)
            # Proxies may name an answer otherwise, but not as another call of this library: that answer is a copy.
            named = " ".join(name for key in ("id", "request_id") if isinstance(name := parsed.get(key), str))
            calls = _CALL.findall(named)
            if calls and call not in calls:
                raise EngineError(
                    f"expected the answer to {request_id[-200:]!r}, got that to {named[-200:]!r}. "
                    "Switch off caches of answers between here and the model."
                )
            return read(parsed)

        try:
            found = await self._http.parse_json(answer, path, read_object)
            if isinstance(found, AttemptFailure):
                raise EngineError(wrong) from found.error
        except (ConfigError, EngineError) as error:
            raise type(error)(f"{self.base_url}{path}: {error}") from error
        return replace(found, num_request_retries=num_sent - 1) if isinstance(found, Completion) else found
