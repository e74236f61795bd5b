"""Every sentence reasoning_gym says to a policy after its question."""

from __future__ import annotations

_SAID = {
    "no_answer": "No answer was found. {instruction}",
    "parse_error": "Your answer could not be read in the form that the question asks for. Check its form.",
    "timeout": "Your answer took too long to check. Write it in a simpler form.",
    "ok": "Your answer is not correct. Check each step and try again.",
}


def feedback_text(status: str, instruction: str, attempts_left: int) -> str:
    """The user message after a failed attempt: what was wrong with it, never what is right.

    Nor how near it came: with that, attempts would be a way to search for the answer.
    """
    left = "1 attempt left." if attempts_left == 1 else f"{attempts_left} attempts left."
    return f"{_SAID[status].format(instruction=instruction).strip()} {left}"
