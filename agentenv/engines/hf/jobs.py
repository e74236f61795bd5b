"""Requests and outcomes between event loops and the worker thread of HFEngine.

A score is made of forward passes over pieces of a sequence. Slots are not used, so that scores are an independent check
of sampling. Shapes: T tokens of a sequence, C tokens of a piece, V tokens of the vocabulary.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentenv.core.types import Completion, SamplingParams
from agentenv.errors import EngineError

if TYPE_CHECKING:
    from agentenv.engines.constraints import GrammarWalk
    from agentenv.engines.hf.sampling import StopStrings


MAX_LOGITS = 1 << 25
"""C × V of a piece: 128 MiB in float32, about three times that during log-softmax."""
MAX_PIECE_TOKENS = 1024


@dataclass(slots=True, eq=False)
class GenerationJob:
    """A generation in progress. Its slot is its index in the running batch."""

    token_ids: list[int]
    """The prompt and the sampled tokens."""
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    episode: str
    """Key of its cached prefix; empty if the request id has no turn."""
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    rng: random.Random
    stop_strings: StopStrings | None
    walk: GrammarWalk | None
    num_prompt: int
    num_computed: int = 0
    """Number of tokens whose keys and values are in the slot."""
    num_cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class ScoreJob:
    """A sequence to score. Only the constructor may run outside the engine's worker thread."""

    model: Any
    token_ids: list[int]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[float]]
    logprobs: list[float] = field(default_factory=lambda: [math.nan])
    """Log-probabilities of the tokens scored so far."""
    cache: Any = None

    @property
    def done(self) -> bool:
        """True if every token is scored."""
        return len(self.logprobs) == len(self.token_ids)

    def restart(self) -> None:
        """Start again after new weights."""
        self.logprobs, self.cache = [math.nan], None

    def advance(self) -> None:
        """Score the next piece.

        Raises:
            EngineError: the logits are not finite.
        """
        import torch
        from transformers import DynamicCache

        if self.done:  # a single token has no context
            return
        if self.cache is None:
            self.cache = DynamicCache(config=self.model.config)
        vocab_size = self.model.get_input_embeddings().num_embeddings
        start, num = len(self.logprobs), max(1, min(MAX_PIECE_TOKENS, MAX_LOGITS // vocab_size))
        ids_1C = torch.tensor([self.token_ids[start - 1 : -1][:num]], device=self.model.device)
        next_C = torch.tensor(self.token_ids[start : start + num], device=self.model.device)
        output = self.model(input_ids=ids_1C, past_key_values=self.cache, use_cache=True)
        logprobs_CV = output.logits[0].float().log_softmax(-1)
        scored = logprobs_CV.gather(1, next_C[:, None])[:, 0].tolist()
        if not all(map(math.isfinite, scored)):
            raise EngineError("HFEngine.score: expected finite logits, got others. Check the weights.")
        self.logprobs += scored


def post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Call `function(*args)` on a loop from another thread; do nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


def settle(outcomes: Iterable[tuple[asyncio.Future[Any], Any]]) -> None:
    """Set results and exceptions of futures on the running loop, except cancelled ones."""
    for future, outcome in outcomes:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
