"""A sandbox over HTTP in SandboxFusion's form, for its clients: those of verl, ROLL and SkyRL, and `FusionSandbox`.

    async with LocalSandbox() as sandbox, FusionServer(sandbox) as server:
        print(server.url)

Routes: `POST /run_code` and `/submit`, `GET /v1/ping` and `/health`. What a program does is an answer of status 200; a
failure of the sandbox has the status `SandboxError` in `/run_code` and 503 in `/submit`, and is never a verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from agentenv.errors import InfraError
from agentenv.http_serving import json_response, unless_gone
from agentenv.http_serving.doors import Doors, Refused, cut_off, read_json, retry_after
from agentenv.http_serving.server import Server
from agentenv.sandbox import _fusion_answers as answers
from agentenv.sandbox._fusion_asks import ASK_HEADER, TOLD_HEADER
from agentenv.sandbox._fusion_submit import Case, SubmitRequest, read_submit_request, same_output, submit_answer
from agentenv.sandbox.grading._bench import side_by_side
from agentenv.sandbox.local import has_room
from agentenv.sandbox.queue import FairQueue
from agentenv.sandbox.types import ExecLimits, ExecResult, Policy, Sandbox, SandboxBusy, Status

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

_PYTEST = """\
import sys
import pytest
sys.dont_write_bytecode = True
sys.exit(pytest.main(["-p", "no:cacheprovider", {name!r}]))
"""


class QueueTimeout(InfraError):
    """A request waited too long for its turn."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where a server listens, who may ask, and what it gives."""

    doors: Doors = field(default_factory=Doors)
    port: int = 0
    """0: a free one."""
    caps: ExecLimits = answers.MAX_LIMITS
    """What a program gets at most. One that ends at such a limit, having asked for more, has no verdict."""
    languages: tuple[str, ...] = ("python", "bash")
    policy: Policy = "pure"
    """Of Python programs whose request names none; bash is always `proc`."""
    max_waiting: int = 1024
    """Programs in the queue; one more is answered 429."""
    max_queue_s: float = 120.0
    """Longest wait there, after which a request is answered 504: verl's client tries that one again."""
    max_body_bytes: int = 8 << 20
    grace_s: float = 10.0
    """For the programs that run, when the server is stopped."""


