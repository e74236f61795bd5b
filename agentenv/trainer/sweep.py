"""The one loop over micro-batches, and what happens when one does not fit into memory.

It is halved, and the sweep begins anew: a backward pass that failed may have added half of its share of the gradients,
and a copy of them to go back to would need memory when there is none. Smaller micro-batches are kept for the rest of
the run, so this is paid once. The halves weigh what they weighed together, so the step is the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from agentenv.errors import RunStopped
from agentenv.trainer.batch import Batch, MicroBatch, micro_batches

if TYPE_CHECKING:
    from agentenv.trainer.config import TrainConfig

_log = logging.getLogger(__name__)
_NO_LIMIT = 1 << 62
_OOM = ("out of memory", "can't allocate memory", "not enough memory")


class Sweep:
    """How a batch is split, on one device; with and without gradients, which need more memory."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        """Split as the flags say."""
        self._config, self._device = config, device
        self._most_places = {True: _NO_LIMIT, False: _NO_LIMIT}

    def run(
        self,
        batch: Batch,
        work: Callable[[MicroBatch], None],
        *,
        sequences: Sequence[int] | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> int:
        """Do `work` with every micro-batch of a batch, or of some of its sequences; how many had to be halved.

        Where memory runs out, `begin` is called to forget what was done, and all of it is done again.

        Raises:
            RunStopped: one sequence alone does not fit.
        """
        todo, index, num_splits = self._plan(batch, sequences), 0, 0
        while index < len(todo):
            if self._fits(work, todo[index]):
                index += 1
                continue
            begin()
            todo[index : index + 1] = self._halves(batch, todo[index])
            index, num_splits = 0, num_splits + 1
        return num_splits

    def _plan(self, batch: Batch, sequences: Sequence[int] | None, *, most: int | None = None) -> list[MicroBatch]:
        config, training = self._config, torch.is_grad_enabled()
        dynamic = config.use_dynamic_batch
        budget = config.train_max_tokens_per_gpu if dynamic else _NO_LIMIT
        count = config.micro_train_batch_size if training else config.micro_rollout_batch_size
        return micro_batches(
            batch,
            max_tokens=min(budget, self._most_places[training] if most is None else most),
            packed=config.packing_samples,
            max_sequences=None if dynamic else count,
            sequences=sequences,
        )

    def _fits(self, work: Callable[[MicroBatch], None], micro: MicroBatch) -> bool:
        """Whether memory was enough; the exception, which holds on to what was computed, is gone on return."""
        try:
            work(micro.to(self._device))
        except (RuntimeError, MemoryError) as error:
            text = str(error).lower()
            if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not any(o in text for o in _OOM):
                raise
            return False
        return True

    def _halves(self, batch: Batch, micro: MicroBatch) -> list[MicroBatch]:
        if len(micro.sequences) == 1:
            raise RunStopped(
                f"learner: expected memory for one sequence of {micro.num_places} tokens, got "
                "none. Add --gradient_checkpointing, lower --max_len, or leave the engine less memory."
            )
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        half = micro.num_places // 2
        training = torch.is_grad_enabled()
        self._most_places[training] = min(self._most_places[training], half)
        _log.warning(
            "learner: expected memory for a micro-batch of %d tokens, got none. They have at most %d from here on. "
            "Lower --micro_train_batch_size or --train_max_tokens_per_gpu.",
            micro.num_places, half,
        )  # fmt: skip
        return self._plan(batch, list(micro.sequences), most=half)
