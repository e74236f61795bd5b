"""What a program's process does between being forked and being the program: it gives up all it has, in order."""

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

from agentenv.sandbox import _landlock, _linux, _seccomp, files

SOURCE_NAME = "main.py"
PLAIN: dict[str, Any] = {"argv": None, "files": (), "fetch": ()}
"""The header of source alone, which is not written: to read it is a tenth of what such a program takes."""
_MIB = 1 << 20


@dataclass(frozen=True)
class Setting:
    """What holds for every program of a zygote."""

    tier: str
    landlock: int
    """Version; 0 without."""
    ids: tuple[int, int] | None
    """Users that programs run as, first and count; None as the zygote's own."""
    proc: int
    """/proc, open."""
    filters: dict[str, _seccomp.Filter]
    """By policy; empty without seccomp."""
    rules: _landlock.Ruleset | None
    """What landlock leaves, besides the working folder; None without."""
    vm_bytes: int
    """What the zygote has mapped before a program runs."""
    pid: int
    """The zygote's."""


@dataclass(frozen=True)
class Job:
    """One program, as its process is told."""

    policy: str
    argv: bool
    limits: dict[str, float]
    slot: int
    work: str
    num_processes: int
    """For RLIMIT_NPROC; 0 where that counts processes of others too."""


@dataclass(frozen=True)
class Wires:
    """The file descriptors of one program."""

    stdin: int
    stdout: int
    stderr: int
    channel: int
    payload: int
    ready: int
    """Told "1" when all is set up, or what failed."""
    folder: int
    """A socket that the working folder is sent over; -1 when nothing is fetched."""

    @classmethod
    def of(cls, given: dict[str, int], *, ready: int, folder: int) -> Wires:
        """Those that came with a request, by name; without stdin it is descriptor 0, which has nothing."""
        stdin, channel = given.get("stdin", 0), given.get("channel", -1)
        return cls(stdin, given["stdout"], given["stderr"], channel, given["payload"], ready, folder)