class FusionServer(Server):
    """A server of one sandbox, which stays its owner's; `async with` starts and stops it."""

    def __init__(self, sandbox: Sandbox, options: ServeOptions | None = None) -> None:
        self.options = options or ServeOptions()
        super().__init__("sandbox serve", self.options.doors, port=self.options.port, grace_s=self.options.grace_s)
        self.counts = {"served": 0, "failed": 0, "refused": 0}
        """Programs that ran, those of which nothing is known, and requests that there was no room for."""
        self.running = 0
        self._sandbox = sandbox
        self._slots: int = getattr(sandbox, "run_slots", 0) or os.cpu_count() or 1
        self._queue = FairQueue(self._slots, max_waiting=self.options.max_waiting)
        self._waiting: set[asyncio.Task[Any]] = set()
        self._mean_s = 0.1

    # --- starting and stopping ----------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop: who waits is answered 503, what runs has `grace_s` and is then ended. May be called again."""
        self._closing = True
        for task in self._waiting:
            task.cancel()
        await super().close()

    def _routes(self) -> list[Route]:
        from starlette.routing import Route

        return [
            Route("/run_code", self._run_code, methods=["POST"]),
            Route("/submit", self._submit, methods=["POST"]),
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
        body = await self._body(request)
        asked = answers.read_run_request(body, request.headers.get(ASK_HEADER, ""), self.options.caps)
        asked = replace(asked, tenant=asked.tenant or _peer(request))
        if problem := self._not_offered(asked):
            return json_response(answers.sandbox_error(problem))
        result = await unless_gone(request, self._execute(asked), _stopping())
        if result is None:
            return await self._gone(request)
        return json_response(answers.run_answer(result, asked), headers={TOLD_HEADER: answers.told(result)})

    async def _submit(self, request: Request) -> Response:
        asked = read_submit_request(await self._body(request))
        run = answers.read_run_request(asked.run, request.headers.get(ASK_HEADER, ""), self.options.caps)
        run = replace(run, tenant=run.tenant or _peer(request))
        outcomes = await unless_gone(request, self._judged(asked, run), _stopping())
        if outcomes is None:
            return await self._gone(request)
        return json_response(submit_answer(asked, outcomes))

    async def _body(self, request: Request) -> Any:
        """The JSON of a request.

        Raises:
            Refused: it is none.
            SandboxBusy: there is no room for another program, so its body is not read.
        """
        if self._queue.num_waiting >= self.options.max_waiting:
            raise SandboxBusy(f"queue: expected fewer than {self.options.max_waiting} waiting, got as many. Try later")
        return await read_json(request, self.options.max_body_bytes)

    def _not_offered(self, asked: answers.RunRequest) -> str:
        if asked.language not in self.options.languages:
            offered = ", ".join(self.options.languages)
            return f"language {asked.language!r} is not supported by this server: it offers {offered}"
        if not has_room(asked.files, asked.limits):
            raise Refused(f"files: expected what fits into {asked.limits.disk_mb} MiB, got more. Send less.", 413)
        return ""

    # --- executing ----------------------------------------------------------------------------------------------------

    async def _judged(self, asked: SubmitRequest, run: answers.RunRequest) -> list[tuple[bool, Mapping[str, Any]]]:
        """What became of each case, up to the first that failed where not all are wanted.

        Raises:
            InfraError: nothing is known of one.
        """
        outcomes: list[tuple[bool, Mapping[str, Any]]] = []
        for start in range(0, len(asked.cases), self._slots):
            cases = asked.cases[start : start + self._slots]
            outcomes += await side_by_side([self._case(case, run) for case in cases])
            failed = next((index for index, (passed, _) in enumerate(outcomes) if not passed), None)
            if failed is not None and not asked.run_all_cases:
                return outcomes[: failed + 1]
        return outcomes

    async def _case(self, case: Case, run: answers.RunRequest) -> tuple[bool, Mapping[str, Any]]:
        # What is much longer than what is expected is wrong, and not to be sent back whole for each of many cases.
        kept_kb = min(run.limits.stdout_kb, 64 + len(case.stdout) // 256)
        run = replace(run, stdin=case.stdin, limits=replace(run.limits, stdout_kb=kept_kb, stderr_kb=16))
        result = await self._execute(run)
        if problem := answers.unknown(result, run):
            raise InfraError(f"sandbox: {problem}")
        told = answers.run_answer(result, run)
        passed = result.status is Status.OK and not result.stdout_truncated
        return passed and same_output(case.stdout, told["run_result"]["stdout"]), told

    async def _execute(self, asked: answers.RunRequest) -> ExecResult:
        """The result, when it is its turn.

        Raises:
            SandboxBusy: the queue is full.
            QueueTimeout: it was not its turn for too long.
        """
        program, files, policy = self._program(asked)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with self._turn(asked.tenant):
            waited = loop.time() - begun
            result = await self._sandbox.run(
                program, stdin=asked.stdin, files=files, fetch=asked.fetch, policy=policy, limits=asked.limits,
                tenant=asked.tenant,
            )  # fmt: skip
        self.counts["failed" if result.status is Status.INFRA else "served"] += 1
        self._mean_s += 0.05 * (loop.time() - begun - waited - self._mean_s)
        return replace(result, queue_s=result.queue_s + waited)

    @contextlib.asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        """A slot of the queue."""
        task = asyncio.current_task()
        assert task is not None
        if self._closing:
            raise _stopping()
        self._waiting.add(task)
        try:
            async with asyncio.timeout(self.options.max_queue_s):
                await self._queue.acquire(tenant)
        except TimeoutError:
            raise QueueTimeout(
                f"queue: expected a turn within {self.options.max_queue_s:g} s, got none. Ask less at a time"
            ) from None
        finally:
            self._waiting.discard(task)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._queue.release()

    def _program(self, asked: answers.RunRequest) -> tuple[str | list[str], dict[str, bytes], Policy]:
        """What is executed, beside which files, and what it may do."""
        files = dict(asked.files)
        if asked.language == "python":
            return asked.code, files, asked.policy or self.options.policy
        name = secrets.token_hex(6)
        name = f"main_{name}.sh" if asked.language == "bash" else f"test_{name}.py"
        files[name] = asked.code.encode(errors="replace")
        if asked.language == "bash":
            return ["bash", name], files, "proc"
        return _PYTEST.format(name=name), files, asked.policy or self.options.policy

    # --- errors -------------------------------------------------------------------------------------------------------

    async def _failed(self, request: Request, error: Any) -> Response:
        """Errors by whose they are: the request's 4xx, a lack of room 429 and 504, the sandbox's 503."""
        if isinstance(error, Refused) and error.status < 500:
            return json_response(
                {"detail": str(error)}, error.status, cut_off(request, error, self.options.max_body_bytes)
            )
        self.counts["refused"] += isinstance(error, SandboxBusy | QueueTimeout)
        status = 429 if isinstance(error, SandboxBusy) else 504 if isinstance(error, QueueTimeout) else 503
        wait_s = self._mean_s * (1 + self._queue.num_waiting) / self._slots
        return json_response({"detail": str(error)}, status, retry_after(wait_s))


def _peer(request: Request) -> str:
    return request.client.host if request.client else ""


def _stopping() -> Refused:
    return Refused("server: it is being stopped. Try again.", 503)
