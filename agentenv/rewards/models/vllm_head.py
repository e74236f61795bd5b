"""The head of a checkpoint, as vLLM's server reads it: where the config contradicts it, vLLM draws a random one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.errors import ConfigError

_HEADS = ("score", "classifier")
_FILES = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a checkpoint; `overrides` tell vLLM what the config lacks."""

    labels: tuple[str, ...]
    overrides: Mapping[str, Any]
    """vLLM's `--hf-overrides`."""


def head_of(model: str) -> Head:
    """Return the head of a checkpoint, a folder or a Hugging Face id.

    Raises:
        ConfigError: the checkpoint has no head with a name that vLLM reads.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
        stored = _stored(model)
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
            f"vLLM: expected a sequence classifier's folder or Hugging Face id, got {model!r}: "
            f"{type(error).__name__}: {error}. Check the name."
        ) from error
    names = {int(index): str(name) for index, name in config.id2label.items()}
    if not any(name.startswith(f"{head}.") for name in stored for head in _HEADS):
        other = f"one named {prefix!r}, as OpenRLHF may save it" if prefix not in _HEADS else "none"
        raise ConfigError(
            f"vLLM: expected a checkpoint whose head is named `score` or `classifier`, got {other} in {model!r}: "
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
