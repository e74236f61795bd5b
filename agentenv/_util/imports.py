"""Tells imports of this package, which are heavy and happen once, from work of the user's code."""

from __future__ import annotations

import importlib
from types import FrameType

from agentenv._util.paths import PACKAGE

_IMPORTLIB = ("<frozen importlib", "<frozen zipimport", str(importlib.__file__))
_LIBRARY = str(PACKAGE)


def is_own_import(frame: FrameType | None) -> bool:
    """Return True if the stack ending at this frame runs an import statement of a file of this package."""
    is_import = False
    while frame is not None:
        file = frame.f_code.co_filename
        if is_import and file.startswith(_LIBRARY):
            return True
        is_import = file.startswith(_IMPORTLIB)
        frame = frame.f_back
    return False
