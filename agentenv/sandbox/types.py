r"""What a sandbox is asked and what it answers; every backend speaks these.

    async with LocalSandbox() as sandbox:
        result = await sandbox.run("print(6 * 7)")
        assert result.status is Status.OK and result.stdout == "42\n"

A program cannot make `run` raise: whatever it does is a `Status`. `Status.INFRA` means that nothing is known of the
program, because the sandbox failed; it is never graded as wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, Self

from agentenv.errors import ConfigError, InfraError

Policy = Literal["pure", "proc"]
"""`pure`: one process, threads allowed, no fork and no exec; `proc`: may start processes, as a shell does."""


class Status(StrEnum):
    """How an execution ended."""

    OK = "ok"
    """Exit code 0."""
    NONZERO = "nonzero"
    """Another exit code, as after an exception."""
    SIGNAL = "signal"
    """Killed by a signal of its own making, as SIGSEGV."""
    CPU_TIMEOUT = "cpu_timeout"
    """It used `Limits.cpu_s` of CPU."""
    WALL_TIMEOUT = "wall_timeout"
    """It was there for `Limits.wall_s`, and that was not the host's fault."""
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    """It wrote many times what is kept."""
    DISK_LIMIT = "disk_limit"
    POLICY = "policy"
    """It made a system call that no program needs (SIGSYS)."""
    INFRA = "infra"
    """The sandbox failed, or the host was overloaded: nothing is known of the program."""


class Isolation(StrEnum):
    """What stands between a program and the host, weakest first."""

    NONE = "none"
    """Limits only: by two explicit opt-ins."""
    UID = "uid"
    LANDLOCK = "landlock"
    NAMESPACES = "namespaces"
    REMOTE = "remote"
    """Another machine's or container's business."""

    @property
    def strength(self) -> int:
        """A number to compare by."""
        return list(Isolation).index(self)


@dataclass(frozen=True, slots=True)
class ExecLimits:
    """What one execution may use."""

    cpu_s: float = 5.0
    wall_s: float = 15.0
    memory_mb: int = 256
    num_processes: int = 16
    """With policy `proc`; threads count."""
    num_threads: int = 16
    num_files: int = 64
    """Open file descriptors."""
    file_mb: int = 16
    disk_mb: int = 32
    num_inodes: int = 1024
    stdout_kb: int = 64
    """Kept of stdout, from its beginning; what follows is read and dropped, 64 times as much ends the program."""
    stderr_kb: int = 16
    channel_kb: int = 1024
    """Kept of what it writes to file descriptor 3."""
    fetch_mb: int = 4
    """Of all files that are fetched, together."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How one execution went."""

    status: Status
    exit_code: int | None = None
    signal: int | None = None
    stdout: str = ""
    """UTF-8, what is not is backslash-escaped; NUL, ESC and other controls but newline and tab too."""
    stderr: str = ""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    stdout_bytes: int = 0
    """All that it wrote, kept or not."""
    channel: bytes = b""
    """What it wrote to file descriptor 3, where `run` was asked for it: untrusted like all else."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """What was to be fetched and was a regular file."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    queue_s: float = 0.0
    run_delay_s: float = 0.0
    """Runnable, but not running: the host's load."""
    peak_memory_bytes: int | None = None
    isolation: Isolation = Isolation.NONE
    layers: tuple[str, ...] = ()
    backend: str = ""
    attempts: int = 1
    detail: str | None = None
    """Of an infra failure: what failed, and what mends it."""
    stdout_data: bytes | None = None
    """What is kept of stdout as it was written, nothing escaped; None where a backend has only text."""


class SandboxUnavailable(ConfigError):
    """No isolation of the strength that is asked for can be had here; the message names each failed probe."""


class SandboxBusy(InfraError):
    """The queue of executions is full."""


class Execution(Protocol):
    """A program that runs and is talked to over its file descriptor 3 (a stream socket)."""

    async def send(self, data: bytes) -> None:
        """Give it bytes; never blocks longer than its limits, and is harmless once it has ended."""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Some of what it wrote, `b""` once it has ended or closed its side."""

    async def finish(self) -> ExecResult:
        """Wait until it has ended by itself or by its limits."""

    async def kill(self) -> ExecResult:
        """End it now."""


class Sandbox(Protocol):
    """Where programs run."""

    isolation: Isolation
    backend: str

    async def run(
        self,
        program: str | Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        policy: Policy = "pure",
        limits: ExecLimits | None = None,
        tenant: str = "",
        channel: bool = False,
    ) -> ExecResult:
        """Execute Python source, or an argv with policy `proc`, and wait for its end.

        Args:
            program: Python source, run as `__main__`; or a command and its arguments.
            stdin: what it can read there.
            files: relative POSIX names and contents, written into its working folder before.
            fetch: names of files there to bring back after.
            policy: what it may do.
            limits: what it may use; the sandbox's own default when None.
            tenant: who asks (an episode's group): the queue is fair between tenants.
            channel: give it file descriptor 3 to write to; the result's `channel` has what it wrote.

        Raises:
            SandboxBusy: too many wait already.
            ConfigError: a file's name is absolute, or the like.
            asyncio.CancelledError: after everything that it started has been killed.
        """

    async def start(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        policy: Policy = "pure",
        limits: ExecLimits | None = None,
        tenant: str = "",
    ) -> Execution:
        """Execute a program that is talked to while it runs; as `run` else. Not every backend can.

        Raises:
            ConfigError: this backend cannot.
        """

    async def aclose(self) -> None:
        """End everything; again is harmless."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: Any) -> None: ...
