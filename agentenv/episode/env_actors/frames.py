"""Frames between this process and a local actor: a number and pickled data, those of one tick of the loop together."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import cast

LOG = 0
"""Number of the frames of log records; calls have higher ones."""

_HEAD = struct.Struct(">QQ")


class Frames(asyncio.Protocol):
    """Sends frames and receives them; both ends of a socket have one.

    Args:
        receive: called with the number and the data of each frame.
        lose: called when the other end is gone.
    """

    def __init__(self, receive: Callable[[int, bytes], None], lose: Callable[[], None]) -> None:
        self._receive, self._lose = receive, lose
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._received = bytearray()

    def send(self, number: int, data: bytes) -> None:
        """Send a frame at the end of this tick of the loop: many small ones cost one system call."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += (_HEAD.pack(number, len(data)), data)

    def close(self) -> None:
        """Close this end."""
        if self._transport is not None and not self._transport.is_closing():
            end: socket.socket = self._transport.get_extra_info("socket")
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # a forked process may have a copy, which closing does not end
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; see asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Pass on what is complete."""
        self._received += data
        start = 0
        while len(self._received) - start >= _HEAD.size:
            number, size = _HEAD.unpack_from(self._received, start)
            end = start + _HEAD.size + size
            if len(self._received) < end:
                break
            self._receive(number, bytes(self._received[start + _HEAD.size : end]))
            start = end
        del self._received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end."""
        self._lose()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(unsent))
