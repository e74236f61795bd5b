"""SandboxFusion's `/run_code`, the server's half: a request as a program, and a result as the answer.

Source: sandbox/server/sandbox_api.py and runners/types.py of github.com/bytedance/SandboxFusion at 469de08.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from agentenv.errors import ConfigError
from agentenv.http_serving.doors import Refused
from agentenv.rewards.types import is_finite
from agentenv.sandbox.local import MIN_MEMORY_MB, check_files
from agentenv.sandbox.types import ExecLimits, ExecResult, Policy, Status

LANGUAGES = (
    "python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript", "sql", "rust", "cuda",
    "lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit", "kotlin_script", "jest", "verilog",
    "python_gpu", "lean", "swift", "racket",
)  # fmt: skip
"""That a request may name; a server need not offer them all."""
MAX_LIMITS = ExecLimits(
    cpu_s=120.0, wall_s=240.0, memory_mb=1024, num_processes=64, num_threads=64, num_files=256, file_mb=64, disk_mb=128,
    num_inodes=8192, stdout_kb=4096, stderr_kb=4096, channel_kb=1024, fetch_mb=16,
)  # fmt: skip
"""Default of what a server gives at most."""
USUAL = ExecLimits(disk_mb=64, num_files=128, num_inodes=4096, stdout_kb=1024, stderr_kb=1024, fetch_mb=8)
"""Of a request that names a time and a memory only. SandboxFusion reads one MiB of an output, too."""
SLACK_S = 1.0
"""Of wall time beyond `run_timeout`, which limits the CPU: what a busy host costs is not the program's."""
_TIMEOUTS = (Status.CPU_TIMEOUT, Status.WALL_TIMEOUT)
_BEHIND: Mapping[Status, tuple[str, ...]] = {
    Status.CPU_TIMEOUT: ("cpu_s", "wall_s"),
    Status.WALL_TIMEOUT: ("cpu_s", "wall_s"),
    Status.MEMORY: ("memory_mb",),
    Status.OUTPUT_LIMIT: ("stdout_kb", "stderr_kb", "channel_kb"),
    Status.DISK_LIMIT: ("disk_mb", "file_mb", "num_inodes"),
}
_KILLED: Mapping[Status, int] = {
    Status.MEMORY: -9,
    Status.OUTPUT_LIMIT: -9,
    Status.DISK_LIMIT: -25,
    Status.POLICY: -31,
    Status.SIGNAL: -9,
    Status.NONZERO: 1,
}
"""Return codes where a result has none: minus the signal that such an end has elsewhere."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One request to execute a program, read and checked."""

    code: str
    language: str
    limits: ExecLimits
    stdin: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch: tuple[str, ...] = ()
    policy: Policy | None = None
    """None where the request does not say."""
    tenant: str = ""
    own: bool = False
    """Whether it is our own client that asks, which reads the status in our header."""
    capped: frozenset[str] = frozenset()
    """Limits that were asked for higher than this server's: ending at one of them says nothing of the program."""


def read_run_request(body: Any, header: str, caps: ExecLimits) -> RunRequest:
    """The request in a body and in our own clients' header, "" of others.

    Raises:
        Refused: something is missing or wrong.
    """
    if not isinstance(body, dict):
        raise Refused(f"body: expected a JSON object, got {type(body).__name__}. Send one.")
    language = body.get("language")
    if language not in LANGUAGES:
        raise Refused(f"language: expected one of {', '.join(LANGUAGES)}, got {language!r:.100}. Name one.")
    seconds = _number(body, "run_timeout", 10.0)
    _number(body, "compile_timeout", 10.0, lowest=-1)  # nothing is compiled
    memory = int(_number(body, "memory_limit_MB", -1, lowest=-1))
    memory = memory if memory > 0 else caps.memory_mb
    wanted = replace(USUAL, cpu_s=seconds, wall_s=seconds + SLACK_S, memory_mb=memory)
    more = _read_header(header)
    limits, capped = capped_limits(_read_limits(more.get("limits") or {}, wanted), caps)
    policy = more.get("policy")
    request = RunRequest(
        code=_string(body, "code"),
        language=language,
        limits=limits,
        stdin="" if body.get("stdin") is None else _string(body, "stdin"),
        files=_read_files(body.get("files") or {}),
        fetch=tuple(_names(body.get("fetch_files") or [])),
        policy=policy if policy in get_args(Policy) else None,
        tenant=str(more.get("tenant", ""))[:64],
        own=bool(header),
        capped=capped,
    )
    try:
        check_files(request.files, request.fetch)
    except ConfigError as error:
        raise Refused(f"{error}; no absolute ones, and none with `..`.") from error
    return request


def capped_limits(wanted: ExecLimits, caps: ExecLimits) -> tuple[ExecLimits, frozenset[str]]:
    """Limits, none of them above a server's but for the least memory, and the names of those that were."""
    names = [each.name for each in fields(ExecLimits)]
    capped = [name for name in names if getattr(wanted, name) > getattr(caps, name)]
    given = replace(wanted, **{name: getattr(caps, name) for name in capped})
    # Less than an interpreter has itself is no limit of the program's.
    return replace(given, memory_mb=max(given.memory_mb, MIN_MEMORY_MB)), frozenset(capped)


