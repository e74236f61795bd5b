"""Writes to a disk that may be full, or lose its power."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a file atomically and flush it to the disk; on OSError the old file stays."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="ascii") as file:
            file.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_whole(fd: int, data: bytes | bytearray) -> None:
    """Write at the end of a file; on OSError nothing of it stays."""
    rest, size = memoryview(data), os.fstat(fd).st_size
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
        raise


def sync_directory(path: Path) -> None:
    """Flush the entries of a folder to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
