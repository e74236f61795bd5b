"""SandboxFusion's `/run_code`: requests and answers.

Source: sandbox/server/sandbox_api.py, runners/types.py and runners/base.py of github.com/bytedance/SandboxFusion
at 469de08.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any

from agentenv._util.brief import brief
from agentenv._util.http.access import RequestRefused
from agentenv.core.arguments import is_finite
from agentenv.errors import ConfigError
from agentenv.sandbox.local.execution import decoded
from agentenv.sandbox.local.sandbox import MIN_MEMORY_MB, check_files, check_limits, has_room
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus

MAX_LIMITS = ExecLimits(
    cpu_s=120.0, wall_s=240.0, memory_mb=1024, num_processes=64, num_threads=64, num_files=256, file_mb=64, disk_mb=128,
    num_inodes=8192, stdout_kb=4096, stderr_kb=4096, channel_kb=1024, fetch_mb=16,
)  # fmt: skip
"""Default of the largest limits that a server grants."""
DEFAULT_LIMITS = ExecLimits(disk_mb=64, num_files=128, num_inodes=4096, stdout_kb=1024, stderr_kb=1024, fetch_mb=8)
"""Limits of a request that names only a time and a memory. Like SandboxFusion, it keeps one MiB of an output."""
SLACK_S = 1.0
"""Wall time beyond `run_timeout`, which limits the CPU time, as an allowance for a busy host."""
_MIN_S = 1e-3
"""Shortest time that a request may ask for."""
_TIMEOUTS = (ExecStatus.CPU_TIMEOUT, ExecStatus.WALL_TIMEOUT)
_LIMITS_OF: Mapping[ExecStatus, tuple[str, ...]] = {
    ExecStatus.CPU_TIMEOUT: ("cpu_s", "wall_s"),
    ExecStatus.WALL_TIMEOUT: ("cpu_s", "wall_s"),
    ExecStatus.MEMORY: ("memory_mb",),
    ExecStatus.OUTPUT_LIMIT: ("stdout_kb", "stderr_kb", "channel_kb"),
    ExecStatus.DISK_LIMIT: ("disk_mb", "file_mb", "num_inodes"),
}
_KILLED: Mapping[ExecStatus, int] = {
    ExecStatus.MEMORY: -9,
    ExecStatus.OUTPUT_LIMIT: -9,
    ExecStatus.DISK_LIMIT: -25,
    ExecStatus.POLICY: -31,
    ExecStatus.SIGNAL: -9,
    ExecStatus.NONZERO: 1,
}
"""Return codes of results without one: minus the usual signal of such an end."""
_NOTES = {
    ExecStatus.MEMORY: "memory limit exceeded",
    ExecStatus.OUTPUT_LIMIT: "output limit exceeded",
    ExecStatus.DISK_LIMIT: "disk limit exceeded",
    ExecStatus.POLICY: "forbidden system call",
}
"""Notes on ends that the return code does not show."""
TOKEN_VARIABLE = "AGENTENV_SANDBOX_TOKEN"


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProgramRequest:
    """A validated request to execute a program."""

    code: str
    language: str
    limits: ExecLimits
    stdin: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch: tuple[str, ...] = ()
    capped: frozenset[str] = frozenset()
    """Limits that were reduced to this server's; a program that reaches one of them has no verdict."""


def read_run_request(body: Any, caps: ExecLimits) -> ProgramRequest:
    """Parse a request.

    Raises:
        RequestRefused: a field is missing or invalid.
    """
    if not isinstance(body, dict):
        raise RequestRefused(f"body: expected a JSON object, got {type(body).__name__}.")
    seconds = _number(body, "run_timeout", 10.0, lowest=_MIN_S)
    _number(body, "compile_timeout", 10.0, lowest=-1)  # nothing is compiled
    memory = int(_number(body, "memory_limit_MB", -1, lowest=-1))
    memory = memory if memory > 0 else caps.memory_mb
    wanted = replace(DEFAULT_LIMITS, cpu_s=seconds, wall_s=seconds + SLACK_S, memory_mb=memory)
    limits, capped = capped_limits(wanted, caps)
    fetch = body.get("fetch_files") or []
    if not isinstance(fetch, list) or not all(isinstance(name, str) for name in fetch):
        raise RequestRefused(f"fetch_files: expected a list of names, got {brief(fetch, 100)}.")
    files = body.get("files") or {}
    if not isinstance(files, dict):
        raise RequestRefused(f"files: expected an object of names and contents, got {brief(files, 100)}.")
    try:  # like SandboxFusion, ignore files without content
        contents = {name: base64.b64decode(text, validate=True) for name, text in files.items() if text is not None}
    except (binascii.Error, TypeError, ValueError) as error:
        raise RequestRefused(f"files: expected contents in base64, got {error}. Encode them.") from error
    if not has_room(contents, limits):
        raise RequestRefused(f"files: expected files that fit into {limits.disk_mb} MiB, got more. Send less.", 413)
    request = ProgramRequest(
        code=_string(body, "code"),
        language=_string(body, "language"),
        limits=limits,
        stdin="" if body.get("stdin") is None else _string(body, "stdin"),
        files=contents,
        fetch=tuple(fetch),
        capped=capped,
    )
    try:
        check_files(request.files, request.fetch)
    except ConfigError as error:
        raise RequestRefused(f"{error}; absolute names and `..` are not allowed.") from error
    return request


