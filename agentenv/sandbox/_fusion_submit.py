"""SandboxFusion's `/submit` with the tests in the request: programs that read stdin and print, in one call.

Source: sandbox/datasets/common_oj.py, utils/testing.py and utils/extraction.py of github.com/bytedance/SandboxFusion at
469de08. Expected outputs stay here. Of its other datasets, which count a return code of 0 as accepted, so that
`exit(0)` passes, none is offered; nor is `custom_extract_logic`, which is code of the request's for the server itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentenv.http_serving.doors import Refused

MAX_CASES = 1000
_BLOCK = re.compile(r"```([^\n]*)\n(.*?)\n\s*```", re.DOTALL)
_OPEN_BLOCK = re.compile(r"```([^\n]*)\n(.*)", re.DOTALL)
_PYTHON = ("python", "py", "python3")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,6})?", re.ASCII)
_TOLERANCE = 1e-5
_MAX_SHOWN = 1000


@dataclass(frozen=True, slots=True)
class Case:
    """One test: what the program reads, and what it must print."""

    stdin: str
    stdout: str
    info: Mapping[str, Any] = field(default_factory=dict)
    """As the request has it."""


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """One program with its tests, read and checked."""

    id: int | str
    code: str
    """What was found in the completion; may be empty."""
    cases: tuple[Case, ...]
    run: Mapping[str, Any]
    """The request for `/run_code` of every case, without its stdin."""
    run_all_cases: bool = False
    return_full_case: bool = False


def read_submit_request(body: Any) -> SubmitRequest:
    """The request in a body.

    Raises:
        Refused: something is missing or wrong, or asks for what is not offered.
    """
    config = body.get("config") if isinstance(body, dict) else None
    if not isinstance(config, dict) or not isinstance(body.get("completion"), str):
        raise Refused("body: expected an object with dataset, id, completion and config, got another. Send them.")
    if config.get("custom_extract_logic") is not None:
        raise Refused("config.custom_extract_logic: expected none, got code. Nothing of a request runs in the server.")
    if config.get("dataset_type") not in (None, "CommonOJDataset"):
        raise Refused(f"eval class {config['dataset_type']!r:.100} not found: CommonOJDataset is offered alone", 400)
    if config.get("language") != "python":
        raise Refused(f"config.language: expected 'python', got {config.get('language')!r:.100}. Send Python.", 400)
    number, extra = body.get("id"), config.get("extra")
    if not isinstance(number, int | str):
        raise Refused(f"id: expected a number or a text, got {number!r:.100}. Send one.")
    extra = extra if isinstance(extra, dict) else {}
    code = extract(body["completion"])
    run_timeout = config.get("run_timeout") or 20
    return SubmitRequest(
        number,
        code,
        _cases(_row(config.get("provided_data"), number)),
        {"code": code, "language": "python", "run_timeout": run_timeout},
        run_all_cases=bool(extra.get("run_all_cases")),
        return_full_case=bool(extra.get("return_full_case")),
    )


def _row(data: Any, number: int | str) -> Mapping[str, Any]:
    rows = data if isinstance(data, list) else [data]
    row = next((row for row in rows if isinstance(row, dict) and (row.get("id") == number or len(rows) == 1)), None)
    if row is None:
        raise Refused(
            "config.provided_data: expected the row with its tests, got none. No dataset is stored here.", 400
        )
    return row


def _cases(row: Mapping[str, Any]) -> tuple[Case, ...]:
    tests: Any = row.get("test")
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
        cases = tuple(Case(test["input"]["stdin"], test["output"]["stdout"], test) for test in tests)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Refused(
            f"provided_data.test: expected tests with input.stdin and output.stdout, got {error!r}."
        ) from error
    if not 0 < len(cases) <= MAX_CASES or not all(isinstance(text, str) for c in cases for text in (c.stdin, c.stdout)):
        raise Refused(f"provided_data.test: expected 1 to {MAX_CASES} tests of texts, got {len(cases)}. Correct them.")
    return cases


def extract(completion: str) -> str:
    """The program in a completion: its first Python block, else its first block, else one that does not end; or ""."""
    blocks = _BLOCK.findall(completion) or _OPEN_BLOCK.findall(completion)
    named = [code for name, code in blocks if name.strip().lower() in _PYTHON]
    return next(iter([*named, *(code for _, code in blocks)]), "")


def same_output(expected: str, got: str) -> bool:
    """Whether two outputs are the same by lines, but for white space around them, case, and 1e-5 of a number."""
    ours, theirs = expected.strip().split("\n"), got.strip().split("\n")
    return len(ours) == len(theirs) and all(_same_line(a, b) for a, b in zip(ours, theirs, strict=True))


def _same_line(expected: str, got: str) -> bool:
    a, b = expected.strip(), got.strip()
    if a.lower() == b.lower():
        return True
    if max(len(a), len(b)) > 400 or not (_NUMBER.fullmatch(a) and _NUMBER.fullmatch(b)):
        return False
    one, other = float(a), float(b)
    return math.isfinite(one) and math.isfinite(other) and abs(other - one) < _TOLERANCE * max(abs(one), 1e-10)


def submit_answer(request: SubmitRequest, outcomes: list[tuple[bool, Mapping[str, Any]]]) -> dict[str, Any]:
    """The body that answers.

    Args:
        request: what was asked.
        outcomes: of each case up to the first that failed, or of all: whether it passed, and the answer of `/run_code`.
    """
    tests = [
        {"passed": passed, "exec_info": answer, "test_info": case.info if request.return_full_case else _short(case)}
        for case, (passed, answer) in zip(request.cases, outcomes, strict=False)
    ]
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


def _short(case: Case) -> dict[str, Any]:
    sides = {"input": {"stdin": case.stdin}, "output": {"stdout": case.stdout}}
    half = _MAX_SHOWN // 2
    return {
        side: {
            name: text if len(text) <= _MAX_SHOWN else f"{text[:half]}...{text[-half:]}" for name, text in texts.items()
        }
        for side, texts in sides.items()
    }
