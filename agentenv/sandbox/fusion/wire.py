"""What `FusionSandbox` and `FusionServer` send each other, as JSON: programs and results, suites and grades.

Nothing is pickled: `grading.codec` encodes the values of tests.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from agentenv._util.brief import brief
from agentenv._util.http.access import RequestRefused
from agentenv.errors import ConfigError, InfraError
from agentenv.sandbox.fusion.run_code import capped_limits, read_limits, sent_limits
from agentenv.sandbox.grading.codec import decode, encode
from agentenv.sandbox.grading.compare import Comparison
from agentenv.sandbox.grading.results import GradeResult, Integrity, TestResult, Verdict
from agentenv.sandbox.grading.suites import AssertSuite, AssertTest, FunctionSuite, FunctionTest, PytestSuite, TestSuite
from agentenv.sandbox.local.sandbox import check_files, check_limits, check_program
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation, Policy

_SUITES: Mapping[str, tuple[type[Any], type[Any] | None]] = {
    "FunctionSuite": (FunctionSuite, FunctionTest),
    "AssertSuite": (AssertSuite, AssertTest),
    "PytestSuite": (PytestSuite, None),
}
"""Each suite, and the class of its tests, which are plain values without one. A StdioSuite is graded by the client."""
_TESTS = ("visible", "hidden")
_FOREVER_S = 1e9
"""The rest of a time limit that the caller does not have; of infinity, no part could be told as spent."""
_TYPES = {name: type(value) for name, value in asdict(ExecResult(ExecStatus.OK)).items() if value is not None}
"""The types of the fields of a result that are never None."""


class BadAnswer(InfraError):
    """An answer from which the outcome of the program is unknown."""


# --- programs ---------------------------------------------------------------------------------------------------------


def encode_program(
    program: str | Sequence[str],
    *,
    stdin: str | bytes,
    files: Mapping[str, bytes],
    fetch: Sequence[str],
    policy: Policy,
    limits: ExecLimits,
    channel: bool,
) -> bytes:
    """Return the body of a request to execute a program.

    Raises:
        ConfigError: the program, a file name or a limit is invalid.
    """
    argv, _ = check_program(program, policy)
    check_files(files, fetch)
    check_limits(limits)
    body = {
        "program": program if argv is None else argv,
        "stdin": _base64(stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin),
        "files": {name: _base64(content) for name, content in files.items()},
        "fetch": list(fetch),
        "policy": policy,
        "limits": asdict(limits),
        "channel": channel,
    }
    return json.dumps(body).encode()


def read_program(body: Any, caps: ExecLimits) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the arguments of `Sandbox.run`, and the names of the limits that were reduced to this server's.

    Raises:
        RequestRefused: a field is missing or invalid.
    """
    try:
        limits, capped = capped_limits(sent_limits(body["limits"]), caps)
        files = {name: _bytes(content) for name, content in body["files"].items()}
        asked = {**body, "stdin": _bytes(body["stdin"]), "files": files, "limits": limits}
        check_program(asked["program"], asked["policy"])
        check_files(files, asked["fetch"])
        if asked.keys() != {"program", "stdin", "files", "fetch", "policy", "limits", "channel"}:
            raise TypeError("other fields")
    except (AttributeError, ConfigError, KeyError, TypeError, ValueError) as error:
        raise RequestRefused(f"body: expected a program, got {brief(error, 300)}.") from error
    return asked, capped


def result_body(result: ExecResult) -> dict[str, Any]:
    """Return the body of an answer to a program."""
    files = {name: _base64(content) for name, content in result.files.items()}
    data = None if result.stdout_data is None else _base64(result.stdout_data)
    return {**asdict(result), "files": files, "channel": _base64(result.channel), "stdout_data": data}


