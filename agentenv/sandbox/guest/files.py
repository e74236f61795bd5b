"""Files of a program's working folder: writing, collecting, counting and removing them. Runs inside the sandbox.

Names are relative POSIX paths. No link and no other mount is followed, and only regular files are collected.
Walks keep names as addresses in a buffer that they wipe, because later programs can read the memory of the zygote.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import re
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from agentenv.errors import ConfigError
from agentenv.sandbox.guest import linux

MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 1024
MAX_DEPTH = 16
MAX_FETCHED = 1000
"""Maximum number of files that one execution may fetch."""
MAX_WALKED_DEPTH = 128
"""Deepest nesting of folders when disk usage is counted by walking."""
_PAGE = 4096
_FULL = 64
"""Free pages or entries below which a disk counts as full."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_FOLLOW, _REMOVE_FOLDER = 0x100, 0x200
_ENTRY = struct.Struct("=QqHB")
"""The head of `linux_dirent64`, before the name: inode, position, length, kind."""
_UNKNOWN, _FOLDER_KIND = 0, 4
_BLOCKS = struct.Struct("=64xQ")
"""`st_blocks` in `struct stat`, on x86-64 and aarch64."""
_LISTED_BYTES = 8192


def check_name(name: str, where: str) -> None:
    """Check that a name is a plain relative path.

    Raises:
        ConfigError: the name is absolute, has an empty, `.` or `..` part or a NUL, or is too long.
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    sizes = [len(part.encode("utf-8", "surrogatepass")) for part in parts]
    invalid = any(part in ("", ".", "..") for part in parts) or max(sizes) > MAX_NAME_BYTES
    try:
        os.fsencode("/".join(parts))
    except UnicodeEncodeError:
        invalid = True
    if invalid or "\0" in name or sum(sizes) + len(sizes) > MAX_PATH_BYTES or len(parts) > MAX_DEPTH:
        raise ConfigError(
            f"{where}: expected a relative POSIX file name, got {name!r:.200}. Use its path in the working folder"
        )


def check_names(names: Iterable[str], where: str) -> None:
    """Check that names are plain, and that none is the folder of another.

    Raises:
        ConfigError: a name is invalid, or a path would be both a file and a folder.
    """
    names = list(names)
    for name in names:
        check_name(name, where)
    folders = {"/".join(parts[:end]) for parts in (name.split("/") for name in names) for end in range(1, len(parts))}
    if clash := folders.intersection(names):
        raise ConfigError(
            f"{where}: expected each name to be a file or a folder, got {sorted(clash)!r:.200} as both. Rename one"
        )


def check_fetch(names: Sequence[str]) -> None:
    """Check the names of files to fetch.

    Raises:
        ConfigError: a name is invalid, or there are more than MAX_FETCHED.
    """
    if len(names) > MAX_FETCHED:
        raise ConfigError(
            f"fetch: expected {MAX_FETCHED} names or fewer, got {len(names)}. Let the program pack them into one file"
        )
    for name in names:
        check_name(name, "fetch")


def fits(contents: Mapping[str, bytes], *, max_bytes: int, max_inodes: int) -> bool:
    """Return True if a working folder of this size has room for these files."""
    if len(contents) >= max_inodes:  # at once: there may be very many
        return False
    pages = sum(-(-len(content) // _PAGE) for content in contents.values())
    names = [name.split("/") for name in contents]
    folders = {tuple(parts[:end]) for parts in names for end in range(1, len(parts))}
    return pages * _PAGE <= max_bytes and 1 + len(folders) + len(contents) <= max_inodes


def write(directory: int, name: str, content: memoryview) -> None:
    """Write a new file below an open folder; create the folders of its path.

    Raises:
        OSError: the file exists, a part of its path is not a folder, or the disk is full.
    """
    *folders, last = name.split("/")
    current = os.dup(directory)
    try:
        for part in folders:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=current)
            below = os.open(part, _FOLDER, dir_fd=current)
            os.close(current)
            current = below
        fd = os.open(last, _NEW, 0o644, dir_fd=current)
        try:
            while content:
                content = content[os.write(fd, content) :]
        finally:
            os.close(fd)
    finally:
        os.close(current)


def pack_names(names: Iterable[str]) -> bytes:
    """Return names in the form that `collect` reads: the size of each (2 bytes), the name, a zero."""
    packed = (os.fsencode(name) for name in names)
    return b"".join(len(name).to_bytes(2, "little") + name + b"\0" for name in packed)


def _listed(fd: int) -> Iterator[int]:
    """Yield the address of each name in a file from `pack_names`."""
    buffer = ctypes.create_string_buffer(os.fstat(fd).st_size)
    try:
        os.preadv(fd, [buffer], 0)
        place = 0
        while place < len(buffer):
            yield ctypes.addressof(buffer) + place + 2
            place += 3 + ctypes.c_uint16.from_buffer(buffer, place).value
    finally:
        ctypes.memset(buffer, 0, len(buffer))


def collect(directory: int, names: int, *, into: int, max_bytes: int) -> list[int]:
    """Append files below a folder to the file `into`; the kernel copies them.

    Args:
        directory: the open folder; -1 for none.
        names: an open file with the names, from `pack_names`.
        into: the file.
        max_bytes: maximum size of all.

    Returns:
        The size of each; -1 if a file is missing, not regular, or larger than the rest of `max_bytes`.
    """
    sizes: list[int] = []
    remaining = max_bytes
    for name in _listed(names):
        sizes.append(-1)
        try:
            fd = linux.open_beneath(directory, name)
        except OSError:
            continue
        try:
            # The apparent size counts, so a huge sparse file is skipped without reading it.
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > remaining:
                continue
            copied = 0
            while copied < status.st_size and (count := os.sendfile(into, fd, copied, status.st_size - copied)):
                copied += count
            sizes[-1] = copied
            remaining -= copied
        except OSError:
            continue
        finally:
            os.close(fd)
    return sizes


def _entries(folder: int) -> Iterator[tuple[int, bool, int]]:
    """Yield the address of each entry's name, True if it is known as a file, and its inode."""
    buffer = ctypes.create_string_buffer(_LISTED_BYTES)
    try:
        while size := linux.syscall("getdents64", folder, buffer, _LISTED_BYTES):
            place = 0
            while place < size:
                inode, _, length, kind = _ENTRY.unpack_from(buffer, place)
                name = ctypes.addressof(buffer) + place + _ENTRY.size
                if not re.match(rb"\.?\.\0", ctypes.string_at(name, 3)):
                    yield name, kind not in (_UNKNOWN, _FOLDER_KIND), inode
                place += length
    finally:
        ctypes.memset(buffer, 0, _LISTED_BYTES)


