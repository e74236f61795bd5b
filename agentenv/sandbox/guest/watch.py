"""The zygote's loop: starts programs, kills them at their limits, and reports their end. Runs inside the sandbox."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from agentenv.sandbox.guest import child, files, linux, usage

TICK_S = 0.05
"""Interval at which the usage of a program is checked."""
_MAX_PAUSE_S = 0.5
"""Longest time between two checks."""
_MAX_MESSAGE = 65536
_SLACK_TASKS = 16
"""Allowance for threads that the user starts between the count and the start of the program."""
_MIB = 1 << 20
REMOVAL_S, REMOVAL_ASIDE_S = 0.005, 3.0
"""Time limits for removing a folder: inside the loop, and before the program is reported anyway."""


@dataclass(eq=False)
class _RunningProgram:
    number: int
    pid: int
    pidfd: int
    lease: int
    ready: int
    slot: int
    policy: str
    limits: dict[str, float]
    """Those of `ExecLimits`, and `given_back_s`: the most time that is added to its wall limit."""
    started: float
    work: str = ""
    names: int = -1
    """Memory file with the names of the files to fetch."""
    folder: int = -1
    """Socket that receives the open working folder; -1 if no file is fetched."""
    cause: str = ""
    next_look: float = 0.0
    host_pid: str = ""
    crowded: bool = False
    """True if it had several processes at some time."""
    seen_cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU time of each process that was seen, as it was last seen."""
    given_back_s: float = 0.0
    """Time that is added to its wall limit, because the host kept it waiting for a core."""
    report: dict[str, Any] = field(default_factory=dict)
    """Once it has ended."""
    fetched: int = -1
    reported: bool = False
    report_due: float = 0.0
    """Time at which it is reported even if its folder still exists."""

    def ends(self) -> float:
        """Return the time of its wall limit."""
        return self.started + self.limits["wall_s"] + self.given_back_s

    def due(self) -> float:
        """Return the time of the next check."""
        return min(self.next_look, self.ends()) if not self.cause else self.next_look


