"""A program's process between its fork and its first instruction. Runs inside the sandbox.

The process makes its working folder, reads the program, and gives up its rights in a fixed order.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import io
import json
import linecache
import math
import os
import resource
import signal
import sys
import traceback
import types
from dataclasses import dataclass
from typing import Any, NoReturn

from agentenv.sandbox.guest import files, landlock, linux, seccomp

SOURCE_NAME = "main.py"
PLAIN: dict[str, Any] = {"argv": None, "files": ()}
"""Header of a program that is only source. It is not written, because parsing it takes a tenth of such a run."""
NICE = 10
"""Difference between the niceness of a program and that of its zygote."""
MAX_PENDING = 128
"""Timers and queued signals of a program."""
_MIB = 1 << 20


@dataclass(frozen=True)
class Setting:
    """The settings that all programs of a zygote share."""

    isolation: str
    landlock_version: int
    """0 without landlock."""
    ids: tuple[int, int] | None
    """Range of user ids of programs, first and count; None for the zygote's user."""
    proc: int
    """Open descriptor of /proc."""
    filters: dict[str, seccomp.Filter]
    """System call filters by policy; empty without seccomp."""
    rules: dict[str, landlock.Ruleset]
    """Landlock rules by policy, to which the working folder is added; empty without landlock."""
    vm_bytes: int
    """Address space of the zygote before a program runs."""
    pid: int
    """Process id of the zygote."""


@dataclass(frozen=True)
class ProgramJob:
    """One program, as its process needs it."""

    policy: str
    argv: bool
    limits: dict[str, float]
    slot: int
    work: str
    num_processes: int
    """Value of RLIMIT_NPROC; 0 keeps the current limit."""


def run(setting: Setting, job: ProgramJob, fds: dict[str, int]) -> NoReturn:
    """Become the program, or report why that failed.

    Args:
        setting: what the programs of this zygote share.
        job: the program.
        fds: its descriptors: "stdout", "stderr", "payload"; "ready", a pipe that receives "1" once the setup is done,
            or the error; and if it has them, "stdin", "channel", and "folder", a socket over which the working folder
            is sent.
    """
    try:
        program, source = _prepare(setting, job, fds)
        _confine(setting, job, fds)
    except (OSError, ValueError, KeyError, MemoryError, RuntimeError) as error:
        # Not the whole message, which may name a file: the zygote must not keep a word of a program.
        message = getattr(error, "strerror", None) or type(error).__name__
        with contextlib.suppress(OSError):
            os.write(fds["ready"], f"0{getattr(error, 'errno', None) or 0} {message}".encode()[:2000])
        os._exit(125)
    if not job.argv:
        _interpret(source, job.work)
    argv = program["argv"]
    try:
        os.execvpe(argv[0], argv, os.environ)
    except (OSError, ValueError) as error:
        os.write(2, f"{argv[0]}: {getattr(error, 'strerror', error)}\n".encode(errors="backslashreplace"))
    os._exit(127 if not os.path.exists(argv[0]) else 126)


def _prepare(setting: Setting, job: ProgramJob, fds: dict[str, int]) -> tuple[dict[str, Any], str]:
    """Make the working folder and read the program."""
    os.umask(0o022)
    if setting.isolation == "namespaces":
        linux.unshare(linux.CLONE_NEWNS)
        owner = f",uid={job.slot},gid={job.slot}" if setting.ids else ""
        flags = linux.MS_NOSUID | linux.MS_NODEV | (linux.MS_NOEXEC if job.policy == "pure" else 0)
        size, inodes = int(job.limits["disk_mb"] * _MIB), int(job.limits["num_inodes"])
        linux.mount("tmpfs", job.work, "tmpfs", flags=flags, data=f"size={size},nr_inodes={inodes},mode=700{owner}")
    with contextlib.suppress(OSError):
        linux.write_at(setting.proc, "self/oom_score_adj", "1000")
    if setting.ids:
        # In the zygote's user namespace, slots count from 0, which is the zygote.
        user = job.slot if setting.isolation == "namespaces" else setting.ids[0] + job.slot
        linux.become(user, user)
    os.chdir(job.work)
    program, source, contents = read_payload(fds["payload"])
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    start = 0
    for name, size in program["files"]:
        files.write(folder, name, contents[start : start + size])
        start += size
    if "folder" in fds:
        import socket

        with socket.socket(fileno=fds["folder"]) as connection:
            socket.send_fds(connection, [b"1"], [folder])
            connection.detach()
    os.close(folder)
    return program, source


def read_payload(fd: int) -> tuple[dict[str, Any], str, memoryview]:
    """Return the header of a program, its source, and the contents of its files."""
    data = memoryview(os.pread(fd, os.fstat(fd).st_size, 0))
    size = int.from_bytes(data[:8], "little")
    if not size:
        return PLAIN, str(data[8:], "utf-8", "surrogatepass"), data[:0]
    program = json.loads(bytes(data[8 : 8 + size]))
    after = 8 + size + program["source"]
    return program, str(data[8 + size : after], "utf-8", "surrogatepass"), data[after:]