def run(setting: Setting, job: Job, wires: Wires) -> NoReturn:
    """Become the program, or tell why not."""
    try:
        program, source = _prepare(setting, job, wires)
        _confine(setting, job, wires)
    except (OSError, ValueError, KeyError, MemoryError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            os.write(wires.ready, f"0{getattr(error, 'errno', None) or 0} {error}".encode()[:2000])
        os._exit(125)
    if job.argv:
        _execute(program["argv"])
    _interpret(source, job.work)


def _prepare(setting: Setting, job: Job, wires: Wires) -> tuple[dict[str, Any], str]:
    """Make the working folder and read the program."""
    os.umask(0o022)
    _isolate_folder(setting, job)
    with contextlib.suppress(OSError):
        _linux.write_at(setting.proc, "self/oom_score_adj", "1000")
    if setting.tier != "namespaces" or setting.ids:
        _become_slot(setting, job)
    os.chdir(job.work)
    program, source, contents = read_payload(wires.payload)
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    start = 0
    for name, size in program["files"]:
        files.write(folder, name, contents[start : start + size])
        start += size
    if wires.folder >= 0:
        import socket

        with socket.socket(fileno=wires.folder) as connection:
            socket.send_fds(connection, [b"1"], [folder])
            connection.detach()
    os.close(folder)
    return program, source


def read_payload(fd: int) -> tuple[dict[str, Any], str, memoryview]:
    """What the program is: a header in JSON, none for source alone; its source; its files."""
    data = memoryview(os.pread(fd, os.fstat(fd).st_size, 0))
    size = int.from_bytes(data[:8], "little")
    if not size:
        return PLAIN, str(data[8:], "utf-8", "surrogatepass"), data[:0]
    program = json.loads(bytes(data[8 : 8 + size]))
    after = 8 + size + program["source"]
    return program, str(data[8 + size : after], "utf-8", "surrogatepass"), data[after:]


def _isolate_folder(setting: Setting, job: Job) -> None:
    if setting.tier != "namespaces":
        return
    _linux.unshare(_linux.CLONE_NEWNS)
    owner = f",uid={job.slot},gid={job.slot}" if setting.ids else ""
    flags = _linux.MS_NOSUID | _linux.MS_NODEV | (_linux.MS_NOEXEC if job.policy == "pure" else 0)
    size, inodes = int(job.limits["disk_mb"] * _MIB), int(job.limits["num_inodes"])
    _linux.mount("tmpfs", job.work, "tmpfs", flags=flags, data=f"size={size},nr_inodes={inodes},mode=700{owner}")


def _become_slot(setting: Setting, job: Job) -> None:
    if setting.ids:
        # Within our own user namespace slots count from 0, which is the zygote.
        user = job.slot if setting.tier == "namespaces" else setting.ids[0] + job.slot
        _linux.become(user, user)


def _confine(setting: Setting, job: Job, wires: Wires) -> None:
    """Give up everything that the program is not to have; the order is forced by what each step needs."""
    os.setsid()
    os.dup2(wires.stdin, 0)
    os.dup2(wires.stdout, 1)
    os.dup2(wires.stderr, 2)
    if wires.channel >= 0:
        os.dup2(wires.channel, 3)
    if setting.tier == "namespaces" and not setting.ids:
        # A user namespace of its own: capabilities outside are lost, and its processes are counted apart.
        _linux.unshare(_linux.CLONE_NEWUSER)
        _linux.map_ids(setting.proc, "self", inside=1000, outside=(0, 0))
    if setting.tier != "none":
        _linux.drop_capabilities()
    os.nice(10)
    _linux.prctl(_linux.PR_SET_NO_NEW_PRIVS, 1)
    # Where the zygote is of the same user it must be able to count the files that are open; others are kept out by
    # landlock, and no core is written.
    _linux.prctl(_linux.PR_SET_DUMPABLE, int(setting.landlock > 0 and setting.tier == "landlock" and not setting.ids))
    if setting.tier != "namespaces":
        _linux.prctl(_linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != setting.pid:
            os._exit(125)
    if setting.rules:
        setting.rules.enter(job.work, _landlock.WORK if job.policy == "proc" else _landlock.WORK & ~_landlock.EXECUTE)
    _linux.limit(_rlimits(setting, job))
    if job.argv:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
    if setting.filters:
        setting.filters[job.policy].install(os.getpid())
    os.write(wires.ready, b"1")  # the last step that can fail is behind us
    _linux.close_from(4 if wires.channel >= 0 else 3)


def _rlimits(setting: Setting, job: Job) -> list[tuple[int, int]]:
    limits = job.limits
    memory = int(limits["memory_mb"] * _MIB)
    pairs = [
        # Behind the zygote's own limit: the kernel counts ticks here, and on a busy machine those run ahead.
        (resource.RLIMIT_CPU, 2 * math.ceil(limits["cpu_s"]) + 2),
        (resource.RLIMIT_FSIZE, int(limits["file_mb"] * _MIB)),
        (resource.RLIMIT_NOFILE, int(limits["num_files"])),
        # 1, not 0: a core_pattern that is a pipe ignores 0.
        (resource.RLIMIT_CORE, 1),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_RTPRIO, 0),
        # Other runtimes reserve address space that they never touch: what counts there is what can be written.
        (resource.RLIMIT_DATA, memory) if job.argv else (resource.RLIMIT_AS, setting.vm_bytes + memory),
    ]
    # Where it is not ours to set, what holds is made final.
    return [*pairs, (resource.RLIMIT_NPROC, job.num_processes or resource.getrlimit(resource.RLIMIT_NPROC)[0])]


def _execute(argv: list[str]) -> NoReturn:
    try:
        os.execvpe(argv[0], argv, os.environ)
    except (OSError, ValueError) as error:
        os.write(2, f"{argv[0]}: {getattr(error, 'strerror', error)}\n".encode(errors="backslashreplace"))
    os._exit(127 if not os.path.exists(argv[0]) else 126)


def prepare() -> None:
    """In the zygote: what every program would find and do anew. Its descriptors 1 and 2 are pipes meanwhile."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "surrogateescape")
    out, err = (io.BufferedWriter(io.FileIO(fd, "w", closefd=False)) for fd in (1, 2))
    sys.stdout = io.TextIOWrapper(out, "utf-8", "surrogateescape")
    sys.stderr = io.TextIOWrapper(err, "utf-8", "backslashreplace", line_buffering=True)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    # Ours is not the programs' to import.
    for name in [name for name in sys.modules if name.split(".")[0] == "agentenv"]:
        del sys.modules[name]
    sys.argv = [SOURCE_NAME]
    sys.path.insert(0, "")
    sys.excepthook = _show
    for name in ("exit", "quit"):  # of the module site, which is not imported
        setattr(builtins, name, sys.exit)


def set_home(where: str) -> None:
    """In the zygote, before it forks: the working folder is home, the place of temporary files, and imported from."""
    os.environ.update(HOME=where, PWD=where, TMPDIR=where)
    sys.path[0] = where
    sys.path_importer_cache.clear()


def _interpret(source: str, where: str) -> NoReturn:
    """Run Python source as `__main__`, as its own interpreter would."""
    linecache.cache[SOURCE_NAME] = (len(source), None, source.splitlines(keepends=True), SOURCE_NAME)
    main = types.ModuleType("__main__")
    main.__file__ = f"{where}/{SOURCE_NAME}"
    sys.modules["__main__"] = main
    gc.enable()
    with _Ending():
        exec(compile(source, SOURCE_NAME, "exec", dont_inherit=True), main.__dict__)
    os._exit(125)


def _show(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    traceback.print_exception(kind, error, trace, file=sys.stderr)


class _Ending:
    """Leaves the process as an interpreter does, whatever the program raised; never returns."""

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        code = 1
        try:
            code = _exit_code(kind, error, trace)
            if threading := sys.modules.get("threading"):
                threading._shutdown()
            atexit._run_exitfuncs()
            code = _flush(code)
        finally:
            os._exit(code)


def _exit_code(kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> int:
    if kind is None or error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        sys.stderr.write(f"{error.code}\n")
        return 1
    # The first frame is ours.
    shown = False
    with contextlib.suppress(BaseException):
        sys.excepthook(kind, error, trace.tb_next if trace else None)
        shown = sys.excepthook is _show and kind is MemoryError and not hasattr(error, "__notes__")
    if isinstance(error, MemoryError) and not shown:  # there may have been no memory left to show it
        os.write(2, b"\nMemoryError\n")
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _flush(code: int) -> int:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return code or 120
    return code
