"""HFScorer: a sequence-classification model of transformers as a reward model, in this process.

Example:
    >>> scorer = HFScorer("Skywork/Skywork-Reward-V2-Qwen3-0.6B", max_length=16_384, overflow="left")
    >>> await scorer.score([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
    Scored(value=…, num_tokens=19, truncated=False)

Dynamic micro-batching: each caller passes one sequence, and a worker thread scores the waiting ones together. Waiting
sequences are sorted by length and cut into batches of similar lengths, which limits padding. Sequences that arrive
meanwhile come next. While nothing is computed, a sequence waits at most `max_wait_s`. A failed batch is split until
single sequences fail: the others get their scores.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentenv._util.calls import waiting
from agentenv.core.arguments import is_finite, number, one_of, settings_from, whole_number
from agentenv.core.engine import Tokenizer
from agentenv.errors import AgentEnvError, ConfigError, DataError, InfraError
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

ScoreBatch = Callable[[list[list[int]]], Sequence[float]]
"""One number per sequence of token ids, in order; called in one thread, never twice at once."""
_T = TypeVar("_T")
TOKENS_OF_A_CALL = 256
"""Cost of one more batch, in tokens: for small models on a CPU it equals that of 100 to 300 tokens."""
_BATCHES_AT_ONCE = 8
"""Full batches that are sorted together; with more, the first would wait long for the rendering of the last."""
_CLOSE_GRACE_S = 10.0


@dataclass(eq=False, slots=True)
class _Item:
    """One sequence and the future of its score."""

    given: Sequence[int] | Callable[[], Sequence[int]]
    future: Future[float] = field(default_factory=Future)
    asked: float = field(default_factory=time.monotonic)
    ids: list[int] = field(default_factory=list)
    """Set by the worker when it takes the item."""


class MicroBatcher:
    """Scores sequences of token ids in batches, formed from concurrent calls on any event loops.

    Args:
        score_batch: see ScoreBatch.
        max_batch: maximum number of sequences of one batch.
        max_batch_tokens: maximum number of tokens of one batch, padding included; a longer sequence has its own batch.
        max_wait_s: how long a sequence may wait for others while nothing is computed.

    The thread starts at the first call. A caller that is cancelled before its batch starts is not scored.
    """

    def __init__(
        self,
        score_batch: ScoreBatch,
        *,
        max_batch: int = 32,
        max_batch_tokens: int = 16_384,
        max_wait_s: float = 0.005,
    ) -> None:
        where = type(self).__name__
        self._score_batch = score_batch
        self._max_batch = whole_number(f"{where}.max_batch", max_batch, low=1)
        self.max_batch_tokens = whole_number(f"{where}.max_batch_tokens", max_batch_tokens, low=1)
        """May be changed at any time."""
        self._max_wait_s = number(f"{where}.max_wait_s", max_wait_s, low=0.0, high=3600.0)
        self._changed = threading.Condition()  # guards the next four; those after them belong to the worker
        self._asked: set[_Item] = set()
        """All sequences that wait for a score."""
        self._queue: list[_Item] = []
        """Those among them that the worker has not taken."""
        self._closed = False
        self._thread: threading.Thread | None = None
        self._batch: list[_Item] = []
        """The batch that is being computed."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a score."""
        return len(self._asked)

    async def score(self, token_ids: Sequence[int] | Callable[[], Sequence[int]]) -> float:
        """Return the finite score of one sequence. A function that returns the ids is called in the worker's thread.

        Raises:
            InfraError: the score could not be computed or is not finite, or the batcher was closed.
            AgentEnvError: raised by the function, or by `score_batch` for this sequence alone.
        """
        item = _Item(token_ids)
        with self._changed:
            if self._closed:
                raise closed_error("reward model")
            self._asked.add(item)
            self._queue.append(item)
            # The first call, or after a fork, which copies no threads.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="agentenv-rm", daemon=True)
                self._thread.start()
                atexit.register(self._end)
            if len(self._queue) in (1, self._max_batch):  # the worker waits for these
                self._changed.notify()
        try:
            return await asyncio.wrap_future(item.future)
        finally:
            self._asked.discard(item)

    async def close(self) -> None:
        """End the thread after the current batch, with a time limit. Other waiting sequences get an InfraError."""
        with self._changed:
            self._closed = True
            thread, waiting = self._thread, self._asked.difference(self._batch)
            self._changed.notify()
        atexit.unregister(self._end)
        for item in waiting:
            _settle(item, closed_error("reward model"))
        if thread is not None:
            await asyncio.to_thread(thread.join, _CLOSE_GRACE_S)
        for item in list(self._asked):
            _settle(item, closed_error("reward model"))

    def _end(self) -> None:
        """End the thread at exit if it was not closed: torch would abort the process while the thread computes."""
        if self._thread is None or not self._thread.is_alive():  # or forked
            return
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_GRACE_S)

    def _work(self) -> None:
        while True:
            # Take the first items of the queue once they have waited long enough.
            with self._changed:
                while not self._closed:
                    self._queue = [item for item in self._queue if not item.future.done()]
                    left_s = None
                    if self._queue:
                        left_s = self._queue[0].asked + self._max_wait_s - time.monotonic()
                        if left_s <= 0.0 or len(self._queue) >= self._max_batch:
                            break
                    self._changed.wait(left_s)
                if self._closed:
                    return
                most = _BATCHES_AT_ONCE * self._max_batch
                taken, self._queue = self._queue[:most], self._queue[most:]
            items: list[_Item] = []
            for item in taken:
                found = _result_or_error(item.given) if callable(item.given) else item.given
                if isinstance(found, AgentEnvError):
                    _settle(item, found)
                else:
                    item.ids = list(found)
                    items.append(item)
            for batch in batches([len(item.ids) for item in items], self._max_batch, self.max_batch_tokens):
                if self._closed:
                    break
                self._batch = [items[index] for index in batch]
                self._score(self._batch)

    def _score(self, items: list[_Item]) -> None:
        """Settle the items with their scores or errors; cancelled items are not computed again."""
        items = [item for item in items if not item.future.done()]
        if not items:
            return
        found = _result_or_error(lambda: [float(value) for value in self._score_batch([item.ids for item in items])])
        if not isinstance(found, AgentEnvError) and len(found) != len(items):
            found = InfraError(f"reward model: expected {len(items)} scores, got {len(found)}. Fix score_batch.")
        if not isinstance(found, AgentEnvError):
            for item, value in zip(items, found, strict=True):
                wrong = f"reward model: expected a finite score, got {value!r}. Check the weights and the dtype."
                _settle(item, value if is_finite(value) else InfraError(wrong))
        elif len(items) == 1:
            _settle(items[0], found)
        else:
            half = len(items) // 2
            self._score(items[:half])
            self._score(items[half:])


