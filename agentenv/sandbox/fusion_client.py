"""Programs on servers that speak SandboxFusion's HTTP API: ours (`agentenv sandbox serve`), and others.

    async with FusionSandbox(["http://10.0.0.1:8080", "http://10.0.0.2:8080"]) as sandbox:
        result = await sandbox.run("print(6 * 7)")

What isolates the programs is the servers' business. A server that fails is tried again, at another one where there is
one; a program's own failure never is. Where no server answers, the result is INFRA and not a verdict.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

from agentenv.errors import ConfigError, InfraError
from agentenv.sandbox._endpoints import Endpoint, Endpoints, Trouble, shown
from agentenv.sandbox._fusion_asks import TOLD_HEADER, Ask, BadAnswer, make_ask, read_answer
from agentenv.sandbox.queue import FairQueue
from agentenv.sandbox.types import ExecLimits, ExecResult, Isolation, Policy, SandboxUnavailable, Status

if TYPE_CHECKING:
    import httpx

MAX_ATTEMPTS = 4
"""Of an execution of which nothing is known."""
CONNECT_S = 5.0
TOKEN_VARIABLE = "AGENTENV_SANDBOX_TOKEN"


class FusionSandbox:
    """The sandbox of servers elsewhere. Used from one event loop."""

    isolation = Isolation.REMOTE
    backend = "sandbox_fusion"
    can_talk = False
    """Graders whose programs are talked to run them anew for each word."""

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
        """Nothing is asked before the first execution, or `open`.

        Args:
            endpoints: addresses, with or without `/run_code`.
            token: sent as a bearer token; that of the environment's AGENTENV_SANDBOX_TOKEN when None. Arguments of an
                environment are written into records: name no token there.
            limits: of executions that name none.
            max_concurrent: requests at a time, at all endpoints together. Others wait, in turn between tenants.
            preimport: packages that programs import: `open` asks each endpoint whether it has them.
            patience_s: how much longer than a program's `wall_s` an answer may take, the servers' queues included.
            pause_s: before the second attempt at most, twice as long before each further one.
            waiting: entered while a caller waits for its turn, in the caller's context: to stop a clock of theirs.

        Raises:
            ConfigError: an address is none.
        """
        urls = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        self._endpoints = Endpoints(urls)
        self.limits = limits or ExecLimits()
        self.patience_s, self.pause_s = patience_s, pause_s
        self.preimport = tuple(preimport)
        token = (os.environ.get(TOKEN_VARIABLE, "") if token is None else token).strip()
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._queue = FairQueue(max_concurrent, max_waiting=100_000, waiting=waiting)
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """What is known of each endpoint, in their order."""
        return self._endpoints.all

    # --- opening and closing ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Check that an endpoint answers, and that those which do have the packages of `preimport`.

        Raises:
            SandboxUnavailable: none answers, or one lacks a package.
            ConfigError: one refuses us; or this sandbox belongs to another event loop.
        """
        asked = await asyncio.gather(*(self._ping(endpoint) for endpoint in self.endpoints))
        if all(asked):
            raise SandboxUnavailable(
                f"sandbox_fusion: expected an endpoint that answers, got none: {'; '.join(filter(None, asked))}. "
                "Start one: agentenv sandbox serve"
            )
        if self.preimport:
            program = "".join(f"import {name}\n" for name in self.preimport)
            ask = self._make(program)
            alive = [each for each, problem in zip(self.endpoints, asked, strict=True) if not problem]
            for endpoint, result in zip(
                alive, await asyncio.gather(*(self._answer(each, ask) for each in alive)), strict=True
            ):
                if result.status is not Status.OK:
                    raise SandboxUnavailable(
                        f"{shown(endpoint.url)}: expected {', '.join(self.preimport)} there, got "
                        f"{result.stderr[-300:].strip()!r}. Install it there; ours serves --preimport's"
                    )

    async def _ping(self, endpoint: Endpoint) -> str:
        """What is wrong with an endpoint; "" where it answers."""
        import httpx

        try:
            async with asyncio.timeout(2 * CONNECT_S):
                response = await self._http().get(f"{endpoint.url}/v1/ping", headers=self._headers)
        except (httpx.TransportError, TimeoutError) as error:
            return f"{shown(endpoint.url)}: {type(error).__name__} {error}".strip()
        if response.status_code in (401, 403):
            self._refuse(endpoint, response.status_code, response.content)
        return f"{shown(endpoint.url)}: status {response.status_code}" if response.status_code >= 500 else ""

    def _http(self) -> httpx.AsyncClient:
        """The client of the running event loop.

        Raises:
            ConfigError: it belongs to another one.
        """
        import httpx

        loop = asyncio.get_running_loop()
        if self._client is None:
            # An idle connection is left before a server would close it, proxies of the environment are not used.
            pool = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
            timeout = httpx.Timeout(None, connect=CONNECT_S)
            encrypted = any(each.url.startswith("https:") for each in self.endpoints)  # else no certificates are read
            self._client = httpx.AsyncClient(limits=pool, timeout=timeout, trust_env=False, verify=encrypted)
            self._loop = loop
        if self._loop is not loop:
            raise ConfigError(
                "FusionSandbox: expected the event loop that it was used in, got another. Make one per loop"
            )
        return self._client

    async def aclose(self) -> None:
        """Close the connections; again is harmless, and it may be opened again."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

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
        """Execute a program and wait for its end: see `Sandbox.run`.

        SandboxFusion's own servers know `wall_s` and `memory_mb` only, and no policy; ours honour all limits, up to
        their own. A command is run by bash.

        Raises:
            ConfigError: as there; stdin is no UTF-8; or an endpoint refuses the request, as without its token.
            SandboxBusy: 100,000 wait.
        """
        ask = self._make(
            program,
            stdin=stdin,
            files=files or {},
            fetch=fetch,
            policy=policy,
            limits=limits,
            tenant=tenant,
            channel=channel,
        )
        loop = asyncio.get_running_loop()
        asked = loop.time()
        async with self._queue.slot(tenant):
            waited = loop.time() - asked
            result = await self._tried(ask)
        return replace(result, queue_s=result.queue_s + waited)

    def _make(self, program: str | Sequence[str], **given: Any) -> Ask:
        how = {"stdin": b"", "files": {}, "fetch": (), "policy": "pure", "tenant": "", "channel": False, **given}
        return make_ask(program, **{**how, "limits": how.get("limits") or self.limits})

    async def start(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        policy: Policy = "pure",
        limits: ExecLimits | None = None,
        tenant: str = "",
    ) -> NoReturn:
        """Not here: a request has one answer.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "sandbox_fusion: expected run(), got start(): nobody can talk to a program over this API. Use the backend "
            "local or docker"
        )

    async def _tried(self, ask: Ask) -> ExecResult:
        """The result after as many attempts as it takes; INFRA where none had one."""
        last: Endpoint | None = None
        trouble: InfraError = BadAnswer("nothing was asked")
        for attempt in range(1, MAX_ATTEMPTS + 1):
            if attempt > 1:
                await asyncio.sleep(self.pause_s * 2 ** (attempt - 2) * random.uniform(0.5, 1.0))
            endpoint = await self._endpoints.free(self.patience_s, but=last)
            if endpoint is None:
                trouble = Trouble("every endpoint is left alone after its failures")
                break
            last = endpoint
            try:
                return replace(await self._answer(endpoint, ask), attempts=attempt)
            except (BadAnswer, Trouble) as error:
                trouble = error
        where = ", ".join(shown(endpoint.url) for endpoint in self.endpoints)
        detail = f"sandbox_fusion: {trouble} ({where}, {attempt} attempts). Look at the servers"
        return ExecResult(Status.INFRA, isolation=self.isolation, backend=self.backend, attempts=attempt, detail=detail)

    async def _answer(self, endpoint: Endpoint, ask: Ask) -> ExecResult:
        """What one endpoint makes of it.

        Raises:
            BadAnswer, Trouble: nothing is known of the program.
            ConfigError: it refuses the request.
        """
        loop = asyncio.get_running_loop()
        endpoint.in_flight += 1
        try:
            content, told = await self._asked(endpoint, ask)
        except Trouble as trouble:
            endpoint.failed(trouble, loop.time(), self.pause_s)
            raise
        finally:
            endpoint.in_flight -= 1
        endpoint.answered()
        try:
            return read_answer(content, told, ask)
        except BadAnswer as error:
            raise BadAnswer(f"{shown(endpoint.url)}: {error}") from error

    async def _asked(self, endpoint: Endpoint, ask: Ask) -> tuple[bytes, str]:
        """The body of an answer of status 200, and our own servers' header.

        Raises:
            Trouble: it gives none, or not within the program's time and the patience.
            ConfigError: it refuses the request.
        """
        import httpx

        where, limit = shown(endpoint.url), ask.limits.wall_s + self.patience_s
        try:
            async with (
                asyncio.timeout(limit),
                self._http().stream(
                    "POST", f"{endpoint.url}/run_code", content=ask.content, headers={**ask.headers, **self._headers}
                ) as response,
            ):
                body = bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > ask.max_answer_bytes:
                        raise Trouble(f"{where}: expected at most {ask.max_answer_bytes} bytes, got more", broken=False)
        except TimeoutError:
            raise Trouble(f"{where}: expected an answer within {limit:g} s, got none") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise Trouble(f"{where}: {type(error).__name__} {error}".strip()) from error
        status = response.status_code
        if status == 200:
            return bytes(body), response.headers.get(TOLD_HEADER, "")
        if status in (408, 429) or status >= 500:
            pause = _seconds(response.headers.get("retry-after", ""))
            busy = status < 500 or pause > 0  # one that says for how long is well
            raise Trouble(f"{where}: status {status}: {_said(body)}", broken=not busy, pause_s=pause)
        self._refuse(endpoint, status, body)

    def _refuse(self, endpoint: Endpoint, status: int, body: bytes | bytearray) -> NoReturn:
        hint = "Check the address and the request"
        if status in (401, 403):
            sent = self._headers or "@" in endpoint.url
            hint = f"The token that was sent is another than the server's {TOKEN_VARIABLE}: compare the two"
            hint = hint if sent else f"Set {TOKEN_VARIABLE}"
        raise ConfigError(f"{shown(endpoint.url)}: expected status 200, got {status}: {_said(body)}. {hint}")


def _said(body: bytes | bytearray) -> str:
    return repr(bytes(body[:300]).decode("utf-8", "backslashreplace"))


def _seconds(value: str) -> float:
    """A `Retry-After` in seconds; dates count as none."""
    return float(value) if value.isascii() and value.isdigit() else 0.0