class ProgramLoop:
    """The loop that runs the programs of one zygote."""

    def __init__(self, setting: child.Setting, control: socket.socket, *, base: str, work: str, guardian: int) -> None:
        self._setting = setting
        self._control = control
        self._base = base
        self._live: set[_RunningProgram] = set()
        self._runs: dict[int, _RunningProgram] = {}
        """Running programs by pidfd and by lease."""
        self._removals: dict[int, _RunningProgram] = {}
        """Ended programs whose folder is being removed, by the pidfd of the removing process."""
        self._poll = select.epoll()
        self._poll.register(control, select.EPOLLIN)
        self._guardian = guardian
        if guardian >= 0:
            self._poll.register(guardian, select.EPOLLIN)
        self._self = os.pidfd_open(os.getpid())
        self._slots = list(range((setting.ids or (0, 1024))[1] - 1, 0, -1))
        self._nice = min(os.nice(0) + child.NICE, 19)
        self._shares_user = setting.isolation != "namespaces" and not setting.ids
        """True if programs have one user, whose threads the kernel counts together, those of other zygotes too."""
        self._own_tasks = (0.0, 0)
        self._work = work
        child.set_home(work)

    def loop(self) -> None:
        """Serve until the trainer hangs up or sends an invalid request, or until the guardian is gone."""
        control = self._control.fileno()
        while True:
            now = time.monotonic()
            dues = [run.due() for run in self._live]
            dues += [run.report_due for run in self._removals.values() if not run.reported]
            events = [fd for fd, _ in self._poll.poll(max(min(dues) - now, 0.0) + 0.001 if dues else None)]
            # Requests come last, because a new descriptor may get the number of a closed one.
            for fd, run in [(fd, self._removals.pop(fd)) for fd in events if fd in self._removals]:
                self._poll.unregister(fd)
                os.waitid(os.P_PIDFD, fd, os.WEXITED)
                os.close(fd)
                self._settle(run)
            for fd, run in [(fd, self._runs[fd]) for fd in events if fd in self._runs]:
                if run in self._live:
                    self._end(run) if fd == run.pidfd else self._kill(run, "cancelled")
            if self._guardian in events or (control in events and not self._receive()):
                return
            now = time.monotonic()
            for run in [run for run in self._live if now >= run.due()]:
                self._look(run, now)
            for run in self._removals.values():
                if now >= run.report_due:
                    self._report(run)

    # --- starting --------------------------------------------------------------------------------------------------

    def _receive(self) -> bool:
        message, fds, flags, _ = socket.recv_fds(self._control, _MAX_MESSAGE, 16)
        if not message or flags & socket.MSG_TRUNC:
            return False
        request = json.loads(message)
        if "ping" in request:
            self._send({"pong": request["ping"]})
            return True
        if flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            self._send({"id": request["id"], "cause": "setup", "error": "zygote: too many files are open"})
            return True
        named = dict(zip(("stdout", "stderr", "lease", "payload", *request["fds"]), fds, strict=True))
        try:
            self._start(request, named)
        except OSError as error:
            os.close(named["lease"])
            has_room = error.errno != errno.ENOSPC
            self._send({"id": request["id"], "cause": "setup" if has_room else "full", "error": f"zygote: {error}"})
        finally:
            for name, fd in named.items():
                if name != "lease":
                    os.close(fd)
        return True

    def _start(self, request: dict[str, Any], fds: dict[str, int]) -> None:
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as always:
            if not self._slots:
                raise OSError(errno.EAGAIN, "no slot is free")
            slot = self._slots.pop()
            undo.callback(self._slots.append, slot)
            work = self._work  # mounted by the program itself, in its mount namespace
            if self._base:  # a folder on the host's disk
                if files.is_full(self._base):  # before it can make a difference what the program does
                    raise OSError(errno.ENOSPC, "the disk is full")
                work = f"{self._base}/{slot}"
                os.mkdir(work, 0o700)
                undo.callback(files.remove_tree, work)
                if self._setting.ids:
                    user = self._setting.ids[0] + slot
                    os.chown(work, user, user)
                child.set_home(work)
            of_program = dict(fds)
            ready, of_program["ready"] = os.pipe()
            undo.callback(os.close, ready)
            always.callback(os.close, of_program["ready"])
            names = folder = -1
            if "names" in fds:
                names = os.dup(fds["names"])
                undo.callback(os.close, names)
                folder, of_program["folder"] = (end.detach() for end in socket.socketpair())
                undo.callback(os.close, folder)
                always.callback(os.close, of_program["folder"])
            policy, limits = request["policy"], request["limits"]
            num_processes = int(limits["num_processes"] if policy == "proc" else limits["num_threads"])
            if self._shares_user:
                # RLIMIT_NPROC of a program that shares its user includes the user's other processes.
                if time.monotonic() - self._own_tasks[0] > 1.0:
                    self._own_tasks = time.monotonic(), usage.count_tasks(os.getuid())
                num_processes = self._own_tasks[1] + _SLACK_TASKS + num_processes * (1 + len(self._runs) // 2)
            job = child.ProgramJob(policy, bool(request["argv"]), limits, slot, work, num_processes)
            started = time.monotonic()
            pid = self._fork(job, of_program)
            undo.callback(os.waitpid, pid, 0)
            undo.callback(os.kill, pid, signal.SIGKILL)
            pidfd = os.pidfd_open(pid)
            undo.callback(os.close, pidfd)
            run = _RunningProgram(
                request["id"], pid, pidfd, fds["lease"], ready, slot, job.policy, job.limits, started, work
            )
            run.next_look, run.names, run.folder = started + TICK_S, names, folder
            self._poll.register(run.pidfd, select.EPOLLIN)
            undo.callback(self._poll.unregister, run.pidfd)
            self._poll.register(run.lease, select.EPOLLIN)
            undo.pop_all()
        self._runs |= {run.pidfd: run, run.lease: run}
        self._live.add(run)

    def _fork(self, job: child.ProgramJob, fds: dict[str, int]) -> int:
        """Fork a program's process; at the namespaces level it is the first one of a new pid namespace."""
        new_namespace = self._setting.isolation == "namespaces"
        if new_namespace:
            linux.unshare(linux.CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if new_namespace and pid:
                linux.syscall("setns", self._self, linux.CLONE_NEWPID)
        if pid == 0:
            try:
                child.run(self._setting, job, fds)
            finally:
                os._exit(125)  # a program's process must never return into this loop
        return pid

    # --- watching --------------------------------------------------------------------------------------------------

    def _kill(self, run: _RunningProgram, cause: str) -> None:
        if run.cause:
            return
        run.cause = cause
        run.next_look = time.monotonic() + 1.0
        self._poll.unregister(run.lease)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._setting.isolation != "namespaces":
                os.killpg(run.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(run.pidfd, signal.SIGKILL)

    def _look(self, run: _RunningProgram, now: float) -> None:
        run.next_look = now + TICK_S
        if run.cause:
            run.next_look = now + 1.0
            return
        if now >= run.ends():
            run.given_back_s = min(self._kept_waiting_s(run), run.limits["given_back_s"])
            if now >= run.ends():
                self._kill(run, "wall")
                return
        with contextlib.suppress(OSError, ValueError, IndexError):
            cause = self._excess(run)
            if cause:
                self._kill(run, cause)
        # A check that takes long is repeated less often, so that one program cannot occupy the loop; but it is repeated
        # soon enough to see the limits on memory and disk exceeded.
        done = time.monotonic()
        run.next_look = max(run.next_look, done + min(9 * (done - now), _MAX_PAUSE_S))

    def _excess(self, run: _RunningProgram) -> str:
        """Return the limit that the program exceeds, or ""."""
        limits, proc = run.limits, self._setting.proc
        unlinked = 0
        if run.policy == "proc":
            roots = [self._host_pid(run), *(usage.orphans_of(proc, run.pid) if self._base else ())]
            tree = usage.tree_usage(proc, roots, with_files=bool(self._base))
            unlinked = tree.unlinked_bytes
            run.crowded |= tree.processes > 1
            # A parent that ignores SIGCHLD does not inherit the time of its children.
            run.seen_cpu_s |= tree.own_cpu_s
            if max(tree.cpu_s, sum(run.seen_cpu_s.values())) >= limits["cpu_s"]:
                return "cpu"
            if tree.memory_bytes > limits["memory_mb"] * _MIB:
                return "memory"
            if tree.processes > limits["num_processes"]:
                return "processes"
        elif time.clock_gettime(~run.pid << 3 | 2) >= limits["cpu_s"]:
            return "cpu"
        elif self._base:
            unlinked = usage.unlinked_bytes(proc, str(run.pid))
        return "disk" if self._base and _disk_exceeded(run, unlinked) else ""

    def _host_pid(self, run: _RunningProgram) -> str:
        """Return its pid in /proc, which shows the pids of the outermost namespace."""
        if not run.host_pid:
            text = linux.read_at(self._setting.proc, f"self/fdinfo/{run.pidfd}")
            run.host_pid = text.split("\nPid:")[1].split()[0]
        return run.host_pid

    def _kept_waiting_s(self, run: _RunningProgram) -> float:
        """Return the time for which the host let a program's first thread wait for a core.

        Delays that it caused itself do not count: the time of its other threads is subtracted, and one with several
        processes, which can hide their time, or with a priority that it lowered is never excused.
        """
        if run.crowded or os.getpriority(os.PRIO_PROCESS, run.pid) > self._nice:
            return 0.0
        with contextlib.suppress(OSError, ValueError, IndexError):
            ran, waited = linux.read_at(self._setting.proc, f"{self._host_pid(run)}/schedstat").split()[:2]
            others_s = max(time.clock_gettime(~run.pid << 3 | 2) - int(ran) / 1e9, 0.0)
            return max(int(waited) / 1e9 - others_s, 0.0)
        return 0.0

    def _is_killed_by_host(self, run: _RunningProgram) -> bool:
        """Return True if the kernel's own records show that the host killed a program, which has ended.

        No signal from inside kills one with the policy `pure`: not the first process of a pid namespace, and elsewhere
        the filter refuses SIGKILL. Only its CPU limit does, which it may have lowered, and which the kernel compares
        with this clock of ticks. One with the policy `proc` can also exhaust the host's memory, which is bounded by a
        look at it now and then.
        """
        ended = os.waitid(os.P_PIDFD, run.pidfd, os.WEXITED | os.WNOWAIT)
        if ended is None or (ended.si_code, ended.si_status) != (os.CLD_KILLED, signal.SIGKILL) or run.policy != "pure":
            return False
        with contextlib.suppress(OSError, ValueError, IndexError):
            limit_s = usage.hard_cpu_limit(self._setting.proc, self._host_pid(run))
            return time.clock_gettime(~run.pid << 3) < 0.9 * limit_s
        return False

    # --- ending ----------------------------------------------------------------------------------------------------

    def _end(self, run: _RunningProgram) -> None:
        wall = time.monotonic() - run.started
        delay_s = self._kept_waiting_s(run)
        killed_by_host = not run.cause and self._is_killed_by_host(run)
        if self._setting.isolation != "namespaces":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(run.pid, signal.SIGKILL)
        _, status, resources = os.wait4(run.pid, 0)
        orphans_s = 0.0
        if self._setting.isolation != "namespaces":
            orphans_s = usage.reap_group(run.pid)
        code = os.waitstatus_to_exitcode(status)
        run.report = {
            "id": run.number,
            "cause": run.cause or "exit",
            "code": max(code, 0),
            "signal": max(-code, 0),
            "wall_s": wall,
            "cpu_s": resources.ru_utime + resources.ru_stime + orphans_s,
            "delay_s": delay_s,
            "peak_bytes": resources.ru_maxrss * 1024,
            "shared_user": self._shares_user,
        }
        setup = os.read(run.ready, 4096)
        if setup != b"1":
            message = setup[1:].decode(errors="replace") or f"ended ({run.cause or 'by itself'}) while it was set up"
            lacked_room = self._base and message.startswith(f"{errno.ENOSPC} ")  # its own files fit, see `files.fits`
            cause = "cancelled" if run.cause == "cancelled" else "full" if lacked_room else "setup"
            run.report |= {"cause": cause, "error": message}
        elif killed_by_host:
            run.report["cause"] = "killed"
        elif self._base and not run.cause and _disk_exceeded(run):  # since the last check
            run.report["cause"] = "disk"
        self._live.discard(run)
        self._poll.unregister(run.pidfd)
        with contextlib.suppress(FileNotFoundError):
            self._poll.unregister(run.lease)
        for fd in (run.pidfd, run.lease):
            del self._runs[fd]
        for fd in (run.pidfd, run.lease, run.ready):
            os.close(fd)
        run.fetched = _fetch(run) if run.folder >= 0 else -1
        if not self._base or files.remove_tree(run.work, wait_s=REMOVAL_S):
            self._settle(run)
        else:
            self._remove_aside(run)

    def _remove_aside(self, run: _RunningProgram) -> None:
        """Remove a large folder in a separate process. The slot stays taken meanwhile; the report waits for a while."""
        run.report_due = time.monotonic() + REMOVAL_ASIDE_S
        try:
            pid = os.fork()
        except OSError:
            self._settle(run)
            return
        if pid == 0:
            try:
                linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
                files.remove_tree(run.work)
            finally:
                os._exit(0)
        fd = os.pidfd_open(pid)
        self._removals[fd] = run
        self._poll.register(fd, select.EPOLLIN)

    def _report(self, run: _RunningProgram) -> None:
        """Send the report of a program once."""
        if not run.reported:
            run.reported = True
            if self._base and not os.path.lexists(run.work):
                run.report["full"] = files.is_full(self._base)  # without what it wrote itself
            self._send(run.report, [run.fetched] if run.fetched >= 0 else [])
            if run.fetched >= 0:
                os.close(run.fetched)

    def _settle(self, run: _RunningProgram) -> None:
        """Report a program and free its slot, unless its folder still exists."""
        self._report(run)
        if not self._base or not os.path.lexists(run.work):
            self._slots.append(run.slot)

    def _send(self, report: dict[str, Any], fds: list[int] | None = None) -> None:
        socket.send_fds(self._control, [json.dumps(report).encode()], fds or [])


def _disk_exceeded(run: _RunningProgram, unlinked_bytes: int = 0) -> bool:
    size, count = files.used(run.work, max_inodes=int(run.limits["num_inodes"]))
    return size + unlinked_bytes > run.limits["disk_mb"] * _MIB or count > run.limits["num_inodes"]


def _fetch(run: _RunningProgram) -> int:
    """Copy the requested files into a memory file: a line of sizes, then the contents. Return -1 on failure."""
    into, fds = -1, [run.names]
    try:
        with socket.socket(fileno=run.folder) as connection, contextlib.suppress(BlockingIOError):
            connection.setblocking(False)
            fds += socket.recv_fds(connection, 1, 1)[1]
        into = os.memfd_create("fetched", os.MFD_CLOEXEC)
        os.lseek(into, 4096 * 16, os.SEEK_SET)
        limit = int(run.limits["fetch_mb"] * _MIB)
        sizes = files.collect(fds[1] if fds[1:] else -1, run.names, into=into, max_bytes=limit)
        os.pwrite(into, json.dumps(sizes).encode() + b"\n", 0)
        return into
    except OSError:
        if into >= 0:
            os.close(into)
        return -1
    finally:
        for fd in fds:
            os.close(fd)
