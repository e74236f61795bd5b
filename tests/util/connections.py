"""Connections to servers of ours, as bytes."""

import asyncio
import contextlib


@contextlib.asynccontextmanager
async def connected(server):
    """A connection as bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
