"""SandboxFusion's `/run_code`, the client's half: a program as a request, and the answer as a result.

Source: sandbox/server/sandbox_api.py, runners/types.py and runners/base.py of github.com/bytedance/SandboxFusion
at 469de08. Between two of ours, a header each way carries what that form has no place for; other servers ignore it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agentenv.errors import ConfigError, InfraError
from agentenv.sandbox._execution import readable
from agentenv.sandbox.local import check_files, check_limits, check_program
from agentenv.sandbox.types import ExecLimits, ExecResult, Isolation, Policy, Status

ASK_HEADER = "x-agentenv-ask"
"""JSON: all limits, the policy and the tenant."""
TOLD_HEADER = "x-agentenv-told"
"""JSON: the exact status, and what was used."""

_MIB = 1 << 20
_PIPE_BYTES = 128 * 1024
"""SandboxFusion reads no output while a program runs: past this a program may wait for ever, or its end be lost."""
_NOT_TEXT = b"[DecodeError]"
"""What SandboxFusion answers in the place of an output that is no UTF-8."""
_IN_PYTHON = """\
import os
os.write(1, b"{mark}\\n")
os.dup2(1, 3)
os.dup2(2, 1)
del os
exec(compile({source!r}, "main.py", "exec", dont_inherit=True))
"""
_IN_BASH = "printf '%s\\n' {mark}\nexec 3>&1 1>&2\n"
_SURROGATES = re.compile("[\ud800-\udfff]")


class BadAnswer(InfraError):
    """An answer that says nothing of the program."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, and what reading its answer needs."""

    content: bytes
    headers: Mapping[str, str]
    limits: ExecLimits
    fetch: tuple[str, ...] = ()
    mark: str = ""
    """The line of stdout after which all is of descriptor 3; empty where no channel is asked for."""

    @property
    def max_answer_bytes(self) -> int:
        """More than any answer needs: each character escaped, each file in base64."""
        limits = self.limits
        kept = 2 * _MIB + 1024 * (limits.stdout_kb + limits.stderr_kb + limits.channel_kb)
        return 6 * kept + 2 * limits.fetch_mb * _MIB


def make_ask(
    program: str | Sequence[str],
    *,
    stdin: str | bytes,
    files: Mapping[str, bytes],
    fetch: Sequence[str],
    policy: Policy,
    limits: ExecLimits,
    tenant: str,
    channel: bool,
) -> Ask:
    """The request that executes a program.

    A channel is made of stdout: our first line marks where it begins, before anything of the program runs, and prints
    then go to stderr. What is written there cannot be taken back, as on descriptor 3; it is text.

    Raises:
        ConfigError: the program, a file's name or a limit cannot be, or stdin is no UTF-8, which this form lacks.
    """
    argv, _ = check_program(program, policy)
    check_files(files, fetch)
    check_limits(limits)
    mark = f"begin-{secrets.token_hex(8)}" if channel else ""
    if argv is None:
        code = _IN_PYTHON.format(mark=mark, source=program) if channel else _SURROGATES.sub("\0", str(program))
    else:
        code = (_IN_BASH.format(mark=mark) if channel else "") + f"exec {shlex.join(argv)}\n"
    body = {
        "code": code,
        "language": "python" if argv is None else "bash",
        "stdin": _text(stdin),
        "compile_timeout": limits.wall_s,
        "run_timeout": limits.wall_s,
        "memory_limit_MB": int(limits.memory_mb),
        "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
        "fetch_files": list(fetch),
    }
    told = _wire_limits(limits) if channel else limits
    header = json.dumps({"limits": asdict(told), "policy": policy, "tenant": tenant[:64]})
    headers = {"content-type": "application/json", "accept-encoding": "identity", ASK_HEADER: header}
    return Ask(json.dumps(body).encode(), headers, limits, tuple(fetch), mark)


def _wire_limits(limits: ExecLimits) -> ExecLimits:
    """The limits where stdout is the channel and stderr has all prints."""
    return replace(
        limits,
        stdout_kb=max(limits.stdout_kb, limits.channel_kb) + 1,
        stderr_kb=max(limits.stdout_kb, limits.stderr_kb),
    )


def _text(stdin: str | bytes) -> str:
    try:
        text = stdin if isinstance(stdin, str) else bytes(stdin).decode()
        text.encode()
    except UnicodeError as error:
        raise ConfigError(
            f"stdin: expected UTF-8, which is all that SandboxFusion's form carries, got {error}. Give it as a file."
        ) from error
    return text


# --- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Command:
    """How one command went, by the answer alone."""

    status: Status
    code: int | None
    stdout: bytes
    stderr: bytes
    wall_s: float


def read_answer(content: bytes, told: str, ask: Ask) -> ExecResult:
    """The result in the body of an answer of status 200.

    Args:
        content: the body.
        told: the header of our own servers, "" of others.
        ask: what was asked.

    Raises:
        BadAnswer: it says that the sandbox failed, contradicts itself, lacks what it must have, or is no such object.
    """
    body = _object(content)
    if body.get("status") == "SandboxError":
        raise BadAnswer(f"SandboxError: {body.get('message')!s:.500}")
    if body.get("status") not in ("Success", "Failed"):
        raise BadAnswer(f"expected the status Success, Failed or SandboxError, got {body.get('status')!r:.100}")
    command = _last_command(body)
    more = _told(told)
    status = _status(command, more)
    if (body["status"] == "Success") != (command.status is Status.OK) or (status is Status.OK) != (
        command.status is Status.OK
    ):
        raise BadAnswer(
            f"expected one story, got {body['status']}, a command that ended {command.status}, and {status}"
        )
    if not more:
        status = _unless_blocked(status, command, ask)
    return _result(status, command, more, ask=ask, files=_fetched(body, ask))


