"""Reserve GPUs for the learner: a Ray actor holds them, so that Ray does not assign them to anything else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentenv._util.ray.cluster import ClusterConfig, call_result, import_ray, kill_actor
from agentenv.errors import ConfigError


class GpuHolder:
    """An actor on the learner's node that holds GPUs and does nothing."""

    def gpus(self) -> list[str]:
        """Return their ids in Ray's numbering."""
        ids: list[str] = import_ray().get_runtime_context().get_accelerator_ids().get("GPU", [])
        return ids


@asynccontextmanager
async def reserve_gpus(num_gpus: int, cluster: ClusterConfig) -> AsyncIterator[list[int]]:
    """Reserve GPUs of this process's node until the context ends. Ray must be running, see `ray_session`.

    Enter it before the engines start.

    Args:
        num_gpus: number of GPUs, at least 1.
        cluster: `wait_s` is the longest wait for them.

    Yields:
        Their ids, in the form of CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: the node has fewer GPUs, they are not free within the wait, or the process is not on a node.
    """
    ray = import_ray()
    from ray.util.client import ray as client
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if client.is_connected():
        raise ConfigError(
            f"learner: expected to run on a node of the cluster to use {num_gpus} of its GPUs, got a connection from "
            "outside (ray://). Start it there, with --ray_address auto: ray job submit -- agentenv train …"
        )
    node: str = ray.get_runtime_context().get_node_id()
    total = next((each["Resources"].get("GPU", 0.0) for each in ray.nodes() if each["NodeID"] == node), 0.0)

    def too_few(got: str) -> ConfigError:
        return ConfigError(
            f"learner's GPUs: expected {num_gpus} free on this node, got {got}. Reduce the engines' (--num_engines, "
            "--engine_gpus), or train on the CPU."
        )

    if total < num_gpus:
        raise too_few(f"{total:g} in all")
    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    options = {"num_cpus": 0, "num_gpus": num_gpus, "max_restarts": 0, "scheduling_strategy": strategy}
    holder = ray.remote(GpuHolder).options(**options).remote()
    try:
        try:
            async with asyncio.timeout(max(cluster.wait_s, 1.0)):
                ids = await call_result(holder.gpus.remote())
        except TimeoutError as error:
            raise too_few(f"fewer free within {cluster.wait_s:g} s") from error
        except ray.exceptions.RayError as error:
            raise too_few(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
        if not all(each.isdecimal() for each in ids):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES: expected numbers of GPUs where Ray was started, got {', '.join(ids)}. "
                "Start Ray with numbers, or without the variable."
            )
        yield [int(each) for each in ids]
    finally:
        kill_actor(holder)
