"""Run the hostile programs in a sandbox and judge them.

`Bare` runs them as plain processes, as most trainers do. They must succeed there, otherwise they test nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation, Sandbox
from tests.sandbox.escapes import beyond, controls, ends, files, processes, system
from tests.sandbox.escapes.cases import LIMITS, EscapeCase, source
from tests.sandbox.escapes.world import World, judge

HUNG_S = 120.0
"""Time without a result after which a program hangs; the limits are at most half a minute."""


def _run_process(program: str, stdin: str | bytes, folder: str, wall_s: float) -> tuple[int, bytes, bytes]:
    """Run a process and return its exit code and outputs. They go to files, as a child could keep a pipe open."""
    inherited = os.open(folder, os.O_RDONLY)  # trainers also leave descriptors open
    with tempfile.TemporaryFile() as stdin_file, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        stdin_file.write(stdin.encode() if isinstance(stdin, str) else stdin)
        stdin_file.seek(0)
        command = [sys.executable, "-I", "-S", "-c", program]
        process = subprocess.Popen(command, cwd=folder, pass_fds=(inherited,), stdin=stdin_file, stdout=out, stderr=err)
        os.close(inherited)
        try:
            process.wait(wall_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        out.seek(0)
        err.seek(0)
        return process.returncode, out.read(), err.read()


MAX_RUNS = 60
"""Maximum number of runs of one program, because each attempt may end it; no case has more attempts."""


class Bare:
    """No sandbox: a plain process in a temporary folder, with a time limit and the trainer's environment."""

    isolation = Isolation.NONE
    limits = LIMITS
    run_slots = 8

    async def run(
        self,
        program: str | Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        limits: ExecLimits | None = None,
        **_: Any,
    ) -> ExecResult:
        """Execute Python source with a time limit; the policy and the other limits are ignored."""
        limits = limits or self.limits
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for name, data in (files or {}).items():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                (Path(folder) / name).write_bytes(data)
            started = time.monotonic()
            code, out, err = await asyncio.to_thread(_run_process, str(program), stdin, folder, limits.wall_s)
            fetched = {}
            for path in (Path(folder, name) for name in fetch):
                with contextlib.suppress(OSError):
                    if path.is_file() and path.stat().st_size < 16 << 20:
                        fetched[str(path.relative_to(folder))] = path.read_bytes()
        status = ExecStatus.OK if code == 0 else ExecStatus.NONZERO if code > 0 else ExecStatus.SIGNAL
        return ExecResult(
            status=status,
            exit_code=code,
            signal=-code if code < 0 else None,
            stdout=out.decode("utf-8", "surrogateescape"),
            stderr=err.decode("utf-8", "surrogateescape"),
            stdout_bytes=len(out),
            files=fetched,
            wall_s=time.monotonic() - started,
        )


def live_processes() -> dict[int, tuple[int, str]]:
    """Return the parent and the name of every living process of this machine by its pid, zombies excluded."""
    found: dict[int, tuple[int, str]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/stat").read_text(errors="replace")
            except OSError:
                continue
            name, _, rest = text.partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            if state not in "ZX":
                found[int(entry)] = (int(parent), name)
    return found


def descendants(root: int = 0) -> dict[int, str]:
    """Return the pid and name of every living descendant of a process, or of this one."""
    everything, root = live_processes(), root or os.getpid()
    living: dict[int, str] = {}
    for pid, (_, name) in everything.items():
        ancestor = pid
        while ancestor in everything and ancestor != root:
            ancestor = everything[ancestor][0]
        if ancestor == root and pid != ancestor:
            living[pid] = name
    return living


def adopt_orphans(enabled: bool) -> None:
    """Make orphaned descendants children of this process or not, so that `descendants` finds daemons."""
    ctypes.CDLL(None, use_errno=True).prctl(36, int(enabled), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def wait_for_descendants(before: Iterable[int], wait_s: float = 5.0) -> dict[int, str]:
    """Wait until all descendants that are not in `before` have ended, and return those that are left.

    Checked twice: a process that forks and ends while /proc is read shows neither itself nor its child.
    """
    earlier = set(before)
    deadline = time.monotonic() + wait_s
    empty = 0
    while True:
        left = {pid: name for pid, name in descendants().items() if pid not in earlier}
        empty = 0 if left else empty + 1
        if empty == 2 or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


async def _attempts(sandbox: Sandbox | Bare, case: EscapeCase, world: World) -> list[ExecResult]:
    """Run the programs of a case. If an attempt ends one by POLICY, run it again from the next attempt on."""
    results: list[ExecResult] = []
    programs = [case.program, case.then] if case.then else [case.program]
    for program in programs:
        world.facts["skip"] = 0
        for _ in range(MAX_RUNS):
            started = time.monotonic()
            result = await asyncio.wait_for(
                sandbox.run(
                    source(program, world.facts),
                    stdin=case.stdin,
                    files=case.files,
                    fetch=case.fetch,
                    policy=case.policy,
                    limits=case.limits,
                ),
                HUNG_S,
            )
            if not results:
                world.facts["host_wall_s"] = time.monotonic() - started
            tried = result.stdout.count(world.nonce + " TRYING")
            if not tried and world.facts["skip"] and result.status is ExecStatus.OK:
                break  # no attempt is left
            results.append(result)
            if result.status is not ExecStatus.POLICY or not tried or case.must_end:
                break
            world.facts["skip"] += tried
    return results


async def run_case(sandbox: Sandbox | Bare, case: EscapeCase, planted: dict[str, str]) -> list[str]:
    """Run one case and return what the sandbox did not contain."""
    world = World(case)
    before = descendants() if case.census else {}
    if case.census:
        adopt_orphans(True)
    try:
        try:
            results = await _attempts(sandbox, case, world)
        except TimeoutError:
            return [f"no result within {HUNG_S:.0f} s"]
        problems = judge(case, world, results, planted)
        wait_s = 1.0 if sandbox.isolation is Isolation.NONE else 30.0  # without a sandbox they stay
        if case.census and (left := wait_for_descendants([*before], wait_s)):
            problems.append(f"processes are left: {left}")
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        return problems
    finally:
        world.close()
        if case.census:
            adopt_orphans(False)


def swap_policies(cases: Sequence[EscapeCase]) -> list[EscapeCase]:
    """Return the pure cases under policy `proc`, which has another system call filter, where a case permits it."""
    bound = {"fork_when_pure", "exec_when_pure", "hidden_memory_unmapped"}
    return [replace(case, policy="proc") for case in cases if case.policy == "pure" and case.name not in bound]


def all_cases() -> list[EscapeCase]:
    """Return all cases; their names are unique."""
    cases = [
        *files.FILES, *processes.PROCESSES, *system.SYSTEM, *beyond.BEYOND, *ends.ENDS, *ends.HIDING, *controls.CONTROLS,
    ]  # fmt: skip
    assert len({case.name for case in cases}) == len(cases)
    return cases
