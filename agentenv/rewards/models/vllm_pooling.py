"""vLLM's pooling engine, in its own processes: token ids in, the raw numbers of a classifier's head out."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv._util.vllm_process import RunningLLM, with_cpu_cache
from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.models.actor_lifecycle import WorkerDied

CPU_KV_CACHE_BYTES = 1 << 30
"""For keys and values on vLLM's CPU build; `kv_cache_memory_bytes` and VLLM_CPU_KVCACHE_SPACE (GiB) win."""
_HEADS = ("score", "classifier")
_FILES = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a checkpoint; `overrides` tell vLLM what the config lacks."""

    labels: tuple[str, ...]
    overrides: Mapping[str, Any]
    """vLLM's `hf_overrides`."""


class PoolingEngine:
    """One vLLM from its start to its death, used on one event loop.

    Args:
        engine_args: what `AsyncEngineArgs` takes; `model` among them.
    """

    def __init__(self, engine_args: Mapping[str, Any]) -> None:
        self._args = dict(engine_args)
        self._llm: Any = None
        self._running: RunningLLM | None = None
        self._counter = itertools.count()
        self.labels: tuple[str, ...] = ()
        """Names of the head's numbers, in order; this and the next two are known once it has started."""
        self.max_length = self.vocab_size = 0
        """Maximum number of tokens of a sequence, and the size of the vocabulary."""

    @property
    def alive(self) -> bool:
        """Whether it has started, and its processes live."""
        return self._running is not None and self._running.alive

    @property
    def pids(self) -> list[int]:
        """Process ids of vLLM's living processes."""
        return [] if self._running is None else self._running.pids

    async def start(self) -> None:
        """Load the model; cancelling it ends the processes that were started.

        Raises:
            ConfigError: the classifier does not exist, or vLLM refuses it or an argument.
            InfraError: vLLM could not start.
            MissingDependency: vLLM is not installed, or cannot be imported.
        """
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are of the machine, in every process
        self._running = await RunningLLM.started("VLLMScorer", self._arguments)
        self._llm = self._running.llm
        self.max_length = int(self._llm.model_config.max_model_len)
        self.vocab_size = int(self._llm.model_config.get_vocab_size())

    async def pool(self, token_ids: Sequence[int]) -> list[float]:
        """[L] the raw number of each label; cancelling it aborts the request.

        Raises:
            WorkerDied: vLLM's processes are gone; now, or while it computed.
            InfraError: vLLM failed on this one alone.
        """
        from vllm.exceptions import VLLMError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            if self._running is None:
                raise EngineDeadError
            output = await self._running.while_alive(self._pooled(list(token_ids)))
        except EngineDeadError as error:
            raise WorkerDied(
                "VLLMScorer: expected a running vLLM, got EngineDeadError: its process has died. Read its last lines."
            ) from error
        except (VLLMError, EngineGenerateError, ValueError) as error:
            raise InfraError(
                f"VLLMScorer: expected a sequence that vLLM can score, got {error.__cause__ or error} for "
                f"{len(token_ids)} tokens. Change the conversation or max_length."
            ) from error
        numbers: list[float] = output.outputs.data.float().reshape(-1).tolist()
        return numbers

    async def _pooled(self, token_ids: list[int]) -> Any:
        from vllm import PoolingParams
        from vllm.inputs.engine import tokens_input

        params = PoolingParams(task="classify", use_activation=False)  # by default vLLM gives a sigmoid
        outputs = self._llm.encode(tokens_input(token_ids), params, f"rm#{next(self._counter)}")
        return [output async for output in outputs][-1]

    async def close(self) -> None:
        """End vLLM's processes, and what is in flight with them; calling it again does nothing."""
        running, self._running, self._llm = self._running, None, None
        if running is not None:
            await running.close()

    def _arguments(self, is_cpu: bool) -> Mapping[str, Any]:
        """Return the arguments with the overrides for the head and for a CPU; runs in a thread."""
        args = dict(self._args)
        head = head_of(args["model"], checked="hf_overrides" not in args)
        self.labels = head.labels
        if head.overrides:
            args["hf_overrides"] = dict(head.overrides)
        if not is_cpu:
            return args
        args = {"enforce_eager": True, **args}  # compilation takes minutes on a CPU
        if args.get("dtype") == "auto":
            args["dtype"] = "float32"
        return with_cpu_cache(args, CPU_KV_CACHE_BYTES)


def head_of(model: str, *, checked: bool = True) -> Head:
    """Return the head of a checkpoint. If the config contradicts it, vLLM draws a random one or ends while loading.

    Args:
        model: a folder or a Hugging Face id.
        checked: False trusts the config.

    Raises:
        ConfigError: the checkpoint has no head with a name that vLLM reads.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
        stored = _stored(model) if checked else {}
        prefix = getattr(config, "value_head_prefix", "score")
        # The number of labels of a head that is one matrix named `score`; None for any other head.
        file = stored.get("score.weight")
        path = None if file is None else _path(model, file)
        if path is None:
            rows = None
        elif path.endswith(".safetensors"):
            from safetensors import safe_open

            with safe_open(path, "pt") as opened:
                rows = int(opened.get_slice("score.weight").get_shape()[0])
        else:
            rows = int(_torch_file(path)["score.weight"].shape[0])
    except Exception as error:  # invalid weights raise many types
        raise ConfigError(
            f"VLLMScorer: expected a sequence classifier's folder or Hugging Face id, got {model!r}: "
            f"{type(error).__name__}: {error}. Check the name."
        ) from error
    names = {int(index): str(name) for index, name in config.id2label.items()}
    if not checked:
        return Head(tuple(names[index] for index in sorted(names)), {})
    if not any(name.startswith(f"{head}.") for name in stored for head in _HEADS):
        other = f"one named {prefix!r}, as OpenRLHF may save it" if prefix not in _HEADS else "none"
        raise ConfigError(
            f"VLLMScorer: expected a checkpoint whose head is named `score` or `classifier`, got {other} in {model!r}: "
            "vLLM would draw a random one. Save it so, or use HFScorer, which reads OpenRLHF's."
        )
    overrides: dict[str, Any] = {}
    if rows is not None and rows != len(names):  # OpenRLHF's: one label, unsaid, and transformers takes two
        overrides["num_labels"] = rows
        names = {index: f"LABEL_{index}" for index in range(rows)}
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    architectures = list(config.architectures or ())
    if any(name.endswith(("ForSequenceClassification", "ForRewardModel")) for name in architectures):
        architecture = None  # vLLM knows the class
    else:  # another class, such as OpenRLHF's
        architecture = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    if rows is not None and architecture is not None:
        overrides["architectures"] = [architecture]
    return Head(tuple(names[index] for index in sorted(names)), overrides)


def _stored(model: str) -> dict[str, str]:
    """Return the name of each weight with the file that contains it."""
    for name in _FILES:
        path = _path(model, name)
        if path is None:
            continue
        if name.endswith(".json"):
            weights: dict[str, str] = json.loads(Path(path).read_text())["weight_map"]
            return weights
        if name.endswith(".safetensors"):
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                return dict.fromkeys(file.keys(), name)
        return dict.fromkeys(_torch_file(path), name)
    raise OSError(f"it holds none of {', '.join(_FILES)}")


def _path(model: str, name: str) -> str | None:
    from transformers.utils import cached_file

    found: str | None = cached_file(
        model, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return found


def _torch_file(path: str) -> Mapping[str, Any]:
    import torch

    found: Mapping[str, Any] = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    return found
