"""Programs in a container: our own sandbox inside it, and around that Docker's walls without network or capabilities.

    async with DockerSandbox(image="python:3.12-slim") as sandbox:
        result = await sandbox.run("print(6 * 7)")

One container lives as long as the sandbox; a program costs a fork in it, not a container. The image needs Python 3.11
and nothing of ours: the source is sent there. Nothing of the host is mounted, so the daemon may be another machine's.
The container ends with this process, however that ends; where the daemon missed it, the next one here removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.sandbox._owner import is_gone, owner
from agentenv.sandbox._remote import RemoteSandbox
from agentenv.sandbox._remote_link import LinkLost
from agentenv.sandbox._remote_pipe import BOOT, PipeLink
from agentenv.sandbox.types import ExecLimits, Isolation, SandboxUnavailable

LABEL = "agentenv.sandbox"
COMMAND_S = 60.0
"""For a command that starts nothing."""
_CLOSE_S = 5.0
_MIN_MB = 4096
_READ = 1 << 18
_LOG = logging.getLogger(__name__)
_HINTS = {
    "Cannot connect to the": "Start the daemon, or set DOCKER_HOST",
    "error during connect": "Start the daemon, or set DOCKER_HOST",
    "permission denied while": "Join the group docker, or use a rootless daemon",
    "Unable to find image": "Pull it first: {command} pull {image}",
    "No such image": "Pull it first: {command} pull {image}",
    "image not known": "Pull it first: {command} pull {image}",
    "unknown runtime": "Add the runtime to the daemon's configuration, or name another",
    "invalid runtime": "Add the runtime to the daemon's configuration, or name another",
    "executable file not found": "Name an image with Python 3.11 or newer",
    "expected Python": "Name another image",
}


@dataclass(frozen=True)
class Form:
    """As whom a container runs, and what its sandbox is to find at least."""

    user: int
    capabilities: tuple[str, ...]
    min_isolation: Isolation


def _forms(number: int) -> tuple[Form, ...]:
    """What to try, best first: a user who may nothing, for landlock; a root who may only become others, without it.

    The user is another one for each container: how many processes a user has is counted over all of them.
    """
    changing = ("SETUID", "SETGID", "CHOWN", "KILL", "DAC_OVERRIDE", "FOWNER")
    return Form(10_000 + number % 50_000, (), Isolation.LANDLOCK), Form(0, changing, Isolation.UID)


class DockerSandbox(RemoteSandbox):
    """A sandbox in one long-lived container; needs the `docker` or `podman` command, and no package. One event loop."""

    backend = "docker"

    def __init__(
        self,
        *,
        image: str = "python:3.12-slim",
        command: str = "docker",
        runtime: str | None = None,
        flags: Sequence[str] = (),
        memory_mb: int | None = None,
        limits: ExecLimits | None = None,
        preimport: Sequence[str] = (),
        run_slots: int | None = None,
    ) -> None:
        """Nothing is started before the first execution, or `open`.

        Args:
            image: with Python 3.11 or newer as `python3`; it is never pulled by itself.
            command: `docker`, `podman`, or the path of one.
            runtime: of the daemon's, such as a virtual machine's; its default when None.
            flags: more of `docker run`; they come last, so `--cpus 4` adds and `--pids-limit 1024` replaces.
            memory_mb: of the container, with all its programs and their files; enough for `limits` when None, and
                4096 at least.
            limits: of executions that name none.
            preimport: packages of the image that programs may import, and find imported already.
            run_slots: executions at a time; as many as the container has cores when None.
        """
        super().__init__(limits=limits)
        self._image = image
        self._command = command
        self._runtime = runtime
        self._flags = tuple(flags)
        self._memory_mb = memory_mb
        self._options: dict[str, Any] = {"preimport": list(preimport), "run_slots": run_slots}
        self._container: Container | None = None
        self._form: Form | None = None
        self._is_podman = False
        self._number = uuid.uuid4().int
        self._opening = asyncio.Lock()

    async def _acquire(self, tenant: str) -> PipeLink:
        async with self._opening:
            if self._container is not None and self._container.link.lost:
                lost, self._container = self._container, None
                _LOG.warning("%s; starting another", lost.link.lost)
                await lost.close()
            if self._container is None:
                self._container = await (self._first() if self._form is None else self._another(self._form))
            return self._container.link

    async def _first(self) -> Container:
        """The first container, of the best form that there is.

        Raises:
            SandboxUnavailable: there is none; the message says what failed.
        """
        if shutil.which(self._command) is None:
            raise SandboxUnavailable(
                f"DockerSandbox: expected the command {self._command!r}, got none on PATH. "
                "Install Docker or Podman, or name the command"
            )
        self._is_podman = "podman" in (await command(self._command, "--version"))[1]
        await self._reap()
        refused = []
        for form in _forms(self._number):
            try:
                container = await self._start(form)
            except SandboxUnavailable as error:  # its far side runs, and found no isolation
                refused.append(str(error))
                continue
            except LinkLost as error:
                raise SandboxUnavailable(self._explained(str(error))) from error
            self._form = form
            return container
        raise SandboxUnavailable(f"DockerSandbox: {self._image!r} runs, but inside it:\n" + "\n".join(refused))

    async def _another(self, form: Form) -> Container:
        """A container like the one before, which is gone: now all that goes wrong is the infrastructure's."""
        try:
            return await self._start(form)
        except SandboxUnavailable as error:
            raise LinkLost(str(error)) from error

    async def _start(self, form: Form) -> Container:
        name = f"agentenv-{uuid.uuid4().hex[:12]}"
        container = Container(self._command, name)
        try:
            await container.start(self._arguments(name, form))
            found = await container.link.opened({**self._options, "min_isolation": str(form.min_isolation)})
        except BaseException:
            await container.close()
            raise
        walls = (f"container ({self._runtime})" if self._runtime else "container", "no network", "read-only image")
        self.layers = (*walls, *found["layers"])
        return container

    def _arguments(self, name: str, form: Form) -> list[str]:
        labels = {**owner(), LABEL: "1"}
        memory_mb = self._memory_mb or self._needed_mb()
        return [
            "run", "--rm", "--interactive", "--init", "--pull", "never", "--name", name, "--log-driver", "none",
            *(f"--label={key}={value}" for key, value in labels.items()),
            "--network", "none", "--ipc", "none", "--hostname", "sandbox", "--read-only",
            "--user", f"{form.user}:{form.user}",
            "--cap-drop", "ALL", *(f"--cap-add={each}" for each in form.capabilities),
            "--security-opt", "no-new-privileges", "--pids-limit", "1024", "--ulimit", "core=1",
            "--memory", f"{memory_mb}m", "--memory-swap", f"{memory_mb}m",
            "--tmpfs", f"/work:rw,exec,nosuid,nodev,size={memory_mb // 2}m,{self._owned_by(form.user)}",
            "--env", "TMPDIR=/work", "--env", "HOME=/work", "--workdir", "/",
            *(("--runtime", self._runtime) if self._runtime else ()), *self._flags,
            "--entrypoint", "python3", self._image, "-I", "-S", "-c", BOOT,
        ]  # fmt: skip

    def _owned_by(self, user: int) -> str:
        """Options of a folder that others pass through to their own, and leave nothing in."""
        if self._is_podman:  # which knows neither owners nor inodes; landlock keeps programs in their own folder
            return f"mode={1777 if user else 711}"
        return f"mode=711,nr_inodes=100k,uid={user},gid={user}"

    def _needed_mb(self) -> int:
        """What programs may use at a time: one that the kernel ends for want of memory would look like a wrong one."""
        slots = self._options["run_slots"] or os.cpu_count() or 1
        return max(_MIN_MB, 512 + int(1.5 * slots * (self.limits.memory_mb + self.limits.disk_mb)))

    def _explained(self, said: str) -> str:
        hints = [hint for key, hint in _HINTS.items() if key.lower() in said.lower()]
        hint = hints[0].format(command=self._command, image=self._image) if hints else "See what it says"
        return f"DockerSandbox: expected a container of {self._image!r} to run, got: {said}. {hint}"

    async def _shut(self) -> None:
        async with self._opening:
            container, self._container = self._container, None
            if container is not None:
                await container.close()

    async def _reap(self) -> None:
        """Remove containers whose owner is gone; what goes wrong there is no reason not to start."""
        line = "{{.ID}}\t" + "\t".join(f'{{{{.Label "{key}"}}}}' for key in owner())
        code, out = await command(self._command, "ps", "-a", "--filter", f"label={LABEL}", "--format", line)
        rows = [row.split("\t") for row in out.splitlines()] if code == 0 else []
        gone = [
            row[0] for row in rows if len(row) == len(owner()) + 1 and is_gone(dict(zip(owner(), row[1:], strict=True)))
        ]
        if gone:
            _LOG.warning("DockerSandbox: removed %d containers of processes that are gone", len(gone))
            await command(self._command, "rm", "-f", *gone)


