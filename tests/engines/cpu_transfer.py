"""vLLM's NCCL weight transfer with the broadcast over TCP instead: what is around it runs as it is, without a GPU."""

from __future__ import annotations

from typing import Any

from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from agentenv.engines.vllm.worker import WorkerExtension as _WorkerExtension


def join(info: Any, rank: int) -> StatelessProcessGroup:
    """The group of the trainer and all workers."""
    return StatelessProcessGroup.create(info.master_address, info.master_port, rank, info.world_size)


class Receiver(nccl_engine.NCCLWeightTransferEngine):
    """The worker's side."""

    def init_transfer_engine(self, init_info):
        assert init_info.packed  # what the trainer said has arrived
        self.model_update_group = join(init_info, init_info.rank_offset + self.parallel_config.rank)

    def update_weights(self, update_info):
        names = self.parse_update_info(update_info).names
        received = [self.model_update_group.broadcast_obj(None, src=0) for _ in names]
        assert [name for name, _ in received] == names
        self.model.load_weights(received)

    def shutdown(self):
        self.model_update_group = None


class Trainer(nccl_engine.NCCLTrainerWeightTransferEngine):
    """The trainer's side."""

    def _broadcast(self, source, meta):
        for pair in self._checked_iter(source, meta):
            self.model_update_group.broadcast_obj(pair, src=0)

    def shutdown(self):
        self.model_update_group = None


class WorkerExtension(_WorkerExtension):
    """vLLM imports this module in its workers for it."""


def register() -> None:
    """Put this in the place of NCCL, in this process."""
    nccl_engine.open_trainer_endpoint = lambda info: join(info, 0)
    WeightTransferTrainerFactory._registry["nccl"] = lambda: Trainer


WeightTransferEngineFactory._registry["nccl"] = lambda: Receiver
