"""A zygote as the trainer sees it: its start, its programs and their reports, and the detection of its loss.

The zygotes of one sandbox are a pool: started on demand, and replaced when they are old or lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentenv._util.paths import PACKAGE
from agentenv._util.virtual_time import external_work
from agentenv.errors import InfraError
from agentenv.sandbox.guest import files
from agentenv.sandbox.local.plan import Plan
from agentenv.sandbox.types import Isolation

READY_S = 60.0
"""Time limit for a zygote to import its packages and become ready."""
WEDGED_S = 5.0
"""Time without an answer to a ping after which a zygote is lost: it is stopped or stuck."""
MAX_SERVED = 10_000
"""Programs after which a zygote is replaced, so that small leaks cannot add up."""
_PING_S = 1.0
_PASSING = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
"""Errors for lack of room, after which another try may succeed."""
_LOG = logging.getLogger(__name__)
_BOOT = """
import json, sys, types
plan = json.load(sys.stdin)
for name, path in plan["packages"].items():
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [path]
from agentenv.sandbox.guest import zygote
zygote.main(plan, {fd})
"""
"""Imports the zygote without the `__init__` modules of its packages, which import more than a zygote should.

The plan is not an argument, because programs see the arguments of the interpreter that they are forked from.
"""
_PACKAGES = ("agentenv", "agentenv._util", "agentenv.sandbox", "agentenv.sandbox.guest")


class ZygoteLost(InfraError):
    """The zygote is gone or does not respond; the outcome of its programs is unknown."""


def environment(plan: Plan) -> dict[str, str]:
    """Return the environment variables of programs; none are inherited from the trainer."""
    # pytest would import agentenv's plugin, whose folder is hidden from programs.
    without_ours = {"PYTEST_ADDOPTS": "-p no:agentenv"} if plan.paths else {}
    return {
        "PATH": f"{Path(plan.python).parent}:/usr/local/bin:/usr/bin:/bin",
        **dict.fromkeys(("LANG", "LC_ALL"), "C.UTF-8"),
        "TZ": "UTC",
        "HOME": plan.work,
        **dict.fromkeys(("USER", "LOGNAME"), "sandbox"),
        # The same seed for all zygotes, so that sets have the same order in every run.
        "PYTHONHASHSEED": "0",
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX"), "1"),
        **without_ours,
    }


class SetupFailed(ZygoteLost):
    """A step of a zygote's setup failed, as it will again: the machine lacks what the level needs."""


