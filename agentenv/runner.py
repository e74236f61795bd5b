"""EpisodeRunner: many episodes at once, retried where infrastructure failed, stopped where too many fail."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentenv.agent import Engine
from agentenv.chat import Chat
from agentenv.episode import EpisodeKey
from agentenv.errors import DataError, RunStopped
from agentenv.loading import EpisodeSource
from agentenv.trajectory import EpisodeError, Trajectory
from agentenv.types import Limits, SamplingParams, StopReason, Task

logger = logging.getLogger(__name__)


OnEnd = Callable[[Trajectory], Awaitable[None] | None]
"""Gets the record of an episode that is over."""


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """What to do about failed episodes."""

    max_retries: int = 2
    """How often an episode is run again after an infrastructure error; other errors would only come again."""
    retry_wait_s: float = 1.0
    """Wait before the first retry; doubled for each one after it."""
    max_error_share: float = 0.2
    """The run stops when more than this share of the episodes failed."""
    min_episodes: int = 20
    """Episodes that must be over before the share is judged."""
    window: int | None = None
    """Judge only the last so many; None: all of the run."""


@dataclass(frozen=True, slots=True)
class PlannedEpisode:
    """One episode to run: sample `sample_index` of a task."""

    task: Task
    sample_index: int
    first_attempt: int = 0
    """Above 0 when a run is resumed in which infrastructure failed the episode."""

    @property
    def episode_id(self) -> str:
        """Key of the episode, the same in every run over the same data."""
        return f"{self.task.task_id}/{self.sample_index}"


def plan(
    tasks: Iterable[Task], num_samples: int, *, finished: Container[str] = (), attempts: Mapping[str, int] | None = None
) -> Iterator[PlannedEpisode]:
    """Every episode of every task that is not in `finished`, task by task; `attempts` has where to count on from."""
    for task in tasks:
        for sample_index in range(num_samples):
            planned = PlannedEpisode(task, sample_index)
            if planned.episode_id not in finished:
                yield replace(planned, first_attempt=(attempts or {}).get(planned.episode_id, 0))


class EpisodeRunner:
    """Runs planned episodes, `concurrency` at a time, and hands each record to a callback as it ends."""

    def __init__(
        self,
        source: EpisodeSource,
        *,
        engine: Engine,
        chat: Chat,
        sampling: SamplingParams,
        limits: Limits,
        concurrency: int = 64,
        policy: ErrorPolicy = ErrorPolicy(),
    ) -> None:
        self.source, self.engine, self.chat = source, engine, chat
        self.sampling, self.limits, self.concurrency, self.policy = sampling, limits, concurrency, policy
        self.num_running = self.num_done = self.num_failed = self.num_retries = 0
        self.errors: Counter[str] = Counter()
        self._recent: deque[str | None] = deque(maxlen=policy.window or 0)  # the messages of those that failed
        self.in_flight: dict[str, asyncio.Task[Any] | None] = {}
        """The task that runs an episode, by the episode's id, until its record has been handed over."""
        self._draining = asyncio.Event()

    async def run(self, planned: Iterable[PlannedEpisode], on_end: OnEnd) -> None:
        """Run the episodes; `on_end` gets each record once, after its last attempt.

        Raises:
            RunStopped: more than the policy's share of the episodes failed; what ended before has been handed over.
        """
        pending = iter(planned)
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self.concurrency):
                    workers.create_task(self._work(pending, on_end))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # one worker ended the run; the others were only cancelled

    def drain(self) -> str:
        """Start no further episode; `run` returns when those in flight are over. Gives what these are, for people."""
        self._draining.set()
        return f"{len(self.in_flight)} episodes in flight"

    @property
    def draining(self) -> bool:
        """`drain` was called."""
        return self._draining.is_set()

    def check_error_share(self) -> None:
        """Judge the share of failed episodes.

        Raises:
            RunStopped: it is above the policy's; with the first three messages.
        """
        recent = list(self._recent)[-self.num_done :] if self.num_done else []  # counts may have been set back
        errors = Counter(filter(None, recent)) if self.policy.window else self.errors
        num_failed, num_done = (errors.total(), len(recent)) if self.policy.window else (self.num_failed, self.num_done)
        if num_done and num_failed / num_done > self.policy.max_error_share:
            first = list(errors.items())[:3]
            messages = "; ".join(f"{message.rstrip('.')} ({count} times)" for message, count in first)
            raise RunStopped(
                f"run: expected at most {self.policy.max_error_share:.0%} of the episodes to fail, got {num_failed} of "
                f"{'the last ' if self.policy.window else ''}{num_done}. First errors: {messages}. "
                "Mend the environment or the engine and --resume, or raise --max_error_share."
            )

    async def _work(self, pending: Iterator[PlannedEpisode], on_end: OnEnd) -> None:
        while not self.draining and (planned := next(pending, None)) is not None:
            await self.run_one(planned, on_end)

    async def run_one(self, planned: PlannedEpisode, on_end: OnEnd) -> None:
        """Run one episode, again where infrastructure failed, and hand its record to `on_end`.

        Raises:
            RunStopped: more than the policy's share of the episodes failed so far.
        """
        self.in_flight[planned.episode_id] = asyncio.current_task()
        try:
            self._recent.append(await self._run_one(planned, on_end))
        finally:
            del self.in_flight[planned.episode_id]
        if self.num_done >= self.policy.min_episodes:
            self.check_error_share()

    async def _run_one(self, planned: PlannedEpisode, on_end: OnEnd) -> str | None:
        """Count an episode and hand it over; the message of its error."""
        self.num_running += 1
        try:
            trajectory = await self._episode(planned)
        finally:
            self.num_running -= 1
        message = self._count(trajectory)
        try:
            await _handed_over(trajectory, on_end)
        except DataError as error:
            bare = _without_content(trajectory, error)
            self.num_done -= 1
            self.num_failed -= trajectory.error is not None
            message = self._count(bare)
            await _handed_over(bare, on_end)
        return message

    async def _episode(self, planned: PlannedEpisode) -> Trajectory:
        """Run an episode, again where infrastructure failed, and give its last attempt."""
        for num_retried in range(self.policy.max_retries + 1):
            trajectory = await self._attempt(planned, planned.first_attempt + num_retried)
            failed = trajectory.error is not None and trajectory.error.kind == "infra"
            if not failed or num_retried == self.policy.max_retries:
                break
            await self._pause(self.policy.retry_wait_s * 2**num_retried)
            if self.draining:
                break
            self.num_retries += 1
        return trajectory

    async def _attempt(self, planned: PlannedEpisode, attempt: int) -> Trajectory:
        task, run_seed = planned.task, self.sampling.seed
        # Siblings get the same environment; every sample and every attempt gets other tokens.
        env_seed = task.seed if task.seed is not None else derive_seed(run_seed or 0, task.task_id)
        seed = None if run_seed is None else derive_seed(run_seed, planned.episode_id, attempt)
        return await self.source.episode(
            task,
            engine=self.engine,
            chat=self.chat,
            sampling=replace(self.sampling, seed=seed),
            limits=self.limits,
            key=EpisodeKey(planned.episode_id, task.task_id, attempt, env_seed),
        )

    async def _pause(self, wait_s: float) -> None:
        try:
            await asyncio.wait_for(self._draining.wait(), wait_s)
        except TimeoutError:
            return

    def _count(self, trajectory: Trajectory) -> str | None:
        self.num_done += 1
        error = trajectory.error
        if error is None:
            return None
        self.num_failed += 1
        place = f" at {error.place}" if error.place else ""
        message = f"{error.where}{place}: {error.type}: {error.message}"
        self.errors[message] += 1
        return message


async def _handed_over(trajectory: Trajectory, on_end: OnEnd) -> None:
    ended = on_end(trajectory)
    if ended is not None:
        await ended


def _without_content(trajectory: Trajectory, error: DataError) -> Trajectory:
    """An episode that no record can hold as one that failed: its tokens and actions, nothing of the environment's."""
    turns = [replace(turn, result=None) for turn in trajectory.turns]
    failed = EpisodeError("data", type(error).__name__, str(error), "record")
    return replace(trajectory, turns=turns, prompt="", tools=(), stop_reason=StopReason.ERROR, error=failed)


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2^31) from the parts, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1
