"""The training loop: take a batch of groups, learn from it, give the engines the new weights; log, evaluate, save.

One loop for both modes. `Rollouts` decides what is in flight while the learner trains: nothing (synchronous), or up to
the allowed number of batches (--async_train). Step k trains weights k-1 into weights k; records count steps from 1, and
step 0 is the evaluation before any training.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentenv.errors import EngineError, RunStopped
from agentenv.metrics import summarize
from agentenv.trainer.config import TrainConfig
from agentenv.trainer.evaluate import Evaluation, ages_of, measure, numbers_of, rejections_of, shares_of, speed_of
from agentenv.trainer.flags import worded
from agentenv.trainer.records import Records
from agentenv.trainer.rollouts import Rollouts
from agentenv.trainer.screen import TrainScreen
from agentenv.trainer.whole import whole
from agentenv.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from agentenv.trainer.batch import Batch
    from agentenv.trainer.policy import Layout

_NONE = -1
"""No step."""


class Learns(Protocol):
    """What the loop asks of a learner; `learner.Learner` is the one."""

    num_steps: int
    """Train steps that were taken."""
    is_whole: bool
    """The weights are those after a whole train step: the last one did not end in its middle."""

    def train_step(self, batch: Batch) -> dict[str, float]:
        """Change the weights; gives the numbers of the step."""

    def weights(self, *, layout: Layout) -> Iterable[tuple[str, Any]]:
        """All of the weights, by the names of a checkpoint or of transformers' module."""

    def save_model(self, folder: Path, tokenizer: Any) -> None:
        """Write the model in Hugging Face format."""

    def state(self) -> dict[str, Any]:
        """What `load_state` goes on from."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class Loop:
    """A training; `run` is all of it."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        learner: Learns,
        rollouts: Rollouts,
        evaluation: Evaluation | None,
        records: Records,
        screen: TrainScreen,
        num_steps: int,
        layout: Layout = "checkpoint",
    ) -> None:
        self.config, self.learner, self.rollouts, self.evaluation = config, learner, rollouts, evaluation
        self.records, self.screen, self.num_steps = records, screen, num_steps
        self._layout: Layout = layout
        self.step = self._saved_step = self._told_step = 0
        """Train steps done."""
        self._numbers: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._step_began = time.monotonic()

    async def resume(self) -> None:
        """Go on from the checkpoint, where there is one; the engines get its weights.

        Raises:
            ConfigError: the checkpoint is of another training.
        """
        if self.records.newest is None:
            return
        step, state, trajectories = await asyncio.to_thread(self.records.checkpoints.load, self.records.newest)
        await asyncio.to_thread(self.learner.load_state, state["learner"])
        self.rollouts.load_state(state["rollouts"], trajectories)
        engine: Any = self.rollouts.runner.engine
        await engine.update_weights(await self._weights(), step)
        self.step = self._saved_step = self._told_step = self.rollouts.version = step

    async def run(self) -> bool:
        """Train to the last step; False when the runner was told to drain before.

        Cancelled amid a train step, it ends with that step: log and checkpoint have whatever was learned.

        Raises:
            RunStopped: too many episodes failed, nothing is left to learn from, a loss is no number, or the engines
                took no weights.
        """
        self.screen.start(self.num_steps, self.step + 1)
        self._step_began = time.monotonic()
        await self._evaluate_at_an_end()
        while self.step < self.num_steps:
            try:
                with self._timed("wait_s"):
                    groups = await self.rollouts.take()
                if groups is None:
                    break
                await self._train(groups)
                await self._deliver()
                await self._log(self.step, self._numbers)
            except BaseException:
                await self._rescue()
                raise
            if self._is_due(self.config.save_steps):
                await self._save()
        await self._save()
        return self.step == self.num_steps

    async def _rescue(self) -> None:
        """Line and checkpoint of the last whole step, whatever ended the training; none of weights amid a step."""
        if not self.learner.is_whole or self.learner.num_steps != self.step:
            return
        if self.rollouts.version == self.step:
            self.rollouts.put_back()  # nothing was learned from them
        try:
            try:
                if self._told_step < self.step:
                    await self._log(self.step, self._numbers)
            finally:
                await self._save()
        except RunStopped as error:  # a full disk may be the reason of both, and what ended the training is to be told
            self.screen.note(worded(str(error)))

    async def _train(self, groups: Sequence[Group]) -> None:
        """Learn from the groups: one step more, with the numbers of it and of them."""
        from agentenv.trainer.batch import build
        from agentenv.trainer.experience import needs_rollout_logprobs

        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        await asyncio.to_thread(self._write_samples, trajectories[: self.config.save_samples])
        num_samples = self.config.n_samples_per_prompt
        metrics = await asyncio.to_thread(lambda: measure(list(map(summarize, trajectories)), num_samples=num_samples))
        with self._timed("train_s"):
            batch = await asyncio.to_thread(build, trajectories, need_logprobs=needs_rollout_logprobs(self.config))
            numbers = {f"time/{key}": value for key, value in shares_of(metrics).items()}
            rolled = numbers_of(metrics) | ages_of(batch, self.step)
            numbers |= {f"rollout/{key}": value for key, value in rolled.items()}
            await whole(self._learn(batch, numbers, num_groups=len(groups)))

    async def _learn(self, batch: Batch, numbers: dict[str, float], *, num_groups: int) -> None:
        try:
            learned = await asyncio.to_thread(self.learner.train_step, batch)
        except RunStopped:  # it may be the batch's fault: handed out again, no restart would ever get past it
            self.rollouts.give_up()
            self._saved_step = _NONE
            raise
        self.step += 1
        rejected, self.rollouts.rejected = self.rollouts.rejected, Counter()
        numbers |= {f"rollout/{key}": value for key, value in rejections_of(rejected, num_groups).items()}
        self._numbers = numbers | {f"train/{key}": value for key, value in learned.items()}

    def _write_samples(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            self.records.samples.append(trajectory)

    async def _deliver(self) -> None:
        """Bring the new weights to the engines and evaluate them."""
        try:
            with self._timed("sync_s"):
                await self.rollouts.update_weights(await self._weights(), self.step)
        except EngineError as error:
            raise RunStopped(f"train step {self.step}: expected engines that take its weights, got: {error}") from error
        if self.step == self.num_steps or self._is_due(self.config.eval_steps):
            self._numbers |= await self._evaluate()

    async def _weights(self) -> list[tuple[str, Any]]:
        return await asyncio.to_thread(lambda: list(self.learner.weights(layout=self._layout)))

    async def _evaluate_at_an_end(self) -> None:
        """Before the first step; after the last one where an earlier session had no time for it."""
        journal = self.records.journal
        if self.evaluation is None or self.step not in (0, self.num_steps) or journal.has_evaluation:
            return
        numbers = await self._evaluate()
        if journal.last_step is None:
            await self._log(0, numbers)
        elif numbers:
            await whole(asyncio.to_thread(journal.amend, numbers))

    async def _evaluate(self) -> dict[str, float]:
        if self.evaluation is None:
            return {}
        with self._timed("eval_s"):
            numbers = await self.evaluation.run()
        if self.rollouts.runner.draining:
            return {}  # cut short: the share of what is easy is no estimate
        return {f"eval/{key}": value for key, value in numbers.items()}

    def _is_due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self.num_steps)

    async def _save(self) -> None:
        """A checkpoint of this step, after its line: what is saved has always been told."""
        if self.step == self._saved_step:
            return
        facts, trajectories = self.rollouts.state()

        def save() -> None:
            """In a thread, to its end."""
            state = {"learner": self.learner.state(), "rollouts": facts}
            self.records.journal.sync()
            self.records.checkpoints.save(self.step, state, trajectories)
            self._saved_step = self.step

        with self._timed("save_s"):
            await whole(asyncio.to_thread(save))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    async def _log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write a step's line; its seconds are those since the line before, a checkpoint's among them."""
        now = time.monotonic()
        wall_s = now - self._step_began
        times = {"wall_s": wall_s, "wait_s": 0.0, "train_s": 0.0, "sync_s": 0.0, "eval_s": 0.0, "save_s": 0.0}
        speed = speed_of(numbers, wall_s) if step and wall_s > 0 else {}
        line = {**numbers, **{f"time/{key}": value for key, value in (times | self._seconds).items()}, **speed}

        def write() -> None:
            """In a thread, since trackers may be slow; a line that failed is not told, and tried again by `_rescue`."""
            self.records.journal.log(step, line)
            self._told_step = step

        await whole(asyncio.to_thread(write))
        self.screen.step(step, line)
        self._seconds, self._step_began = {}, now
