"""SandboxFusion's `/run_code` on the client: requests from programs, and results from answers.

Source: sandbox/server/sandbox_api.py, runners/types.py and runners/base.py of github.com/bytedance/SandboxFusion
at 469de08. Between `FusionSandbox` and `agentenv sandbox serve`, headers carry what that form lacks; other servers
ignore them.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentenv._util.http.json_bodies import parse_json
from agentenv.errors import ConfigError, InfraError
from agentenv.sandbox.local.execution import readable
from agentenv.sandbox.local.sandbox import check_files, check_limits, check_program
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation, Policy

REQUEST_HEADER = "x-agentenv-ask"
"""Header of a request, in JSON: all limits, the policy and the tenant."""
RESULT_HEADER = "x-agentenv-told"
"""Header of an answer, in JSON: the exact status, and the usage."""

_MIB = 1 << 20
_PIPE_BYTES = 128 * 1024
"""SandboxFusion reads no output while a program runs: beyond this size a program may block, or lose output."""
_NOT_TEXT = b"[DecodeError]"
"""SandboxFusion's replacement of an output that is not UTF-8."""
_SURROGATES = re.compile("[\ud800-\udfff]")


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
    tenant: str,
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
    header = json.dumps({"limits": asdict(limits), "policy": policy, "tenant": tenant[:64]})
    headers = {"content-type": "application/json", "accept-encoding": "identity", REQUEST_HEADER: header}
    return EncodedRequest(json.dumps(body).encode(), headers, limits, tuple(fetch))


# --- answers ----------------------------------------------------------------------------------------------------------


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
    try:
        more = json.loads(header) if header else {}
    except ValueError:
        more = {}
    more = more if isinstance(more, dict) else {}
    status = _status(command, more, request)
    succeeded = command.status is ExecStatus.OK
    if (body["status"] == "Success") != succeeded or (status is ExecStatus.OK) != succeeded:
        raise BadAnswer(
            f"expected consistent statuses, got {body['status']}, a command that ended {command.status}, and {status}"
        )
    return _result(status, command, more, request=request, files=_fetched_files(body, request))


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
    return _Command(ended, code if status == "Finished" else None, out, err, _number(wall_s))


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


def _fetched_files(body: Mapping[str, Any], request: EncodedRequest) -> dict[str, bytes]:
    files = body.get("files") or {}
    remaining = request.limits.fetch_mb * _MIB
    fetched: dict[str, bytes] = {}
    for name in request.fetch:
        try:
            content = base64.b64decode(files[name], validate=True)
        except KeyError:
            continue
        except (binascii.Error, TypeError, ValueError) as error:
            raise BadAnswer(f"files[{name!r}]: expected base64, got {error}") from error
        if len(content) <= remaining:
            fetched[name] = content
            remaining -= len(content)
    return fetched


def _result(
    status: ExecStatus,
    command: _Command,
    more: Mapping[str, Any],
    *,
    request: EncodedRequest,
    files: Mapping[str, bytes],
) -> ExecResult:
    limits, printed = request.limits, command.stdout
    out, out_truncated = _truncate(printed, limits.stdout_kb)
    err, err_truncated = _truncate(command.stderr, limits.stderr_kb)
    total = max(len(printed), int(_number(more.get("stdout_bytes"))))
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
        cpu_s=_number(more.get("cpu_s")),
        queue_s=_number(more.get("queue_s")),
        run_delay_s=_number(more.get("run_delay_s")),
        peak_memory_bytes=memory if type(memory) is int else None,
        isolation=Isolation.REMOTE,
        layers=tuple(str(level) for level in levels if level),
        backend="sandbox_fusion",
    )


def _truncate(output: bytes, max_kb: int) -> tuple[str, bool]:
    """Return the beginning of an output as safe text, and True if it is truncated."""
    truncated = len(output) > max_kb * 1024
    return readable(output[: max_kb * 1024], truncated=truncated), truncated


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and value == value else 0.0
