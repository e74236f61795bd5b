"""What a zygote's report of a program means: by CPU, so that a host that is overloaded or full never makes it wrong."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Any

from agentenv.sandbox.types import ExecLimits, Status

_SPENT = {
    Status.MEMORY: re.compile(rb"^(MemoryError|.*Cannot allocate memory)", re.ASCII),
    Status.DISK_LIMIT: re.compile(rb"^OSError: \[Errno (27|28|122)\]"),
}
"""Last lines of stderr that tell of a limit."""
_NEARLY = 0.75
"""Share of the CPU limit from which a kill that nobody asked for is the kernel's by its count, which runs ahead."""


def classify(told: Mapping[str, Any], limits: ExecLimits, last_line: bytes) -> tuple[Status, str | None]:
    """What a zygote's report means, and a word to it."""
    cause = told["cause"]
    if cause == "setup":
        return Status.INFRA, str(told.get("error"))
    if cause == "cpu" or told["cpu_s"] >= limits.cpu_s:
        return Status.CPU_TIMEOUT, None
    if cause == "wall":
        return _wall_verdict(told, limits)
    if cause == "cancelled":
        return Status.SIGNAL, "killed by the caller"
    if cause == "killed":
        return Status.INFRA, "host: expected the program to end by itself, it was killed, as where memory runs out"
    if cause == "processes":
        return Status.POLICY, f"more than {limits.num_processes} processes"
    if cause in ("memory", "disk"):
        return {"memory": Status.MEMORY, "disk": Status.DISK_LIMIT}[cause], None
    if told.get("full") and (told["code"] or told["signal"]):
        return Status.INFRA, "host: expected room on the disk of temporary files, it is full. Make room, or set TMPDIR"
    if told["signal"] == signal.SIGKILL and told["cpu_s"] >= _NEARLY * limits.cpu_s:
        return Status.CPU_TIMEOUT, None
    return _end_verdict(told["code"], told["signal"], last_line)


def _wall_verdict(told: Mapping[str, Any], limits: ExecLimits) -> tuple[Status, str | None]:
    """A timeout, unless the host kept it from running.

    That it kept itself waiting does not count: time of its other threads and processes is taken off; and where it had
    several processes, whose time can be hidden, nothing is excused.
    """
    by_itself = max(told["cpu_s"] - told["leader_cpu_s"], 0.0)
    kept_waiting = told["delay_s"] - by_itself
    if not told.get("crowded") and told["cpu_s"] < 0.5 * limits.cpu_s and kept_waiting > 0.2 * told["wall_s"]:
        waited = f"{kept_waiting:.1f} of {told['wall_s']:.1f} s"
        return Status.INFRA, f"host: expected a free core, the program waited for one for {waited}. Run fewer at a time"
    return Status.WALL_TIMEOUT, None


def _end_verdict(code: int, number: int, last_line: bytes) -> tuple[Status, str | None]:
    if number:
        status = {int(signal.SIGSYS): Status.POLICY, int(signal.SIGXFSZ): Status.DISK_LIMIT}.get(number)
        return status or Status.SIGNAL, None
    if code == 0:
        return Status.OK, None
    return next((status for status, said in _SPENT.items() if said.match(last_line)), Status.NONZERO), None
