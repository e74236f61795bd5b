"""An engine that fails while many episodes run costs attempts and no episode."""

import asyncio
import gc
import pickle
import threading
from collections import Counter

import pytest

from agentenv.core.trajectory import Trajectory
from agentenv.episode.runner import plan
from tests.engines.test_vllm_http import completion, reply, serving
from tests.episode.test_runner import make_runner, make_tasks, run_all
from tests.waits import until

HI = [104, 105]


async def well(reader, writer, body):
    reply(writer, completion(body["prompt"], HI, [-0.5, -0.5]))


def once_each(trajectories, num):
    assert Counter(t.episode_id for t in trajectories) == {f"t{i}/0": 1 for i in range(num)}


async def test_a_server_that_dies_under_many_episodes_and_comes_back_on_its_port_loses_none():
    full = asyncio.Event()

    async def behave(reader, writer, body):
        if not full.is_set():
            if server.generations == 8:
                full.set()
            await asyncio.sleep(60)
        await well(reader, writer, body)

    # The deadline is longer than the longest pause, 30 s: `serving` shortens pauses after they are compared with it.
    async with serving(behave, max_retries=200, timeout_s=120) as (server, engine):
        running = asyncio.ensure_future(run_all(make_runner(engine=engine, concurrency=8), plan(make_tasks(30), 1)))
        await asyncio.wait_for(full.wait(), 60)
        await server.stop()
        while len(engine.waits) < 16:  # refused meanwhile
            await asyncio.sleep(0.001)
        await server.start()
        ended = await asyncio.wait_for(running, 60)
    once_each(ended, 30)
    assert {(t.error, t.attempt) for t in ended} == {(None, 0)}


async def test_cancelling_a_run_reaches_the_server_for_every_episode_in_flight():
    gone = set()

    async def behave(reader, writer, body):
        try:
            await reader.readexactly(1)
        except asyncio.IncompleteReadError:
            gone.add(body["request_id"].partition("/")[0])
            raise

    async with serving(behave) as (server, engine):
        running = asyncio.ensure_future(run_all(make_runner(engine=engine, concurrency=8), plan(make_tasks(30), 1)))
        await until(lambda: server.generations == 8)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: len(gone) == 8)
        assert server.generations == 8


@pytest.mark.long
async def test_a_consumer_slower_than_the_engine_holds_episodes_back_instead_of_memory():
    def count():
        return sum(1 for each in gc.get_objects() if type(each) is Trajectory)

    most, lock = 0, asyncio.Lock()
    gc.collect()
    before = count()

    async def on_end(trajectory):
        nonlocal most
        async with lock:  # one at a time, and slower than the engine
            await asyncio.sleep(0.001)
        if runner.num_done % 25 == 0:
            gc.collect()
            most = max(most, count() - before)

    runner = make_runner(concurrency=6)
    await runner.run(plan(make_tasks(150), 1), on_end)
    assert runner.num_done == 150
    assert 0 < most <= 6


class Unpicklable(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()

    def __reduce__(self):
        raise TypeError("not to be pickled")


async def test_an_exception_that_cannot_be_pickled_keeps_its_type_message_and_place():
    def behave(states):
        raise Unpicklable("the lock is stuck")

    (ended,) = await run_all(make_runner(behave), plan(make_tasks(1), 1))
    error = pickle.loads(pickle.dumps(ended)).error
    assert (error.kind, error.type, error.message) == ("env", "Unpicklable", "the lock is stuck")
    assert "test_engine_faults.py:" in error.place
