"""Run work on all micro-batches of a batch, and split micro-batches that do not fit into memory.

After a split, all micro-batches run again: a failed backward pass may have added a part of its gradients, and a copy of
the gradients would need memory too. The smaller size is kept for the rest of the run. Halves have the weights of the
whole, so the train step is the same.

Several ranks work on micro-batches of similar size at the same time, one each. They split none: the others would wait
in a collective.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from agentenv.errors import RunStopped
from agentenv.training.algorithm.batch import Batch, MicroBatch, micro_batches
from agentenv.training.learner.sharding import RankLost, Ranks

if TYPE_CHECKING:
    from agentenv.training.config import TrainConfig

_log = logging.getLogger(__name__)
_NO_LIMIT = 1 << 62
_OOM = ("out of memory", "can't allocate memory", "not enough memory")


class MicroBatchRunner:
    """Runs work on micro-batches. Sizes with and without gradients are tracked separately."""

    def __init__(self, config: TrainConfig, device: torch.device, ranks: Ranks) -> None:
        self._config = config
        self._device = device
        self._ranks = ranks
        self._most_places = {True: _NO_LIMIT, False: _NO_LIMIT}

    def run(
        self,
        batch: Batch,
        work: Callable[[MicroBatch], None],
        *,
        sequences: Sequence[int] | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> int:
        """Call `work` with every micro-batch of a batch, or of some of its sequences; return the number of splits.

        If memory runs out, `begin` is called to discard results, and all micro-batches run again.

        Raises:
            RunStopped: a single sequence does not fit.
            RankLost: memory runs out on one of several ranks.
        """
        plan, size = self._plan(batch, sequences), self._ranks.size
        index = num_splits = 0
        while index < len(plan):
            current = plan[index : index + size]  # one per rank; ranks without one get an empty one
            current += [_empty(packed=self._config.packing_samples)] * (size - len(current))
            if self._fits(work, current[self._ranks.rank]):
                index += size
                continue
            begin()
            plan[index : index + 1] = self._halves(batch, plan[index])
            index, num_splits = 0, num_splits + 1
        return num_splits

    def _plan(self, batch: Batch, sequences: Sequence[int] | None, *, most: int | None = None) -> list[MicroBatch]:
        config, training = self._config, torch.is_grad_enabled()
        dynamic = config.use_dynamic_batch
        budget = config.train_max_tokens_per_gpu if dynamic else _NO_LIMIT
        count = config.micro_train_batch_size if training else config.micro_rollout_batch_size
        if self._ranks.size > 1:  # every rank should get work
            chosen = range(len(batch.sequences)) if sequences is None else sequences
            count = min(count, math.ceil(len(chosen) / self._ranks.size))
            if dynamic:  # the fewest rounds, divided equally over the ranks
                num_tokens = sum(len(batch.sequences[each]) for each in chosen)
                rounds = max(1, math.ceil(num_tokens / (self._ranks.size * budget)))
                budget = min(budget, max(1, math.ceil(num_tokens / (self._ranks.size * rounds))))
        plan = micro_batches(
            batch,
            max_places=min(budget, self._most_places[training] if most is None else most),
            packed=config.packing_samples,
            max_sequences=None if dynamic else count,
            sequences=sequences,
        )
        return plan if self._ranks.size == 1 else sorted(plan, key=lambda micro: -micro.num_places)

    def _fits(self, work: Callable[[MicroBatch], None], micro: MicroBatch) -> bool:
        """Return True if memory sufficed."""
        try:
            work(micro.to(self._device))
            return True
        except (RuntimeError, MemoryError) as error:
            text = str(error).lower()
            if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not any(o in text for o in _OOM):
                raise
            if self._ranks.size > 1:
                raise RankLost(
                    f"learner: expected memory for a micro-batch of {micro.num_places} tokens, got too little on rank "
                    f"{self._ranks.rank}. Lower --micro_train_batch_size or --train_max_tokens_per_gpu, or add "
                    "--gradient_checkpointing, and resume from the last checkpoint."
                ) from error
        return False

    def _halves(self, batch: Batch, micro: MicroBatch) -> list[MicroBatch]:
        if len(micro.sequences) <= 1:
            raise RunStopped(
                f"learner: expected memory for one sequence of {micro.num_places} tokens, got "
                "too little. Add --gradient_checkpointing, lower --max_length, or reduce the engine's memory."
            )
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        half = micro.num_places // 2
        training = torch.is_grad_enabled()
        self._most_places[training] = min(self._most_places[training], half)
        _log.warning(
            "learner: expected memory for a micro-batch of %d tokens, got too little. The new limit is %d tokens. "
            "Lower --micro_train_batch_size or --train_max_tokens_per_gpu.",
            micro.num_places, half,
        )  # fmt: skip
        return self._plan(batch, list(micro.sequences), most=half)


def _empty(*, packed: bool) -> MicroBatch:
    """Return a micro-batch without action tokens: it adds 0 to any sum, with a gradient of 0 for every weight."""
    ids_12, positions_12, none = torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None], torch.empty(0).long()
    mask_12 = None if packed else torch.ones_like(ids_12)
    return MicroBatch((), ids_12, mask_12, positions_12, none, none, none, none, none)
