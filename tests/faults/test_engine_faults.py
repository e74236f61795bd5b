"""An engine that fails while many episodes run costs attempts and no episode."""

import asyncio
from collections import Counter

import pytest

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
