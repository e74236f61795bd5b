"""SandboxFusion's `/run_code`: requests and answers, on the client and on the server.

Source: sandbox/server/sandbox_api.py, runners/types.py and runners/base.py of github.com/bytedance/SandboxFusion
at 469de08. Between `FusionSandbox` and `agentenv sandbox serve`, headers carry what that form lacks; other servers
and clients ignore them.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, get_args

from agentenv._util.brief import brief
from agentenv._util.http.access import RequestRefused
from agentenv._util.http.json_bodies import parse_json
from agentenv.core.arguments import is_finite
from agentenv.errors import ConfigError, InfraError
from agentenv.sandbox.local.execution import decoded, readable
from agentenv.sandbox.local.sandbox import MIN_MEMORY_MB, check_files, check_limits, check_program, has_room
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation, Policy

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
REQUEST_HEADER = "x-agentenv-ask"
"""Header of a request, in JSON: all limits and the policy."""
RESULT_HEADER = "x-agentenv-told"
"""Header of an answer, in JSON: the exact status, and the usage."""

_MIB = 1 << 20
_PIPE_BYTES = 128 * 1024
"""SandboxFusion reads no output while a program runs: beyond this size a program may block, or lose output."""
_NOT_TEXT = b"[DecodeError]"
"""SandboxFusion's replacement of an output that is not UTF-8."""
_SURROGATES = re.compile("[\ud800-\udfff]")


# --- the client asks --------------------------------------------------------------------------------------------------


class BadAnswer(InfraError):
    """An answer from which the outcome of the program is unknown."""


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """A request, with the values that are needed to parse its answer."""

    content: bytes
    headers: Mapping[str, str]
    limits: ExecLimits
    fetch: tuple[str, ...] = ()

    @property
    def max_answer_bytes(self) -> int:
        """An upper bound of the size of an answer, with escaped characters and files in base64."""
        limits = self.limits
        outputs = 2 * _MIB + 1024 * (limits.stdout_kb + limits.stderr_kb)
        return 6 * outputs + 2 * limits.fetch_mb * _MIB


def encode_request(
    program: str | Sequence[str],
    *,
    stdin: str | bytes,
    files: Mapping[str, bytes],
    fetch: Sequence[str],
    policy: Policy,
    limits: ExecLimits,
) -> EncodedRequest:
    """Return the request that executes a program.

    Raises:
        ConfigError: the program, a file name or a limit is invalid, or stdin is not UTF-8, which the API requires.
    """
    argv, _ = check_program(program, policy)
    check_files(files, fetch)
    check_limits(limits)
    try:
        stdin = stdin if isinstance(stdin, str) else bytes(stdin).decode()
        stdin.encode()
    except UnicodeError as error:
        raise ConfigError(
            f"stdin: expected UTF-8, which SandboxFusion's API requires, got {error}. Pass it as a file."
        ) from error
    body = {
        "code": _SURROGATES.sub("\0", str(program)) if argv is None else f"exec {shlex.join(argv)}\n",
        "language": "python" if argv is None else "bash",
        "stdin": stdin,
        "compile_timeout": limits.wall_s,
        "run_timeout": limits.wall_s,
        "memory_limit_MB": int(limits.memory_mb),
        "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
        "fetch_files": list(fetch),
    }
    header = json.dumps({"limits": asdict(limits), "policy": policy})
    headers = {"content-type": "application/json", "accept-encoding": "identity", REQUEST_HEADER: header}
    return EncodedRequest(json.dumps(body).encode(), headers, limits, tuple(fetch))


# --- the client reads answers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Command:
    """The outcome of one command, according to the answer's body."""

    status: ExecStatus
    code: int | None
    stdout: bytes
    stderr: bytes
    wall_s: float


def read_answer(content: bytes, header: str, request: EncodedRequest) -> ExecResult:
    """Return the result in an answer of status 200.

    Args:
        content: the body.
        header: RESULT_HEADER of `agentenv sandbox serve`, "" of other servers.
        request: the request.

    Raises:
        BadAnswer: the sandbox failed, or the answer is incomplete, contradictory or not of the API's form.
    """
    try:
        body = parse_json(content)
    except ValueError as error:
        raise BadAnswer(f"expected JSON, got {content[:80]!r} ({type(error).__name__})") from error
    if not isinstance(body, dict):
        raise BadAnswer(f"expected a JSON object, got {content[:80]!r}")
    if body.get("status") == "SandboxError":
        raise BadAnswer(f"SandboxError: {body.get('message')!s:.500}")
    if body.get("status") not in ("Success", "Failed"):
        raise BadAnswer(f"expected the status Success, Failed or SandboxError, got {body.get('status')!r:.100}")
    # The compiler's outcome if it failed, otherwise the program's.
    command = None
    if body.get("compile_result") is not None:
        command = _command(body["compile_result"], "compile_result")
    if command is None or command.status is ExecStatus.OK:
        command = _command(body.get("run_result"), "run_result")
    more: dict[str, Any] = json.loads(header) if header else {}
    status = _status(command, more, request)
    succeeded = command.status is ExecStatus.OK
    if (body["status"] == "Success") != succeeded or (status is ExecStatus.OK) != succeeded:
        raise BadAnswer(
            f"expected consistent statuses, got {body['status']}, a command that ended {command.status}, and {status}"
        )
    return _result(status, command, more, body, request=request)