def used(path: str, *, max_inodes: int) -> tuple[int, int]:
    """Return the bytes on disk and the number of entries below a folder; stop counting after `max_inodes` entries."""
    try:
        return _used(os.open(path, _FOLDER), max_inodes, MAX_WALKED_DEPTH)
    except OSError:
        return 0, 0


def _used(folder: int, max_inodes: int, depth: int) -> tuple[int, int]:
    size = count = 0
    status = ctypes.create_string_buffer(256)
    try:
        for name, is_file, _ in _entries(folder):
            count += 1
            try:
                linux.syscall("newfstatat", folder, name, status, _NO_FOLLOW)
                size += _BLOCKS.unpack_from(status)[0] * 512
            except OSError as error:
                if error.errno != errno.ENOENT:  # removed in the meantime
                    raise
            try:
                if not is_file and not depth:
                    count += max_inodes  # too deep counts as too many
                elif not is_file:
                    below = linux.syscall("openat", folder, name, _FOLDER)
                    more = _used(below, max_inodes - count, depth - 1)
                    size, count = size + more[0], count + more[1]
            except OSError as error:
                # Unreadable counts as too many; else it is not a folder, or was removed in the meantime.
                count += max_inodes if error.errno == errno.EACCES else 0
            if count > max_inodes:
                break
    finally:
        os.close(folder)
    return size, count


def is_full(path: str) -> bool:
    """Return True if the disk has no free space or no free entries. Some file systems report neither."""
    disk = os.statvfs(path)
    pages = disk.f_bavail * disk.f_frsize // _PAGE if disk.f_blocks else _FULL
    return min(pages, disk.f_favail if disk.f_files else _FULL) < _FULL


def remove_tree(path: str, *, wait_s: float = math.inf) -> bool:
    """Remove a folder of any depth: the walk returns through `..`, so no path becomes too long.

    No process may be writing there. Entries that cannot be removed are left.

    Args:
        path: the folder; links are not followed.
        wait_s: time limit in seconds.

    Returns:
        True if the folder is gone.
    """
    deadline = time.monotonic() + wait_s
    depth, entered = 0, set[int]()
    try:
        current = _open_folder(linux.AT_FDCWD, os.fsencode(path))
        try:
            while time.monotonic() < deadline:
                below = _remove_entries(current, entered, deadline)
                if below is None and not depth:
                    break
                depth += 1 if below is not None else -1
                left, current = current, os.open("..", _FOLDER, dir_fd=current) if below is None else below
                os.close(left)
        finally:
            os.close(current)
        os.rmdir(path)
    except OSError:
        return not os.path.lexists(path)
    return True


def _open_folder(above: int, name: int | bytes) -> int:
    """Open a folder; restore the owner's permissions first if necessary."""
    try:
        folder = linux.syscall("openat", above, name, _FOLDER)
    except OSError as error:
        if error.errno != errno.EACCES:
            raise
        linux.syscall("fchmodat", above, name, 0o700)
        return linux.syscall("openat", above, name, _FOLDER)
    if stat.S_IMODE(os.fstat(folder).st_mode) & 0o700 != 0o700:
        os.fchmod(folder, 0o700)
    return folder


def _remove_entries(folder: int, entered: set[int], deadline: float) -> int | None:
    """Remove what can be removed, up to a folder that is not empty and not among the inodes of `entered`; open that."""
    os.lseek(folder, 0, os.SEEK_SET)
    with contextlib.suppress(OSError):
        for name, is_file, inode in _entries(folder):
            if time.monotonic() > deadline:
                break
            with contextlib.suppress(OSError):
                linux.syscall("unlinkat", folder, name, 0 if is_file else _REMOVE_FOLDER)
                continue
            with contextlib.suppress(OSError):
                if not is_file and inode not in entered:
                    entered.add(inode)
                    return _open_folder(folder, name)
                linux.syscall("unlinkat", folder, name, 0)  # of unknown kind
    return None
