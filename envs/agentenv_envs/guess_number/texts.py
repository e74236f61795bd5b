"""Every text of guess_number. The untrained policy's tokenizer consists of exactly these words."""

from __future__ import annotations


def rules_text(low: int, high: int, max_guesses: int) -> str:
    """Return the rules below the prompt of the first turn."""
    guesses = "1 guess" if max_guesses == 1 else f"{max_guesses} guesses"
    return f"It is a whole number from {low} to {high}. You have {guesses}. Say one number."


def hint_text(guess: int, number: int) -> str:
    """Return the user message after a wrong guess."""
    return "It is larger." if guess < number else "It is smaller."


def invalid_text(low: int, high: int) -> str:
    """Return the user message after an action without a number, or with one out of range."""
    return f"Say a number from {low} to {high}."
