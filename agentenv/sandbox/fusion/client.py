"""A sandbox on servers that run `agentenv sandbox serve`.

    async with FusionSandbox(["http://10.0.0.1:8080", "http://10.0.0.2:8080"]) as sandbox:
        result = await sandbox.run("print(6 * 7)")

The servers are responsible for isolation. A request that a server fails is retried, on another server if there is one;
a program that fails is not. If no server answers, the result is INFRA, not a verdict.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn, Self, TypeVar
from urllib.parse import urlsplit

from agentenv._util.calls import MAX_GIVEN_BACK, give_back, seconds_left, waiting
from agentenv._util.http.client import AttemptFailure, HTTPAnswer, HTTPClient, HTTPErrors, RetryPolicy
from agentenv._util.http.json_bodies import parse_json
from agentenv._util.off_loop import off_loop
from agentenv._util.per_loop import PerLoop
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.sandbox.fusion import wire
from agentenv.sandbox.fusion.run_code import TOKEN_VARIABLE
from agentenv.sandbox.grading.results import GradeResult
from agentenv.sandbox.grading.suites import TestSuite
from agentenv.sandbox.local.session import TurnResult
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation, Policy, SandboxUnavailable

MAX_ATTEMPTS = 4
"""Attempts at a request whose outcome is unknown."""
CONNECT_S = 5.0
KEEPALIVE_S = 2.0
"""Idle time after which a connection is closed, before the server closes it."""
AVOID_S = 10.0
"""Time after a failure in which other servers are preferred."""
MAX_PAUSE_S = 60.0
"""Longest wait before another attempt, even if a server asks for more."""
_MIB = 1 << 20
_MAX_GRADE_BYTES = 256 * _MIB
_TEST_S = 60.0
"""Time for a test beyond its limit, before a server that sends no grade is given up."""

T = TypeVar("T")


@dataclass(slots=True)
class FusionEndpoint:
    """One server and its state."""

    url: str
    """Without user name and password."""
    client: HTTPClient
    has_password: bool
    in_flight: int = 0
    avoided_until: float = 0.0
    """Time of the event loop."""


class FusionSandbox:
    """A sandbox on servers of `agentenv sandbox serve`, usable from any event loop."""

    isolation = Isolation.REMOTE

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        token: str | None = None,
        limits: ExecLimits | None = None,
        max_concurrent: int = 64,
        patience_s: float = 60.0,
        pause_s: float = 0.5,
    ) -> None:
        """Configure a sandbox; `open` or the first execution sends the first request.

        Args:
            endpoints: addresses, with or without `/run_code`.
            token: bearer token; the environment's AGENTENV_SANDBOX_TOKEN if None. Do not pass a token as an argument of
                an environment, because those are written into records.
            limits: default limits of executions.
            max_concurrent: concurrent requests to all endpoints together, on each event loop; further ones wait.
            patience_s: time that an answer may take beyond a program's `wall_s` and what a busy host adds to it, with
                the wait in the server's queue.
            pause_s: longest pause before the second attempt; doubled before each further one.

        Raises:
            ConfigError: an address is invalid.
        """
        self.limits = limits or ExecLimits()
        self.patience_s = patience_s
        token = (os.environ.get(TOKEN_VARIABLE, "") if token is None else token).strip()
        self._has_token = bool(token)
        self.endpoints: list[FusionEndpoint] = []
        for url in dict.fromkeys([endpoints] if isinstance(endpoints, str) else endpoints):
            try:
                parts = urlsplit(url)
                valid = parts.scheme in ("http", "https") and parts.hostname and not parts.query and parts.port != 0
            except (AttributeError, TypeError, ValueError):
                valid = False
            if not valid:
                raise ConfigError(f"endpoints: expected addresses like http://127.0.0.1:8080, got {url!r}.")
            client = HTTPClient(
                url.rstrip("/").removesuffix("/run_code"), api_key=token or None,
                errors=HTTPErrors(refused=ConfigError), connect_s=CONNECT_S, keepalive_s=KEEPALIVE_S,
            )  # fmt: skip
            self.endpoints.append(FusionEndpoint(client.url, client, has_password=parts.password is not None))
        if not self.endpoints:
            raise ConfigError(
                "endpoints: expected at least one address, got none. Add one, such as http://127.0.0.1:8080"
            )
        self._turn = itertools.count()
        self._policy = RetryPolicy(max_attempts=MAX_ATTEMPTS, first_pause_s=pause_s)
        self.run_slots = max_concurrent
        self._slots = PerLoop(lambda: asyncio.Semaphore(max_concurrent))

    # --- opening and closing ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Check that an endpoint answers.

        Raises:
            SandboxUnavailable: no endpoint answers.
            ConfigError: an endpoint refuses the token, or is another server.
        """
        answers = await asyncio.gather(
            *(self.attempt("/health", None, lambda _: None, at=at, timeout_s=2 * CONNECT_S) for at in self.endpoints)
        )
        problems = [str(failure.error) for failure in answers if failure is not None]
        if len(problems) == len(answers):
            raise SandboxUnavailable(
                f"sandbox_fusion: expected an endpoint that answers, got none: {'; '.join(problems)}. "
                "Start one: agentenv sandbox serve"
            )

    async def aclose(self) -> None:
        """Close this loop's connections. Repeated calls have no effect; the sandbox may be opened again."""
        for endpoint in self.endpoints:
            await endpoint.client.close()

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
        channel: bool = False,
    ) -> ExecResult:
        """Execute a program and wait for its end, as `Sandbox.run` describes.

        A program that reaches a limit of the server below the requested one is INFRA.

        Raises:
            ConfigError: an argument is invalid, or an endpoint refuses the request or the token, or is another server.
        """
        limits = limits or self.limits
        content = wire.encode_program(
            program, stdin=stdin, files=files or {}, fetch=fetch, policy=policy, limits=limits, channel=channel
        )
        # A byte of an output may be an escape of five characters, and comes again in base64.
        outputs_kb = limits.stdout_kb + limits.stderr_kb + limits.channel_kb
        max_bytes = (1 + 2 * limits.fetch_mb) * _MIB + 8 * 1024 * outputs_kb
        attempts = 0

        async def attempt(number: int) -> ExecResult | AttemptFailure:
            nonlocal attempts
            attempts = number
            return await self.attempt(
                "/run", content, lambda answer: wire.read_result(_json_object(answer)), max_bytes=max_bytes,
                timeout_s=(1 + MAX_GIVEN_BACK) * limits.wall_s + self.patience_s,
            )  # fmt: skip

        async with self._slot():
            try:
                result = await self._policy.run(attempt)
            except InfraError as error:
                where = ", ".join(endpoint.url for endpoint in self.endpoints)
                detail = f"sandbox_fusion: {error} Servers: {where}."
                result = ExecResult(ExecStatus.INFRA, isolation=self.isolation, detail=detail)
        return replace(result, attempts=attempts)

    async def start(self, program: str | Sequence[str], **_: Any) -> NoReturn:
        """Raise: programs that need a caller run beside their server, by `grade` and `session`.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("sandbox_fusion: expected run(), got start(). Use grade() or session()")

    async def grade(
        self, code: str, suite: TestSuite, *, limits: ExecLimits, stop_on_fail: bool = False
    ) -> GradeResult:
        """Let a server grade a program, as `grading.grade` describes, which calls this.

        Raises:
            ConfigError: the suite has a checker, or a limit is above the server's.
            DataError: the tests of an AssertSuite never call the solution.
            InfraError: no server answers.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        request = wire.GradeRequest(code, suite, limits, stop_on_fail, seconds_left())
        content = await asyncio.to_thread(wire.encode_grade_request, request)  # tests may have megabytes
        tests_s = (len(suite.visible) + len(suite.hidden)) * 6 * (limits.wall_s + _TEST_S)

        def read(answer: HTTPAnswer) -> tuple[GradeResult | ConfigError | DataError, float]:
            found = _json_object(answer)
            if "error" in found:
                kind = DataError if found["error"] == "DataError" else ConfigError
                return kind(str(found.get("detail"))), 0.0
            return wire.read_grade(found.get("grade"), suite), float(found["spent_s"])

        async with self._slot():
            result, spent_s = await self._policy.run(
                lambda _: self.attempt(
                    "/grade", content, read, timeout_s=tests_s + self.patience_s, max_bytes=_MAX_GRADE_BYTES
                )
            )
        give_back(max(loop.time() - began - spent_s, 0.0))
        if isinstance(result, Exception):
            raise result
        return result

    def session(
        self, *, limits: ExecLimits | None = None, idle_s: float = 600.0, max_s: float = 3600.0
    ) -> FusionSession:
        """Return an interpreter that keeps its state between turns, for `async with`; see `InterpreterSession`."""
        return FusionSession(self, limits or self.limits, idle_s, max_s)

    async def open_session(self, body: Mapping[str, Any]) -> tuple[FusionEndpoint, str]:
        """Open a session and return its server and its name.

        Raises:
            InfraError: no server has opened it.
        """
        content = json.dumps(body).encode()

        async def attempt(_: int) -> tuple[FusionEndpoint, str] | AttemptFailure:
            endpoint = self._next()
            return await self.attempt(
                "/session", content, lambda answer: (endpoint, str(_json_object(answer)["session"])), at=endpoint
            )

        return await self._policy.run(attempt)

    # --- requests -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Hold one of the concurrent requests."""
        slots = self._slots.here()
        with waiting():
            await slots.acquire()
        try:
            yield
        finally:
            slots.release()

    def _next(self) -> FusionEndpoint:
        """Return the endpoint with the fewest requests, if possible one that has not just failed."""
        now, turn = asyncio.get_running_loop().time(), next(self._turn) % len(self.endpoints)
        in_turn = self.endpoints[turn:] + self.endpoints[:turn]
        return min(in_turn, key=lambda endpoint: (endpoint.avoided_until > now, endpoint.in_flight))

    async def attempt(
        self,
        path: str,
        content: bytes | None,
        read: Callable[[HTTPAnswer], T],
        *,
        at: FusionEndpoint | None = None,
        timeout_s: float = 120.0,
        max_bytes: int = 1 << 20,
    ) -> T | AttemptFailure:
        """Send one request, and return what `read` returns for the answer.

        Raises:
            ConfigError: the endpoint refuses the request.
        """
        endpoint = at or self._next()
        endpoint.in_flight += 1
        try:
            answer = await endpoint.client.attempt(path, content, timeout_s=timeout_s, max_bytes=max_bytes)
        finally:
            endpoint.in_flight -= 1
        if not isinstance(answer, AttemptFailure):
            endpoint.avoided_until = 0.0
            try:
                return await off_loop(len(answer.body), read, answer)
            except (wire.BadAnswer, KeyError, TypeError, ValueError) as error:
                return AttemptFailure(wire.BadAnswer(f"{endpoint.url}: {error}"), retryable=True)
        if answer.status in (401, 403):
            raise self._token_error(endpoint, str(answer.error))
        if answer.status == 404:
            raise ConfigError(f"{answer.error} Start `agentenv sandbox serve` of this version: no other server is used")
        if isinstance(answer.error, ConfigError):
            raise answer.error
        endpoint.avoided_until = asyncio.get_running_loop().time() + AVOID_S
        return replace(answer, retryable=True, retry_after_s=min(answer.retry_after_s, MAX_PAUSE_S))

    def _token_error(self, endpoint: FusionEndpoint, message: str) -> ConfigError:
        hint = f"Set {TOKEN_VARIABLE}"
        if self._has_token or endpoint.has_password:
            hint = f"The token differs from the server's {TOKEN_VARIABLE}. Compare them"
        return ConfigError(f"{message} {hint}")