def _command(fields: Any, where: str) -> _Command:
    if not isinstance(fields, dict):
        raise BadAnswer(f"{where}: expected an object, got {fields!r:.100}")
    status, code, wall_s = fields.get("status"), fields.get("return_code"), fields.get("execution_time")
    outputs = [fields.get(name) for name in ("stdout", "stderr")]
    if not all(text is None or isinstance(text, str) for text in outputs):
        raise BadAnswer(f"{where}: expected stdout and stderr as texts, got {fields!r:.200}")
    ended = ExecStatus.WALL_TIMEOUT
    if status == "Finished":
        if type(code) is not int:
            raise BadAnswer(f"{where}.return_code: expected an integer, got {code!r:.100}")
        ended = ExecStatus.OK if code == 0 else ExecStatus.SIGNAL if code < 0 else ExecStatus.NONZERO
    elif status != "TimeLimitExceeded":
        raise BadAnswer(f"{where}.status: {status!r:.100}, {fields.get('stderr')!s:.300}")
    out, err = ((text or "").encode("utf-8", "surrogatepass") for text in outputs)
    return _Command(ended, code if status == "Finished" else None, out, err, _amount(wall_s))


def _status(command: _Command, more: Mapping[str, Any], request: EncodedRequest) -> ExecStatus:
    """Return the status in the header, or the one in the body.

    Raises:
        BadAnswer: the program may have blocked on the server's pipe, or its output may be incomplete.
    """
    status = command.status
    if more.get("status") in list(ExecStatus):
        status = ExecStatus(more["status"])
    if more:
        return status
    long_out, long_err = len(command.stdout) > _PIPE_BYTES, len(command.stderr) > _PIPE_BYTES
    max_bytes = request.limits.stdout_kb * 1024
    if long_out and max_bytes < _PIPE_BYTES:
        return ExecStatus.OUTPUT_LIMIT if status is ExecStatus.WALL_TIMEOUT else status  # truncated in any case
    if long_out or (long_err and status is ExecStatus.WALL_TIMEOUT):
        raise BadAnswer(
            f"the output is longer than {_PIPE_BYTES} bytes, which SandboxFusion does not read to its end: expected "
            "all of it. Use `agentenv sandbox serve`, or smaller outputs"
        )
    return status


def _result(
    status: ExecStatus, command: _Command, more: Mapping[str, Any], body: Mapping[str, Any], *, request: EncodedRequest
) -> ExecResult:
    limits, printed = request.limits, command.stdout
    files: dict[str, bytes] = {}
    sent, remaining = body.get("files") or {}, limits.fetch_mb * _MIB
    for name in request.fetch:
        try:
            content = base64.b64decode(sent[name], validate=True)
        except KeyError:
            continue
        except (binascii.Error, TypeError, ValueError) as error:
            raise BadAnswer(f"files[{name!r}]: expected base64, got {error}") from error
        if len(content) <= remaining:
            files[name] = content
            remaining -= len(content)
    out, out_truncated = _truncate(printed, limits.stdout_kb)
    err, err_truncated = _truncate(command.stderr, limits.stderr_kb)
    total = max(len(printed), int(_amount(more.get("stdout_bytes"))))
    complete = total == len(printed) and not printed.startswith(_NOT_TEXT)
    layers = more.get("layers")
    levels = [more.get("isolation"), *(layers if isinstance(layers, list) else [])]
    memory = more.get("peak_memory_bytes")
    return ExecResult(
        status,
        exit_code=command.code if command.code is not None and command.code >= 0 else None,
        signal=-command.code if status is ExecStatus.SIGNAL and command.code else None,
        stdout=out,
        stderr=err,
        stdout_truncated=out_truncated or bool(more.get("stdout_truncated")),
        stderr_truncated=err_truncated or bool(more.get("stderr_truncated")),
        stdout_bytes=total,
        stdout_data=printed[: limits.stdout_kb * 1024] if complete else None,
        files=files,
        wall_s=command.wall_s,
        cpu_s=_amount(more.get("cpu_s")),
        run_delay_s=_amount(more.get("run_delay_s")),
        peak_memory_bytes=memory if type(memory) is int else None,
        isolation=Isolation.REMOTE,
        layers=tuple(str(level) for level in levels if level),
    )


def _truncate(output: bytes, max_kb: int) -> tuple[str, bool]:
    """Return the beginning of an output as safe text, and True if it is truncated."""
    truncated = len(output) > max_kb * 1024
    return readable(output[: max_kb * 1024], truncated=truncated), truncated


