"""The one loop over micro-batches, and what happens when one does not fit into memory.

It is halved, and the sweep begins anew: a backward pass that failed may have added half of its share of the gradients,
and a copy of them to go back to would need memory when there is none. Smaller micro-batches are kept for the rest of
the run, so this is paid once. The halves weigh what they weighed together, so the step is the same.

Several ranks go through the micro-batches together, of about the same size at a time, one each.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from agentenv.errors import RunStopped
from agentenv.trainer.batch import Batch, MicroBatch, micro_batches
from agentenv.trainer.sharding import Ranks

if TYPE_CHECKING:
    from agentenv.trainer.config import TrainConfig

_log = logging.getLogger(__name__)
_NO_LIMIT = 1 << 62
_OOM = ("out of memory", "can't allocate memory", "not enough memory")


class Sweep:
    """How a batch is split; with and without gradients, which need more memory."""

    def __init__(self, config: TrainConfig, device: torch.device, ranks: Ranks) -> None:
        """Split as the flags say, which are for each rank."""
        self._config, self._device, self._ranks = config, device, ranks
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

        Where memory runs out, on any rank, `begin` is called to forget what was done, and all of it is done again. Of
        several ranks each does its own micro-batches.

        Raises:
            RunStopped: one sequence alone does not fit.
        """
        todo, index, num_splits, size = self._plan(batch, sequences), 0, 0, self._ranks.size
        while index < len(todo):
            share = todo[index : index + size]  # one for each rank, and nothing for those that are left over
            share += [_nothing(packed=self._config.packing_samples)] * (size - len(share))
            lacking = self._ranks.lacking(self._fits(work, share[self._ranks.rank]))
            if not lacking:
                index += size
                continue
            begin()
            halves = [self._halves(batch, each) if i in lacking else [each] for i, each in enumerate(share)]
            todo[index : index + size] = [micro for part in halves for micro in part if micro.sequences]
            index, num_splits = 0, num_splits + len(lacking)
        return num_splits

    def _plan(self, batch: Batch, sequences: Sequence[int] | None, *, most: int | None = None) -> list[MicroBatch]:
        config, training = self._config, torch.is_grad_enabled()
        dynamic = config.use_dynamic_batch
        budget = config.train_max_tokens_per_gpu if dynamic else _NO_LIMIT
        count = config.micro_train_batch_size if training else config.micro_rollout_batch_size
        if self._ranks.size > 1:  # no rank is to be left with nothing
            chosen = range(len(batch.sequences)) if sequences is None else sequences
            count = min(count, math.ceil(len(chosen) / self._ranks.size))
            budget = min(budget, self._even_budget(sum(len(batch.sequences[each]) for each in chosen), budget))
        plan = micro_batches(
            batch,
            max_tokens=min(budget, self._most_places[training] if most is None else most),
            packed=config.packing_samples,
            max_sequences=None if dynamic else count,
            sequences=sequences,
        )
        return plan if self._ranks.size == 1 else sorted(plan, key=lambda micro: -micro.num_places)

    def _even_budget(self, num_tokens: int, budget: int) -> int:
        """Tokens of a micro-batch, when each rank does as many of them as it must and all are alike."""
        if budget == _NO_LIMIT:
            return budget
        rounds = math.ceil(num_tokens / (self._ranks.size * budget))
        return max(1, math.ceil(num_tokens / (self._ranks.size * max(1, rounds))))

    def _fits(self, work: Callable[[MicroBatch], None], micro: MicroBatch) -> bool:
        """Whether memory was enough; where not, the other ranks are not left waiting."""
        if self._done(work, micro):
            return True
        # The exception, which held on to what was computed, is gone by now.
        self._ranks.finish(lambda: work(_nothing(packed=micro.packed).to(self._device)))
        return False

    def _done(self, work: Callable[[MicroBatch], None], micro: MicroBatch) -> bool:
        self._ranks.begin()
        try:
            work(micro.to(self._device))
        except (RuntimeError, MemoryError) as error:
            text = str(error).lower()
            if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not any(o in text for o in _OOM):
                raise
            if not self._ranks.survive_oom:
                raise
            return False
        return True

    def _halves(self, batch: Batch, micro: MicroBatch) -> list[MicroBatch]:
        if len(micro.sequences) <= 1:
            raise RunStopped(
                f"learner: expected memory for one sequence of {micro.num_places} tokens, got "
                "none. Add --gradient_checkpointing, lower --max_len, or leave the engine less memory."
            )
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        half = micro.num_places // 2
        training = torch.is_grad_enabled()
        self._most_places[training] = min(self._most_places[training], half)
        _log.log(
            logging.DEBUG if self._ranks.rank else logging.WARNING,  # once for all ranks
            "learner: expected memory for a micro-batch of %d tokens, got none. They have at most %d from here on. "
            "Lower --micro_train_batch_size or --train_max_tokens_per_gpu.",
            micro.num_places, half,
        )  # fmt: skip
        return self._plan(batch, list(micro.sequences), most=half)


def _nothing(*, packed: bool) -> MicroBatch:
    """Two tokens of which nothing is asked: what it adds to any sum is 0, with a gradient of 0 for every weight."""
    ids_12, positions_12, none = torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None], torch.empty(0).long()
    mask_12 = None if packed else torch.ones_like(ids_12)
    return MicroBatch((), ids_12, mask_12, positions_12, none, none, none, none, none)
