"""The part of `VLLMEngine` in vLLM's worker processes: it receives new weights.

vLLM imports this module in every worker, for `worker_extension_cls`, before it looks up the transfer engine of
`weight_transfer_config`; the import registers ours. vLLM holds a `Receiver`, which forwards all calls of vLLM's
protocol (init, start, update, finish) to the transfer that `init` names: vLLM's "nccl" or "ipc", or
`SharedMemory`. The transfer is only known when the trainer's tensors are.
"""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from agentenv.engines.weights import WeightFile

RECEIVER, SHARED_MEMORY = "agentenv", "agentenv_shm"
"""Names in vLLM's registry."""


@dataclass
class ReceiverInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The transfer, and the arguments of its `init`."""

    backend: str
    info: dict[str, Any]


@dataclass
class ReceiverUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The pickled argument of the transfer's `update_weights`; handles of GPU memory need pickling."""

    pickled: bytes


class Receiver(WeightTransferEngine[ReceiverInit, ReceiverUpdate]):  # type: ignore[misc]
    """Forwards vLLM's calls to the current transfer."""

    init_info_cls, update_info_cls = ReceiverInit, ReceiverUpdate
    supports_draft_weight_update = False
    transfer: WeightTransferEngine[Any, Any]

    def init_transfer_engine(self, init_info: ReceiverInit) -> None:
        """Open a transfer and close the previous one."""
        self.shutdown()
        config = WeightTransferConfig(backend=init_info.backend)
        transfer = WeightTransferEngineFactory.create_engine(config, self.vllm_config, self.device, self.model)
        self.transfer = transfer
        transfer.init_transfer_engine(transfer.parse_init_info(init_info.info))

    def start_weight_update(self) -> None:
        """Forward the call."""
        self.transfer.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Forward the unpickled argument, which comes from the parent process."""
        self.transfer.update_weights(pickle.loads(self.parse_update_info(update_info).pickled))

    def receive_weights(self, update_info: ReceiverUpdate) -> None:
        """Never called, because `update_weights` does everything."""
        raise NotImplementedError

    def finish_weight_update(self) -> None:
        """Forward the call."""
        self.transfer.finish_weight_update()

    def shutdown(self) -> None:
        """Close the current transfer."""
        if hasattr(self, "transfer"):
            self.transfer.shutdown()


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: shared memory needs no setup."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The file with the weights."""

    file: WeightFile


class SharedMemory(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):  # type: ignore[misc]
    """Loads weights in checkpoint format from shared memory.

    It uses vLLM's layer-wise reloading, because vLLM repacks weights after loading (CPU kernels, quantization) and
    `model.load_weights` alone does not redo that.
    """

    init_info_cls, update_info_cls = SharedMemoryInit, SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Prepare the model for reloading."""
        self._expected = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load weights; on a GPU wait until they are loaded."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():  # vLLM's own asks a machine without one to wait for it
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """Load weights.

        Raises:
            ValueError: a weight of the model is missing.
        """
        loaded = self.model.load_weights(update_info.file)
        if loaded is not None and self.model_config.quantization is None and (missing := self._expected - loaded):
            raise ValueError(f"{len(missing)} weights are missing, {min(missing)!r} among them.")

    def finish_weight_update(self) -> None:
        """Finish layer-wise loading."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing."""


class WorkerExtension:
    """Methods added to vLLM's worker class, called through `collective_rpc`."""

    device: torch.device
    model_runner: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def agentenv_device(self) -> str:
        """Return torch's id of this worker's GPU, or "cpu"."""
        # Suppresses a warning per update about rotary tables, which checkpoints do not contain.
        reloading = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        reloading.addFilter(lambda record: "RotaryEmbedding" not in record.getMessage())
        if self.device.type != "cuda":
            return self.device.type
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def agentenv_abort_update(self) -> None:
        """Discard a failed update, so that the next one starts clean."""
        finalize_layerwise_reload(self.model_runner.get_model(), self.model_runner.model_config)
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()


WeightTransferEngineFactory.register_engine(RECEIVER, Receiver)
WeightTransferEngineFactory.register_engine(SHARED_MEMORY, SharedMemory)
