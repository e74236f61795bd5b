"""Every sentence that math_retry sends to a policy. The shipped tiny-math policy was trained on exactly these."""

from __future__ import annotations

from agentenv_envs.common import attempts_text

INSTRUCTION = "Give the final answer after ####."  # english: off (tiny-math was trained with this text)


def question_text(question: str, instruction: str = INSTRUCTION) -> str:
    """Return the first user message: the question and, unless it is empty, the instruction on its own line."""
    return f"{question}\n{instruction}" if instruction else question


def feedback_text(outcome: str, extracted: str | None, attempts_left: int) -> str:
    """Return the user message after a failed attempt: what was wrong with it, never what is right.

    Args:
        outcome: the grade's outcome: wrong, no_answer, parse_error or timeout.
        extracted: the answer that was read from the attempt, where there was one.
        attempts_left: attempts that remain, at least 1.
    """
    what = {
        "wrong": f"Your answer {extracted} is not correct. Check each step and try again.",
        "no_answer": "No final answer was found. Solve it step by step and end with #### and the answer.",
        "parse_error": f"Your answer {extracted} could not be read. Write one number or expression after ####.",
        "timeout": f"Your answer {extracted} took too long to check. Write it in a simpler form after ####.",
    }[outcome]
    return f"{what} {attempts_text(attempts_left)}"
