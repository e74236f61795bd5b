"""Values as JSON and back, the same in the parent and in the sandbox: no pickle, nothing lost, nothing that runs.

JSON has no tuples, sets, bytes, complex numbers or large integers, and spells NaN in no way: these are objects with one
key that begins with `$`. Whatever else is not a plain value, as an instance of a class, cannot be encoded.
Standard library only: the text of this file is a part of the programs that run inside.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 64
"""Of lists in lists."""
MAX_NODES = 200_000
"""Values in a value."""
MAX_SIZE = 1 << 24
"""Characters and bytes in a value, together."""
_PLAIN_INT = 1 << 53


class CodecError(ValueError):
    """A value that cannot cross, or JSON that is no value of ours."""


class _Encoder:
    """One value's way into JSON; it counts what it meets."""

    def __init__(self) -> None:
        self.nodes = 0
        self.size = 0

    def encode(self, value: Any, depth: int = 0) -> Any:
        """The JSON of a value, by its built-in type: what a subclass overrides is never asked."""
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise CodecError(f"a value that is nested deeper than {MAX_DEPTH} or has more than {MAX_NODES} parts")
        if value is None or value is True or value is False:
            return value
        kind = next((kind for kind in _ENCODED if issubclass(type(value), kind)), None)
        if kind is None:
            if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "shape", None) == ():
                return self.encode(value.item(), depth + 1)
            raise CodecError(f"a {type(value).__name__} cannot leave the sandbox: it is no plain value")
        return _ENCODED[kind](self, value, depth + 1)

    def _weigh(self, size: int) -> None:
        self.size += size
        if self.size > MAX_SIZE:
            raise CodecError(f"a value of more than {MAX_SIZE} characters")

    def _text(self, value: str, _: int) -> str:
        self._weigh(str.__len__(value))
        return str.__str__(value)

    def _int(self, value: int, _: int) -> Any:
        value = int.__int__(value)
        self._weigh(int.bit_length(value) // 4)
        return value if -_PLAIN_INT < value < _PLAIN_INT else {"$int": hex(value)}

    def _float(self, value: float, _: int) -> Any:
        value = float.__float__(value)
        return value if math.isfinite(value) else {"$float": repr(value)}

    def _complex(self, value: complex, depth: int) -> Any:
        value = complex.__pos__(value)
        return {"$complex": [self.encode(value.real, depth), self.encode(value.imag, depth)]}

    def _bytes(self, value: bytes, _: int) -> Any:
        self._weigh(bytes.__len__(value))
        return {"$bytes": bytes.hex(value)}

    def _bytearray(self, value: bytearray, _: int) -> Any:
        self._weigh(bytearray.__len__(value))
        return {"$bytearray": bytearray.hex(value)}

    def _list(self, value: list[Any], depth: int) -> Any:
        return [self.encode(item, depth) for item in list.__iter__(value)]

    def _tuple(self, value: tuple[Any, ...], depth: int) -> Any:
        return {"$tuple": [self.encode(item, depth) for item in tuple.__iter__(value)]}

    def _set(self, value: set[Any], depth: int) -> Any:
        return {"$set": [self.encode(item, depth) for item in set.__iter__(value)]}

    def _frozenset(self, value: frozenset[Any], depth: int) -> Any:
        return {"$frozenset": [self.encode(item, depth) for item in frozenset.__iter__(value)]}

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        pairs = [[self.encode(key, depth), self.encode(item, depth)] for key, item in dict.items(value)]
        if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": pairs}


_ENCODED: dict[type, Any] = {
    str: _Encoder._text,
    int: _Encoder._int,
    float: _Encoder._float,
    list: _Encoder._list,
    dict: _Encoder._dict,
    tuple: _Encoder._tuple,
    set: _Encoder._set,
    frozenset: _Encoder._frozenset,
    bytes: _Encoder._bytes,
    bytearray: _Encoder._bytearray,
    complex: _Encoder._complex,
}


def encode(value: Any) -> Any:
    """What `json.dumps` can write for a plain value.

    Raises:
        CodecError: it is no plain value, too deep or too large.
    """
    return _Encoder().encode(value)


def decode(value: Any) -> Any:
    """The value that `encode` was given; subclasses have become their built-in types.

    Raises:
        CodecError: no `encode` gives this JSON.
    """
    return _decode(value, 0)


def _decode(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH + 1:
        raise CodecError(f"a value that is nested deeper than {MAX_DEPTH}")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CodecError("a number that is not finite, outside of its tag")
        return value
    if isinstance(value, list):
        return [_decode(item, depth + 1) for item in value]
    if isinstance(value, dict):
        tag = next((key for key in value if key.startswith("$")), None)
        if tag is None:
            return {key: _decode(item, depth + 1) for key, item in value.items()}
        if len(value) != 1 or tag not in _DECODED:
            raise CodecError(f"an object with the keys {sorted(value)[:4]!r}")
        return _DECODED[tag](value[tag], depth + 1)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise CodecError(f"a {type(value).__name__}")


def _decode_items(content: Any, depth: int) -> list[Any]:
    if not isinstance(content, list):
        raise CodecError("a tag that holds no list")
    return [_decode(item, depth) for item in content]


def _decode_unique(content: Any, depth: int, kind: type) -> Any:
    items = _decode_items(content, depth)
    try:
        unique = kind(items)
    except TypeError as error:
        raise CodecError("a set with a member that has no hash") from error
    if len(unique) != len(items):
        raise CodecError("a set that holds a member twice")
    return unique


def _decode_dict(content: Any, depth: int) -> dict[Any, Any]:
    pairs = _decode_items(content, depth)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise CodecError("a dict that is no list of pairs")
    try:
        decoded = dict(pairs)
    except TypeError as error:
        raise CodecError("a dict with a key that has no hash") from error
    if len(decoded) != len(pairs):
        raise CodecError("a dict that holds a key twice")
    return decoded


def _decode_complex(content: Any, depth: int) -> complex:
    parts = _decode_items(content, depth)
    if [type(part) for part in parts] != [float, float]:
        raise CodecError("a complex number that is no pair of floats")
    return complex(*parts)


def _decode_int(content: Any, _: int) -> int:
    digits = content[content.startswith("-") :] if isinstance(content, str) else ""
    if not digits.startswith("0x") or not digits[2:].isalnum() or not digits.isascii():
        raise CodecError("a large integer that is not hexadecimal")
    try:
        return int(content, 16)
    except ValueError as error:
        raise CodecError("a large integer that is not hexadecimal") from error


def _decode_float(content: Any, _: int) -> float:
    if content not in ("nan", "inf", "-inf"):
        raise CodecError("a tagged float that is finite")
    return float(content)


def _decode_bytes(content: Any, _: int) -> bytes:
    try:
        return bytes.fromhex(content)
    except (TypeError, ValueError) as error:
        raise CodecError("bytes that are not hexadecimal") from error


_DECODED: dict[str, Any] = {
    "$int": _decode_int,
    "$float": _decode_float,
    "$complex": _decode_complex,
    "$bytes": _decode_bytes,
    "$bytearray": lambda content, depth: bytearray(_decode_bytes(content, depth)),
    "$tuple": lambda content, depth: tuple(_decode_items(content, depth)),
    "$set": lambda content, depth: _decode_unique(content, depth, set),
    "$frozenset": lambda content, depth: _decode_unique(content, depth, frozenset),
    "$dict": _decode_dict,
}


def _refuse_constant(name: str) -> Any:
    raise CodecError(f"{name} is no JSON")


def _short_int(digits: str) -> int:
    if len(digits) > 20:
        raise CodecError("an integer of many digits, outside of its tag")
    return int(digits)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise CodecError("an object that holds a key twice")
    return unique


def parse_line(line: bytes) -> dict[str, Any]:
    """The JSON object of one line of a channel.

    Raises:
        CodecError: it is none: no object, nested too deep, a key twice, NaN, an integer of thousands of digits.
    """
    try:
        message = json.loads(
            line.decode(), parse_int=_short_int, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys
        )
    except CodecError:
        raise
    except (ValueError, RecursionError) as error:
        raise CodecError(f"a line that is no JSON: {type(error).__name__}") from error
    if not isinstance(message, dict):
        raise CodecError("a line that is no JSON object")
    return message


def dump_line(message: dict[str, Any]) -> bytes:
    """One line of a channel, in ASCII."""
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
