"""Processes in /proc: their resource usage, their descendants, and how to end them. Runs inside the sandbox."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import stat
import time
from dataclasses import dataclass, field

from agentenv.sandbox.guest import linux

_MEMORY = re.compile(r"^(?:RssAnon|RssShmem|VmSwap):\s+(\d+) kB$", re.MULTILINE)


@dataclass
class TreeUsage:
    """The resource usage of a tree of processes."""

    cpu_s: float = 0.0
    own_cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU time of each process without its children, by its pid and start."""
    memory_bytes: int = 0
    processes: int = 0
    unlinked_bytes: int = 0
    """Size of open files without a name, as far as they are visible."""


def tree_usage(proc: int, roots: list[str], with_files: bool = False) -> TreeUsage:
    """Return the usage of processes and their descendants: CPU time with ended children, and private memory.

    Open files without a name are counted if `with_files`; see `unlinked_bytes`.
    """
    usage = TreeUsage()
    ticks = os.sysconf("SC_CLK_TCK")
    todo = list(roots)
    while todo and usage.processes < 4096:
        pid = todo.pop()
        try:
            fields = linux.read_at(proc, f"{pid}/stat").rpartition(")")[2].split()
            threads = _threads(proc, pid)
        except OSError:
            continue
        todo += children_of(proc, pid)
        usage.processes += 1
        usage.unlinked_bytes += unlinked_bytes(proc, pid) if with_files else 0
        own, of_children = (sum(map(int, pair)) / ticks for pair in (fields[11:13], fields[13:15]))
        usage.cpu_s += own + of_children
        usage.own_cpu_s[f"{pid} {fields[19]}"] = own
        for thread in threads:  # any that has not ended shows the private and shared memory of all
            with contextlib.suppress(OSError):
                # The kernel escapes a newline in a process's name, so only its own lines begin so.
                if sizes := _MEMORY.findall(linux.read_at(proc, f"{thread}/status")):
                    usage.memory_bytes += sum(map(int, sizes)) * 1024
                    break
    return usage


def _threads(proc: int, pid: str) -> list[str]:
    """Return the folders of a process's threads, its first one included even if it has ended."""
    fd = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    try:
        return [f"{pid}/task/{thread}" for thread in os.listdir(fd)]
    finally:
        os.close(fd)


def children_of(proc: int, pid: str) -> list[str]:
    """Return the children of all threads of a process."""
    children: list[str] = []
    with contextlib.suppress(OSError):
        for thread in _threads(proc, pid):
            with contextlib.suppress(OSError):
                children += linux.read_at(proc, f"{thread}/children").split()
    return children


def orphans_of(proc: int, group: int) -> list[str]:
    """Return this process's children in a process group except its leader; their parents have died."""
    orphans = []
    for pid in children_of(proc, "self"):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(pid)) == group != int(pid):
                orphans.append(pid)
    return orphans


def unlinked_bytes(proc: int, pid: str) -> int:
    """Return the size on disk of a process's open files without a name; 0 if they are not visible."""
    with contextlib.suppress(OSError):
        for thread in _threads(proc, pid):  # any that has not ended shows the files of all
            if sizes := _unlinked_sizes(proc, thread):
                return sum(sizes)
    return 0


def _unlinked_sizes(proc: int, thread: str) -> list[int]:
    """Return the size on disk of each of a thread's open files, 0 of one with a name; nothing if the thread has ended.

    Memory files are the program's input, from the trainer, and count as 0 too: it cannot create them.
    """
    sizes: list[int] = []
    with contextlib.suppress(OSError):
        folder = os.open(f"{thread}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
        try:
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    status = os.stat(name, dir_fd=folder)
                    is_unlinked = stat.S_ISREG(status.st_mode) and status.st_nlink == 0
                    sizes.append(status.st_blocks * 512 * (is_unlinked and status.st_dev != _memory_device()))
        finally:
            os.close(folder)
    return sizes


@functools.cache
def _memory_device() -> int:
    """Return the device of memory files."""
    fd = os.memfd_create("device", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def count_tasks(uid: int) -> int:
    """Return the number of threads of a user in this /proc."""
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == uid:
                    count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count


def hard_cpu_limit(proc: int, pid: str) -> float:
    """Return the hard limit on the CPU seconds of a process, which may have ended."""
    line = linux.read_at(proc, f"{pid}/limits").split("\nMax cpu time")[1].split("\n")[0]
    return float(line.split()[1].replace("unlimited", "inf"))


def reap_group(group: int) -> float:
    """Wait for the killed processes that a program left; they are this process's children since their parent died.

    Returns:
        Their CPU time in seconds.
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
    """Kill all children, and the grandchildren that become children, until none is left."""
    own_pid = os.getpid()
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == own_pid:
                    os.kill(int(name), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.001)
