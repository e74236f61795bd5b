"""The view of the host that all programs of one zygote share: a read-only root, and namespaces of its own.

Shown are the interpreter's folders, the system's libraries and commands and four devices; no /proc, no /etc, no home.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from agentenv.sandbox import _linux
from agentenv.sandbox._linux import MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_RDONLY

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/nix/store", "/gnu/store")
_OF_ETC = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_LINKS = {"/tmp": "work", "/var/tmp": "../work", "/dev/shm": "../work"}
"""All that a program may write lies in its working folder; not where an interpreter lies in such a place."""
_SHARED = (
    _linux.CLONE_NEWUSER | _linux.CLONE_NEWNS | _linux.CLONE_NEWPID | _linux.CLONE_NEWNET | _linux.CLONE_NEWIPC
    | _linux.CLONE_NEWUTS
)  # fmt: skip


def interpreter_paths() -> list[str]:
    """The folders that this interpreter imports from, and its prefix unless that holds a home."""
    prefix, home = os.path.realpath(sys.base_prefix), os.path.realpath(os.path.expanduser("~"))
    holds_home = f"{home}/".startswith(f"{prefix.rstrip('/')}/") and home != "/"
    folders = [os.path.realpath(path) for path in sys.path if path and os.path.isdir(path)]
    return folders if prefix == "/" or holds_home else [prefix, *folders]


def shown_paths(extra: Iterable[str] = ()) -> list[str]:
    """What of the host is shown, outermost only; links among the system's folders are in it as they are."""
    wanted = [*_SYSTEM, *_OF_ETC, *interpreter_paths(), *extra]
    shown: list[str] = []
    for path in sorted({path for path in wanted if os.path.lexists(path)}):
        inside = any(path.startswith(f"{outer}/") for outer in shown if not os.path.islink(outer))
        if not inside:
            shown.append(path)
    return shown


def _make_place(path: str, like: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    if os.path.isdir(like):
        os.makedirs(path, mode=0o755, exist_ok=True)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _link(path: str, target: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    os.symlink(target, path)


def build(shown: Sequence[str], hidden: Sequence[str]) -> None:
    """Pivot into a root that shows only these paths, the hidden folders in them empty; the mount namespace is ours."""
    _linux.mount("none", "/", flags=_linux.MS_REC | _linux.MS_PRIVATE)
    stage = next(path for path in ("/tmp", "/run", "/mnt", "/usr") if os.path.isdir(path))
    _linux.mount("tmpfs", stage, "tmpfs", flags=MS_NOSUID | MS_NODEV, data="mode=755")
    os.chdir(stage)
    os.mkdir("old")
    os.mkdir("new")
    _linux.syscall("pivot_root", b".", b"old")
    os.chdir("/")
    _linux.mount("tmpfs", "/new", "tmpfs", flags=MS_NOSUID | MS_NODEV, data="mode=755,size=1m,nr_inodes=1k")
    os.mkdir("/new/work", 0o755)
    for path, target in _LINKS.items():
        if not any(shows.startswith(f"{path}/") for shows in shown):
            _link(f"/new{path}", target)
    links = {path: os.readlink(f"/old{path}") for path in shown if os.path.islink(f"/old{path}")}
    for path, target in links.items():
        _link(f"/new{path}", target)
    places = [path for path in (*shown, *DEVICES) if path not in links and os.path.exists(f"/old{path}")]
    for path in places:
        _make_place(f"/new{path}", f"/old{path}")
    # Before anything is mounted in it: the flags go to all that is below.
    _linux.restrict_mount("/new", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for path in places:
        nodev = MS_NOEXEC if path in DEVICES else MS_NODEV
        _linux.bind(f"/old{path}", f"/new{path}", MS_RDONLY | MS_NOSUID | nodev)
    for path in hidden:
        if os.path.isdir(f"/new{path}"):
            flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
            _linux.mount("tmpfs", f"/new{path}", "tmpfs", flags=flags, data="mode=755,size=4k,nr_inodes=1")
    _linux.pivot_to("/new")


def _map_from_outside(proc: int, base: int, count: int) -> tuple[int, int]:
    """Fork a helper that maps our ids once we are in a new user namespace: we may not do it from within.

    Returns:
        its pid, and the pipe that it waits on.
    """
    listen, tell = os.pipe()
    pid = os.fork()
    if pid:
        os.close(listen)
        return pid, tell
    code = 1
    try:
        os.close(tell)
        if os.read(listen, 1) == b"1":
            _linux.map_ids(proc, os.getppid(), inside=0, outside=(base, base), count=count)
            code = 0
    except OSError as error:
        code = min(error.errno or 1, 255)
    finally:
        os._exit(code)


def enter(plan: dict[str, Any], proc: int) -> None:
    """Move into new namespaces with the root built; the next child is the first process of a new pid namespace.

    Root becomes `plan["ids"][0]` outside, never 0; a user stays who they are, and is 0 inside.

    Raises:
        StepError: a step failed.
    """
    shown = shown_paths(plan["paths"])
    if not plan["ids"]:
        outside = os.geteuid(), os.getegid()
        _linux.unshare(_SHARED)
        _linux.map_ids(proc, "self", inside=0, outside=outside)
        build(shown, plan["hidden"])
        return
    _linux.unshare(_linux.CLONE_NEWNS)
    build(shown, plan["hidden"])
    helper, tell = _map_from_outside(proc, *plan["ids"])
    try:
        _linux.unshare(_SHARED)
        os.write(tell, b"1")
    finally:
        os.close(tell)
        code = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if code:
        raise _linux.StepError(code, f"uid_map {plan['ids']}: {os.strerror(code)}")
    _linux.become(0, 0)
    _linux.prctl(_linux.PR_SET_DUMPABLE, 1)
