"""From logits to a finished generation: truncation, sampling, log-probabilities, stop strings.

Shapes: B rows, V tokens of the vocabulary. The conventions are vLLM 0.32's with `logprobs_mode=processed_logprobs`
(vllm/v1/sample/sampler.py, ops/topk_topp_sampler.py): log-probabilities are taken after temperature and truncation,
renormalized, in float32; greedy rows report the plain log-softmax, as if at temperature 1 and without truncation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from agentenv.core.engine import Tokenizer
from agentenv.core.types import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy. Others are raised to at least `MIN_TEMPERATURE`, as in vLLM."""
MIN_TEMPERATURE = 1e-2

MAX_PENDING_TOKENS = 8
"""Largest number of pending tokens of an incomplete character. UTF-8 needs four bytes; more never complete."""
PROMPT_TAIL = 5
"""Prompt tokens to decode as context, because some tokenizers treat the first token differently."""


def draw(
    logits_BV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], banned: Sequence[Collection[int]]
) -> tuple[Tensor, Tensor]:
    """Return sampled tokens, int64[B], and their log-probabilities, float32[B], NaN for rows with NaN logits.

    `uniforms` has one number in [0, 1) per row. A row's token depends only on its logits and its number, by the inverse
    of the cumulative distribution in float64. `banned` has the excluded tokens of each row.
    """
    logits_BV = logits_BV.float()
    pairs = [(row, token) for row, tokens in enumerate(banned) for token in tokens if token < logits_BV.shape[1]]
    if pairs:
        logits_BV = logits_BV.clone()
        logits_BV[tuple(torch.tensor(pairs, device=logits_BV.device).T)] = -torch.inf
    greedy = [p.temperature < GREEDY_BELOW for p in params]  # these take the most likely token
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
    tokens_B = most_likely_B
    if not all(greedy):
        cumulative_BV = logprobs_BV.exp().double().cumsum(-1)
        points_B = torch.tensor(uniforms, dtype=torch.float64, device=logprobs_BV.device) * cumulative_BV[:, -1]
        # right=True skips tokens of probability 0; the clamp only matters for NaN logits.
        drawn_B = torch.searchsorted(cumulative_BV, points_B[:, None], right=True)[:, 0]
        drawn_B = drawn_B.clamp_(max=logprobs_BV.shape[1] - 1)
        greedy_B = torch.tensor(greedy, device=drawn_B.device)
        tokens_B = drawn_B if most_likely_B is None else torch.where(greedy_B, most_likely_B, drawn_B)
    assert tokens_B is not None
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def forbid(logits_BV: Tensor, legal: Sequence[Tensor | None]) -> Tensor:
    """Return logits with -inf for the tokens that a row's bool[V] does not allow; None allows all."""
    logits_BV = logits_BV.float().clone()
    for row, mask_V in enumerate(legal):
        if mask_V is not None:
            logits_BV[row].masked_fill_(~mask_V.to(logits_BV.device), -torch.inf)
    return logits_BV


def truncate(logits_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return logits after min-p, top-k and top-p. Dropped tokens are -inf; ties with the k-th token are kept."""
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
    """Detects stop strings in a generation, decoding each token once.

    Special tokens count as text. Characters that are split over tokens are completed first. A string is detected with
    the token that completes it; of several, the one that ends first. As in vLLM, the first `min_tokens` tokens are not
    searched.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._stop, self._min_tokens = tokenizer, sampling.stop, sampling.min_tokens
        self._keep = max(map(len, sampling.stop)) - 1
        self._window = list(prompt_token_ids[-PROMPT_TAIL:])
        self._num_read, self._num_seen, self._tail = len(self._window), 0, ""

    def push(self, token_id: int) -> str | None:
        """Return the stop string that this token completes, or None."""
        self._num_seen += 1
        self._window.append(token_id)
        before = self._tokenizer.decode(self._window[: self._num_read], skip_special_tokens=False)
        after = self._tokenizer.decode(self._window, skip_special_tokens=False)
        new = ""
        if not after.endswith("�") or len(self._window) - self._num_read >= MAX_PENDING_TOKENS:
            new = after[len(before) :]
            self._window = self._window[self._num_read :]
            self._num_read = len(self._window)
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
