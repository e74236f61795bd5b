"""ROLL's `register` and `Dispatch` for use without ROLL, and its data parallelism over any workers and any batch.

ROLL's own code cannot split a batch of fewer rows than workers, nor a list that the number of workers does not divide.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeVar

from agentenv.errors import ConfigError, ContractError

_F = TypeVar("_F", bound=Callable[..., Any])
FLAG = "BIND_WORKER_METHOD_FLAG"
"""The attribute of a method by which ROLL's clusters, and `dispatched`, find its dispatch mode."""


class Dispatch(Enum):
    """How a method's arguments get to the workers, and its results back."""

    ONE_TO_ALL = auto()
    """The same arguments to every worker; a list of their results."""
    DP_MP_COMPUTE = auto()
    """A part of the batch to each worker; the batch of their results, in order."""


def register(dispatch_mode: Dispatch, clear_cache: bool = False) -> Callable[[_F], _F]:
    """Mark a worker's method as one that is called on all workers. `clear_cache` is for ROLL's GPUs and has no effect.

    Raises:
        ConfigError: `dispatch_mode` is not a Dispatch.
    """
    if not isinstance(dispatch_mode, Dispatch):
        raise ConfigError(f"dispatch_mode: expected a Dispatch, got {dispatch_mode!r}. Choose one of them.")

    def marked(method: _F) -> _F:
        setattr(method, FLAG, {"dispatch_mode": dispatch_mode})
        return method

    return marked


def roll_module(name: str) -> Any:
    """Return a module of ROLL; None if ROLL is not installed, or only the unrelated PyPI package of that name is."""
    top, second = name.split(".")[:2]
    try:
        importlib.import_module(f"{top}.{second}")
    except ModuleNotFoundError as error:
        if error.name in (top, f"{top}.{second}"):
            return None
        raise
    return importlib.import_module(name)


class LocalWorker:
    """The attributes of ROLL's Worker, for a single worker in this process."""

    def __init__(self, worker_config: Any) -> None:
        self.worker_config, self.pipeline_config = worker_config, None
        self.rank, self.world_size = 0, 1
        self.rank_info = SimpleNamespace(rank=0, world_size=1, dp_rank=0, dp_size=1)


def dispatched(workers: Sequence[Any], method: Callable[..., Any], *args: Any) -> Any:
    """Call a method that `register` marked on workers, according to its mode.

    Args:
        workers: objects, each called in its own thread, or handles of Ray's actors.
        method: a method of their class.
        args: the method's arguments; in mode DP_MP_COMPUTE, only a batch.

    Raises:
        ContractError: the method is not marked.
        ConfigError: `workers` is empty.
    """
    mode = getattr(method, FLAG, {}).get("dispatch_mode")
    if not isinstance(mode, Enum):
        raise ContractError(f"{method.__name__}: expected a method marked by `register`, got {method!r}. Decorate it.")
    parallel = mode.name == Dispatch.DP_MP_COMPUTE.name
    return (data_parallel if parallel else one_to_all)(workers, *args, method=method.__name__)


def one_to_all(workers: Sequence[Any], *args: Any, method: str) -> list[Any]:
    """Return each worker's result for the same arguments, in the order of the workers."""
    return _call_all(workers, [args] * len(workers), method)


def data_parallel(workers: Sequence[Any], data: Any, *, method: str = "compute_rewards") -> Any:
    """Return the workers' results for a batch, each for a part of it, as one batch in the order of the rows.

    Parts differ by at most one row; with fewer rows than workers, some workers get none. An empty batch goes to the
    first worker.

    Args:
        workers: see `dispatched`.
        data: a DataProto, or anything that can be sliced by rows, such as a list.
        method: the method to call.
    """
    num_parts = max(min(len(workers), len(data)), 1)
    size, more = divmod(len(data), num_parts)
    ends = [size * part + min(part, more) for part in range(num_parts + 1)]
    parts = [data[start:end] for start, end in pairwise(ends)]
    results = _call_all(workers[:num_parts], [(part,) for part in parts], method)
    first = results[0]
    if len(results) == 1:
        return first
    if isinstance(first, list):
        return [row for result in results for row in result]
    if isinstance(first, dict):
        import torch

        return {name: torch.cat([result[name] for result in results]) for name in first}
    return type(first).concat(results)


def _call_all(workers: Sequence[Any], arguments: Sequence[Sequence[Any]], method: str) -> list[Any]:
    if not workers:
        raise ConfigError("workers: expected at least one, got none.")
    calls = [getattr(worker, method) for worker in workers]
    if all(hasattr(each, "remote") for each in calls):
        from agentenv._util.ray.cluster import import_ray

        ray = import_ray("reward workers")
        return list(ray.get([each.remote(*args) for each, args in zip(calls, arguments, strict=True)]))
    with ThreadPoolExecutor(len(calls), thread_name_prefix="rewards") as threads:
        waiting = [threads.submit(each, *args) for each, args in zip(calls, arguments, strict=True)]
        return [each.result() for each in waiting]
