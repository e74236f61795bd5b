"""Log-probabilities and entropy of given tokens, without the logits of all of them in memory.

Shapes: n action tokens, D hidden size, V vocabulary, C tokens of a chunk. The head is applied to the hidden states of
the places that predict an action token, in chunks of C, and again in the backward pass. So the peak is C·V instead of
n·V, and observations cost nothing. Gradients equal those of the direct computation, up to the order of summation.

Conventions are those of `engines.hf.sampling` and of vLLM's processed_logprobs: float32, divided by the temperature
before the log-softmax, greedy rows at temperature 1. Top-p, top-k and min-p are not applied, because the set of kept
tokens is not recorded; sample with top_p 1 for exact ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentenv.engines.hf.sampling import GREEDY_BELOW, MIN_TEMPERATURE

Head = Callable[[Tensor], Tensor]
"""Function from hidden states [C, D] to logits [C, V]: the model's output layer and its processing of logits."""

MAX_LOGITS = 1 << 24
"""C·V of a chunk: 64 MiB in float32, about three times that with the backward pass."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Log-probabilities and entropies of n tokens, float32[n] each."""

    logprobs_n: Tensor
    entropy_n: Tensor
    """Entropy of the token's distribution in nats, without gradient unless `entropy_gradient` was set."""


def applied_temperature(temperature: float) -> float:
    """Return the sampler's divisor of logits: 1.0 if it is greedy, otherwise at least `MIN_TEMPERATURE`."""
    return 1.0 if temperature < GREEDY_BELOW else max(temperature, MIN_TEMPERATURE)


def score_tokens(
    head: Head,
    hidden_nD: Tensor,
    token_ids_n: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    max_logits: int = MAX_LOGITS,
) -> Scores:
    """Return the log-probability of each token and the entropy of its distribution.

    Args:
        head: function from hidden states to logits; its parameters get gradients.
        hidden_nD: hidden states of the places that predict the tokens.
        token_ids_n: int64[n] the sampled tokens.
        vocab_size: V, which determines the size of a chunk.
        temperature: as in SamplingParams.
        entropy_gradient: True if the entropy is part of the loss.
        max_logits: largest C·V of a chunk.
    """
    divisor, size = applied_temperature(temperature), max(1, max_logits // vocab_size)
    chunks: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(token_ids_n), size):
        args = (head, hidden_nD[start : start + size], token_ids_n[start : start + size], divisor, entropy_gradient)
        if torch.is_grad_enabled():
            chunks.append(checkpoint(_score_chunk, *args, use_reentrant=False))
        else:
            chunks.append(_score_chunk(*args))
    if not chunks:
        empty_n = head(hidden_nD).float().sum(-1)  # part of the graph, so that every weight gets a gradient
        return Scores(empty_n, empty_n.detach())
    logprobs, entropies = zip(*chunks, strict=True)
    return Scores(torch.cat(logprobs), torch.cat(entropies))


def _score_chunk(
    head: Head, hidden_CD: Tensor, token_ids_C: Tensor, divisor: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits_CV = head(hidden_CD).float()
    # As log-softmax does; otherwise a small temperature costs digits.
    logits_CV = logits_CV - logits_CV.detach().amax(-1, keepdim=True)
    if divisor != 1.0:
        logits_CV = logits_CV / divisor
    normalizer_C = logits_CV.logsumexp(-1)
    chosen_C = logits_CV.gather(1, token_ids_C[:, None])[:, 0]
    logprobs_C = chosen_C - normalizer_C
    if not entropy_gradient:
        logits_CV, normalizer_C = logits_CV.detach(), normalizer_C.detach()
    probs_CV = (logits_CV - normalizer_C[:, None]).exp()
    # The entropy is -Σ p·log p; a token with logit -inf adds nothing.
    finite_CV = logits_CV.clamp(min=torch.finfo(logits_CV.dtype).min)  # 0·-inf would be NaN
    return logprobs_C, normalizer_C - (probs_CV * finite_CV).sum(-1)
