"""The root file system and namespaces that all programs of one zygote share. Runs inside the sandbox.

The root is read-only. It shows the interpreter's folders, the system's libraries and commands, and a few devices, but
not /proc, /etc or a home.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agentenv.sandbox.guest import linux
from agentenv.sandbox.guest.linux import MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_RDONLY

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/nix/store", "/gnu/store")
_OF_ETC = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")
ZERO = "/dev/zero"
"""A shared mapping of it holds memory that no limit counts once most of it is unmapped."""
DEVICES = ("/dev/null", ZERO, "/dev/full", "/dev/random", "/dev/urandom")
_STAND_INS = {ZERO: "/dev/full"}
"""Devices shown in place of others; this one reads the same and cannot be mapped."""
_LINKS = {"/tmp": "", "/var/tmp": "..", "/dev/shm": ".."}
"""Links to the working folder, the only writable place; omitted if an interpreter lies in such a folder."""
_SHARED = (
    linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
)  # fmt: skip


def shown_paths(extra: Iterable[str] = ()) -> list[str]:
    """Return the paths of the host to show, without those inside others; links stay links.

    Those of this interpreter are its import folders, and its prefix unless that contains the home.
    """
    prefix, home = os.path.realpath(sys.base_prefix), os.path.realpath(os.path.expanduser("~"))
    holds_home = f"{home}/".startswith(f"{prefix.rstrip('/')}/") and home != "/"
    folders = [os.path.realpath(path) for path in sys.path if path and os.path.isdir(path)]
    wanted = [*_SYSTEM, *_OF_ETC, *([] if prefix == "/" or holds_home else [prefix]), *folders, *extra]
    shown: list[str] = []
    for path in sorted({path for path in wanted if os.path.lexists(path)}):
        inside = any(path.startswith(f"{outer}/") for outer in shown if not os.path.islink(outer))
        if not inside:
            shown.append(path)
    return shown


def narrowed(folders: Iterable[str]) -> list[str]:
    """Return the import folders of which only some entries are shown: those that the interpreter's do not contain."""
    shown = [path for path in shown_paths() if not os.path.islink(path)]
    return [folder for folder in folders if not any(f"{folder}/".startswith(f"{path}/") for path in shown)]


def _link(path: str, target: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    os.symlink(target, path)


def _make_mount_point(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def narrow(folder: str, entries: Iterable[str]) -> None:
    """Hide everything in a folder but these paths below it. Needs private mounts."""
    fds = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in entries if path.startswith(f"{folder}/")}
    linux.mount("tmpfs", folder, "tmpfs", flags=MS_NOSUID | MS_NODEV, data="mode=755")
    for path, fd in fds.items():
        _make_mount_point(f"/proc/self/fd/{fd}", path)
        linux.mount(f"/proc/self/fd/{fd}", path, flags=linux.MS_BIND | linux.MS_REC)
        os.close(fd)


def build(shown: Sequence[str], hidden: Sequence[str], work: str) -> None:
    """Pivot into a root that shows only these paths and a working folder, with the hidden folders empty.

    Needs private mounts.
    """
    stage = next(path for path in ("/tmp", "/run", "/mnt", "/usr") if os.path.isdir(path))
    linux.mount("tmpfs", stage, "tmpfs", flags=MS_NOSUID | MS_NODEV, data="mode=755")
    os.chdir(stage)
    os.mkdir("old")
    os.mkdir("new")
    linux.syscall("pivot_root", b".", b"old")
    os.chdir("/")
    linux.mount("tmpfs", "/new", "tmpfs", flags=MS_NOSUID | MS_NODEV, data="mode=755,size=1m,nr_inodes=1k")
    os.mkdir(f"/new{work}", 0o755)
    for path, root in _LINKS.items():
        if not any(other.startswith(f"{path}/") for other in shown):
            _link(f"/new{path}", os.path.join(root, work[1:]))
    links = {path: os.readlink(f"/old{path}") for path in shown if os.path.islink(f"/old{path}")}
    for path, target in links.items():
        _link(f"/new{path}", target)
    sources = {path: f"/old{_STAND_INS.get(path, path)}" for path in (*shown, *DEVICES) if path not in links}
    mounted = {path: source for path, source in sources.items() if os.path.exists(source)}
    for path, source in mounted.items():
        _make_mount_point(source, f"/new{path}")
    # Before the bind mounts, because the flags apply to all mounts below.
    linux.restrict_mount("/new", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for path, source in mounted.items():
        nodev = MS_NOEXEC if path in DEVICES else MS_NODEV
        linux.bind(source, f"/new{path}", MS_RDONLY | MS_NOSUID | nodev)
    for path in hidden:
        if os.path.isdir(f"/new{path}"):
            flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
            linux.mount("tmpfs", f"/new{path}", "tmpfs", flags=flags, data="mode=755,size=4k,nr_inodes=1")
    linux.pivot_to("/new")


def _map_from_outside(proc: int, base: int, count: int) -> tuple[int, int]:
    """Fork a helper that maps the ids once the caller is in a new user namespace, where it cannot do so itself.

    Returns:
        The helper's pid, and the pipe that it waits for.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reader)
        return pid, writer
    code = 1
    try:
        os.close(writer)
        if os.read(reader, 1) == b"1":
            linux.map_ids(proc, os.getppid(), inside=0, outside=(base, base), count=count)
            code = 0
    except OSError as error:
        code = min(error.errno or 1, 255)
    finally:
        os._exit(code)


def _name_host() -> None:
    """Hide the host's name. Needs a new UTS namespace."""
    for name in ("sethostname", "setdomainname"):
        linux.syscall(name, b"sandbox", 7)


def enter(plan: dict[str, Any], proc: int, load: Callable[[], None]) -> None:
    """Build the root and move into new namespaces; the next child is the first process of a new pid namespace.

    `load` is called where the packages are narrowed, and all else is as on the host.

    Root becomes user `plan["ids"][0]` outside, never 0. Another user keeps its id outside and is 0 inside.

    Raises:
        StepError: a step failed.
    """
    shown = shown_paths(plan["paths"])

    def prepare() -> None:
        linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
        for folder in narrowed(plan["paths"]):
            narrow(folder, plan["entries"])
        load()
        build(shown, plan["hidden"], plan["work"])

    if not plan["ids"]:
        outside = os.geteuid(), os.getegid()
        linux.unshare(_SHARED)
        linux.map_ids(proc, "self", inside=0, outside=outside)
        _name_host()
        prepare()
        return
    linux.unshare(linux.CLONE_NEWNS)
    prepare()
    helper, start = _map_from_outside(proc, *plan["ids"][:2])
    try:
        linux.unshare(_SHARED)
        os.write(start, b"1")
    finally:
        os.close(start)
        code = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if code:
        raise linux.StepError(code, f"uid_map {plan['ids']}: {os.strerror(code)}")
    linux.become(0, 0)
    _name_host()
    linux.prctl(linux.PR_SET_DUMPABLE, 1)
