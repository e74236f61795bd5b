"""What the suite found in the tools of an episode: opened as the episode was cancelled, they were never closed."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from agentenv.held import Held


async def test_what_opens_while_its_opener_is_cancelled_is_closed():
    left = []

    @asynccontextmanager
    async def manager():
        try:
            yield "open"
        finally:
            left.append(True)

    made = []

    async def opener():
        made.append(Held(manager()))
        return await made[0].open()

    task = asyncio.ensure_future(opener())
    while not made:
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(task.cancel)  # in the round in which the manager opens
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left == [True]
    assert made[0].task.done()
