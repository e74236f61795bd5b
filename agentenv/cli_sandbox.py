"""`agentenv sandbox doctor | run | bench`: whether untrusted code can run here, behind what, how fast; and one program.

Exit codes of `run`: 0 the program ended well, 1 it did not, 2 usage or no isolation, 3 the sandbox failed. Of `doctor`
and `bench`: 0, or 1 where nothing may run or a check does not hold; 2 and 3 as above.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from agentenv.cli_flags import parse, print_json, subcommand
from agentenv.cli_sandbox_serve import SandboxServeConfig, serve
from agentenv.errors import ConfigError, InfraError
from agentenv.sandbox.types import ExecLimits, ExecResult, Isolation, Policy, Status

if TYPE_CHECKING:
    from agentenv.sandbox import LocalSandbox
    from agentenv.sandbox.doctor import Check, Matrix, Speed

SANDBOX_FAILED = 3
"""Exit code where nothing is known of the program."""

MATRIX_S = 1800
_MATRIX_FILE = "sandbox/escapes_run.py"
_MATRIX = """
import asyncio, json, os, sys, types
tests = sys.modules["tests"] = types.ModuleType("tests")
tests.__path__ = [sys.argv[1]]
from tests.sandbox import escapes, escapes_levels, escapes_run, escapes_world
from agentenv.sandbox import Isolation

async def main(level):
    cases, planted = escapes.all_cases(), escapes_world.plant_environment()
    os.environ.update(planted)
    async with escapes_levels.open_sandbox(level) as sandbox:
        found = await escapes_run.run_matrix(sandbox, cases, planted)
    rows = []
    for case in cases:
        wrong, excepted = found[case.name], level in case.excepted
        said = ["a documented exception of this level"] * bool(wrong and excepted) or wrong
        rows.append([case.name, excepted or not wrong, "; ".join(said)])
    return rows

rows = asyncio.run(main(Isolation(sys.argv[2])))
sys.stdout.write(json.dumps(rows))
"""
"""Where a package named `tests` is installed, as some wheels bring one, ours is found all the same."""

LevelName = Literal["namespaces", "landlock", "uid"]


@dataclass(frozen=True)
class SandboxDoctorConfig:
    """Probe what isolation this machine gives, try to get out of it, and time it."""

    deep: bool = False
    """Also run the whole escape matrix, hostile programs that take half a minute; the level must hold every one."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class SandboxRunConfig:
    """Run a Python program isolated, and say how it ended and what it used."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Python source, in UTF-8."""
    stdin: str | None = None
    """File that the program reads as its standard input; default: nothing."""
    policy: Policy = "pure"
    """Whether it is one process (`pure`), or may start others (`proc`)."""
    isolation: LevelName | None = None
    """This level and no other; default: the strongest that works here, at least landlock."""
    preimport: tuple[str, ...] = ()
    """Packages of this environment that it may import, such as numpy."""
    limits: Annotated[ExecLimits, tyro.conf.arg(name="")] = field(default_factory=ExecLimits)
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class SandboxBenchConfig:
    """Time a program that does nothing: how long one takes, and how many a second."""

    seconds: float = 4.0
    """Half of it one after the other, half as many at a time as there are cores."""
    isolation: LevelName | None = None
    """This level and no other; default: the strongest that works here, at least landlock."""
    preimport: tuple[str, ...] = ()
    """Packages of this environment that the program imports, such as numpy."""
    json: bool = False
    """Print JSON."""


def sandbox(args: Sequence[str]) -> int:
    """Say whether untrusted code can run here, behind what and how fast; run a program isolated."""
    command = subcommand("sandbox", _COMMANDS, args)
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
    from agentenv.sandbox.doctor import doctor

    report = asyncio.run(doctor(deep=config.deep, matrix=_find_matrix() if config.deep else None))
    if config.json:
        print_json(report.to_dict())
    else:
        sys.stdout.write("".join(f"{line}\n" for line in report.lines()))
    return int(not report.ok)


def _find_matrix() -> Matrix:
    """The escape matrix: the hostile programs that the tests of this package run, from its checkout or its wheel.

    Raises:
        ConfigError: they are in neither place.
    """
    package = Path(__file__).parent
    homes = [home for home in (package.parent / "tests", package / "_escapes") if (home / _MATRIX_FILE).is_file()]
    if not homes:
        raise ConfigError(
            f"--deep: expected tests/{_MATRIX_FILE} beside the package, got none. Run it in a checkout of the source."
        )

    async def matrix(local: LocalSandbox) -> list[Check]:
        """Every case at this sandbox's level, from a process of its own: it plants secrets in its environment."""
        return await _run_matrix(homes[0], local.isolation)

    return matrix


