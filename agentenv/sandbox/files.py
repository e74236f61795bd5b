"""Files into a program's working folder, and out of it again; and away with a hostile tree.

Names are relative POSIX ones. No link is followed, and no other mount; what comes out is a regular file or nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import time
from collections.abc import Iterable, Mapping, Sequence

from agentenv.errors import ConfigError
from agentenv.sandbox import _linux

MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 1024
MAX_DEPTH = 16
MAX_FETCHED = 1000
"""Files that one execution may bring back."""
MAX_WALKED_DEPTH = 128
"""Folders in folders, where what is used is counted by looking."""
_PAGE = 4096
_FULL = 64
"""Pages, or entries, that are left on a disk that is full."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_name(name: str, where: str) -> None:
    """Refuse what is not a plain relative name.

    Raises:
        ConfigError: it is absolute, has an empty, `.` or `..` part or a NUL, or is too long.
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    sizes = [len(part.encode("utf-8", "surrogatepass")) for part in parts]
    wrong = any(part in ("", ".", "..") for part in parts) or max(sizes) > MAX_NAME_BYTES or not _is_encodable(name)
    if wrong or "\0" in name or sum(sizes) + len(sizes) > MAX_PATH_BYTES or len(parts) > MAX_DEPTH:
        raise ConfigError(
            f"{where}: expected a relative POSIX file name, got {name!r}. Name it as it lies in the folder"
        )


def _is_encodable(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def check_names(names: Iterable[str], where: str) -> None:
    """Refuse names that are not plain, or that need one path to be a file and a folder.

    Raises:
        ConfigError: as `check_name`, or two of them clash.
    """
    names = list(names)
    for name in names:
        check_name(name, where)
    folders = {"/".join(parts[:end]) for parts in (name.split("/") for name in names) for end in range(1, len(parts))}
    if clash := folders.intersection(names):
        raise ConfigError(
            f"{where}: expected each name to be a file or a folder, got {sorted(clash)} as both. Rename one"
        )


def check_fetch(names: Sequence[str]) -> None:
    """Refuse what cannot be brought back.

    Raises:
        ConfigError: as `check_name`, or they are more than MAX_FETCHED.
    """
    if len(names) > MAX_FETCHED:
        raise ConfigError(
            f"fetch: expected {MAX_FETCHED} names or fewer, got {len(names)}. Have the program put them into one file"
        )
    for name in names:
        check_name(name, "fetch")


def fits(contents: Mapping[str, bytes], *, max_bytes: int, max_inodes: int) -> bool:
    """Whether a working folder of that size has room for these files."""
    pages = sum(-(-len(content) // _PAGE) for content in contents.values())
    names = [name.split("/") for name in contents]
    folders = {tuple(parts[:end]) for parts in names for end in range(1, len(parts))}
    return pages * _PAGE <= max_bytes and 1 + len(folders) + len(contents) <= max_inodes


def write(directory: int, name: str, content: memoryview) -> None:
    """Write a new file below an open folder, with the folders above it.

    Raises:
        OSError: it is there already, or a part of its path is not a folder, or there is no room.
    """
    *folders, last = name.split("/")
    here = os.dup(directory)
    try:
        for part in folders:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=here)
            below = os.open(part, _FOLDER, dir_fd=here)
            os.close(here)
            here = below
        fd = os.open(last, _NEW, 0o644, dir_fd=here)
        try:
            while content:
                content = content[os.write(fd, content) :]
        finally:
            os.close(fd)
    finally:
        os.close(here)


def collect(directory: int, names: Sequence[str], *, into: int, max_bytes: int) -> list[int]:
    """Copy files below a folder into one file, one after the other, within the kernel.

    Returns:
        the size of each, -1 for what is not a regular file, is not there, or does not fit into what is left.
    """
    sizes: list[int] = []
    left = max_bytes
    for name in names:
        sizes.append(_copy(directory, name, into, left))
        left -= max(sizes[-1], 0)
    return sizes


def _copy(directory: int, name: str, into: int, max_bytes: int) -> int:
    try:
        fd = _linux.open_beneath(directory, name)
    except OSError:
        return -1
    try:
        # A sparse file has the size that it says: what is too large is left, not read.
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            return -1
        copied = 0
        while copied < status.st_size and (count := os.sendfile(into, fd, copied, status.st_size - copied)):
            copied += count
        return copied
    except OSError:
        return -1
    finally:
        os.close(fd)


def used(path: str, *, max_inodes: int) -> tuple[int, int]:
    """Bytes on disk and entries below a folder; stops counting at `max_inodes`, and where it is deeper than a path."""
    try:
        return _used(os.open(path, _FOLDER), max_inodes, MAX_WALKED_DEPTH)
    except OSError:
        return 0, 0


def _used(folder: int, max_inodes: int, depth: int) -> tuple[int, int]:
    size = count = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                count += 1
                with contextlib.suppress(FileNotFoundError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    more = _used_below(folder, entry.name, max_inodes - count, depth - 1)
                    size, count = size + more[0], count + more[1]
                if count > max_inodes:
                    break
    finally:
        os.close(folder)
    return size, count


def _used_below(folder: int, name: str, max_inodes: int, depth: int) -> tuple[int, int]:
    if depth < 0:
        return 0, max_inodes + 1  # deeper than anybody needs: as bad as too many
    try:
        return _used(os.open(name, _FOLDER, dir_fd=folder), max_inodes, depth)
    except PermissionError:
        return 0, max_inodes + 1  # it hides what it holds
    except OSError:
        return 0, 0  # removed meanwhile


def is_full(path: str) -> bool:
    """Whether the disk has no more room, or no more entries; some say of neither how many they have."""
    disk = os.statvfs(path)
    pages = disk.f_bavail * disk.f_frsize // _PAGE if disk.f_blocks else _FULL
    return min(pages, disk.f_favail if disk.f_files else _FULL) < _FULL


def remove_tree(path: str, *, wait_s: float = math.inf) -> bool:
    """Remove a folder, however deep: the way back from each is its own `..`, so that no path is ever long.

    Nothing may be running that writes there. What cannot be removed is left.

    Args:
        path: the folder; nothing is followed.
        wait_s: stop after so long.

    Returns:
        whether it is gone.
    """
    try:
        _remove_below(_entered(path, None), time.monotonic() + wait_s)
        os.rmdir(path)
    except OSError:
        return not os.path.lexists(path)
    return True


def _remove_below(here: int, deadline: float) -> None:
    names: list[str] = []
    try:
        left = [_emptied(here, deadline)]
        while (left[-1] or names) and time.monotonic() < deadline:
            if left[-1]:
                name = left[-1].pop()
                with contextlib.suppress(OSError):  # one that cannot be entered is left
                    here = _swapped(here, _entered(name, here))
                    names.append(name)
                    left.append(_emptied(here, deadline))
            else:
                left.pop()
                here = _swapped(here, os.open("..", _FOLDER, dir_fd=here))
                with contextlib.suppress(OSError):
                    os.rmdir(names.pop(), dir_fd=here)
    finally:
        os.close(here)


def _swapped(old: int, new: int) -> int:
    os.close(old)
    return new


def _entered(name: str, above: int | None) -> int:
    """A folder, open; it is opened to us first, if it is not."""
    mode = os.stat(name, dir_fd=above, follow_symlinks=False).st_mode
    if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
        os.chmod(name, 0o700, dir_fd=above)
    return os.open(name, _FOLDER, dir_fd=above)


def _emptied(folder: int, deadline: float) -> list[str]:
    """Remove everything but folders, as far as it can be; their names."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found.append(entry.name)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.name, dir_fd=folder)
            if time.monotonic() > deadline:
                break
    return found
