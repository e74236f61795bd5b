"""Rows of HumanEval, MBPP, APPS and LiveCodeBench."""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.rewards.code.assert_rows import human_eval_suite, mbpp_suite
from agentenv.rewards.code.plain import JSON_VALUES, function_suite, stdio_suite
from agentenv.rewards.code.task import CodeTask, as_text, first_visible, parsed, prelude_for
from agentenv.sandbox.grading import Comparison, FunctionSuite, FunctionTest, same_value

MAX_TESTS_BYTES = 256 << 20
"""Of a row's packed tests, once unpacked."""
APPS_COLUMNS = ("inputs", "outputs", "fn_name", "starter_code")


def human_eval(row: Mapping[str, Any]) -> CodeTask:
    """The `check` of a row of HumanEval, an assert at a time."""
    return CodeTask("humaneval", human_eval_suite(row))


def mbpp(row: Mapping[str, Any]) -> CodeTask:
    """The asserts of a row of MBPP."""
    visible, hidden = first_visible([str(test) for test in parsed("test_list", row["test_list"])])
    hidden += [str(test) for test in parsed("challenge_test_list", row.get("challenge_test_list") or [])]
    return CodeTask("mbpp", mbpp_suite(row, visible, hidden), tuple(visible))


def apps(row: Mapping[str, Any]) -> CodeTask:
    """Source: hendrycks/apps, eval/testing_util.py: a value may be stored in a list of its own."""
    pairs = parsed("input_output", row.get("input_output") or {key: row.get(key) for key in APPS_COLUMNS})
    inputs, outputs, name = pairs["inputs"], pairs["outputs"], pairs.get("fn_name") or row.get("fn_name")
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    starter = str(row.get("starter_code") or "")
    if not name:
        rows = [{"stdin": _lines(given), "stdout": _lines(out)} for given, out in zip(inputs, outputs, strict=True)]
        return CodeTask("apps", stdio_suite({"text_mode": "tokens"}, *first_visible(rows)), starter_code=starter)
    rows = [{"args": given, "expected": out} for given, out in zip(inputs, outputs, strict=True)]
    visible, hidden = (
        tuple(FunctionTest(tuple(one["args"]), one["expected"]) for one in part) for part in first_visible(rows)
    )
    entry = _in_class(name, starter)
    suite = FunctionSuite(entry, visible, hidden, checker=same_or_boxed, prelude=prelude_for(entry))
    return CodeTask("apps", suite, starter_code=starter)


def live_code_bench(row: Mapping[str, Any]) -> CodeTask:
    """The public and the private tests of a row of LiveCodeBench: inputs and outputs, or calls and values."""
    visible, hidden = _tests("public_test_cases", row), _tests("private_test_cases", row)
    starter = str(row.get("starter_code") or "")
    metadata = parsed("metadata", row.get("metadata") or {})
    name = metadata.get("func_name") or row.get("func_name")
    if any(test.get("testtype") == "functional" for test in visible + hidden):
        if not name:
            raise KeyError("func_name")
        entry = _in_class(name, starter)
        row = {"entry_point": entry, "prelude": prelude_for(entry)}
        return CodeTask("livecodebench", function_suite(row, as_calls(visible), as_calls(hidden)), starter_code=starter)
    shown, kept = ([{"stdin": t["input"], "stdout": t["output"]} for t in tests] for tests in (visible, hidden))
    return CodeTask("livecodebench", stdio_suite({}, shown, kept), starter_code=starter)


def as_calls(tests: Sequence[Mapping[str, Any]], given: str = "input", out: str = "output") -> list[dict[str, Any]]:
    """Calls and values in the plain form, of tests with an argument in JSON on each line of an input."""
    return [
        {
            "args": [json.loads(line) for line in str(test[given]).splitlines() if line.strip()],
            "expected": json.loads(test[out]),
        }
        for test in tests
    ]


def _tests(name: str, row: Mapping[str, Any]) -> list[Any]:
    """Test cases as a list, JSON, or JSON that is pickled, deflated and in base 64, as the private ones are."""
    value = row.get(name) or []
    if isinstance(value, str) and value.lstrip()[:1] not in ("[", "{"):
        value = _unpacked(value)
    return list(parsed(name, value))


def _unpacked(text: str) -> Any:
    unzip = zlib.decompressobj()
    try:
        content = unzip.decompress(base64.b64decode(text), MAX_TESTS_BYTES)
        if unzip.unconsumed_tail:
            raise ValueError(f"tests of more than {MAX_TESTS_BYTES} bytes")
        return content.decode() if content[:1] in b"[{" else _PlainUnpickler(io.BytesIO(content)).load()
    except (zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"tests that cannot be unpacked ({error})") from error


class _PlainUnpickler(pickle.Unpickler):
    """Builds plain values only: a pickle that names anything to import is refused."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Refuse it."""
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def same_or_boxed(given: Any, expected: Any, got: Any) -> bool:
    """Whether a value is the expected one, or the only one of a list of expected ones."""
    how = Comparison(**JSON_VALUES)
    boxed = isinstance(expected, list) and len(expected) == 1 and same_value(expected[0], got, how)
    return boxed or same_value(expected, got, how)


def _in_class(name: str, starter: str) -> str:
    return f"Solution.{name}" if "class Solution" in starter else str(name)


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) + "\n" if isinstance(value, list) else as_text(value)
