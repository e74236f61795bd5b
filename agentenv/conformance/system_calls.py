"""What code does to the machine, by Python's audit events: files it opens, programs it starts, addresses it calls.

An audit hook cannot be taken away again, so one is put in at the first use; while nobody watches it does nothing.
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
"""Events by name, and what they mean."""
TEMP_EVENTS = {"tempfile.mkstemp": "the temporary file {0!r}", "tempfile.mkdtemp": "the temporary folder {0!r}"}


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that was done."""

    told: str
    subject: str
    """The path, address or program."""
    line: int
    """In the watched file; 0 where that was not on the stack."""


@dataclass
class Watched:
    """What is watched: events, by code that a file's own is on the stack of."""

    meanings: dict[str, str]
    file: str
    thread: int | None
    """None: all of them."""
    events: list[Event] = field(default_factory=list)

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        """Keep an event, unless an import does it."""
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


_WATCHED: list[Watched] = []
_IS_IN = threading.Event()


def _hook(event: str, args: tuple[Any, ...]) -> None:
    for watched in _WATCHED:
        if event in watched.meanings:
            watched.note(event, args)


@contextmanager
def watching(meanings: dict[str, str], file: str, *, this_thread: bool = False) -> Iterator[list[Event]]:
    """What is done in here, as it grows."""
    if not _IS_IN.is_set():
        _IS_IN.set()
        sys.addaudithook(_hook)
    watched = Watched(meanings, file, threading.get_ident() if this_thread else None)
    _WATCHED.append(watched)
    try:
        yield watched.events
    finally:
        _WATCHED.remove(watched)
