"""A causal language model with one slot of keys and values per running sequence, and the loading of new weights.

Shapes: N slots, B rows of one forward, T new tokens of a row (left-padded), L columns of a slot, K columns that a
forward reads, H heads, D width of a head. Position p of a sequence lives in column p of its slot; column L, which
nothing reads, takes what padding would write. So rows of any length share a forward, nothing is shifted or copied as
they grow, and a row's result does not depend on its neighbors.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentenv.core.engine import Tokenizer
from agentenv.engines.hf.torch_settings import NUM_TORCH_THREADS, disable_cudnn_attention
from agentenv.errors import ConfigError, EngineError, PromptTooLong

KeyValues = list[tuple[Tensor, Tensor]]
"""Per layer: keys and values [H, length, D] of one sequence."""

COLUMN_STEP = 128
ONE_THREAD_BELOW = 20_000_000
"""Parameters under which a CPU runs a model on one thread: its operations are too short to share. On two cores that
others used too, two threads waited for each other and gave 9 to 700 tokens/s where one gave 600 to 6,300."""
GROUPED_SDPA = "agentenv_grouped_sdpa"


def grouped_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As transformers' "sdpa", but decoding reads grouped keys in place: query heads of a group become query rows.

    That one copies keys and values once per query head whenever there is a mask, on every step.
    """
    (batch, num_heads, num_queries, _), num_groups = query.shape, key.shape[1]
    plain = num_queries == 1 and num_groups < num_heads and kwargs.get("position_bias") is None
    if not plain or attention_mask is None or attention_mask.shape[1] != 1:
        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output
    size, attend = num_heads // num_groups, torch.nn.functional.scaled_dot_product_attention
    grouped, mask = query.reshape(batch, num_groups, size, -1), attention_mask.expand(-1, -1, size, -1)
    mixed = attend(grouped, key, value, attn_mask=mask, scale=kwargs.get("scaling"))
    return mixed.reshape(batch, 1, num_heads, -1), None


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """The keys and values of all slots, in the form that a transformers model writes to and reads from."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.num_slots, self.num_columns = 0, 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Per layer: keys and values [N, H, L + 1, D]."""
        self._slots_B1, self._columns_BT, self._num_read, self._leading = torch.empty(0), torch.empty(0), 0, True

    def reserve(self, num_slots: int, num_columns: int) -> None:
        """Make room for that many slots and columns, keeping what is there."""
        if num_slots <= self.num_slots and num_columns <= self.num_columns:
            return
        if num_slots > self.num_slots:
            num_slots = max(num_slots, 2 * self.num_slots)
        if num_columns > self.num_columns:
            num_columns = -(-max(num_columns, self.num_columns * 5 // 4) // COLUMN_STEP) * COLUMN_STEP
        old_slots, old_columns = self.num_slots, self.num_columns
        self.num_slots, self.num_columns = max(num_slots, old_slots), max(num_columns, old_columns)
        for index, pair in self._layers.items():
            grown = self._empty(pair[0]), self._empty(pair[1])
            for new, old in zip(grown, pair, strict=True):
                new[:old_slots, :, :old_columns] = old[:, :, :old_columns]
            self._layers[index] = grown

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros, because a masked column is multiplied by 0 and must hold a number.
        return like.new_zeros(self.num_slots, like.shape[1], self.num_columns + 1, like.shape[3])

    def place(self, slots: Sequence[int], columns_BT: Tensor, num_read: int) -> None:
        """Set where the next forward pass writes, and that it reads the first `num_read` columns."""
        self._slots_B1 = torch.tensor(slots, device=columns_BT.device)[:, None]
        self._columns_BT, self._num_read = columns_BT, num_read
        self._leading = list(slots) == list(range(len(slots)))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Write one layer's new keys and values [B, H, T, D]; return those that rows may read [B, H, K, D]."""
        if layer_idx not in self._layers:
            self._layers[layer_idx] = self._empty(key_states), self._empty(value_states)
        kept = self._layers[layer_idx]
        for all_slots, new in zip(kept, (key_states, value_states), strict=True):
            all_slots[self._slots_B1, :, self._columns_BT] = new.transpose(1, 2)
        if self._leading:
            return tuple(states[: len(self._slots_B1), :, : self._num_read] for states in kept)
        return tuple(states[self._slots_B1[:, 0], :, : self._num_read] for states in kept)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns read beyond those of this forward's own tokens."""
        return self._num_read - self._columns_BT.shape[1]

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        """Columns read, and the first of them."""
        return self._num_read, 0

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of one slot to another; do nothing if `length` is 0."""
        for pair in self._layers.values() if length else ():
            for states in pair:
                states[target, :, :length] = states[source, :, :length]

    def wipe(self, slots: Sequence[int]) -> None:
        """Zero slots that may contain NaN, because a masked NaN would corrupt the slot's next sequence."""
        for pair in self._layers.values():
            for states in pair:
                states[list(slots)] = 0.0

    def save(self, slot: int, length: int) -> KeyValues:
        """Return a copy of the first `length` columns of a slot."""
        return [(k[slot, :, :length].clone(), v[slot, :, :length].clone()) for k, v in self._layers.values()]

    def load(self, slot: int, saved: KeyValues, length: int) -> None:
        """Put the first `length` saved columns into a slot."""
        for pair, copies in zip(self._layers.values(), saved, strict=True):
            for states, copy in zip(pair, copies, strict=True):
                states[slot, :, :length] = copy[:, :length]


class PrefixStore:
    """Keys and values of finished turns, one entry per episode; the oldest are dropped first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._kept: OrderedDict[str, tuple[list[int], KeyValues]] = OrderedDict()

    def put(self, episode: str, token_ids: list[int], saved: KeyValues) -> None:
        """Store the keys and values of `token_ids`."""
        self._pop(episode)
        self._kept[episode] = token_ids, saved
        self._num_tokens += len(token_ids)
        while self._num_tokens > self._max_tokens:
            self._pop(next(iter(self._kept)))

    def take(self, episode: str, prompt_token_ids: list[int]) -> tuple[int, KeyValues]:
        """Remove an episode's entry. Return the length of the prefix shared with the prompt, and the entry."""
        token_ids, saved = self._pop(episode)
        common = min(len(token_ids), len(prompt_token_ids) - 1)
        if prompt_token_ids[:common] != token_ids[:common]:
            pairs = enumerate(zip(token_ids, prompt_token_ids[:common], strict=False))
            common = next(i for i, (kept, asked) in pairs if kept != asked)
        return common, saved

    def clear(self) -> None:
        """Remove all entries."""
        self._kept.clear()
        self._num_tokens = 0

    def _pop(self, episode: str) -> tuple[list[int], KeyValues]:
        token_ids, saved = self._kept.pop(episode, ([], []))
        self._num_tokens -= len(token_ids)
        return token_ids, saved


class SlotModel:
    """A model and its slots; every method belongs to one thread."""

    def __init__(self, model: Any, *, device: str, dtype: str, max_length: int | None) -> None:
        if isinstance(model, str | Path):
            if device == "auto":
                device = "cuda" if torch.cuda.is_available() else "cpu"
            if dtype == "auto" and device == "cpu":
                dtype = "float32"
            try:
                model = AutoModelForCausalLM.from_pretrained(str(model), dtype=dtype).to(device)
            except Exception as error:
                raise ConfigError(
                    f"HFEngine: expected a causal language model in {str(model)!r}, got {error} "
                    "Change the model or the device."
                ) from error
        elif device != "auto" or dtype != "auto":
            model.to(*([device] if device != "auto" else []), *([getattr(torch, dtype)] if dtype != "auto" else []))
        self.model = model.eval()
        if model.device.type == "cuda":
            disable_cudnn_attention()
        if model.config.is_encoder_decoder or getattr(model, "_is_stateful", False):
            raise ConfigError(
                f"HFEngine: expected a causal model with plain key-value caches, got {type(model).__name__}. Use vLLM."
            )
        known: Any = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if known is None and max_length is None:
            raise ConfigError("HFEngine: expected a context length, got a model that names none. Pass max_length=...")
        if known is not None and max_length is not None and max_length > known:
            raise ConfigError(
                f"HFEngine: expected max_length <= {known}, the model's context, got {max_length}. "
                f"Lower it; --max_length {known} takes the place of a class's."
            )
        self.max_length = int(known if max_length is None else max_length)
        self._window = _window(model, self.max_length)
        AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
        AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
        model.set_attn_implementation(GROUPED_SDPA if getattr(model, "_supports_sdpa", False) else "eager")
        self._only_last = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.cache = SlotCache()
        is_small = model.device.type == "cpu" and model.num_parameters() < ONE_THREAD_BELOW
        self._num_threads = 1 if is_small and "OMP_NUM_THREADS" not in os.environ else NUM_TORCH_THREADS

    def session(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the worker thread must make all calls."""
        return torch.inference_mode()

    def set_num_threads(self) -> None:
        """Set the number of threads before a forward pass: a learner in this process sets its own between two."""
        torch.set_num_threads(self._num_threads)

    def check_prompt(self, prompt: Sequence[int], where: str, *, room: int = 1) -> None:
        """Check a prompt.

        Raises:
            PromptTooLong: it leaves no room for `room` tokens.
            EngineError: it is empty, or has ids that the model does not have.
        """
        if not prompt:
            raise EngineError(f"{where}: expected at least one prompt token, got none. Pass a prompt.")
        if len(prompt) + room > self.max_length:
            expected = "a prompt shorter than" if room else "at most"
            raise PromptTooLong(
                f"{where}: expected {expected} max_length={self.max_length}, got {len(prompt)} tokens. "
                "Shorten it or raise max_length."
            )
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            wrong = next(t for t in prompt if not 0 <= t < self.vocab_size)
            raise EngineError(
                f"{where}: expected token ids in [0, {self.vocab_size}), got {wrong}. Use the model's tokenizer."
            )

    def forward(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """Logits [B, V] after the last new token of each row; row i's tokens follow its first `starts[i]`."""
        num_new = max(map(len, token_ids))
        ends = [start + len(ids) for start, ids in zip(starts, token_ids, strict=True)]
        self.cache.reserve(max(slots) + 1, max(ends))
        pads = [num_new - len(ids) for ids in token_ids]
        rows = list(zip(pads, starts, ends, token_ids, strict=True))
        trash, device = self.cache.num_columns, self.model.device
        ids_BT = torch.tensor([[0] * pad + list(ids) for pad, _, _, ids in rows], device=device)
        columns = [[trash] * pad + list(range(start, end)) for pad, start, end, _ in rows]
        columns_BT = torch.tensor(columns, device=device)
        positions_BT = columns_BT.masked_fill(columns_BT == trash, 0)
        self.cache.place(slots, columns_BT, max(ends))
        # Additive, [B, 1, T, K]: what "sdpa" and "eager" both take, and transformers passes on untouched.
        columns_K = torch.arange(max(ends), device=device)
        hidden_BTK = columns_K > positions_BT[..., None]
        if self._window is not None:
            hidden_BTK |= columns_K <= positions_BT[..., None] - self._window
        mask = torch.zeros(hidden_BTK.shape, dtype=self.model.dtype, device=device)
        mask = mask.masked_fill_(hidden_BTK, torch.finfo(mask.dtype).min)
        inputs = {"input_ids": ids_BT, "attention_mask": mask[:, None], "position_ids": positions_BT}
        output = self.model(**inputs, past_key_values=self.cache, use_cache=True, **self._only_last)
        logits_BV: Tensor = output.logits[:, -1]
        return logits_BV

    def write_weights(self, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy new values into the model.

        Raises:
            ConfigError: a name or shape differs; nothing was written.
        """
        own = self.model.state_dict()
        for name, tensor in named_tensors:
            expected = tuple(own[name].shape) if name in own else None
            if expected != tuple(tensor.shape):
                found = f"shape {expected}" if expected is not None else "no such weight"
                raise ConfigError(
                    f"HFEngine.update_weights: expected the model's own weights, got {name!r} of shape "
                    f"{tuple(tensor.shape)} where the model has {found}. Send the names of model.state_dict()."
                )
        for name, tensor in named_tensors:
            own[name].copy_(tensor)


def _window(model: Any, max_length: int) -> int | None:
    """Return the sliding window of all layers; None if every layer attends to everything up to `max_length`."""
    name = type(model).__name__
    windows: set[int | None] = set()
    for layer in DynamicCache(config=model.config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ConfigError(
                f"HFEngine: expected layers of plain key-value caches, got {type(layer).__name__} in {name}. Use vLLM."
            )
        window = getattr(layer, "sliding_window", None)
        windows.add(window if window is not None and window < max_length else None)
    if len(windows) > 1:
        raise ConfigError(
            f"HFEngine: expected the same attention in all layers of {name} up to max_length={max_length}, got sliding "
            f"windows in some. Pass max_length={min(w for w in windows if w)} or less, or use vLLM."
        )
    return windows.pop() if windows else None


def eos_ids(model: Any, tokenizer: Tokenizer | None) -> tuple[int | None, frozenset[int]]:
    """Return the end-of-sequence id without a stop reason, and all ids from tokenizer, config and generation config."""
    found: list[int] = []
    for source in (tokenizer, model.config.get_text_config(), model.generation_config):
        ids = getattr(source, "eos_token_id", None)
        found += [ids] if isinstance(ids, int) else list(ids or ())
    return (found[0] if found else None), frozenset(found)
