"""The part of `VLLMEngine` that runs inside vLLM's worker processes: what receives new weights there.

vLLM imports this in every worker, for `worker_extension_cls`, before it asks its registry for the transfer engine that
`weight_transfer_config` names; so importing it registers ours. `Receiver` is the one that vLLM holds. It passes all
calls of vLLM's protocol (init, start, update, finish) on to vLLM's own engine of the transfer that `init` names, "nccl"
or "ipc", or to `SharedMemory`: which one is known only when the trainer's tensors are.
"""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from agentenv.engines._weights import WeightFile

RECEIVER, SHARED_MEMORY = "agentenv", "agentenv_shm"
"""Names in vLLM's registry."""


def _is_news(record: logging.LogRecord) -> bool:
    return "RotaryEmbedding" not in record.getMessage()


@dataclass
class ReceiverInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Which transfer, and what its own `init` is told."""

    backend: str
    info: dict[str, Any]


@dataclass
class ReceiverUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What the transfer's own `update_weights` is told, pickled: handles of GPU memory travel no other way."""

    pickled: bytes


class Receiver(WeightTransferEngine[ReceiverInit, ReceiverUpdate]):  # type: ignore[misc]
    """Passes vLLM's calls on to the transfer in use."""

    init_info_cls, update_info_cls = ReceiverInit, ReceiverUpdate
    supports_draft_weight_update = False
    transfer: WeightTransferEngine[Any, Any]

    def init_transfer_engine(self, init_info: ReceiverInit) -> None:
        """Take up a transfer, and let go of the one before."""
        self.shutdown()
        config = WeightTransferConfig(backend=init_info.backend)
        made = WeightTransferEngineFactory.create_engine(config, self.vllm_config, self.device, self.model)
        self.transfer = made
        made.init_transfer_engine(made.parse_init_info(init_info.info))

    def start_weight_update(self) -> None:
        """Pass it on."""
        self.transfer.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Pass it on, unpickled: it comes from the process that started this one."""
        self.transfer.update_weights(pickle.loads(self.parse_update_info(update_info).pickled))

    def receive_weights(self, update_info: ReceiverUpdate) -> None:
        """Never called: `update_weights` is whole."""
        raise NotImplementedError

    def finish_weight_update(self) -> None:
        """Pass it on."""
        self.transfer.finish_weight_update()

    def shutdown(self) -> None:
        """Let go of the transfer in use."""
        if hasattr(self, "transfer"):
            self.transfer.shutdown()


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where the weights lie."""

    file: WeightFile


class SharedMemory(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):  # type: ignore[misc]
    """Loads weights in checkpoint format from memory that the trainer shares.

    By vLLM's layer-wise reloading and not `model.load_weights` alone: vLLM repacks weights after loading (CPU kernels,
    quantisation), and only the former undoes and redoes that.
    """

    init_info_cls, update_info_cls = SharedMemoryInit, SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Make the model ready to be loaded anew."""
        self._expected = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load them; on a GPU, until they are there."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():  # vLLM's own asks a machine without one to wait for it
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """Load them.

        Raises:
            ValueError: one of the model's is not among them.
        """
        loaded = self.model.load_weights(update_info.file)
        if loaded is not None and self.model_config.quantization is None and (missing := self._expected - loaded):
            raise ValueError(f"{len(missing)} weights are missing, {min(missing)!r} among them.")

    def finish_weight_update(self) -> None:
        """Finish what layer-wise loading put off."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held between two updates."""


class WorkerExtension:
    """Mixed into vLLM's worker class; reached through `collective_rpc`."""

    device: torch.device
    model_runner: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def agentenv_device(self) -> str:
        """The id of the GPU that this worker computes on, as torch has it; "cpu" without one."""
        # Else a warning per update that rotary tables, which no checkpoint has, were not among the weights.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_is_news)
        if self.device.type != "cuda":
            return self.device.type
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def agentenv_give_up_update(self) -> None:
        """Forget the half of an update that failed, which the next would count as part of its own."""
        finalize_layerwise_reload(self.model_runner.get_model(), self.model_runner.model_config)
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()


WeightTransferEngineFactory.register_engine(RECEIVER, Receiver)
WeightTransferEngineFactory.register_engine(SHARED_MEMORY, SharedMemory)
