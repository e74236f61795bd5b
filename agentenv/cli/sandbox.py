"""`agentenv sandbox doctor | run | bench | serve`: check the isolation here, run a program, time it, serve it.

Exit codes of `run`: 0 the program succeeded, 1 it failed, 2 usage error or no isolation, 3 the sandbox failed. Exit
codes of `doctor` and `bench`: 0, or 1 if no program can run; 2 and 3 as above.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from agentenv.cli.flags import parse, print_json
from agentenv.cli.help import POSITIONAL
from agentenv.cli.main import Commands, subcommand, summary_of
from agentenv.cli.sandbox_serve import SandboxServeConfig, serve
from agentenv.errors import ConfigError, InfraError
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation, Policy

if TYPE_CHECKING:
    from agentenv.sandbox import LocalSandbox
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
    """Probe the isolation of this machine, try to escape from it, and time it."""

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


def _sandbox(config: SandboxRunConfig | SandboxBenchConfig) -> LocalSandbox:
    from agentenv.sandbox import LocalSandbox

    isolation = Isolation(config.isolation) if config.isolation else None
    return LocalSandbox(isolation=isolation, preimport=config.preimport)


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
        raise ConfigError(f"--seconds: expected a number above 0 and below 3600, got {config.seconds!r}. Change it.")
    isolation, speed = asyncio.run(_timed(config))
    if config.json:
        print_json({"isolation": str(isolation), **asdict(speed)})
    else:
        times = f"p50 {speed.p50_ms:.1f} ms, p95 {speed.p95_ms:.1f} ms, {speed.per_s:.0f} executions/s"
        sys.stdout.write(f"isolation {isolation}: {times} ({speed.num_runs} timed)\n")
    return 0


async def _timed(config: SandboxBenchConfig) -> tuple[Isolation, Speed]:
    """Return the isolation and its speed."""
    from agentenv.sandbox.local.doctor import Speed

    program = "".join(f"import {name}\n" for name in config.preimport) or "pass"
    async with _sandbox(config) as local:
        times: list[float] = []
        end = time.perf_counter() + config.seconds / 2
        while not times or time.perf_counter() < end:
            times.append(await _once(local, program))
        started = time.perf_counter()
        counts = await asyncio.gather(*(_repeat(local, program, config.seconds / 2) for _ in range(local.run_slots)))
        per_s = sum(counts) / (time.perf_counter() - started)
    times.sort()
    at = [1e3 * times[int(len(times) * share)] for share in (0.5, 0.95)]
    return local.isolation, Speed(len(times), at[0], at[1], per_s)


async def _repeat(local: LocalSandbox, program: str, seconds: float) -> int:
    """Run the program repeatedly for a time, at least once, and return the number of runs."""
    count, end = 0, time.perf_counter() + seconds
    while not count or time.perf_counter() < end:
        await _once(local, program)
        count += 1
    return count


async def _once(local: LocalSandbox, program: str) -> float:
    """Return the seconds of a successful execution.

    Raises:
        ConfigError: the program fails, for example because a package is missing.
        InfraError: the sandbox failed.
    """
    started = time.perf_counter()
    result = await local.run(program)
    if result.status is ExecStatus.OK:
        return time.perf_counter() - started
    message = " ".join((result.detail or result.stderr[-300:]).split())
    error = InfraError if result.status is ExecStatus.INFRA else ConfigError
    raise error(
        f"sandbox bench: expected {program!r} to succeed, got {result.status}: {message}. See `sandbox doctor`."
    )


_COMMANDS: Commands = {
    "doctor": (summary_of(SandboxDoctorConfig), _doctor),
    "run": (summary_of(SandboxRunConfig), _run),
    "bench": (summary_of(SandboxBenchConfig), _bench),
    "serve": (summary_of(SandboxServeConfig), serve),
}
