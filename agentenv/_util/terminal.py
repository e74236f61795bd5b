"""Text of models and environments for a terminal, and the console that it is printed on."""

from __future__ import annotations

import os
import re

from rich.console import Console

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff"
    "\U000e0000-\U000e007f]"
)
"""Controls but tab and newline, direction and invisible characters, lone surrogates; joiners are parts of words."""


def safe(text: str) -> str:
    """Return the text with control, escape, direction and invisible characters escaped: a terminal shows them."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def wide_console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal or COLUMNS; without either, wide enough for whole sentences.

    It shows `:one:` as it is, because texts and names such as guess.py:One have colons.
    """
    console = Console(stderr=stderr, emoji=False)
    has_width = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console if has_width else Console(stderr=stderr, width=140, emoji=False)
