"""What the suite found in the tools of an episode: opened as the episode was cancelled, they were never closed."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager

import pytest

from agentenv._util.task_bound import TaskBoundContext
from agentenv.testing.conformance import cancellation


async def test_a_resource_whose_opener_is_cancelled_is_closed():
    left = []

    @asynccontextmanager
    async def manager():
        try:
            yield "open"
        finally:
            left.append(True)

    made = []

    async def opener():
        made.append(TaskBoundContext(manager()))
        return await made[0].open()

    task = asyncio.ensure_future(opener())
    while not made:
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(task.cancel)  # in the round in which the manager opens
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left == [True]
    assert made[0].task.done()


@pytest.mark.long
async def test_a_thread_that_still_computes_is_not_a_leftover_and_one_that_waits_is(monkeypatch):
    monkeypatch.setattr(cancellation, "_SETTLE_S", 1.0)
    over = threading.Event()

    def compute():
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            sum(range(1000))

    for work, left in ((compute, []), (over.wait, ["threads"])):
        before = cancellation.inventory([])
        thread = threading.Thread(target=work)
        thread.start()
        assert list(await cancellation.lasting_growth(before, [])) == left
        if left:
            over.set()
        thread.join()


@pytest.mark.long
async def test_a_thread_that_never_ends_is_a_leftover_although_it_computes(monkeypatch):
    monkeypatch.setattr(cancellation, "_SETTLE_S", 0.02)
    over, before = threading.Event(), cancellation.inventory([])

    def compute():
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    assert list(await cancellation.lasting_growth(before, [])) == ["threads"]
    over.set()
    thread.join()