async def _run_matrix(home: Path, isolation: Isolation) -> list[Check]:
    from agentenv.sandbox.doctor import Check

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _MATRIX, str(home), str(isolation)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(MATRIX_S):
            said, wrong = await process.communicate()
    except TimeoutError:
        raise InfraError(
            f"--deep: expected an end within {MATRIX_S} s, got none. Try again on a quiet machine."
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = wrong.decode(errors="backslashreplace").strip().splitlines()[-1:]
        raise InfraError(f"--deep: expected the matrix to run, got {''.join(last) or process.returncode}. Try again.")
    return [Check(name, held, detail) for name, held, detail in json.loads(said)]


# --- run --------------------------------------------------------------------------------------------------------------


def _run(args: Sequence[str]) -> int:
    config = parse(SandboxRunConfig, "sandbox run", args)
    _check_limits(config.limits)
    source = _read(config.file, "FILE")
    try:
        program = source.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{config.file}: expected Python source in UTF-8, got {error}. Save it as UTF-8.") from None
    stdin = b"" if config.stdin is None else _read(config.stdin, "--stdin")
    result = asyncio.run(_execute(config, program, stdin))
    if config.policy == "pure" and result.status is Status.NONZERO and _wanted_process(result.stderr):
        result = replace(result, detail="a pure program starts no other: --policy proc lets it")
    if config.json:
        print_json(_to_json(result))
    else:
        _show(result, config.limits)
    return {Status.OK: 0, Status.INFRA: SANDBOX_FAILED}.get(result.status, 1)


async def _execute(config: SandboxRunConfig, program: str, stdin: bytes) -> ExecResult:
    async with _sandbox(config) as local:
        return await local.run(program, stdin=stdin, policy=config.policy, limits=config.limits)


def _sandbox(config: SandboxRunConfig | SandboxBenchConfig) -> LocalSandbox:
    from agentenv.sandbox import LocalSandbox

    isolation = Isolation(config.isolation) if config.isolation else None
    return LocalSandbox(isolation=isolation, preimport=config.preimport)


def _check_limits(limits: ExecLimits) -> None:
    for limit in fields(limits):
        value = getattr(limits, limit.name)
        if not value > 0:
            raise ConfigError(f"--{limit.name}: expected a number above 0, got {value!r}. Raise it.")


def _read(path: str, flag: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{flag}: expected a file to read, got {path!r} ({why}). Check the path.") from None


def _wanted_process(stderr: str) -> bool:
    """Whether it ended where it was not let start a process."""
    last = stderr.rstrip().rpartition("\n")[2]
    starts = re.search(
        r"in (_?fork_exec|_execute_child|_posix_spawn)\b|os\.(fork|forkpty|posix_spawnp?|system)\(", stderr
    )
    return last.startswith("PermissionError: [Errno 1]") and bool(starts)


def _show(result: ExecResult, limits: ExecLimits) -> None:
    """What it wrote, where it wrote it; then one line of ours, on stderr, so that a pipe gets the program's alone."""
    sys.stdout.write(result.stdout)
    sys.stdout.flush()
    sys.stderr.write(result.stderr)
    torn = not (result.stderr or result.stdout or "\n").endswith("\n")
    sys.stderr.write("\n" * torn + f"agentenv: {_summary(result, limits)}\n")


def _summary(result: ExecResult, limits: ExecLimits) -> str:
    """`nonzero, exit code 1; CPU 0.01 s, wall 0.02 s, memory 8 of 256 MiB; isolation namespaces`."""
    ended = str(result.status)
    if result.exit_code:
        ended += f", exit code {result.exit_code}"
    if result.signal:
        ended += f", signal {result.signal}"
    used = f"CPU {result.cpu_s:.2f} of {limits.cpu_s:g} s, wall {result.wall_s:.2f} of {limits.wall_s:g} s"
    if result.peak_memory_bytes is not None:
        used += f", memory {result.peak_memory_bytes / 2**20:.0f} of {limits.memory_mb} MiB"
    parts = [ended, used, f"isolation {result.isolation}"]
    cut = [name for name in ("stdout", "stderr") if getattr(result, f"{name}_truncated")]
    parts += [f"{' and '.join(cut)} cut"] * bool(cut)
    parts += [" ".join(result.detail.split())] if result.detail else []
    return "; ".join(parts)


def _to_json(result: ExecResult) -> dict[str, Any]:
    """The fields but those that this command asks for nothing in: fetched files and the channel."""
    return {name: value for name, value in asdict(result).items() if name not in ("channel", "files", "stdout_data")}


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
    """The level, and the speed at it."""
    from agentenv.sandbox.doctor import Speed

    program = "".join(f"import {name}\n" for name in config.preimport) or "pass"
    async with _sandbox(config) as local:
        times: list[float] = []
        end = time.perf_counter() + config.seconds / 2
        while not times or time.perf_counter() < end:
            times.append(await _once(local, program))
        begun = time.perf_counter()
        counts = await asyncio.gather(*(_repeat(local, program, config.seconds / 2) for _ in range(local.run_slots)))
        per_s = sum(counts) / (time.perf_counter() - begun)
    times.sort()
    at = [1e3 * times[int(len(times) * share)] for share in (0.5, 0.95)]
    return local.isolation, Speed(len(times), at[0], at[1], per_s)


async def _repeat(local: LocalSandbox, program: str, seconds: float) -> int:
    """How many it ran in that time, one after the other; at least one."""
    count, end = 0, time.perf_counter() + seconds
    while not count or time.perf_counter() < end:
        await _once(local, program)
        count += 1
    return count


async def _once(local: LocalSandbox, program: str) -> float:
    """Seconds of an execution that must end well.

    Raises:
        ConfigError: it cannot, as where a package cannot be imported.
        InfraError: the sandbox failed.
    """
    begun = time.perf_counter()
    result = await local.run(program)
    if result.status is Status.OK:
        return time.perf_counter() - begun
    said = " ".join((result.detail or result.stderr[-300:]).split())
    error = InfraError if result.status is Status.INFRA else ConfigError
    raise error(f"sandbox bench: expected {program!r} to end well, got {result.status}: {said}. See `sandbox doctor`.")


_COMMANDS: dict[str, tuple[type, Callable[[Sequence[str]], int]]] = {
    "doctor": (SandboxDoctorConfig, _doctor),
    "run": (SandboxRunConfig, _run),
    "bench": (SandboxBenchConfig, _bench),
    "serve": (SandboxServeConfig, serve),
}
