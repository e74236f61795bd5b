"""EpisodeRunner: many episodes at once, retried where infrastructure failed, stopped where too many fail."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from agentenv._util.plurals import counted
from agentenv.core.trajectory import EpisodeError, Trajectory, with_cause
from agentenv.core.types import StopReason, Task
from agentenv.episode.failures import FAILED_SERVICE, may_be_a_service
from agentenv.episode.setup import EpisodeKey, EpisodeProgress, EpisodeSetup, Stage, StepRetries
from agentenv.episode.source import EpisodeSource
from agentenv.errors import DataError, RunStopped

logger = logging.getLogger(__name__)

OnEnd = Callable[[Trajectory], Awaitable[None] | None]
"""Receives the record of an episode that is over."""


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """How failed episodes are handled."""

    max_retries: int = 2
    """How often an episode is run again after an infrastructure error; other errors would only repeat."""
    max_step_retries: int | None = None
    """How often a step that asks for it is called again; None: `max_retries`."""
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
    retried: tuple[str, ...] = ()
    """Names of the errors in the attempts before it, as `Trajectory.retried`."""

    @property
    def episode_id(self) -> str:
        """Key of the episode, the same in every run over the same data."""
        return f"{self.task.task_id}/{self.sample_index}"


def plan(
    tasks: Iterable[Task],
    num_samples: int,
    *,
    finished: Container[str] = (),
    attempts: Mapping[str, tuple[int, tuple[str, ...]]] = MappingProxyType({}),
) -> Iterator[PlannedEpisode]:
    """Yield every episode of every task that is not in `finished`.

    `attempts` has the number of its next attempt and the names of the errors in those before.
    """
    for task in tasks:
        for sample_index in range(num_samples):
            planned = PlannedEpisode(task, sample_index)
            if planned.episode_id not in finished:
                yield PlannedEpisode(task, sample_index, *attempts.get(planned.episode_id, ()))


class EpisodeRunner:
    """Runs planned episodes, `concurrency` at a time, and passes each record to a callback as it ends."""

    def __init__(
        self, source: EpisodeSource, setup: EpisodeSetup, *, concurrency: int = 64, policy: ErrorPolicy = ErrorPolicy()
    ) -> None:
        self.source = source
        self.setup = setup
        self.concurrency = concurrency
        self.policy = policy
        num = policy.max_retries if policy.max_step_retries is None else policy.max_step_retries
        self.step_retries = StepRetries(num, policy.retry_wait_s)
        self.num_running = 0
        self.num_done = 0
        self.num_retries = 0
        self.errors: Counter[str] = Counter()
        """Failed episodes by message, that of the first one whose others differ in numbers and ids only."""
        self._outages: dict[str, str] = {}
        """By message of an error of a service: its type and cause."""
        self._first_messages: dict[tuple[str, ...], str] = {}
        self.in_flight: dict[str, EpisodeProgress] = {}
        """How far each running episode is, by its id, until its record has been handed over."""
        self.fix = "Fix the environment or the engine"
        """What to do if too many episodes fail."""
        self._advice = ""
        """What to do if a service may have failed an episode; its exception is known in the episode's process only."""
        self._recent_errors: deque[str | None] = deque(maxlen=policy.window or 0)  # of the last episodes, failed or not
        self._draining = asyncio.Event()

    async def run(self, planned: Iterable[PlannedEpisode], on_end: OnEnd) -> None:
        """Run the episodes; `on_end` gets each record once, after its last attempt.

        Raises:
            RunStopped: more than the policy's share of the episodes failed; records that came before are handed over.
        """
        pending = iter(planned)

        async def work() -> None:
            while not self.draining and (next_one := next(pending, None)) is not None:
                await self.run_one(next_one, on_end)

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self.concurrency):
                    workers.create_task(work())
                    await asyncio.sleep(0)  # thousands of first prompts in one iteration would block the event loop
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # one worker ended the run; the others were only cancelled

    def drain(self) -> str:
        """Start no further episode, so that `run` returns after those in flight; return how many these are, as text."""
        self._draining.set()
        return f"{counted(len(self.in_flight), 'episode')} in flight"

    @property
    def num_failed(self) -> int:
        """Number of failed episodes."""
        return self.errors.total()

    @property
    def draining(self) -> bool:
        """True if no further episode starts."""
        return self._draining.is_set()

    def check_error_share(self) -> None:
        """Raise if too many episodes have failed, unless the run drains.

        What fails then is not tried again: a resumed run does that, and judges the share.

        Raises:
            RunStopped: more than the policy's share failed.
        """
        window = self.policy.window
        recent = list(self._recent_errors)[-self.num_done :] if self.num_done else []  # a resumed count may be lower
        errors = Counter(filter(None, recent)) if window else self.errors
        num_failed, num_done = errors.total(), len(recent) if window else self.num_done
        if num_done and not self.draining and num_failed / num_done > self.policy.max_error_share:
            first = list(errors.items())[:3]
            messages = "; ".join(f"{message.rstrip('.')} ({counted(count, 'time')})" for message, count in first)
            advice = f"{self._advice}{self.fix} and --resume"
            if errors.keys() <= self._outages.keys():
                outages = Counter(self._outages[message] for message in errors.elements())
                (name, count), *_ = outages.most_common(1)
                advice = f"A service failed: {name} {counted(count, 'time')}. If it works again, --resume"
            raise RunStopped(
                f"episodes: expected at most {self.policy.max_error_share:.0%} of them to fail, got {num_failed} of "
                f"{'the last ' if window else ''}{num_done}. First errors: {messages}. "
                f"{advice}, or raise --max_error_share."
            )

    async def run_one(self, planned: PlannedEpisode, on_end: OnEnd) -> None:
        """Run one episode, again where infrastructure failed, and pass its record to `on_end`.

        Raises:
            RunStopped: more than the policy's share of the episodes have failed.
        """
        task, run_seed = planned.task, self.setup.sampling.seed
        env_seed = task.seed if task.seed is not None else derive_seed(run_seed or 0, task.task_id)
        progress = EpisodeProgress(asyncio.current_task())
        self.in_flight[planned.episode_id] = progress
        try:
            self.num_running += 1
            try:
                retried = planned.retried
                for num_retries in range(self.policy.max_retries + 1):
                    # Siblings share the environment's seed; no two attempts share that of tokens.
                    attempt = planned.first_attempt + num_retries
                    seed = None if run_seed is None else derive_seed(run_seed, planned.episode_id, attempt)
                    sampling = replace(self.setup.sampling, seed=seed)
                    setup = replace(self.setup, sampling=sampling, progress=progress, step_retries=self.step_retries)
                    key = EpisodeKey(planned.episode_id, task.task_id, attempt, env_seed, retried)
                    trajectory = await self.source.run(task, setup, key)
                    progress.stage = Stage.QUEUED
                    error = trajectory.error
                    if error is None or error.kind != "infra" or num_retries == self.policy.max_retries:
                        break
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._draining.wait(), self.policy.retry_wait_s * 2**num_retries)
                    if self.draining:
                        break
                    self.num_retries += 1
                    message = "episode %s is run again, as attempt %d of %d."
                    logger.warning(message, planned.episode_id, num_retries + 2, self.policy.max_retries + 1)
                    retried = (*trajectory.retried, with_cause(error.type, error.cause))
                if trajectory.error is not None and trajectory.error.kind == "env" and may_be_a_service(progress.error):
                    self._advice = f"{FAILED_SERVICE} "
            finally:
                self.num_running -= 1
            self._recent_errors.append(await self._hand_over(trajectory, on_end))
        finally:
            del self.in_flight[planned.episode_id]
        if self.num_done >= self.policy.min_episodes:
            self.check_error_share()

    async def _hand_over(self, trajectory: Trajectory, on_end: OnEnd) -> str | None:
        """Count an episode and pass its record on; return the message of its error."""
        message = self._count(trajectory)
        try:
            await passed(trajectory, on_end)
        except DataError as error:
            # No record can hold the episode: it becomes a failed one, with its tokens and actions but without results
            # and without the row, whose values may be what no record can hold.
            task = trajectory.task
            row = Task("", task_id=task.task_id, seed=task.seed, env=task.env)
            turns = [replace(turn, result=None) for turn in trajectory.turns]
            failed = EpisodeError("data", type(error).__name__, str(error), "record")
            bare = replace(
                trajectory, task=row, turns=turns, prompt="", tools=(), stop_reason=StopReason.ERROR, error=failed
            )
            self.num_done -= 1
            self.errors -= Counter([message] if message else [])
            message = self._count(bare)
            await passed(bare, on_end)
        return message

    def count_late(self, trajectory: Trajectory) -> None:
        """Count an episode that was handed over without an error, and has one now."""
        self.num_done -= 1
        with contextlib.suppress(ValueError):  # without a window there are none
            self._recent_errors.remove(None)
        self._recent_errors.append(self._count(trajectory))

    def _count(self, trajectory: Trajectory) -> str | None:
        self.num_done += 1
        error = trajectory.error
        if error is None:
            return None
        place = f" at {error.place}" if error.place else ""
        message = f"{error.where}{place}: {error.type}: {error.message}"
        words = re.sub(r"\w+", lambda word: "0" if re.search(r"\d", word[0]) else word[0], error.message)
        kind = (error.where, error.place, error.type, error.cause, words)
        message = self._first_messages.setdefault(kind, message)
        if error.kind == "infra" and error.where != Stage.GENERATE:
            self._outages[message] = with_cause(error.type, error.cause)
        self.errors[message] += 1
        return message


async def passed(trajectory: Trajectory, on_end: OnEnd) -> None:
    """Call `on_end`, which may be async."""
    ended = on_end(trajectory)
    if ended is not None:
        await ended


def derive_seed(*parts: object) -> int:
    """Return a seed in [0, 2^31) that depends on the parts alone."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1
