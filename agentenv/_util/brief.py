"""Values in error messages."""

from __future__ import annotations

import itertools
import json
import reprlib
from typing import Any


class _Brief(reprlib.Repr):
    """A `repr` whose cost does not depend on the value's size."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(itertools.islice(x.items(), self.maxdict + 1)), level)

    def repr_int(self, x: int, level: int) -> str:
        num_bits = x.bit_length()  # Python refuses to write more than 4300 digits
        return super().repr_int(x, level) if num_bits < 10_000 else f"<an integer of {num_bits} bits>"


def brief_json(value: Any, max_chars: int = 200) -> str:
    """Return the beginning of a value in JSON, whose cost does not depend on the value's size."""
    pieces = json.JSONEncoder().iterencode(value)
    return "".join(itertools.islice(pieces, max_chars))[:max_chars]


def brief(value: Any, max_chars: int = 200) -> str:
    """Return the beginning of `repr(value)`, without most items of large values."""
    shown = _Brief()
    shown.maxstring = shown.maxother = max_chars
    return shown.repr(value)[:max_chars]
