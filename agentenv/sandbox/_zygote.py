"""The zygote: a warm interpreter that forks one confined process per program, and watches over it.

Two processes. The guardian is what the trainer starts: it enters the namespaces, forks the zygote (first process of a
pid namespace, so that its end is everybody's), and ends all when the trainer is gone. The zygote is single-threaded,
holds no secret, and never reads a program: that is between the trainer and the program's own process.

Requests and reports are JSON messages on one seqpacket socket; what does not read as one ends the zygote.
"""

from __future__ import annotations

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
from typing import Any, NoReturn

from agentenv.sandbox import _child, _landlock, _linux, _rootfs, _seccomp, _usage, _watch, files

_WARM = (
    "abc bisect collections collections.abc contextlib copy ctypes dataclasses datetime enum functools heapq io "
    "itertools json linecache math numbers operator os re signal socket stat string struct textwrap time traceback "
    "types typing"
)
"""What programs import most; more would make each fork slower. threading and random have something to do in every new
process, a fifth of what a program takes that needs neither: they are imported by those that do."""
FIRST_FREE_FD = 16
"""Below lie placeholders, so that what arrives never sits where a program's own descriptors go."""


def main(plan: dict[str, Any], control_fd: int) -> NoReturn:
    """Be the guardian; the zygote is its child."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as some parents leave it, children cannot be waited for
    control = _reserve_descriptors(control_fd)
    trainer = os.pidfd_open(os.getppid())
    code = 1
    try:
        proc = _setup(plan)
        pid = os.fork()
        if pid == 0:
            os.close(trainer)
            _serve(plan, control, proc)
        _guard(control, trainer, pid)
        code = 0
    except OSError as error:
        _tell_failure(control, error)
    except (ValueError, KeyError, ImportError) as error:
        _tell_failure(control, OSError(0, f"{type(error).__name__}: {error}"))
    finally:
        if plan["tier"] != "namespaces":
            _usage.kill_descendants()
            if "base" in plan:
                files.remove_tree(plan["base"])
        os._exit(code)


def _tell_failure(control: socket.socket, error: OSError) -> None:
    control.send(json.dumps({"failed": str(error.strerror), "errno": error.errno or 0}).encode())


def _setup(plan: dict[str, Any]) -> int:
    """Import what programs share, and enter the namespaces. Returns /proc, open."""
    # From here on, and in programs; our own modules may be kept compiled.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.path[:] = [os.path.realpath(path) for path in sys.path if path] + plan["paths"]
    for name in (*_WARM.split(), *plan["preimport"]):
        importlib.import_module(name)
    proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    if plan["tier"] == "namespaces":
        _rootfs.enter(plan, proc)
    else:
        _linux.prctl(_linux.PR_SET_CHILD_SUBREAPER, 1)
    sys.path_importer_cache.clear()
    importlib.util.find_spec("no_such_module")  # lists the folders that modules are in, for all programs
    return proc


def _guard(control: socket.socket, trainer: int, zygote: int) -> None:
    """Wait for the end of the zygote, or of the trainer, and then see to the zygote's."""
    pidfd = os.pidfd_open(zygote)
    poll = select.poll()
    poll.register(control, 0)  # hang-up alone
    poll.register(trainer, select.POLLIN)
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    os.kill(zygote, signal.SIGKILL)
    os.waitpid(zygote, 0)


def _serve(plan: dict[str, Any], control: socket.socket, proc: int) -> NoReturn:
    """Be the zygote, until the trainer goes or says something unheard of."""
    try:
        _linux.prctl(_linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if plan["tier"] != "namespaces":
            _linux.prctl(_linux.PR_SET_CHILD_SUBREAPER, 1)
        # Descriptors that arrive, and those of a few hundred programs, are more than what many start with.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        setting = _setting(plan, proc)
        _prepare_streams()
        gc.collect()
        gc.freeze()
        gc.disable()
        control.send(json.dumps({"ready": os.getpid(), "landlock": setting.landlock}).encode())
        _watch.Watch(setting, control, base=plan.get("base", "")).loop()
    except OSError as error:
        _tell_failure(control, error)
    finally:
        os._exit(1)


def _prepare_streams() -> None:
    """What programs print to is made once, on pipes as theirs will be."""
    listen, tell = os.pipe()
    for fd in (1, 2):
        os.dup2(tell, fd)
    _child.prepare()
    for fd in (1, 2):
        os.dup2(0, fd)
    os.close(listen)
    os.close(tell)


def _reserve_descriptors(control_fd: int) -> socket.socket:
    """Fill the low descriptors; the control socket moves up."""
    control = socket.socket(fileno=fcntl.fcntl(control_fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_FD))
    os.close(control_fd)
    while (fd := os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)) < FIRST_FREE_FD:
        continue
    os.close(fd)
    return control


def _setting(plan: dict[str, Any], proc: int) -> _child.Setting:
    tier, ids = plan["tier"], plan["ids"]
    confined = tier != "none"
    alone = tier == "namespaces" or bool(ids)
    version = _landlock_version(required=tier == "landlock") if tier in ("namespaces", "landlock") else 0
    kept_in = alone or version >= 6

    def ready(policy: str) -> _seccomp.Filter:
        """The filter of one policy."""
        return _seccomp.Filter(
            _seccomp.assemble(
                processes=policy == "proc",
                own_signals=not kept_in,
                own_groups=tier != "namespaces",
                # Answered as if done: a copy of a file's mode is no reason for a program to fail.
                metadata=_seccomp.ALLOW if alone else _seccomp.ERRNO,
            )
        )

    pages = int(_linux.read_at(proc, "self/statm").split()[0])
    return _child.Setting(
        tier=tier,
        landlock=version,
        ids=tuple(ids) if ids else None,
        proc=proc,
        filters={policy: ready(policy) for policy in ("pure", "proc")} if confined else {},
        rules=_rules(plan, version) if version else None,
        vm_bytes=pages * resource.getpagesize(),
        pid=os.getpid(),
    )


def _rules(plan: dict[str, Any], version: int) -> _landlock.Ruleset:
    if plan["tier"] == "namespaces":
        # The root there shows nothing else, and is read-only: only writing is left to forbid.
        handled = _landlock.ALL_FS & ~_landlock.READ
        return _landlock.Ruleset(version, {"/dev": _landlock.DEVICE}, handled=handled)
    readable = dict.fromkeys(_rootfs.shown_paths(plan["paths"]), _landlock.READ)
    return _landlock.Ruleset(version, readable | dict.fromkeys(_rootfs.DEVICES, _landlock.DEVICE))


def _landlock_version(*, required: bool) -> int:
    try:
        return _landlock.abi()
    except _linux.StepError:
        if required:
            raise
        return 0
