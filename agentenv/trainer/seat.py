"""A learner's GPUs on a cluster that lends GPUs to engines: held by an actor, so that Ray gives them to nobody else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agentenv.cluster import ClusterConfig, answer_of
from agentenv.errors import ConfigError
from agentenv.ray_import import import_ray


class Holder:
    """Sits on GPUs and does nothing; runs in an actor on the learner's node."""

    def gpus(self) -> list[str]:
        """Which ones, as Ray counts them."""
        ids: list[str] = import_ray().get_runtime_context().get_accelerator_ids().get("GPU", [])
        return ids


@asynccontextmanager
async def seat(num_gpus: int, cluster: ClusterConfig) -> AsyncIterator[list[int]]:
    """GPUs of the node that this process runs on, held for it until the end; Ray must be running, see `ray_session`.

    Take it before the engines are started, or after places were reserved for them: what is free by then is given.

    Args:
        num_gpus: how many; 0 gives an empty list and asks nothing of Ray.
        cluster: its `wait_s` is the longest wait for them.

    Returns:
        Their ids, as CUDA_VISIBLE_DEVICES takes them.

    Raises:
        ConfigError: this node has not as many, or they are not free within the wait; or the process is on no node.
    """
    if num_gpus < 0:
        raise ConfigError(f"learner's GPUs: expected an integer >= 0, got {num_gpus!r}. Change the value.")
    if num_gpus == 0:
        yield []
        return
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = _this_node(num_gpus)
    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    options = {"num_cpus": 0, "num_gpus": num_gpus, "max_restarts": 0, "scheduling_strategy": strategy}
    holder = ray.remote(Holder).options(**options).remote()
    try:
        yield await _held(holder, num_gpus, cluster.wait_s)
    finally:
        with contextlib.suppress(ray.exceptions.RayError, ConnectionError):
            ray.kill(holder)


def _this_node(num_gpus: int) -> str:
    """The id of the node under this process, which has that many GPUs."""
    ray = import_ray()
    from ray.util.client import ray as client

    if client.is_connected():
        raise ConfigError(
            f"learner: expected to run on a node of the cluster to use {num_gpus} of its GPUs, got a connection from "
            "outside (ray://). Start it there, with --ray_address auto: ray job submit -- agentenv train …"
        )
    node: str = ray.get_runtime_context().get_node_id()
    there = next((each["Resources"].get("GPU", 0.0) for each in ray.nodes() if each["NodeID"] == node), 0.0)
    if there < num_gpus:
        raise _too_few(num_gpus, f"{there:g} in all")
    return node


async def _held(holder: Any, num_gpus: int, wait_s: float) -> list[int]:
    ray = import_ray()
    try:
        async with asyncio.timeout(max(wait_s, 1.0)):
            ids = await answer_of(holder.gpus.remote())
    except TimeoutError as error:
        raise _too_few(num_gpus, f"fewer free within {wait_s:g} s") from error
    except ray.exceptions.RayError as error:
        raise _too_few(num_gpus, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
    if not all(each.isdecimal() for each in ids):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES: expected numbers of GPUs where Ray was started, got {', '.join(ids)}. "
            "Start Ray with numbers, or without the variable."
        )
    return [int(each) for each in ids]


def _too_few(num_gpus: int, got: str) -> ConfigError:
    return ConfigError(
        f"learner's GPUs: expected {num_gpus} free on this node, got {got}. Give the engines fewer (--num_engines, "
        "--engine_gpus), or train on the CPU."
    )
