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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentenv.errors import EngineError, RunStopped
from agentenv.metrics import summarize
from agentenv.record import RunWriter
from agentenv.trainer.checkpoint import Checkpoints
from agentenv.trainer.config import TrainConfig
from agentenv.trainer.evaluate import Evaluation, ages_of, measure, numbers_of, rejections_of, shares_of
from agentenv.trainer.journal import Journal
from agentenv.trainer.rollouts import Rollouts
from agentenv.trainer.screen import TrainScreen
from agentenv.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from agentenv.trainer.batch import Batch
    from agentenv.trainer.policy import Layout


class Learns(Protocol):
    """What the loop asks of a learner; `learner.Learner` is the one."""

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


@dataclass(frozen=True, slots=True)
class Records:
    """Where a training is written down."""

    journal: Journal
    checkpoints: Checkpoints
    samples: RunWriter
    """Gets --save_samples episodes of each train step."""
    folder: Path
    newest: Path | None = None
    """The checkpoint to go on from."""


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
        self.step = self._saved_step = 0
        """Train steps done."""
        self._is_training = False
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
        self.step = self._saved_step = self.rollouts.version = step

    async def run(self) -> bool:
        """Train to the last step; False when the runner was told to drain before.

        Raises:
            RunStopped: too many episodes failed, nothing is left to learn from, a loss is no number, or the engines
                took no weights.
        """
        self.screen.start(self.num_steps, self.step + 1)
        self._step_began = time.monotonic()
        if self.step == 0 and self.evaluation is not None:
            await self._log(0, await self._evaluate())
        while self.step < self.num_steps:
            try:
                with self._timed("wait_s"):
                    groups = await self.rollouts.take()
                if groups is None:
                    break
                numbers = await self._train(groups)
            except BaseException:
                await self._rescue()
                raise
            self.step += 1
            try:
                await self._deliver(numbers)
            except BaseException:  # what was learned outlives it
                await self._log(self.step, numbers)
                await self._keep()
                raise
            await self._log(self.step, numbers)
            if self._is_due(self.config.save_steps):
                await self._save()
        await self._save()
        return self.step == self.num_steps

    async def _rescue(self) -> None:
        """A checkpoint of the last whole step, whatever ended the training; none of weights in the middle of one."""
        if not self._is_training and self.learner.is_whole:
            self.rollouts.put_back()
            await self._keep()

    async def _keep(self) -> None:
        """Save while something else ends the training, and is to be told: a full disk may be the reason of both."""
        try:
            await asyncio.shield(self._save())
        except RunStopped as error:
            self.screen.note(str(error))

    async def _train(self, groups: Sequence[Group]) -> dict[str, float]:
        """Learn from the groups; the numbers of it and of them."""
        from agentenv.trainer.batch import build
        from agentenv.trainer.experience import needs_rollout_logprobs

        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        await asyncio.to_thread(self._write_samples, trajectories[: self.config.save_samples])
        with self._timed("train_s"):
            batch = await asyncio.to_thread(build, trajectories, need_logprobs=needs_rollout_logprobs(self.config))
            self._is_training = True
            try:
                learned = await asyncio.to_thread(self.learner.train_step, batch)
            except asyncio.CancelledError:
                raise  # the thread goes on
            except BaseException:
                self._is_training = False
                raise
            self._is_training = False
        metrics = measure(list(map(summarize, trajectories)), num_samples=self.config.n_samples_per_prompt)
        rejected, self.rollouts.rejected = self.rollouts.rejected, Counter()
        rolled = numbers_of(metrics) | ages_of(batch, self.step) | rejections_of(rejected, len(groups))
        numbers = {f"train/{key}": value for key, value in learned.items()}
        numbers |= {f"rollout/{key}": value for key, value in rolled.items()}
        numbers |= {f"time/{key}": value for key, value in shares_of(metrics).items()}
        return numbers

    def _write_samples(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            self.records.samples.append(trajectory)

    async def _deliver(self, numbers: dict[str, float]) -> None:
        """Bring the new weights to the engines and evaluate them."""
        try:
            with self._timed("sync_s"):
                await self.rollouts.update_weights(await self._weights(), self.step)
        except EngineError as error:
            raise RunStopped(f"train step {self.step}: expected engines that take its weights, got: {error}") from error
        if self.step == self.num_steps or self._is_due(self.config.eval_steps):
            numbers |= await self._evaluate()

    async def _weights(self) -> list[tuple[str, Any]]:
        return await asyncio.to_thread(lambda: list(self.learner.weights(layout=self._layout)))

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
        with self._timed("save_s"):
            facts, trajectories = self.rollouts.state()
            state = {"learner": await asyncio.to_thread(self.learner.state), "rollouts": facts}
            await asyncio.to_thread(self.records.journal.sync)
            await asyncio.to_thread(self.records.checkpoints.save, self.step, state, trajectories)
        self._saved_step = self.step

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
        speed = {}
        if step and wall_s > 0:
            num = numbers.get("rollout/num_episodes", 0.0)
            speed = {
                "throughput/samples_per_s": num / wall_s,
                "throughput/tokens_per_s": num * numbers.get("rollout/action_tokens", 0.0) / wall_s,
            }
        line = {**numbers, **{f"time/{key}": value for key, value in (times | self._seconds).items()}, **speed}
        await asyncio.to_thread(self.records.journal.log, step, line)  # trackers may be slow
        self.screen.step(step, line)
        self._seconds, self._step_began = {}, now
