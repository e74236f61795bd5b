"""Rollouts: groups of episodes in flight and finished. `take` returns them in batches, none staler than allowed.

A group is admitted while consumed + outstanding < (version + bound + 1) · batch, where `version` is the number of
updates so far and `bound` is `TrainConfig.staleness_bound`, and `take` returns the groups that started first. So a
group that started at version v is taken by step v + bound at the latest: no sample ever becomes too old. With a bound
of 0 nothing is in flight while the learner trains; that is the synchronous loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from agentenv.core.engine import Engine
from agentenv.core.trajectory import Group, Trajectory
from agentenv.core.types import Completion, SamplingParams, Task
from agentenv.episode.runner import EpisodeRunner, PlannedEpisode
from agentenv.errors import ConfigError, RunStopped
from agentenv.runs.group_rewards import GroupGrader, count_failures
from agentenv.runs.metrics import summarize
from agentenv.runs.records.steps import StepGroup
from agentenv.training.config import TrainConfig
from agentenv.training.config_checks import GROUP_ESTIMATORS
from agentenv.training.task_order import TaskOrder

_FIXED = ("temperature", "top_p", "top_k", "min_p")
"""Sampling parameters that no environment changes: the learner scores tokens as the flags describe them."""
_MAX_KEPT_REJECTED = 10_000
_MAX_REJECTED_BATCHES = 20
"""Training stops after this many batches of groups were rejected in a row."""


@dataclass(slots=True)
class AdmittedGroup:
    """A group's position in the order of admission, and its policy version."""

    number: int
    """Position from 0; determines the task."""
    version: int = sys.maxsize
    """Version of the weights when the first episode started: no token is older. No step waits for it before that."""
    is_grading: bool = False
    """True while only its grader is not done: no step waits for it, unless it lacks groups."""


