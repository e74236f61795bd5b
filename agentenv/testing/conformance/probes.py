"""What a check sees of running code: where a coroutine waits, its system calls, and `time.sleep` on an event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest.mock import patch

from agentenv.testing.odd_actions import heard_audit_events


def line_in(file: str, frame: FrameType | None) -> int:
    """Return the innermost line of a file in the stack of a frame; 0 if there is none."""
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return 0 if frame is None else frame.f_lineno


# --- waits ------------------------------------------------------------------------------------------------------------


def _do_nothing() -> None:
    pass


class InstrumentedCoroutine(Coroutine[Any, Any, Any]):
    """The same coroutine, with a callback before each stretch (`on_resume`), after it (`on_pause`) and at each wait.

    A stretch is the code between two waits, during which nothing else runs on the event loop. `on_wait` is called after
    `on_pause` if the coroutine waits, but not if it has ended.
    """

    def __init__(
        self,
        work: Coroutine[Any, Any, Any],
        *,
        on_resume: Callable[[], None] = _do_nothing,
        on_pause: Callable[[], None] = _do_nothing,
        on_wait: Callable[[], None] = _do_nothing,
    ) -> None:
        self.work = work
        self._on_resume = on_resume
        self._on_pause = on_pause
        self._on_wait = on_wait

    def stretch(self, go: Callable[..., Any], *args: Any) -> Any:
        """Continue with `go`, the method `send` or `throw` of the coroutine, until it waits."""
        self._on_resume()
        try:
            waited_for = go(*args)
        finally:
            self._on_pause()
        self._on_wait()
        return waited_for

    def send(self, value: Any) -> Any:
        """See `Coroutine.send`."""
        return self.stretch(self.work.send, value)

    def throw(self, *error: Any) -> Any:
        """See `Coroutine.throw`."""
        return self.stretch(self.work.throw, *error)

    def close(self) -> None:
        """See `Coroutine.close`."""
        self.work.close()

    def __await__(self) -> InstrumentedCoroutine:
        return self

    def __iter__(self) -> InstrumentedCoroutine:
        return self

    def __next__(self) -> Any:
        return self.send(None)


# --- system calls -----------------------------------------------------------------------------------------------------

IO_EVENTS = {
    "open": "opens the file {0!r}",
    "os.listdir": "lists the folder {0!r}",
    "os.mkdir": "makes the folder {0!r}",
    "socket.connect": "connects to {1!r}",
    "socket.getaddrinfo": "looks up {0!r}",
    "subprocess.Popen": "starts the program {0!r}",
    "os.system": "starts the program {0!r}",
    "os.fork": "forks",
}
"""Description of each audit event of Python, by name."""
PROCESS_EVENTS = {
    "os.chdir": "changes the working directory to {0!r}",
    "os.putenv": "sets the variable {0!r} to {1!r}",
    "os.unsetenv": "deletes the variable {0!r}",
}
FILE_EVENTS = {"open": "{1}", "sqlite3.connect": "sqlite"}
"""The description of an opened file is its mode."""
TEMP_EVENTS = {"tempfile.mkstemp": "the temporary file {0!r}", "tempfile.mkdtemp": "the temporary folder {0!r}"}


@dataclass(frozen=True, slots=True)
class Event:
    """One recorded audit event."""

    description: str
    subject: str
    """The path, address or program."""
    file: str
    """The innermost of the watched files on the stack; empty if there was none."""
    line: int
    """Its line."""


@contextmanager
def record_events(
    meanings: Mapping[str, str], files: Collection[str], *, this_thread: bool = False
) -> Iterator[list[Event]]:
    """Return a list to which the events within the block are added, except for those that an import causes."""
    events, thread = list[Event](), threading.get_ident()

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event not in meanings or (this_thread and threading.get_ident() != thread):
            return
        frame: FrameType | None = sys._getframe(2)
        file, line = "", 0
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith("<frozen importlib"):
                return
            if not file and name in files:
                file, line = name, frame.f_lineno
            frame = frame.f_back
        subject = str(args[1 if event == "socket.connect" else 0]) if args else ""
        events.append(Event(meanings[event].format(*args), subject, file, line))

    with heard_audit_events(note):
        yield events


# --- sleeps -----------------------------------------------------------------------------------------------------------

BLOCKS_S = 0.05
"""Maximum time that a call may run without awaiting."""
_SLEEP = time.sleep
_RECORDERS: list[Callable[[float], bool]] = []


def _sleep(seconds: float) -> None:
    """Sleep as `time.sleep` does, but not for long in a thread whose event loop runs while there is a recorder.

    Modules that import `sleep` by its name keep this function.
    """
    is_blocking = seconds > BLOCKS_S and asyncio._get_running_loop() is not None
    _SLEEP(0.0 if is_blocking and _RECORDERS and _RECORDERS[-1](seconds) else seconds)


@contextmanager
def shortened_sleeps(record: Callable[[float], bool]) -> Iterator[None]:
    """Pass the seconds of each `time.sleep` on an event loop to `record`, and leave it out if that returns True.

    A check need not wait for a plain fault.
    """
    _RECORDERS.append(record)
    try:
        with patch.object(time, "sleep", _sleep):
            yield
    finally:
        _RECORDERS.remove(record)