def _json_object(answer: HTTPAnswer) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(found := parse_json(answer.body), dict):
            return found
    raise wire.BadAnswer(f"expected a JSON object, got {answer.body[:80]!r}")


class FusionSession:
    """An `InterpreterSession` on a server; created by `FusionSandbox.session`."""

    def __init__(self, sandbox: FusionSandbox, limits: ExecLimits, idle_s: float, max_s: float) -> None:
        self._sandbox, self._limits, self._idle_s, self._max_s = sandbox, limits, idle_s, max_s
        self._place: tuple[FusionEndpoint, str] | None = None
        self._over: TurnResult | None = None
        self._turn = asyncio.Lock()
        self._ends_at = self._idle_at = math.inf

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.aclose()

    async def open(self) -> None:
        """Start the interpreter.

        Raises:
            InfraError: the interpreter could not be started.
        """
        if self._place is None:
            body = {"limits": asdict(self._limits), "idle_s": self._idle_s, "max_s": self._max_s}
            self._place = await self._sandbox.open_session(body)
            now = asyncio.get_running_loop().time()
            self._ends_at, self._idle_at = now + self._max_s, now + self._idle_s

    @property
    def over(self) -> bool:
        """True once the session has ended; further turns return how it ended."""
        now = asyncio.get_running_loop().time()
        return self._over is not None or now >= min(self._ends_at, self._idle_at)

    async def run(self, code: str) -> TurnResult:
        """Execute code as the next turn and wait for its end.

        Raises:
            ConfigError: the session is not open.
            asyncio.CancelledError: after the session has been ended.
        """
        if self._place is None:
            raise ConfigError("Session.run: expected an open session, got a new one. Use `async with`")
        async with self._turn:
            if self._over is not None:
                return self._over
            self._idle_at = math.inf
            limits, (endpoint, name) = self._limits, self._place

            def read(answer: HTTPAnswer) -> TurnResult:
                found = _json_object(answer)
                own = {"status": ExecStatus(found["status"]), "isolation": Isolation.REMOTE}
                return TurnResult(**{**found, **own})

            try:
                turn = await self._sandbox.attempt(
                    f"/session/{name}", json.dumps({"code": code}).encode(), read, at=endpoint,
                    timeout_s=(1 + MAX_GIVEN_BACK) * limits.wall_s + self._sandbox.patience_s,
                    max_bytes=(8 << 20) + 6 * 1024 * (limits.stdout_kb + limits.stderr_kb),
                )  # fmt: skip
            except asyncio.CancelledError:  # the server ends a session whose client leaves
                self._over = TurnResult(ExecStatus.SIGNAL, ended=True, detail="session: closed")
                raise
            if isinstance(turn, AttemptFailure):
                turn = TurnResult(ExecStatus.INFRA, ended=True, isolation=Isolation.REMOTE, detail=str(turn.error))
            self._idle_at = asyncio.get_running_loop().time() + self._idle_s
            if turn.ended:
                self._over = replace(turn, stdout="", stderr="")
            return turn

    async def aclose(self) -> None:
        """End the session and its processes. Repeated calls have no effect."""
        if self._place is not None and self._over is None:
            endpoint, name = self._place
            await self._sandbox.attempt(f"/session/{name}/close", b"{}", lambda _: None, at=endpoint)
        self._over = self._over or TurnResult(ExecStatus.SIGNAL, ended=True, detail="session: closed")
