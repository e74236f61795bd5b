"""A report on this machine's sandbox: the levels of isolation, the chosen level and its speed.

report = await doctor()
for line in report.lines():
    ...
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from agentenv.errors import ConfigError, InfraError
from agentenv.sandbox.local import levels
from agentenv.sandbox.local.plan import missing_memory
from agentenv.sandbox.local.sandbox import LocalSandbox
from agentenv.sandbox.types import ExecLimits, ExecStatus, Isolation

LEVELS = (Isolation.NAMESPACES, Isolation.LANDLOCK, Isolation.UID)


@dataclass(frozen=True, slots=True)
class LevelReport:
    """The test of one level of isolation."""

    isolation: Isolation
    works: bool
    layers: tuple[str, ...] = ()
    python: str = ""
    num_canaries: int = 0
    """Number of escape attempts that were made, all of which failed."""
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Speed:
    """Times of a program that does nothing."""

    num_runs: int
    p50_ms: float
    p95_ms: float
    per_s: float
    """Executions per second with all run slots busy."""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The report of `doctor`."""

    machine: dict[str, str]
    levels: tuple[LevelReport, ...]
    chosen: Isolation | None
    """The strongest level that works and is strong enough; None if no program may run."""
    speed: Speed | None

    @property
    def ok(self) -> bool:
        """True if programs can run."""
        return self.chosen is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        return {**asdict(self), "ok": self.ok}

    def lines(self) -> list[str]:
        """Return the report as lines for a terminal."""
        out = [f"{name}: {value}" for name, value in self.machine.items()]
        for level in self.levels:
            canaries = f"{level.num_canaries} canary programs held with {level.python}"
            summary = f"{', '.join(level.layers)}; {canaries}" if level.works else "no"
            out.append(f"level {level.isolation}: {summary}")
            out += [f"  {failure}" for failure in level.failures]
        out.append(f"chosen: {self.chosen or 'none: no program can run'}")
        if self.speed:
            speed = self.speed
            out.append(f"speed: p50 {speed.p50_ms:.1f} ms, p95 {speed.p95_ms:.1f} ms, {speed.per_s:.0f} executions/s")
        return out


async def doctor() -> DoctorReport:
    """Test each level, and time the one that a LocalSandbox chooses. Takes about a second."""
    reports = []
    for isolation in LEVELS:
        failures: list[str] = []
        level = await levels.attempt(isolation, (), failures)
        report = LevelReport(isolation, False)
        if level is not None:
            await level.zygote.close()
            report = LevelReport(isolation, True, level.layers, level.zygote.plan.python, level.num_canaries)
        reports.append(replace(report, failures=tuple(failures)))
    fit = [level for level in reports if level.works and level.isolation.strength >= Isolation.LANDLOCK.strength]
    chosen = fit[0].isolation if fit else None
    speed = None
    if chosen is not None:
        async with LocalSandbox(isolation=chosen) as sandbox:
            with contextlib.suppress(ConfigError, InfraError):  # a busy machine; the levels are known
                speed = await measure(sandbox)
    return DoctorReport(machine(), tuple(reports), chosen, speed)


async def measure(sandbox: LocalSandbox, *, program: str = "pass", seconds: float = 0.5) -> Speed:
    """Time a program: half of the seconds sequentially, half with all run slots busy.

    Raises:
        ConfigError: the program fails, for example because a package is missing.
        InfraError: the sandbox failed.
    """

    async def repeat() -> list[float]:
        times: list[float] = []
        end = time.perf_counter() + seconds / 2
        while not times or time.perf_counter() < end:
            started = time.perf_counter()
            result = await sandbox.run(program)
            times.append(time.perf_counter() - started)
            if result.status is not ExecStatus.OK:
                message = " ".join((result.detail or result.stderr[-300:]).split())
                error = InfraError if result.status is ExecStatus.INFRA else ConfigError
                raise error(
                    f"sandbox bench: expected {program!r} to succeed, got {result.status}: {message}. "
                    "See `sandbox doctor`."
                )
        return times

    times = sorted(await repeat())
    started = time.perf_counter()
    concurrent = await asyncio.gather(*(repeat() for _ in range(sandbox.run_slots)))
    per_s = sum(map(len, concurrent)) / (time.perf_counter() - started)
    p50_ms, p95_ms = (1e3 * times[int(len(times) * share)] for share in (0.5, 0.95))
    return Speed(len(times), p50_ms, p95_ms, per_s)


def machine() -> dict[str, str]:
    """Return the facts about this machine that matter for isolation."""
    marker_files = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
    containers = [name for path, name in marker_files.items() if os.path.exists(path)]
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        containers.append("kubernetes")
    memory = missing_memory(ExecLimits().memory_mb, len(os.sched_getaffinity(0)))
    return {
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "user": "root" if os.geteuid() == 0 else "plain user",
        "container": ", ".join(containers) or "none seen",
        "memory": memory or "enough for a program on each core",
    }
