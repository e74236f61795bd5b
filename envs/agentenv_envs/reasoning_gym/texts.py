"""Every text of reasoning_gym for a policy after its question."""

from __future__ import annotations

_FEEDBACK = {
    "no_answer": "No answer was found. {instruction}",
    "parse_error": "Your answer could not be read in the form that the question asks for. Check its form.",
    "timeout": "Your answer took too long to check. Write it in a simpler form.",
    "ok": "Your answer is not correct. Check each step and try again.",
}


def feedback_text(status: str, instruction: str, attempts_left: int) -> str:
    """Return the user message after a failed attempt: what was wrong, but not the right answer.

    It does not say how close the answer was: otherwise the policy could search for the answer by attempts.
    """
    left = "1 attempt left." if attempts_left == 1 else f"{attempts_left} attempts left."
    return f"{_FEEDBACK[status].format(instruction=instruction).strip()} {left}"
