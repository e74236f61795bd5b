"""Location of this package on disk, and of the user's code that raised an error."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder `agentenv`: stack frames of files in it belong to the library, not to the user."""


def place_of(error: BaseException) -> str:
    """Return file:line of the innermost frame outside agentenv and libraries; errors of actors carry their own."""
    if (place := getattr(error, "place", None)) is not None:
        return str(place)
    libraries = (str(PACKAGE), sys.base_prefix, sys.prefix, "<")
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(libraries)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""
