"""Texts that a policy sees about its programs."""

from __future__ import annotations

from agentenv.sandbox.grading import FunctionTest, GradeResult, StdioTest, feedback

INSTRUCTION = "Write the whole program in one block between ```python and ```."
MAX_EXAMPLE_CHARS = 600
NO_CODE = "No program was found. " + INSTRUCTION
HIDDEN_FAILED = "All examples pass, but other tests do not. Think of the cases that the examples leave out."


def feedback_text(result: GradeResult | None) -> str:
    """Return the feedback on a program, None if there is none; of hidden tests it says only that some failed."""
    if result is None:
        return NO_CODE
    if result.share(visible=True) == 1.0 and not result.all_passed:
        return HIDDEN_FAILED
    return feedback(result, hidden_count=False)


def example_text(entry_point: str, test: FunctionTest | StdioTest) -> str:
    """Return a visible test as text: a call and its value, or an input and its output."""
    if isinstance(test, FunctionTest):
        arguments = [*map(repr, test.args), *(f"{name}={value!r}" for name, value in test.kwargs.items())]
        return _shorten(f"{entry_point}({', '.join(arguments)}) == {test.expected!r}")
    return f"Input:\n{_block(test.stdin)}\nOutput:\n{_block(test.expected)}"


def _block(text: str) -> str:
    return f"```\n{_shorten(text.rstrip(chr(10)))}\n```"


def _shorten(text: str) -> str:
    if len(text) <= MAX_EXAMPLE_CHARS:
        return text
    half = MAX_EXAMPLE_CHARS // 2
    return f"{text[:half]} … {text[-half:]}"
