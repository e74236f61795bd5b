"""Log-probabilities and entropy of chosen tokens, without ever holding the logits of all of them.

Shapes: n action tokens, D hidden size, V vocabulary, C tokens of a chunk. The head is applied to the hidden states of
the places that predict an action token, C of them at a time, and again in the backward pass: so the peak is C·V
instead of n·V, and observations cost nothing. Gradients are those of the plain way, up to the order of the sum over
chunks.

Conventions are the sampler's (`engines._sampling`, and vLLM's processed_logprobs): float32, divided by the temperature
before the log-softmax, greedy rows at temperature 1. Top-p, top-k and min-p are not applied: a token's place in the
kept set is not recorded, so sample with top_p 1 where the ratio is to be exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentenv.engines._sampling import GREEDY_BELOW, MIN_TEMPERATURE

Head = Callable[[Tensor], Tensor]
"""Hidden states [C, D] to logits [C, V]: the model's output layer and whatever it does to logits after it."""

MAX_LOGITS = 1 << 24
"""C·V of one chunk: 64 MiB in float32, some three times that with what the backward pass keeps of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Of n tokens, float32[n] each."""

    logprobs_n: Tensor
    entropy_n: Tensor
    """Of the whole distribution that the token was chosen from, in nats; a constant unless a gradient was asked for."""


def applied_temperature(temperature: float) -> float:
    """What the sampler divides by: 1.0 where it is greedy, never under `MIN_TEMPERATURE` elsewhere."""
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
    """Log-probability of each chosen token, and the entropy it was chosen with.

    Args:
        head: from hidden states to logits; may have parameters of its own, which get their gradient.
        hidden_nD: hidden states of the places before the tokens: those that predict them.
        token_ids_n: int64[n] the tokens that were sampled.
        vocab_size: V, which sets the size of a chunk.
        temperature: as in SamplingParams.
        entropy_gradient: whether the entropy is part of the loss.
        max_logits: most logits at a time.
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
        empty_n = (
            head(hidden_nD).float().sum(-1)
        )  # of no token: still of the graph, so that every weight has a gradient
        return Scores(empty_n, empty_n.detach())
    logprobs, entropies = zip(*chunks, strict=True)
    return Scores(torch.cat(logprobs), torch.cat(entropies))


def _score_chunk(
    head: Head, hidden_CD: Tensor, token_ids_C: Tensor, divisor: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits_CV = head(hidden_CD).float()
    logits_CV = logits_CV - logits_CV.detach().amax(
        -1, keepdim=True
    )  # as log-softmax does: keeps the digits of small T
    if divisor != 1.0:
        logits_CV = logits_CV / divisor
    normaliser_C = logits_CV.logsumexp(-1)
    chosen_C = logits_CV.gather(1, token_ids_C[:, None])[:, 0]
    return chosen_C - normaliser_C, _entropy(logits_CV if entropy_gradient else logits_CV.detach(), normaliser_C)


def _entropy(logits_CV: Tensor, normaliser_C: Tensor) -> Tensor:
    """float32[C] -Σ p·log p; a token of logit -inf has probability 0 and adds nothing."""
    if not logits_CV.requires_grad:
        normaliser_C = normaliser_C.detach()
    probs_CV = (logits_CV - normaliser_C[:, None]).exp()
    finite_CV = logits_CV.clamp(min=torch.finfo(logits_CV.dtype).min)  # 0·-inf would be NaN
    return normaliser_C - (probs_CV * finite_CV).sum(-1)
