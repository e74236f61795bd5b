"""The zygote: a warm interpreter that forks one confined process per program. Runs inside the sandbox.

There are two processes. The trainer starts the guardian, which enters the namespaces, forks the zygote, and ends
everything when the trainer is gone. The zygote is the first process of a pid namespace, so its end kills all programs.
It is single-threaded, holds no secret, and never reads a program: only the program's own process does.

Requests and reports are JSON messages on one seqpacket socket; an invalid message ends the zygote.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from agentenv.sandbox.guest import child, files, landlock, linux, rootfs, seccomp, usage, watch

_WARM = (
    "abc bisect collections collections.abc contextlib copy ctypes dataclasses datetime enum functools heapq io "
    "itertools json linecache math numbers operator os re signal socket stat string struct textwrap time traceback "
    "types typing"
)
"""Modules that programs import most; more would make each fork slower. threading and random run code in every new
process, a fifth of the time of a minimal program, so programs import them themselves."""
POLICIES = ("pure", "proc")
FIRST_FREE_FD = 16
"""Lower descriptors are placeholders, so that received ones never collide with a program's descriptors."""


def main(plan: dict[str, Any], control_fd: int) -> NoReturn:
    """Run the guardian, whose child is the zygote."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if a parent left it ignored, children cannot be awaited
    # Fill the low descriptors, and move the control socket above them.
    control = socket.socket(fileno=fcntl.fcntl(control_fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_FD))
    os.close(control_fd)
    while (fd := os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)) < FIRST_FREE_FD:
        continue
    os.dup2(fd, 0)  # in place of the plan
    os.close(fd)
    trainer = os.pidfd_open(os.getppid())
    code = 1
    try:
        if plan["ids"] and plan["isolation"] != "namespaces":
            _reserve_users(plan)
        proc = _setup(plan)
        guardian = os.pidfd_open(os.getpid()) if plan["isolation"] != "namespaces" else -1
        pid = os.fork()
        if pid == 0:
            os.close(trainer)
            _serve(plan, control, proc, guardian)
        # Wait for the end of the zygote or the trainer, then kill the zygote.
        pidfd = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(control, 0)  # hang-up alone
        poll.register(trainer, select.POLLIN)
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        code = 0
    except OSError as error:
        _tell_failure(control, error)
    except (ValueError, KeyError, ImportError) as error:
        _tell_failure(control, OSError(0, f"{type(error).__name__}: {error}"))
    finally:
        _end_programs(plan)
        os._exit(code)


def _reserve_users(plan: dict[str, Any]) -> None:
    """Reserve a range of user ids, for as long as this process or the zygote lives; name it in the plan.

    Programs of one user could end each other. A name is bound by one process alone, and programs open no sockets. The
    first range belongs to all sandboxes of the namespaces level, whose programs see no others but are seen.
    """
    first, size, number = plan["ids"]
    for start in range(first + size, first + number * size, size):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0agentenv-users-{start}")
        except OSError as error:
            name.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        name.detach()
        plan["ids"] = start, size, 1
        return
    raise linux.StepError(errno.EUSERS, f"user ids: expected a range that no sandbox uses, got {number - 1} in use")


def _end_programs(plan: dict[str, Any]) -> None:
    """Kill the programs and remove their folders; a pid namespace ends its programs and folders itself."""
    if plan["isolation"] != "namespaces":
        usage.kill_descendants()
        if "base" in plan:
            files.remove_tree(plan["base"])


def _tell_failure(control: socket.socket, error: OSError) -> None:
    control.send(json.dumps({"failed": str(error.strerror), "errno": error.errno or 0}).encode())


def _setup(plan: dict[str, Any]) -> int:
    """Import the shared modules, enter the namespaces, and return an open /proc."""
    os.umask(0o022)  # programs of other users pass through the folders that it makes
    # From here on and in programs; the modules imported so far may be cached.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.path[:] = [os.path.realpath(path) for path in sys.path if path]
    for name in _WARM.split():
        importlib.import_module(name)
    proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    if plan["isolation"] == "namespaces":
        rootfs.enter(plan, proc, lambda: _import(plan["preimport"], plan["paths"]))
    else:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        # Without mounts a narrowed folder is replaced by one of links to its entries: in the folder itself a program
        # would find all packages, and fail to read those that it may not.
        narrowed, links = rootfs.narrowed(plan["paths"]), f"{plan['base']}/packages"
        for path in plan["entries"]:
            for folder in narrowed:
                if path.startswith(f"{folder}/"):
                    link = links + path.removeprefix(folder)
                    os.makedirs(os.path.dirname(link), mode=0o755, exist_ok=True)
                    os.symlink(path, link)
        whole = [path for path in plan["paths"] if path not in narrowed]
        _import(plan["preimport"], whole + [links] * bool(narrowed))
    sys.path_importer_cache.clear()
    importlib.util.find_spec("no_such_module")  # fills the import caches for all programs
    return proc


def _import(modules: Sequence[str], folders: Sequence[str]) -> None:
    sys.path += folders
    for name in modules:
        importlib.import_module(name)


def _serve(plan: dict[str, Any], control: socket.socket, proc: int, guardian: int) -> NoReturn:
    """Run the zygote until the trainer or the guardian is gone, or the trainer sends an invalid request."""
    try:
        if plan["isolation"] == "namespaces":
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        else:
            # It ends the programs before itself, even if it was stopped when the guardian died.
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGCONT)
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        # A few hundred programs need more descriptors than the usual soft limit.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        setting = _setting(plan, proc)
        for name in plan.keys() - {"isolation", "base", "work"}:  # a program reads the frames around it
            del plan[name]
        # Create the standard streams once for all programs, on pipes like theirs.
        reader, writer = os.pipe()
        for fd in (1, 2):
            os.dup2(writer, fd)
        child.prepare()
        for fd in (1, 2):
            os.dup2(0, fd)
        os.close(reader)
        os.close(writer)
        gc.collect()
        gc.freeze()
        gc.disable()
        control.send(json.dumps({"ready": os.getpid(), "landlock": setting.landlock_version}).encode())
        base, work = plan.get("base", ""), plan["work"]
        watch.ProgramLoop(setting, control, base=base, work=work, guardian=guardian).loop()
    except OSError as error:
        _tell_failure(control, error)
    finally:
        _end_programs(plan)
        os._exit(1)


def _setting(plan: dict[str, Any], proc: int) -> child.Setting:
    isolation, ids = plan["isolation"], plan["ids"]
    own_user = isolation == "namespaces" or bool(ids)
    version = 0
    if isolation in ("namespaces", "landlock"):
        try:
            version = landlock.abi()
        except linux.StepError:
            if isolation == "landlock":
                raise
    signals_confined = own_user or version >= 6
    filters = {}
    for policy in POLICIES if isolation != "none" else ():
        code = seccomp.assemble(
            processes=policy == "proc",
            own_signals=not signals_confined,
            on_host=isolation != "namespaces",
            # Reported as successful, so that a copy of a file's mode does not fail a program.
            metadata=seccomp.ALLOW if own_user else seccomp.ERRNO,
        )
        filters[policy] = seccomp.Filter(code)
    rules = {}
    if version and isolation == "namespaces":
        # The root shows nothing else and is read-only, so only writing must be forbidden.
        writing = landlock.Ruleset(version, {"/dev": landlock.DEVICE}, handled=landlock.ALL_FS & ~landlock.READ)
        rules = dict.fromkeys(POLICIES, writing)
    elif version:
        shown = dict.fromkeys(rootfs.shown_paths(plan["entries"]), landlock.READ)
        shown |= dict.fromkeys(rootfs.DEVICES, landlock.DEVICE)
        without_zero = {path: rights for path, rights in shown.items() if path != rootfs.ZERO}
        rules = {"pure": landlock.Ruleset(version, without_zero), "proc": landlock.Ruleset(version, shown)}
    pages = int(linux.read_at(proc, "self/statm").split()[0])
    return child.Setting(
        isolation=isolation,
        landlock_version=version,
        ids=tuple(ids[:2]) if ids else None,
        proc=proc,
        filters=filters,
        rules=rules,
        vm_bytes=pages * resource.getpagesize(),
        pid=os.getpid(),
    )
