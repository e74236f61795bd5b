"""Shard a model over several ranks (FSDP2), and exchange results between ranks during training.

Shapes: N action tokens of a batch.

Every rank has the whole batch and the same plan of micro-batches, runs its own part, and sums with the others. All
ranks take part in the same collectives in the same order: a rank without a micro-batch runs an empty one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from agentenv.errors import RunStopped


class RankLost(RunStopped):
    """A rank no longer takes part."""


@dataclass(slots=True, eq=False)
class Ranks:
    """The processes that train together, seen from one of them. The default is a single process."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """Mesh of their devices; None for a single process."""

    def shard(self, module: nn.Module, *, dtype: torch.dtype, in_float32: Sequence[nn.Module] = ()) -> None:
        """Shard every weight of a module over the ranks, layer by layer. A single process does nothing.

        Weights are gathered and used in `dtype`, gradients are summed in float32. Autocast still applies to operations,
        but casts no weights, which would undo the sharding.

        Args:
            module: called as a whole; returns a tuple of tensors.
            dtype: data type of the computation.
            in_float32: parts of the module that compute in float32.
        """
        if self.mesh is None:
            return
        plain = MixedPrecisionPolicy(cast_forward_inputs=False)
        low = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        parts = [(part, plain) for part in in_float32] + [(layer, low) for layer in _layers(module)]
        for part, policy in [*parts, (module, low)]:
            # The root too, so that the sharding does not depend on which pass ran last.
            fully_shard(part, mesh=self.mesh, mp_policy=policy, reshard_after_forward=True)

    def sum_over_ranks(self, numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums over all ranks. All ranks must pass the same names."""
        if self.mesh is None or not numbers:
            return dict(numbers)
        stacked = torch.stack(list(numbers.values())).float()
        dist.all_reduce(stacked, group=self.mesh.get_group())
        return dict(zip(numbers, stacked.unbind(), strict=True))

    def merge(self, values_N: Tensor) -> Tensor:
        """Return at each place the number of a rank that has one; NaN if no rank does."""
        if self.mesh is None:
            return values_N
        missing_N = values_N.isnan()
        both_2N = torch.stack([values_N.masked_fill(missing_N, 0.0), (~missing_N).to(values_N.dtype)])
        dist.all_reduce(both_2N, group=self.mesh.get_group())
        return both_2N[0] / both_2N[1]  # 0 / 0 is NaN


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of outermost module lists: a decoder's layers, not a layer's experts."""
    for child in module.children():
        yield from child.children() if isinstance(child, nn.ModuleList) else _layers(child)


def gather(tensor: Tensor) -> Tensor:
    """Return a sharded tensor completely on rank 0, and empty on the others. Every rank must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    full = tensor.full_tensor()
    return full if dist.get_rank() == 0 else full.new_empty(0)


def gather_state(state: Any) -> Any:
    """Return a state with sharded tensors gathered on rank 0's CPU; other tensors are unchanged."""
    if isinstance(state, DTensor):
        return gather(state).cpu()
    if isinstance(state, Mapping):
        return {key: gather_state(value) for key, value in state.items()}
    return [gather_state(value) for value in state] if isinstance(state, list) else state


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Return rank 0's tensor sharded like `like`, or unchanged if `like` is not sharded."""
    if not isinstance(like, DTensor):
        return full
    mine = full.to(like.device) if dist.get_rank() == 0 else torch.empty(full.shape, dtype=full.dtype).to(like.device)
    return distribute_tensor(mine, like.device_mesh, like.placements)


def outline(state: Any) -> Any:
    """Return a state for `shard_like` on other ranks: shapes for tensors; numbers and random states unchanged."""
    if isinstance(state, Tensor):
        return state.to("meta") if state.dim() and state.is_floating_point() else state
    if isinstance(state, Mapping):
        return {key: outline(value) for key, value in state.items()}
    return [outline(value) for value in state] if isinstance(state, list) else state
