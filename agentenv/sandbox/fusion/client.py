"""A sandbox on servers with SandboxFusion's HTTP API, such as `agentenv sandbox serve`.

    async with FusionSandbox(["http://10.0.0.1:8080", "http://10.0.0.2:8080"]) as sandbox:
        result = await sandbox.run("print(6 * 7)")

The servers are responsible for isolation. A request that a server fails is retried, on another server if there is one;
a program that fails is not. If no server answers, the result is INFRA, not a verdict.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn, Self

from agentenv._util.http.client import AttemptFailure, HTTPClient, HTTPErrors, RetryPolicy
from agentenv._util.off_loop import off_loop
from agentenv.errors import ConfigError
from agentenv.sandbox.fusion.endpoints import EndpointFailure, Endpoints, FusionEndpoint, without_password
from agentenv.sandbox.fusion.requests import RESULT_HEADER, BadAnswer, EncodedRequest, encode_request, read_answer
from agentenv.sandbox.local.queue import FairQueue
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation, Policy, SandboxUnavailable

MAX_ATTEMPTS = 4
"""Attempts at an execution whose outcome is unknown."""
CONNECT_S = 5.0
KEEPALIVE_S = 2.0
"""Idle time after which a connection is closed, before the server closes it."""
TOKEN_VARIABLE = "AGENTENV_SANDBOX_TOKEN"


class FusionSandbox:
    """A sandbox on remote servers. For use from one event loop."""

    isolation = Isolation.REMOTE
    backend = "sandbox_fusion"
    supports_start = False
    """`start` is not supported; graders replay interactive programs instead."""

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        token: str | None = None,
        limits: ExecLimits | None = None,
        max_concurrent: int = 64,
        preimport: Sequence[str] = (),
        patience_s: float = 60.0,
        pause_s: float = 0.5,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Configure a sandbox; `open` or the first execution sends the first request.

        Args:
            endpoints: addresses, with or without `/run_code`.
            token: bearer token; the environment's AGENTENV_SANDBOX_TOKEN if None. Do not pass a token as an argument of
                an environment, because those are written into records.
            limits: default limits of executions.
            max_concurrent: concurrent requests to all endpoints together; further ones wait, fairly between tenants.
            preimport: packages that programs import; `open` checks that each endpoint has them.
            patience_s: time beyond a program's `wall_s` that an answer may take, with the wait in the server's queue.
            pause_s: longest pause before the second attempt; doubled before each further one.
            waiting: returns a context that is entered while a caller waits for its turn, in the caller's context; it
                can pause the caller's clock.

        Raises:
            ConfigError: an address is invalid.
        """
        urls = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        self._endpoints = Endpoints(urls)
        self.limits = limits or ExecLimits()
        self.patience_s = patience_s
        self.pause_s = pause_s
        self.preimport = tuple(preimport)
        token = (os.environ.get(TOKEN_VARIABLE, "") if token is None else token).strip()
        self._has_token = bool(token)
        self._policy = RetryPolicy(max_attempts=MAX_ATTEMPTS, first_pause_s=pause_s)
        self._clients = {
            each.url: HTTPClient(
                each.url,
                api_key=token or None,
                errors=HTTPErrors(refused=ConfigError),
                connect_s=CONNECT_S,
                keepalive_s=KEEPALIVE_S,
            )
            for each in self._endpoints.all
        }
        self._queue = FairQueue(max_concurrent, max_waiting=100_000, waiting=waiting)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def endpoints(self) -> Sequence[FusionEndpoint]:
        """The endpoints and their states, in order."""
        return self._endpoints.all

    # --- opening and closing ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Check that an endpoint answers, and that all that answer have the packages of `preimport`.

        Raises:
            SandboxUnavailable: no endpoint answers, or one lacks a package.
            ConfigError: an endpoint refuses the token, or this sandbox belongs to another event loop.
        """
        problems = await asyncio.gather(*(self._ping(endpoint) for endpoint in self.endpoints))
        if all(problems):
            raise SandboxUnavailable(
                f"sandbox_fusion: expected an endpoint that answers, got none: {'; '.join(filter(None, problems))}. "
                "Start one: agentenv sandbox serve"
            )
        if self.preimport:
            program = "".join(f"import {name}\n" for name in self.preimport)
            request = self._encode(program)
            alive = [each for each, problem in zip(self.endpoints, problems, strict=True) if not problem]
            for endpoint, result in zip(
                alive, await asyncio.gather(*(self._answer(each, request) for each in alive)), strict=True
            ):
                if result.status is not ExecStatus.OK:
                    raise SandboxUnavailable(
                        f"{without_password(endpoint.url)}: expected {', '.join(self.preimport)} there, got "
                        f"{result.stderr[-300:].strip()!r}. "
                        "Install it there; `agentenv sandbox serve` needs --preimport"
                    )

    async def _ping(self, endpoint: FusionEndpoint) -> str:
        """Return what is wrong with an endpoint, "" if it answers."""
        self._check_loop()
        answer = await self._clients[endpoint.url].attempt("/v1/ping", timeout_s=2 * CONNECT_S, may_refuse=True)
        if isinstance(answer, AttemptFailure):
            return str(answer.error)
        if answer.status in (401, 403):
            raise self._token_error(
                endpoint, f"{without_password(endpoint.url)}: expected status 200, got {answer.status}."
            )
        return ""

    def _check_loop(self) -> None:
        """Raise ConfigError if another event loop used this sandbox before."""
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise ConfigError(
                "FusionSandbox: expected the event loop that it was used in, got another. Make one per loop"
            )

    async def aclose(self) -> None:
        """Close the connections. Repeated calls have no effect; the sandbox may be opened again."""
        self._loop = None
        for client in self._clients.values():
            await client.close()

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.aclose()

    # --- executing ----------------------------------------------------------------------------------------------------

    async def run(
        self,
        program: str | Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        policy: Policy = "pure",
        limits: ExecLimits | None = None,
        tenant: str = "",
        channel: bool = False,
    ) -> ExecResult:
        """Execute a program and wait for its end, as `Sandbox.run` describes.

        SandboxFusion's servers support only `wall_s` and `memory_mb`, and no policy; `agentenv sandbox serve` supports
        all limits, up to its own. Commands are run by bash.

        Raises:
            ConfigError: an argument is invalid, stdin is not UTF-8, or an endpoint refuses the request or the token.
            SandboxBusy: 100,000 requests are waiting.
        """
        request = self._encode(
            program,
            stdin=stdin,
            files=files or {},
            fetch=fetch,
            policy=policy,
            limits=limits,
            tenant=tenant,
            channel=channel,
        )
        endpoint: FusionEndpoint | None = None
        attempts = 0

        async def attempt(number: int) -> ExecResult | AttemptFailure:
            nonlocal endpoint, attempts
            attempts = number
            endpoint = await self._endpoints.free(self.patience_s, but=endpoint)
            if endpoint is None:
                return AttemptFailure(EndpointFailure("every endpoint is paused after its failures"))
            try:
                return await self._answer(endpoint, request)
            except (BadAnswer, EndpointFailure) as error:
                return AttemptFailure(error, retryable=True)

        loop = asyncio.get_running_loop()
        queued_at = loop.time()
        async with self._queue.slot(tenant):
            waited = loop.time() - queued_at
            try:
                result = await self._policy.run(attempt)
            except (BadAnswer, EndpointFailure) as error:
                where = ", ".join(without_password(each.url) for each in self.endpoints)
                result = ExecResult(
                    ExecStatus.INFRA,
                    isolation=self.isolation,
                    backend=self.backend,
                    detail=f"sandbox_fusion: {error} Servers: {where}.",
                )
        return replace(result, attempts=attempts, queue_s=result.queue_s + waited)

    def _encode(self, program: str | Sequence[str], **options: Any) -> EncodedRequest:
        defaults = {"stdin": b"", "files": {}, "fetch": (), "policy": "pure", "tenant": "", "channel": False}
        return encode_request(program, **{**defaults, **options, "limits": options.get("limits") or self.limits})

    async def start(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        policy: Policy = "pure",
        limits: ExecLimits | None = None,
        tenant: str = "",
    ) -> NoReturn:
        """Raise: the HTTP API has no interactive programs.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "sandbox_fusion: expected run(), got start(): this API has no interactive programs. Use the backend local"
        )

    async def _answer(self, endpoint: FusionEndpoint, request: EncodedRequest) -> ExecResult:
        """Return the result from one endpoint.

        Raises:
            BadAnswer: the outcome of the program is unknown.
            EndpointFailure: no answer of status 200 within the program's time limit and `patience_s`.
            ConfigError: the endpoint refuses the request.
        """
        self._check_loop()
        endpoint.in_flight += 1
        try:
            answer = await self._clients[endpoint.url].attempt(
                "/run_code",
                request.content,
                headers=request.headers,
                timeout_s=request.limits.wall_s + self.patience_s,
                max_bytes=request.max_answer_bytes,
            )
        finally:
            endpoint.in_flight -= 1
        if isinstance(answer, AttemptFailure):
            if answer.status in (401, 403):
                raise self._token_error(endpoint, str(answer.error))
            if isinstance(answer.error, ConfigError):
                raise answer.error
            # A server that names a retry time, or answers too much, is not broken.
            works = answer.status in (200, 408, 409, 429) or answer.retry_after_s > 0
            failure = EndpointFailure(str(answer.error), broken=not works, pause_s=answer.retry_after_s)
            endpoint.failed(failure, asyncio.get_running_loop().time(), self.pause_s)
            raise failure from answer.error
        endpoint.answered()
        try:
            header = answer.headers.get(RESULT_HEADER, "")
            return await off_loop(len(answer.body), read_answer, answer.body, header, request)
        except BadAnswer as error:
            raise BadAnswer(f"{without_password(endpoint.url)}: {error}") from error

    def _token_error(self, endpoint: FusionEndpoint, message: str) -> ConfigError:
        hint = f"Set {TOKEN_VARIABLE}"
        if self._has_token or "@" in endpoint.url:
            hint = f"The token differs from the server's {TOKEN_VARIABLE}. Compare them"
        return ConfigError(f"{message} {hint}")
