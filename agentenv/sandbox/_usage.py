"""What /proc says of processes: what they use together, who they are below; and how to be rid of them."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from dataclasses import dataclass

from agentenv.sandbox import _linux


@dataclass
class Usage:
    """What a tree of processes uses."""

    cpu_s: float = 0.0
    memory_bytes: int = 0
    processes: int = 0
    unlinked_bytes: int = 0
    """In files that are open and have no name any more, as far as we may look."""


def tree_usage(proc: int, roots: list[str], *, with_files: bool) -> Usage:
    """What processes and all below them use: CPU, with that of children that ended; memory that is theirs alone."""
    usage = Usage()
    ticks = os.sysconf("SC_CLK_TCK")
    todo = list(roots)
    while todo and usage.processes < 4096:
        pid = todo.pop()
        try:
            fields = _linux.read_at(proc, f"{pid}/stat").rpartition(")")[2].split()
            status = _linux.read_at(proc, f"{pid}/status")
            todo += children_of(proc, pid)
        except OSError:
            continue
        usage.processes += 1
        usage.unlinked_bytes += unlinked_bytes(proc, pid) if with_files else 0
        usage.cpu_s += sum(int(value) for value in fields[11:15]) / ticks
        usage.memory_bytes += sum(_kilobytes(status, key) for key in ("RssAnon:", "RssShmem:")) * 1024
    return usage


def children_of(proc: int, pid: str) -> list[str]:
    """Children of all threads of a process."""
    fd = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    try:
        threads = os.listdir(fd)
    finally:
        os.close(fd)
    return [child for thread in threads for child in _linux.read_at(proc, f"{pid}/task/{thread}/children").split()]


def orphans_of(proc: int, group: int) -> list[str]:
    """Children of ours in a process group, but for its leader: their parents have died."""
    found = []
    for pid in children_of(proc, "self"):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(pid)) == group != int(pid):
                found.append(pid)
    return found


def unlinked_bytes(proc: int, pid: str) -> int:
    """Room that a process keeps in files without a name; 0 where we may not look."""
    size = 0
    with contextlib.suppress(OSError):
        folder = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
        try:
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    if os.readlink(name, dir_fd=folder).startswith("/memfd:"):
                        continue  # its input, which we gave it: it can make none itself
                    status = os.stat(name, dir_fd=folder)
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        size += status.st_blocks * 512
        finally:
            os.close(folder)
    return size


def _kilobytes(status: str, key: str) -> int:
    _, found, after = status.partition(key)
    return int(after.split(None, 1)[0]) if found else 0


def count_tasks(uid: int) -> int:
    """Threads of a user, all over this /proc."""
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == uid:
                    count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count


def reap_group(group: int) -> float:
    """Wait for what a program left behind: killed already, and our children since their parent died.

    Returns:
        seconds of CPU that they used.
    """
    cpu_s = 0.0
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        try:
            pid, _, usage = os.wait4(-group, os.WNOHANG)
        except ChildProcessError:
            break
        cpu_s += usage.ru_utime + usage.ru_stime if pid else 0.0
        if not pid:
            time.sleep(0.001)
    return cpu_s


def kill_descendants() -> None:
    """Kill every child, and those that become ours when their parents die, until there is none."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.001)


def _children() -> list[int]:
    me = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == me:
                    found.append(int(name))
    return found
