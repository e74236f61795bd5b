"""Location of this package on disk, and of the user's code that raised an error."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import sysconfig
import threading
import traceback
from itertools import dropwhile
from pathlib import Path
from types import FrameType

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder `agentenv`: stack frames of files in it belong to the library, not to the user."""
_READING_FRAMES = threading.Lock()


def python_env() -> dict[str, str]:
    """Return the environment for a Python process that imports this package, also from a checkout."""
    paths = [os.environ.get("PYTHONPATH", "")]
    if PACKAGE.parent.name not in ("site-packages", "dist-packages"):
        paths.append(str(PACKAGE.parent))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def place_of(error: BaseException) -> str:
    """Return file:line of the innermost frame outside agentenv and libraries; errors of actors carry their own."""
    if (place := getattr(error, "place", None)) is not None:
        return str(place)
    libraries = (str(PACKAGE), sys.base_prefix, sys.prefix, "<")
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(libraries)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


MAX_ERROR_CHARS = 4000
"""Bound of the texts of an error in a record."""
_STDLIB = sysconfig.get_path("stdlib")
_IMPORTLIB = ("<frozen importlib", "<frozen zipimport", str(importlib.__file__))


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error and its causes, each from the first frame outside agentenv and the library.

    It is empty if only agentenv's frames would remain. Errors of actors carry their own.
    """
    if (told := getattr(error, "traceback", None)) is not None:
        return str(told)
    found = traceback.TracebackException.from_exception(error, compact=True)
    chain: traceback.TracebackException | None = found
    has_frame = False
    while chain is not None:
        kept = list(dropwhile(_is_caller, chain.stack))
        chain.stack = traceback.StackSummary.from_list(kept)
        has_frame = has_frame or bool(kept)
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    if not has_frame:
        return ""
    return without_middle("".join(found.format()).rstrip("\n"))


def without_middle(text: str) -> str:
    """Return the text, without its middle if it is longer than MAX_ERROR_CHARS."""
    half = MAX_ERROR_CHARS // 2
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:half]}\n  …\n{text[-half:]}"


def _is_caller(frame: traceback.FrameSummary) -> bool:
    """Return True for a frame of agentenv or of the standard library, which called the code that failed."""
    name = frame.filename
    return name.startswith((str(PACKAGE), "<")) or (name.startswith(_STDLIB) and "-packages" not in name)


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by its identifier.

    CPython holds a lock meanwhile that other threads need to start, while they hold the interpreter's. A collection of
    garbage that runs Python would give them the interpreter's, and both would wait for ever.
    """
    with _READING_FRAMES:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if was_enabled:
                gc.enable()


def is_own_import(frame: FrameType | None) -> bool:
    """Return True if the stack ending at this frame runs an import statement of a file of this package."""
    is_import = False
    while frame is not None:
        file = frame.f_code.co_filename
        if is_import and file.startswith(str(PACKAGE)):
            return True
        is_import = file.startswith(_IMPORTLIB)
        frame = frame.f_back
    return False
