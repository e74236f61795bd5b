"""A sandbox in a container: the local sandbox runs inside Docker's isolation, without network or capabilities.

    async with DockerSandbox(image="python:3.12-slim") as sandbox:
        result = await sandbox.run("print(6 * 7)")

One container lives as long as the sandbox; each program is a fork inside it. The image needs Python 3.11 but not
agentenv, whose source is sent there. Nothing of the host is mounted, so the daemon may run on another machine. The
container ends with this process, even if the process is killed; if the daemon misses that, the next sandbox on this
machine removes the container.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.sandbox.remote.link import LinkLost
from agentenv.sandbox.remote.pipe import BOOT, PipeLink
from agentenv.sandbox.remote.sandbox import RemoteSandbox
from agentenv.sandbox.types import ExecLimits, Isolation, SandboxUnavailable

LABEL = "agentenv.sandbox"
COMMAND_S = 60.0
"""Time limit of a command that starts no container."""
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
class ContainerUser:
    """The user and capabilities of a container, and the weakest isolation that its sandbox accepts."""

    uid: int
    capabilities: tuple[str, ...]
    min_isolation: Isolation


class DockerSandbox(RemoteSandbox):
    """A sandbox in one long-lived container; needs the `docker` or `podman` command. For use from one event loop."""

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
        """Configure a sandbox; `open` or the first execution starts the container.

        Args:
            image: an image with Python 3.11 or newer as `python3`; never pulled automatically.
            command: `docker`, `podman`, or the path of one.
            runtime: a runtime of the daemon, such as one with virtual machines; the daemon's default if None.
            flags: further flags of `docker run`; they come last, so they override the flags set here.
            memory_mb: memory of the container with all its programs and their files; computed from `limits` if None,
                at least 4096.
            limits: default limits of executions.
            preimport: packages of the image that are imported in advance and available to programs.
            run_slots: number of concurrent executions; the number of the container's cores if None.
        """
        super().__init__(limits=limits)
        self._image = image
        self._command = command
        self._runtime = runtime
        self._flags = tuple(flags)
        self._memory_mb = memory_mb
        self._options: dict[str, Any] = {"preimport": list(preimport), "run_slots": run_slots}
        self._container: Container | None = None
        self._user: ContainerUser | None = None
        self._is_podman = False
        self._number = uuid.uuid4().int
        self._opening = asyncio.Lock()

    async def _acquire(self, tenant: str) -> PipeLink:
        async with self._opening:
            if self._container is not None and self._container.link.lost:
                lost, self._container = self._container, None
                _LOG.warning("%s; starting another", lost.link.lost)
                await lost.close()
            if self._container is not None:
                return self._container.link
            if self._user is None:
                self._container = await self._first()
                return self._container.link
            try:
                self._container = await self._start(self._user)
            except SandboxUnavailable as error:  # it worked before, so any failure is one of the infrastructure
                raise LinkLost(str(error)) from error
            return self._container.link

    async def _first(self) -> Container:
        """Start the first container, with the best user that works.

        Raises:
            SandboxUnavailable: no user works; the message names what failed.
        """
        if shutil.which(self._command) is None:
            raise SandboxUnavailable(
                f"DockerSandbox: expected the command {self._command!r}, got none on PATH. "
                "Install Docker or Podman, or set `command`"
            )
        self._is_podman = "podman" in (await command(self._command, "--version"))[1]
        await self._remove_abandoned()
        # Best first: an unprivileged user with landlock, then a root that can change users. Each container has its own
        # unprivileged user, because the kernel counts processes per user over all containers.
        capabilities = ("SETUID", "SETGID", "CHOWN", "KILL", "DAC_OVERRIDE", "FOWNER")
        users = (
            ContainerUser(10_000 + self._number % 50_000, (), Isolation.LANDLOCK),
            ContainerUser(0, capabilities, Isolation.UID),
        )
        failures = []
        for user in users:
            try:
                container = await self._start(user)
            except SandboxUnavailable as error:  # the host runs but has no isolation
                failures.append(str(error))
                continue
            except LinkLost as error:
                message = str(error)
                hints = [hint for key, hint in _HINTS.items() if key.lower() in message.lower()]
                hint = hints[0].format(command=self._command, image=self._image) if hints else "See its message"
                raise SandboxUnavailable(
                    f"DockerSandbox: expected a container of {self._image!r} to run, got: {message}. {hint}"
                ) from error
            self._user = user
            return container
        raise SandboxUnavailable(
            f"DockerSandbox: {self._image!r} runs, but has no isolation inside:\n" + "\n".join(failures)
        )

    async def _start(self, user: ContainerUser) -> Container:
        name = f"agentenv-{uuid.uuid4().hex[:12]}"
        labels = {**owner_labels(), LABEL: "1"}
        # Enough for all slots: a program that the kernel kills for lack of memory would look like a wrong one.
        slots = self._options["run_slots"] or os.cpu_count() or 1
        needed_mb = max(_MIN_MB, 512 + int(1.5 * slots * (self.limits.memory_mb + self.limits.disk_mb)))
        memory_mb = self._memory_mb or needed_mb
        if self._is_podman:  # supports neither owners nor inode limits; landlock confines programs to their folders
            folder_options = f"mode={1777 if user.uid else 711}"
        else:  # other users can pass through to their own folder but leave nothing in this one
            folder_options = f"mode=711,nr_inodes=100k,uid={user.uid},gid={user.uid}"
        arguments = [
            "run", "--rm", "--interactive", "--init", "--pull", "never", "--name", name, "--log-driver", "none",
            *(f"--label={key}={value}" for key, value in labels.items()),
            "--network", "none", "--ipc", "none", "--hostname", "sandbox", "--read-only",
            "--user", f"{user.uid}:{user.uid}",
            "--cap-drop", "ALL", *(f"--cap-add={each}" for each in user.capabilities),
            "--security-opt", "no-new-privileges", "--pids-limit", "1024", "--ulimit", "core=1",
            "--memory", f"{memory_mb}m", "--memory-swap", f"{memory_mb}m",
            "--tmpfs", f"/work:rw,exec,nosuid,nodev,size={memory_mb // 2}m,{folder_options}",
            "--env", "TMPDIR=/work", "--env", "HOME=/work", "--workdir", "/",
            *(("--runtime", self._runtime) if self._runtime else ()), *self._flags,
            "--entrypoint", "python3", self._image, "-I", "-S", "-c", BOOT,
        ]  # fmt: skip
        container = Container(self._command, name)
        try:
            await container.start(arguments)
            level = await container.link.opened({**self._options, "min_isolation": str(user.min_isolation)})
        except BaseException:
            await container.close()
            raise
        walls = (f"container ({self._runtime})" if self._runtime else "container", "no network", "read-only image")
        self.layers = (*walls, *level["layers"])
        return container

    async def _shut(self) -> None:
        async with self._opening:
            container, self._container = self._container, None
            if container is not None:
                await container.close()

    async def _remove_abandoned(self) -> None:
        """Remove containers whose owner is gone. Failures are ignored: they must not prevent a start."""
        keys = list(owner_labels())
        line = "{{.ID}}\t" + "\t".join(f'{{{{.Label "{key}"}}}}' for key in keys)
        code, out = await command(self._command, "ps", "-a", "--filter", f"label={LABEL}", "--format", line)
        rows = [row.split("\t") for row in out.splitlines()] if code == 0 else []
        gone = [row[0] for row in rows if len(row) == len(keys) + 1 and is_gone(dict(zip(keys, row[1:], strict=True)))]
        if gone:
            _LOG.warning("DockerSandbox: removed %d containers of processes that have ended", len(gone))
            await command(self._command, "rm", "-f", *gone)


class Container:
    """One container and the command that runs it; the container ends when the command's stdin is closed."""

    def __init__(self, command: str, name: str) -> None:
        self.name = name
        self.link = PipeLink(self._write, f"container {name}", on_lost=self._end)
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._stdin: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._error_output = b""

    async def start(self, arguments: Sequence[str]) -> None:
        """Start the container without waiting for its host; the link reports that.

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
        errors = asyncio.ensure_future(self._read_errors(process.stderr))
        self._tasks = [errors, asyncio.ensure_future(self._read_output(process, errors))]

    async def _write(self, data: bytes) -> None:
        assert self._stdin is not None
        try:
            self._stdin.write(data)
            await self._stdin.drain()
        except OSError:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)  # the reason of its end is a better message
            raise

    async def _read_output(self, process: asyncio.subprocess.Process, errors: asyncio.Task[None]) -> None:
        while process.stdout is not None and (data := await process.stdout.read(_READ)):
            self.link.feed(data)
        await errors
        code = await process.wait()
        message = " ".join(self._error_output.decode("utf-8", "backslashreplace").split())[-600:]
        self.link.lose(f"container {self.name}: it ended ({code}) {message}".rstrip())

    async def _read_errors(self, stream: asyncio.StreamReader | None) -> None:
        while stream is not None and (data := await stream.read(4096)):
            self._error_output = (self._error_output + data)[-4096:]

    def _end(self) -> None:
        """Close the command's stdin, after which the container ends by itself."""
        if self._stdin is not None:
            self._stdin.close()

    async def close(self) -> None:
        """End the container and wait until it is gone. Repeated calls have no effect."""
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
    """Run a short command and return its exit code and stdout; a command that hangs is killed and has code -1."""
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


def owner_labels() -> dict[str, str]:
    """Return labels that identify this process. Its pid may be reused; pid, start time and boot together are unique."""
    pid_namespace = ""
    with contextlib.suppress(OSError):
        pid_namespace = os.readlink("/proc/self/ns/pid")
    return {
        "agentenv.pid": str(os.getpid()),
        "agentenv.started": _start_time("self"),
        "agentenv.boot": _read_text("/proc/sys/kernel/random/boot_id"),
        "agentenv.pids": pid_namespace,
        "agentenv.host": socket.gethostname(),
    }


def is_gone(labels: Mapping[str, str]) -> bool:
    """Return True if the owner of a container has certainly ended. An owner in another pid namespace may still run."""
    ours = owner_labels()
    same = {key: labels.get(key) == value for key, value in ours.items()}
    if not labels.keys() >= ours.keys() or not (same["agentenv.host"] or same["agentenv.boot"]):
        return False
    if not same["agentenv.boot"]:
        return True  # the machine was restarted since
    return same["agentenv.pids"] and labels["agentenv.started"] != _start_time(labels["agentenv.pid"])


def _start_time(pid: str) -> str:
    """Return the start time of a process in ticks since boot, or "" if it does not exist."""
    return "".join(_read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[19:20])


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
