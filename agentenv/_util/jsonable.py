"""Values as JSON, and arrays as lists."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def jsonable(value: Any) -> Any:
    """Return `value` as JSON can represent it.

    Arrays and scalars of numpy and torch become lists and numbers, tuples become lists, keys become text, non-finite
    numbers become "nan", "inf" and "-inf", bytes become text (their number if more than 1 KiB), and all other values
    become `str(value)`.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() < 10_000 else hex(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "backslashreplace") if len(value) <= 1024 else f"<{len(value)} bytes>"
    return jsonable(value.tolist()) if callable(getattr(value, "tolist", None)) else str(value)


def arrays_as_lists(value: Any) -> Any:
    """Return `value` with the arrays in it as lists, at every depth: pandas reads lists in Parquet as arrays."""
    if isinstance(value, Mapping):
        return {key: arrays_as_lists(item) for key, item in value.items()}
    if isinstance(value, list):
        return [arrays_as_lists(item) for item in value]
    if getattr(value, "ndim", None):
        return arrays_as_lists(value.tolist())
    return value