def _object(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"expected JSON, got {content[:80]!r} ({type(error).__name__})") from error
    if not isinstance(body, dict):
        raise BadAnswer(f"expected a JSON object, got {content[:80]!r}")
    return body


def _last_command(body: Mapping[str, Any]) -> _Command:
    """The compiler where it did not end well, else the program."""
    compiled, run = body.get("compile_result"), body.get("run_result")
    if compiled is not None:
        command = _command(compiled, "compile_result")
        if command.status is not Status.OK:
            return command
    return _command(run, "run_result")


def _command(told: Any, where: str) -> _Command:
    if not isinstance(told, dict):
        raise BadAnswer(f"{where}: expected an object, got {told!r:.100}")
    status, code, wall_s = told.get("status"), told.get("return_code"), told.get("execution_time")
    outputs = [told.get(name) for name in ("stdout", "stderr")]
    if not all(text is None or isinstance(text, str) for text in outputs):
        raise BadAnswer(f"{where}: expected stdout and stderr as texts, got {told!r:.200}")
    ended = Status.WALL_TIMEOUT
    if status == "Finished":
        if type(code) is not int:
            raise BadAnswer(f"{where}.return_code: expected an integer, got {code!r:.100}")
        ended = Status.OK if code == 0 else Status.SIGNAL if code < 0 else Status.NONZERO
    elif status != "TimeLimitExceeded":
        raise BadAnswer(f"{where}.status: {status!r:.100}, {told.get('stderr')!s:.300}")
    out, err = ((text or "").encode("utf-8", "surrogatepass") for text in outputs)
    return _Command(ended, code if status == "Finished" else None, out, err, _number(wall_s))


def _told(header: str) -> dict[str, Any]:
    try:
        told = json.loads(header) if header else {}
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _status(command: _Command, more: Mapping[str, Any]) -> Status:
    """The status as our own servers say it; else by the answer and the last line of stderr."""
    if more.get("status") in list(Status):
        return Status(more["status"])
    if command.status is Status.NONZERO and command.stderr.rstrip().rpartition(b"\n")[2].startswith(b"MemoryError"):
        return Status.MEMORY
    return command.status


def _unless_blocked(status: Status, command: _Command, ask: Ask) -> Status:
    """The status, where the server's pipe cannot have been what ended the program.

    Raises:
        BadAnswer: it may have been.
    """
    long_out, long_err = len(command.stdout) > _PIPE_BYTES, len(command.stderr) > _PIPE_BYTES
    kept = ask.limits.stdout_kb * 1024
    if long_out and kept < _PIPE_BYTES and not ask.mark:
        return Status.OUTPUT_LIMIT if status is Status.WALL_TIMEOUT else status  # more than is kept either way
    if long_out or (long_err and status is Status.WALL_TIMEOUT):
        raise BadAnswer(
            f"the output is longer than {_PIPE_BYTES} bytes, which SandboxFusion does not read to its end: expected "
            "all of it. Use `agentenv sandbox serve`, or smaller outputs"
        )
    return status


def _fetched(body: Mapping[str, Any], ask: Ask) -> dict[str, bytes]:
    files = body.get("files") or {}
    room = ask.limits.fetch_mb * _MIB
    fetched: dict[str, bytes] = {}
    for name in ask.fetch:
        try:
            content = base64.b64decode(files[name], validate=True)
        except KeyError:
            continue
        except (binascii.Error, TypeError, ValueError) as error:
            raise BadAnswer(f"files[{name!r}]: expected base64, got {error}") from error
        if len(content) <= room:
            fetched[name], room = content, room - len(content)
    return fetched


def _result(
    status: Status, command: _Command, more: Mapping[str, Any], *, ask: Ask, files: Mapping[str, bytes]
) -> ExecResult:
    limits, printed, channel = ask.limits, command.stdout, b""
    if ask.mark:
        before, mark, after = printed.partition(f"{ask.mark}\n".encode())
        if not mark:
            raise BadAnswer(f"expected our first line on stdout, got {printed[:200]!r}")
        channel, printed = after[: limits.channel_kb * 1024], before
    (out, cut_out), (err, cut_err) = _kept(printed, limits.stdout_kb), _kept(command.stderr, limits.stderr_kb)
    total = max(len(printed), int(_number(more.get("stdout_bytes"))))
    whole = bool(ask.mark) or (total == len(printed) and not printed.startswith(_NOT_TEXT))
    levels = [more.get("isolation"), *_list(more.get("layers"))]
    memory = more.get("peak_memory_bytes")
    return ExecResult(
        status,
        exit_code=command.code if command.code is not None and command.code >= 0 else None,
        signal=-command.code if status is Status.SIGNAL and command.code else None,
        stdout=out,
        stderr=err,
        stdout_truncated=cut_out or (bool(more.get("stdout_truncated")) and not ask.mark),
        stderr_truncated=cut_err or bool(more.get("stderr_truncated")),
        stdout_bytes=len(printed) if ask.mark else total,
        stdout_data=printed[: limits.stdout_kb * 1024] if whole else None,
        channel=channel,
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


def _kept(output: bytes, keep_kb: int) -> tuple[str, bool]:
    """The beginning of an output as text that is safe to show, and whether that is not all."""
    keep = keep_kb * 1024
    return readable(output[:keep], cut=len(output) > keep), len(output) > keep


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and value == value else 0.0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
