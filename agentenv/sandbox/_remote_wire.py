"""Messages between a sandbox and its far side: a JSON object with values in it, and their bytes after it.

Nothing is ever unpickled: what comes back is what a container says that hostile programs were run in.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from agentenv.sandbox.session import TurnResult
from agentenv.sandbox.types import ExecLimits, ExecResult, Isolation, Status

MAX_BYTES = 256 << 20
"""Of one message, all together."""
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (ExecLimits, ExecResult, TurnResult)}
_HINTS = {name: get_type_hints(kind) for name, kind in _KINDS.items()}


def encode(message: Mapping[str, Any], *, armoured: bool = False) -> bytes:
    """A message: the length of its JSON in four bytes, the JSON, the bytes that it names; armoured, a line of base64.

    Args:
        message: names and plain values; "value" may be anything that calls give and take.
        armoured: where the way carries text only.
    """
    blobs: list[bytes] = []
    value = _packed(message.get("value"), blobs)
    header = json.dumps({**message, "value": value, "sizes": [len(blob) for blob in blobs]}).encode()
    data = b"".join((len(header).to_bytes(4, "little"), header, *blobs))
    return base64.b64encode(data) + b"\n" if armoured else data


class Splitter:
    """Messages out of bytes as they come."""

    def __init__(self, *, armoured: bool = False) -> None:
        self._armoured = armoured
        self._line = bytearray()
        self._kept = bytearray()
        self._needed = 4

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The messages that these bytes complete.

        Raises:
            ValueError: they are none.
        """
        self._kept += self._bared(data) if self._armoured else data
        while len(self._kept) >= self._needed:
            message = self._next()
            if message is None:
                continue
            yield message

    def _bared(self, data: bytes) -> bytes:
        *lines, rest = data.split(b"\n")
        if not lines:
            self._line += rest
            return b""
        lines[0] = bytes(self._line) + lines[0]
        self._line = bytearray(rest)
        return b"".join(base64.b64decode(line, validate=True) for line in lines)

    def _next(self) -> dict[str, Any] | None:
        """The first message; None where more of it is needed than was known."""
        size = int.from_bytes(self._kept[:4], "little")
        if not 2 <= size <= MAX_BYTES:
            raise ValueError(f"a message of {size} bytes")
        if len(self._kept) < 4 + size:
            self._needed = 4 + size
            return None
        header = json.loads(self._kept[4 : 4 + size])
        sizes = [int(each) for each in header.pop("sizes")]
        whole = 4 + size + sum(sizes)
        if min(sizes, default=0) < 0 or whole > MAX_BYTES:
            raise ValueError(f"a message of {whole} bytes")
        if len(self._kept) < whole:
            self._needed = whole
            return None
        blobs, start = [], 4 + size
        for each in sizes:
            blobs.append(bytes(self._kept[start : start + each]))
            start += each
        del self._kept[:whole]
        self._needed = 4
        value = _unpacked(header.pop("value"), blobs)
        return {**header, "value": value}


def _packed(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        blobs.append(bytes(value))
        return {"bytes": len(blobs) - 1}
    if is_dataclass(value):
        given = {field.name: _packed(getattr(value, field.name), blobs) for field in fields(value)}
        return {"kind": type(value).__name__, "fields": given}
    if isinstance(value, Mapping):
        return {"map": {name: _packed(each, blobs) for name, each in value.items()}}
    if isinstance(value, list | tuple):
        return [_packed(each, blobs) for each in value]
    return value


def _unpacked(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, list):
        return [_unpacked(each, blobs) for each in value]
    if not isinstance(value, dict):
        return value
    if "bytes" in value:
        return blobs[value["bytes"]]
    if "map" in value:
        return {str(name): _unpacked(each, blobs) for name, each in value["map"].items()}
    return _built(value["kind"], {name: _unpacked(each, blobs) for name, each in value["fields"].items()})


def _built(name: str, given: dict[str, Any]) -> Any:
    """A result or limits, each field of the type that it says."""
    for field, value in given.items():
        if field == "status":
            given[field] = Status(value)
        elif field == "isolation":
            given[field] = Isolation(value)
        elif field == "layers":
            given[field] = tuple(map(str, value))
        elif not _fits(value, _HINTS[name][field]):
            raise ValueError(f"{name}.{field}: {value!r:.100}")
    return _KINDS[name](**given)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is not None and issubclass(get_origin(hint), Mapping):
        return isinstance(value, dict) and all(isinstance(each, bytes) for each in value.values())
    allowed = get_args(hint) or (hint,)
    return isinstance(value, allowed) or (float in allowed and type(value) is int)
