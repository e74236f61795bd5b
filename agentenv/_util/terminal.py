"""Text of models and environments for a terminal."""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff"
    "\U000e0000-\U000e007f]"
)
"""Controls but tab and newline, direction and invisible characters, lone surrogates; joiners are parts of words."""


def safe(text: str) -> str:
    """Return the text with control, escape, direction and invisible characters escaped: a terminal shows them."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)
