"""Load causal language models of transformers, check them, and score action tokens with them.

Shapes: B×T a micro-batch's tokens, n its action tokens, D hidden size, V vocabulary; in attention T tokens of a row, H
heads, D width of a head.

Padding is right of a sequence, where causal attention never reads it, so no attention mask is passed; that is the
fastest form of attention. In packed rows, of several sequences, positions restart at 0. The way from hidden states to
logits is checked on a few tokens when a model is opened, and so is attention in packed rows.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentenv.engines.hf.torch_settings import disable_cudnn_attention
from agentenv.errors import ConfigError
from agentenv.training.algorithm.batch import MicroBatch
from agentenv.training.algorithm.logprobs import MAX_LOGITS, Scores, score_tokens

PROBE_LENGTHS = (7, 5)
"""Lengths of the two sequences for checks."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of equal log-probabilities that counts as rounding."""
GPU_MAX_LOGITS = 8 * MAX_LOGITS
"""A GPU has more memory and needs larger products: 110 tokens with Qwen's 152,000 logits do not keep it busy."""
PACKED_SDPA = "agentenv_packed_sdpa"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_log = logging.getLogger(__name__)


def pick_dtype(param_dtype: str, device: torch.device) -> torch.dtype:
    """Return the data type of the computation. Trained weights are always float32; bf16 and fp16 use autocast."""
    if param_dtype != "auto":
        return _DTYPES[param_dtype]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Return a context that computes matrix products in `dtype`; it does nothing for float32."""
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def open_model(
    path: str, *, head: bool = True, dtype: torch.dtype, device: torch.device, attention: str | None = None
) -> Any:
    """Load a causal model of transformers without dropout; with `head=False` without its output layer.

    The sampler does not use dropout; with it, ratios to sampled tokens would not be 1. The attribute `checkpoint_dtype`
    of the model is the dtype of the stored weights.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    kind = AutoModelForCausalLM if head else AutoModel
    try:
        config = AutoConfig.from_pretrained(path)
        for part in {id(c): c for c in (config, config.get_text_config())}.values():
            for name, value in list(vars(part).items()):
                if isinstance(value, float) and ("dropout" in name or name.endswith(("pdrop", "_drop"))):
                    setattr(part, name, 0.0)
        stored = config.get_text_config().dtype or torch.float32
        model = kind.from_pretrained(path, config=config, dtype=dtype, attn_implementation=attention)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"--model: expected a causal language model in {path!r}, got {error} Change the model."
        ) from error
    if device.type == "cuda":
        disable_cudnn_attention()
    model.checkpoint_dtype = getattr(torch, stored) if isinstance(stored, str) else stored
    return model.to(device)


def best_attention(*, packed: bool, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return FlashAttention for packed rows if it is installed, because it skips pairs of sequences; else None."""
    from transformers.utils import is_flash_attn_2_available

    usable = packed and device.type == "cuda" and dtype != torch.float32
    return "flash_attention_2" if usable and is_flash_attn_2_available() else None


def backbone_states(backbone: Any, input_ids_BT: Tensor, position_ids_BT: Tensor | None) -> Tensor:
    """Return [B·T, D], the last hidden states. Pass positions only for packed rows."""
    positions = {} if position_ids_BT is None else {"position_ids": position_ids_BT}
    states: Tensor = backbone(input_ids=input_ids_BT, use_cache=False, **positions).last_hidden_state
    return states.flatten(0, 1)


class TokenScorer(nn.Module):
    """A model that scores tokens. It is a module, so that FSDP can wrap it."""

    def __init__(self, model: Any, *, dtype: torch.dtype, temperature: float = 1.0) -> None:
        """Wrap a causal model and check its output layer.

        Args:
            model: a model of transformers.
            dtype: data type of the computation.
            temperature: sampling temperature of the episodes.
        """
        super().__init__()
        self.model = model
        self.device: torch.device = model.device
        self._dtype, self._temperature = dtype, temperature
        self._head_alone = model.get_output_embeddings() is not None
        if self._head_alone:
            difference = self._probe_head()
            self._head_alone = difference < TOLERANCE[dtype]
            if not self._head_alone:
                name = type(model).__name__
                _log.warning(
                    "%s: expected logits from its output layer, got a difference of %.2g. The logits of all tokens are "
                    "computed, which needs more memory.", name, difference,
                )  # fmt: skip

    def score(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> Scores:
        """Return log-probability and entropy of a micro-batch's action tokens, on the model's device."""
        position_ids_BT = micro.position_ids_BT if micro.packed else None
        logprobs_n, entropy_n = self(
            micro.input_ids_BT, position_ids_BT, micro.predicts_n, micro.token_ids_n, entropy_gradient=entropy_gradient
        )
        return Scores(logprobs_n, entropy_n)

    def forward(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor | None,
        predicts_n: Tensor,
        token_ids_n: Tensor,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the tensors of `score` in a tuple, for FSDP. Logits are computed in chunks of predicting places."""
        with autocast(self.device, self._dtype):
            if self._head_alone:
                states_nD = backbone_states(self.model.base_model, input_ids_BT, position_ids_BT)[predicts_n]
                head: Callable[[Tensor], Tensor] = self._logits
            else:
                positions = {} if position_ids_BT is None else {"position_ids": position_ids_BT}
                logits_BTV = self.model(input_ids=input_ids_BT, use_cache=False, **positions).logits
                states_nD, head = logits_BTV.flatten(0, 1)[predicts_n], nn.Identity()
            scores = score_tokens(
                head, states_nD, token_ids_n,
                vocab_size=self.vocab_size, temperature=self._temperature, entropy_gradient=entropy_gradient,
                max_logits=GPU_MAX_LOGITS if self.device.type == "cuda" else MAX_LOGITS,
            )  # fmt: skip
            return scores.logprobs_n, scores.entropy_n

    @property
    def vocab_size(self) -> int:
        """V of the output layer."""
        layer = self.model.get_output_embeddings() or self.model.get_input_embeddings()
        return int(layer.weight.shape[0])

    def _logits(self, states_CD: Tensor) -> Tensor:
        """Return logits, processed as in Cohere, Granite, Falcon-H1 and Gemma."""
        logits_CV: Tensor = self.model.get_output_embeddings()(states_CD)
        config = self.model.config.get_text_config()
        for name in ("logit_scale", "lm_head_multiplier"):
            logits_CV = logits_CV * (getattr(config, name, None) or 1.0)
        logits_CV = logits_CV / (getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return torch.tanh(logits_CV / cap) * cap if cap else logits_CV

    @torch.no_grad()
    def _probe_head(self) -> float:
        """Return the largest difference between log-probabilities of `forward` and of the model's own logits."""
        ids_1T = torch.cat(probe_ids(self.vocab_size))[None].to(self.device)
        places = torch.arange(ids_1T.shape[1] - 1, device=self.device)
        was_training = self.training
        self.eval()
        found, _ = self(ids_1T, None, places, ids_1T[0, 1:])
        self._head_alone = False
        plain, _ = self(ids_1T, None, places, ids_1T[0, 1:])
        self._head_alone = True
        self.train(was_training)
        return float((found - plain).abs().max())


def probe_ids(vocab_size: int) -> list[Tensor]:
    """Return two sequences of small ids, which are not image tokens, for checks."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(min(vocab_size, 256), (length,), generator=generator) for length in PROBE_LENGTHS]


# --- packed rows -----------------------------------------------------------------------------------------------------


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
