"""The zygote's loop: it starts programs, ends them by their limits, and reports how they ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any

from agentenv.sandbox import _child, _linux, _usage, files

TICK_S = 0.05
"""How often what a program uses is looked at, once it is that old."""
_MAX_MESSAGE = 65536
_SLACK_TASKS = 16
"""For what the user starts between being counted and the program's start."""
_MIB = 1 << 20
REMOVAL_S, REMOVAL_ASIDE_S = 0.005, 3.0
"""What the removal of a folder may take in the loop, and before the program is reported all the same."""


@dataclass(eq=False)
class _Run:
    number: int
    pid: int
    pidfd: int
    lease: int
    ready: int
    slot: int
    policy: str
    limits: dict[str, float]
    started: float
    work: str = ""
    payload: int = -1
    folder: int = -1
    """Where the open working folder arrives; -1 when nothing is fetched."""
    cause: str = ""
    next_look: float = 0.0
    host_pid: str = ""
    crowded: bool = False
    """It was seen to have several processes."""

    def due(self) -> float:
        """When to look at it next."""
        return min(self.next_look, self.started + self.limits["wall_s"]) if not self.cause else self.next_look


@dataclass(eq=False)
class _Ended:
    run: _Run
    report: dict[str, Any]
    fetched: int
    due: float
    """When to report it, although its folder is not gone."""
    told: bool = False


