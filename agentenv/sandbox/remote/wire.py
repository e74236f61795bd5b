"""Messages between a remote sandbox and its host: a JSON object, followed by the bytes that it refers to.

Nothing is ever unpickled: the answers come from a container in which hostile programs have run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from agentenv.sandbox.local.session import TurnResult
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation

MAX_BYTES = 256 << 20
"""Largest message, in bytes, with everything in it."""
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (ExecLimits, ExecResult, TurnResult)}
_HINTS = {name: get_type_hints(kind) for name, kind in _KINDS.items()}


def encode(message: Mapping[str, Any]) -> bytes:
    """Encode a message as the length of its JSON (4 bytes, little-endian), the JSON, and the bytes that it refers to.

    Args:
        message: names and plain values; "value" may be any argument or result of a call.
    """
    blobs: list[bytes] = []
    value = _pack(message.get("value"), blobs)
    header = json.dumps({**message, "value": value, "sizes": [len(blob) for blob in blobs]}).encode()
    return b"".join((len(header).to_bytes(4, "little"), header, *blobs))


class Splitter:
    """An incremental decoder of messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._needed = 4

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that these bytes complete.

        Raises:
            ValueError: the bytes are not a message, or the message is too large.
        """
        self._buffer += data
        try:
            yield from self._messages()
        except (OverflowError, RecursionError) as error:
            raise ValueError(f"a message with a number too large, or too many levels: {error}") from error

    def _messages(self) -> Iterator[dict[str, Any]]:
        while len(self._buffer) >= self._needed:
            size = int.from_bytes(self._buffer[:4], "little")
            if not 2 <= size <= MAX_BYTES:
                raise ValueError(f"a message of {size} bytes")
            if len(self._buffer) < 4 + size:
                self._needed = 4 + size
                continue
            header = json.loads(self._buffer[4 : 4 + size])
            sizes = [int(each) for each in header.pop("sizes")]
            whole = 4 + size + sum(sizes)
            if min(sizes, default=0) < 0 or whole > MAX_BYTES:
                raise ValueError(f"a message of {whole} bytes")
            if len(self._buffer) < whole:
                self._needed = whole
                continue
            blobs, start = [], 4 + size
            for each in sizes:
                blobs.append(bytes(self._buffer[start : start + each]))
                start += each
            del self._buffer[:whole]
            self._needed = 4
            value = _unpack(header.pop("value"), blobs)
            yield {**header, "value": value}


def _pack(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        blobs.append(bytes(value))
        return {"bytes": len(blobs) - 1}
    if is_dataclass(value):
        packed_fields = {field.name: _pack(getattr(value, field.name), blobs) for field in fields(value)}
        return {"kind": type(value).__name__, "fields": packed_fields}
    if isinstance(value, Mapping):
        return {"map": {name: _pack(each, blobs) for name, each in value.items()}}
    if isinstance(value, list | tuple):
        return [_pack(each, blobs) for each in value]
    return value


def _unpack(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, list):
        return [_unpack(each, blobs) for each in value]
    if not isinstance(value, dict):
        return value
    if "bytes" in value:
        return blobs[value["bytes"]]
    if "map" in value:
        return {str(name): _unpack(each, blobs) for name, each in value["map"].items()}
    # A dataclass, after checking the type of each field.
    kind = value["kind"]
    values = {name: _unpack(each, blobs) for name, each in value["fields"].items()}
    for field, each in values.items():
        if field == "status":
            values[field] = ExecStatus(each)
        elif field == "isolation":
            values[field] = Isolation(each)
        elif field == "layers":
            values[field] = tuple(map(str, each))
        elif not _fits(each, _HINTS[kind][field]):
            raise ValueError(f"{kind}.{field}: {each!r:.100}")
    return _KINDS[kind](**values)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is not None and issubclass(get_origin(hint), Mapping):
        return isinstance(value, dict) and all(isinstance(each, bytes) for each in value.values())
    allowed = get_args(hint) or (hint,)
    return isinstance(value, allowed) or (float in allowed and type(value) is int)