class Zygote:
    """One zygote; created by `start`."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, plan: Plan, *, base: str) -> None:
        self.plan = plan
        self.served = 0
        self.landlock = 0
        """Landlock version that it uses; 0 if none."""
        self.lost: str | None = None
        """Reason why it accepts no more programs; None while it does."""
        self._process = process
        self._control = control
        self._base = base
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._unanswered = 0
        """Number of pings since its last message."""
        self._clock_stopped = contextlib.ExitStack()
        """Stops virtual time from a ping until the next message."""
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(control, self._read)

    @staticmethod
    async def start(plan: Plan) -> Zygote:
        """Start a zygote and wait until it is ready.

        Raises:
            SetupFailed: a step of its setup failed; the message names it.
            ZygoteLost: it died, was not ready in time, or lacked room.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        base = ""
        try:
            if plan.isolation != Isolation.NAMESPACES:
                base = os.path.realpath(tempfile.mkdtemp(prefix="agentenv-sandbox-"))  # noqa: ASYNC240 -- short
                os.chmod(base, 0o711)  # programs of other users pass through to their own folders
            with open(os.memfd_create("plan", os.MFD_CLOEXEC), "r+b") as data:  # noqa: ASYNC230 -- memory
                packages = {name: str(PACKAGE.joinpath(*name.split(".")[1:])) for name in _PACKAGES}
                folder = {"base": base} if base else {}
                data.write(json.dumps({**asdict(plan), **folder, "packages": packages}).encode())
                data.seek(0)
                # Not -I, which ignores PYTHONHASHSEED. With this environment, -s -P -S isolates as well.
                process = subprocess.Popen(  # noqa: ASYNC220 -- vfork: a millisecond
                    [plan.python, "-s", "-P", "-S", "-c", _BOOT.format(fd=theirs.fileno())],
                    stdin=data,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment(plan),
                    cwd="/",
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            if base:
                os.rmdir(base)
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        zygote = Zygote(process, ours, plan, base=base)
        try:
            async with asyncio.timeout(READY_S):
                await asyncio.shield(zygote._ready)
        except BaseException as error:
            await zygote.close()
            if isinstance(error, TimeoutError):
                raise ZygoteLost(f"zygote: expected it to be ready within {READY_S:g} s, got no answer") from None
            raise
        return zygote

    @property
    def pid(self) -> int:
        """The pid of the guardian, the process that was started."""
        return self._process.pid

    @property
    def in_flight(self) -> int:
        """The number of programs that it runs."""
        return len(self._waiting)

    async def submit(self, request: dict[str, Any], fds: Sequence[int]) -> asyncio.Future[dict[str, Any]]:
        """Send a program to the zygote and return a future of its report.

        If files were requested, the report has "fetched", a descriptor that the caller must close.

        Raises:
            ZygoteLost: the zygote accepts no programs.
        """
        message = json.dumps(request).encode()
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        while True:
            if self.lost:
                raise ZygoteLost(self.lost)
            try:
                socket.send_fds(self._control, [message], fds)
                break
            except BlockingIOError:
                await asyncio.sleep(0.002)  # other programs run, so a zygote that does not read is lost by its pings
            except OSError as error:
                self.lose(f"zygote: {error}")
        self._waiting[request["id"]] = future
        self.served += 1
        if self._timer is None:
            self._unanswered = 0
            self._timer = self._loop.call_later(_PING_S, self._check)
        return future

    def _check(self) -> None:
        """Ping the zygote while programs run; a zygote that does not answer is lost."""
        self._timer = None
        if self.lost or not self._waiting:
            return
        # Counted in pings, not in seconds: a blocked event loop sends no pings.
        if self._unanswered * _PING_S > WEDGED_S:
            self.lose(f"zygote: expected an answer within {WEDGED_S:g} s, got none")
            return
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionError):
            self._control.send(b'{"ping": 1}')
            self._clock_stopped.enter_context(external_work())
        self._unanswered += 1
        self._timer = self._loop.call_later(_PING_S, self._check)

    def _read(self) -> None:
        for _ in range(64):
            try:
                message, fds, _, _ = socket.recv_fds(self._control, 65536, 4)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.lose(f"zygote: {error}")
                return
            try:
                self._handle(message, fds)
            except (ValueError, KeyError, TypeError, ZygoteLost) as error:
                for fd in fds:
                    os.close(fd)
                self.lose(
                    error
                    if isinstance(error, ZygoteLost)
                    else f"zygote: expected a report in JSON, got {message[:100]!r} ({error})"
                )
            if self.lost:
                return

    def _handle(self, message: bytes, fds: Sequence[int]) -> None:
        """Handle one message.

        Raises:
            ZygoteLost: the zygote has ended or failed.
            ValueError: the message is invalid.
        """
        if not message:
            raise ZygoteLost("zygote: it ended")
        self._unanswered = 0
        self._clock_stopped.close()
        report = json.loads(message)
        if "pong" in report:
            return
        if "failed" in report:
            kind = ZygoteLost if report["errno"] in _PASSING else SetupFailed
            raise kind(f"zygote: {report['failed']} (errno {report['errno']})")
        if "ready" in report:
            self.landlock = int(report["landlock"])
            self._ready.set_result(report)
            return
        future = self._waiting.pop(report["id"])
        if fds:
            report["fetched"] = fds[0]
        if not future.done():
            future.set_result(report)
        elif fds:
            os.close(fds[0])

    def lose(self, reason: str | ZygoteLost) -> None:
        """Accept no more programs, end the running ones and fail their reports. Repeated calls have no effect."""
        if self.lost:
            return
        kind = type(reason) if isinstance(reason, ZygoteLost) else ZygoteLost
        self.lost = str(reason)
        self._clock_stopped.close()
        self._loop.remove_reader(self._control)
        if self._timer:
            self._timer.cancel()
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold it as well
        self._control.close()  # the guardian notices and ends the zygote
        for future in [*self._waiting.values(), self._ready]:
            if not future.done():
                future.set_exception(kind(self.lost))
        self._waiting.clear()
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # retrieved, so that asyncio does not log it

    async def close(self) -> None:
        """End the zygote and its programs, and wait until they are gone."""
        self.lose("zygote: closed")
        try:
            await asyncio.to_thread(self._process.wait, WEDGED_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the zygote and its programs end with their guardian
            await asyncio.to_thread(self._process.wait, READY_S)
        if self._base:
            await asyncio.to_thread(files.remove_tree, self._base)


class ZygotePool:
    """A fixed number of zygotes with the plan of the first one, which runs already."""

    def __init__(self, first: Zygote, *, size: int) -> None:
        self._plan = first.plan
        self._places: list[Zygote | None] = [first] + [None] * (size - 1)
        self._retired: set[Zygote] = set()
        self.closed = False
        self._starting = asyncio.Lock()  # one start at a time
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def zygotes(self) -> list[Zygote]:
        """The running zygotes."""
        return [zygote for zygote in (*self._places, *self._retired) if zygote and not zygote.lost]

    async def acquire(self) -> Zygote:
        """Return the zygote with the fewest programs; start it if necessary.

        Raises:
            ZygoteLost: no zygote can be started, or the pool is closed.
        """
        if self.closed:
            raise ZygoteLost("sandbox: closed")

        def usable(place: int) -> Zygote | None:
            zygote = self._places[place]
            return zygote if zygote and not zygote.lost and zygote.served < MAX_SERVED else None

        num_running = [zygote.in_flight if zygote else 0 for zygote in self._places]  # a lost one runs none
        place = num_running.index(min(num_running))
        if zygote := usable(place):
            return zygote
        async with self._starting:
            if zygote := usable(place):
                return zygote  # replaced by another caller in the meantime
            old = self._places[place]
            new = await Zygote.start(self._plan)
            if self.closed:
                await new.close()
                raise ZygoteLost("sandbox: closed")
            self._places[place] = new
            if old is not None:
                if old.lost:
                    _LOG.warning("%s; started another", old.lost)
                self._retired.add(old)

                async def close_when_idle() -> None:
                    while old.in_flight:  # noqa: ASYNC110 -- once in ten thousand programs
                        await asyncio.sleep(0.05)
                    await old.close()
                    self._retired.discard(old)

                task = asyncio.create_task(close_when_idle())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
            return new

    async def close(self) -> None:
        """End all zygotes and their programs."""
        self.closed = True
        for task in list(self._closing):
            task.cancel()
        zygotes = {zygote for zygote in (*self._places, *self._retired) if zygote}
        await asyncio.gather(*(zygote.close() for zygote in zygotes))
        self._places = [None] * len(self._places)
        self._retired.clear()
