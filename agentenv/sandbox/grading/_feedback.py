"""What a model may be told of a grade: the first visible test that failed, in full; of hidden ones at most a count."""

from __future__ import annotations

from agentenv.sandbox.grading._bench import shortened
from agentenv.sandbox.grading.results import GradeResult, GradeStatus, TestResult, Verdict

_NOT_RUN = (Verdict.SKIPPED, Verdict.INFRA)
_SAID = {
    Verdict.FAILED: "gave a wrong result",
    Verdict.ERROR: "ended with an error",
    Verdict.TIMEOUT: "took too long",
    Verdict.LIMIT: "went beyond a limit",
    Verdict.MISSING: "gave no result",
    Verdict.PROTOCOL: "gave no valid result",
}


def feedback(result: GradeResult, *, max_tests: int = 1, max_chars: int = 2000, hidden_count: bool = True) -> str:
    """A text on a grade for the policy that wrote the program.

    Args:
        result: the grade.
        max_tests: visible tests that failed and are told in full.
        max_chars: of the text.
        hidden_count: whether it says how many hidden tests passed.
    """
    if result.status is GradeStatus.INFRA:
        return "The tests could not be run. This says nothing about the program."
    if result.all_passed:
        return "All tests passed."
    if result.load_error:
        return shortened(f"The program could not be loaded.\n{result.load_error}", max_chars)
    parts = [_counted(result, visible=True)]
    failed = [test for test in result.tests if test.visible and test.verdict in _SAID]
    parts += [_told(test) for test in failed[:max_tests]]
    if hidden_count:
        parts.append(_counted(result, visible=False))
    text = "\n\n".join(part for part in parts if part)
    return shortened(text or "Not all tests passed.", max_chars)


def _counted(result: GradeResult, *, visible: bool) -> str:
    tests = [test for test in result.tests if test.visible is visible and test.verdict not in _NOT_RUN]
    kind = "" if visible else "hidden "
    passed = sum(test.verdict is Verdict.PASSED for test in tests)
    return f"{passed} of {len(tests)} {kind}tests passed." if tests else ""


def _told(test: TestResult) -> str:
    lines = [f"Test {test.id} {_SAID[test.verdict]}."]
    shown = (("input", test.shown_input), ("expected", test.shown_expected), ("got", test.shown_got))
    for name, text in shown:
        if text:
            lines.append(f"{name}:\n{text.rstrip()}" if "\n" in text.strip() else f"{name}: {text.strip()}")
    if test.detail:
        lines.append(test.detail)
    return "\n".join(lines)
