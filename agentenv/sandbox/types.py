r"""The types of every sandbox: limits, results, and the protocols of a sandbox and an interactive program.

    async with LocalSandbox() as sandbox:
        result = await sandbox.run("print(6 * 7)")
        assert result.status is ExecStatus.OK and result.stdout == "42\n"

A program cannot make `run` raise: every outcome is an `ExecStatus`. `ExecStatus.INFRA` means that the sandbox failed
and the outcome of the program is unknown; such a program is never graded as wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, Self

from agentenv.errors import ConfigError, InfraError

Policy = Literal["pure", "proc"]
"""`pure`: one process with threads, without fork and exec; `proc`: may start processes, as a shell does."""


class ExecStatus(StrEnum):
    """How an execution ended."""

    OK = "ok"
    """Exit code 0."""
    NONZERO = "nonzero"
    """Another exit code, as after an exception."""
    SIGNAL = "signal"
    """Ended by a signal that it caused, such as SIGSEGV."""
    CPU_TIMEOUT = "cpu_timeout"
    """Used `ExecLimits.cpu_s` of CPU time."""
    WALL_TIMEOUT = "wall_timeout"
    """Ran for `ExecLimits.wall_s`, without the time for which the host kept it waiting for a core."""
    MEMORY = "memory"
    """Needed more than `ExecLimits.memory_mb`."""
    OUTPUT_LIMIT = "output_limit"
    """Wrote many times more output than is kept."""
    DISK_LIMIT = "disk_limit"
    """Wrote more than `ExecLimits.disk_mb`."""
    POLICY = "policy"
    """Made a forbidden system call (SIGSYS), or started too many processes."""
    INFRA = "infra"
    """The sandbox failed, or the host killed the program: its outcome is unknown."""


class Isolation(StrEnum):
    """The barrier between a program and the host, weakest first."""

    NONE = "none"
    """Resource limits only; needs two explicit opt-ins."""
    UID = "uid"
    """A separate user of the machine."""
    LANDLOCK = "landlock"
    """Also Landlock, which restricts file access."""
    NAMESPACES = "namespaces"
    """Also Linux namespaces: the program has its own file tree, processes and network."""
    REMOTE = "remote"
    """A container or another machine is responsible."""

    @property
    def strength(self) -> int:
        """A number for comparisons: larger is stronger."""
        return list(Isolation).index(self)


@dataclass(frozen=True, slots=True)
class ExecLimits:
    """Limits of one execution."""

    cpu_s: float = 5.0
    """CPU time, in seconds."""
    wall_s: float = 15.0
    """Duration, in seconds. Waiting for a core is not counted, up to twice this time."""
    memory_mb: int = 256
    """Memory, in MiB."""
    num_processes: int = 16
    """Processes under policy `proc`, threads included."""
    num_threads: int = 16
    """Threads under policy `pure`."""
    num_files: int = 64
    """Open file descriptors."""
    file_mb: int = 16
    """Size of one file, in MiB."""
    disk_mb: int = 32
    """Size of all files, in MiB."""
    num_inodes: int = 1024
    """Files and folders on disk."""
    stdout_kb: int = 64
    """KiB of stdout that are kept, from its beginning; 64 times as much output ends the program."""
    stderr_kb: int = 16
    """KiB of stderr that are kept, as for stdout."""
    channel_kb: int = 1024
    """KiB that are kept of the output to file descriptor 3."""
    fetch_mb: int = 4
    """Total size of the fetched files, in MiB."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The outcome of one execution."""

    status: ExecStatus
    """How the execution ended."""
    exit_code: int | None = None
    """Exit code of the program; None if a signal or the sandbox ended it."""
    signal: int | None = None
    """Signal that ended the program."""
    stdout: str = ""
    """Decoded as UTF-8; invalid bytes and control characters except newline and tab are backslash-escaped."""
    stderr: str = ""
    """Decoded like stdout."""
    stdout_truncated: bool = False
    """True if only the beginning of stdout was kept."""
    stderr_truncated: bool = False
    """True if only the beginning of stderr was kept."""
    stdout_bytes: int = 0
    """Bytes written to stdout, including those not kept."""
    channel: bytes = b""
    """Bytes written to file descriptor 3, if `run` was called with `channel`; untrusted like all output."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The fetched files that exist and are regular files."""
    wall_s: float = 0.0
    """Duration of the program, in seconds."""
    cpu_s: float = 0.0
    """CPU time of the program, in seconds."""
    run_delay_s: float = 0.0
    """Time in which the program was runnable but not running, because the host was busy."""
    peak_memory_bytes: int | None = None
    """Largest memory use; None if unknown."""
    isolation: Isolation = Isolation.NONE
    """Isolation of the program."""
    layers: tuple[str, ...] = ()
    """Mechanisms that isolated it."""
    attempts: int = 1
    """Number of attempts, the failed ones included."""
    detail: str | None = None
    """For an infrastructure error: what failed, and how to fix it."""
    stdout_data: bytes | None = None
    """The kept bytes of stdout, not escaped; None if a backend has only text."""


class SandboxUnavailable(ConfigError):
    """The required isolation is not available here; the message names each failed probe."""


class SandboxBusy(InfraError):
    """The queue of executions is full."""


class Execution(Protocol):
    """A running interactive program; its file descriptor 3 is a stream socket to the caller."""

    async def send(self, data: bytes) -> None:
        """Send bytes to the program. Blocks no longer than its limits; no effect once it has ended."""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return bytes that the program wrote; `b""` once it has ended or closed its side."""

    async def finish(self) -> ExecResult:
        """Wait for the end of the program, by itself or by its limits."""

    async def kill(self) -> ExecResult:
        """Kill the program now."""


class Sandbox(Protocol):
    """A place where programs run isolated."""

    isolation: Isolation
    limits: ExecLimits
    """Limits of an execution that names none."""
    run_slots: int
    """Number of programs of `run` that it executes concurrently; further ones wait."""

    async def run(
        self,
        program: str | Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        policy: Policy = "pure",
        limits: ExecLimits | None = None,
        channel: bool = False,
    ) -> ExecResult:
        """Execute Python source, or an argv with policy `proc`, and wait for its end.

        Args:
            program: Python source, run as `__main__`; or a command and its arguments.
            stdin: standard input of the program.
            files: relative POSIX names and contents, written into the working folder before the start.
            fetch: names of files in the working folder to return after the end.
            policy: whether the program may start processes.
            limits: limits of the execution; the sandbox's default if None.
            channel: open file descriptor 3 for writing; the result's `channel` holds the output.

        Raises:
            SandboxBusy: too many executions are waiting.
            ConfigError: an argument is invalid, such as an absolute file name.
            asyncio.CancelledError: after the program and its processes have been killed.
        """

    async def start(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        policy: Policy = "pure",
        limits: ExecLimits | None = None,
    ) -> Execution:
        """Start an interactive program; the arguments are those of `run`. Not supported by every backend.

        Raises:
            ConfigError: this backend does not support it.
        """

    async def aclose(self) -> None:
        """End all programs. Repeated calls have no effect."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: Any) -> None: ...
