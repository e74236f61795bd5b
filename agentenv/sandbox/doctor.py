"""A report on this machine's sandbox: what was probed, the level that is chosen, that it holds, and how fast it is.

report = await doctor()
for line in report.lines():
    ...
"""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentenv.sandbox import _levels, _plan
from agentenv.sandbox._plan import Plan
from agentenv.sandbox.local import LocalSandbox
from agentenv.sandbox.probe import Outcome, Probe, run_probes
from agentenv.sandbox.types import Isolation, Status

NUM_TIMED = 50
LEVELS = (Isolation.NAMESPACES, Isolation.LANDLOCK, Isolation.UID)


@dataclass(frozen=True, slots=True)
class LevelReport:
    """One level, tried."""

    isolation: Isolation
    works: bool
    layers: tuple[str, ...] = ()
    python: str = ""
    num_canaries: int = 0
    """Attempts to get out that were made, and failed."""
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """One case of the escape matrix."""

    name: str
    held: bool
    detail: str = ""


Matrix = Callable[[LocalSandbox], Awaitable[Sequence[Check]]]
"""The whole escape matrix, run in a sandbox."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a program that does nothing."""

    num_runs: int
    p50_ms: float
    p95_ms: float
    per_s: float
    """With as many at a time as there are run slots."""


@dataclass(frozen=True, slots=True)
class Report:
    """What `doctor` found."""

    machine: dict[str, str]
    probes: tuple[Probe, ...]
    levels: tuple[LevelReport, ...]
    chosen: Isolation | None
    """The strongest that works and is strong enough; None when nothing may run."""
    speed: Speed | None
    deep: tuple[Check, ...] | None = None
    """None where the matrix was not asked for."""

    @property
    def ok(self) -> bool:
        """Whether programs can run, and everything that was checked holds."""
        return self.chosen is not None and all(check.held for check in self.deep or ())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ok": self.ok}

    def lines(self) -> list[str]:
        """For a terminal."""
        out = [f"{name}: {value}" for name, value in self.machine.items()]
        out += [f"probe {probe}" for probe in self.probes]
        for level in self.levels:
            canaries = f"{level.num_canaries} canary programs held with {level.python}"
            said = f"{', '.join(level.layers)}; {canaries}" if level.works else "no"
            out.append(f"level {level.isolation}: {said}")
            out += [f"  {failure}" for failure in level.failures]
        out.append(f"chosen: {self.chosen or 'none: nothing will run'}")
        if self.speed:
            speed = self.speed
            out.append(f"speed: p50 {speed.p50_ms:.1f} ms, p95 {speed.p95_ms:.1f} ms, {speed.per_s:.0f} executions/s")
        if self.deep is not None:
            held = sum(check.held for check in self.deep)
            out.append(f"escape matrix: {held} of {len(self.deep)} held")
            out += [f"  NOT HELD {check.name}: {check.detail}" for check in self.deep if not check.held]
        return out


async def doctor(
    *, min_isolation: Isolation = Isolation.LANDLOCK, deep: bool = False, matrix: Matrix | None = None
) -> Report:
    """Probe this machine, try each level, and time the one that is chosen. About a second.

    Args:
        min_isolation: as LocalSandbox has it.
        deep: run the escape matrix too.
        matrix: the escape matrix; without one `deep` says that there is none.
    """
    plan = Plan(Isolation.NAMESPACES, _plan.user_range(), _plan.interpreters()[0])
    probes = await asyncio.to_thread(run_probes, plan)
    levels = tuple([await _try_level(isolation) for isolation in LEVELS])
    fit = [level for level in levels if level.works and level.isolation.strength >= min_isolation.strength]
    chosen = fit[0].isolation if fit else None
    speed, checks = None, None
    if chosen is not None:
        async with LocalSandbox(isolation=chosen) as sandbox:
            speed = await measure(sandbox)
            if deep:
                checks = tuple(await matrix(sandbox)) if matrix else (Check("matrix", False, "none was given"),)
    return Report(machine(), probes, levels, chosen, speed, checks)


async def _try_level(isolation: Isolation) -> LevelReport:
    failures: list[str] = []
    level = await _levels.attempt(isolation, (), failures)
    if level is None:
        return LevelReport(isolation, False, failures=tuple(failures))
    await level.zygote.close()
    return LevelReport(isolation, True, level.layers, level.plan.python, level.num_canaries, tuple(failures))


async def measure(sandbox: LocalSandbox, *, num_runs: int = NUM_TIMED) -> Speed:
    """Time a program that does nothing, one after the other and then many at a time."""
    times = []
    for _ in range(num_runs):
        started = time.perf_counter()
        result = await sandbox.run("pass")
        if result.status is Status.OK:
            times.append((time.perf_counter() - started) * 1e3)
    times.sort()
    started = time.perf_counter()
    await asyncio.gather(*(sandbox.run("pass") for _ in range(num_runs)))
    per_s = num_runs / (time.perf_counter() - started)
    if not times:
        return Speed(0, float("nan"), float("nan"), 0.0)
    return Speed(len(times), times[len(times) // 2], times[int(len(times) * 0.95)], per_s)


def machine() -> dict[str, str]:
    """What one asks first when something is odd."""
    return {
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "user": "root" if os.geteuid() == 0 else "plain user",
        "container": _container(),
        "python": platform.python_version(),
        "cores": str(len(os.sched_getaffinity(0))),
        "open files": str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        "user namespaces": _read("/proc/sys/user/max_user_namespaces"),
        "processes": _read("/proc/sys/kernel/pid_max"),
    }


def _container() -> str:
    marks = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
    found = [name for path, name in marks.items() if os.path.exists(path)]
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        found.append("kubernetes")
    return ", ".join(found) or "none seen"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        return f"unknown ({error.strerror})"


__all__ = ["Check", "LevelReport", "Matrix", "Outcome", "Probe", "Report", "Speed", "doctor", "measure"]
