"""The status of a program from its zygote's report. The host's fault needs a record; all else is a verdict."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Any

from agentenv.sandbox.types import ExecLimits, ExecStatus

_LIMIT_MESSAGES = {
    ExecStatus.MEMORY: re.compile(rb"^(MemoryError|.*Cannot allocate memory)", re.ASCII),
    ExecStatus.DISK_LIMIT: re.compile(rb"^OSError: \[Errno (27|28|122)\]"),
}
"""Last lines of stderr that show that a limit was reached."""
_NO_THREAD = re.compile(rb"^(RuntimeError: can't start new thread|BlockingIOError: \[Errno 11\])")
CROWDED = "host: expected threads for the program, its neighbors had them. Run as root, or allow namespaces"
"""Detail of a program that may have more threads where it runs alone. Its status is that of a program that ran so."""
_FULL = "host: expected free space for temporary files, the disk is full. Free some, or set TMPDIR"
_ENDS: Mapping[str, tuple[ExecStatus, str | None]] = {
    "wall": (ExecStatus.WALL_TIMEOUT, None),
    "memory": (ExecStatus.MEMORY, None),
    "disk": (ExecStatus.DISK_LIMIT, None),
    "cancelled": (ExecStatus.SIGNAL, "killed by the caller"),
    "killed": (
        ExecStatus.INFRA,
        "host: expected the program to end by itself, got a kill by the host, as when its memory runs out",
    ),
}
"""Status and detail by the cause of an end, where it needs no more than that."""
_NEARLY = 0.75
"""Share of the CPU limit from which an unexplained kill counts as the kernel's, whose CPU count runs ahead."""


def classify(report: Mapping[str, Any], limits: ExecLimits, last_line: bytes) -> tuple[ExecStatus, str | None]:
    """Return the status for a zygote's report, and a detail for the user."""
    cause = report["cause"]
    if cause in ("setup", "full"):
        return ExecStatus.INFRA, _FULL if cause == "full" else str(report.get("error"))
    if cause == "cpu" or report["cpu_s"] >= limits.cpu_s:
        return ExecStatus.CPU_TIMEOUT, None
    if cause in _ENDS:
        return _ENDS[cause]
    if cause == "processes":
        return ExecStatus.POLICY, f"more than {limits.num_processes} processes"
    if report["signal"] == signal.SIGKILL and report["cpu_s"] >= _NEARLY * limits.cpu_s:
        return ExecStatus.CPU_TIMEOUT, None
    if report["signal"]:
        statuses = {int(signal.SIGSYS): ExecStatus.POLICY, int(signal.SIGXFSZ): ExecStatus.DISK_LIMIT}
        return statuses.get(report["signal"], ExecStatus.SIGNAL), None
    detail = CROWDED if report.get("shared_user") and _NO_THREAD.match(last_line) else None
    if report["code"] == 0:
        return ExecStatus.OK, detail
    reached = (status for status, message in _LIMIT_MESSAGES.items() if message.match(last_line))
    status = next(reached, ExecStatus.NONZERO)
    if report.get("full") and status is ExecStatus.DISK_LIMIT:  # it was not when the program began
        return ExecStatus.INFRA, _FULL
    return status, detail
