"""The trainer's side of a zygote: start it, give it programs, hear how they ended, notice when it is not well."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentenv.errors import InfraError
from agentenv.outside import outside
from agentenv.sandbox import files
from agentenv.sandbox._plan import Plan
from agentenv.sandbox.types import Isolation

READY_S = 60.0
"""For a zygote to have imported what it is to share."""
WEDGED_S = 5.0
"""Without an answer to a ping: it is stopped, or stuck."""
_PING_S = 1.0
_BOOT = """
import json, sys, types
plan = json.loads(sys.argv[1])
for name, path in plan["packages"].items():
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [path]
from agentenv.sandbox import {module}
{module}.main(plan, int(sys.argv[2]))
"""
"""Our package without its `__init__`, which imports more than a zygote should hold."""


class ZygoteLost(InfraError):
    """The zygote is gone, or not well; nothing is known of what it ran."""


def environment(plan: Plan) -> dict[str, str]:
    """All that programs see of an environment: nothing of the trainer's."""
    # pytest imports what packages offer it; what ours offers is in a folder that programs do not see.
    without_ours = {"PYTEST_ADDOPTS": "-p no:agentenv"} if plan.paths else {}
    return {
        "PATH": f"{Path(plan.python).parent}:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "HOME": "/work",
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        # One seed for all zygotes: sets are ordered alike in every run.
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        **without_ours,
    }


def command(python: str, module: str, plan: Mapping[str, Any], fd: int) -> list[str]:
    """A sandboxed-side module of ours as its own program: no site, no user folders, not the folder it is in."""
    package = Path(__file__).parent
    packages = {"agentenv": str(package.parent), "agentenv.sandbox": str(package)}
    # Not -I: it would ignore PYTHONHASHSEED. With an environment of ours, -s -P -S is as isolated.
    options = ["-s", "-P", "-S"]
    return [python, *options, "-c", _BOOT.format(module=module), json.dumps({**plan, "packages": packages}), str(fd)]


class Zygote:
    """One zygote; made by `start`."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, plan: Plan, *, base: str) -> None:
        self.plan = plan
        self.served = 0
        self.landlock = 0
        """Version of landlock that it uses; 0 without."""
        self.lost: str | None = None
        """Why it takes no more programs."""
        self._process = process
        self._control = control
        self._base = base
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._unanswered = 0
        """Pings since it said anything."""
        self._pinged = contextlib.ExitStack()
        """Time stands still, where it is virtual, until it says something."""
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(control, self._read)

    @staticmethod
    async def start(plan: Plan) -> Zygote:
        """Start one and wait until it is ready.

        Raises:
            ZygoteLost: it could not set itself up; the message says at which step.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        base = ""
        try:
            base = "" if plan.tier == Isolation.NAMESPACES else _make_base()
            plan_data = {**asdict(plan), **({"base": base} if base else {})}
            process = subprocess.Popen(  # noqa: ASYNC220 -- vfork: a millisecond
                command(plan.python, "_zygote", plan_data, theirs.fileno()),
                stdin=subprocess.DEVNULL,
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
                raise ZygoteLost(f"zygote: expected to be ready in {READY_S:g} s, was not") from None
            raise
        return zygote

    @property
    def pid(self) -> int:
        """Of the process that we started: the guardian."""
        return self._process.pid

    @property
    def in_flight(self) -> int:
        """Programs that it runs."""
        return len(self._waiting)

    async def submit(self, request: dict[str, Any], fds: Sequence[int]) -> asyncio.Future[dict[str, Any]]:
        """Give it a program; the future is its report, with "fetched" (a descriptor, the caller's to close) if asked.

        Raises:
            ZygoteLost: it takes none.
        """
        message = json.dumps(request).encode()
        deadline = self._loop.time() + WEDGED_S
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        while True:
            if self.lost:
                raise ZygoteLost(self.lost)
            try:
                socket.send_fds(self._control, [message], fds)
                break
            except BlockingIOError:
                if self._loop.time() > deadline:
                    self.lose(f"zygote: expected it to read, it has not for {WEDGED_S:g} s")
                await asyncio.sleep(0.002)
            except OSError as error:
                self.lose(f"zygote: {error}")
        self._waiting[request["id"]] = future
        self.served += 1
        if self._timer is None:
            self._unanswered = 0
            self._timer = self._loop.call_later(_PING_S, self._check)
        return future

    def _check(self) -> None:
        """Ping while programs run; one that does not answer is lost."""
        self._timer = None
        if self.lost or not self._waiting:
            return
        # Counted in pings, not in seconds: where this loop was held up, nobody has been asked anything.
        if self._unanswered * _PING_S > WEDGED_S:
            self.lose(f"zygote: expected an answer within {WEDGED_S:g} s, got none")
            return
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionError):
            self._control.send(b'{"ping": 1}')
            self._pinged.enter_context(outside())
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
                self._heed(message, fds)
            except (ValueError, KeyError, TypeError, InfraError) as error:
                for fd in fds:
                    os.close(fd)
                self.lose(str(error) if isinstance(error, InfraError) else f"zygote: garbage ({error})")
            if self.lost:
                return

    def _heed(self, message: bytes, fds: Sequence[int]) -> None:
        """Take one message.

        Raises:
            ZygoteLost: it is the last.
            ValueError: it is none.
        """
        if not message:
            raise ZygoteLost("zygote: it ended")
        self._unanswered = 0
        self._pinged.close()
        report = json.loads(message)
        if "pong" in report:
            return
        if "failed" in report:
            raise ZygoteLost(f"zygote: {report['failed']} (errno {report['errno']})")
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

    def lose(self, reason: str) -> None:
        """Take no more programs, end those that run, and tell who waits; again is harmless."""
        if self.lost:
            return
        self.lost = reason
        self._pinged.close()
        self._loop.remove_reader(self._control)
        if self._timer:
            self._timer.cancel()
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # a fork of ours may hold it as well
        self._control.close()  # the guardian sees that, and ends the zygote
        for future in [*self._waiting.values(), self._ready]:
            if not future.done():
                future.set_exception(ZygoteLost(reason))
        self._waiting.clear()
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # seen

    async def close(self) -> None:
        """End it, and all that it runs, and wait until that is so."""
        self.lose("zygote: closed")
        try:
            await asyncio.to_thread(self._process.wait, WEDGED_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the zygote and its programs end with their guardian
            await asyncio.to_thread(self._process.wait, WEDGED_S)
        if self._base:
            await asyncio.to_thread(files.remove_tree, self._base)

    def kill(self) -> None:
        """End it at once, without waiting; for when the loop is gone."""
        with contextlib.suppress(OSError):
            self._control.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(WEDGED_S)


def _make_base() -> str:
    base = os.path.realpath(tempfile.mkdtemp(prefix="agentenv-sandbox-"))
    os.chmod(base, 0o711)  # programs of other users pass through to their own folder
    return base
