"""How much a process has computed, seen from another one: what tells a check that never ends from one that waits."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_PROC = Path("/proc")
_PS_TIMEOUT_S = 2.0


def process_cpu_s(pid: int) -> float | None:
    """Seconds of processor time, user and system, that a living process has used; None where nobody can tell.

    Linux says it in /proc (in steps of 10 ms, read in microseconds); elsewhere, as on macOS, `ps` is run.
    """
    try:
        # After the name, which may hold spaces and brackets, come fields 3 and on; 14 and 15 are utime and stime.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return _ask_ps(pid)


def _ask_ps(pid: int) -> float | None:
    command = ["ps", "-o", "time=", "-p", str(pid)]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_PS_TIMEOUT_S, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return ps_seconds(said)


def ps_seconds(said: str) -> float | None:
    """The seconds of a time as `ps` writes it, `[[days-]hours:]minutes:seconds[.hundredths]`, or None."""
    days, _, clock = said.strip().rpartition("-")
    try:
        seconds = 0.0
        for part in clock.split(":"):
            seconds = seconds * 60 + float(part)
        return seconds + int(days or 0) * 86400
    except ValueError:
        return None
