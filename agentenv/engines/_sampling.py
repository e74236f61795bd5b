"""The arithmetic between logits and a finished generation: truncation, drawing, log-probabilities, stop strings.

Shapes: B rows, V tokens of the vocabulary. The conventions are vLLM 0.32's with `logprobs_mode=processed_logprobs`
(vllm/v1/sample/sampler.py, ops/topk_topp_sampler.py): log-probabilities are taken after temperature and truncation,
renormalised, in float32; greedy rows report the plain log-softmax, as if at temperature 1 and without truncation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from agentenv.agent import Tokenizer
from agentenv.types import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy; those up to `MIN_TEMPERATURE` are raised to it, as vLLM does."""
MIN_TEMPERATURE = 1e-2

MAX_PENDING_TOKENS = 8
"""Tokens held back while a character is incomplete; UTF-8 needs four bytes, so more are bytes that never complete."""
PROMPT_TAIL = 5
"""Prompt tokens decoded along, for tokenizers that treat the first token of a text differently."""


def is_greedy(sampling: SamplingParams) -> bool:
    """The most likely token is taken."""
    return sampling.temperature < GREEDY_BELOW


def draw(
    logits_BV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], banned: Sequence[Collection[int]]
) -> tuple[Tensor, Tensor]:
    """The sampled tokens, int64[B], and their log-probabilities, float32[B]; those are NaN where a row's logits are.

    `uniforms` holds one number in [0, 1) per row, and a row's token depends on its own logits and number alone: the
    inverse of the cumulative distribution, summed in float64, is read at it. `banned` holds each row's dropped tokens.
    """
    logits_BV = logits_BV.float()
    pairs = [(row, token) for row, tokens in enumerate(banned) for token in tokens if token < logits_BV.shape[1]]
    if pairs:
        logits_BV = logits_BV.clone()
        logits_BV[tuple(torch.tensor(pairs, device=logits_BV.device).T)] = -torch.inf
    greedy = [is_greedy(p) for p in params]
    most_likely_B = logits_BV.argmax(-1) if any(greedy) else None
    temperatures = [1.0 if g else max(p.temperature, MIN_TEMPERATURE) for p, g in zip(params, greedy, strict=True)]
    if any(t != 1.0 for t in temperatures):
        logits_BV = logits_BV / torch.tensor(temperatures, device=logits_BV.device)[:, None]
    cut = [i for i, p in enumerate(params) if not greedy[i] and (p.top_p < 1.0 or p.top_k > 0 or p.min_p > 0.0)]
    if cut:
        logits_BV = logits_BV.index_copy(
            0, torch.tensor(cut, device=logits_BV.device), truncate(logits_BV[cut], [params[i] for i in cut])
        )
    logprobs_BV = logits_BV.log_softmax(-1)
    tokens_B = most_likely_B if all(greedy) else _invert(logprobs_BV, uniforms)
    assert tokens_B is not None
    if most_likely_B is not None and not all(greedy):
        tokens_B = torch.where(torch.tensor(greedy, device=tokens_B.device), most_likely_B, tokens_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def _invert(logprobs_BV: Tensor, uniforms: Sequence[float]) -> Tensor:
    cumulative_BV = logprobs_BV.exp().double().cumsum(-1)
    points_B1 = torch.tensor(uniforms, dtype=torch.float64, device=logprobs_BV.device)[:, None] * cumulative_BV[:, -1:]
    # right=True passes over tokens of probability 0; the clamp only matters where the logits are NaN.
    return torch.searchsorted(cumulative_BV, points_B1, right=True)[:, 0].clamp_(max=logprobs_BV.shape[1] - 1)


def truncate(logits_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The logits with min-p, then top-k, then top-p applied: dropped tokens are -inf. Ties with the k-th are kept."""
    device, vocab_size = logits_BV.device, logits_BV.shape[1]
    if any(p.min_p > 0.0 for p in params):
        min_p_B1 = torch.tensor([p.min_p for p in params], device=device)[:, None]
        probs_BV = logits_BV.softmax(-1)
        logits_BV = logits_BV.masked_fill(probs_BV < probs_BV.amax(-1, keepdim=True) * min_p_B1, -torch.inf)
    if all(p.top_k <= 0 and p.top_p >= 1.0 for p in params):
        return logits_BV
    sorted_BV, order_BV = logits_BV.sort(-1)
    kth = [vocab_size - (min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size) for p in params]
    smallest_B1 = sorted_BV.gather(1, torch.tensor(kth, device=device)[:, None])
    sorted_BV = sorted_BV.masked_fill(sorted_BV < smallest_B1, -torch.inf)
    if any(p.top_p < 1.0 for p in params):
        top_p_B1 = torch.tensor([p.top_p for p in params], device=device)[:, None]
        dropped_BV = sorted_BV.softmax(-1).cumsum(-1) <= 1 - top_p_B1
        dropped_BV[:, -1] = False
        sorted_BV = sorted_BV.masked_fill(dropped_BV, -torch.inf)
    return torch.empty_like(logits_BV).scatter_(1, order_BV, sorted_BV)


class StopStrings:
    """Watches one generation for its stop strings, decoding each token once.

    Special tokens count as text. A character split over tokens is waited for. A string is found with the token that
    completes it; of several, the one that ends first. As in vLLM, nothing is looked for in the first `min_tokens`
    tokens.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._stop, self._min_tokens = tokenizer, sampling.stop, sampling.min_tokens
        self._keep = max(map(len, sampling.stop)) - 1
        self._window = list(prompt_token_ids[-PROMPT_TAIL:])
        self._num_read, self._num_seen, self._tail = len(self._window), 0, ""

    def push(self, token_id: int) -> str | None:
        """The stop string that this token completes."""
        self._num_seen += 1
        self._window.append(token_id)
        new = self._new_text()
        text, start = self._tail + new, len(self._tail)
        self._tail = text[-self._keep :] if self._keep else ""
        if not new or self._num_seen <= self._min_tokens:
            return None
        best, best_end = None, len(text) + 1
        for stop in self._stop:
            at = text.find(stop, max(0, start - len(stop) + 1))
            if at >= 0 and at + len(stop) < best_end:
                best, best_end = stop, at + len(stop)
        return best

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._window[: self._num_read], skip_special_tokens=False)
        after = self._tokenizer.decode(self._window, skip_special_tokens=False)
        num_pending = len(self._window) - self._num_read
        if after.endswith("�") and num_pending < MAX_PENDING_TOKENS:
            return ""
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        return after[len(before) :]
