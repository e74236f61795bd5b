"""The child process of a check, which may crash or block for good, and what its parent learns about such an end.

Native code that never releases the interpreter's lock, as a pattern that backtracks, stops every thread of Python: only
a timer of `faulthandler` still runs, which writes the stacks and ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

_ARM_EVERY_S = 1.0
_GRACE_S = 4.0
"""Extra time for the limits that Python code holds."""
_MAX_RECORD = 4_096
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+)', re.MULTILINE)


@dataclass(frozen=True)
class ChildDeath:
    """The end of a child process that did not end by itself."""

    signal_name: str
    """Empty: a call held the interpreter for too long."""
    doing: dict[str, Any]
    """What the check was doing, by the names of the arguments of `CheckProgress.write`."""
    stacks: str
    """The stacks of all threads, as faulthandler writes them."""

    def line_in(self, file: str) -> int:
        """Return the innermost line of a file in the stacks; 0 if there is none."""
        return next((int(line) for path, line in _FRAME.findall(self.stacks) if path == file), 0)


class CheckProgress:
    """What a check is doing, in files that outlive its process."""

    def __init__(self) -> None:
        self._doing: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._stacks: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._facts: dict[str, Any] = {}
        self._parent = os.getpid()
        self._armed_s = 0.0

    def fork(self) -> int | ChildDeath | None:
        """Return None in a new child process, and in the parent the exit code or the death of the child."""
        pid = os.fork()
        if not pid:
            faulthandler.enable(self._stacks)
            return None
        status = None
        while status is None:
            with contextlib.suppress(KeyboardInterrupt):  # the child gets it too, and ends
                status = os.waitpid(pid, 0)[1]
        self._stacks.seek(0)
        stacks = self._stacks.read().decode(errors="replace")
        code = os.waitstatus_to_exitcode(status)
        if code >= 0 and not stacks.startswith("Timeout"):
            return code
        doing = os.pread(self._doing.fileno(), _MAX_RECORD, 0).rstrip(b" \0")
        return ChildDeath(signal.Signals(-code).name if code < 0 else "", json.loads(doing or b"{}"), stacks)

    def write(self, **facts: Any) -> None:
        """Record facts: `property`, and `where`, `file`, `line`, `action` and `limit_s` of the call in progress."""
        self._facts |= facts
        text = json.dumps(self._facts).encode()
        os.pwrite(self._doing.fileno(), text.ljust(_MAX_RECORD), 0)

    def alive(self, limit_s: float) -> None:
        """Say that Python code runs: it must be said again within the limit, or the process ends.

        The process also ends if its parent has ended.
        """
        if os.getppid() != self._parent:
            os._exit(1)
        now = time.monotonic()
        if now - self._armed_s > _ARM_EVERY_S:
            self._armed_s = now
            faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True, file=self._stacks)

    def pause(self) -> None:
        """End the limit until `alive` is called again."""
        self._armed_s = 0.0
        faulthandler.cancel_dump_traceback_later()


def in_child(work: Callable[[CheckProgress | None], int], on_death: Callable[[ChildDeath], int]) -> int:
    """Return the result of `work`, which runs in a child process; after its death, that of `on_death`.

    Without `fork`, or where standard output is another one, which a child could not write to, it runs in this process.
    """
    if sys.stdout is not sys.__stdout__ or not hasattr(os, "fork"):
        return work(None)
    progress = CheckProgress()
    end = progress.fork()
    if end is None:
        return work(progress)
    return on_death(end) if isinstance(end, ChildDeath) else end
