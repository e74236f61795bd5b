"""Training on several GPUs of one node: `torchrun --nproc_per_node N -m agentenv.cli train …`.

Rank 0 runs all of `agentenv train`: engines, rollouts, loop, records. The other ranks hold shards of the learner. Each
call of rank 0's `RankedLearner` is broadcast to them first and executed by all. Rank 0 handles signals and ends the
others. Calls use a separate process group (gloo) with a long timeout, because hours may pass between them.

Tested with several processes on CPUs, never on GPUs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from agentenv.errors import AgentEnvError, ConfigError
from agentenv.training.algorithm.batch import Batch
from agentenv.training.learner.learner import Learner
from agentenv.training.learner.policy import Layout
from agentenv.training.learner.sharding import RankLost, Ranks, outline

if TYPE_CHECKING:
    from agentenv.training.config import TrainConfig

_BETWEEN_ORDERS = timedelta(days=30)
_WITHIN_ORDERS = timedelta(minutes=30)
_GOODBYE_S = 10.0
"""Timeout of the last call, which ranks may no longer receive."""
_END = "end"
_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""Prefixes of torchrun's environment variables. They are removed, because engine processes are not ranks."""


def run_ranks(lead: Callable[[RankGroup], int]) -> int:
    """Run one of torchrun's processes: rank 0 runs `lead`, the others follow its calls. Return the exit code.

    Raises:
        ConfigError: the processes are on several nodes, or more than there are GPUs.
        RunStopped: another rank was lost.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) != size:
        raise ConfigError(
            "torchrun --nnodes: expected one node, got several. Use OpenRLHF, which takes the same agent file: "
            "docs/tutorial/5-take-it-to-openrlhf.md has the command."
        )
    if rank:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    rank_group = RankGroup(rank, size)
    if rank:
        rank_group.follow()
        return 0
    with contextlib.closing(rank_group):
        return lead(rank_group)


class RankGroup:
    """The ranks, seen from one of them."""

    def __init__(self, rank: int, size: int) -> None:
        """Join the process group."""
        self.rank, self.size = rank, size
        dist.init_process_group("gloo", timeout=_BETWEEN_ORDERS)
        for name in [name for name in os.environ if name.startswith(_LAUNCH)]:
            del os.environ[name]
        self._lock = threading.Lock()
        self._is_broken = False
        self._device = torch.device("cpu")

    def learner(self, config: TrainConfig, model: str, *, num_train_steps: int, gpus: Sequence[str]) -> RankedLearner:
        """Return rank 0's learner and create the shards of the other ranks.

        Args:
            config: the flags.
            model: as in `Learner`.
            num_train_steps: train steps of the whole run.
            gpus: torch's names, one per rank; empty for the first GPUs.
        """
        with self.order("open", config, model, num_train_steps, list(gpus)):
            return RankedLearner(self, config, model, num_train_steps=num_train_steps, gpus=gpus)

    def place(self, gpus: Sequence[str]) -> tuple[Ranks, str]:
        """Return the ranks for a learner, and the device of this rank.

        Raises:
            ConfigError: fewer GPUs than ranks.
        """
        num_gpus = torch.cuda.device_count()
        if 0 < num_gpus < self.size:
            raise ConfigError(
                f"torchrun --nproc_per_node: expected at most {num_gpus}, the number of GPUs, got {self.size}. "
                "Start fewer."
            )
        found = list(gpus) or ([f"cuda:{rank}" for rank in range(self.size)] if num_gpus else ["cpu"] * self.size)
        self._device = torch.device(found[self.rank])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        group = dist.new_group(backend="nccl" if self._device.type == "cuda" else "gloo", timeout=_WITHIN_ORDERS)
        mesh = DeviceMesh.from_group(group, self._device.type)
        return Ranks(self.rank, self.size, mesh), found[self.rank]

    # --- rank 0 ---

    @contextlib.contextmanager
    def order(self, name: str, *args: Any) -> Iterator[None]:
        """Broadcast a call to the other ranks; the context runs this rank's part of it.

        Raises:
            RankLost: a rank was lost, or has too little memory.
        """
        # Threads start on the first GPU, and FSDP uses the streams of the current one.
        device: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._device.type == "cuda":
            device = torch.cuda.device(self._device)
        with self._lock, device:
            try:
                with _rank_lost():
                    dist.broadcast_object_list([name, args])
                    yield
            except AgentEnvError as error:
                self._is_broken |= isinstance(error, RankLost)
                raise
            except BaseException:
                self._is_broken = True  # the others are still in the call and do not listen
                raise

    def close(self) -> None:
        """End the other ranks. If they no longer listen, torchrun ends them."""

        def dismiss() -> None:
            with contextlib.suppress(AgentEnvError), self.order(_END):
                dist.barrier()

        if not self._is_broken:
            goodbye = threading.Thread(target=dismiss, daemon=True)
            goodbye.start()
            goodbye.join(_GOODBYE_S)

    # --- the others ---

    def follow(self) -> None:
        """Execute the calls of rank 0 until it ends.

        Raises:
            RankLost: rank 0 was lost, or this rank has too little memory.
        """
        learner: Learner | None = None
        while True:
            order: list[Any] = [None, None]
            with _rank_lost():
                dist.broadcast_object_list(order)
            name, args = order
            if name == _END:
                dist.barrier()
                return
            try:
                with _rank_lost():
                    if name == "open":
                        config, model, num_train_steps, gpus = args
                        ranks, device = self.place(gpus)
                        learner = Learner(config, model, num_train_steps=num_train_steps, device=device, ranks=ranks)
                        continue
                    assert learner is not None, name
                    if name == "weights":
                        for _ in learner.weights(layout="module"):  # the same weights in the same order as any layout
                            pass
                    else:
                        getattr(learner, name)(*args)
            except RankLost:
                raise
            except AgentEnvError:
                continue  # rank 0 has the same error and reports it


class RankedLearner(Learner):
    """Rank 0's learner. All ranks execute its calls."""

    def __init__(
        self, rank_group: RankGroup, config: TrainConfig, model: str, *, num_train_steps: int, gpus: Sequence[str]
    ) -> None:
        """Load this rank's shard. Use `RankGroup.learner`."""
        self._rank_group = rank_group
        ranks, device = rank_group.place(gpus)
        super().__init__(config, model, num_train_steps=num_train_steps, device=device, ranks=ranks)

    def train_step(self, batch: Batch) -> dict[str, float]:
        """Call `Learner.train_step` on all ranks with the whole batch."""
        with self._rank_group.order("train_step", batch):
            return super().train_step(batch)

    def weights(self, *, layout: Layout = "checkpoint") -> Iterator[tuple[str, Tensor]]:
        """Return `Learner.weights`, all gathered first; on a GPU all of them need memory."""
        with self._rank_group.order("weights"):
            return iter(list(super().weights(layout=layout)))

    def save_model(self, folder: Path, tokenizer: Any) -> None:
        """Call `Learner.save_model`."""
        with self._rank_group.order("weights"):
            super().save_model(folder, tokenizer)

    def state(self) -> dict[str, Any]:
        """Return `Learner.state`, which any number of ranks can load."""
        with self._rank_group.order("state"):
            return super().state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of any number of ranks."""
        with self._rank_group.order("load_state", outline(state)):
            super().load_state(state)


@contextlib.contextmanager
def _rank_lost() -> Iterator[None]:
    """Raise RankLost if torch reports that another process was lost."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, AgentEnvError) or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise RankLost(
            f"torchrun: expected an answer from every rank, got none from one: {error}. Its error is above or in "
            "torchrun's report. Fix it, then resume from the last checkpoint."
        ) from error
