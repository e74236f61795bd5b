"""VLLMScorer: a sequence classifier in vLLM's pooling engine, started and ended by this process.

Example:
    >>> scorer = VLLMScorer("Skywork/Skywork-Reward-V2-Qwen3-8B", options={"gpu_memory_utilization": 0.3})
    >>> await scorer.score([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
    Scored(value=…, num_tokens=19, truncated=False)
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from agentenv._util.restarts import Restarts
from agentenv.core.arguments import number, one_of, whole_number
from agentenv.core.types import MAX_REWARD
from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.models.actor_lifecycle import LoopScorer, WorkerDied
from agentenv.rewards.models.checkpoint import DTYPES, RenderOptions, known_ids, label_index, options_of
from agentenv.rewards.models.render import OVERFLOWS, ConversationRenderer, Overflow
from agentenv.rewards.models.types import Conversation, Scored, closed_error
from agentenv.rewards.models.vllm_pooling import PoolingEngine

logger = logging.getLogger(__name__)
LONG_START_S = 10.0
"""Seconds after which a message says that vLLM is starting."""


class Pooling(Protocol):
    """What gives a head's raw numbers of token ids, on one event loop; see PoolingEngine, whose errors it has."""

    labels: tuple[str, ...]
    max_length: int
    vocab_size: int

    @property
    def alive(self) -> bool:
        """Whether it has started, and has not died."""

    async def start(self) -> None:
        """Load the model; the three above are known after it."""

    async def pool(self, token_ids: Sequence[int]) -> list[float]:
        """One number for each label."""

    async def close(self) -> None:
        """Free what it holds; again is harmless."""


@dataclass(frozen=True, slots=True)
class VLLMOptions(RenderOptions):
    """What is seldom changed of a VLLMScorer."""

    gpu_memory_utilization: float = 0.9
    """Share of each GPU's memory that vLLM takes, however small the model: less where a policy is on the same GPU."""
    tensor_parallel_size: int = 1
    """GPUs that the model is spread over."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Anything else that vLLM's `AsyncEngineArgs` takes; wins over what is set here. With `hf_overrides` the
    checkpoint's head is not looked at."""
    max_restarts: int = 3
    """Engines that are started in place of dead ones within an hour."""
    engine: Callable[[Mapping[str, Any]], Pooling] = PoolingEngine
    """Makes an engine of these arguments: another than vLLM in this process, as in tests."""

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        number("VLLMOptions.gpu_memory_utilization", self.gpu_memory_utilization, low=1e-3, high=1.0)
        whole_number("VLLMOptions.tensor_parallel_size", self.tensor_parallel_size, low=1)
        whole_number("VLLMOptions.max_restarts", self.max_restarts)


@dataclass(frozen=True, slots=True)
class LoadedVLLM:
    """What there is to look at of a scorer that has started."""

    renderer: ConversationRenderer


