"""Writes to a disk that may be full, or lose its power, and files that others may have replaced."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from agentenv.errors import DataError


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a file atomically and flush it to the disk; on OSError the old file stays."""
    with replaced(path) as temporary, temporary.open("w", encoding="ascii") as file:
        file.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a path whose file takes the place of `path` at the end of the block, unless it fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading, which another process may have replaced by a link or a pipe.

    Raises:
        OSError: it cannot be read, or is a link.
        DataError: it is a folder or a pipe.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DataError(f"{path}: expected a file, got a folder or a pipe. Remove it.")
    return os.fdopen(fd, "rb")


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
