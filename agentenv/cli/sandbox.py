"""`agentenv sandbox doctor | run | bench | serve`: check the isolation here, run a program, time it, serve it.

Exit codes of `run`: 0 the program succeeded, 1 it failed, 2 usage error or no isolation, 3 the sandbox failed. Exit
codes of `doctor` and `bench`: 0, or 1 if no program can run; 2 and 3 as above. Exit codes of `serve`: 0 stopped by
Ctrl-C or SIGTERM; 2 usage error, no isolation, or a public address without a token; 3 it cannot listen.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from agentenv._util.http.responses import require_server
from agentenv.cli.flags import parse, print_json
from agentenv.cli.help import POSITIONAL
from agentenv.cli.main import Commands, subcommand, summary_of
from agentenv.errors import ConfigError, InfraError
from agentenv.runs.shutdown import stop_event
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation, Policy

if TYPE_CHECKING:
    from agentenv.sandbox import LocalSandbox
    from agentenv.sandbox.fusion.server import FusionServeOptions
    from agentenv.sandbox.local.doctor import Speed

SANDBOX_FAILED = 3
"""Exit code if the outcome of the program is unknown."""

LevelName = Literal["namespaces", "landlock", "uid"]
_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".gz")
"""A line of JSON is often a valid expression of Python, which would run without an effect."""
_STARTS_PROCESS = re.compile(
    r"in (_?fork_exec|_execute_child|_posix_spawn)\b|os\.(fork|forkpty|posix_spawnp?|system)\("
)
"""A line of a traceback that starts a process."""


@dataclass(frozen=True)
class SandboxDoctorConfig:
    """Test the isolation of this machine by attempts to escape from it, and time it."""

    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class SandboxRunConfig:
    """Run a Python program isolated, and report how it ended and which resources it used."""

    file: Annotated[str, POSITIONAL]
    """Python source file, in UTF-8."""
    stdin: str | None = None
    """File to use as standard input; default: empty."""
    policy: Policy = "pure"
    """`pure`: a single process; `proc`: the program may start other processes."""
    isolation: LevelName | None = None
    """Use exactly this level; default: the strongest that works here, at least landlock."""
    preimport: tuple[str, ...] = ()
    """Packages of this environment that the program may import, such as numpy."""
    limits: ExecLimits = field(default_factory=ExecLimits)
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class SandboxBenchConfig:
    """Time a program that does nothing: its duration, and executions per second."""

    seconds: float = 4.0
    """Duration of the benchmark: half sequential, half with one program per core."""
    isolation: LevelName | None = None
    """Use exactly this level; default: the strongest that works here, at least landlock."""
    preimport: tuple[str, ...] = ()
    """Packages of this environment that the program imports, such as numpy."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class SandboxServeConfig:
    """Serve the sandbox over HTTP: to agentenv, and by SandboxFusion's API to the clients of verl, ROLL and SkyRL."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but a loopback address needs a token, in AGENTENV_SANDBOX_TOKEN or --token_file."""
    port: int = 8080
    """Port; 0 chooses a free one."""
    token_file: str | None = None
    """File with the token that clients must send, as a bearer token or as the password in the address."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names of this server, such as node7 or node7:80; * permits any. Needed with --host 0.0.0.0."""
    isolation: LevelName | None = None
    """Use exactly this level; default: the strongest that works here, at least landlock."""
    preimport: tuple[str, ...] = ()
    """Packages of this environment that programs may import, such as numpy; pytest also enables the language pytest."""
    policy: Policy = "pure"
    """Policy of Python programs: one process (pure), or several (proc). Bash programs may always start processes."""
    run_slots: int | None = None
    """Number of concurrent programs; default: the number of cores."""
    max_waiting: int = 1024
    """Size of the queue; further requests are answered with 429 and Retry-After."""
    max_queue_s: float = 120.0
    """Longest wait in the queue, in seconds; then a request is answered with 504."""
    max_run_timeout: float = 120.0
    """Largest CPU time of a program, in seconds; the limit of wall time is twice that."""
    max_memory_mb: int = 1024
    """Largest memory of a program, in MiB, and the default of requests without a limit."""
    max_body_mb: int = 8
    """Largest request, in MiB."""
    grace_s: float = 10.0
    """Time that running programs have after the server is stopped, in seconds."""


