"""A sandbox over HTTP: SandboxFusion's API for the clients of verl, ROLL and SkyRL, and one for `FusionSandbox`.

    async with LocalSandbox() as sandbox, FusionServer(sandbox) as server:
        print(server.url)

Routes: `POST /run_code` and `GET /v1/ping` of SandboxFusion, `GET /health`; and for `FusionSandbox`, `POST /run`,
`/grade`, and `/session`, `/session/NAME` and `/session/NAME/close` of interactive interpreters. Every outcome of a
program is an answer of status 200. A failure of the sandbox has its own status, and is never a verdict.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Set
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from agentenv._util.calls import StepTimeout, bounded, seconds_left
from agentenv._util.http.access import AccessPolicy, RequestRefused, closing_headers, read_json_body, retry_after_header
from agentenv._util.http.responses import json_response, large_response, until_disconnect
from agentenv._util.http.server import Server
from agentenv._util.off_loop import size_of
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.sandbox.fusion import run_code
from agentenv.sandbox.fusion.wire import GradeRequest, read_grade_request, read_program, result_body
from agentenv.sandbox.grading.grader import grade
from agentenv.sandbox.grading.results import GradeResult
from agentenv.sandbox.local.queue import FairQueue
from agentenv.sandbox.local.sandbox import LocalSandbox
from agentenv.sandbox.local.session import InterpreterSession, TurnResult
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Policy, SandboxBusy

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

T = TypeVar("T")
_PYTEST = """\
import sys
import pytest
sys.dont_write_bytecode = True
sys.exit(pytest.main(["-p", "no:cacheprovider", {name!r}]))
"""


class QueueTimeout(InfraError):
    """A request waited too long for its turn."""


@dataclass(frozen=True, slots=True)
class FusionServeOptions:
    """The options of a server."""

    access: AccessPolicy = field(default_factory=AccessPolicy)
    port: int = 0
    """0 chooses a free port."""
    caps: ExecLimits = run_code.MAX_LIMITS
    """Largest limits of a program. If a program requests more and reaches one, it has no verdict."""
    languages: tuple[str, ...] = ("python", "bash")
    policy: Policy = "pure"
    """Policy of Python programs whose request names none; bash always has `proc`."""
    max_waiting: int = 1024
    """Size of the queue; further requests are answered with 429."""
    max_queue_s: float = 120.0
    """Longest wait in the queue; then a request is answered with 504, which verl's client retries."""
    max_body_bytes: int = 8 << 20
    grace_s: float = 10.0
    """Time that running programs have after the server is stopped."""


