"""Every sentence code_sandbox says to a policy."""

from __future__ import annotations

from collections.abc import Sequence

from agentenv.sandbox.grading import FunctionTest, StdioTest

INSTRUCTION = "Give the whole program in one block between ```python and ```."
MAX_EXAMPLE_CHARS = 600
NO_CODE = "No program was found. " + INSTRUCTION
HIDDEN_FAILED = "All examples pass, but other tests do not. Think of the cases that the examples leave out."


def question_text(question: str, examples: Sequence[str], starter_code: str, instruction: str) -> str:
    """The user message of the first turn: the question, examples, the code to start from, and the instruction."""
    parts = [question.rstrip()]
    if starter_code.strip():
        parts.append(f"Start from this:\n```python\n{starter_code.strip()}\n```")
    if examples:
        parts.append("Examples:\n" + "\n".join(examples))
    return "\n\n".join(part for part in [*parts, instruction] if part)


def example_text(entry_point: str, test: FunctionTest | StdioTest) -> str:
    """A visible test, to be read: a call and its value, or an input and its output."""
    if isinstance(test, FunctionTest):
        given = [*map(repr, test.args), *(f"{name}={value!r}" for name, value in test.kwargs.items())]
        return _shortened(f"{entry_point}({', '.join(given)}) == {test.expected!r}")
    return f"Input:\n{_block(test.stdin)}\nOutput:\n{_block(test.expected)}"


def attempts_text(left: int) -> str:
    """How many attempts remain, at least 1."""
    return "1 attempt left." if left == 1 else f"{left} attempts left."


def _block(text: str) -> str:
    return f"```\n{_shortened(text.rstrip(chr(10)))}\n```"


def _shortened(text: str) -> str:
    if len(text) <= MAX_EXAMPLE_CHARS:
        return text
    half = MAX_EXAMPLE_CHARS // 2
    return f"{text[:half]} … {text[-half:]}"