def _number(body: Mapping[str, Any], name: str, default: float, lowest: float = 0) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not is_finite(value) or value < lowest or (lowest == 0 and value == 0):
        raise Refused(f"{name}: expected a number above {lowest:g}, got {value!r:.100}. Change it.")
    return float(value)


def _string(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise Refused(f"{name}: expected a text, got {type(value).__name__}. Send one.")
    return value


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise Refused(f"fetch_files: expected a list of names, got {value!r:.100}. Send one.")
    return value


def _read_files(files: Any) -> dict[str, bytes]:
    """The files of a request; one without content is left out, as SandboxFusion does."""
    if not isinstance(files, dict):
        raise Refused(f"files: expected an object of names and contents, got {files!r:.100}. Send one.")
    try:
        return {name: base64.b64decode(text, validate=True) for name, text in files.items() if text is not None}
    except (binascii.Error, TypeError, ValueError) as error:
        raise Refused(f"files: expected contents in base64, got {error}. Encode them.") from error


def _read_header(header: str) -> dict[str, Any]:
    if not header:
        return {}
    try:
        more = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise Refused("x-agentenv-ask: expected JSON. Leave the header out.") from error
    if not isinstance(more, dict) or not isinstance(more.get("limits", {}), dict):
        raise Refused("x-agentenv-ask: expected a JSON object. Leave the header out.")
    return more


def _read_limits(given: Mapping[str, Any], default: ExecLimits) -> ExecLimits:
    seconds = ("cpu_s", "wall_s")
    names = [each.name for each in fields(ExecLimits) if each.name in given]
    known = {name: _number(given, name, 1.0, lowest=-1 if name.endswith("_kb") else 0) for name in names}
    read: dict[str, Any] = {name: value if name in seconds else max(int(value), 1) for name, value in known.items()}
    return replace(default, **read)


# --- answers ----------------------------------------------------------------------------------------------------------


def run_answer(result: ExecResult, request: RunRequest) -> dict[str, Any]:
    """The body that answers a request: every field of SandboxFusion's, and no other."""
    if problem := unknown(result, request):
        return sandbox_error(problem)
    timed_out, code = result.status in _TIMEOUTS, return_code(result)
    run = {
        "status": "TimeLimitExceeded" if timed_out else "Finished",
        "execution_time": result.wall_s,
        "return_code": code,
        "stdout": _printed(result),
        "stderr": result.stderr + ("" if request.own else _note(result)),
    }
    files = {name: base64.b64encode(content).decode() for name, content in result.files.items()}
    return _answer("Success" if code == 0 else "Failed", run=run, files=files)


def unknown(result: ExecResult, request: RunRequest) -> str:
    """Why nothing is known of the program, "" where something is: the sandbox failed, or gave it less than asked."""
    if result.status is Status.INFRA:
        return result.detail or "the sandbox failed"
    names = set(_BEHIND.get(result.status, ())) | ({"stdout_kb"} if result.stdout_truncated else set())
    if hit := sorted(names & request.capped):
        given = ", ".join(f"{name} = {getattr(request.limits, name):g}" for name in hit)
        return f"it ended at a limit of this server's, below the one that was asked for: {given}. Ask for less."
    return ""


def return_code(result: ExecResult) -> int | None:
    """The exit code, minus the signal, or None of a program that ran out of time."""
    if result.status in _TIMEOUTS:
        return None
    if result.status is Status.OK:
        return 0
    code = result.exit_code or (-result.signal if result.signal else None)
    return code or _KILLED[result.status]


def _printed(result: ExecResult) -> str:
    """The standard output as it was written, controls and all: clients compare it."""
    data = result.stdout_data
    return result.stdout if data is None else data.decode("utf-8", "backslashreplace")


def _note(result: ExecResult) -> str:
    """Of an end that a return code cannot tell."""
    notes = {
        Status.MEMORY: "memory limit exceeded",
        Status.OUTPUT_LIMIT: "output limit exceeded",
        Status.DISK_LIMIT: "disk limit exceeded",
        Status.POLICY: "forbidden system call",
    }
    note = notes.get(result.status)
    return f"\n[sandbox: {note}]\n" if note else ""


def sandbox_error(message: str) -> dict[str, Any]:
    """The body that says that the server, and not the program, is why there is no result."""
    run = {"status": "Error", "execution_time": None, "return_code": None, "stdout": None, "stderr": message}
    return _answer("SandboxError", message=message, run=run)


def _answer(
    status: str, *, message: str = "", run: Mapping[str, Any] | None = None, files: Mapping[str, str] | None = None
) -> dict[str, Any]:
    return {
        "status": status,
        "message": message,
        "compile_result": None,
        "run_result": run,
        "executor_pod_name": None,
        "files": dict(files or {}),
    }


def told(result: ExecResult) -> str:
    """The header for our own clients."""
    names: Sequence[str] = (
        "cpu_s", "queue_s", "run_delay_s", "peak_memory_bytes", "stdout_bytes", "stdout_truncated", "stderr_truncated",
    )  # fmt: skip
    values = {name: getattr(result, name) for name in names}
    level = {"status": str(result.status), "isolation": str(result.isolation), "layers": list(result.layers)}
    return json.dumps({**level, **values})
