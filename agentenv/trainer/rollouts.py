"""Rollouts: groups of episodes in flight and finished, handed out a batch at a time, none staler than allowed.

A group is admitted as long as consumed + outstanding < (version + max_ahead + 1) · batch, where `version` is the number
of updates so far, and `take` hands out what was begun longest ago first. So a group begun at version v is taken by
step v + max_ahead at the latest: no sample is ever too old, and none has to be thrown away for its age.
With max_ahead 0 nothing is in flight while the learner trains: that is the synchronous loop.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentenv.engines.pool import can_sleep
from agentenv.errors import ConfigError, RunStopped
from agentenv.metrics import Summary, summarize
from agentenv.runner import EpisodeRunner, PlannedEpisode
from agentenv.trajectory import Group, Trajectory
from agentenv.types import Task

_MAX_REJECTED_BATCHES = 20
"""So many batches of groups rejected in a row, and there is nothing left to learn from."""


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """How many groups, and which of them are worth training on."""

    batch_groups: int
    num_samples: int
    """Episodes of a group."""
    max_ahead: int = 0
    """Batches that may be sampled ahead of the one that is trained on: the bound on staleness."""
    num_batches: int | None = None
    """Batches that will be taken in all, after which nothing more is sampled; None for no end."""
    num_extra: int = 0
    """Groups admitted beyond that, where filtering rejects many; those that become too old are dropped."""
    min_rewarded: int = 1
    """Episodes with a reward that a group needs."""
    score_range: tuple[float, float] | None = None
    """Dynamic filtering: the mean score of a group must lie inside, both ends outside."""
    partial: bool = False
    """Episodes go on across an update; without, it waits for those in flight."""
    sleeps: bool = False
    """The engine leaves its GPU while the learner trains."""
    concurrency: int = 64
    seed: int = 0


@dataclass(slots=True)
class Admitted:
    """A group's place in the order of admission."""

    number: int
    """From 0; decides the task."""
    version: int = sys.maxsize
    """Of the weights when its first episode began: no token of it is older; before that, no step has to wait for it."""


@dataclass(slots=True)
class Tickets:
    """Which task a group gets: pass after pass over the tasks, each in an order of its own."""

    tasks: Sequence[Task]
    seed: int
    _orders: dict[int, list[int]] = field(default_factory=dict)

    def task(self, number: int) -> Task:
        """The task of the group of that number; from the second pass on, its id says which pass."""
        lap, place = divmod(number, len(self.tasks))
        if lap not in self._orders:
            order = list(range(len(self.tasks)))
            random.Random(f"{self.seed}/{lap}").shuffle(order)
            self._orders = {key: known for key, known in self._orders.items() if key >= lap - 1} | {lap: order}
        task = self.tasks[self._orders[lap][place]]
        return replace(task, task_id=f"{task.task_id}@{lap}") if lap else task


