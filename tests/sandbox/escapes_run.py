"""Run the hostile programs on a sandbox and judge them; on its own, at one level, with a report as JSON.

    python -m tests.sandbox.escapes_run --level landlock --cases read_canary,fork_bomb

`Bare` runs them as most trainers do, as plain processes: there they have to succeed, else they test nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
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

from agentenv.sandbox.types import ExecLimits, ExecResult, Isolation, Policy, Sandbox, Status
from tests.sandbox.escapes import LIMITS, Case, all_cases, source
from tests.sandbox.escapes_world import World, judge, plant_environment

HUNG_S = 40.0
"""No result by then, with limits of seconds: it hangs."""


def _bare(program: str, stdin: str | bytes, folder: str, wall_s: float) -> tuple[int, bytes, bytes]:
    """Exit code and output of a process; into files, as a pipe may be held for longer than it lives."""
    inherited = os.open(folder, os.O_RDONLY)  # As trainers leave descriptors open.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode() if isinstance(stdin, str) else stdin)
        given.seek(0)
        command = [sys.executable, "-I", "-S", "-c", program]
        process = subprocess.Popen(command, cwd=folder, pass_fds=(inherited,), stdin=given, stdout=out, stderr=err)
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
"""Of one program, as each attempt may end it; no case has as many attempts."""


class Bare:
    """A plain process with a time limit, in a folder of its own and with the trainer's environment: no sandbox."""

    isolation = Isolation.NONE
    backend = "bare"

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
    ) -> ExecResult:
        """Execute Python source; what it is asked for beside the time limit is not kept."""
        limits = limits or LIMITS
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for name, data in (files or {}).items():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                (Path(folder) / name).write_bytes(data)
            started = time.monotonic()
            code, out, err = await asyncio.to_thread(_bare, str(program), stdin, folder, limits.wall_s)
            fetched = {}
            for path in (Path(folder, name) for name in fetch):
                with contextlib.suppress(OSError):
                    if path.is_file() and path.stat().st_size < 16 << 20:
                        fetched[str(path.relative_to(folder))] = path.read_bytes()
        status = Status.OK if code == 0 else Status.NONZERO if code > 0 else Status.SIGNAL
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


def descendants() -> dict[int, str]:
    """pid and name of every living process that descends from this one; a zombie does not live."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            name, _, rest = text.partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            if state not in "ZX":
                parents[int(entry)] = (int(parent), name)
    found: dict[int, str] = {}
    for pid, (_, name) in parents.items():
        at = pid
        while at in parents and at != os.getpid():
            at = parents[at][0]
        if at == os.getpid() and pid != at:
            found[pid] = name
    return found


def adopt_orphans(yes: bool) -> None:
    """Have processes whose parent ends become this one's children, so that no daemon gets out of `descendants`."""
    ctypes.CDLL(None, use_errno=True).prctl(36, int(yes), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def settled(before: Iterable[int], wait_s: float = 5.0) -> dict[int, str]:
    """Wait until no descendant is left that was not there before; those that are.

    Seen twice to be so: a process that forks and ends while /proc is read shows neither itself nor its child.
    """
    known = set(before)
    deadline = time.monotonic() + wait_s
    empty = 0
    while True:
        left = {pid: name for pid, name in descendants().items() if pid not in known}
        empty = 0 if left else empty + 1
        if empty == 2 or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


async def _attempts(sandbox: Sandbox, case: Case, world: World) -> list[ExecResult]:
    """Run it; where an attempt ends it by POLICY, again from the one after, so that each is made."""
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
                    tenant=case.name,
                ),
                HUNG_S,
            )
            if not results:
                world.facts["host_wall_s"] = time.monotonic() - started
            tried = result.stdout.count(world.nonce + " TRYING")
            if not tried and world.facts["skip"] and result.status is Status.OK:
                break  # The last attempt was the last that there is.
            results.append(result)
            if result.status is not Status.POLICY or not tried or case.must_end:
                break
            world.facts["skip"] += tried
    return results


async def run_case(sandbox: Sandbox, case: Case, planted: dict[str, str]) -> list[str]:
    """What is wrong with how the sandbox dealt with one case."""
    world = World(case)
    before = descendants() if case.census else {}
    try:
        try:
            results = await _attempts(sandbox, case, world)
        except TimeoutError:
            return [f"no result within {HUNG_S:.0f} s"]
        found = judge(case, world, results, planted)
        if case.census and (left := settled([*before])):
            found.append(f"processes are left: {left}")
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        return found
    finally:
        world.close()


async def run_matrix(
    sandbox: Sandbox, cases: Sequence[Case], planted: dict[str, str], *, jobs: int = 4
) -> dict[str, list[str]]:
    """What is wrong, by case; `[]` where it was contained. Several at once, but one at a time those with a census."""
    outcomes: dict[str, list[str]] = {}
    gate = asyncio.Semaphore(jobs)

    async def one(case: Case) -> None:
        async with gate:
            outcomes[case.name] = await run_case(sandbox, case, planted)

    await asyncio.gather(*(one(case) for case in cases if not case.census))
    adopt_orphans(True)
    try:
        for case in cases:
            if case.census:
                await one(case)
    finally:
        adopt_orphans(False)
    return outcomes


def holes(outcomes: Mapping[str, list[str]], cases: Sequence[Case], isolation: Isolation) -> dict[str, list[str]]:
    """What was not contained and is not a documented exception of the level."""
    excepted = {case.name for case in cases if isolation in case.excepted}
    return {name: found for name, found in outcomes.items() if found and name not in excepted}


def swapped(cases: Sequence[Case]) -> list[Case]:
    """The cases under the other policy, where that is no part of the case: another filter of system calls."""
    bound = {"fork_when_pure", "exec_when_pure"}
    return [replace(case, policy="proc") for case in cases if case.policy == "pure" and case.name not in bound]


async def _main(level: str, cases: list[Case], jobs: int) -> dict[str, Any]:
    from tests.sandbox.escapes_levels import open_sandbox

    planted = plant_environment()
    os.environ.update(planted)
    started = time.monotonic()
    async with open_sandbox(Isolation(level)) as sandbox:
        outcomes = await run_matrix(sandbox, cases, planted, jobs=jobs)
        isolation = sandbox.isolation
    found = holes(outcomes, cases, isolation)
    excepted = sorted(name for name, wrong in outcomes.items() if wrong and name not in found)
    return {
        "uid": os.getuid(),
        "isolation": isolation,
        "cases": len(cases),
        "holes": found,
        "excepted": excepted,
        "wall_s": round(time.monotonic() - started, 1),
    }


def main() -> int:
    """Exit code 0 when all is contained, 1 when not, 3 when the level is not to be had."""
    from agentenv.sandbox.types import SandboxUnavailable

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default="namespaces", choices=[level.value for level in Isolation])
    parser.add_argument("--cases", default="", help="names, with commas between; all of them else")
    parser.add_argument("--swap", action="store_true", help="under the other policy")
    parser.add_argument("--jobs", type=int, default=4)
    asked = parser.parse_args()
    names = set(filter(None, asked.cases.split(",")))
    cases = [case for case in all_cases() if not names or case.name in names]
    try:
        report = asyncio.run(_main(asked.level, swapped(cases) if asked.swap else cases, asked.jobs))
    except SandboxUnavailable as error:
        print(json.dumps({"unavailable": str(error)}))
        return 3
    print(json.dumps(report, indent=1))
    return 1 if report["holes"] else 0


if __name__ == "__main__":
    sys.exit(main())
