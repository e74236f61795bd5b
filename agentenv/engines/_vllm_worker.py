"""The part of `VLLMEngine` that runs inside vLLM's worker processes."""

from __future__ import annotations

import logging
from typing import Any


def _is_news(record: logging.LogRecord) -> bool:
    return "RotaryEmbedding" not in record.getMessage()


class WeightReloader:
    """Mixed into vLLM's worker class through `worker_extension_cls`; reached through `collective_rpc`."""

    model_runner: Any

    def agentenv_reload_weights(self, path: str) -> None:
        """Replace the model's weights by those of a safetensors file in checkpoint format, one tensor at a time.

        `reload_weights` and not `model.load_weights`: vLLM repacks weights after loading (CPU kernels, quantisation),
        and only the former undoes and redoes that.
        """
        from safetensors import safe_open

        # A warning per update that rotary tables, which no checkpoint has, were not in the file.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_is_news)
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            self.model_runner.reload_weights(weights_iterator=((name, file.get_tensor(name)) for name in names))
