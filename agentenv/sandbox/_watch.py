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


class Watch:
    """Runs the programs of one zygote."""

    def __init__(self, setting: _child.Setting, control: socket.socket, *, base: str) -> None:
        self._setting = setting
        self._control = control
        self._base = base
        self._runs: dict[int, _Run] = {}
        """By pidfd and by lease."""
        self._poll = select.epoll()
        self._poll.register(control, select.EPOLLIN)
        self._self = os.pidfd_open(os.getpid())
        self._slots = list(range((setting.ids or (0, 1024))[1] - 1, 0, -1))
        self._own_tasks = (0.0, 0)

    def loop(self) -> None:
        """Serve until the trainer hangs up, or says what is no request."""
        while True:
            live = {run.number: run for run in self._runs.values()}.values()
            now = time.monotonic()
            wait = min((run.due() - now for run in live), default=-1.0)
            for fd, _ in self._poll.poll(max(wait, 0.0) + 0.001 if live else None):
                if fd == self._control.fileno():
                    if not self._receive():
                        return
                elif run := self._runs.get(fd):
                    if fd == run.pidfd:
                        self._end(run)
                    else:
                        self._kill(run, "cancelled")
            now = time.monotonic()
            for run in list({run.number: run for run in self._runs.values()}.values()):
                if now >= run.due():
                    self._look(run, now)

    # --- starting --------------------------------------------------------------------------------------------------

    def _receive(self) -> bool:
        message, fds, flags, _ = socket.recv_fds(self._control, _MAX_MESSAGE, 16)
        if not message or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            return False
        request = json.loads(message)
        if "ping" in request:
            self._send({"pong": request["ping"]})
            return True
        names = ("stdout", "stderr", "lease", "payload", *request["fds"])
        wires = dict(zip(names, fds, strict=True))
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
        if not self._slots:
            raise OSError(errno.EAGAIN, "no slot is free")
        slot = self._slots.pop()
        work = self._work(slot)
        ready, tell = os.pipe()
        mine, theirs = socket.socketpair() if request["fetch"] else (None, None)
        try:
            self._make_folder(work, slot)
            job = _child.Job(
                policy=request["policy"],
                argv=bool(request["argv"]),
                limits=request["limits"],
                slot=slot,
                work=work,
                num_processes=self._process_limit(request),
            )
            started = time.monotonic()
            pid = self._fork(job, _child_wires(wires, tell, theirs.fileno() if theirs else -1))
        except OSError:
            self._slots.append(slot)
            os.close(ready)
            if mine:
                mine.close()
            if self._base:
                files.remove_tree(work)
            raise
        finally:
            os.close(tell)
            if theirs:
                theirs.close()
        run = _Run(
            request["id"], pid, os.pidfd_open(pid), wires["lease"], ready, slot, job.policy, job.limits, started, work
        )
        run.next_look = started + TICK_S
        if mine:
            run.folder, run.payload = mine.detach(), os.dup(wires["payload"])
        for fd in (run.pidfd, run.lease):
            self._runs[fd] = run
        self._poll.register(run.pidfd, select.EPOLLIN)
        self._poll.register(run.lease, 0)

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

    def _work(self, slot: int) -> str:
        return f"{self._base}/{slot}" if self._base else "/work"

    def _make_folder(self, path: str, slot: int) -> None:
        """A working folder on the host's disk, of the program's user; in a mount namespace it makes its own."""
        if not self._base:
            return
        os.mkdir(path, 0o700)
        if self._setting.ids:
            user = self._setting.ids[0] + slot
            os.chown(path, user, user)

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
            return
        if now - run.started >= run.limits["wall_s"]:
            self._measure_delay(run)
            self._kill(run, "wall")
            return
        with contextlib.suppress(OSError, ValueError, IndexError):
            cause = self._excess(run)
            if cause:
                self._kill(run, cause)

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
        told = os.read(run.ready, 4096)
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
        if not told.startswith(b"1"):
            report |= {
                "cause": run.cause or "setup",
                "error": told[1:].decode(errors="replace") or "it died while set up",
            }
        self._release(run)
        fetched = self._fetch(run) if run.folder >= 0 else -1
        if self._setting.tier != "namespaces":
            files.remove_tree(run.work)
        self._send(report, [fetched] if fetched >= 0 else [])
        if fetched >= 0:
            os.close(fetched)
        self._slots.append(run.slot)

    def _release(self, run: _Run) -> None:
        for fd in (run.pidfd, run.lease):
            del self._runs[fd]
        self._poll.unregister(run.pidfd)
        with contextlib.suppress(FileNotFoundError):
            self._poll.unregister(run.lease)
        for fd in (run.pidfd, run.lease, run.ready):
            os.close(fd)

    def _fetch(self, run: _Run) -> int:
        """The files that were asked for, in memory that goes to the trainer: a line of sizes, then their contents."""
        into = os.memfd_create("fetched", os.MFD_CLOEXEC)
        with socket.socket(fileno=run.folder) as connection:
            connection.setblocking(False)
            try:
                _, fds, _, _ = socket.recv_fds(connection, 1, 1)
            except OSError:
                fds = []
        try:
            names = _child.read_payload(run.payload)[0]["fetch"]
            os.lseek(into, 4096 * 16, os.SEEK_SET)
            limit = int(run.limits["fetch_mb"] * _MIB)
            sizes = files.collect(fds[0], names, into=into, max_bytes=limit) if fds else [-1] * len(names)
            os.pwrite(into, json.dumps(sizes).encode() + b"\n", 0)
        finally:
            for fd in (*fds, run.payload):
                os.close(fd)
        return into

    def _send(self, report: dict[str, Any], fds: list[int] | None = None) -> None:
        socket.send_fds(self._control, [json.dumps(report).encode()], fds or [])


def _child_wires(wires: dict[str, int], ready: int, folder: int) -> _child.Wires:
    return _child.Wires(
        stdin=wires.get("stdin", 0),
        stdout=wires["stdout"],
        stderr=wires["stderr"],
        channel=wires.get("channel", -1),
        payload=wires["payload"],
        ready=ready,
        folder=folder,
    )
