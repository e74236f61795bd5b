"""Work that is not left in its middle, however often it is cancelled."""

import asyncio

import pytest

from agentenv._util.calls import run_to_completion


@pytest.mark.parametrize("times", [1, 3])
async def test_cancelled_it_ends_when_the_work_has_ended(times):
    may_end, ended = asyncio.Event(), []

    async def work():
        await may_end.wait()
        ended.append(True)

    running = asyncio.ensure_future(run_to_completion(work()))
    for _ in range(times):
        await asyncio.sleep(0)
        running.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not running.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == [True]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_exception_of_the_work_is_reported_although_it_was_cancelled(cancelled):
    may_end = asyncio.Event()

    async def work():
        await may_end.wait()
        raise OSError("no space left")

    running = asyncio.ensure_future(run_to_completion(work()))
    await asyncio.sleep(0)
    if cancelled:
        running.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(OSError, match="no space left"):
        await running


async def test_the_result_is_that_of_the_work():
    async def work():
        await asyncio.sleep(0)
        return 3

    assert await run_to_completion(work()) == 3