def batches(lengths: Sequence[int], max_batch: int, max_tokens: int) -> list[list[int]]:
    """Return batches of indices of sequences with these lengths, the longest first; each index is in one batch.

    A batch has at most `max_batch` sequences and `max_tokens` tokens with padding, except a single longer sequence.
    Of all ways to cut the sorted lengths, it has the lowest cost of padding and calls.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    least, begin = [0], [0]  # of the first 0, 1, … in the order: their cost, and where their last batch starts
    for end in range(1, len(order) + 1):
        least.append(least[end - 1] + lengths[order[end - 1]] + TOKENS_OF_A_CALL)
        begin.append(end - 1)
        for start in range(end - 2, max(end - max_batch, 0) - 1, -1):
            num_tokens = (end - start) * lengths[order[start]]
            if num_tokens > max_tokens:
                break
            if least[start] + num_tokens + TOKENS_OF_A_CALL < least[end]:
                least[end], begin[end] = least[start] + num_tokens + TOKENS_OF_A_CALL, start
    found, end = [], len(order)
    while end:
        found.append(order[begin[end] : end])
        end = begin[end]
    return found[::-1]


def _result_or_error(function: Callable[[], _T]) -> _T | AgentEnvError:
    """Return a function's result, or its exception as an error for the callers."""
    try:
        return function()
    except AgentEnvError as error:
        return error
    except Exception as error:  # noqa: BLE001 - see above
        return InfraError(f"reward model: expected scores, got {type(error).__name__}: {error}"[:500])


def _settle(item: _Item, value: float | AgentEnvError) -> None:
    """Hand the result to the caller, if it still waits."""
    with suppress(InvalidStateError):
        if isinstance(value, AgentEnvError):
            item.future.set_exception(value)
        else:
            item.future.set_result(value)


# --- the scorer -------------------------------------------------------------------------------------------------------

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
        self.options = settings_from("HFScorer.options", options, HFOptions())
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
        from agentenv.rewards.models.classifier import Classifier

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
