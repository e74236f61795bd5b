"""Runs as a program of its own: does each thing that a level needs, in a process each, and says what happened."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from agentenv.sandbox import _landlock, _linux, _rootfs, _seccomp

_FAILED = 1


def main(plan: dict[str, Any], out: int) -> NoReturn:
    """Write one JSON object: for each probe its errno and words, null where it went well."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as some parents leave it, children cannot be waited for
    found = {name: _forked(probe, plan) for name, probe in PROBES.items()}
    os.write(out, json.dumps(found).encode())
    os._exit(0)


def _forked(probe: Callable[[dict[str, Any]], None], plan: dict[str, Any]) -> tuple[int, str] | None:
    listen, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            probe(plan)
            os.write(tell, b"null")
        except OSError as error:
            os.write(tell, json.dumps([error.errno or 0, str(error.strerror or error)]).encode())
        except ImportError as error:
            os.write(tell, json.dumps([errno.EACCES, f"{sys.executable}: {error}"]).encode())
        finally:
            os._exit(0)
    os.close(tell)
    said = b""
    while part := os.read(listen, 4096):
        said += part
    os.close(listen)
    os.waitpid(pid, 0)
    if not said:
        return 0, "the process died"
    code, words = json.loads(said) or (None, "")
    return None if code is None else (code, words)


def _processor(_: dict[str, Any]) -> None:
    if not _linux.NUMBERS:
        raise OSError(_linux.ENOSYS, f"no system call table for {_linux.MACHINE}")


def _in_child(body: Callable[[], None]) -> int:
    """The exit code of a process that runs `body`; negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = _FAILED
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _filtering(_: dict[str, Any]) -> None:
    """A filter that is installed, lets through what it should, and kills for what it should."""
    ready = _seccomp.Filter(_seccomp.assemble(processes=False))
    _linux.prctl(_linux.PR_SET_NO_NEW_PRIVS, 1)

    def trace() -> None:
        """Do what is forbidden."""
        ready.install(os.getpid())
        _linux.syscall("ptrace", 0, 0, 0, 0)

    code = _in_child(trace)
    if code != -signal.SIGSYS:
        raise OSError(0, f"expected a forbidden call to end in SIGSYS, got exit code {code}")


def _landlocked(_: dict[str, Any]) -> None:
    """A folder that is readable, and then is not."""
    version = _landlock.abi()
    _linux.prctl(_linux.PR_SET_NO_NEW_PRIVS, 1)
    os.listdir("/")
    _landlock.Ruleset(version, {"/usr": _landlock.READ}).enter()
    try:
        os.listdir("/")
    except PermissionError:
        return
    raise OSError(0, "expected / to be closed, it is not")


def _user_namespace(plan: dict[str, Any]) -> None:
    uid, gid = os.geteuid(), os.getegid()
    proc = os.open("/proc", os.O_PATH)
    _linux.unshare(_linux.CLONE_NEWUSER)
    if not plan["ids"]:
        _linux.map_ids(proc, "self", inside=0, outside=(uid, gid))


def _user_namespace_if_needed(plan: dict[str, Any], flags: int) -> None:
    """New namespaces, together with a user namespace where it takes one to make them."""
    uid, gid = os.geteuid(), os.getegid()
    proc = os.open("/proc", os.O_PATH)
    _linux.unshare(flags if plan["ids"] else flags | _linux.CLONE_NEWUSER)
    if not plan["ids"]:
        _linux.map_ids(proc, "self", inside=0, outside=(uid, gid))


def _mounting(plan: dict[str, Any]) -> None:
    _user_namespace_if_needed(plan, _linux.CLONE_NEWNS)
    _linux.mount("none", "/", flags=_linux.MS_REC | _linux.MS_PRIVATE)
    _linux.mount("tmpfs", "/tmp", "tmpfs", data="size=1m,nr_inodes=16")


def _processes(plan: dict[str, Any]) -> None:
    _user_namespace_if_needed(plan, _linux.CLONE_NEWPID)
    if _in_child(lambda: os._exit(0 if os.getpid() == 1 else _FAILED)):
        raise OSError(0, "expected the first process of a pid namespace, got another")


def _network(plan: dict[str, Any]) -> None:
    _user_namespace_if_needed(plan, _linux.CLONE_NEWNET | _linux.CLONE_NEWIPC | _linux.CLONE_NEWUTS)


def _whole_root(plan: dict[str, Any]) -> None:
    """All of the namespaces level but a program."""
    _rootfs.enter(plan, os.open("/proc", os.O_PATH))
    if os.path.exists("/proc/self") or os.path.exists("/etc/passwd"):
        raise OSError(0, "expected a root of our own, got the host's")


def _other_user(plan: dict[str, Any]) -> None:
    if not plan["ids"]:
        raise OSError(1, "not root, or without CAP_SETUID and CAP_SETGID, or without users to be")
    user = plan["ids"][0] + 1
    _linux.become(user, user)
    try:
        __import__("wave")  # any module that is not loaded yet
    except ImportError:
        place = f"{sys.prefix} is closed to other users; levels that run as those take another interpreter, if any"
        raise OSError(0, place) from None
    if os.geteuid() != user:
        raise OSError(0, "expected to be another user, am not")


def _opening_beneath(_: dict[str, Any]) -> None:
    os.close(_linux.open_beneath(os.open("/", os.O_RDONLY), "usr"))


def _own_interpreter(_: dict[str, Any]) -> None:
    if tuple(sys.version_info) < (3, 11):
        raise OSError(0, f"expected Python 3.11 or newer, got {sys.version.split()[0]}")


PROBES: dict[str, Callable[[dict[str, Any]], None]] = {
    "processor": _processor,
    "interpreter": _own_interpreter,
    "seccomp": _filtering,
    "landlock": _landlocked,
    "user namespace": _user_namespace,
    "mount namespace": _mounting,
    "pid namespace": _processes,
    "net, ipc and uts namespaces": _network,
    "root of its own": _whole_root,
    "other users": _other_user,
    "openat2": _opening_beneath,
}
