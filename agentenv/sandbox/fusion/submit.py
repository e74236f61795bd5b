"""SandboxFusion's `/submit` with tests in the request: programs that read stdin and print.

Source: sandbox/datasets/common_oj.py, utils/testing.py and utils/extraction.py of github.com/bytedance/SandboxFusion at
469de08. Expected outputs never enter the sandbox. Not supported are its other datasets, which accept a return code of 0
so that `exit(0)` passes, and `custom_extract_logic`, code of the request that would run in the server.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentenv._util.brief import brief
from agentenv._util.http.access import RequestRefused
from agentenv._util.http.json_bodies import parse_json

MAX_CASES = 1000
_CLOSE = re.compile(r"^[^\S\n]*```", re.MULTILINE)
_PYTHON = ("python", "py", "python3")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,6})?", re.ASCII)
_TOLERANCE = 1e-5
_MAX_SHOWN = 1000
MAX_SHOWN_OUTPUT = 1 << 20
"""Characters of stdout, and of stderr, in an answer with all its cases; each shows an equal share, at least 1,000."""


@dataclass(frozen=True, slots=True)
class SubmitCase:
    """One test: the input and the expected output."""

    stdin: str
    stdout: str
    info: Mapping[str, Any] = field(default_factory=dict)
    """The test as it is in the request."""


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """A validated program with its tests."""

    id: int | str
    code: str
    """The program in the completion; may be empty."""
    cases: tuple[SubmitCase, ...]
    run: Mapping[str, Any]
    """The request for `/run_code` of every case, without its stdin."""
    run_all_cases: bool = False
    return_full_case: bool = False


def read_submit_request(body: Any) -> SubmitRequest:
    """Parse a request from its body.

    Raises:
        RequestRefused: a field is missing or invalid, or requests an unsupported feature.
    """
    config = body.get("config") if isinstance(body, dict) else None
    if not isinstance(config, dict) or not isinstance(body.get("completion"), str):
        raise RequestRefused(
            "body: expected an object with dataset, id, completion and config, got another. Send them."
        )
    if config.get("custom_extract_logic") is not None:
        raise RequestRefused(
            "config.custom_extract_logic: expected none, got code. Nothing of a request runs in the server."
        )
    if config.get("dataset_type") not in (None, "CommonOJDataset"):
        raise RequestRefused(
            f"eval class {brief(config['dataset_type'], 100)} not found: only CommonOJDataset is supported", 400
        )
    if config.get("language") != "python":
        raise RequestRefused(
            f"config.language: expected 'python', got {brief(config.get('language'), 100)}. Send Python.", 400
        )
    number, extra = body.get("id"), config.get("extra")
    if not isinstance(number, int | str):
        raise RequestRefused(f"id: expected a number or a text, got {brief(number, 100)}. Send one.")
    extra = extra if isinstance(extra, dict) else {}
    data = config.get("provided_data")
    rows = data if isinstance(data, list) else [data]
    row = next((row for row in rows if isinstance(row, dict) and (row.get("id") == number or len(rows) == 1)), None)
    if row is None:
        raise RequestRefused(
            "config.provided_data: expected the row with its tests, got none. No dataset is stored here.", 400
        )
    code = extract(body["completion"])
    return SubmitRequest(
        number,
        code,
        _read_cases(row.get("test")),
        {"code": code, "language": "python", "run_timeout": config.get("run_timeout") or 20},
        run_all_cases=bool(extra.get("run_all_cases")),
        return_full_case=bool(extra.get("return_full_case")),
    )


def _read_cases(tests: Any) -> tuple[SubmitCase, ...]:
    try:
        tests = parse_json(tests.encode()) if isinstance(tests, str) else tests
        cases = tuple(SubmitCase(test["input"]["stdin"], test["output"]["stdout"], test) for test in tests)
    except (ValueError, TypeError, KeyError) as error:
        raise RequestRefused(
            f"provided_data.test: expected tests with input.stdin and output.stdout, got {error!r}."
        ) from error
    if not 0 < len(cases) <= MAX_CASES or not all(isinstance(text, str) for c in cases for text in (c.stdin, c.stdout)):
        raise RequestRefused(
            f"provided_data.test: expected 1 to {MAX_CASES} tests of texts, got {len(cases)}. Correct them."
        )
    return cases


def extract(completion: str) -> str:
    """Return the program in a completion: the first Python block, else the first block, else an open block, or ""."""
    blocks = _blocks(completion)
    named = [code for name, code in blocks if name.strip().lower() in _PYTHON]
    return next(iter([*named, *(code for _, code in blocks)]), "")


def _blocks(text: str) -> list[tuple[str, str]]:
    r"""Return the name and code of each block, or of the open block if no block is closed.

    SandboxFusion's "```([^\n]*)\n(.*?)\n\s*```" finds the same, but takes quadratic time if no block is closed.
    """
    blocks: list[tuple[str, str]] = []
    end = 0
    while (start := text.find("```", end)) >= 0 and (line_end := text.find("\n", start)) >= 0:
        name, close = text[start + 3 : line_end], _CLOSE.search(text, line_end + 2)
        if close is None:
            return blocks or [(name, text[line_end + 1 :])]
        body = text[line_end + 1 : close.start()]
        blocks.append((name, body[: body.index("\n", len(body.rstrip()))]))
        end = close.end()
    return blocks


def same_output(expected: str, got: str) -> bool:
    """Return True if two outputs have equal lines, ignoring outer white space, case, and 1e-5 of a number."""
    wanted, actual = expected.strip().split("\n"), got.strip().split("\n")
    if len(wanted) != len(actual):
        return False
    for a, b in zip(map(str.strip, wanted), map(str.strip, actual), strict=True):
        if a.lower() == b.lower():
            continue
        if max(len(a), len(b)) > 400 or not (_NUMBER.fullmatch(a) and _NUMBER.fullmatch(b)):
            return False
        one, other = float(a), float(b)
        both_finite = math.isfinite(one) and math.isfinite(other)
        if not both_finite or abs(other - one) >= _TOLERANCE * max(abs(one), 1e-10):
            return False
    return True


def submit_answer(request: SubmitRequest, outcomes: list[tuple[bool, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the body of an answer.

    Args:
        request: the request.
        outcomes: for each case that ran, True if it passed, and the answer of `/run_code`.
    """
    tests = []
    for case, (passed, answer) in zip(request.cases, outcomes, strict=False):
        info = case.info
        if not request.return_full_case:
            info = {"input": {"stdin": _shorten(case.stdin)}, "output": {"stdout": _shorten(case.stdout)}}
        tests.append({"passed": passed, "exec_info": answer, "test_info": info})
    return {
        "id": request.id,
        "accepted": all(passed for passed, _ in outcomes),
        "extracted_code": request.code,
        "full_code": None,
        "test_code": None,
        "tests": tests,
        "extracted_type": None,
        "extra": None,
    }


def with_short_outputs(answer: Mapping[str, Any], num_cases: int) -> dict[str, Any]:
    """Return an answer of `/run_code` with the beginning and the end of outputs longer than a case's share."""
    share, run = max(_MAX_SHOWN, MAX_SHOWN_OUTPUT // num_cases), answer["run_result"]
    short = {name: _shorten(run[name], share) for name in ("stdout", "stderr")}
    return {**answer, "run_result": {**run, **short}}


def _shorten(text: str, max_chars: int = _MAX_SHOWN) -> str:
    half = max_chars // 2
    return text if len(text) <= max_chars else f"{text[:half]}...{text[-half:]}"
