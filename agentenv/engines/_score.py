"""Scoring in HFEngine: log-probabilities of tokens that are there already, by plain forward passes over pieces.

Shapes: T tokens of a sequence, C of them in one piece, V tokens of the vocabulary. Nothing of the slots is used: what
was sampled with them is checked by something else.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from agentenv.errors import EngineError

MAX_LOGITS = 1 << 25
"""C × V of one piece: 128 MiB in float32, some three times that while it is normalised."""
MAX_PIECE_TOKENS = 1024


@dataclass(slots=True, eq=False)
class ScoreJob:
    """One sequence on its way; all but the constructor belongs to the engine's worker thread."""

    model: Any
    token_ids: list[int]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[float]]
    logprobs: list[float] = field(default_factory=lambda: [math.nan])
    """float32[up to T] of the tokens scored so far."""
    cache: Any = None

    @property
    def done(self) -> bool:
        """Every token has its log-probability."""
        return len(self.logprobs) == len(self.token_ids)

    def restart(self) -> None:
        """Begin anew: the weights are others."""
        self.logprobs, self.cache = [math.nan], None

    def advance(self) -> None:
        """Score the next piece.

        Raises:
            EngineError: the logits are not finite.
        """
        if self.done:  # of one token: nothing comes before it
            return
        if self.cache is None:
            self.cache = DynamicCache(config=self.model.config)
        start, num = len(self.logprobs), self._piece_tokens()
        ids_1C = torch.tensor([self.token_ids[start - 1 : -1][:num]], device=self.model.device)
        next_C = torch.tensor(self.token_ids[start : start + num], device=self.model.device)
        output = self.model(input_ids=ids_1C, past_key_values=self.cache, use_cache=True)
        logprobs_CV = output.logits[0].float().log_softmax(-1)
        scored = logprobs_CV.gather(1, next_C[:, None])[:, 0].tolist()
        if not all(map(math.isfinite, scored)):
            raise EngineError("HFEngine.score: expected finite logits, got others. Check the weights.")
        self.logprobs += scored

    def _piece_tokens(self) -> int:
        vocab_size = self.model.get_input_embeddings().num_embeddings
        return int(max(1, min(MAX_PIECE_TOKENS, MAX_LOGITS // vocab_size)))
