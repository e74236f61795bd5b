"""The training loop: take a batch of groups, learn from it, sync the weights to the engines, log, save.

The loop is the same for both modes. `Rollouts` decides what is in flight while the learner trains: nothing
(synchronous), or up to the allowed number of batches (--async_train). Step k trains weights k-1 into weights k. Records
count steps from 1; step 0 is the evaluation before any training.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from agentenv._util.calls import run_to_completion
from agentenv.core.trajectory import Group, Trajectory
from agentenv.errors import DataError, EngineError, RunStopped
from agentenv.runs.metrics import aggregate, summarize
from agentenv.runs.records.steps import StepGroup, append_rows, append_step, evaluation_row, train_row
from agentenv.runs.records.token_stats import TOKEN_STATS
from agentenv.training.config import TrainConfig
from agentenv.training.evaluation import Evaluation, numbers_by_env, numbers_of, spread_of
from agentenv.training.logs.records import Records
from agentenv.training.logs.samples import groups_to_keep, keep_evaluation
from agentenv.training.logs.screen import TrainScreen
from agentenv.training.logs.step_warnings import RepeatedWarnings, check_step
from agentenv.training.rollouts import Rollouts

if TYPE_CHECKING:
    from agentenv.training.algorithm.batch import Batch
    from agentenv.training.learner.learner import Learner
    from agentenv.training.learner.policy import Layout

_NO_STEP = -1
_MAX_FAILED = 200


@dataclass(eq=False)
class Loop:
    """A training run. Call `resume`, then `run`."""

    config: TrainConfig
    _: KW_ONLY
    learner: Learner
    rollouts: Rollouts
    evaluation: Evaluation | None
    records: Records
    screen: TrainScreen
    num_steps: int
    pass_scores: Mapping[str, float | None] = field(default_factory=dict)
    """As `aggregate` takes them."""
    layout: Layout = "checkpoint"
    step: int = 0
    """Train steps done."""
    failed: deque[Trajectory] = field(default_factory=partial(deque, maxlen=_MAX_FAILED))
    """Failed episodes since the last batch was taken, without those in the record; they join it if no step follows."""
    # All train steps are in one thread: torch starts threads, and the allocator keeps memory, for each one.
    _thread: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "agentenv-learner"))
    _saved_step: int = 0
    _logged_step: int = 0
    _numbers: dict[str, float] = field(default_factory=dict)
    _warnings: RepeatedWarnings = field(default_factory=RepeatedWarnings)
    _seconds: dict[str, float] = field(default_factory=dict)
    _step_groups: list[StepGroup] = field(default_factory=list)
    _kept: frozenset[str] = frozenset()
    _row: dict[str, Any] | None = None
    """Of the last train step, until it is written."""
    _token_stats: list[dict[str, Any]] = field(default_factory=list)
    """Of its kept episodes."""
    _step_began: float = field(default_factory=time.monotonic)

    async def resume(self) -> None:
        """Load the newest checkpoint, if one exists, and send its weights to the engines.

        Raises:
            ConfigError: the checkpoint belongs to another training run.
        """
        if self.records.newest is None:
            return
        step, state, trajectories = await asyncio.to_thread(self.records.checkpoints.load, self.records.newest)
        await asyncio.to_thread(self.learner.load_state, state["learner"])
        self.rollouts.load_state(state["rollouts"], trajectories)
        await self.rollouts.engine.update_weights(await self._weights(), step)
        self.step = self._saved_step = self._logged_step = self.rollouts.version = step

    async def run(self) -> bool:
        """Train to the last step, or until --early_stop. Return False if the runner was drained earlier.

        If it is cancelled during a train step, it completes that step, its log line and its checkpoint first.

        Raises:
            RunStopped: too many episodes failed, nothing is left to learn from, a loss is not finite, or the engines
                refused the weights.
        """
        self.screen.start(self.num_steps, self.step + 1)
        self._step_began = time.monotonic()
        journal = self.records.journal
        if self.step in (0, self.num_steps) and not journal.has_evaluation and self.evaluation is not None:
            # Evaluate before the first step, or after the last one if an earlier session did not.
            numbers = await self._evaluate()
            if journal.last_step is None:
                await self._log(0, numbers)
            elif numbers:
                await run_to_completion(asyncio.to_thread(journal.amend, numbers))
        while self.step < self.num_steps and not self.records.best.end_reason:
            try:
                with self._timed("wait_s"):
                    groups = await self.rollouts.take()
                if groups is None:
                    break
                self.failed.clear()
                await self._learn(groups)
                try:
                    with self._timed("sync_s"):
                        await self.rollouts.update_weights(await self._weights(), self.step)
                except EngineError as error:
                    raise RunStopped(
                        f"train step {self.step}: expected engines to load its weights, got: {error}"
                    ) from error
                if self.step == self.num_steps or self._is_due(self.config.eval_steps):
                    self._numbers |= await self._evaluate()
                await self._log(self.step, self._numbers)
            except BaseException:
                await self._save_after_error()
                raise
            if self._is_due(self.config.save_steps):
                await self._save()
        await self._save()
        return self.step == self.num_steps or bool(self.records.best.end_reason)

    async def _save_after_error(self) -> None:
        """Write the failed episodes since the last batch, and the line and checkpoint of the last completed step."""
        for trajectory in self.failed if self.config.save_samples else ():
            with contextlib.suppress(DataError, RunStopped):  # no record can hold it; the disk is full
                self.records.samples.append(trajectory)
        if not self.learner.step_completed or self.learner.num_steps != self.step:
            return
        if self.rollouts.version == self.step:
            self.rollouts.requeue()  # nothing was learned from them
        try:
            try:
                if self._logged_step < self.step:
                    await self._log(self.step, self._numbers)
            finally:
                await self._save()
        except RunStopped as error:  # the caller raises the first error, which a full disk may have caused too
            self.screen.note(str(error))

    async def _learn(self, groups: Sequence[Group]) -> None:
        """Take one train step on the groups and collect its numbers and theirs."""
        from agentenv.training.algorithm.batch import build

        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        kept = groups_to_keep(groups, self.config, self.step + 1)
        for trajectory in kept:
            await asyncio.to_thread(self.records.samples.append, trajectory)
        num_samples, pass_scores = self.config.n, self.pass_scores
        summaries = await asyncio.to_thread(lambda: list(map(summarize, trajectories)))
        metrics = await asyncio.to_thread(aggregate, summaries, num_samples=num_samples, pass_scores=pass_scores)
        by_env = await asyncio.to_thread(numbers_by_env, summaries, num_samples=num_samples, pass_scores=pass_scores)
        by_env |= {f"env/{name}/share": share for name, share in self.rollouts.order.shares.items()}
        with self._timed("train_s"):
            batch = await asyncio.to_thread(build, trajectories, need_logprobs=self.config.is_correction != "off")
            time_of = metrics.time
            shares = {"time/generate_share": time_of.generate_share, "time/step_share": time_of.step_share}
            numbers = {key: value for key, value in shares.items() if value is not None}
            ages_N = (self.step - batch.policy_versions_N).float()  # updates that the sampled tokens are behind
            mean, most = (float(ages_N.mean()), float(ages_N.max())) if len(ages_N) else (0.0, 0.0)
            rolled = numbers_of(metrics) | by_env | spread_of(summaries)
            rolled |= {"staleness_mean": mean, "staleness_max": most}
            if num := self.rollouts.runner.setup.engine.num_restarts:
                rolled["num_engine_restarts"] = num  # since the start
            numbers |= {f"rollout/{key}": value for key, value in rolled.items()}
            left = iter(summaries)
            self._step_groups = [
                StepGroup(each.group_id, tuple(next(left) for _ in each.trajectories)) for each in groups
            ]
            self._kept = frozenset(each.episode_id for each in kept)
            await run_to_completion(self._train_step(batch, numbers, num_groups=len(groups)))

    async def _train_step(self, batch: Batch, numbers: dict[str, float], *, num_groups: int) -> None:
        from agentenv.training.algorithm.batch import learned_episodes, token_stats

        try:
            learned = await asyncio.get_running_loop().run_in_executor(self._thread, self.learner.train_step, batch)
        except RunStopped:  # the batch may be the cause: if it were handed out again, a restart would fail again
            self.rollouts.discard()
            self._saved_step = _NO_STEP
            raise
        tokens = self.learner.learned
        trained = learned_episodes(batch, tokens, self.step) if tokens else {}
        self.step += 1
        stats = token_stats(batch, tokens, self.step, self._kept) if tokens and self.config.save_token_stats else ()
        self._token_stats = [each.to_dict() for each in stats]
        left_out, self.rollouts.rejected_groups = self.rollouts.rejected_groups, []
        self._row = train_row(
            self.step, [*self._step_groups, *left_out], trained,
            kept=self._kept, estimator=self.config.advantage_estimator, credit=self.config.credit,
        )  # fmt: skip
        rejected, self.rollouts.rejected = self.rollouts.rejected, Counter()
        numbers["rollout/rejection_rate"] = rejected.total() / (rejected.total() + num_groups)
        for key, num in rejected.items():
            env, _, why = key.rpartition("/")
            for prefix in ("rollout/", *([f"rollout/env/{env}/"] if env else [])):
                name = f"{prefix}num_rejected_{why}"
                numbers[name] = numbers.get(name, 0.0) + num
        self._numbers = numbers | {f"train/{key}": value for key, value in learned.items()}

    async def _weights(self) -> list[tuple[str, Any]]:
        return await asyncio.to_thread(lambda: list(self.learner.weights(layout=self.layout)))

    async def _evaluate(self) -> dict[str, float]:
        if self.evaluation is None:
            return {}
        with self._timed("eval_s"):
            numbers = await self.evaluation.run()
        if self.rollouts.runner.draining:
            return {}  # incomplete: short episodes finish first, so the mean would be biased
        folder, row = self.records.folder, evaluation_row(self.step, self.evaluation.episodes)
        await run_to_completion(asyncio.to_thread(keep_evaluation, folder, self.step, self.evaluation.kept))
        await run_to_completion(asyncio.to_thread(append_step, folder, row))
        numbers = {f"eval/{key}": value for key, value in numbers.items()}
        if self.records.best.add(self.step, numbers):
            save_model = partial(self.learner.save_model, tokenizer=self.rollouts.runner.setup.chat.tokenizer)
            with self._timed("save_s"):
                await run_to_completion(asyncio.to_thread(self.records.best.save, self.step, save_model))
        return numbers

    def _is_due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self.num_steps)

    async def _save(self) -> None:
        """Write a checkpoint of this step, after its log line."""
        if self.step == self._saved_step:
            return
        facts, trajectories = self.rollouts.state()

        def save() -> None:
            state = {"learner": self.learner.state(), "rollouts": facts}
            self.records.journal.sync()
            self.records.checkpoints.save(self.step, state, trajectories)
            self._saved_step = self.step

        with self._timed("save_s"):
            await run_to_completion(asyncio.to_thread(save))

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    async def _log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the line of a step. Its times are those since the previous line, including a checkpoint."""
        now = time.monotonic()
        wall_s = now - self._step_began
        times = {"wall_s": wall_s, "wait_s": 0.0, "train_s": 0.0, "sync_s": 0.0, "eval_s": 0.0, "save_s": 0.0}
        line = {**numbers, **{f"time/{key}": value for key, value in (times | self._seconds).items()}}
        if step and wall_s > 0:
            num = numbers.get("rollout/num_episodes", 0.0)
            line["throughput/samples_per_s"] = num / wall_s
            line["throughput/tokens_per_s"] = num * numbers.get("rollout/action_tokens", 0.0) / wall_s
        warnings = check_step(line, self.config) if step else []  # step 0 is an evaluation

        def write() -> None:  # in a thread, because trackers may be slow
            if self._row is not None and self._row["step"] == step:
                if self._token_stats:
                    append_rows(self.records.folder / TOKEN_STATS, self._token_stats)
                append_step(self.records.folder, self._row)
                self._row = None
            self.records.journal.log(step, line, [each.name for each in warnings])
            self._logged_step = step

        await run_to_completion(asyncio.to_thread(write))
        self.screen.step(step, line)
        for each in self._warnings.due(warnings) if step else ():
            self.screen.warn(step, each, self.records.folder)
        self._seconds, self._step_began = {}, now