def _amount(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and value == value else 0.0


# --- the server reads requests ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProgramRequest:
    """A validated request to execute a program."""

    code: str
    language: str
    limits: ExecLimits
    stdin: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch: tuple[str, ...] = ()
    policy: Policy | None = None
    """None if the request does not name one."""
    from_fusion_sandbox: bool = False
    """True if the client is `FusionSandbox`, which reads the exact status in a header."""
    capped: frozenset[str] = frozenset()
    """Limits that were reduced to this server's; a program that reaches one of them has no verdict."""


def read_run_request(body: Any, header: str, caps: ExecLimits) -> ProgramRequest:
    """Parse a request from its body and from the header of `FusionSandbox` ("" from other clients).

    Raises:
        RequestRefused: a field is missing or invalid.
    """
    if not isinstance(body, dict):
        raise RequestRefused(f"body: expected a JSON object, got {type(body).__name__}.")
    seconds = _number(body, "run_timeout", 10.0, lowest=_MIN_S)
    _number(body, "compile_timeout", 10.0, lowest=-1)  # nothing is compiled
    memory = int(_number(body, "memory_limit_MB", -1, lowest=-1))
    memory = memory if memory > 0 else caps.memory_mb
    wanted: dict[str, Any] = {"cpu_s": seconds, "wall_s": seconds + SLACK_S, "memory_mb": memory}
    more = _read_header(header)
    wanted |= _read_limits(more.get("limits") or {})
    limits, capped = capped_limits(replace(DEFAULT_LIMITS, **wanted), caps)
    policy, fetch = more.get("policy"), body.get("fetch_files") or []
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
        policy=policy if policy in get_args(Policy) else None,
        from_fusion_sandbox=bool(header),
        capped=capped,
    )
    try:
        check_files(request.files, request.fetch)
    except ConfigError as error:
        raise RequestRefused(f"{error}; absolute names and `..` are not allowed.") from error
    return request


def _read_limits(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits that a client of ours has sent."""
    limits: dict[str, Any] = {}
    for name in [each.name for each in fields(ExecLimits) if each.name in sent]:
        value = _number(sent, name, 1.0, lowest=-1 if name.endswith("_kb") else _MIN_S * name.endswith("_s"))
        limits[name] = value if name in ("cpu_s", "wall_s") else max(int(value), 1)
    return limits


def read_limits(sent: Mapping[str, Any], caps: ExecLimits) -> ExecLimits:
    """Return the limits of a client of ours.

    Raises:
        RequestRefused: one is invalid, or above the server's.
    """
    limits, capped = capped_limits(ExecLimits(**_read_limits(sent)), caps)
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


def _read_header(header: str) -> dict[str, Any]:
    more = None
    with contextlib.suppress(ValueError, RecursionError):
        more = json.loads(header or "{}")
    if not isinstance(more, dict) or not isinstance(more.get("limits", {}), dict):
        raise RequestRefused("x-agentenv-ask: expected a JSON object. Omit the header.")
    return more


# --- the server's answers ---------------------------------------------------------------------------------------------


def run_answer(result: ExecResult, request: ProgramRequest) -> dict[str, Any]:
    """Return the body of an answer, with exactly the fields of SandboxFusion.

    The outcome is unknown if the sandbox failed, or the program reached a reduced limit.
    """
    if result.status is ExecStatus.INFRA:
        return sandbox_error(result.detail or "the sandbox failed")
    reached = set(_LIMITS_OF.get(result.status, ())) | ({"stdout_kb"} if result.stdout_truncated else set())
    if hit := sorted(reached & request.capped):
        given = ", ".join(f"{name} = {getattr(request.limits, name):g}" for name in hit)
        return sandbox_error(f"it reached a limit of this server below the requested one: {given}. Request less.")
    timed_out = result.status in _TIMEOUTS
    code = None if timed_out else 0
    if not timed_out and result.status is not ExecStatus.OK:  # minus the signal, as SandboxFusion has it
        code = result.exit_code or -(result.signal or 0) or _KILLED[result.status]
    stdout, stderr = result.stdout, result.stderr
    if result.stdout_data is not None:  # with its control characters, because clients compare it
        stdout = decoded(result.stdout_data)
    if result.status in _NOTES and not request.from_fusion_sandbox:
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


def result_header(result: ExecResult) -> str:
    """Return the header for `FusionSandbox`, with the exact status and usage."""
    names: Sequence[str] = (
        "cpu_s", "run_delay_s", "peak_memory_bytes", "stdout_bytes", "stdout_truncated", "stderr_truncated",
    )  # fmt: skip
    values = {name: getattr(result, name) for name in names}
    level = {"status": str(result.status), "isolation": str(result.isolation), "layers": list(result.layers)}
    return json.dumps({**level, **values})
