"""What a causal language model says of action tokens: any of transformers', loaded, scored and checked in one place.

Shapes: B×T a micro-batch's tokens, n its action tokens, D hidden size, V vocabulary.

Padding stands right of a sequence and is never attended to by what counts, so no mask is passed: attention stays
plainly causal, which is its fastest form. In packed rows the positions begin anew, and transformers separates the
sequences by them. This, and how a model gets from hidden states to logits, is tried on a few tokens when
a model is opened.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from agentenv.errors import ConfigError
from agentenv.trainer.batch import MicroBatch
from agentenv.trainer.logprobs import MAX_LOGITS, Scores, score_tokens

PROBE_LENGTHS = (7, 5)
"""Tokens of the two sequences that a model is tried on."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference between two ways to the same log-probability that counts as rounding."""
GPU_MAX_LOGITS = 8 * MAX_LOGITS
"""A GPU has the memory, and wants products that keep it busy: of 110 tokens and Qwen's 152,000 logits they do not."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_log = logging.getLogger(__name__)


def pick_device(device: str | None) -> torch.device:
    """The named one; else this process's GPU where there is one, else the CPU."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def pick_dtype(param_dtype: str, device: torch.device) -> torch.dtype:
    """What to compute in. Weights that are trained are float32 in any case: bf16 and fp16 are autocast over them."""
    if param_dtype != "auto":
        return _DTYPES[param_dtype]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Matrix products in `dtype`; nothing where that is float32."""
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def be_deterministic() -> None:
    """Make this process's sums on a GPU the same in every run, which is slower; on a CPU they are."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


def open_model(
    path: str, *, head: bool = True, dtype: torch.dtype, device: torch.device, attention: str | None = None
) -> Any:
    """A causal model of transformers, or with `head` off what is under its output layer, without its dropout.

    The sampler has no dropout: with it, the ratio to what was sampled would not be 1. The dtype that the weights are
    stored in becomes the model's attribute `checkpoint_dtype`.

    Raises:
        ConfigError: there is no such model.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    kind = AutoModelForCausalLM if head else AutoModel
    try:
        config = AutoConfig.from_pretrained(path)
        for part in {id(c): c for c in (config, config.get_text_config())}.values():
            for name in [n for n, value in vars(part).items() if _is_dropout(n) and isinstance(value, float)]:
                setattr(part, name, 0.0)
        stored = config.get_text_config().dtype or torch.float32
        model = kind.from_pretrained(path, config=config, dtype=dtype, attn_implementation=attention)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"--pretrain: expected a causal language model in {path!r}, got {error} Change the model."
        ) from error
    model.checkpoint_dtype = getattr(torch, stored) if isinstance(stored, str) else stored
    return model.to(device)


def _is_dropout(name: str) -> bool:
    return "dropout" in name or name.endswith(("pdrop", "_drop"))


def best_attention(*, packed: bool, device: torch.device, dtype: torch.dtype) -> str | None:
    """FlashAttention for packed rows where it is installed: it never computes between sequences; None: the default."""
    from transformers.utils import is_flash_attn_2_available

    usable = packed and device.type == "cuda" and dtype != torch.float32
    return "flash_attention_2" if usable and is_flash_attn_2_available() else None


def backbone_states(backbone: Any, input_ids_BT: Tensor, position_ids_BT: Tensor | None) -> Tensor:
    """[B·T, D] the last hidden states; positions only of packed rows."""
    positions = {} if position_ids_BT is None else {"position_ids": position_ids_BT}
    states: Tensor = backbone(input_ids=input_ids_BT, use_cache=False, **positions).last_hidden_state
    return states.flatten(0, 1)


class TokenScorer(nn.Module):
    """A model and how to score tokens with it; a module, so that what wraps modules can wrap all of it."""

    def __init__(self, model: Any, *, dtype: torch.dtype, temperature: float = 1.0) -> None:
        """Take a causal model as it is, and try it.

        Args:
            model: of transformers.
            dtype: what to compute in.
            temperature: what episodes are sampled with.
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
                    "%s: expected logits that its output layer gives, got others by %.2g. The logits of all tokens are "
                    "computed, which takes more memory.", name, difference,
                )  # fmt: skip

    def score(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> Scores:
        """Log-probability and entropy of a micro-batch's action tokens, on the model's device."""
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
        """As `score`, in a tuple, where FSDP finds tensors; logits only of places that predict, a chunk at a time."""
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
        """V, as the output layer has it."""
        layer = self.model.get_output_embeddings() or self.model.get_input_embeddings()
        return int(layer.weight.shape[0])

    def _logits(self, states_CD: Tensor) -> Tensor:
        """Logits, with what Cohere, Granite, Falcon-H1 and Gemma do to them."""
        logits_CV: Tensor = self.model.get_output_embeddings()(states_CD)
        config = self.model.config.get_text_config()
        for name in ("logit_scale", "lm_head_multiplier"):
            logits_CV = logits_CV * (getattr(config, name, None) or 1.0)
        logits_CV = logits_CV / (getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return torch.tanh(logits_CV / cap) * cap if cap else logits_CV

    @torch.no_grad()
    def _probe_head(self) -> float:
        """How far log-probabilities by `forward` are from those of the model's own logits."""
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
    """Two sequences to try a model on; of small ids, which name no images."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(min(vocab_size, 256), (length,), generator=generator) for length in PROBE_LENGTHS]


@torch.no_grad()
def check_packing(backbone: Any, *, dtype: torch.dtype, vocab_size: int) -> None:
    """Refuse a model in which packed sequences see one another.

    Raises:
        ConfigError: the second of two packed sequences has other hidden states than alone.
    """
    ids, device = [part.to(backbone.device) for part in probe_ids(vocab_size)], backbone.device
    positions_1T = torch.cat([torch.arange(len(part), device=device) for part in ids])[None]
    was_training = backbone.training
    backbone.eval()
    try:
        with autocast(device, dtype):
            alone = backbone_states(backbone, ids[1][None], None).float()
            packed = backbone_states(backbone, torch.cat(ids)[None], positions_1T).float()[len(ids[0]) :]
        apart = float((packed - alone).abs().max() / alone.abs().max().clamp(min=1e-6))
    except TypeError:  # a model without position_ids
        apart = float("inf")
    backbone.train(was_training)
    if not apart < TOLERANCE[dtype]:
        raise ConfigError(
            f"--packing_samples: expected a model that keeps packed sequences apart, got {type(backbone).__name__} "
            f"with hidden states that differ by {apart:.2g} from those alone. Leave the flag out."
        )