def _confine(setting: Setting, job: ProgramJob, fds: dict[str, int]) -> None:
    """Give up everything that the program must not have. Each step needs rights that a later one removes."""
    os.setsid()
    os.dup2(fds.get("stdin", 0), 0)  # /dev/null is there
    os.dup2(fds["stdout"], 1)
    os.dup2(fds["stderr"], 2)
    if "channel" in fds:
        os.dup2(fds["channel"], 3)
    if setting.isolation == "namespaces" and not setting.ids:
        # A separate user namespace: it loses the capabilities outside, and its processes are counted separately.
        linux.unshare(linux.CLONE_NEWUSER)
        linux.map_ids(setting.proc, "self", inside=1000, outside=(0, 0))
    if setting.isolation != "none":
        linux.drop_capabilities()
    os.nice(NICE)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    # A zygote of the same user must be able to count the open files. Landlock keeps other processes out, and no core
    # is written.
    linux.prctl(
        linux.PR_SET_DUMPABLE, int(setting.landlock_version > 0 and setting.isolation == "landlock" and not setting.ids)
    )
    if setting.isolation != "namespaces":
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != setting.pid:
            os._exit(125)
    if setting.rules:
        setting.rules[job.policy].enter(
            job.work, landlock.WORK if job.policy == "proc" else landlock.WORK & ~landlock.EXECUTE
        )
    limits = job.limits
    memory = int(limits["memory_mb"] * _MIB)
    linux.limit(
        [
            # Above the zygote's limit: the kernel counts ticks here, which run ahead on a busy machine.
            (resource.RLIMIT_CPU, 2 * math.ceil(limits["cpu_s"]) + 2),
            (resource.RLIMIT_FSIZE, int(limits["file_mb"] * _MIB)),
            (resource.RLIMIT_NOFILE, int(limits["num_files"])),
            # 1, not 0: a core_pattern with a pipe ignores 0.
            (resource.RLIMIT_CORE, 1),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_RTPRIO, 0),
            # Timers and queued signals; the kernel counts them by user, a user namespace's also for its owner.
            (resource.RLIMIT_SIGPENDING, MAX_PENDING),
            # Other runtimes reserve address space that they never use, so only writable memory is limited.
            (resource.RLIMIT_DATA, memory) if job.argv else (resource.RLIMIT_AS, setting.vm_bytes + memory),
            # 0 keeps the current soft limit and makes it the hard limit.
            (resource.RLIMIT_NPROC, job.num_processes or resource.getrlimit(resource.RLIMIT_NPROC)[0]),
        ]
    )
    if job.argv:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
    if setting.filters:
        setting.filters[job.policy].install(os.getpid())
    os.write(fds["ready"], b"1")  # the steps that can fail are done
    linux.close_from(4 if "channel" in fds else 3)


def prepare() -> None:
    """Prepare the interpreter in the zygote for all programs. Descriptors 1 and 2 must be pipes."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "surrogateescape")
    out, err = (io.BufferedWriter(io.FileIO(fd, "w", closefd=False)) for fd in (1, 2))
    sys.stdout = io.TextIOWrapper(out, "utf-8", "surrogateescape")
    sys.stderr = io.TextIOWrapper(err, "utf-8", "backslashreplace", line_buffering=True)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    # Programs must not import agentenv.
    for name in [name for name in sys.modules if name.split(".")[0] == "agentenv"]:
        del sys.modules[name]
    sys.argv = [SOURCE_NAME]
    sys.path.insert(0, "")
    sys.excepthook = _print_exception
    for name in ("exit", "quit"):  # defined by the module site, which is not imported
        setattr(builtins, name, sys.exit)


def set_home(folder: str) -> None:
    """Make the working folder the home, temporary and import folder; called in the zygote before a fork."""
    os.environ.update(HOME=folder, PWD=folder, TMPDIR=folder)
    sys.path[0] = folder
    sys.path_importer_cache.clear()


def _interpret(source: str, folder: str) -> NoReturn:
    """Run Python source as `__main__`, and exit as an interpreter does."""
    linecache.cache[SOURCE_NAME] = (len(source), None, source.splitlines(keepends=True), SOURCE_NAME)
    main = types.ModuleType("__main__")
    main.__file__ = f"{folder}/{SOURCE_NAME}"
    sys.modules["__main__"] = main
    gc.enable()
    code = 1
    try:
        try:
            exec(compile(source, SOURCE_NAME, "exec", dont_inherit=True), main.__dict__)
            code = 0
        except BaseException as error:  # noqa: BLE001 -- the program's, which is told
            sys.last_value = error  # as an interpreter does; what its frames hold stays
            code = _exit_code(error)
        if threading := sys.modules.get("threading"):
            threading._shutdown()
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            code = code or 120
    finally:
        os._exit(code)


def _print_exception(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    traceback.print_exception(kind, error, trace, file=sys.stderr)


def _exit_code(error: BaseException) -> int:
    """Print an exception, and return the exit code of a program that ended by it."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        sys.stderr.write(f"{error.code}\n")
        return 1
    kind, trace, printed = type(error), error.__traceback__, False
    with contextlib.suppress(BaseException):
        sys.excepthook(kind, error, trace.tb_next if trace else None)  # the first frame is `_interpret`
        printed = sys.excepthook is _print_exception and kind is MemoryError and not hasattr(error, "__notes__")
    if isinstance(error, MemoryError) and not printed:  # printing may have needed more memory
        os.write(2, b"\nMemoryError\n")
    return 130 if isinstance(error, KeyboardInterrupt) else 1
