"""Every text of code_sandbox for a policy, besides those of `agentenv.rewards.rules.code.texts` about one program."""

from __future__ import annotations

from collections.abc import Sequence


def question_text(question: str, examples: Sequence[str], starter_code: str, instruction: str) -> str:
    """Return the user message of the first turn: the question, the starter code, examples, and the instruction."""
    parts = [question.rstrip()]
    if starter_code.strip():
        parts.append(f"Start from this:\n```python\n{starter_code.strip()}\n```")
    if examples:
        parts.append("Examples:\n" + "\n".join(examples))
    return "\n\n".join(part for part in [*parts, instruction] if part)


def attempts_text(left: int) -> str:
    """Return the text about the remaining attempts, at least 1."""
    return "1 attempt left." if left == 1 else f"{left} attempts left."
