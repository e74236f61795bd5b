"""A sequence classifier of transformers: token ids to the raw number of one label, pooled where we say.

Legend: B sequences, T tokens of the longest, D width.

transformers pools the last token that is not `config.pad_token_id`: where that is the EOS too, as in many chat models,
a text that ends with EOS is scored without it, mask or no mask; and where there is none, batches are refused. Here the
position comes from the lengths alone, so no token's value and no neighbor in the batch changes a score.
"""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Iterator, Mapping
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import logging

from agentenv.errors import ConfigError, InfraError

_LOADING = threading.Lock()  # while transformers loads, it changes torch's defaults for the process
_RESERVED_POSITIONS = 2  # of RoBERTa's kind of encoders


class Classifier:
    """A loaded model in eval mode; one thread at a time.

    Models with a head named `score` (decoders, and what OpenRLHF trains) are pooled here, and their head computes in
    float32, as vLLM's does. Encoders with a head named `classifier` pool their first token themselves.
    """

    def __init__(self, model: str | PreTrainedModel, *, device: str, dtype: str, label: str | int | None) -> None:
        if device == "auto":
            self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        else:
            try:
                self.device = torch.empty(0, device=device).device
            except (RuntimeError, AssertionError, TypeError) as error:
                raise ConfigError(
                    f"HFScorer.device: expected a device that is here, got {device!r}: {error}"
                ) from error
        if isinstance(model, str):
            if dtype == "auto":  # the checkpoint's on an accelerator; on a CPU, bfloat16 is slow
                opened = _opened(model, torch.float32 if self.device.type == "cpu" else "auto")
            else:
                opened = _opened(model, getattr(torch, dtype))
        elif isinstance(model, PreTrainedModel):
            opened = model
        else:
            raise ConfigError(f"HFScorer: expected a folder, a name or a PreTrainedModel, got {type(model)}. Give one.")
        try:
            self.model: Any = opened.to(self.device).eval()
        except torch.OutOfMemoryError as error:
            raise InfraError(f"HFScorer: expected room for the model on {self.device}, got {error}") from error
        self.config = self.model.config
        names = [str(name) for _, name in sorted(self.config.id2label.items())]
        found = [index for index, name in enumerate(names) if label is not None and label in (index, name)]
        found = [0] if label is None and len(names) == 1 else found
        if len(found) != 1:
            raise ConfigError(
                f"HFScorer.label: expected one of the model's labels {names}, got {label!r}. "
                "Pass the one whose raw number is the score."
            )
        self.label = found[0]
        """Index of the score among the head's numbers."""
        head = getattr(self.model, "score", None)
        self._head: nn.Module | None = copy.deepcopy(head).float() if isinstance(head, nn.Module) else None
        pools_itself = isinstance(getattr(self.model, "classifier", None), nn.Module)
        if self._head is None and (self.config.is_encoder_decoder or not pools_itself):
            raise ConfigError(
                f"HFScorer: expected a decoder with a head `score` or an encoder with a head `classifier`, "
                f"got {type(self.model).__name__}. Use another model."
            )
        self.vocab_size: int = self.model.get_input_embeddings().num_embeddings
        # Any token works as padding if we pool; encoders may derive positions from it.
        pad = self.config.get_text_config().pad_token_id
        self._pad = pad if isinstance(pad, int) and 0 <= pad < self.vocab_size else 0
        self._turns_at: int | None = None
        """Length beyond which the rotary scaling changes; None if it never does."""
        if any(rope.get("rope_type", rope.get("type")) == "longrope" for rope in self._rope()):
            own = getattr(self.config.get_text_config(), "original_max_position_embeddings", None)
            known = [rope.get("original_max_position_embeddings") or own for rope in self._rope()]
            self._turns_at = next((length for length in known if length), None)

    @property
    def max_positions(self) -> int | None:
        """Number of positions of the model; None if unknown."""
        known: int | None = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return known if known is None or self._head is not None else known - _RESERVED_POSITIONS

    def free(self) -> None:
        """Release the weights and the memory of the device; nothing can be scored afterwards."""
        self.model = self._head = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _rope(self) -> list[Mapping[str, Any]]:
        """Return the rotary position parameters of the model and of each kind of layer."""
        config = self.config.get_text_config()
        found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        return [found, *(each for each in found.values() if isinstance(each, Mapping))]

    @torch.inference_mode()
    def score_batch(self, sequences: list[list[int]]) -> list[float]:
        """Return [B] the label's raw number for each non-empty sequence of ids."""
        is_long = [self._turns_at is not None and len(ids) > self._turns_at for ids in sequences]
        if len(set(is_long)) > 1:  # in one batch, all would be scaled like the longest
            long = iter(self.score_batch(list(compress(sequences, is_long))))
            short = iter(self.score_batch(list(compress(sequences, [not far for far in is_long]))))
            return [next(long if far else short) for far in is_long]
        lengths_B = torch.tensor([len(ids) for ids in sequences])
        longest = int(lengths_B.max())
        ids_BT = torch.tensor([[*ids, *[self._pad] * (longest - len(ids))] for ids in sequences])
        mask_BT = torch.arange(longest) < lengths_B[:, None]
        inputs = {"input_ids": ids_BT.to(self.device)}
        if not bool(mask_BT.all()):  # attention without a mask is faster
            inputs["attention_mask"] = mask_BT.long().to(self.device)
        if self._head is None:
            logits_BL: Tensor = self.model(**inputs).logits
        else:
            states_BTD: Tensor = self.model.base_model(**inputs, use_cache=False).last_hidden_state
            last_B = (lengths_B - 1).to(states_BTD.device)
            logits_BL = self._head(states_BTD[torch.arange(len(last_B), device=last_B.device), last_B].float())
        values: list[float] = logits_BL[:, self.label].float().tolist()
        return values


def _opened(path: str, dtype: torch.dtype | str) -> PreTrainedModel:
    """Load a model with all weights from the checkpoint.

    Raises:
        ConfigError: the model does not exist, or has no head, for which transformers would draw random weights.
    """
    try:
        with _LOADING, without_bars():
            config = AutoConfig.from_pretrained(path)
            if hasattr(config, "value_head_prefix"):  # OpenRLHF: one label, unsaid; saves the second reading
                config.num_labels = 1
            model, lacks = _read(path, config, dtype)
            if [key for key, stored, _ in lacks["mismatched_keys"] if stored[0] == 1] and config.num_labels != 1:
                config.num_labels = 1
                model, lacks = _read(path, config, dtype)
    except Exception as error:  # invalid weights and configs raise many types
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


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Turn off transformers' progress bars, which would overwrite the lines of a run, also from Ray actors."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _read(path: str, config: Any, dtype: torch.dtype | str) -> tuple[Any, Any]:
    prefix = getattr(config, "value_head_prefix", "score")
    renamed = None if prefix == "score" else {rf"^{re.escape(prefix)}\.": "score."}
    found: tuple[Any, Any] = AutoModelForSequenceClassification.from_pretrained(
        path, config=config, dtype=dtype, key_mapping=renamed, output_loading_info=True, ignore_mismatched_sizes=True
    )
    return found
