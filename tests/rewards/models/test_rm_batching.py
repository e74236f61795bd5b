"""Micro-batching: what waits together is scored together, failures are of single sequences, nobody waits for ever."""

import asyncio
import math
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import DataError, InfraError
from agentenv.rewards.models.hf import TOKENS_OF_A_CALL, MicroBatcher, batches
from tests.waits import until


class Model:
    """Scores a sequence by its sum; remembers its batches; fails, waits or gives nonsense where it is told to."""

    def __init__(self, *, fails=(), gives=None, held=False):
        self.batches, self.fails, self.gives = [], set(fails), gives or {}
        self.threads, self.inside = set(), 0
        self.free = threading.Event()
        if not held:
            self.free.set()

    def __call__(self, sequences):
        self.inside += 1
        assert self.inside == 1, "called twice at once"
        self.threads.add(threading.get_ident())
        self.batches.append([list(ids) for ids in sequences])
        try:
            assert self.free.wait(60)
            if self.fails & {i for ids in sequences for i in ids}:
                raise RuntimeError("out of memory")
            return [self.gives.get(ids[0], float(sum(ids))) for ids in sequences]
        finally:
            self.inside -= 1

    @property
    def num_rows(self):
        return sum(map(len, self.batches))


async def asked_while_busy(batcher, model, sequences):
    """Tasks that all wait before the worker, which is held in a batch of its own, can take them."""
    first = asyncio.create_task(batcher.score([1]))
    await until(lambda: len(model.batches) == 1)
    tasks = [asyncio.create_task(batcher.score(ids)) for ids in sequences]
    await until(lambda: batcher.num_waiting == len(tasks) + 1)
    return first, tasks


# --- batches --------------------------------------------------------------------------------------------------------


async def test_concurrent_callers_share_batches_and_each_gets_its_own_score():
    """NeMo RL's asynchronous path asks the model about one conversation at a time."""
    model = Model(held=True)
    batcher = MicroBatcher(model, max_batch=16)
    first, tasks = await asked_while_busy(batcher, model, [[index] for index in range(64)])
    model.free.set()
    assert await asyncio.gather(first, *tasks) == [1.0, *map(float, range(64))]
    assert [len(batch) for batch in model.batches] == [1, 16, 16, 16, 16]
    await batcher.close()


def test_callers_on_several_event_loops_share_one_batcher():
    model = Model()
    batcher = MicroBatcher(model, max_batch=8)

    async def ask(start):
        return await asyncio.gather(*(batcher.score([start + index]) for index in range(20)))

    with ThreadPoolExecutor() as threads:
        found = list(threads.map(lambda start: asyncio.run(ask(start)), (0, 100, 200)))
    assert found == [[float(start + index) for index in range(20)] for start in (0, 100, 200)]
    asyncio.run(batcher.close())


async def test_the_first_of_a_long_queue_are_scored_before_the_last_are_prepared():
    model = Model(held=True)
    batcher = MicroBatcher(model, max_batch=2)
    prepared = []
    first, tasks = await asked_while_busy(
        batcher, model, [lambda i=i: prepared.append(len(model.batches)) or [i] for i in range(40)]
    )
    model.free.set()
    assert await asyncio.gather(*tasks) == [float(i) for i in range(40)]
    assert prepared[15] == 1 < prepared[16]
    await first
    await batcher.close()


@given(st.lists(st.integers(1, 3000), max_size=60), st.integers(1, 20), st.integers(1, 4000))
def test_every_sequence_is_in_one_batch_and_no_batch_is_too_large(lengths, max_batch, max_tokens):
    found = batches(lengths, max_batch, max_tokens)
    assert sorted(index for batch in found for index in batch) == list(range(len(lengths)))
    for batch in found:
        assert len(batch) <= max_batch
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= max_tokens


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=7), st.integers(1, 4))
def test_no_other_cut_of_the_sorted_lengths_costs_less(lengths, max_batch):
    def cost(cut):
        return sum(len(batch) * batch[0] + TOKENS_OF_A_CALL for batch in cut)

    def cuts(ordered):
        yield from ([ordered[:size], *rest] for size in range(1, min(max_batch, len(ordered)) + 1)
                    for rest in cuts(ordered[size:]))  # fmt: skip
        if not ordered:
            yield []

    found = [[lengths[index] for index in batch] for batch in batches(lengths, max_batch, 10**6)]
    assert cost(found) == min(map(cost, cuts(sorted(lengths, reverse=True))))


# --- failures -------------------------------------------------------------------------------------------------------


