"""A sequence classifier of transformers: token ids to the raw number of one label, pooled where we say.

Legend: B sequences, F families of them, T tokens of the longest, D width.

transformers pools the last token that is not `config.pad_token_id`: where that is the EOS too, as in many chat models,
a text that ends with EOS is scored without it, mask or no mask; and where there is none, batches are refused. Here the
position comes from the lengths alone, so no token's value and no neighbour in the batch changes a score.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
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
from agentenv.rewards.models._model import label_index
from agentenv.rewards.models.batching import batches
from agentenv.rewards.models.prefixes import LEAST_SAVED, Family, families

_LOADING = threading.Lock()  # while transformers loads, it changes torch's defaults for the process
_FULL = "full_attention"
_WINDOWS = ("window_size", "keep_window_size", "attention_chunk_size")
"""How configs name a window that counts places in a batch, padding and all, and that short probes do not show."""
_MOST_SEEN = 8192
"""Tokens whose keys and values are held at once: each sequence has its own copy of what it shares."""
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
        names = [str(name) for _, name in sorted(self.config.id2label.items())]
        self.label = label_index("HFScorer", names, label)
        self._head = self._own_head()
        self.vocab_size: int = self.model.get_input_embeddings().num_embeddings
        self._pad = self._pad_id()
        self._turns_at = self._turn()
        self.shares = self._may_share() and self._shares_rightly()
        """Whether what sequences begin with alike is computed once: in float32 on a CPU, where the model lets us."""

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

    def _may_share(self) -> bool:
        """Whether all that a token sees is keys and values, at the positions that we say."""
        config = self.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        windowed = getattr(config, "sliding_window", None) is not None if kinds is None else set(kinds) != {_FULL}
        windowed |= any(getattr(config, name, None) is not None for name in _WINDOWS)
        takes = inspect.signature(self.model.base_model.forward).parameters if self._head is not None else {}
        is_plain = self.device.type == "cpu" and self.model.dtype == torch.float32 and not windowed
        is_plain &= not {"longrope", "dynamic"} & self._rope_types()  # they turn by the longest that they see
        return is_plain and {"past_key_values", "position_ids", "attention_mask"} <= set(takes)

    def _rope(self) -> list[Mapping[str, Any]]:
        """How positions are turned, of all layers or of each kind of them; none where they are not."""
        config = self.config.get_text_config()
        found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        return [found, *(each for each in found.values() if isinstance(each, Mapping))]

    def _rope_types(self) -> set[Any]:
        return {rope.get("rope_type", rope.get("type")) for rope in self._rope()}

    def _turn(self) -> int | None:
        """The longest length at which positions are turned one way, and longer ones another; None: all the same."""
        if "longrope" not in self._rope_types():
            return None
        config = self.config.get_text_config()
        own = getattr(config, "original_max_position_embeddings", None)
        known = [rope.get("original_max_position_embeddings") or own for rope in self._rope()]
        return next((length for length in known if length), None)

    @torch.inference_mode()
    def _shares_rightly(self) -> bool:
        """Whether the model gives with what it shared what it gives without; it is asked, since caches differ."""
        tokens = [index % self.vocab_size for index in range(1, 24)]
        probes = [tokens[:12], [*tokens[:9], 1, 2], tokens[:10], [*tokens[12:17], 3], [*tokens[12:17], 4, 5, 6]]
        try:
            shared = self._kin_values(probes, [Family(9, (0, 1, 2)), Family(5, (3, 4))])
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError):
            return False  # its cache is another kind
        alone = self.score_whole(probes)
        return all(abs(shared[at] - value) <= 1e-4 * max(1.0, abs(value)) for at, value in enumerate(alone))

    @torch.inference_mode()
    def score_batch(self, sequences: list[list[int]]) -> list[float]:
        """[B] the label's raw number of each sequence of ids, none of which is empty."""
        kin = families(sequences) if len(sequences) > 1 and self._head is not None else []
        if sum(family.num_saved for family in kin) < LEAST_SAVED or not self.shares:
            return self.score_whole(sequences)
        found = self._kin_values(sequences, kin)
        rest = [index for index in range(len(sequences)) if index not in found]
        if rest:
            found |= zip(rest, self.score_whole([sequences[index] for index in rest]), strict=True)
        return [found[index] for index in range(len(sequences))]

    @torch.inference_mode()
    def score_whole(self, sequences: list[list[int]]) -> list[float]:
        """[B] the same, with nothing shared."""
        is_long = [self._turns_at is not None and len(ids) > self._turns_at for ids in sequences]
        if len(set(is_long)) > 1:  # together, all would be turned as the longest is
            long = iter(self.score_whole(list(compress(sequences, is_long))))
            short = iter(self.score_whole(list(compress(sequences, [not far for far in is_long]))))
            return [next(long if far else short) for far in is_long]
        ids_BT, mask_BT = self._padded(sequences)
        lengths_B = mask_BT.sum(1)
        inputs = {"input_ids": ids_BT.to(self.device), **self._masked(mask_BT)}
        if self._head is None:
            logits_BL: Tensor = self.model(**inputs).logits
        else:
            logits_BL = self._pooled_BL(self.model.base_model(**inputs, use_cache=False), lengths_B)
        values: list[float] = logits_BL[:, self.label].float().tolist()
        return values

    def _kin_values(self, sequences: list[list[int]], kin: list[Family]) -> dict[int, float]:
        """By index, of the sequences in families: first what each family shares, then what follows it."""
        ids_FT, mask_FT = self._padded([sequences[family.indices[0]][: family.num_shared] for family in kin])
        told = self.model.base_model(input_ids=ids_FT, **self._masked(mask_FT), use_cache=True)
        owned = [(index, place) for place, family in enumerate(kin) for index in family.indices]
        ends = [sequences[index][kin[place].num_shared :] for index, place in owned]
        found: dict[int, float] = {}
        most = max(1, _MOST_SEEN // (mask_FT.shape[1] + max(map(len, ends))))
        for batch in batches([len(end) for end in ends], most, _MOST_SEEN):
            owners_B = torch.tensor([owned[at][1] for at in batch])
            cache = copy.deepcopy(told.past_key_values)
            cache.batch_select_indices(owners_B)
            ids_BT, mask_BT = self._padded([ends[at] for at in batch])
            before_B = mask_FT.sum(1)[owners_B]
            states = self.model.base_model(
                input_ids=ids_BT,
                **self._masked(torch.cat([mask_FT[owners_B], mask_BT], dim=1)),
                position_ids=(before_B[:, None] + torch.arange(ids_BT.shape[1])) * mask_BT,  # of padding, none too high
                past_key_values=cache,
                use_cache=True,
            )
            values = self._pooled_BL(states, mask_BT.sum(1))[:, self.label].tolist()
            found |= zip((owned[at][0] for at in batch), values, strict=True)
        return found

    def _padded(self, sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
        """int64[B, T] the ids, and bool[B, T] where there are any."""
        lengths_B = torch.tensor([len(ids) for ids in sequences])
        longest = int(lengths_B.max())
        ids_BT = torch.tensor([[*ids, *[self._pad] * (longest - len(ids))] for ids in sequences])
        return ids_BT, torch.arange(longest) < lengths_B[:, None]

    def _masked(self, mask_BT: Tensor) -> dict[str, Tensor]:
        """Nothing where all is seen: without a mask the attention is faster."""
        return {} if bool(mask_BT.all()) else {"attention_mask": mask_BT.long().to(self.device)}

    def _pooled_BL(self, output: Any, lengths_B: Tensor) -> Tensor:
        """[B, labels] without activation, of the last token of each."""
        assert self._head is not None
        states_BTD: Tensor = output.last_hidden_state
        last_B = (lengths_B - 1).to(states_BTD.device)
        logits: Tensor = self._head(states_BTD[torch.arange(len(last_B), device=last_B.device), last_B].float())
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
        with _LOADING, _no_bars():
            config = AutoConfig.from_pretrained(path)
            if hasattr(config, "value_head_prefix"):  # OpenRLHF: one label, unsaid; saves the second reading
                config.num_labels = 1
            model, lacks = _read(path, config, dtype)
            if [key for key, stored, _ in lacks["mismatched_keys"] if stored[0] == 1] and config.num_labels != 1:
                config.num_labels = 1
                model, lacks = _read(path, config, dtype)
    except Exception as error:  # of files that are no weights, and of configs that make no model, there are many
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
def _no_bars() -> Iterator[None]:
    """Without transformers' progress bars, which would be drawn over a run's own lines, here and from Ray's actors."""
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
