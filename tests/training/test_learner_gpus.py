"""The learner's GPUs are nobody else's, on a Ray that only says it has GPUs."""

import pytest

from agentenv._util.ray.cluster import ClusterConfig, _env
from agentenv.errors import ConfigError
from agentenv.training.learner_gpus import reserve_gpus

BRIEF = ClusterConfig(wait_s=3.0)


@pytest.fixture(scope="module")
def two_gpus():
    ray = pytest.importorskip("ray")
    quiet = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 100 << 20}
    ray.init(address="local", num_cpus=2, num_gpus=2, runtime_env=_env(ClusterConfig()), **quiet)
    yield ray
    ray.shutdown()


@pytest.mark.slow
async def test_the_learner_gets_one_gpu_and_the_engine_the_other(two_gpus):
    class Engine:
        """What holds a GPU as an engine's actor does."""

        def gpus(self):
            import ray

            return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    async with reserve_gpus(1, ClusterConfig(wait_s=60)) as mine:
        engine = two_gpus.remote(Engine).options(num_cpus=0, num_gpus=1).remote()
        theirs = [int(each) for each in two_gpus.get(engine.gpus.remote(), timeout=60)]
        assert sorted(mine + theirs) == [0, 1]
        with pytest.raises(ConfigError, match="expected 1 free on this node, got fewer free within 3 s"):
            async with reserve_gpus(1, BRIEF):
                pass
        two_gpus.kill(engine)
        async with reserve_gpus(1, ClusterConfig(wait_s=60)) as other:
            assert other == theirs
    async with reserve_gpus(2, ClusterConfig(wait_s=60)) as both:
        assert sorted(both) == [0, 1]


@pytest.mark.slow
async def test_more_than_the_node_has_is_refused_at_once(two_gpus):
    with pytest.raises(ConfigError, match="expected 3 free on this node, got 2 in all"):
        async with reserve_gpus(3, ClusterConfig(wait_s=600)):
            pass
