"""`agentenv view` in a process beside this one: for `--view` of `run` and `train`, and for `Run.view`."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from agentenv._util.paths import python_env
from agentenv.errors import InfraError

_CLOSE_S = 10.0


@dataclass(frozen=True)
class ViewProcess:
    """The page of a run, until it is closed or this process ends."""

    address: str
    """To open in a browser; it holds a token."""
    _process: subprocess.Popen[str]

    def __repr__(self) -> str:
        return f"ViewProcess({self.address})"

    @classmethod
    def start(cls, run: str | Path) -> Self:
        """Start to serve a run, and open its page in a browser if this machine has one.

        Raises:
            InfraError: it did not start; the message has the reason.
        """
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "agentenv.cli", "view", str(run), "--until_eof"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=python_env(),
                start_new_session=True,  # Ctrl-C belongs to the run
            )
            assert process.stdout is not None
            started = cls(process.stdout.readline().strip(), process)
            if not started.address:
                started.close()
                errors.seek(0)
                reason = " ".join(errors.read().split()).removeprefix("agentenv: error: ") or "an early end"
                raise InfraError(f"agentenv view: expected a page of {run}, got: {reason}")
        return started

    def close(self) -> None:
        """End the page. May be called again."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def wait(self) -> None:
        """Wait for Ctrl-C, or for the end of the page."""
        with contextlib.suppress(KeyboardInterrupt):
            self._process.wait()


class PageBeside:
    """The page of a run or training with --view; use it as a context manager. Without the flag it does nothing."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._page: ViewProcess | None = None

    async def open(self, run: Path, note: Callable[[str], None]) -> None:
        """Open the page of a run directory.

        Raises:
            InfraError: it did not start.
        """
        if self._wanted:
            self._page = await asyncio.to_thread(ViewProcess.start, run)
            note(f"page of the episodes: {self._page.address}")

    def wait(self) -> None:
        """Keep the page open until Ctrl-C."""
        if self._page is not None:
            sys.stderr.write("agentenv: the page stays open until Ctrl-C\n")
            self._page.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._page is not None:
            self._page.close()