async def test_a_batch_that_fails_is_split_until_only_what_fails_has_failed():
    model = Model(fails={5}, held=True)
    batcher = MicroBatcher(model, max_batch=16)
    first, tasks = await asked_while_busy(batcher, model, [[index] for index in range(16)])
    model.free.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [index for index, result in enumerate(results) if isinstance(result, Exception)] == [5]
    assert isinstance(results[5], InfraError)
    assert "RuntimeError: out of memory" in str(results[5])
    assert [result for index, result in enumerate(results) if index != 5] == [float(i) for i in range(16) if i != 5]
    await first
    await batcher.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
async def test_a_score_that_is_not_a_finite_number_is_an_error_of_that_sequence_alone(value):
    model = Model(gives={7: value})
    batcher = MicroBatcher(model, max_batch=8, max_wait_s=0.05)
    results = await asyncio.gather(*(batcher.score([index]) for index in range(8)), return_exceptions=True)
    assert results[:7] == [float(index) for index in range(7)]
    with pytest.raises(InfraError, match="expected a finite score"):
        raise results[7]
    assert model.num_rows == 8
    await batcher.close()


@pytest.mark.parametrize("answer", [[], [1.0] * 9, None, ["a", "b"], [None, None]])
async def test_a_model_that_returns_something_else_fails_typed(answer):
    batcher = MicroBatcher(lambda sequences: answer, max_wait_s=0.05)
    results = await asyncio.gather(*(batcher.score([index]) for index in range(2)), return_exceptions=True)
    assert [type(result) for result in results] == [InfraError, InfraError]
    await batcher.close()


async def test_ids_may_be_made_in_the_workers_thread_and_fail_there_alone():
    model, threads = Model(), set()
    batcher = MicroBatcher(model, max_batch=3, max_wait_s=0.05)

    def make(ids):
        threads.add(threading.get_ident())
        if ids is None:
            raise DataError("no conversation")
        return ids

    results = await asyncio.gather(
        *(batcher.score(lambda ids=ids: make(ids)) for ids in ([1, 2], None, [3])), return_exceptions=True
    )
    assert (results[0], results[2]) == (3.0, 3.0)
    assert isinstance(results[1], DataError)
    assert threads == model.threads
    with pytest.raises(InfraError, match="ZeroDivisionError"):
        await batcher.score(lambda: 1 / 0)
    await batcher.close()


# --- who leaves -----------------------------------------------------------------------------------------------------


async def test_cancelled_callers_cost_nothing():
    model = Model(held=True)
    batcher = MicroBatcher(model, max_batch=4)
    first, tasks = await asked_while_busy(batcher, model, [[index] for index in range(10, 22)])
    for task in tasks[::2]:
        task.cancel()
    await asyncio.wait(tasks[::2])
    assert batcher.num_waiting == 7
    model.free.set()
    assert await asyncio.gather(*tasks[1::2]) == [float(index) for index in range(11, 22, 2)]
    assert await first == 1.0
    assert model.num_rows == 7
    assert batcher.num_waiting == 0
    await batcher.close()


async def test_closing_fails_who_waits_and_lets_the_batch_that_runs_end():
    model = Model(held=True)
    batcher = MicroBatcher(model)
    first, tasks = await asked_while_busy(batcher, model, [[index] for index in range(8)])
    closing = asyncio.create_task(batcher.close())
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [InfraError] * 8
    assert not first.done()
    model.free.set()
    await closing
    assert await first == 1.0
    assert len(model.batches) == 1


async def test_closing_gives_a_model_that_hangs_up(monkeypatch):
    monkeypatch.setattr("agentenv.rewards.models.hf._CLOSE_GRACE_S", 0.05)
    model = Model(held=True)
    batcher = MicroBatcher(model)
    task = asyncio.create_task(batcher.score([1]))
    await until(lambda: len(model.batches) == 1)
    await batcher.close()
    with pytest.raises(InfraError, match="expected an open scorer"):
        await task
    model.free.set()


AT_THE_END = """
import asyncio, threading, time
from agentenv.rewards.models.hf import MicroBatcher

begun = threading.Event()

def slow(rows):
    print("begun", flush=True)
    begun.set()
    time.sleep(0.5)
    print("ended", flush=True)
    return [0.0] * len(rows)

async def main():
    batcher = MicroBatcher(slow, max_batch=1)
    asyncio.ensure_future(batcher.score([1]))
    asyncio.ensure_future(batcher.score([2]))
    await asyncio.to_thread(begun.wait)
    raise ValueError("nobody closes it")

asyncio.run(main())
"""


@pytest.mark.long
def test_a_process_that_ends_lets_the_batch_that_runs_end_and_begins_no_other():
    """Torch aborts a process in which one of its threads still computes: exit code 134 for whatever went wrong."""
    ended = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=280, check=False)
    assert (ended.returncode, ended.stdout.split()) == (1, ["begun", "ended"])
    assert "nobody closes it" in ended.stderr
