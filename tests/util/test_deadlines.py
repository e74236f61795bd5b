"""The time limit of a method, and the waits in which it stands still."""

import asyncio
import math
import threading
from contextlib import nullcontext

import pytest

from agentenv._util.calls import StepTimeout, bounded, give_back, seconds_left, waiting
from tests.waits import until


async def test_what_a_method_does_before_and_after_its_turn_counts_together(virtual_clock):
    async def step():
        await asyncio.sleep(0.15)
        with waiting():
            await asyncio.sleep(0.05)
        await asyncio.sleep(60)

    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises(
        StepTimeout, match="Raise step_timeout_s, or give a client a shorter timeout and raise InfraErr"
    ):
        await bounded(step, limit_s=0.25)
    assert loop.time() - begun == pytest.approx(0.3)


async def test_while_one_of_its_tasks_waits_the_others_are_not_timed_and_then_are_again(virtual_clock):
    async def wait(seconds):
        with waiting():
            await asyncio.sleep(seconds)

    async def step():
        await asyncio.gather(wait(0.1), wait(0.3), asyncio.sleep(0.2))
        await asyncio.sleep(60)

    with pytest.raises(StepTimeout):
        await bounded(step, limit_s=0.1)


@pytest.mark.parametrize(
    ("given", "ends_at"), [([0.05], 0.15), ([0.05, 0.1], 0.25), ([9.0], 0.3), ([0.1, 9.0, 1.0], 0.3)]
)
@pytest.mark.parametrize("waits", [True, False])
async def test_time_that_others_took_is_given_back_up_to_twice_the_limit(virtual_clock, given, ends_at, waits):
    async def step():
        with waiting() if waits else nullcontext():
            for seconds in given:
                give_back(seconds)
        await asyncio.sleep(60)

    async def outer():
        with pytest.raises(StepTimeout):
            await bounded(step, limit_s=0.1)
        return asyncio.get_running_loop().time()

    begun = asyncio.get_running_loop().time()
    assert await bounded(outer, limit_s=0.12) - begun == pytest.approx(ends_at)
    give_back(1.0)  # no limit here


async def test_a_method_can_ask_for_the_rest_of_the_shortest_limit_around_it_which_waits_leave_as_it_is():
    async def step():
        with waiting():
            before = seconds_left()
            await asyncio.sleep(0.01)
            return before, seconds_left()

    async def outer():
        return await bounded(step, limit_s=80.0)

    with waiting():  # outside of a method there is nothing to hold
        before, after = await bounded(outer, limit_s=50.0)
    assert seconds_left() == math.inf
    assert 0 < before == after <= 50


async def test_the_clock_of_one_method_does_not_stand_still_for_another(virtual_clock):
    async def waits():
        with waiting():
            await asyncio.sleep(0.5)
        return "done"

    async def works():
        await asyncio.sleep(60)

    first = asyncio.create_task(bounded(waits, limit_s=0.1))
    with pytest.raises(StepTimeout):
        await bounded(works, limit_s=0.1)
    assert await first == "done"


async def test_a_wait_within_a_limit_within_a_limit_counts_for_neither(virtual_clock):
    async def waits():
        with waiting():
            await asyncio.sleep(0.5)
        return "done"

    async def outer():
        return await bounded(waits, limit_s=0.2)

    assert await bounded(outer, limit_s=0.2) == "done"


async def test_a_cancelled_call_ends_after_its_thread(monkeypatch):
    """`close` follows it: a database that is closed while a thread reads it ends the process."""
    monkeypatch.setattr("agentenv._util.calls._CANCEL_GRACE_S", 30.0)
    started, go, ended = threading.Event(), threading.Event(), []

    def step():
        started.set()
        go.wait(30)
        ended.append(True)

    work = asyncio.ensure_future(bounded(step, limit_s=60))
    await until(started.is_set)
    work.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not work.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert ended == [True]
