"""Faults 1, 2, 4, 5, 15, 16, 18, 27: an engine that fails while many episodes run costs attempts and no episode."""

import asyncio
import gc
import pickle
import random
import socket
import struct
import threading
import time
from collections import Counter

import pytest

from agentenv.core.trajectory import Trajectory
from agentenv.engines.vllm.http import VLLMHTTPEngine
from agentenv.episode.runner import ErrorPolicy, plan
from agentenv.errors import ConfigError, EngineError, InfraError
from tests.engines.test_vllm_http import ask, completion, reply, serving
from tests.episode.test_runner import END, QUICK, Log, make_runner, make_tasks, run_all

HI = [104, 105]


async def well(reader, writer, body):
    reply(writer, completion(body["prompt"], HI, [-0.5, -0.5]))


async def garbage(reader, writer, body):
    writer.write(b"HTTP/1.1 200 x\r\ncontent-type: application/json\r\ncontent-length: 5\r\n\r\n{]nul")


async def empty(reader, writer, body):
    reply(writer, {"choices": []})


async def busy(reader, writer, body):
    reply(writer, {"message": "busy"}, status=429)


async def broken(reader, writer, body):
    reply(writer, {"message": "cuda"}, status=500)


async def cut(reader, writer, body):
    reply(writer, completion(body["prompt"], HI, [-0.5, -0.5]), cut=20)
    await writer.drain()
    raise ConnectionError


async def reset(reader, writer, body):
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()
    raise ConnectionError


async def misaligned(reader, writer, body):
    reply(writer, completion(body["prompt"], HI, [-0.5]))


async def silent(reader, writer, body):
    await reader.readexactly(1)  # until the client goes


async def slow_head(reader, writer, body):
    for byte in b"HTTP/1.1 200 x\r\ncontent-length: 10000\r\nx-padding: " + b"x" * 10_000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.02)


FAULTS = [garbage, empty, busy, broken, cut, reset, misaligned, silent, slow_head]


def once_each(trajectories, num):
    assert Counter(t.episode_id for t in trajectories) == {f"t{i}/0": 1 for i in range(num)}


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_a_server_that_answers_badly_costs_attempts_and_no_episode(fault):
    """The first answer of each episode is bad, whatever its connection; the engine itself does not try again."""
    seen = set()

    async def behave(reader, writer, body):
        episode = body["request_id"].partition("/")[0]
        bad, _ = episode not in seen, seen.add(episode)
        await (fault if bad else well)(reader, writer, body)

    log = Log()
    # Long enough for a good answer of a machine that is busy, and only those that never answer have to wait for it.
    async with serving(behave, max_retries=0, timeout_s=3 if fault in (silent, slow_head) else 60) as (_, engine):
        runner = make_runner(engine=engine, log=log, policy=QUICK, concurrency=20)
        ended = await asyncio.wait_for(run_all(runner, plan(make_tasks(20), 1)), 200)
    once_each(ended, 20)
    assert {(t.error, t.attempt) for t in ended} == {(None, 1)}
    assert (runner.num_retries, log.open) == (20, 0)


@pytest.mark.long
async def test_chaos_loses_and_doubles_no_episode():
    moments = random.Random(4)

    async def behave(reader, writer, body):
        await (moments.choice(FAULTS[:-2]) if moments.random() < 0.3 else well)(reader, writer, body)

    policy = ErrorPolicy(max_retries=8, retry_wait_s=0.0)
    async with serving(behave, max_retries=1, timeout_s=60) as (_, engine):
        runner = make_runner(engine=engine, policy=policy, concurrency=16)
        ended = await asyncio.wait_for(run_all(runner, plan(make_tasks(200), 1)), 200)
    once_each(ended, 200)
    assert {t.error for t in ended} == {None}
    assert runner.num_retries > 10


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


async def test_an_engine_that_stays_away_is_named_and_bounded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        engine = VLLMHTTPEngine(f"http://127.0.0.1:{taken.getsockname()[1]}", max_retries=0)
        ended = await run_all(make_runner(engine=engine, policy=QUICK), plan(make_tasks(3), 1))
        await engine.close()
    assert {(t.error.kind, t.error.type, t.attempt, t.reward) for t in ended} == {("infra", "EngineError", 2, None)}
    assert "ConnectError" in ended[0].error.message


async def test_an_unknown_host_name_is_a_config_error_at_the_start_and_an_engine_error_later():
    engine = VLLMHTTPEngine("http://no-such-host.invalid:8000", max_retries=0)
    try:
        with pytest.raises(ConfigError, match=r"--base_url: expected a vLLM server.*no-such-host"):
            await asyncio.wait_for(engine.start(), 30)
        with pytest.raises(EngineError, match="ConnectError"):
            await asyncio.wait_for(ask(engine), 30)
    finally:
        await engine.close()


@pytest.mark.long
async def test_a_connection_that_opens_and_never_answers_meets_the_deadline():
    """Half-open: the kernel of the other side takes the bytes, nobody reads them."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        engine = VLLMHTTPEngine(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=0.3)
        with pytest.raises(EngineError, match=r"within 0\.3 s"):
            await asyncio.wait_for(ask(engine), 30)
        await engine.close()


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
        while server.generations < 8:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        deadline = time.monotonic() + 200
        while len(gone) < 8:
            assert time.monotonic() < deadline, gone
            await asyncio.sleep(0.01)
        assert server.generations == 8


async def test_one_sample_that_fails_leaves_its_siblings_whole():
    async def behave(states):
        if states["sampling_params"].seed % 4 == 0:
            raise InfraError("sandbox down")
        return END

    runner = make_runner(behave, policy=ErrorPolicy(max_retries=0, max_error_share=1.0))
    ended = await run_all(runner, plan(make_tasks(10), 4))
    failed = [t for t in ended if t.error]
    assert len({t.episode_id for t in ended}) == len(ended) == 40
    assert 0 < len(failed) < 40
    assert {(t.reward, t.error.kind) for t in failed} == {(None, "infra")}
    assert {t.reward for t in ended if not t.error} == {1.0}


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


async def test_an_environment_that_leaks_tasks_and_threads_does_not_keep_its_run_from_ending():
    """Its tasks end with the event loop, at the latest; what it makes is its own, and no episode is lost to it."""
    leaked = []

    async def behave(states):
        leaked.append(asyncio.create_task(asyncio.sleep(3600)))
        return END

    ended = await asyncio.wait_for(run_all(make_runner(behave), plan(make_tasks(50), 1)), 60)
    once_each(ended, 50)
    assert {t.error for t in ended} == {None}
    for task in leaked:
        task.cancel()


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
