"""Probes of the kernel features that the levels need, each in its own process. Runs as a separate program."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from agentenv.sandbox.guest import landlock, linux, rootfs, seccomp

_FAILED = 1


def main(plan: dict[str, Any], out: int) -> NoReturn:
    """Write a JSON object with the errno and message of each probe, or null for success."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if a parent left it ignored, children cannot be awaited
    outcomes: dict[str, Any] = {}
    for name, probe in PROBES.items():
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                probe(plan)
                os.write(writer, b"null")
            except OSError as error:
                os.write(writer, json.dumps([error.errno or 0, str(error.strerror or error)]).encode())
            except ImportError as error:
                os.write(writer, json.dumps([errno.EACCES, f"{sys.executable}: {error}"]).encode())
            finally:
                os._exit(0)
        os.close(writer)
        output = b""
        while part := os.read(reader, 4096):
            output += part
        os.close(reader)
        os.waitpid(pid, 0)
        outcomes[name] = json.loads(output) if output else (0, "the process died")
    os.write(out, json.dumps(outcomes).encode())
    os._exit(0)


def _probe_processor(_: dict[str, Any]) -> None:
    if not linux.NUMBERS:
        raise OSError(linux.ENOSYS, f"no system call table for {linux.MACHINE}")


def _in_child(body: Callable[[], None]) -> int:
    """Run `body` in a forked process and return its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = _FAILED
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _probe_seccomp(_: dict[str, Any]) -> None:
    """Install a filter; check that it permits ordinary calls and kills for a forbidden one."""
    ready = seccomp.Filter(seccomp.assemble(processes=False))
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)

    def trace() -> None:
        ready.install(os.getpid())
        linux.syscall("ptrace", 0, 0, 0, 0)

    code = _in_child(trace)
    if code != -signal.SIGSYS:
        raise OSError(0, f"expected a forbidden call to end in SIGSYS, got exit code {code}")


def _probe_landlock(_: dict[str, Any]) -> None:
    """Check that a readable folder becomes unreadable."""
    version = landlock.abi()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    os.listdir("/")
    landlock.Ruleset(version, {"/usr": landlock.READ}).enter()
    try:
        os.listdir("/")
    except PermissionError:
        return
    raise OSError(0, "expected / to be unreadable, got its entries")


def _unshare(plan: dict[str, Any], flags: int) -> None:
    """Create namespaces, inside a new user namespace if the current user needs one for that."""
    uid, gid = os.geteuid(), os.getegid()
    proc = os.open("/proc", os.O_PATH)
    linux.unshare(flags if plan["ids"] else flags | linux.CLONE_NEWUSER)
    if not plan["ids"]:
        linux.map_ids(proc, "self", inside=0, outside=(uid, gid))


def _probe_mounts(plan: dict[str, Any]) -> None:
    _unshare(plan, linux.CLONE_NEWNS)
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", "/tmp", "tmpfs", data="size=1m,nr_inodes=16")


def _probe_pid_namespace(plan: dict[str, Any]) -> None:
    _unshare(plan, linux.CLONE_NEWPID)
    if _in_child(lambda: os._exit(0 if os.getpid() == 1 else _FAILED)):
        raise OSError(0, "expected the first process of a pid namespace, got another")


def _probe_root(plan: dict[str, Any]) -> None:
    """Set up everything of the namespaces level except a program."""
    rootfs.enter(plan, os.open("/proc", os.O_PATH))
    if os.path.exists("/proc/self") or os.path.exists("/etc/passwd"):
        raise OSError(0, "expected a separate root, got the host's")


def _probe_other_user(plan: dict[str, Any]) -> None:
    if not plan["ids"]:
        raise OSError(1, "not root, or without CAP_SETUID and CAP_SETGID, or without unused user ids")
    user = plan["ids"][0] + 1
    linux.become(user, user)
    try:
        __import__("wave")  # a module that is not yet imported
    except ImportError:
        message = f"{sys.prefix} is closed to other users; levels that need them use another interpreter, if any"
        raise OSError(0, message) from None
    if os.geteuid() != user:
        raise OSError(0, f"expected user {user}, got {os.geteuid()}")


def _probe_openat2(_: dict[str, Any]) -> None:
    os.close(linux.open_beneath(os.open("/", os.O_RDONLY), b"usr"))


def _probe_interpreter(_: dict[str, Any]) -> None:
    if tuple(sys.version_info) < (3, 11):
        raise OSError(0, f"expected Python 3.11 or newer, got {sys.version.split()[0]}")


PROBES: dict[str, Callable[[dict[str, Any]], None]] = {
    "processor": _probe_processor,
    "interpreter": _probe_interpreter,
    "seccomp": _probe_seccomp,
    "landlock": _probe_landlock,
    "user namespace": partial(_unshare, flags=linux.CLONE_NEWUSER),
    "mount namespace": _probe_mounts,
    "pid namespace": _probe_pid_namespace,
    "net, ipc and uts namespaces": partial(
        _unshare, flags=linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    ),
    "separate root": _probe_root,
    "other users": _probe_other_user,
    "openat2": _probe_openat2,
}
