"""Attention in packed rows: several sequences in one row, with positions that restart at 0.

Shapes: T tokens of a row, H heads, D width of a head.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentenv.errors import ConfigError
from agentenv.training.learner.scoring import TOLERANCE, autocast, backbone_states, probe_ids

PACKED_SDPA = "agentenv_packed_sdpa"


def packed_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As transformers' "sdpa", one sequence of a packed row [1, H, T, D] after the other, without a mask of T × T."""
    position_ids_1T = kwargs.get("position_ids")
    lengths = [] if attention_mask is not None or position_ids_1T is None else _lengths(position_ids_1T)
    if len(lengths) < 2:
        whole: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return whole
    parts = zip(*(torch.split(states, lengths, 2) for states in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, *part, None, **kwargs)[0] for part in parts], 1), None


def packed_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return no mask where `packed_sdpa` needs none, otherwise that of transformers' "sdpa".

    Windows shorter than the row, masks of the caller and masks that a model adds to the causal one are needed.
    """
    window = kwargs.get("local_size")
    is_long = window is not None and kwargs["kv_length"] > window
    if is_long or kwargs.get("use_vmap") or kwargs.get("attention_mask") is not None:
        masked: Tensor | None = sdpa_mask(*args, **kwargs)
        return masked
    return None


@functools.lru_cache(maxsize=2)  # all layers of a forward pass ask with the same tensor
def _lengths(position_ids_1T: Tensor) -> list[int]:
    """Return the lengths of the sequences of a row; none for several rows, which are not packed."""
    if len(position_ids_1T) > 1:
        return []
    starts = (position_ids_1T[0] == 0).nonzero()[:, 0].tolist()
    return [end - start for start, end in zip(starts, [*starts[1:], position_ids_1T.shape[1]], strict=True)]


def separate_packed(model: Any, *, dtype: torch.dtype) -> None:
    """Set the fastest attention with which a model of transformers keeps packed sequences apart.

    Raises:
        ConfigError: the second of two packed sequences has other hidden states than alone.
    """
    AttentionInterface.register(PACKED_SDPA, packed_sdpa)
    AttentionMaskInterface.register(PACKED_SDPA, packed_mask)
    if model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation():
        model.set_attn_implementation(PACKED_SDPA)
        if _distance(model, dtype) < TOLERANCE[dtype]:
            return
        model.set_attn_implementation("sdpa")
    if not (apart := _distance(model, dtype)) < TOLERANCE[dtype]:
        raise ConfigError(
            f"--packing_samples: expected a model that separates packed sequences, got {type(model).__name__} "
            f"with hidden states that differ by {apart:.2g} from those alone. Leave the flag out."
        )


@torch.no_grad()
def _distance(model: Any, dtype: torch.dtype) -> float:
    """Return by how much the hidden states of a packed sequence differ from those alone, relative to their size."""
    backbone, device = model.base_model, model.device
    ids = [part.to(device) for part in probe_ids(backbone.get_input_embeddings().num_embeddings)]
    positions_1T = torch.cat([torch.arange(len(part), device=device) for part in ids])[None]
    was_training = backbone.training
    backbone.eval()
    try:
        with autocast(device, dtype):
            alone = backbone_states(backbone, ids[1][None], None).float()
            packed = backbone_states(backbone, torch.cat(ids)[None], positions_1T).float()[len(ids[0]) :]
        return float((packed - alone).abs().max() / alone.abs().max().clamp(min=1e-6))
    except TypeError:  # a model without position_ids
        return float("inf")
    finally:
        backbone.train(was_training)