class Rollouts:
    """Samples groups with the newest weights, as far ahead as allowed. Use it from one event loop.

    Args:
        runner: runs the episodes. Its engine takes new weights.
        order: the tasks.
        config: sizes, staleness bound and filters.
        on_episode: called with each finished episode; with a grader, if it did not fail before, after its group is
            graded.
        grader: grades groups, for --group_reward. Neither other groups nor weight updates wait for it.
        num_batches: total number of batches to sample; None means no limit.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        order: TaskOrder,
        config: TrainConfig,
        on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
        grader: GroupGrader | None = None,
        *,
        num_batches: int | None,
    ) -> None:
        self.runner = runner
        self.order = order
        self.config = config
        self.engine = runner.setup.engine
        self.version = 0
        """Updates so far."""
        self.num_consumed = 0
        """Groups returned by `take` so far."""
        self._on_episode = on_episode
        self._grader = grader
        self._num_batches = num_batches
        self._next = 0
        self._rejected_in_a_row = 0
        self._in_flight = 0
        self.rejected: Counter[str] = Counter()
        """Groups rejected since the last `take`, by reason: low, high, failed, stale; in a mixture by ENV/REASON."""
        self.rejected_groups: list[StepGroup] = []
        """The same groups, of this session; older ones are dropped when there are many."""
        self._again: deque[int] = deque()  # positions that were in flight when an earlier session ended
        self._open: dict[asyncio.Task[None], AdmittedGroup] = {}
        self._ready: list[tuple[AdmittedGroup, Group]] = []
        self._handed_out: list[tuple[AdmittedGroup, Group]] = []
        self._slots = asyncio.Semaphore(config.concurrency)
        self._changed = asyncio.Event()
        self._gate = asyncio.Event()
        self._gate.set()
        self._failure: BaseException | None = None

    # --- called by the loop -----------------------------------------------------------------------------------------

    async def take(self) -> list[Group] | None:
        """Return the next batch of groups, oldest first; None if the runner is draining.

        Raises:
            RunStopped: too many episodes failed, or group after group was rejected.
        """
        self._admit()
        while not self.runner.draining:
            if self._failure is not None:
                raise self._failure
            oldest = self.version - self.config.staleness_bound
            is_complete = all(a.version > oldest or a.is_grading for a in self._open.values())
            if len(self._ready) >= self.config.rollout_batch_size and is_complete:
                self.order.update()
                if self.config.vllm_enable_sleep:
                    await self.engine.sleep()
                self._ready.sort(key=lambda item: (item[0].version, item[0].number))
                num = self.config.rollout_batch_size
                self._handed_out, rest = self._ready[:num], self._ready[num:]
                self._ready = [(admitted, group) for admitted, group in rest if admitted.version > oldest]
                for admitted, group in rest:
                    if admitted.version <= oldest:
                        self._reject("stale", group)
                self.num_consumed += num
                return [group for _, group in sorted(self._handed_out, key=lambda item: item[0].number)]
            self._changed.clear()
            await self._changed.wait()
        return None

    def requeue(self) -> None:
        """Return the last batch to the queue, because it was not trained on."""
        self._ready += self._handed_out
        self.num_consumed -= len(self._handed_out)
        self._handed_out = []

    def discard(self) -> None:
        """Drop the last batch, because it cannot be trained on; other groups replace it."""
        self.num_consumed -= len(self._handed_out)
        self._handed_out = []

    async def update_weights(self, named_tensors: Iterable[tuple[str, Any]], version: int) -> None:
        """Send new weights to the engine, then admit more groups.

        Raises:
            EngineError: the engine could not load them.
        """
        if not self.config.partial_rollout:
            self._gate.clear()
            while self._in_flight and self._failure is None and not self.runner.draining:
                self._changed.clear()
                await self._changed.wait()
        if self.config.vllm_enable_sleep:
            await self.engine.wake_up()
        await self.engine.update_weights(named_tensors, version)
        self.version, self._handed_out = version, []
        self.order.forget(self._outstanding())
        self._gate.set()
        self._admit()

    async def close(self) -> None:
        """Cancel all episodes in flight."""
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)
        self._open.clear()

    def state(self) -> tuple[dict[str, Any], list[Trajectory]]:
        """Return what a later session needs: numbers, and the finished episodes that `take` has not returned."""
        # A group that is over stays in `_open` until its task's callback has run.
        over = {admitted.number for admitted, _ in (*self._ready, *self._handed_out)}
        open_numbers = [admitted.number for admitted in self._open.values() if admitted.number not in over]
        facts = {
            "version": self.version,
            "num_consumed": self.num_consumed,
            "next": self._next,
            "again": sorted({*self._again, *open_numbers}),
            "rejected": dict(self.rejected),
            "rejected_in_a_row": self._rejected_in_a_row,
            "order": self.order.state(self._outstanding()),
            "ready": [(admitted.number, admitted.version, len(group.trajectories)) for admitted, group in self._ready],
        }
        return facts, [trajectory for _, group in self._ready for trajectory in group.trajectories]

    def load_state(self, facts: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> None:
        """Resume from a state. Groups that were in flight are sampled again first."""
        self.version, self.num_consumed = int(facts["version"]), int(facts["num_consumed"])
        self._next, self._again = int(facts["next"]), deque(facts["again"])
        self.rejected = Counter(facts.get("rejected", {}))
        self._rejected_in_a_row = int(facts.get("rejected_in_a_row", 0))
        self.order.load_state(facts.get("order", {}))
        left = iter(trajectories)
        for number, version, num in facts["ready"]:
            group = tuple(next(left) for _ in range(num))
            if version < self.version - self.config.staleness_bound:
                self._again.append(number)  # the bound was higher then
            else:
                self._ready.append((AdmittedGroup(number, version), Group(group[0].group_id, group)))

    def _outstanding(self) -> set[int]:
        """Return the numbers of the groups that are in flight, finished, or to be sampled again."""
        admitted = [*self._open.values(), *(each for each, _ in (*self._ready, *self._handed_out))]
        return {*self._again, *(each.number for each in admitted)}

    def wake(self) -> None:
        """Make `take` and `update_weights` check whether the runner is draining."""
        self._changed.set()

    # --- groups in flight -------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        def over(task: asyncio.Task[None]) -> None:
            admitted = self._open.pop(task, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._again += [admitted.number] if admitted is not None else []
                self._failure = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            self._changed.set()
            if self._failure is None and not task.cancelled():
                self._admit()  # replaces a rejected group

        num_batches = min(self.version + self.config.staleness_bound + 1, self._num_batches or sys.maxsize)
        batch = self.config.rollout_batch_size
        # More than a batch are for filters that reject many. Groups that become too old are dropped.
        room = (num_batches - 1) * batch + (self.config.vllm_generate_batch_size or batch)
        while not self.runner.draining and self.num_consumed + len(self._open) + len(self._ready) < room:
            number = self._again.popleft() if self._again else self._next
            self._next = max(self._next, number + 1)
            admitted = AdmittedGroup(number)
            task = asyncio.ensure_future(self._sample(admitted, self.order.task(number)))
            self._open[task] = admitted
            task.add_done_callback(over)

    async def _sample(self, admitted: AdmittedGroup, task: Task) -> None:
        planned = [PlannedEpisode(task, index) for index in range(self.config.n)]
        async with asyncio.TaskGroup() as episodes:
            running = [episodes.create_task(self._episode(each, admitted)) for each in planned]
        trajectories = [episode.result() for episode in running]
        if self._grader is not None:
            admitted.is_grading = True
            before, trajectories = trajectories, await self._grader.grade(trajectories)
            for ungraded, trajectory in zip(before, trajectories, strict=True):
                if ungraded.error is None:
                    self._on_episode(trajectory)
            count_failures(self.runner, trajectories)
        # Why the group is rejected, if it is. A kept group still has its failed episodes: `algorithm/batch.py` leaves
        # them out.
        reason: str | None = None
        rewarded = [trajectory for trajectory in trajectories if trajectory.reward is not None]
        if len(rewarded) < (2 if self.config.advantage_estimator in GROUP_ESTIMATORS else 1):
            reason = "failed"
        elif self.config.dynamic_filtering:
            # Dynamic sampling of DAPO, arXiv:2503.14476, section 3.2: groups of equal scores have no advantages.
            low, high = self.config.dynamic_filtering_reward_range
            scores = [t.reward if t.score is None else t.score for t in rewarded]
            mean = fmean(score for score in scores if score is not None)
            reason = "low" if mean <= low else "high" if mean >= high else None
        failed = [each for each in trajectories if each.error is not None and each.error.kind == "infra"]
        if self.runner.draining and any(each.attempt < self.runner.policy.max_retries for each in failed):
            self._again.append(admitted.number)  # draining prevented an episode's retry
            return
        self.order.observe(admitted.number, trajectories)
        if reason is None and admitted.version < self.version - self.config.staleness_bound:
            # Its grader took longer than the steps that it could have joined.
            self._reject("stale", Group(task.task_id, tuple(trajectories)))
        elif reason is None:
            self._ready.append((admitted, Group(task.task_id, tuple(trajectories))))
            self._rejected_in_a_row = 0
        else:
            self._reject(reason, Group(task.task_id, tuple(trajectories)))
            self._rejected_in_a_row += 1
            if self._rejected_in_a_row >= _MAX_REJECTED_BATCHES * self.config.rollout_batch_size:
                why = {
                    "failed": "Their episodes failed",
                    "low": "Their scores are too low",
                    "high": "Their scores are too high",
                }
                raise RunStopped(
                    f"rollouts: expected groups to train on, got {self._rejected_in_a_row} in a row without one. "
                    f"{why[reason]}. Fix the environment, use other --data, or widen "
                    "--dynamic_filtering_reward_range."
                )

    def _reject(self, reason: str, group: Group) -> None:
        env = group.trajectories[0].task.env
        self.rejected[f"{env}/{reason}" if env else reason] += 1
        self.rejected_groups.append(StepGroup(group.group_id, tuple(map(summarize, group.trajectories)), reason))
        del self.rejected_groups[:-_MAX_KEPT_REJECTED]

    async def _episode(self, planned: PlannedEpisode, admitted: AdmittedGroup) -> Trajectory:
        records: list[Trajectory] = []

        def on_end(trajectory: Trajectory) -> None:  # before `run_one` raises, if it is one failed episode too many
            records.append(trajectory)
            if self._grader is None or trajectory.error is not None:
                self._on_episode(trajectory)

        async with self._slots:
            while not self._gate.is_set():
                await self._gate.wait()
            admitted.version = min(admitted.version, self.version)
            self._in_flight += 1
            try:
                await self.runner.run_one(planned, on_end)
            finally:
                self._in_flight -= 1
                self._changed.set()
        return records[0]


class FixedSamplingEngine(Engine):
    """The engine of training episodes. It refuses sampling parameters that the learner does not know about.

    Forwards `generate`, `score`, `update_weights`, `sleep` and `wake_up`.

    Args:
        engine: the engine to forward to.
        sampling: temperature, top_p, top_k and min_p of every action. Lengths, stops and seeds may vary.
    """

    def __init__(self, engine: Engine, sampling: SamplingParams) -> None:
        self._engine = engine
        self._sampling = sampling

    @property
    def constraint_problem(self) -> str:
        """See `Engine`."""
        return self._engine.constraint_problem

    @property
    def num_restarts(self) -> int:
        """See `Engine`."""
        return self._engine.num_restarts

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.core.engine.Engine`.

        Raises:
            ConfigError: an environment asks for another distribution than the one that is trained.
        """
        for name in _FIXED:
            value, expected = getattr(sampling, name), getattr(self._sampling, name)
            if name == "top_k":  # 0 and -1 mean the same
                value, expected = max(value, 0), max(expected, 0)
            if value != expected:
                raise ConfigError(
                    f"episode {request_id.rpartition('/')[0]}: expected actions that are sampled as they are trained, "
                    f"with {name} {expected}, got {value} from the environment's sampling. Change only lengths and "
                    f"stops there, with dataclasses.replace(states['sampling_params'], ...), or set --{name} {value}."
                )
        return await self._engine.generate(prompt_token_ids, sampling, request_id=request_id)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token; see `Engine`."""
        return await self._engine.score(token_ids)

    async def update_weights(self, named_tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        """Load new weights."""
        await self._engine.update_weights(named_tensors, policy_version)

    async def sleep(self) -> None:
        """Free the GPU; ConfigError if the engine cannot."""
        await self._engine.sleep()

    async def wake_up(self) -> None:
        """Take the GPU back."""
        await self._engine.wake_up()
