"""The executions of one grading: what they may use, what they said about the host, and what the program gave away."""

from __future__ import annotations

import asyncio
import marshal
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from importlib.util import MAGIC_NUMBER
from typing import Any

from agentenv.errors import InfraError
from agentenv.sandbox.grading._replayed import Replayed
from agentenv.sandbox.grading.results import GradeResult, Integrity, TestResult, Verdict
from agentenv.sandbox.types import ExecLimits, ExecResult, Execution, Isolation, Sandbox, Status

_MAX_SHOWN = 500
_SIDE_BY_SIDE = 8
_TIMEOUTS = {Status.CPU_TIMEOUT: "cpu_s", Status.WALL_TIMEOUT: "wall_s"}
_LIMITS = {Status.MEMORY: "memory_mb", Status.OUTPUT_LIMIT: "stdout_kb", Status.DISK_LIMIT: "disk_mb"}
_START_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Bench:
    """Where the programs of one grading run."""

    sandbox: Sandbox
    limits: ExecLimits
    tenant: str
    stop_on_fail: bool
    signals: set[str] = field(default_factory=set)
    not_loaded: bool = False
    load_error: str = ""
    infra_detail: str = ""
    results: list[ExecResult] = field(default_factory=list)

    async def run(
        self,
        program: str,
        *,
        stdin: bytes | str = b"",
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        limits: ExecLimits | None = None,
        channel: bool = False,
    ) -> ExecResult:
        """Execute a program; a sandbox that raises instead of answering has failed."""
        limits = limits or self.limits
        try:
            result = await self.sandbox.run(
                program, stdin=stdin, files=files, fetch=fetch, limits=limits, tenant=self.tenant, channel=channel
            )
        except InfraError as error:
            result = ExecResult(Status.INFRA, isolation=self.sandbox.isolation, detail=str(error))
        return self.noted(result)

    async def start(self, program: str, *, limits: ExecLimits, exact: bool = False) -> Execution:
        """Start a program that is talked to; `exact` where it says the same each time that it is told the same.

        Raises:
            InfraError: the sandbox failed, or had no room for it.
        """
        if not getattr(self.sandbox, "can_talk", True):
            return Replayed(self, program, limits, exact=exact)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                return await self.sandbox.start(program, limits=limits, tenant=self.tenant)
        except TimeoutError as error:
            raise InfraError(
                f"sandbox: expected room for an execution within {_START_TIMEOUT_S:g} s, got none. "
                "Tests by proxy need two at once: give it more slots, or less work."
            ) from error

    def noted(self, result: ExecResult) -> ExecResult:
        """Keep what an execution says beside its verdict."""
        self.results.append(result)
        if result.status is Status.POLICY:
            self.signals.add("forbidden_system_call")
        if result.status is Status.INFRA and not self.infra_detail:
            self.infra_detail = result.detail or "the sandbox failed, and said no more"
        return result

    def never_began(self, result: ExecResult) -> tuple[Verdict, str]:
        """The verdict where not even our own part of a program ran."""
        detail = (
            f"the grader's own program ended before the solution: {result.status}, {result.stderr[-500:].strip()!r}"
        )
        self.infra_detail = self.infra_detail or detail
        return Verdict.INFRA, detail

    def graded(self, tests: Iterable[TestResult], integrity: Integrity) -> GradeResult:
        """The grade that all of it makes."""
        levels = [result.isolation for result in self.results] or [self.sandbox.isolation]
        return GradeResult(
            tests=tuple(tests),
            integrity=integrity,
            tamper_signals=tuple(sorted(self.signals)),
            load_error=self.load_error,
            infra_detail=self.infra_detail,
            isolation=min(levels, key=lambda level: Isolation(level).strength),
            num_executions=len(self.results),
            wall_s=sum(result.wall_s for result in self.results),
            cpu_s=sum(result.cpu_s for result in self.results),
            queue_s=sum(result.queue_s for result in self.results),
        )


def verdict_of(result: ExecResult, limits: ExecLimits) -> tuple[Verdict, str]:
    """The verdict of a test that an execution ended without answering, and why."""
    if result.status is Status.INFRA:
        return Verdict.INFRA, result.detail or ""
    if (limit := _TIMEOUTS.get(result.status)) is not None:
        return Verdict.TIMEOUT, f"it did not finish within {limit} = {getattr(limits, limit):g} s"
    if (limit := _LIMITS.get(result.status)) is not None:
        return Verdict.LIMIT, f"it went beyond {limit} = {getattr(limits, limit)}"
    if result.status is Status.OK:
        return Verdict.MISSING, "the program ended without a result"
    if result.status is Status.POLICY:
        return Verdict.ERROR, "it made a system call that is forbidden"
    how = f"signal {result.signal}" if result.status is Status.SIGNAL else f"exit code {result.exit_code}"
    return Verdict.ERROR, f"the program ended with {how}"


async def side_by_side(work: Sequence[Coroutine[Any, Any, Any]], *, at_a_time: int = _SIDE_BY_SIDE) -> list[Any]:
    """All results, in order, of a few at a time; when one raises or the caller is cancelled, none goes on."""
    slots = asyncio.Semaphore(min(at_a_time, _SIDE_BY_SIDE))

    async def one(coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Its result, when there is a slot."""
        async with slots:
            return await coroutine

    tasks = [asyncio.ensure_future(one(coroutine)) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            if not task.cancelling():  # a second time would break into what the first one ends
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for coroutine in work:
            coroutine.close()


_LOADER = """\
import marshal, os, sys
{first}
if sys.modules["_frozen_importlib_external"].MAGIC_NUMBER == {magic!r}:
    program = marshal.loads(bytes.fromhex({compiled!r}))
else:
    program = compile({source!r}, "agentenv", "exec")
exec(program)
"""


@cache
def inside(*names: str, entry: str, first: str = "") -> str:
    """Modules of this package as one program, which cannot import them where it runs.

    Compiling it would take longer than all else that a short execution does, so an interpreter like ours gets it
    compiled.

    Args:
        names: their files, what the others need first.
        entry: the call that starts it.
        first: a line that runs before anything is imported.
    """
    texts = [(files(__package__) / name).read_text(encoding="utf-8") for name in names]
    lines = [line for text in texts for line in text.splitlines()]
    kept = [line for line in lines if not line.startswith(("from __future__", "from agentenv"))]
    source = "\n".join(["from __future__ import annotations", *kept, entry, ""])
    compiled = marshal.dumps(compile(source, "agentenv", "exec", dont_inherit=True)).hex()
    return _LOADER.format(first=first, magic=MAGIC_NUMBER, compiled=compiled, source=source)


def shown(value: Any) -> str:
    """A value as a model may read it: shortened, on one line."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"a {type(value).__name__} with an integer that is too long to print"
    return shortened(text)


def shortened(text: str, max_chars: int = _MAX_SHOWN) -> str:
    """The beginning and the end of a text; control characters and lone surrogates escaped."""
    if len(text) > max_chars:
        half = (max_chars - 30) // 2
        text = f"{text[:half]} … ({len(text) - 2 * half} more) … {text[-half:]}"
    return "".join(
        character if character in "\n\t" or character.isprintable() else repr(character)[1:-1] for character in text
    )
