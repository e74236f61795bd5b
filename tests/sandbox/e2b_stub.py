"""E2B's package as far as it is used, with machines that are processes here: `install` puts it where it is imported.

Its signatures are compared with the real package's where that is installed: see `test_e2b.py`.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

MACHINES = {}
"""By id; those that live."""
CREATED = []
"""All that were asked for: their arguments."""
TROUBLE = {}
"""What goes wrong: {"create": [exceptions, one for each time]}."""
_numbers = itertools.count(1)


class SandboxException(Exception):
    pass


class NotFoundException(SandboxException):
    pass


class InvalidArgumentException(SandboxException):
    pass


class TemplateException(SandboxException):
    pass


class RateLimitException(SandboxException):
    pass


class AuthenticationException(Exception):
    pass


class ServiceBusyException(Exception):
    pass


@dataclass
class SandboxQuery:
    metadata: dict | None = None
    state: list | None = None
    started_after: object = None
    template: str | None = None


@dataclass
class SandboxInfo:
    sandbox_id: str
    metadata: dict


class Paginator:
    def __init__(self, found):
        self._pages = [found[:1], found[1:]]

    @property
    def has_next(self):
        return bool(self._pages)

    async def next_items(self, **opts):
        return self._pages.pop(0)


class CommandHandle:
    def __init__(self, process, on_stdout, on_stderr):
        self.process = process
        self._readers = [
            asyncio.ensure_future(self._read(process.stdout, on_stdout)),
            asyncio.ensure_future(self._read(process.stderr, on_stderr)),
        ]

    @property
    def pid(self):
        return self.process.pid

    async def _read(self, stream, tell):
        while data := await stream.read(1000):  # odd pieces, as a network makes
            tell(data.decode())

    async def wait(self):
        await asyncio.gather(*self._readers)
        code = await self.process.wait()
        if code:
            raise SandboxException(f"Command exited with code {code}")


class Commands:
    def __init__(self, machine):
        self._machine = machine
        self.handles = {}

    async def run(self, cmd, background=None, envs=None, user=None, cwd=None, on_stdout=None, on_stderr=None,
                  stdin=None, timeout=60, request_timeout=None, *, retain_output=True):  # fmt: skip
        assert (background, stdin, timeout, retain_output) == (True, True, 0, False)
        pipe = asyncio.subprocess.PIPE
        environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        process = await asyncio.create_subprocess_exec(
            "/bin/bash", "-c", cmd, stdin=pipe, stdout=pipe, stderr=pipe, cwd=cwd, env=environment,
            start_new_session=True,
        )  # fmt: skip
        handle = self.handles[process.pid] = CommandHandle(process, on_stdout, on_stderr)
        return handle

    async def send_stdin(self, pid, data, request_timeout=None):
        if self._machine.sandbox_id not in MACHINES:
            raise NotFoundException("The sandbox was not found")
        stdin = self.handles[pid].process.stdin
        stdin.write(data.encode())
        await stdin.drain()


@dataclass(eq=False)
class AsyncSandbox:
    sandbox_id: str
    metadata: dict
    timeouts: list = field(default_factory=list)

    def __post_init__(self):
        self.commands = Commands(self)

    @classmethod
    async def create(cls, template=None, timeout=None, metadata=None, envs=None, secure=None,
                     allow_internet_access=None, mcp=None, network=None, iam=None, lifecycle=None, volume_mounts=None,
                     logger=None, idempotency_key=None, **opts):  # fmt: skip
        CREATED.append({"template": template, "timeout": timeout, "metadata": metadata, **opts,
                        "allow_internet_access": allow_internet_access})  # fmt: skip
        if TROUBLE.get("create"):
            raise TROUBLE["create"].pop(0)
        await asyncio.sleep(0)
        machine = cls(f"machine-{next(_numbers)}", dict(metadata))
        MACHINES[machine.sandbox_id] = machine
        return machine

    @staticmethod
    def list(query=None, limit=None, next_token=None, order=None, **opts):
        wanted = (query.metadata or {}).items()
        found = [each for each in MACHINES.values() if wanted <= each.metadata.items()]
        return Paginator([SandboxInfo(each.sandbox_id, each.metadata) for each in found])

    async def set_timeout(self, timeout, **opts):
        self.timeouts.append(timeout)

    async def kill(self, **opts):
        """Of an instance, or of the class with an id: as theirs."""
        machine = MACHINES.pop(self if isinstance(self, str) else self.sandbox_id, None)
        if machine is None:
            return False
        for handle in machine.commands.handles.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(handle.process.pid, signal.SIGKILL)
            await handle.process.wait()
        return True


def install(monkeypatch):
    """Be `e2b` for a test, with no machines and no trouble."""
    exceptions = types.ModuleType("e2b.exceptions")
    for name, value in list(globals().items()):
        if name.endswith("Exception"):
            setattr(exceptions, name, value)
    package = types.ModuleType("e2b")
    package.AsyncSandbox, package.SandboxQuery, package.exceptions = AsyncSandbox, SandboxQuery, exceptions
    monkeypatch.setitem(sys.modules, "e2b", package)
    monkeypatch.setitem(sys.modules, "e2b.exceptions", exceptions)
    for table in (MACHINES, CREATED, TROUBLE):
        table.clear()
