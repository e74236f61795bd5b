"""Connections that must ask within a time: who opens one and sends half of a request, or nothing, is cut off."""

from __future__ import annotations

import asyncio
from typing import Any

_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def impatient(header_s: float) -> type[Any]:
    """Uvicorn's h11 protocol, which waits so many seconds for the head of a request; by itself it waits for ever.

    What is sent after an answer and belongs to the request before it counts as the head of the next one.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        """One connection."""

        head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """Begin to wait."""
            super().connection_made(transport)
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            """Take bytes; wait on where they are not yet a request, or more of one that has its answer."""
            super().data_received(data)
            self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            """Wait no more."""
            super().connection_lost(exc)
            self._forget()

        def _wait_for_head(self) -> None:
            asked = self.cycle is not None and not self.cycle.response_complete
            if asked:
                self._forget()
            elif self.head_timer is None and not self.transport.is_closing():
                self.head_timer = self.loop.call_later(header_s, self._give_up)

        def _forget(self) -> None:
            if self.head_timer is not None:
                self.head_timer.cancel()
                self.head_timer = None

        def _give_up(self) -> None:
            self.head_timer = None
            if not self.transport.is_closing():
                self.transport.write(_TOO_LATE)
                self.transport.close()

    return Impatient