def sandbox(args: Sequence[str]) -> int:
    """Check the isolation of this machine and its speed, and run or serve programs."""
    command = subcommand("agentenv sandbox", _COMMANDS, args)
    if command is None:
        return 0
    try:
        return command(args[1:])
    except InfraError as error:
        sys.stderr.write(f"agentenv: error: {' '.join(str(error).split())}\n")
        return SANDBOX_FAILED


# --- doctor -----------------------------------------------------------------------------------------------------------


def _doctor(args: Sequence[str]) -> int:
    config = parse(SandboxDoctorConfig, "sandbox doctor", args)
    from agentenv.sandbox.local.doctor import doctor

    report = asyncio.run(doctor())
    if config.json:
        print_json(report.to_dict())
    else:
        sys.stdout.write("".join(f"{line}\n" for line in report.lines()))
    return int(not report.ok)


# --- run --------------------------------------------------------------------------------------------------------------


def _run(args: Sequence[str]) -> int:
    config = parse(SandboxRunConfig, "sandbox run", args)
    for limit in fields(config.limits):
        value = getattr(config.limits, limit.name)
        if not value > 0:
            raise ConfigError(f"--{limit.name}: expected a number above 0, got {value!r}. Raise it.")
    if config.file.lower().endswith(_DATA_SUFFIXES):
        raise ConfigError(f"FILE: expected a Python program, got the data {config.file!r}. Name a program.")
    source = _read(config.file, "FILE")
    try:
        program = source.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{config.file}: expected Python source in UTF-8, got {error}. Save it as UTF-8.") from None
    stdin = b"" if config.stdin is None else _read(config.stdin, "--stdin")
    result = asyncio.run(_execute(config, program, stdin))
    last = result.stderr.rstrip().rpartition("\n")[2]
    was_refused = last.startswith("PermissionError: [Errno 1]") and _STARTS_PROCESS.search(result.stderr)
    if config.policy == "pure" and result.status is ExecStatus.NONZERO and was_refused:
        result = replace(result, detail="a pure program may not start processes; --policy proc permits it")
    if config.json:
        unused = ("channel", "files", "stdout_data")
        print_json({name: value for name, value in asdict(result).items() if name not in unused})
    else:  # the summary goes to stderr, so that a pipe gets only the program's output
        sys.stdout.write(result.stdout)
        sys.stdout.flush()
        sys.stderr.write(result.stderr)
        ended = str(result.status)
        ended += f", exit code {result.exit_code}" if result.exit_code else ""
        ended += f", signal {result.signal}" if result.signal else ""
        limits = config.limits
        used = f"CPU {result.cpu_s:.2f} of {limits.cpu_s:g} s, wall {result.wall_s:.2f} of {limits.wall_s:g} s"
        if result.peak_memory_bytes is not None:
            used += f", memory {result.peak_memory_bytes / 2**20:.0f} of {limits.memory_mb} MiB"
        cut = [name for name in ("stdout", "stderr") if getattr(result, f"{name}_truncated")]
        parts = [ended, used, f"isolation {result.isolation}", *[f"{' and '.join(cut)} truncated"] * bool(cut)]
        parts += [" ".join(result.detail.split())] if result.detail else []
        incomplete = not (result.stderr or result.stdout or "\n").endswith("\n")
        sys.stderr.write("\n" * incomplete + f"agentenv: {'; '.join(parts)}\n")
    return {ExecStatus.OK: 0, ExecStatus.INFRA: SANDBOX_FAILED}.get(result.status, 1)


async def _execute(config: SandboxRunConfig, program: str, stdin: bytes) -> ExecResult:
    async with _sandbox(config) as local:
        return await local.run(program, stdin=stdin, policy=config.policy, limits=config.limits)


def _sandbox(
    config: SandboxRunConfig | SandboxBenchConfig | SandboxServeConfig, run_slots: int | None = None
) -> LocalSandbox:
    from agentenv.sandbox import LocalSandbox

    isolation = Isolation(config.isolation) if config.isolation else None
    return LocalSandbox(isolation=isolation, preimport=config.preimport, run_slots=run_slots)


