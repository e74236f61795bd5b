"""A sequence classifier of transformers: token ids to the raw number of one label, pooled where we say.

Legend: B sequences, T tokens of the longest, D width.

transformers pools the last token that is not `config.pad_token_id`: where that is the EOS too, as in many chat models,
a text that ends with EOS is scored without it, mask or no mask; and where there is none, batches are refused. Here the
position comes from the lengths alone, so no token's value and no neighbour in the batch changes a score.
"""

from __future__ import annotations

import copy
import re
import threading
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from agentenv.errors import ConfigError, InfraError

_LOADING = threading.Lock()  # while transformers loads, it changes torch's defaults for the process
_RESERVED_POSITIONS = 2  # of RoBERTa's kind of encoders


class Classifier:
    """A loaded model in eval mode; one thread at a time.

    Models with a head named `score` (decoders, and what OpenRLHF trains) are pooled here, and their head computes in
    float32, as vLLM's does. Encoders with a head named `classifier` pool their first token themselves.
    """

    def __init__(self, model: str | PreTrainedModel, *, device: str, dtype: str, label: str | int | None) -> None:
        self.device = _device(device)
        if isinstance(model, str):
            opened = _opened(model, _dtype(dtype, self.device))
        elif isinstance(model, PreTrainedModel):
            opened = model
        else:
            raise ConfigError(f"HFScorer: expected a folder, a name or a PreTrainedModel, got {type(model)}. Give one.")
        try:
            self.model: Any = opened.to(self.device).eval()
        except torch.OutOfMemoryError as error:
            raise InfraError(f"HFScorer: expected room for the model on {self.device}, got {error}") from error
        self.config = self.model.config
        self.label = self._label(label)
        self._head = self._own_head()
        self.vocab_size: int = self.model.get_input_embeddings().num_embeddings
        self._pad = self._pad_id()

    def _label(self, label: str | int | None) -> int:
        names = {int(index): str(name) for index, name in self.config.id2label.items()}
        if label is None and len(names) == 1:
            return 0
        found = [index for index, name in names.items() if label is not None and label in (index, name)]
        if len(found) != 1:
            raise ConfigError(
                f"HFScorer.label: expected one of the model's labels {list(names.values())}, got {label!r}. "
                "Name the one whose raw number is the score."
            )
        return found[0]

    def _own_head(self) -> nn.Module | None:
        head = getattr(self.model, "score", None)
        if isinstance(head, nn.Module):
            return copy.deepcopy(head).float()
        if self.config.is_encoder_decoder or not isinstance(getattr(self.model, "classifier", None), nn.Module):
            raise ConfigError(
                f"HFScorer: expected a decoder with a head `score` or an encoder with a head `classifier`, "
                f"got {type(self.model).__name__}. Use another model."
            )
        return None

    def _pad_id(self) -> int:
        """Any token does where we pool; encoders may tell positions by it."""
        pad = self.config.get_text_config().pad_token_id
        return pad if isinstance(pad, int) and 0 <= pad < self.vocab_size else 0

    @property
    def max_positions(self) -> int | None:
        """Most tokens that the model has positions for; None where it does not say."""
        known: int | None = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return known if known is None or self._head is not None else known - _RESERVED_POSITIONS

    def free(self) -> None:
        """Let go of the weights, and of the device's memory; nothing can be scored any more."""
        self.model = self._head = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def score_batch(self, sequences: list[list[int]]) -> list[float]:
        """[B] the label's raw number of each sequence of ids, none of which is empty."""
        lengths_B = torch.tensor([len(ids) for ids in sequences])
        longest = int(lengths_B.max())
        ids_BT = torch.tensor([[*ids, *[self._pad] * (longest - len(ids))] for ids in sequences])
        mask_BT = torch.arange(longest) < lengths_B[:, None]
        inputs = {"input_ids": ids_BT.to(self.device)}
        if not bool(mask_BT.all()):  # without a mask the attention is faster
            inputs["attention_mask"] = mask_BT.long().to(self.device)
        values: list[float] = self._logits_BL(inputs, lengths_B)[:, self.label].float().tolist()
        return values

    def _logits_BL(self, inputs: dict[str, Tensor], lengths_B: Tensor) -> Tensor:
        """[B, labels] without activation."""
        if self._head is None:
            encoded: Tensor = self.model(**inputs).logits
            return encoded
        states_BTD: Tensor = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        last_B = (lengths_B - 1).to(states_BTD.device)
        pooled_BD = states_BTD[torch.arange(len(last_B), device=last_B.device), last_B]
        logits: Tensor = self._head(pooled_BD.float())
        return logits


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(f"HFScorer.device: expected a device that is here, got {name!r}: {error}") from error


def _dtype(name: str, device: torch.device) -> torch.dtype | str:
    """`auto` is the checkpoint's on an accelerator and float32 on a CPU, where bfloat16 is slow."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _opened(path: str, dtype: torch.dtype | str) -> PreTrainedModel:
    """A checkpoint's model, whose weights are all from it.

    Raises:
        ConfigError: there is none, or it has no head, for which transformers would draw random weights.
    """
    try:
        with _LOADING:
            config = AutoConfig.from_pretrained(path)
            if hasattr(config, "value_head_prefix"):  # OpenRLHF: one label, unsaid; saves the second reading
                config.num_labels = 1
            model, lacks = _read(path, config, dtype)
            if [key for key, stored, _ in lacks["mismatched_keys"] if stored[0] == 1] and config.num_labels != 1:
                config.num_labels = 1
                model, lacks = _read(path, config, dtype)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"HFScorer: expected a sequence classifier's folder or Hugging Face id, got {path!r}: "
            f"{type(error).__name__}: {error}. Check the name."
        ) from error
    wrong = sorted({*lacks["missing_keys"], *(key for key, *_ in lacks["mismatched_keys"])})
    if wrong:
        raise ConfigError(
            f"HFScorer: expected a checkpoint with all weights of {type(model).__name__}, got {path!r} without "
            f"{', '.join(wrong[:5])}, and with {sorted(lacks['unexpected_keys'])[:5]}. Train it as a reward model."
        )
    return model


def _read(path: str, config: Any, dtype: torch.dtype | str) -> tuple[Any, Any]:
    prefix = getattr(config, "value_head_prefix", "score")
    renamed = None if prefix == "score" else {rf"^{re.escape(prefix)}\.": "score."}
    found: tuple[Any, Any] = AutoModelForSequenceClassification.from_pretrained(
        path, config=config, dtype=dtype, key_mapping=renamed, output_loading_info=True, ignore_mismatched_sizes=True
    )
    return found