def sent_limits(sent: Mapping[str, Any]) -> ExecLimits:
    """Return the limits that `FusionSandbox` has sent.

    Raises:
        RequestRefused: one is unknown or invalid.
    """
    try:
        check_limits(limits := ExecLimits(**sent))
    except ConfigError as error:
        raise RequestRefused(f"{error!s:.300}") from error
    except TypeError as error:
        raise RequestRefused(f"limits: expected limits of this version, got {brief(sent, 200)}.") from error
    return limits


def read_limits(sent: Mapping[str, Any], caps: ExecLimits) -> ExecLimits:
    """Return the limits that `FusionSandbox` has sent.

    Raises:
        RequestRefused: one is unknown, invalid, or above the server's.
    """
    limits, capped = capped_limits(sent_limits(sent), caps)
    if capped:
        given = ", ".join(f"{name} = {getattr(caps, name):g}" for name in sorted(capped))
        raise RequestRefused(f"limits: expected at most {given}, got more. Request less, or raise the server's.")
    return limits


def read_session_request(body: Any, caps: ExecLimits) -> tuple[ExecLimits, dict[str, float]]:
    """Return the limits and the times of a session.

    Raises:
        RequestRefused: one is missing or invalid.
    """
    if not isinstance(body, dict) or not isinstance(body.get("limits"), dict):
        raise RequestRefused("body: expected an object with limits, idle_s and max_s, got another. Send them.")
    return read_limits(body["limits"], caps), {
        name: _number(body, name, 0.0, lowest=_MIN_S) for name in ("idle_s", "max_s")
    }


def read_code(body: Any) -> str:
    """Return the code of a turn.

    Raises:
        RequestRefused: there is none.
    """
    return _string(body if isinstance(body, dict) else {}, "code")


def capped_limits(wanted: ExecLimits, caps: ExecLimits) -> tuple[ExecLimits, frozenset[str]]:
    """Return the limits reduced to a server's, but with a minimum of memory, and the names of the reduced ones."""
    names = [each.name for each in fields(ExecLimits)]
    capped = [name for name in names if getattr(wanted, name) > getattr(caps, name)]
    limits = replace(wanted, **{name: getattr(caps, name) for name in capped})
    # An interpreter itself needs MIN_MEMORY_MB.
    return replace(limits, memory_mb=max(limits.memory_mb, MIN_MEMORY_MB)), frozenset(capped)


def _number(body: Mapping[str, Any], name: str, default: float, lowest: float = 0) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not is_finite(value) or value < lowest or (lowest == 0 and value == 0):
        bound = f"of at least {lowest:g}" if lowest else "above 0"
        raise RequestRefused(f"{name}: expected a number {bound}, got {brief(value, 100)}.")
    return float(value)


def _string(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise RequestRefused(f"{name}: expected a text, got {type(value).__name__}.")
    return value


# --- answers ----------------------------------------------------------------------------------------------------------


def outcome(result: ExecResult, limits: ExecLimits, capped: Set[str]) -> ExecResult:
    """Return the result; INFRA if the program reached a reduced limit."""
    reached = set(_LIMITS_OF.get(result.status, ())) | ({"stdout_kb"} if result.stdout_truncated else set())
    if hit := sorted(reached & capped):
        given = ", ".join(f"{name} = {getattr(limits, name):g}" for name in hit)
        detail = f"it reached a limit of this server below the requested one: {given}. Request less."
        return ExecResult(ExecStatus.INFRA, detail=detail)
    return result


def run_answer(result: ExecResult) -> dict[str, Any]:
    """Return the body of an answer, with exactly the fields of SandboxFusion."""
    if result.status is ExecStatus.INFRA:
        return sandbox_error(result.detail or "the sandbox failed")
    timed_out = result.status in _TIMEOUTS
    code = None if timed_out else 0
    if not timed_out and result.status is not ExecStatus.OK:  # minus the signal, as SandboxFusion has it
        code = result.exit_code or -(result.signal or 0) or _KILLED[result.status]
    stdout, stderr = result.stdout, result.stderr
    if result.stdout_data is not None:  # with its control characters, because clients compare it
        stdout = decoded(result.stdout_data)
    if result.status in _NOTES:
        stderr += f"\n[sandbox: {_NOTES[result.status]}]\n"
    run = {
        "status": "TimeLimitExceeded" if timed_out else "Finished",
        "execution_time": result.wall_s,
        "return_code": code,
        "stdout": stdout,
        "stderr": stderr,
    }
    files = {name: base64.b64encode(content).decode() for name, content in result.files.items()}
    return _answer("Success" if code == 0 else "Failed", run, files=files)


def sandbox_error(message: str) -> dict[str, Any]:
    """Return the body of an answer without a result, because the server failed."""
    run = {"status": "Error", "execution_time": None, "return_code": None, "stdout": None, "stderr": message}
    return _answer("SandboxError", run, message=message)


def _answer(status: str, run: Any, *, message: str = "", files: Mapping[str, str] | None = None) -> dict[str, Any]:
    return {
        "status": status,
        "message": message,
        "compile_result": None,
        "run_result": run,
        "executor_pod_name": None,
        "files": dict(files or {}),
    }
