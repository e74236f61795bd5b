"""RayScorer: every conversation is scored, whichever replica dies or hangs, and by HFScorer's numbers.

The fast tests are about the pool, over replicas made here; the slow ones about real actors, which are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
import pytest_asyncio

from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.models.actor_lifecycle import WorkerDied
from agentenv.rewards.models.hf import HFScorer
from agentenv.rewards.models.ray_replicas import RayScorer, ReplicaActor, ReplicaSpec
from agentenv.rewards.models.replicas import ATTEMPTS, MAX_OF_A_CALL, ReplicaPool
from agentenv.rewards.models.types import Scored
from agentenv.rewards.models.vllm_local import VLLMOptions
from tests.rewards.models.tiny import said, tiny_rm

# --- replicas without a model -----------------------------------------------------------------------------------------


class Replica:
    """Gives the length of a text; "data" is refused, "die" ends it, "wait" takes until its death."""

    starts: list[Exception | None]
    made: list[Replica]

    def __init__(self, index):
        self.index = index
        self.dead, self.calls, self.num_cancelled, self.killed = asyncio.Event(), [], 0, 0
        self.short = False
        self.made.append(self)

    async def start(self):
        await asyncio.sleep(0)
        error = self.starts.pop(0) if self.starts else None
        if error is not None:
            raise error

    async def score(self, pickled):
        texts = [pickle.loads(one) for one in pickled]
        self.calls.append(texts)
        try:
            return await self._outcomes(texts)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def _outcomes(self, texts):
        if "die" in texts:
            self.dead.set()
        if "wait" in texts or "hang" in texts:
            await asyncio.wait_for(asyncio.Event().wait() if "hang" in texts else self.dead.wait(), 60.0)
        await asyncio.sleep(0)
        if self.dead.is_set():
            raise WorkerDied("it is dead")
        if "bug" in texts:
            raise ZeroDivisionError("a bug")
        found = [DataError("no") if text == "data" else Scored(float(len(text)), len(text)) for text in texts]
        return found[:-1] if self.short else found

    async def close(self):
        self.dead.set()

    def kill(self):
        self.killed += 1
        self.dead.set()


@pytest.fixture
def kind():
    return type("Kind", (Replica,), {"made": [], "starts": []})


@pytest.fixture
async def make(kind):
    """Makes started pools, closed at the end."""
    pools = []

    async def made(num=2, *, max_restarts=8, timeout_s=30.0):
        pools.append(ReplicaPool(kind, num, max_restarts=max_restarts, timeout_s=timeout_s, restart_wait_s=0.01))
        await pools[-1].start()
        return pools[-1]

    yield made
    for pool in pools:
        await pool.close()


async def until(holds, timeout_s=280.0):
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.01)


async def test_the_replica_with_the_fewest_in_flight_is_asked(make, kind):
    pool = await make(2)
    slow = [asyncio.create_task(pool.score("wait")) for _ in range(3)]
    await until(lambda: sum(len(call) for replica in kind.made for call in replica.calls) == 3)
    busy, free = sorted(kind.made, key=lambda replica: -len([text for call in replica.calls for text in call]))
    for _ in range(5):
        await pool.score("a")
    texts = [text for call in free.calls for text in call]
    assert texts.count("wait") == 1
    assert texts.count("a") == 5
    assert [text for call in busy.calls for text in call] == ["wait"] * 2
    for task in slow:
        task.cancel()


async def test_those_who_ask_at_once_travel_together_in_bounded_calls(make, kind):
    pool = await make(1)
    num = 2 * MAX_OF_A_CALL + 5
    values = await asyncio.gather(*(pool.score("x" * index) for index in range(num)))
    assert [one.value for one in values] == [float(index) for index in range(num)]
    sizes = [len(call) for call in kind.made[0].calls]
    assert sum(sizes) == num
    assert len(sizes) == 3
    assert max(sizes) <= MAX_OF_A_CALL


async def test_one_that_cannot_be_scored_or_sent_fails_alone(make):
    pool = await make(1)
    given = ["a", "data", lambda: None, "bb"]
    good, refused, unsent, other = await asyncio.gather(*map(pool.score, given), return_exceptions=True)
    assert (good.value, other.value) == (1.0, 2.0)
    assert (type(refused), type(unsent)) == (DataError, DataError)
    assert "can be pickled" in str(unsent)


@pytest.mark.parametrize("text", ["bug", "short"])
async def test_a_replica_that_answers_wrongly_is_an_error_and_lives(make, kind, text):
    pool = await make(1)
    kind.made[0].short = text == "short"
    with pytest.raises(InfraError, match=r"expected (scores of a replica, got ZeroDivisionError|1 outcomes)"):
        await pool.score(text)
    kind.made[0].short = False
    assert (await pool.score("a")).value == 1.0
    assert pool.num_restarts == 0


async def test_requests_of_a_replica_that_dies_are_scored_by_another_and_counted(make, kind):
    pool = await make(2)
    tasks = [asyncio.create_task(pool.score("x" * index)) for index in range(64)]
    kind.made[0].dead.set()
    values = await asyncio.gather(*tasks)
    assert [one.value for one in values] == [float(index) for index in range(64)]
    assert 0 < pool.num_retried <= 64
    await until(lambda: len(pool.alive) == 2)
    assert (pool.num_restarts, len(kind.made), kind.made[0].killed) == (1, 3, 1)


async def test_a_request_that_kills_every_replica_ends_and_affects_few_others(make, kind):
    pool = await make(2)
    with pytest.raises(InfraError, match=f"the death of {ATTEMPTS} replicas, one after another: it is dead") as error:
        await pool.score("die")
    assert not isinstance(error.value, WorkerDied)
    assert pool.num_retried == ATTEMPTS - 1
    assert (await pool.score("a")).value == 1.0
    await until(lambda: pool.num_restarts == ATTEMPTS)


async def test_the_only_replica_is_waited_for_until_its_successor_lives(make, kind):
    pool = await make(1)
    kind.starts[:] = [InfraError("no room yet"), None]
    kind.made[0].dead.set()
    assert (await pool.score("abc")).value == 3.0
    assert (pool.num_retried, pool.num_restarts, kind.made[1].killed) == (1, 2, 1)


async def test_when_no_restart_is_left_every_score_is_an_error_at_once(make, kind):
    pool = await make(1, max_restarts=0)
    kind.made[0].dead.set()
    for _ in range(2):
        with pytest.raises(InfraError, match="expected a living replica, got none of 1 after 0 restarts"):
            await asyncio.wait_for(pool.score("a"), 30.0)


@contextlib.asynccontextmanager
async def started(kind, num):
    """A pool that waits half a minute for answers: for virtual time."""
    pool = ReplicaPool(kind, num, max_restarts=8, timeout_s=30.0, restart_wait_s=0.01)
    await pool.start()
    yield pool
    await pool.close()


def test_a_replica_that_answers_nothing_in_time_is_replaced(kind, virtual_clock):
    async def hangs():
        async with started(kind, 1) as pool:
            kind.made[0]._outcomes = lambda texts: asyncio.sleep(3600.0)
            assert (await pool.score("abc")).value == 3.0
            assert (pool.num_retried, pool.num_restarts, kind.made[0].killed) == (1, 1, 1)

    virtual_clock.run(hangs())


def test_a_conversation_that_hangs_every_replica_is_a_typed_error(kind, virtual_clock):
    async def hangs():
        async with started(kind, 2) as pool:
            with pytest.raises(InfraError, match="it answered nothing for"):
                await pool.score("hang")

    virtual_clock.run(hangs())


def test_a_replica_that_is_only_slow_stays_and_its_call_is_an_error(kind, virtual_clock):
    async def slow():
        async with started(kind, 1) as pool:
            late = asyncio.create_task(pool.score("hang"))
            await asyncio.sleep(1.0)  # it travels alone
            while not late.done():
                await pool.score("a")
                await asyncio.sleep(1.0)
            with pytest.raises(InfraError, match="within 30 s, got none from a replica that still answers others"):
                await late
            assert (pool.num_restarts, kind.made[0].killed) == (0, 0)

    virtual_clock.run(slow())


async def test_a_call_without_a_waiter_is_cancelled_and_not_before(make, kind):
    pool = await make(1)
    tasks = [asyncio.create_task(pool.score("wait")) for _ in range(2)]
    await until(lambda: kind.made[0].calls)
    tasks[0].cancel()
    await asyncio.sleep(0.02)
    assert kind.made[0].num_cancelled == 0
    tasks[1].cancel()
    await until(lambda: kind.made[0].num_cancelled == 1)
    assert (await pool.score("a")).value == 1.0
    assert pool._places[0].num_in_flight == 0


async def test_a_pool_that_cannot_start_says_what_is_wrong_and_leaves_nothing(kind):
    kind.starts[:] = [InfraError("no room"), ConfigError("no such model"), None]
    pool = ReplicaPool(kind, 3, max_restarts=1, timeout_s=1.0)
    with pytest.raises(ConfigError, match="no such model"):
        await pool.start()
    assert all(replica.dead.is_set() for replica in kind.made)
    assert pool.alive == []


async def test_closing_fails_waiters_and_starts_no_new_request(make, kind):
    pool = await make(2)
    tasks = [asyncio.create_task(pool.score("wait")) for _ in range(4)]
    await asyncio.sleep(0.02)
    await pool.close()
    await pool.close()
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30.0)
    assert all(isinstance(outcome, InfraError) for outcome in outcomes)
    with pytest.raises(InfraError, match="expected an open scorer"):
        await pool.score("a")
    assert (len(kind.made), pool.num_restarts) == (2, 0)


async def test_closing_ends_a_successor_that_starts(make, kind):
    pool = await make(2)
    kind.start = lambda self: asyncio.sleep(3600.0)
    kind.made[0].dead.set()
    await asyncio.gather(*(pool.score("a") for _ in range(4)))
    await until(lambda: len(kind.made) == 3)
    await pool.close()
    await until(lambda: kind.made[2].killed == 1)


# --- arguments, and the actor's side ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_replicas": 0}, r"RayScorer\.num_replicas"),
        ({"num_gpus": -0.2}, r"RayScorer\.num_gpus"),
        ({"num_cpus": -1}, r"RayScorer\.num_cpus"),
        ({"backend": "sglang"}, r"RayScorer\.backend"),
        ({"placement": "NEAR"}, r"RayScorer\.placement"),
        ({"max_restarts": -1}, r"RayScorer\.max_restarts"),
        ({"timeout_s": 0}, r"RayScorer\.timeout_s"),
        ({"dtype": "int8"}, r"HFScorer\.dtype"),
        ({"backend": "vllm", "overflow": "middle"}, r"VLLMScorer\.overflow"),
        ({"backend": "vllm", "device": "cpu"}, r"its arguments or those of VLLMScorer .*got 'device'"),
        ({"max_bach": 3}, r"its arguments or those of HFScorer .*max_batch.*got 'max_bach'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_started(wrong, message):
    with pytest.raises(ConfigError, match=message):
        RayScorer(tiny_rm(), **wrong)
    with pytest.raises(ConfigError, match="expected a folder or a name"):
        RayScorer(object())


def test_vllm_keeps_to_its_part_of_a_gpu_by_default():
    def share(**args):
        return RayScorer("m", backend="vllm", **args)._spec.scorer().options.gpu_memory_utilization

    assert share(num_gpus=0.2) == pytest.approx(0.18)
    assert share(num_gpus=1) == share() == 0.9
    assert share(num_gpus=0.2, options={"gpu_memory_utilization": 0.1}) == 0.1
    assert share(num_gpus=0.2, options=VLLMOptions(gpu_memory_utilization=0.1)) == 0.1


async def test_an_actor_gives_each_conversation_its_own_outcome():
    actor = ReplicaActor(ReplicaSpec("hf", str(tiny_rm()), {"max_length": 64}))
    pid, _ = await actor.start()
    assert pid == os.getpid()
    given = [said("42"), said("x" * 300), 7, [{"role": "user", "content": object()}]]
    outcomes = await actor.score([pickle.dumps(one) for one in given[:3]] + [b"no pickle"])
    assert isinstance(outcomes[0], Scored)
    assert [type(one) for one in outcomes[1:]] == [DataError, DataError, InfraError]
    pickle.loads(pickle.dumps(outcomes))
    await actor.close()


@pytest.mark.long
def test_importing_brings_no_ray():
    code = "import sys, agentenv.rewards.models.ray_replicas; assert not {'ray', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


# --- real actors ------------------------------------------------------------------------------------------------------

REAL = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install 'agentenv-rl[ray]'"),
    pytest.mark.asyncio(loop_scope="module"),
]


def conversations(num):
    return [said("clips " * (1 + 7 * index % 60) + str(index)) for index in range(num)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real():
    """Two replicas on a Ray that this scorer starts."""
    scorer = RayScorer(tiny_rm(), num_replicas=2, num_cpus=0.5, timeout_s=60.0, dtype="float32")
    await scorer.load()
    yield scorer
    await scorer.close()


@pytest.fixture(scope="module")
def expected():
    """What HFScorer says of 64 conversations."""

    async def scored():
        scorer = HFScorer(tiny_rm(), dtype="float32")
        values = await asyncio.gather(*map(scorer.score, conversations(64)))
        await scorer.close()
        return [one.value for one in values]

    return asyncio.run(scored())


def pids(scorer):
    return [replica.pid for replica in scorer._pool.alive]


class TestReal:
    """In this order: the later ones kill."""

    pytestmark = REAL

    async def test_scores_are_those_of_hfscorer_over_both_replicas(self, real, expected):
        values = [one.value for one in await asyncio.gather(*map(real.score, conversations(64)))]
        assert values == pytest.approx(expected, abs=1e-4)
        assert len(set(pids(real))) == 2
        assert os.getpid() not in pids(real)
        assert all(life.num_taken >= 20 for life in real._pool._places)
        assert (real.num_scored, real.num_failed, real.num_retried, real.num_restarts) == (64, 0, 0, 0)

    async def test_errors_keep_their_types_and_do_not_affect_others(self, real, expected):
        wrong = [said("x" * 3000), "", said("a")[:1], [{"role": "user", "content": threading.Lock()}]]
        outcomes = await asyncio.gather(*map(real.score, [*wrong, *conversations(8)]), return_exceptions=True)
        assert [type(one) for one in outcomes[:4]] == [DataError] * 4
        assert "expected at most 512 tokens" in str(outcomes[0])
        assert [one.value for one in outcomes[4:]] == pytest.approx(expected[:8], abs=1e-4)

    async def test_any_event_loop_may_ask(self, real, expected):
        found = []
        thread = threading.Thread(target=lambda: found.append(asyncio.run(real.score(conversations(1)[0])).value))
        thread.start()
        await asyncio.to_thread(thread.join, 60.0)
        assert found == pytest.approx(expected[:1], abs=1e-4)

    async def test_a_replica_that_cannot_start_is_a_config_error_and_a_running_ray_stays(self, real):
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        group = placement_group([{"CPU": 0.5}])
        for args, message in [
            ({"num_cpus": 0.5, "placement": group}, "expected a sequence classifier's folder"),
            ({"num_cpus": 1.5, "placement": group}, r"RayScorer\.placement: expected bundles that hold a replica"),
            ({"num_cpus": 1000}, "expected room for 1 times CPU 1000"),
        ]:
            other = RayScorer("no-such/model-anywhere", **args)
            for _ in range(2):
                with pytest.raises(ConfigError, match=message):
                    await asyncio.wait_for(other.score("text"), 120.0)
            await other.close()
        remove_placement_group(group)
        assert ray.is_initialized()
        assert len(pids(real)) == 2

    async def test_none_of_64_scores_is_lost_when_a_replica_is_killed(self, real, expected):
        before, victim = real.num_scored, pids(real)[0]
        os.kill(victim, signal.SIGSTOP)  # so that what it was given waits there
        tasks = [asyncio.create_task(real.score(each)) for each in conversations(64)]
        life = next(life for life in real._pool._places if life.replica.pid == victim)
        await until(lambda: life.num_in_flight >= 16 and not life.queue)
        os.kill(victim, signal.SIGKILL)
        values = [one.value for one in await asyncio.wait_for(asyncio.gather(*tasks), 120.0)]
        assert values == pytest.approx(expected, abs=1e-4)
        assert (real.num_scored - before, real.num_retried >= 16) == (64, True)
        await until(lambda: len(real._pool.alive) == 2, 120.0)
        assert real.num_restarts == 1
        assert victim not in pids(real)

    async def test_a_replica_that_hangs_is_replaced_and_its_conversations_are_scored(self, real, expected):
        victim, retried = pids(real)[0], real.num_retried
        real._pool._timeout_s = 3.0
        os.kill(victim, signal.SIGSTOP)
        values = [one.value for one in await asyncio.gather(*map(real.score, conversations(16)))]
        assert values == pytest.approx(expected[:16], abs=1e-4)
        assert real.num_retried > retried
        os.kill(victim, signal.SIGKILL)

    async def test_closing_ends_its_actors_and_the_ray_that_it_started(self, real):
        import ray

        known = pids(real)
        await real.close()
        await real.close()
        assert not ray.is_initialized()
        for pid in known:
            await until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"))
        with pytest.raises(InfraError, match="expected an open scorer"):
            await real.score("text")