class Rollouts:
    """Samples groups with the newest weights, as far ahead as allowed. All methods belong to one event loop.

    Args:
        runner: runs the episodes; its engine takes the weights.
        tasks: at least one.
        options: sizes and filters.
        on_episode: gets the Summary of each episode that ends.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        tasks: Sequence[Task],
        options: RolloutOptions,
        on_episode: Callable[[Summary], None] = lambda summary: None,
    ) -> None:
        if not tasks:
            raise ConfigError("--prompt_data: expected at least one task, got none. Check the data.")
        self.runner, self.options = runner, options
        self._tickets, self._on_episode = Tickets(tasks, options.seed), on_episode
        self.version = 0
        """Updates so far."""
        self.num_consumed = self._next = self._rejected_in_a_row = self._in_flight = 0
        self.rejected: Counter[str] = Counter()
        """Groups that were not handed out since the last `take`, by reason: low, high, failed, stale."""
        self._again: deque[int] = deque()  # numbers that an earlier session left in flight
        self._open: dict[asyncio.Task[None], Admitted] = {}
        self._ready: list[tuple[Admitted, Group]] = []
        self._handed_out: list[tuple[Admitted, Group]] = []
        self._slots = asyncio.Semaphore(options.concurrency)
        self._gate, self._changed = asyncio.Event(), asyncio.Event()
        self._gate.set()
        self._failure: BaseException | None = None

    # --- what the loop asks for -------------------------------------------------------------------------------------

    async def take(self) -> list[Group] | None:
        """A batch of groups, the oldest first; None when the runner drains.

        Raises:
            RunStopped: too many episodes failed, or group after group was rejected.
        """
        self._admit()
        while not self.runner.draining:
            if self._failure is not None:
                raise self._failure
            oldest = self.version - self.options.max_ahead
            if len(self._ready) >= self.options.batch_groups and all(a.version > oldest for a in self._open.values()):
                if self.options.sleeps:
                    await can_sleep(self.runner.engine).sleep()
                return self._hand_out(oldest)
            self._changed.clear()
            await self._changed.wait()
        return None

    def _hand_out(self, oldest: int) -> list[Group]:
        self._ready.sort(key=lambda item: (item[0].version, item[0].number))
        chosen, rest = self._ready[: self.options.batch_groups], self._ready[self.options.batch_groups :]
        self._ready = [(admitted, group) for admitted, group in rest if admitted.version > oldest]
        self.rejected["stale"] += len(rest) - len(self._ready)
        self.num_consumed += self.options.batch_groups
        self._handed_out = chosen
        return [group for _, group in sorted(chosen, key=lambda item: item[0].number)]

    def put_back(self) -> None:
        """The batch that was handed out last was not trained on: it is handed out again."""
        self._ready += self._handed_out
        self.num_consumed -= len(self._handed_out)
        self._handed_out = []

    def give_up(self) -> None:
        """The batch that was handed out last cannot be trained on: others take its place."""
        self.num_consumed -= len(self._handed_out)
        self._handed_out = []

    async def update_weights(self, named_tensors: Iterable[tuple[str, Any]], version: int) -> None:
        """New weights for what is sampled from now on; with them more groups are admitted.

        Raises:
            EngineError: the engine could not take them.
        """
        if not self.options.partial:
            self._gate.clear()
            while self._in_flight and self._failure is None and not self.runner.draining:
                self._changed.clear()
                await self._changed.wait()
        engine: Any = self.runner.engine
        if self.options.sleeps:
            await can_sleep(engine).wake_up()
        await engine.update_weights(named_tensors, version)
        self.version, self._handed_out = version, []
        self._gate.set()
        self._admit()

    async def close(self) -> None:
        """Cancel what is in flight."""
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)
        self._open.clear()

    def state(self) -> tuple[dict[str, Any], list[Trajectory]]:
        """What a later session needs to go on: numbers, and the finished episodes that were not handed out yet."""
        facts = {
            "version": self.version,
            "num_consumed": self.num_consumed,
            "next": self._next,
            "again": sorted([*self._again, *(admitted.number for admitted in self._open.values())]),
            "rejected": dict(self.rejected),
            "rejected_in_a_row": self._rejected_in_a_row,
            "ready": [(admitted.number, admitted.version, len(group.trajectories)) for admitted, group in self._ready],
        }
        return facts, [trajectory for _, group in self._ready for trajectory in group.trajectories]

    def load_state(self, facts: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> None:
        """Go on from there: what was in flight is sampled again, first."""
        self.version, self.num_consumed = int(facts["version"]), int(facts["num_consumed"])
        self._next, self._again = int(facts["next"]), deque(facts["again"])
        self.rejected = Counter(facts.get("rejected", {}))
        self._rejected_in_a_row = int(facts.get("rejected_in_a_row", 0))
        left = iter(trajectories)
        for number, version, num in facts["ready"]:
            group = tuple(next(left) for _ in range(num))
            if version < self.version - self.options.max_ahead:
                self._again.append(number)  # the bound was higher then
            else:
                self._ready.append((Admitted(number, version), Group(group[0].group_id, group)))

    def wake(self) -> None:
        """Have `take` and `update_weights` look whether the runner drains."""
        self._changed.set()

    # --- groups in flight -------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        options = self.options
        num_batches = min(self.version + options.max_ahead + 1, options.num_batches or sys.maxsize)
        room = num_batches * options.batch_groups + options.num_extra
        while not self.runner.draining and self.num_consumed + len(self._open) + len(self._ready) < room:
            number = self._again.popleft() if self._again else self._next
            self._next = max(self._next, number + 1)
            admitted = Admitted(number)
            task = asyncio.ensure_future(self._sample(admitted))
            self._open[task] = admitted
            task.add_done_callback(self._over)

    async def _sample(self, admitted: Admitted) -> None:
        task = self._tickets.task(admitted.number)
        planned = [PlannedEpisode(task, index) for index in range(self.options.num_samples)]
        async with asyncio.TaskGroup() as episodes:
            running = [episodes.create_task(self._episode(each, admitted)) for each in planned]
        trajectories = tuple(episode.result() for episode in running)
        reason = self._reason_against(trajectories)
        if self.runner.draining and any(map(self._was_cut_short, trajectories)):
            self._again.append(admitted.number)
        elif reason is None:
            self._ready.append((admitted, Group(task.task_id, trajectories)))
            self._rejected_in_a_row = 0
        else:
            self.rejected[reason] += 1
            self._rejected_in_a_row += 1
            self._check_rejected(reason)

    def _was_cut_short(self, trajectory: Trajectory) -> bool:
        """Whether draining came before an episode's last retry."""
        error = trajectory.error
        return error is not None and error.kind == "infra" and trajectory.attempt < self.runner.policy.max_retries

    async def _episode(self, planned: PlannedEpisode, admitted: Admitted) -> Trajectory:
        records: list[Trajectory] = []
        async with self._slots:
            while not self._gate.is_set():
                await self._gate.wait()
            admitted.version = min(admitted.version, self.version)
            self._in_flight += 1
            try:
                await self.runner.run_one(planned, records.append)
            finally:
                self._in_flight -= 1
                self._changed.set()
        self._on_episode(summarize(records[0]))
        return records[0]

    def _over(self, task: asyncio.Task[None]) -> None:
        admitted = self._open.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._again += [admitted.number] if admitted is not None else []
            self._failure = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        self._changed.set()
        if self._failure is None and not task.cancelled():
            self._admit()  # in the place of one that was rejected

    def _reason_against(self, trajectories: Sequence[Trajectory]) -> str | None:
        """Why nothing is to be learned from a group; None where something is."""
        rewarded = [trajectory for trajectory in trajectories if trajectory.reward is not None]
        if len(rewarded) < self.options.min_rewarded:
            return "failed"
        if self.options.score_range is None:
            return None
        from agentenv.trainer.shaping import filter_groups

        low, high = self.options.score_range
        filtered = filter_groups([[t.reward if t.score is None else t.score for t in rewarded]], low=low, high=high)
        return "low" if filtered.num_low else "high" if filtered.num_high else None

    def _check_rejected(self, reason: str) -> None:
        if self._rejected_in_a_row >= _MAX_REJECTED_BATCHES * self.options.batch_groups:
            why = {"failed": "Their episodes failed", "low": "No sample of theirs is good", "high": "All are solved"}
            raise RunStopped(
                f"rollouts: expected groups to train on, got {self._rejected_in_a_row} in a row without one. "
                f"{why[reason]}: mend the environment, take other --prompt_data, or widen "
                "--dynamic_filtering_reward_range."
            )
