"""Records system calls of code by Python's audit events: opened files, started programs, connections.

An audit hook cannot be removed, so one is added at the first use; it does nothing unless a recorder is active.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

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
"""Description of each event, by name."""
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
    line: int
    """Line of the watched file; 0 if the file was not on the stack."""


@dataclass
class EventRecorder:
    """Records the events of one `record_events` block, with the line of a file if it is on the stack."""

    meanings: dict[str, str]
    file: str
    thread: int | None
    """None: all threads."""
    events: list[Event] = field(default_factory=list)

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        """Record an event, unless an import causes it."""
        if self.thread is not None and threading.get_ident() != self.thread:
            return
        line, frame = 0, sys._getframe(2)
        at: FrameType | None = frame
        while at is not None:
            if at.f_code.co_filename.startswith("<frozen importlib"):
                return
            if not line and at.f_code.co_filename == self.file:
                line = at.f_lineno
            at = at.f_back
        subject = str(args[1 if event == "socket.connect" else 0]) if args else ""
        self.events.append(Event(self.meanings[event].format(*args), subject, line))


_RECORDERS: list[EventRecorder] = []
_HOOK_ADDED = threading.Event()


def _hook(event: str, args: tuple[Any, ...]) -> None:
    for recorder in _RECORDERS:
        if event in recorder.meanings:
            recorder.note(event, args)


@contextmanager
def record_events(meanings: dict[str, str], file: str, *, this_thread: bool = False) -> Iterator[list[Event]]:
    """Return a list to which the events within the block are added."""
    if not _HOOK_ADDED.is_set():
        _HOOK_ADDED.set()
        sys.addaudithook(_hook)
    recorder = EventRecorder(meanings, file, threading.get_ident() if this_thread else None)
    _RECORDERS.append(recorder)
    try:
        yield recorder.events
    finally:
        _RECORDERS.remove(recorder)
