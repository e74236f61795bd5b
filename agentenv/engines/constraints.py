"""Follow structural tags with xgrammar: the legal next tokens, and which sampled tokens were forced.

A structural tag is compiled by the same library here and in vLLM, so that the legal tokens are the same.
Source: xgrammar 0.2.8, python/xgrammar; vllm 0.32, vllm/v1/structured_output/backend_xgrammar.py.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agentenv.core.engine import Tokenizer
from agentenv.core.types import Completion, SamplingParams
from agentenv.errors import DataError, EngineError

if TYPE_CHECKING:
    from torch import Tensor


def missing_xgrammar() -> str:
    """Return why this process cannot follow structural tags; empty if xgrammar is installed."""
    if importlib.util.find_spec("xgrammar") is not None:
        return ""
    return "xgrammar is not installed: pip install 'agentenv-rl[constrain]'"


class Constrainer:
    """Compiles the structural tags of requests for one tokenizer; compiled ones are kept.

    Args:
        tokenizer: a tokenizer of transformers.
        num_tokens: size of the model's vocabulary; None takes the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, num_tokens: int | None = None) -> None:
        self._tokenizer, self._num_tokens = tokenizer, num_tokens
        self._compiler: Any = None
        self._lock = threading.Lock()

    async def follow(self, structural_tag: str, stop_ids: Iterable[int]) -> GrammarWalk:
        """Return the walk of one action; `stop_ids` and the tokenizer's EOS may end it once the grammar is complete.

        Raises:
            DataError: the structural tag, or a schema in it, is not a grammar.
        """
        import xgrammar

        grammar = await asyncio.to_thread(self._compile, structural_tag)

        num_tokens = self._num_tokens or 0
        eos = set() if self._tokenizer.eos_token_id is None else {self._tokenizer.eos_token_id}
        stops = sorted(token_id for token_id in eos.union(stop_ids) if token_id < num_tokens)
        return GrammarWalk(xgrammar.GrammarMatcher(grammar, override_stop_tokens=stops), num_tokens, stops)

    def _compile(self, structural_tag: str) -> Any:
        import xgrammar

        with self._lock:
            if self._compiler is None:
                info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._num_tokens)
                self._num_tokens = info.vocab_size
                self._compiler = xgrammar.GrammarCompiler(info)
        try:
            return self._compiler.compile_structural_tag(structural_tag)
        except (RuntimeError, ValueError) as error:
            raise DataError(
                f"structural_tag: expected one that xgrammar compiles, got {structural_tag[:200]!r}: {error}. "
                "Simplify the JSON schema."
            ) from error


@dataclass(slots=True, eq=False)
class GrammarWalk:
    """The state of one action in its grammar. V: tokens of the vocabulary."""

    matcher: Any
    num_tokens: int
    stop_ids: Sequence[int]
    num_taken: int = 0
    forced: tuple[int, ...] = ()
    """Indices of the tokens taken so far that the grammar forced."""

    def legal(self) -> Tensor:
        """Return bool[V], on the CPU: the tokens that may come next."""
        import torch
        import xgrammar

        mask = xgrammar.allocate_token_bitmask(1, self.num_tokens)
        self.matcher.fill_next_token_bitmask(mask)
        bits = (mask[0][:, None] >> torch.arange(32)) & 1
        return bits.flatten()[: self.num_tokens].bool()

    def take(self, token_id: int, legal: Tensor) -> bool:
        """Note the next token, and that it was forced where it was; return False if it is not legal."""
        others = legal.clone()
        others[list(self.stop_ids)] = False
        forced = int(legal.sum()) == 1 or not bool(others.any())
        if not self.matcher.accept_token(token_id):
            return False
        self.forced += (self.num_taken,) if forced else ()
        self.num_taken += 1
        return True


async def with_forced(
    completion: Completion, sampling: SamplingParams, constrainer: Constrainer, where: str
) -> Completion:
    """Return a completion of an engine that does not say which tokens were forced, with their indices.

    Raises:
        DataError: the structural tag is not a grammar.
        EngineError: the engine sampled a token that the grammar does not allow.
    """
    ids, tag = completion.token_ids, sampling.structural_tag
    if tag is None or not ids:
        return completion
    stops = set(sampling.stop_token_ids)
    if completion.finish_reason == "stop" and not isinstance(completion.matched_stop, str):
        stops.add(ids[-1])  # also one that only the server knows
    walk = await constrainer.follow(tag, stops)

    def walk_all() -> None:
        for index, token_id in enumerate(ids):
            if not walk.take(token_id, walk.legal()):
                raise EngineError(
                    f"{where}: expected tokens that the structural tag allows, got {token_id} as token {index}. "
                    "Start vLLM without --reasoning-parser, which leaves reasoning unconstrained, and with xgrammar "
                    "as the backend of structured outputs."
                )

    await asyncio.to_thread(walk_all)
    return replace(completion, forced=walk.forced)
