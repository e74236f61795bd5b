"""Feedback for a model on a grade: visible failures in full, hidden tests at most as a count."""

from __future__ import annotations

from agentenv.sandbox.grading.executions import shorten
from agentenv.sandbox.grading.results import GradeResult, Verdict

_NOT_RUN = (Verdict.SKIPPED, Verdict.INFRA)
_FAILURES = {
    Verdict.FAILED: "gave a wrong result",
    Verdict.ERROR: "ended with an error",
    Verdict.TIMEOUT: "took too long",
    Verdict.LIMIT: "went beyond a limit",
    Verdict.MISSING: "gave no result",
    Verdict.PROTOCOL: "gave no valid result",
}


def feedback(result: GradeResult, *, max_tests: int = 1, max_chars: int = 2000, hidden_count: bool = True) -> str:
    """Return a text about a grade for the model that wrote the program.

    Args:
        result: the grade.
        max_tests: number of failed visible tests to describe in full.
        max_chars: length limit of the text.
        hidden_count: add how many hidden tests passed.
    """
    if result.sandbox_failed:
        return "The tests could not be run. This says nothing about the program."
    if result.all_passed:
        return "All tests passed."
    if result.load_error:
        return shorten(f"The program could not be loaded.\n{result.load_error}", max_chars)
    parts = [_count_passed(result, visible=True)]
    failed = [test for test in result.tests if test.visible and test.verdict in _FAILURES]
    for test in failed[:max_tests]:
        lines = [f"Test {test.id} {_FAILURES[test.verdict]}."]
        for name, text in (("input", test.shown_input), ("expected", test.shown_expected), ("got", test.shown_got)):
            if text:
                lines.append(f"{name}:\n{text.rstrip()}" if "\n" in text.strip() else f"{name}: {text.strip()}")
        parts.append("\n".join([*lines, test.detail] if test.detail else lines))
    if hidden_count:
        parts.append(_count_passed(result, visible=False))
    text = "\n\n".join(part for part in parts if part)
    return shorten(text or "Not all tests passed.", max_chars)


def _count_passed(result: GradeResult, *, visible: bool) -> str:
    tests = [test for test in result.tests if test.visible is visible and test.verdict not in _NOT_RUN]
    kind = "" if visible else "hidden "
    passed = sum(test.verdict is Verdict.PASSED for test in tests)
    return f"{passed} of {len(tests)} {kind}tests passed." if tests else ""
