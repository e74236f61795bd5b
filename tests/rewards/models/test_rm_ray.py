"""RayScorer: every conversation is scored by HFScorer's numbers, whichever replica dies. Real actors are killed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pickle
import signal
import threading

import pytest
import pytest_asyncio

from agentenv._util.version import __version__
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.models.hf import HFScorer
from agentenv.rewards.models.ray_replicas import RayScorer, ReplicaActor
from agentenv.rewards.models.types import Scored
from tests.rewards.models.tiny import said, tiny_rm
from tests.waits import until

# --- arguments, and the actor's side ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_replicas": 0}, r"RayScorer\.num_replicas"),
        ({"num_gpus": -0.2}, r"RayScorer\.num_gpus"),
        ({"num_cpus": -1}, r"RayScorer\.num_cpus"),
        ({"placement": "NEAR"}, r"RayScorer\.placement"),
        ({"max_restarts": -1}, r"RayScorer\.max_restarts"),
        ({"timeout_s": 0}, r"RayScorer\.timeout_s"),
        ({"dtype": "int8"}, r"HFScorer\.dtype"),
        ({"max_bach": 3}, r"expected options among .*max_batch.*got 'max_bach'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_started(wrong, message):
    with pytest.raises(ConfigError, match=message):
        RayScorer(tiny_rm(), **wrong)
    with pytest.raises(ConfigError, match="expected a folder or a name"):
        RayScorer(object())


async def test_an_actor_scores_by_hfscorer_and_raises_its_errors():
    actor = ReplicaActor(str(tiny_rm()), {"max_length": 64})
    assert await actor.load() == __version__
    pid, scored = await actor.score(pickle.dumps(said("42")))
    assert (pid, type(scored)) == (os.getpid(), Scored)
    with pytest.raises(DataError):
        await actor.score(pickle.dumps(said("x" * 300)))
    await actor.close()


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
    return [replica.pid for replica in scorer._replicas]


class TestReal:
    """In this order: the later ones kill."""

    pytestmark = REAL

    async def test_scores_are_those_of_hfscorer_over_both_replicas(self, real, expected):
        values = [one.value for one in await asyncio.gather(*map(real.score, conversations(64)))]
        assert values == pytest.approx(expected, abs=1e-4)
        assert len({os.getpid(), *pids(real)}) == 3
        assert (real.num_scored, real.num_failed, real.num_restarts) == (64, 0, 0)

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
        replica = next(each for each in real._replicas if each.pid == victim)
        await until(lambda: replica.num_in_flight >= 16)
        os.kill(victim, signal.SIGKILL)
        values = [one.value for one in await asyncio.wait_for(asyncio.gather(*tasks), 120.0)]
        assert values == pytest.approx(expected, abs=1e-4)
        assert real.num_scored - before == 64
        assert real.num_restarts == 1
        assert victim not in pids(real)

    async def test_a_replica_that_hangs_is_started_again(self, real, expected):
        victim, real._timeout_s = pids(real)[0], 5.0
        os.kill(victim, signal.SIGSTOP)
        outcomes = await asyncio.gather(*map(real.score, conversations(16)), return_exceptions=True)
        late = [one for one in outcomes if isinstance(one, InfraError)]
        assert 0 < len(late) <= 8
        assert "expected a score within 5 s" in str(late[0])
        os.kill(victim, signal.SIGKILL)
        real._timeout_s = 120.0
        values = [one.value for one in await asyncio.gather(*map(real.score, conversations(16)))]
        assert values == pytest.approx(expected[:16], abs=1e-4)
        assert (real.num_restarts, victim in pids(real)) == (2, False)

    async def test_closing_fails_who_waits_and_the_ray_that_it_started_ends(self, real):
        import ray

        waiting = [asyncio.create_task(real.score(each)) for each in conversations(8)]
        await until(lambda: sum(replica.num_in_flight for replica in real._replicas) == 8)
        known = pids(real)
        await real.close()
        outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60.0)
        assert all(isinstance(one, Scored | InfraError) for one in outcomes)
        for pid in known:
            await until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"))
        await real.close()
        assert not ray.is_initialized()
        with pytest.raises(InfraError, match="expected an open scorer"):
            await real.score("text")
