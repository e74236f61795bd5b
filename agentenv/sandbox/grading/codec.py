"""Lossless conversion of plain values to JSON and back, without pickle. Runs inside and outside the sandbox.

JSON lacks tuples, sets, bytes, complex numbers, large integers and NaN; these become objects with one key that begins
with `$`. Other values, such as instances of classes, cannot be encoded. Standard library only: the source of this file
is part of the programs that run inside.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 64
"""Deepest nesting of a value."""
MAX_NODES = 1_000_000
"""Maximum number of parts of a value."""
MAX_SIZE = 1 << 24
"""Maximum number of characters and bytes in a value."""
MAX_COMPARED = 1_000_000
"""Maximum number of parts that are compared because members of a set, or keys of a dict, have equal hashes."""
_PLAIN_INT = 1 << 53
_KINDS: tuple[Any, ...] = (str, int, float, list, dict, tuple, set, frozenset, bytes, bytearray, complex)
_TEXT_TAGS = ("$int", "$float", "$bytes", "$bytearray")
_LIST_TAGS = ("$tuple", "$complex", "$set", "$frozenset", "$dict")


class CodecError(ValueError):
    """A value that cannot be encoded, or JSON that `encode` does not produce."""


class _Encoder:
    """An encoder of one value, which counts its parts and their size."""

    def __init__(self) -> None:
        self.nodes = 0
        self.size = 0

    def encode(self, value: Any, depth: int = 0) -> Any:
        """Encode a value by its built-in type, without calling methods that a subclass overrides."""
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise CodecError(f"a value that is nested deeper than {MAX_DEPTH} or has more than {MAX_NODES} parts")
        if value is None or value is True or value is False:
            return value
        kind = next((kind for kind in _KINDS if issubclass(type(value), kind)), None)
        if kind is None:
            if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "shape", None) == ():
                return self.encode(value.item(), depth + 1)
            raise CodecError(f"a {type(value).__name__} cannot leave the sandbox: it is not a plain value")
        if kind is str:
            self._add_size(str.__len__(value))
            return str.__str__(value)
        if kind is int:
            value = int.__int__(value)
            self._add_size(int.bit_length(value) // 4)
            return value if -_PLAIN_INT < value < _PLAIN_INT else {"$int": hex(value)}
        if kind is float:
            value = float.__float__(value)
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is complex:
            value = complex.__pos__(value)
            return {"$complex": [self.encode(part, depth + 1) for part in (value.real, value.imag)]}
        if kind in (bytes, bytearray):
            self._add_size(kind.__len__(value))
            return {f"${kind.__name__}": kind.hex(value)}
        if kind is dict:
            pairs = [[self.encode(key, depth + 1), self.encode(item, depth + 1)] for key, item in dict.items(value)]
            plain = all(type(key) is str and not key.startswith("$") for key, _ in pairs)
            return dict(pairs) if plain else {"$dict": pairs}
        items = [self.encode(item, depth + 1) for item in kind.__iter__(value)]
        return items if kind is list else {f"${kind.__name__}": items}

    def _add_size(self, size: int) -> None:
        self.size += size
        if self.size > MAX_SIZE:
            raise CodecError(f"a value of more than {MAX_SIZE} characters")


def encode(value: Any) -> Any:
    """Encode a plain value as values that `json.dumps` accepts.

    Raises:
        CodecError: the value is not plain, too deep or too large.
    """
    return _Encoder().encode(value)


def decode(value: Any) -> Any:
    """Return the value that `encode` was called with; instances of subclasses have their built-in type.

    Raises:
        CodecError: `encode` does not produce this JSON.
    """
    return _Decoder().decode(value)


class _Decoder:
    """A decoder of one value, whose time is bounded: it counts parts, and the comparisons of colliding members."""

    def __init__(self) -> None:
        self.parts = 0
        self.compared = 0

    def decode(self, value: Any, depth: int = 0) -> Any:
        """Decode a value."""
        self.parts += 1
        if depth > MAX_DEPTH or self.parts > MAX_NODES:
            raise CodecError(f"a value that is nested deeper than {MAX_DEPTH} or has more than {MAX_NODES} parts")
        if isinstance(value, float):
            if not math.isfinite(value):
                raise CodecError("a number that is not finite, without its tag")
            return value
        if isinstance(value, list):
            return [self.decode(item, depth + 1) for item in value]
        if isinstance(value, dict):
            tag = next((key for key in value if key.startswith("$")), None)
            if tag is None:
                return {key: self.decode(item, depth + 1) for key, item in value.items()}
            if len(value) != 1 or tag not in (*_TEXT_TAGS, *_LIST_TAGS):
                raise CodecError(f"an object with the keys {sorted(value)[:4]!r}")
            return _decode_text(tag, value[tag]) if tag in _TEXT_TAGS else self._decode_list(tag, value[tag], depth + 1)
        if value is None or isinstance(value, (bool, int, str)):
            return value
        raise CodecError(f"a {type(value).__name__}")

    def _decode_list(self, tag: str, content: Any, depth: int) -> Any:
        """Return the value of a tag with a list."""
        if not isinstance(content, list):
            raise CodecError("a tag without a list")
        if tag == "$dict":
            if not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
                raise CodecError("a dict that is not a list of pairs")
            keys = self._decode_members([key for key, _ in content], depth)
            return dict(zip(keys, [self.decode(item, depth) for _, item in content], strict=True))
        if tag in ("$set", "$frozenset"):
            members = self._decode_members(content, depth)
            return set(members) if tag == "$set" else frozenset(members)
        items = [self.decode(item, depth) for item in content]
        if tag == "$complex" and [type(part) for part in items] != [float, float]:
            raise CodecError("a complex number that is not a pair of floats")
        return complex(*items) if tag == "$complex" else tuple(items)

    def _decode_members(self, content: list[Any], depth: int) -> list[Any]:
        """Return the members of a set, or the keys of a dict.

        Members of equal hashes are all compared with each other, and hashes of numbers can be chosen to be equal.
        """
        members, sizes = [], []
        for item in content:
            before = self.parts
            members.append(self.decode(item, depth))
            sizes.append(self.parts - before)
        try:
            hashes = [hash(member) for member in members]
        except TypeError as error:
            raise CodecError("a set or dict with an unhashable member") from error
        if len(set(hashes)) < len(hashes):
            alike: dict[int, list[int]] = {}
            for key, size in zip(hashes, sizes, strict=True):
                alike.setdefault(key, []).append(size)
            self.compared += sum((len(group) - 1) * sum(group) for group in alike.values())
            if self.compared > MAX_COMPARED:
                raise CodecError("a set or dict with too many members of equal hashes")
            if len(set(members)) < len(members):
                raise CodecError("a set or dict with a repeated member")
        return members


def _decode_text(tag: str, text: Any) -> Any:
    """Return the value of a tag with a text."""
    try:
        if tag == "$bytes":
            return bytes.fromhex(text)
        if tag == "$bytearray":
            return bytearray.fromhex(text)
        if tag == "$float" and text in ("nan", "inf", "-inf"):
            return float(text)
        if tag == "$int" and isinstance(text, str) and text.isascii():
            digits = text.removeprefix("-")
            if digits.startswith("0x") and digits[2:].isalnum():
                return int(text, 16)
    except (TypeError, ValueError) as error:
        raise CodecError(f"{tag} with a text that is not hexadecimal") from error
    raise CodecError(f"{tag} with a text that `encode` does not produce")


def _short_int(digits: str) -> int:
    if len(digits) > 20:
        raise CodecError("an integer of many digits, without its tag")
    return int(digits)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise CodecError("an object with a repeated key")
    return unique


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse one line of a channel as a JSON object.

    Raises:
        CodecError: the line is not an object, is nested too deep, or has a repeated key, NaN or a huge integer.
    """
    try:
        # `int` refuses constants such as NaN.
        message = json.loads(line.decode(), parse_int=_short_int, parse_constant=int, object_pairs_hook=_unique_keys)
    except CodecError:
        raise
    except (ValueError, RecursionError) as error:
        raise CodecError(f"a line that is not JSON: {type(error).__name__}") from error
    if not isinstance(message, dict):
        raise CodecError("a line that is not a JSON object")
    return message


def dump_line(message: dict[str, Any]) -> bytes:
    """Return a message as one line of a channel, in ASCII."""
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
