"""ROLL's `register` and `Dispatch` where ROLL is not, and its data parallelism over any workers, of any batch.

ROLL's own splits neither a batch of fewer rows than workers, nor a list that they do not divide.
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
"""The attribute of a method under which ROLL's clusters, and `dispatched`, find how it is called."""


class Dispatch(Enum):
    """How a method's arguments get to the workers, and its results back."""

    ONE_TO_ALL = auto()
    """The same to every worker; a list of what each gives."""
    DP_MP_COMPUTE = auto()
    """Part of the batch to each worker; the batch of what they give, in order."""


def register(dispatch_mode: Dispatch, clear_cache: bool = False) -> Callable[[_F], _F]:
    """Marks a worker's method as one that is called on all workers; `clear_cache` is for ROLL's GPUs and does nothing.

    Raises:
        ConfigError: no such mode.
    """
    if not isinstance(dispatch_mode, Dispatch):
        raise ConfigError(f"dispatch_mode: expected a Dispatch, got {dispatch_mode!r}. Choose one of them.")

    def marked(method: _F) -> _F:
        """The method."""
        setattr(method, FLAG, {"dispatch_mode": dispatch_mode})
        return method

    return marked


def roll_module(name: str) -> Any:
    """A module of ROLL; None where ROLL is not installed, or another package is, whose name it has on PyPI."""
    top, second = name.split(".")[:2]
    try:
        importlib.import_module(f"{top}.{second}")
    except ModuleNotFoundError as error:
        if error.name in (top, f"{top}.{second}"):
            return None
        raise
    return importlib.import_module(name)


class LocalWorker:
    """What ROLL's Worker has, for a single one in this process."""

    def __init__(self, worker_config: Any) -> None:
        self.worker_config, self.pipeline_config = worker_config, None
        self.rank, self.world_size = 0, 1
        self.rank_info = SimpleNamespace(rank=0, world_size=1, dp_rank=0, dp_size=1)


def dispatched(workers: Sequence[Any], method: Callable[..., Any], *args: Any) -> Any:
    """Call a method that `register` has marked on workers, as its mode says.

    Args:
        workers: objects, called in a thread each, or handles of Ray's actors.
        method: of their class.
        args: of the method; in mode DP_MP_COMPUTE, a batch and nothing else.

    Raises:
        ContractError: the method is not marked.
        ConfigError: there are no workers.
    """
    mode = getattr(method, FLAG, {}).get("dispatch_mode")
    if not isinstance(mode, Enum):
        raise ContractError(f"{method.__name__}: expected a method that `register` marks, got {method!r}. Decorate it.")
    parallel = mode.name == Dispatch.DP_MP_COMPUTE.name
    return (data_parallel if parallel else one_to_all)(workers, *args, method=method.__name__)


def one_to_all(workers: Sequence[Any], *args: Any, method: str) -> list[Any]:
    """What each worker gives for the same arguments, in the order of the workers."""
    return _called(workers, [args] * len(workers), method)


def data_parallel(workers: Sequence[Any], data: Any, *, method: str = "compute_rewards") -> Any:
    """What the workers give for a batch, each for a part of it, as one batch in the order of the rows.

    Parts differ by one row at most; where there are fewer rows than workers, some get none. An empty batch goes to the
    first worker as it is.

    Args:
        workers: see `dispatched`.
        data: a DataProto, which slices of rows can be taken of, or a list.
        method: what is called.
    """
    num_parts = max(min(len(workers), len(data)), 1)
    size, more = divmod(len(data), num_parts)
    ends = [size * part + min(part, more) for part in range(num_parts + 1)]
    parts = [data[start:end] for start, end in pairwise(ends)]
    return _joined(_called(workers[:num_parts], [(part,) for part in parts], method))


def _called(workers: Sequence[Any], arguments: Sequence[Sequence[Any]], method: str) -> list[Any]:
    if not workers:
        raise ConfigError("workers: expected at least one, got none. Start some.")
    calls = [getattr(worker, method) for worker in workers]
    if all(hasattr(each, "remote") for each in calls):
        from agentenv.ray_import import import_ray

        return list(
            import_ray("reward workers").get([f.remote(*args) for f, args in zip(calls, arguments, strict=True)])
        )
    with ThreadPoolExecutor(len(calls), thread_name_prefix="rewards") as threads:
        waiting = [threads.submit(each, *args) for each, args in zip(calls, arguments, strict=True)]
        return [each.result() for each in waiting]


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, list):
        return [row for part in parts for row in part]
    if isinstance(first, dict):
        import torch

        return {name: torch.cat([part[name] for part in parts]) for name in first}
    return type(first).concat(parts)
