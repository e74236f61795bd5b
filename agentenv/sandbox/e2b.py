"""Programs in virtual machines of E2B: our own sandbox inside each, and the machine without internet around it.

    async with E2BSandbox() as sandbox:  # E2B_API_KEY in the environment
        result = await sandbox.run("print(6 * 7)", tenant="group-17")

One machine for each tenant, never for two: it stays while that tenant uses it, and as many are there as the account
may have. A machine that vanishes is INFRA, and what ran on it is tried again on another.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import random
import shlex
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.errors import InfraError, MissingDependency
from agentenv.sandbox._owner import is_gone, owner
from agentenv.sandbox._remote import RemoteSandbox
from agentenv.sandbox._remote_link import LinkLost
from agentenv.sandbox._remote_pipe import BOOT, PipeLink
from agentenv.sandbox.types import ExecLimits, Isolation, SandboxUnavailable

RUN = "agentenv.run"
IDLE_S = 60.0
"""That a machine is kept for a tenant who does nothing."""
REQUEST_S = 60.0
BUSY_S = 120.0
"""That a new machine is waited for while the service has no room."""
_MAX_S = 24 * 3600
_PIECE = 1 << 18
"""Characters of one request."""
_LOG = logging.getLogger(__name__)


class E2BSandbox(RemoteSandbox):
    """A sandbox in E2B's machines; needs `pip install 'agentenv[e2b]'` and an account. Used from one event loop."""

    backend = "e2b"

    def __init__(
        self,
        *,
        template: str | None = None,
        api_key: str | None = None,
        max_machines: int = 20,
        lifetime_s: int = 3600,
        metadata: Mapping[str, str] | None = None,
        limits: ExecLimits | None = None,
        preimport: Sequence[str] = (),
        run_slots: int | None = None,
    ) -> None:
        """Nothing is started before the first execution, or `open`.

        Args:
            template: E2B's, with Python 3.11 or newer as `python3`; its default when None.
            api_key: E2B_API_KEY in the environment when None.
            max_machines: at a time; those who ask for more wait.
            lifetime_s: after which E2B ends a machine that nobody began to use since; accounts have a limit.
            metadata: more to write on each machine, beside our run and the tenant.
            limits: of executions that name none.
            preimport: packages of the template that programs may import, and find imported already.
            run_slots: executions at a time on each machine; as many as it has cores when None.
        """
        super().__init__(limits=limits)
        self._template = template
        self._lifetime_s = lifetime_s
        self._api = {"api_key": api_key} if api_key else {}
        self._run = uuid.uuid4().hex
        self._metadata = {**(metadata or {}), **owner(), RUN: self._run}
        self._options = {"preimport": list(preimport), "run_slots": run_slots, "min_isolation": str(Isolation.LANDLOCK)}
        self._max_machines = max_machines
        self._machines: dict[str, Machine] = {}
        """By tenant."""
        self._closing: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        """Set when a machine is there for somebody else."""
        self._reaped = False
        self._worked = False

    async def _acquire(self, tenant: str) -> PipeLink:
        e2b = import_e2b()
        while (machine := self._machine(tenant)) is None:
            self._room.clear()
            await self._room.wait()
        machine.users += 1
        try:
            if not self._reaped:
                self._reaped = True
                await self._reap(e2b)
            await machine.ready()
            await machine.prolong()
        except BaseException as error:
            self._release(machine.link)
            if not isinstance(error, asyncio.CancelledError):
                self._drop(machine)
            if isinstance(error, SandboxUnavailable) and self._worked:
                raise LinkLost(str(error)) from error
            raise
        self._worked = True
        self.layers = machine.layers
        return machine.link

    def _machine(self, tenant: str) -> Machine | None:
        """This tenant's machine, a new one if there is room or another tenant's is idle; None when one has to wait."""
        machine = self._machines.get(tenant)
        if machine is not None and not machine.link.lost:
            return machine
        if machine is not None:
            _LOG.warning("%s; starting another", machine.link.lost)
            self._drop(machine)
        if len(self._machines) + len(self._closing) >= self._max_machines:
            idle = next((each for each in self._machines.values() if not each.users), None)
            if idle is not None:
                self._drop(idle)  # its end makes room, and wakes us
            return None
        self._machines[tenant] = machine = Machine(self, tenant)
        return machine

    def _release(self, link: Any) -> None:
        machine: Machine = link.machine
        machine.users -= 1
        if not machine.users:
            machine.idle = asyncio.get_running_loop().call_later(IDLE_S, self._expire, machine)
            self._room.set()

    def _expire(self, machine: Machine) -> None:
        if not machine.users:
            self._drop(machine)

    def _drop(self, machine: Machine) -> None:
        """End a machine, beside all else; its place is free once it is gone."""
        if self._machines.get(machine.tenant) is not machine:
            return
        del self._machines[machine.tenant]
        task = asyncio.ensure_future(machine.close())
        self._closing.add(task)
        task.add_done_callback(self._gone)

    def _gone(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        self._room.set()
        if not task.cancelled() and (error := task.exception()):
            _LOG.warning("%s; a machine was left to its lifetime", error)

    async def create(self, tenant: str) -> Any:
        """A new machine, without internet; waits where the service has no room.

        Raises:
            SandboxUnavailable: no account, no such template, or the like.
            InfraError: it did not work out.
        """
        e2b = import_e2b()
        loop = asyncio.get_running_loop()
        metadata = {**self._metadata, "agentenv.tenant": tenant}
        deadline, pause = loop.time() + BUSY_S, 1.0
        while True:
            try:
                return await e2b.AsyncSandbox.create(
                    template=self._template,
                    timeout=self._lifetime_s,
                    metadata=metadata,
                    allow_internet_access=False,
                    **self._api,
                )
            except (e2b.exceptions.RateLimitException, e2b.exceptions.ServiceBusyException) as error:
                if loop.time() > deadline:
                    raise LinkLost(f"E2BSandbox: {error}") from error
            except Exception as error:
                raise _said(e2b, error) from error
            await asyncio.sleep(random.uniform(0, pause))
            pause = min(2 * pause, 20.0)

    def start_options(self) -> dict[str, Any]:
        """Of the sandbox inside each machine."""
        return dict(self._options)

    @property
    def lifetime_s(self) -> int:
        """Of a machine that nobody begins to use."""
        return self._lifetime_s

    async def _reap(self, e2b: Any) -> None:
        """End machines whose owner is gone; what goes wrong there is no reason not to start."""
        with contextlib.suppress(InfraError, SandboxUnavailable):
            for found in await self._listed(e2b, {"agentenv.host": owner()["agentenv.host"]}):
                if is_gone(dict(found.metadata)):
                    _LOG.warning("E2BSandbox: ended a machine of a process that is gone: %s", found.sandbox_id)
                    await e2b.AsyncSandbox.kill(found.sandbox_id, **self._api)

    async def _listed(self, e2b: Any, metadata: dict[str, str]) -> list[Any]:
        try:
            pages = e2b.AsyncSandbox.list(query=e2b.SandboxQuery(metadata=metadata), **self._api)
            found = []
            while pages.has_next:
                found += await pages.next_items()
            return found
        except Exception as error:
            raise _said(e2b, error) from error

    async def _shut(self) -> None:
        for machine in list(self._machines.values()):
            self._drop(machine)
        await asyncio.gather(*self._closing, return_exceptions=True)
        if self._reaped:  # one whose creation was given up here may have come about there
            e2b = import_e2b()
            with contextlib.suppress(InfraError, SandboxUnavailable):
                for found in await self._listed(e2b, {RUN: self._run}):
                    await e2b.AsyncSandbox.kill(found.sandbox_id, **self._api)


class Machine:
    """One virtual machine, its far host, and who uses it."""

    def __init__(self, owner: E2BSandbox, tenant: str) -> None:
        self.tenant = tenant
        self.users = 0
        self.idle: asyncio.TimerHandle | None = None
        self.layers: tuple[str, ...] = ()
        self.link = MachineLink(self._write, f"e2b machine for {tenant!r}", machine=self)
        self._owner = owner
        self._sandbox: Any = None
        self._handle: Any = None
        self._said = ""
        self._ready: asyncio.Future[None] = asyncio.ensure_future(self._start())
        self._ended: asyncio.Future[Any] | None = None
        self._prolonged = asyncio.get_running_loop().time()

    async def ready(self) -> None:
        """Wait until it is there."""
        await asyncio.shield(self._ready)

    async def _start(self) -> None:
        self._sandbox = await self._owner.create(self.tenant)
        # A command that runs out of E2B's own time limit goes on: this one ends.
        command = f"exec timeout -k 5 {_MAX_S} python3 -I -S -c {shlex.quote(BOOT)} armoured"
        try:
            self._handle = await self._sandbox.commands.run(
                command,
                background=True,
                user="root",
                cwd="/",
                on_stdout=self._heed,
                on_stderr=self._heed_error,
                stdin=True,
                timeout=0,
                request_timeout=REQUEST_S,
                retain_output=False,
            )
        except Exception as error:
            raise _said(import_e2b(), error) from error
        self._ended = asyncio.ensure_future(self._handle.wait())
        self._ended.add_done_callback(self._over)
        found = await self.link.opened(self._owner.start_options())
        self.layers = ("virtual machine", "no internet", *found["layers"])

    async def prolong(self) -> None:
        """Have it live on, from time to time."""
        if self.idle:
            self.idle.cancel()
        now = asyncio.get_running_loop().time()
        if now - self._prolonged > self._owner.lifetime_s / 4:
            self._prolonged = now
            try:
                await self._sandbox.set_timeout(self._owner.lifetime_s)
            except Exception as error:
                self.link.lose(f"e2b: {error}")
                raise LinkLost(f"e2b: {error}") from error

    def _heed(self, text: str) -> None:
        self.link.feed(text.encode())

    def _heed_error(self, text: str) -> None:
        self._said = (self._said + text)[-1000:]

    def _over(self, ended: asyncio.Future[Any]) -> None:
        how = "" if ended.cancelled() else ended.exception() or ""
        self.link.lose(f"e2b machine: it ended {how} {self._said}".strip())

    async def _write(self, data: bytes) -> None:
        text = data.decode()
        try:
            for start in range(0, len(text), _PIECE):
                await self._sandbox.commands.send_stdin(
                    self._handle.pid, text[start : start + _PIECE], request_timeout=REQUEST_S
                )
        except Exception as error:
            raise LinkLost(f"e2b: {error}") from error

    async def close(self) -> None:
        """End it.

        Raises:
            InfraError: E2B did not; it will by its lifetime.
        """
        self.link.lose("e2b machine: closed")
        if self.idle:
            self.idle.cancel()
        self._ready.cancel()
        await asyncio.gather(self._ready, return_exceptions=True)
        if self._ended:
            self._ended.cancel()
            await asyncio.gather(self._ended, return_exceptions=True)
        await self.link.drained()
        if self._sandbox is not None:
            try:
                async with asyncio.timeout(REQUEST_S):
                    await self._sandbox.kill()
            except Exception as error:
                raise _said(import_e2b(), error) from error


class MachineLink(PipeLink):
    """The link to a machine, which knows it."""

    def __init__(self, write: Any, name: str, *, machine: Machine) -> None:
        super().__init__(write, name, armoured=True)
        self.machine = machine


def _said(e2b: Any, error: Exception) -> InfraError | SandboxUnavailable:
    """An error of E2B's as ours: what the account or the template is to blame for, and all else."""
    wrong = e2b.exceptions
    mine = (wrong.AuthenticationException, wrong.TemplateException, wrong.InvalidArgumentException)
    if isinstance(error, mine):
        return SandboxUnavailable(
            f"E2BSandbox: expected a machine, got {type(error).__name__}: {error}. Check E2B_API_KEY and the template"
        )
    return LinkLost(f"E2BSandbox: {type(error).__name__}: {error}")


def import_e2b() -> Any:
    """E2B's package.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        importlib.import_module("e2b.exceptions")
        return importlib.import_module("e2b")
    except ImportError as error:
        raise MissingDependency(
            f"E2BSandbox: expected the package e2b, got {error}. Install it: pip install 'agentenv[e2b]'"
        ) from error