def read_result(found: Mapping[str, Any]) -> ExecResult:
    """Return the result in an answer.

    Raises:
        BadAnswer: the sandbox failed, or the answer has another form.
    """
    try:
        values = {
            **found,
            "status": ExecStatus(found["status"]),
            "files": {name: _bytes(content) for name, content in found["files"].items()},
            "channel": _bytes(found["channel"]),
            "stdout_data": None if found["stdout_data"] is None else _bytes(found["stdout_data"]),
            "isolation": Isolation.REMOTE,
            "layers": (found["isolation"], *found["layers"]),
        }
        if any(type(values[name]) is not kind for name, kind in _TYPES.items()):
            raise TypeError
        result = ExecResult(**values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadAnswer(f"expected a result, got {brief(found, 200)} ({type(error).__name__})") from error
    if result.status is ExecStatus.INFRA:
        raise BadAnswer(f"SandboxError: {result.detail!s:.500}")
    return result


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


# --- grades -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """A validated request to grade a program."""

    code: str
    suite: TestSuite
    limits: ExecLimits
    stop_on_fail: bool
    seconds_left: float
    """Rest of the time limit of the caller; inf without one."""


def encode_grade_request(request: GradeRequest) -> bytes:
    """Return the body of a request.

    Raises:
        ConfigError: the suite has a checker, which cannot be sent.
    """
    suite = request.suite
    if type(suite).__name__ not in _SUITES or getattr(suite, "checker", None) is not None:
        raise ConfigError(
            f"grade: expected a suite of agentenv without a checker, got {suite!r:.200}. A "
            "remote sandbox has no code of yours: use a LocalSandbox."
        )
    body = {
        **{each.name: getattr(request, each.name) for each in fields(request)},
        "suite": {"kind": type(suite).__name__, **_to_json(suite)},
        "limits": asdict(request.limits),
        "seconds_left": request.seconds_left if math.isfinite(request.seconds_left) else None,
    }
    return json.dumps(body).encode()


def _to_json(value: Any) -> Any:
    """Encode a suite, a test or a comparison by field, and other values as one."""
    if is_dataclass(value):
        values = {each.name: getattr(value, each.name) for each in fields(value)}
        return {name: [*map(_to_json, item)] if name in _TESTS else _to_json(item) for name, item in values.items()}
    return encode(dict(value) if isinstance(value, Mapping) else value)


def read_grade_request(body: Any, caps: ExecLimits) -> GradeRequest:
    """Parse a request.

    Raises:
        RequestRefused: a field is missing or invalid, or a limit is above the server's.
    """
    try:
        kind, test_kind = _SUITES[body["suite"].pop("kind")]
        suite = _read(kind, body["suite"], test_kind)
        left_s = _FOREVER_S if body["seconds_left"] is None else min(max(0.0, float(body["seconds_left"])), _FOREVER_S)
        limits = read_limits(body["limits"], caps)
        request = GradeRequest(body["code"], suite, limits, body["stop_on_fail"] is True, left_s)
        request.code.encode(errors="replace")
    except (KeyError, TypeError, AttributeError, ValueError, ConfigError) as error:
        raise RequestRefused(f"body: expected a program and its tests, got {brief(error, 300)}.") from error
    return request


def _read(kind: type[Any], data: Mapping[str, Any], test_kind: type[Any] | None = None) -> Any:
    """Return the dataclass in `data`; its constructor checks what is not checked here."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name in _TESTS:
            values[name] = tuple(decode(test) if test_kind is None else _read(test_kind, test) for test in value)
            continue
        values[name] = _read(Comparison, value) if hints[name] is Comparison else decode(value)
        wrong = hints[name] in (str, bool, int) and type(values[name]) is not hints[name]
        if wrong or (name in ("files", "workspace") and not set(map(type, values[name].values())) <= {bytes}):
            raise TypeError(f"{kind.__name__}.{name}")
    return kind(**values)


def read_grade(data: Any, suite: TestSuite) -> GradeResult:
    """Return the grade in an answer.

    Raises:
        BadAnswer: it has another form, or results of other tests.
    """
    try:
        tests = tuple(TestResult(**{**test, "verdict": Verdict(test["verdict"])}) for test in data["tests"])
        signals, integrity = tuple(map(str, data["tamper_signals"])), Integrity(data["integrity"])
        own = {"tests": tests, "tamper_signals": signals, "integrity": integrity, "isolation": Isolation.REMOTE}
        if [test.visible for test in tests] == [True] * len(suite.visible) + [False] * len(suite.hidden):
            return GradeResult(**{**data, **own})
    except (KeyError, TypeError, ValueError) as error:
        raise BadAnswer(f"expected a grade, got {brief(data, 200)} ({type(error).__name__})") from error
    raise BadAnswer(
        f"expected a grade of {len(suite.visible)} visible and {len(suite.hidden)} hidden tests, got others"
    )
