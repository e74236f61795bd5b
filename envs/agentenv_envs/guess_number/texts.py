"""Every sentence guess_number says. The untrained policy's tokenizer is made of exactly these."""

from __future__ import annotations


def rules_text(low: int, high: int, max_guesses: int) -> str:
    """What stands under the prompt of the first turn."""
    guesses = "1 guess" if max_guesses == 1 else f"{max_guesses} guesses"
    return f"It is a whole number from {low} to {high}. You have {guesses}. Say one number."


def hint_text(guess: int, number: int) -> str:
    """The user message after a wrong guess."""
    return "It is larger." if guess < number else "It is smaller."


def invalid_text(low: int, high: int) -> str:
    """The user message after an action without a number, or with one that is out of range."""
    return f"Say a number from {low} to {high}."