class Watch:
    """Runs the programs of one zygote."""

    def __init__(self, setting: _child.Setting, control: socket.socket, *, base: str) -> None:
        self._setting = setting
        self._control = control
        self._base = base
        self._live: set[_Run] = set()
        self._runs: dict[int, _Run] = {}
        """By pidfd and by lease."""
        self._removals: dict[int, _Ended] = {}
        """Those that are reported once their folder is gone, by the pidfd of the process that removes it."""
        self._poll = select.epoll()
        self._poll.register(control, select.EPOLLIN)
        self._self = os.pidfd_open(os.getpid())
        self._slots = list(range((setting.ids or (0, 1024))[1] - 1, 0, -1))
        self._own_tasks = (0.0, 0)
        _child.set_home("/work")

    def loop(self) -> None:
        """Serve until the trainer hangs up, or says what is no request."""
        control = self._control.fileno()
        while True:
            now = time.monotonic()
            dues = [run.due() for run in self._live] + [each.due for each in self._removals.values() if not each.told]
            events = [fd for fd, _ in self._poll.poll(max(min(dues) - now, 0.0) + 0.001 if dues else None)]
            # Whose they are is told first, and requests come last: a new descriptor may get the number of an old one.
            for fd, ended in [(fd, self._removals.pop(fd)) for fd in events if fd in self._removals]:
                self._poll.unregister(fd)
                os.waitid(os.P_PIDFD, fd, os.WEXITED)
                os.close(fd)
                self._settle(ended)
            for fd, run in [(fd, self._runs[fd]) for fd in events if fd in self._runs]:
                if run in self._live:
                    self._end(run) if fd == run.pidfd else self._kill(run, "cancelled")
            if control in events and not self._receive():
                return
            now = time.monotonic()
            for run in [run for run in self._live if now >= run.due()]:
                self._look(run, now)
            for ended in self._removals.values():
                if now >= ended.due:
                    self._report(ended)

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
        wires = dict(zip(("stdout", "stderr", "lease", "payload", *request["fds"]), fds, strict=True))
        try:
            self._start(request, wires)
        except OSError as error:
            os.close(wires["lease"])
            self._send({"id": request["id"], "cause": "setup", "error": f"zygote: {error}"})
        finally:
            for name, fd in wires.items():
                if name != "lease":
                    os.close(fd)
        return True

    def _start(self, request: dict[str, Any], wires: dict[str, int]) -> None:
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as always:
            slot = self._take_slot()
            undo.callback(self._slots.append, slot)
            work = self._make_folder(slot, undo)
            ready, tell = os.pipe()
            undo.callback(os.close, ready)
            always.callback(os.close, tell)
            payload = folder = theirs = -1
            if request["fetch"]:
                payload = os.dup(wires["payload"])
                undo.callback(os.close, payload)
                folder, theirs = (end.detach() for end in socket.socketpair())
                undo.callback(os.close, folder)
                always.callback(os.close, theirs)
            policy, limits = request["policy"], request["limits"]
            job = _child.Job(policy, bool(request["argv"]), limits, slot, work, self._process_limit(request))
            started = time.monotonic()
            pid = self._fork(job, _child.Wires.of(wires, ready=tell, folder=theirs))
            undo.callback(_end_child, pid)
            pidfd = os.pidfd_open(pid)
            undo.callback(os.close, pidfd)
            run = _Run(request["id"], pid, pidfd, wires["lease"], ready, slot, job.policy, job.limits, started, work)
            run.next_look, run.payload, run.folder = started + TICK_S, payload, folder
            self._poll.register(run.pidfd, select.EPOLLIN)
            undo.callback(self._poll.unregister, run.pidfd)
            self._poll.register(run.lease, select.EPOLLIN)
            undo.pop_all()
        self._runs |= {run.pidfd: run, run.lease: run}
        self._live.add(run)

    def _take_slot(self) -> int:
        if not self._slots:
            raise OSError(errno.EAGAIN, "no slot is free")
        return self._slots.pop()

    def _fork(self, job: _child.Job, wires: _child.Wires) -> int:
        """A process for a program; in the namespaces tier the first one of a pid namespace of its own."""
        apart = self._setting.tier == "namespaces"
        if apart:
            _linux.unshare(_linux.CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if apart and pid:
                _linux.syscall("setns", self._self, _linux.CLONE_NEWPID)
        if pid == 0:
            try:
                _child.run(self._setting, job, wires)
            finally:
                os._exit(125)  # whatever happens, a program's process never comes back into this loop
        return pid

    def _make_folder(self, slot: int, undo: contextlib.ExitStack) -> str:
        """A working folder on the host's disk, of the program's user; in a mount namespace it makes its own."""
        if not self._base:
            return "/work"
        path = f"{self._base}/{slot}"
        os.mkdir(path, 0o700)
        undo.callback(files.remove_tree, path)
        if self._setting.ids:
            user = self._setting.ids[0] + slot
            os.chown(path, user, user)
        _child.set_home(path)
        return path

    def _process_limit(self, request: dict[str, Any]) -> int:
        """What RLIMIT_NPROC is to be. Where the user is not the program's own, it counts what they run already."""
        limits, proc = request["limits"], request["policy"] == "proc"
        allowed = int(limits["num_processes"] if proc else limits["num_threads"])
        if self._setting.tier == "namespaces" or self._setting.ids:
            return allowed
        if time.monotonic() - self._own_tasks[0] > 1.0:
            self._own_tasks = time.monotonic(), _usage.count_tasks(os.getuid())
        return self._own_tasks[1] + _SLACK_TASKS + allowed * (1 + len(self._runs) // 2)

    # --- watching --------------------------------------------------------------------------------------------------

    def _kill(self, run: _Run, cause: str) -> None:
        if run.cause:
            return
        run.cause = cause
        run.next_look = time.monotonic() + 1.0
        self._poll.unregister(run.lease)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._setting.tier != "namespaces":
                os.killpg(run.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(run.pidfd, signal.SIGKILL)

    def _look(self, run: _Run, now: float) -> None:
        run.next_look = now + TICK_S
        if run.cause:
            run.next_look = now + 1.0
            return
        if now - run.started >= run.limits["wall_s"]:
            self._measure_delay(run)
            self._kill(run, "wall")
            return
        with contextlib.suppress(OSError, ValueError, IndexError):
            cause = self._excess(run)
            if cause:
                self._kill(run, cause)
        # What takes long to look at is looked at less often: nobody has the loop for himself.
        run.next_look = max(run.next_look, now + 10 * (time.monotonic() - now))

    def _excess(self, run: _Run) -> str:
        """Which limit it is over, if any."""
        limits, proc = run.limits, self._setting.proc
        unlinked = 0
        if run.policy == "proc":
            roots = [self._host_pid(run), *(_usage.orphans_of(proc, run.pid) if self._base else ())]
            usage = _usage.tree_usage(proc, roots, with_files=bool(self._base))
            unlinked = usage.unlinked_bytes
            run.crowded |= usage.processes > 1
            if usage.cpu_s >= limits["cpu_s"]:
                return "cpu"
            if usage.memory_bytes > limits["memory_mb"] * _MIB:
                return "memory"
            if usage.processes > limits["num_processes"]:
                return "processes"
        elif time.clock_gettime(~run.pid << 3 | 2) >= limits["cpu_s"]:
            return "cpu"
        elif self._base:
            unlinked = _usage.unlinked_bytes(proc, str(run.pid))
        if self._base:
            size, count = files.used(run.work, max_inodes=int(limits["num_inodes"]))
            if size + unlinked > limits["disk_mb"] * _MIB or count > limits["num_inodes"]:
                return "disk"
        return ""

    def _host_pid(self, run: _Run) -> str:
        """Its number in /proc, which shows those of the outermost namespace."""
        if not run.host_pid:
            text = _linux.read_at(self._setting.proc, f"self/fdinfo/{run.pidfd}")
            run.host_pid = text.split("\nPid:")[1].split()[0]
        return run.host_pid

    def _measure_delay(self, run: _Run) -> tuple[float, float]:
        """Seconds that its first thread ran, and that it could have run and did not."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            ran, waited = _linux.read_at(self._setting.proc, f"{self._host_pid(run)}/schedstat").split()[:2]
            return int(ran) / 1e9, int(waited) / 1e9
        return 0.0, 0.0

    # --- ending ----------------------------------------------------------------------------------------------------

    def _end(self, run: _Run) -> None:
        wall = time.monotonic() - run.started
        ran, delay = self._measure_delay(run)
        if self._setting.tier != "namespaces":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(run.pid, signal.SIGKILL)
        _, status, usage = os.wait4(run.pid, 0)
        left_s = 0.0
        if self._setting.tier != "namespaces":
            left_s = _usage.reap_group(run.pid)
        code = os.waitstatus_to_exitcode(status)
        report: dict[str, Any] = {
            "id": run.number,
            "cause": run.cause or "exit",
            "code": max(code, 0),
            "signal": max(-code, 0),
            "wall_s": wall,
            "cpu_s": usage.ru_utime + usage.ru_stime + left_s,
            "leader_cpu_s": ran,
            "delay_s": delay,
            "crowded": run.crowded,
            "peak_bytes": usage.ru_maxrss * 1024,
        }
        self._judge(run, report, os.read(run.ready, 4096))
        self._release(run)
        ended = _Ended(run, report, _fetch(run) if run.folder >= 0 else -1, time.monotonic() + REMOVAL_ASIDE_S)
        if not self._base or files.remove_tree(run.work, wait_s=REMOVAL_S):
            self._settle(ended)
        else:
            self._remove_aside(ended)

    def _judge(self, run: _Run, report: dict[str, Any], told: bytes) -> None:
        """Tell what the host did from what the program did."""
        if told != b"1":
            words = told[1:].decode(errors="replace") or f"ended ({run.cause or 'by itself'}) while it was set up"
            report |= {"cause": "cancelled" if run.cause == "cancelled" else "setup", "error": words}
        elif self._base:
            report["full"] = files.is_full(self._base)
        elif report["signal"] == signal.SIGKILL and not run.cause and run.policy == "pure" and report["cpu_s"] < 0.9:
            # The first process of a namespace cannot be killed from within, but by a CPU limit, which is whole seconds.
            report["cause"] = "killed"

    def _remove_aside(self, ended: _Ended) -> None:
        """Remove a folder that takes long in a process of its own; its slot waits for it, and for a while who asked."""
        try:
            pid = os.fork()
        except OSError:
            self._settle(ended)
            return
        if pid == 0:
            try:
                _linux.prctl(_linux.PR_SET_PDEATHSIG, signal.SIGKILL)
                files.remove_tree(ended.run.work)
            finally:
                os._exit(0)
        fd = os.pidfd_open(pid)
        self._removals[fd] = ended
        self._poll.register(fd, select.EPOLLIN)

    def _report(self, ended: _Ended) -> None:
        """Say how a program ended, once."""
        if not ended.told:
            ended.told = True
            self._send(ended.report, [ended.fetched] if ended.fetched >= 0 else [])
            if ended.fetched >= 0:
                os.close(ended.fetched)

    def _settle(self, ended: _Ended) -> None:
        """Report it, and take its slot back unless something is left there."""
        self._report(ended)
        if not self._base or not os.path.lexists(ended.run.work):
            self._slots.append(ended.run.slot)

    def _release(self, run: _Run) -> None:
        self._live.discard(run)
        for fd in (run.pidfd, run.lease):
            del self._runs[fd]
        self._poll.unregister(run.pidfd)
        with contextlib.suppress(FileNotFoundError):
            self._poll.unregister(run.lease)
        for fd in (run.pidfd, run.lease, run.ready):
            os.close(fd)

    def _send(self, report: dict[str, Any], fds: list[int] | None = None) -> None:
        socket.send_fds(self._control, [json.dumps(report).encode()], fds or [])


def _fetch(run: _Run) -> int:
    """The files that were asked for, in memory: a line of sizes, then their contents. -1 where there is no room."""
    into, fds = -1, [run.payload]
    try:
        with socket.socket(fileno=run.folder) as connection, contextlib.suppress(BlockingIOError):
            connection.setblocking(False)
            fds += socket.recv_fds(connection, 1, 1)[1]
        names = _child.read_payload(run.payload)[0]["fetch"]
        into = os.memfd_create("fetched", os.MFD_CLOEXEC)
        os.lseek(into, 4096 * 16, os.SEEK_SET)
        limit = int(run.limits["fetch_mb"] * _MIB)
        sizes = files.collect(fds[1], names, into=into, max_bytes=limit) if fds[1:] else [-1] * len(names)
        os.pwrite(into, json.dumps(sizes).encode() + b"\n", 0)
        return into
    except OSError:
        if into >= 0:
            os.close(into)
        return -1
    finally:
        for fd in fds:
            os.close(fd)


def _end_child(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