class Container:
    """One container and the command that holds it: it ends when the command's stdin does."""

    def __init__(self, command: str, name: str) -> None:
        self.name = name
        self.link = PipeLink(self._write, f"container {name}", on_lost=self._end)
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._stdin: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._said = b""

    async def start(self, arguments: Sequence[str]) -> None:
        """Start it; whether it came up is for the link to say.

        Raises:
            LinkLost: the command cannot be executed.
        """
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                self._command, *arguments, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            raise LinkLost(f"{self._command}: {error}") from error
        process = self._process
        self._stdin = process.stdin
        errors = asyncio.ensure_future(self._heed_errors(process.stderr))
        self._tasks = [errors, asyncio.ensure_future(self._listen(process, errors))]

    async def _write(self, data: bytes) -> None:
        assert self._stdin is not None
        try:
            self._stdin.write(data)
            await self._stdin.drain()
        except OSError:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)  # its end says more of it
            raise

    async def _listen(self, process: asyncio.subprocess.Process, errors: asyncio.Task[None]) -> None:
        while process.stdout is not None and (data := await process.stdout.read(_READ)):
            self.link.feed(data)
        await errors
        code = await process.wait()
        said = self._said.decode("utf-8", "backslashreplace").strip()
        self.link.lose(f"container {self.name}: it ended ({code}) {' '.join(said.split())[-600:]}".rstrip())

    async def _heed_errors(self, stream: asyncio.StreamReader | None) -> None:
        while stream is not None and (data := await stream.read(4096)):
            self._said = (self._said + data)[-4096:]

    def _end(self) -> None:
        """Nobody talks to it any more: it ends by itself, if it can."""
        if self._stdin is not None:
            self._stdin.close()

    async def close(self) -> None:
        """End it, and wait until it is gone; again is harmless."""
        self.link.lose(f"container {self.name}: closed")
        await self.link.drained()
        if self._process is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._process.wait()
        except TimeoutError:
            await command(self._command, "rm", "-f", self.name)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def command(name: str, *arguments: str) -> tuple[int, str]:
    """Exit code and stdout of a short command; one that hangs is killed, and has code -1."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(name, *arguments, stdin=null, stdout=pipe, stderr=null)
    try:
        async with asyncio.timeout(COMMAND_S):
            out, _ = await process.communicate()
            return process.returncode or 0, out.decode("utf-8", "replace")
    except TimeoutError:
        return -1, ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
