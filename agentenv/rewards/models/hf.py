"""HFScorer: a sequence-classification model of transformers as a reward model, in this process.

Example:
    >>> scorer = HFScorer("Skywork/Skywork-Reward-V2-Qwen3-0.6B", max_length=16_384, overflow="left")
    >>> await scorer.score([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
    Scored(value=…, num_tokens=19, truncated=False)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv._util.calls import waiting
from agentenv.core.arguments import one_of, whole_number
from agentenv.core.engine import Tokenizer
from agentenv.errors import ConfigError, DataError, MissingDependency
from agentenv.rewards.loading import construct
from agentenv.rewards.models.batching import MicroBatcher
from agentenv.rewards.models.render import (
    NO_LIMIT,
    OVERFLOWS,
    ConversationRenderer,
    Overflow,
    Rendered,
    limit_of,
    tokenizer_of,
)
from agentenv.rewards.models.types import Conversation, CountingScorer, Scored, closed_error
from agentenv.rewards.workers.threads import Threads

if TYPE_CHECKING:
    from agentenv.rewards.models.classifier import Classifier

DTYPES = ("auto", "float32", "bfloat16", "float16")
MOST_TOKENS, MOST_TOKENS_CPU = 16_384, 2_048
_LOAD_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class HFOptions:
    """What is seldom changed of an HFScorer."""

    tokenizer: Tokenizer | str | Path | None = None
    """Folder, name or object; by default the model's."""
    add_bos: bool = False
    """See ConversationRenderer, also for the next two."""
    add_eos: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_batch_tokens: int | None = None
    """See MicroBatcher, as for the next; by default 16,384, and 2,048 on a CPU, whose caches larger batches leave."""
    max_wait_s: float = 0.005


@dataclass(frozen=True, slots=True)
class LoadedHF:
    """A scorer's two halves."""

    renderer: ConversationRenderer
    classifier: Classifier