def _read(path: str, flag: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{flag}: expected a file to read, got {path!r} ({why}). Check the path.") from None


# --- bench ------------------------------------------------------------------------------------------------------------


def _bench(args: Sequence[str]) -> int:
    config = parse(SandboxBenchConfig, "sandbox bench", args)
    if not 0 < config.seconds < 3600:
        raise ConfigError(f"--seconds: expected a number above 0 and below 3600, got {config.seconds!r}.")
    isolation, speed = asyncio.run(_measure(config))
    if config.json:
        print_json({"isolation": str(isolation), **asdict(speed)})
    else:
        times = f"p50 {speed.p50_ms:.1f} ms, p95 {speed.p95_ms:.1f} ms, {speed.per_s:.0f} executions/s"
        sys.stdout.write(f"isolation {isolation}: {times} ({speed.num_runs} timed)\n")
    return 0


async def _measure(config: SandboxBenchConfig) -> tuple[Isolation, Speed]:
    """Return the isolation and its speed."""
    from agentenv.sandbox.local.doctor import measure

    program = "".join(f"import {name}\n" for name in config.preimport) or "pass"
    async with _sandbox(config) as local:
        return local.isolation, await measure(local, program=program, seconds=config.seconds)


# --- serve ------------------------------------------------------------------------------------------------------------


def _serve(args: Sequence[str]) -> int:
    """Serve until a signal; a second signal ends the running programs."""
    config = parse(SandboxServeConfig, "sandbox serve", args)
    from agentenv._util.http.access import AccessPolicy, read_token
    from agentenv.sandbox.fusion.run_code import MAX_LIMITS, TOKEN_VARIABLE
    from agentenv.sandbox.fusion.server import FusionServeOptions

    require_server("sandbox serve")
    for name in ("max_waiting", "max_queue_s", "max_run_timeout", "max_memory_mb", "max_body_mb"):
        if not getattr(config, name) > 0:
            raise ConfigError(f"--{name}: expected a number above 0, got {getattr(config, name)!r}. Raise it.")
    if not 0 <= config.port < 65536 or (config.run_slots is not None and config.run_slots < 1):
        raise ConfigError(
            f"--port, --run_slots: expected a port and 1 or more, got {config.port} and {config.run_slots}."
        )
    seconds = config.max_run_timeout
    caps = replace(MAX_LIMITS, cpu_s=seconds, wall_s=2 * seconds, memory_mb=config.max_memory_mb)
    token = read_token(config.token_file, TOKEN_VARIABLE)
    options = FusionServeOptions(
        access=AccessPolicy(config.host, token, config.allowed_hosts, variable=TOKEN_VARIABLE),
        port=config.port,
        caps=caps,
        languages=("python", "bash", *(["pytest"] if "pytest" in config.preimport else [])),
        policy=config.policy,
        max_waiting=config.max_waiting,
        max_queue_s=config.max_queue_s,
        max_body_bytes=config.max_body_mb << 20,
        grace_s=max(config.grace_s, 0.0),
    )
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(_until_stopped(config, options))
    return 0


async def _until_stopped(config: SandboxServeConfig, options: FusionServeOptions) -> None:
    from agentenv.sandbox.fusion.server import FusionServer

    async with _sandbox(config, config.run_slots) as local, FusionServer(local, options) as server:
        stopped = stop_event()
        sys.stdout.write(f"serving {server.url}, isolation {local.isolation}, {local.run_slots} at a time\n")
        sys.stdout.flush()
        await stopped.wait()
        running = f"{server.running} program{' still runs' if server.running == 1 else 's still run'}"
        sys.stderr.write(f"agentenv: stopping; {running}. Press Ctrl-C again to end running programs.\n")
        await server.close()


_COMMANDS: Commands = {
    "doctor": (summary_of(SandboxDoctorConfig), _doctor),
    "run": (summary_of(SandboxRunConfig), _run),
    "bench": (summary_of(SandboxBenchConfig), _bench),
    "serve": (summary_of(SandboxServeConfig), _serve),
}
