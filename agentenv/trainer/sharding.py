"""A model in shards on several ranks (FSDP2), and what ranks say to one another while they train.

Shapes: N action tokens of a batch.

Every rank has the whole batch and the same plan of micro-batches, does its own of them, and adds up with the others.
All of them go through the same collectives in the same order: a rank that has no micro-batch left does an empty one,
and one that runs out of memory amid a micro-batch goes through those that are left of it with an empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(slots=True, eq=False)
class Ranks:
    """The processes that train together, as one of them sees them; by default it is alone."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """Of their devices."""
    _roots: list[FSDPModule] = field(default_factory=list)
    _collectives: _Collectives = field(default_factory=lambda: _Collectives())

    def shard(self, module: nn.Module, *, dtype: torch.dtype, in_float32: Sequence[nn.Module] = ()) -> None:
        """Leave this rank its part of every weight of a module, layer by layer; nothing when it is alone.

        The layers' weights travel and compute in `dtype`, gradients are added up in float32. Autocast stays on for what
        it says of single operations; it has no weights left to cast, copies of which would undo the sharding.

        Args:
            module: called as a whole, with tensors in tuples as its output.
            dtype: what to compute in.
            in_float32: parts of it that compute in float32.
        """
        if self.mesh is None:
            return
        plain = MixedPrecisionPolicy(cast_forward_inputs=False)
        low = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        parts = [(part, plain) for part in in_float32] + [(layer, low) for layer in _layers(module)]
        for part, policy in [*parts, (module, low)]:
            # The root too: what is resharded is always the same, whichever pass ran last.
            sharded: Any = fully_shard(part, mesh=self.mesh, mp_policy=policy, reshard_after_forward=True)
            if _survives_oom():
                sharded.set_custom_all_gather(_AllGather(self._collectives))
                sharded.set_custom_reduce_scatter(_ReduceScatter(self._collectives))

        def note_run(*_: object) -> None:
            """From its first run on there is something to reset."""
            if sharded not in self._roots:
                self._roots.append(sharded)

        module.register_forward_pre_hook(note_run, prepend=True)

    def totals(self, numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over the ranks, which all have the same names."""
        if self.mesh is None or not numbers:
            return dict(numbers)
        stacked = torch.stack(list(numbers.values())).float()
        dist.all_reduce(stacked, group=self.mesh.get_group())
        return dict(zip(numbers, stacked.unbind(), strict=True))

    def merged(self, values_N: Tensor) -> Tensor:
        """At each place the number of the rank that has one; NaN where none has. Two that have one have the same."""
        if self.mesh is None:
            return values_N
        missing_N = values_N.isnan()
        both_2N = torch.stack([values_N.masked_fill(missing_N, 0.0), (~missing_N).to(values_N.dtype)])
        dist.all_reduce(both_2N, group=self.mesh.get_group())
        return both_2N[0] / both_2N[1]  # 0 / 0 is NaN

    def lacking(self, fits: bool) -> list[int]:
        """The ranks, by number, for which memory was not enough; told by the processes, not by their devices."""
        if self.mesh is None:
            return [] if fits else [0]
        told = torch.zeros(self.size, dtype=torch.int32)
        told[self.rank] = not fits
        dist.all_reduce(told)
        return torch.nonzero(told)[:, 0].tolist()

    @property
    def survive_oom(self) -> bool:
        """Whether memory that runs out can be recovered from: with several ranks not by every torch."""
        return self.mesh is None or _survives_oom()

    def begin(self) -> None:
        """A micro-batch begins: collectives are counted from here."""
        self._collectives.done = self._collectives.skipped = 0

    def finish(self, work: Callable[[], None]) -> None:
        """Go with the others through what is left of a micro-batch that failed here; `work` does an empty one.

        What comes of it is worth nothing on any rank.
        """
        if self.mesh is None:
            return
        for root in self._roots:
            root.reset_iter_state()  # what the failure left half done
        self._collectives.skipped, self._collectives.done = self._collectives.done, 0
        work()


def _survives_oom() -> bool:
    return hasattr(FSDPModule, "reset_iter_state") and hasattr(FSDPModule, "set_custom_reduce_scatter")


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Members of the lists of modules that are in no other list: a decoder's layers, and not the experts of one."""
    for child in module.children():
        yield from child.children() if isinstance(child, nn.ModuleList) else _layers(child)


@dataclass(slots=True)
class _Collectives:
    """How many were done since a micro-batch began; the first `skipped` are not done, the others did them before."""

    done: int = 0
    skipped: int = 0

    def is_due(self) -> bool:
        """Count one, and say whether to do it."""
        self.done += 1
        return self.done > self.skipped


class _Counted:
    """What FSDP2 asks of a collective of one's own."""

    def __init__(self, collectives: _Collectives) -> None:
        self._collectives = collectives

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent and received."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Counted):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if not self._collectives.is_due():
            output_tensor.zero_()
            return None
        work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class _ReduceScatter(_Counted):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        if not self._collectives.is_due():
            output_tensor.zero_()
            return None
        work: dist.Work | None = dist.reduce_scatter_single(
            output_tensor, input_tensor, group=group, op=op, async_op=async_op
        )
        return work


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be in shards; every rank has to ask, and rank 0 alone gets it, the others none of it."""
    if not isinstance(tensor, DTensor):
        return tensor
    full = tensor.full_tensor()
    return full if dist.get_rank() == 0 else full.new_empty(0)


def stored(state: Any) -> Any:
    """A state with every tensor that is in shards put together on rank 0's CPU; other tensors are left as they are."""
    if isinstance(state, DTensor):
        return whole(state).cpu()
    if isinstance(state, Mapping):
        return {key: stored(value) for key, value in state.items()}
    return [stored(value) for value in state] if isinstance(state, list) else state


def spread(full: Tensor, like: Tensor) -> Tensor:
    """A whole tensor of rank 0, whatever the others give, in shards as `like` is; itself where that is whole."""
    if not isinstance(like, DTensor):
        return full
    mine = full.to(like.device) if dist.get_rank() == 0 else torch.empty(full.shape, dtype=full.dtype).to(like.device)
    return distribute_tensor(mine, like.device_mesh, like.placements)


def outline(state: Any) -> Any:
    """A state for `spread` on the ranks that have none: shapes for tensors, numbers and random states as they are."""
    if isinstance(state, Tensor):
        return state.to("meta") if state.dim() and state.is_floating_point() else state
    if isinstance(state, Mapping):
        return {key: outline(value) for key, value in state.items()}
    return [outline(value) for value in state] if isinstance(state, list) else state