class HFScorer(CountingScorer):
    """Scores conversations with a sequence classifier; implements `agentenv.rewards.models.types.RewardScorer`.

    Args:
        model: a folder, a name, or a PreTrainedModel as it is (put in eval mode; then `options.tokenizer` is needed).
        device: as torch names it; `auto` is the first GPU, or the CPU.
        dtype: of the weights; `auto` is the checkpoint's on a GPU and float32 on a CPU. The head is float32 anyway.
        label: whose raw number is the score, by name or index; needed where the model has several.
        max_length: maximum number of tokens; by default what model and tokenizer take.
        overflow: see ConversationRenderer.
        max_batch: maximum number of conversations of one batch.
        options: what else there is, or a mapping with some of it.

    The model is loaded once, in a thread, at the first score or by `load`. In float32 a score is the same within 1e-4
    in every batch. Values are the head's own: no activation, and no mean and deviation of OpenRLHF's config, for which
    `ModelReward(shift=-mean, scale=1 / std)` is.
    """

    def __init__(
        self,
        model: str | Path | Any,
        *,
        device: str = "auto",
        dtype: str = "auto",
        label: str | int | None = None,
        max_length: int | None = None,
        overflow: Overflow = "error",
        max_batch: int = 32,
        options: HFOptions | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        given = options or HFOptions()
        self.options: HFOptions = (
            given if isinstance(given, HFOptions) else construct("HFScorer.options", HFOptions, given)
        )
        self._model = str(model) if isinstance(model, Path) else model
        self._device, self._label = device, label
        self._dtype = one_of("HFScorer.dtype", dtype, DTYPES)
        self._overflow: Any = one_of("HFScorer.overflow", overflow, OVERFLOWS)
        self._max_length = None if max_length is None else whole_number("HFScorer.max_length", max_length, low=2)
        if not isinstance(self._model, str) and self.options.tokenizer is None:
            raise ConfigError("HFScorer.options: expected a tokenizer for a model that is an object, got none.")
        self.batcher = MicroBatcher(
            lambda sequences: self._open().classifier.score_batch(sequences),
            max_batch=max_batch,
            max_batch_tokens=MOST_TOKENS if self.options.max_batch_tokens is None else self.options.max_batch_tokens,
            max_wait_s=self.options.max_wait_s,
        )
        self._loader = Threads(1)
        self._loaded: LoadedHF | ConfigError | None = None
        self._closed = False

    async def load(self) -> LoadedHF:
        """Load the model, if that is not done; no time of an agent's step goes by meanwhile.

        Raises:
            ConfigError: the model or the label does not exist, or the model has fewer positions than `max_length`.
            InfraError: the model does not fit, or the scorer was closed.
            MissingDependency: torch or transformers is not installed.
        """
        if not isinstance(self._loaded, LoadedHF):
            with waiting():
                await self._loader.run(self._load_once, limit_s=_LOAD_LIMIT_S)
        return self._open()

    async def score(self, conversation: Conversation) -> Scored:
        """Return the model's raw number for a conversation.

        Raises:
            DataError: the conversation cannot be rendered, or has a token that the model does not know.
            InfraError: the model failed, returned a number that is not finite, or was closed.
            ConfigError: the model cannot be loaded; see `load`.
        """
        await self.load()
        return await self._counted(conversation)

    async def _scored(self, conversation: Conversation) -> Scored:
        loaded = self._open()
        found: list[Rendered] = []

        def ids() -> list[int]:
            # Runs in the batcher's thread: a long text takes milliseconds, and tokenizers are not thread-safe.
            found.append(loaded.renderer.ids(conversation))
            largest, num_known = max(found[0].token_ids), loaded.classifier.vocab_size
            if largest >= num_known:  # on a GPU it would break all later scoring
                raise DataError(
                    f"conversation: expected tokens of the model, below {num_known}, got {largest}. "
                    "Use the tokenizer that the model was trained with."
                )
            return found[0].token_ids

        value = await self.batcher.score(ids)
        return Scored(value, len(found[0].token_ids), found[0].truncated)

    async def close(self) -> None:
        """Fail waiting calls and release the model; further calls do nothing."""
        self._closed = True
        await self.batcher.close()
        loaded, self._loaded, self._model = self._loaded, None, ""
        if isinstance(loaded, LoadedHF):
            loaded.classifier.free()

    def _open(self) -> LoadedHF:
        if self._closed or not isinstance(self._loaded, LoadedHF):
            raise closed_error("HFScorer")
        return self._loaded

    def _load_once(self) -> None:
        """Load in the thread, so never twice at once; a ConfigError is raised again at every call."""
        if isinstance(self._loaded, ConfigError):
            raise self._loaded
        if self._loaded is not None or self._closed:
            return
        try:
            from agentenv.rewards.models.classifier import Classifier
        except ImportError as error:
            raise MissingDependency(
                f"HFScorer: expected torch and transformers, got {error}. pip install --upgrade agentenv-rl"
            ) from error
        try:
            classifier = Classifier(self._model, device=self._device, dtype=self._dtype, label=self._label)
            if self.options.max_batch_tokens is None and classifier.device.type == "cpu":
                self.batcher.max_batch_tokens = MOST_TOKENS_CPU
            loaded = LoadedHF(self._renderer(classifier.max_positions), classifier)
        except ConfigError as error:
            self._loaded = error
            raise
        if not self._closed:
            self._loaded = loaded

    def _renderer(self, positions: int | None) -> ConversationRenderer:
        """Return the renderer of a model with this many positions, if that is known."""
        tokenizer: Any = self._model if self.options.tokenizer is None else self.options.tokenizer
        if isinstance(tokenizer, str | Path):
            tokenizer = tokenizer_of("HFScorer", str(tokenizer), "Pass options.tokenizer.")
        if self._max_length is not None and positions is not None and self._max_length > positions:
            raise ConfigError(
                f"HFScorer.max_length: expected at most the model's {positions} positions, got {self._max_length}."
            )
        limits = [limit for limit in (positions, limit_of(tokenizer)) if limit and limit < NO_LIMIT]
        if self._max_length is None and not limits:
            raise ConfigError("HFScorer.max_length: expected a number for a model without a known limit, got None.")
        return ConversationRenderer(
            tokenizer,
            max_length=min(limits) if self._max_length is None else self._max_length,
            overflow=self._overflow,
            add_bos=self.options.add_bos,
            add_eos=self.options.add_eos,
            template_kwargs=self.options.template_kwargs,
        )