class FusionServer(Server):
    """A server of one sandbox, which it does not close; `async with` starts and stops the server."""

    def __init__(self, sandbox: LocalSandbox, options: FusionServeOptions | None = None) -> None:
        self.options = options or FusionServeOptions()
        super().__init__("sandbox serve", self.options.access, port=self.options.port, grace_s=self.options.grace_s)
        self.counts = {"served": 0, "failed": 0, "refused": 0}
        """Numbers of programs with a result, programs with an unknown outcome, and requests refused by a full queue."""
        self.running = 0
        self._sandbox = sandbox
        self._slots = sandbox.run_slots
        self._queue = FairQueue(self._slots, max_waiting=self.options.max_waiting)
        self._waiting: set[asyncio.Task[Any]] = set()
        self._sessions: dict[str, InterpreterSession] = {}
        self._mean_s = 0.1

    # --- starting and stopping ----------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop: waiting requests are answered with 503, running programs are ended after `grace_s`. Repeatable."""
        self._closing = True
        for task in self._waiting:
            task.cancel()
        await super().close()
        for session in self._sessions.values():
            await session.aclose()

    def _routes(self) -> list[Route]:
        from starlette.routing import Route

        return [
            Route("/run_code", self._run_code, methods=["POST"]),
            Route("/run", self._run, methods=["POST"]),
            Route("/grade", self._grade, methods=["POST"]),
            Route("/session", self._open_session, methods=["POST"]),
            Route("/session/{name}", self._take_turn, methods=["POST"]),
            Route("/session/{name}/close", self._close_session, methods=["POST"]),
            Route("/v1/ping", self._ping),
            Route("/health", self._health),
        ]

    # --- routes -------------------------------------------------------------------------------------------------------

    async def _ping(self, request: Request) -> Response:
        return json_response("pong")

    async def _health(self, request: Request) -> Response:
        level = {"isolation": str(self._sandbox.isolation), "languages": self.options.languages}
        queue = {"running": self.running, "waiting": self._queue.num_waiting}
        room = {"run_slots": self._slots, "max_waiting": self.options.max_waiting}
        return json_response({"status": "stopping" if self._closing else "ok", **level, **queue, **room, **self.counts})

    async def _run_code(self, request: Request) -> Response:
        asked = await self._read(request, lambda body: run_code.read_run_request(body, self.options.caps))
        if asked.language not in self.options.languages:
            languages = ", ".join(self.options.languages)
            problem = f"language {asked.language!r:.100} is not supported by this server: it offers {languages}"
            return json_response(run_code.sandbox_error(problem))
        files = dict(asked.files)
        how: dict[str, Any] = {"program": asked.code, "stdin": asked.stdin, "files": files, "fetch": asked.fetch}
        how |= {"policy": self.options.policy, "limits": asked.limits}
        if asked.language == "bash":
            name = f"main_{secrets.token_hex(6)}.sh"
            how |= {"program": ["bash", name], "policy": "proc"}
            files[name] = asked.code.encode(errors="replace")
        elif asked.language != "python":
            name = f"test_{secrets.token_hex(6)}.py"
            how["program"] = _PYTEST.format(name=name)
            files[name] = asked.code.encode(errors="replace")
        return await self._executed(request, how, asked.capped, run_code.run_answer)

    async def _run(self, request: Request) -> Response:
        how, capped = await self._read(request, lambda body: read_program(body, self.options.caps))
        return await self._executed(request, how, capped, result_body)

    async def _grade(self, request: Request) -> Response:
        asked = await self._read(request, lambda body: read_grade_request(body, self.options.caps))
        answer = await until_disconnect(request, self._judge(asked, _peer(request)), _stopping())
        if answer is None:
            return await self._client_left(request)
        return await large_response(size_of(answer), lambda: answer)

    async def _open_session(self, request: Request) -> Response:
        limits, seconds = await self._read(request, lambda body: run_code.read_session_request(body, self.options.caps))
        session = self._sandbox.session(limits=limits, **seconds)
        if await until_disconnect(request, session.__aenter__(), _stopping()) is None:
            return await self._client_left(request)
        for name in [name for name, each in self._sessions.items() if each.over]:
            await self._sessions.pop(name).aclose()
        self._sessions[name := secrets.token_hex(16)] = session
        return json_response({"session": name})

    async def _take_turn(self, request: Request) -> Response:
        code = await self._read(request, run_code.read_code)
        session = self._sessions.get(request.path_params["name"])
        if session is None:  # this server may have been started again
            lost = TurnResult(ExecStatus.INFRA, ended=True, detail="session: expected an open one, got an unknown name")
            return json_response(asdict(lost))
        work = session.run(code, slot=self._turn(_peer(request)))
        turn = await until_disconnect(request, work, _stopping())
        if turn is None:
            return await self._client_left(request)
        return await large_response(size_of((turn.stdout, turn.stderr)), lambda: asdict(turn))

    async def _close_session(self, request: Request) -> Response:
        session = self._sessions.pop(request.path_params["name"], None)
        if session is not None:
            await session.aclose()
        return json_response({})

    async def _read(self, request: Request, read: Callable[[Any], T]) -> T:
        """Return what `read` returns for the JSON of a request.

        Raises:
            RequestRefused: the body is invalid.
            SandboxBusy: the queue is full; the body is not read.
        """
        if self._queue.num_waiting >= self.options.max_waiting:
            raise SandboxBusy(
                f"queue: expected fewer than {self.options.max_waiting} waiting, got as many. Retry later"
            )
        return await read_json_body(request, self.options.max_body_bytes, read)

    # --- executing ----------------------------------------------------------------------------------------------------

    async def _executed(
        self, request: Request, how: dict[str, Any], capped: Set[str], body: Callable[[ExecResult], Any]
    ) -> Response:
        """Wait for a slot, call the sandbox's `run` and answer with what `body` makes of the result.

        Raises:
            SandboxBusy: the queue is full.
            QueueTimeout: no slot was free within `max_queue_s`.
        """

        async def executed() -> ExecResult:
            async with self._turn(_peer(request)):
                result = run_code.outcome(await self._sandbox.run(**how), how["limits"], capped)
            self.counts["failed" if result.status is ExecStatus.INFRA else "served"] += 1
            return result

        result = await until_disconnect(request, executed(), _stopping())
        if result is None:
            return await self._client_left(request)
        size = size_of((result.stdout, result.stderr, result.channel, result.files))
        return await large_response(size, lambda: body(result))

    async def _judge(self, asked: GradeRequest, peer: str) -> dict[str, Any]:
        """Wait for a slot, grade a program and return the answer, with the seconds that it took of the caller's limit.

        Raises:
            SandboxBusy: the queue is full.
            QueueTimeout: no slot was free within `max_queue_s`.
            InfraError: the host was too slow to end within the limit.
        """

        async def graded() -> tuple[GradeResult, float]:
            limits, stop = asked.limits, asked.stop_on_fail
            return await grade(self._sandbox, asked.code, asked.suite, limits=limits, stop_on_fail=stop), seconds_left()

        async with self._turn(peer):
            try:
                result, left_s = await bounded(graded, limit_s=asked.seconds_left)
            except (ConfigError, DataError) as error:
                return {"error": "DataError" if isinstance(error, DataError) else "ConfigError", "detail": str(error)}
            except StepTimeout as error:
                raise InfraError(f"grade: expected an end within {asked.seconds_left:g} s, got none. Retry.") from error
        self.counts["failed" if result.sandbox_failed else "served"] += 1
        return {"grade": asdict(result), "spent_s": asked.seconds_left - left_s}

    @asynccontextmanager
    async def _turn(self, peer: str) -> AsyncIterator[None]:
        """Hold a slot. Addresses take turns.

        Raises:
            SandboxBusy: the queue is full.
            QueueTimeout: no slot was free within `max_queue_s`.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        if self._closing:
            raise _stopping()
        self._waiting.add(task)
        try:
            async with asyncio.timeout(self.options.max_queue_s):
                await self._queue.acquire(peer)
        except TimeoutError:
            raise QueueTimeout(
                f"queue: expected a turn within {self.options.max_queue_s:g} s, got none. Send fewer requests at once"
            ) from None
        finally:
            self._waiting.discard(task)
        started = loop.time()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._queue.release()
        self._mean_s += 0.05 * (loop.time() - started - self._mean_s)

    # --- errors -------------------------------------------------------------------------------------------------------

    async def _failed(self, request: Request, error: Any) -> Response:
        """Answer an error: 4xx for the request, 429 and 504 for a full queue, 503 for the sandbox."""
        if isinstance(error, RequestRefused) and error.status < 500:
            return json_response(
                {"detail": str(error)}, error.status, closing_headers(request, error, self.options.max_body_bytes)
            )
        self.counts["refused"] += isinstance(error, SandboxBusy | QueueTimeout)
        status = 429 if isinstance(error, SandboxBusy) else 504 if isinstance(error, QueueTimeout) else 503
        wait_s = self._mean_s * (1 + self._queue.num_waiting) / self._slots
        return json_response({"detail": str(error)}, status, retry_after_header(wait_s))


def _peer(request: Request) -> str:
    return request.client.host if request.client else ""


def _stopping() -> RequestRefused:
    return RequestRefused("server: it is stopping. Retry.", 503)