class VLLMScorer(LoopScorer):
    """Scores conversations with vLLM's pooling engine; implements `agentenv.rewards.models.types.RewardScorer`.

    Args:
        model: a folder or a Hugging Face id of a sequence classifier.
        dtype: of the weights; `auto` is the checkpoint's on a GPU, except that float32 becomes a half type there, and
            float32 on a CPU. The head is float32 anyway.
        max_length: maximum number of tokens; by default what model and tokenizer take.
        overflow: see ConversationRenderer.
        max_batch: maximum number of conversations of one step; None takes vLLM's default. vLLM forms the batches.
        label: whose raw number is the score, by name or index; needed where the model has several.
        options: what else there is, or a mapping with some of it.

    vLLM starts once, at the first score or by `load`, and logs errors only, unless it was imported before or
    VLLM_LOGGING_LEVEL says otherwise; it starts again after its death: those who waited then have failed, the
    next are scored. It runs on its own event loop, so that any loop may call it. In float32 a score is the same within
    1e-4 of the scores' scale in every batch. Values are the head's own: no activation, and no mean and
    deviation of OpenRLHF's config, for which `ModelReward(shift=-mean, scale=1 / std)` is.

    `num_scored`, `num_failed`, `num_truncated` and `num_restarts` count conversations and engines.
    """

    counts = (*LoopScorer.counts, "num_restarts")

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        max_length: int | None = None,
        overflow: Overflow = "error",
        max_batch: int | None = None,
        label: str | int | None = None,
        options: VLLMOptions | Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, str | Path):
            raise ConfigError(f"VLLMScorer: expected a folder or a name, got {type(model).__name__}. Give one.")
        super().__init__("VLLMScorer", "agentenv-vllm-rm")
        self.options = options_of("VLLMScorer", VLLMOptions, options)
        self._model, self._label = str(model), label
        self._overflow: Any = one_of("VLLMScorer.overflow", overflow, OVERFLOWS)
        self._max_length = None if max_length is None else whole_number("VLLMScorer.max_length", max_length, low=2)
        self._args: dict[str, Any] = {
            "model": self._model,
            "runner": "pooling",
            "dtype": one_of("VLLMScorer.dtype", dtype, DTYPES),
            "max_model_len": self._max_length,
            "max_num_seqs": None if max_batch is None else whole_number("VLLMScorer.max_batch", max_batch, low=1),
            "gpu_memory_utilization": self.options.gpu_memory_utilization,
            "tensor_parallel_size": self.options.tensor_parallel_size,
            # In a place that Ray holds, vLLM would start an actor for each GPU.
            "distributed_executor_backend": "mp" if self.options.tensor_parallel_size > 1 else None,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            **self.options.engine_args,
        }
        self._engine: Pooling | None = None  # this and the next are the home's
        self._renderer: ConversationRenderer | None = None
        self._index = 0
        self._restarts = Restarts(self.options.max_restarts)
        self._begun = False

    @property
    def num_restarts(self) -> int:
        """Engines that were started in place of dead ones."""
        return self._restarts.num

    async def load(self) -> LoadedVLLM:
        """Start vLLM, if it does not run; no time of an agent's step goes by meanwhile.

        Raises:
            ConfigError: the model or the label does not exist, or the model has fewer positions than `max_length`.
            InfraError: vLLM could not start, died too often, or the scorer was closed.
            MissingDependency: vLLM is not installed.
        """
        await self._started()
        if self._renderer is None:
            raise closed_error("VLLMScorer")
        return LoadedVLLM(self._renderer)

    # --- at home ------------------------------------------------------------------------------------------------------

    @property
    def _alive(self) -> bool:
        return self._engine is not None and self._engine.alive

    async def _start(self) -> None:
        dead, self._engine = self._engine, None
        if dead is not None:
            await dead.close()
        if self._begun and self._restarts.spend() is None:
            raise InfraError(
                f"VLLMScorer: expected an engine that lives, got {self.options.max_restarts + 1} within an hour that "
                "died or did not start. Find out why, or raise max_restarts."
            )
        self._begun = True
        engine = self.options.engine(self._args)
        telling = asyncio.get_running_loop().call_later(
            LONG_START_S, logger.warning, "VLLMScorer: loading %r.", self._model
        )
        try:
            await engine.start()
            if self._renderer is None:
                self._index = label_index("VLLMScorer", engine.labels, self._label)
                self._renderer = await asyncio.to_thread(
                    self.options.renderer,
                    "VLLMScorer",
                    self._model,
                    most=engine.max_length,
                    max_length=self._max_length,
                    overflow=self._overflow,
                )
        except BaseException:
            await engine.close()
            raise
        finally:
            telling.cancel()
        self._engine = engine

    async def _scored(self, conversation: Conversation) -> Scored:
        engine, renderer = self._engine, self._renderer
        if engine is None or renderer is None:  # closed, or dead and not yet replaced
            raise WorkerDied("VLLMScorer: expected a running engine, got none. Score it again.")
        rendered = known_ids(renderer, conversation, engine.vocab_size)
        numbers = await engine.pool(rendered.token_ids)
        if len(numbers) != len(engine.labels):
            raise InfraError(
                f"VLLMScorer: expected {len(engine.labels)} numbers of a head, got {len(numbers)}. Look at the model."
            )
        value = numbers[self._index]
        if not math.isfinite(value) or abs(value) > MAX_REWARD:
            raise InfraError(f"VLLMScorer: expected a finite score, got {value!r}. Look at its weights and its dtype.")
        return Scored(value, len(rendered.token_ids), rendered.truncated)

    async def _end(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()
