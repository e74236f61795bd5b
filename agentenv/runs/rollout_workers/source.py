"""The driver's side: a source whose episodes run in workers, processes of this machine that load the job again."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Task
from agentenv.episode.env_actors.actors import EnvActorConfig, EnvActors
from agentenv.episode.env_actors.local import LocalActor
from agentenv.episode.failures import record_failure
from agentenv.episode.setup import EpisodeKey, EpisodeProgress, EpisodeSetup, Stage
from agentenv.errors import AgentEnvError, ConfigError, RunStopped
from agentenv.runs.records.encoded import EncodedTrajectory
from agentenv.runs.rollout_workers.worker import EpisodeCall, Progress, RolloutWorker, WorkerSpec

FLAG = "--rollout_workers"
_STUCK_SHARE = 0.25
"""Share of --stall_timeout_s after which a worker whose event loop does not answer is replaced."""


class Workers(EnvActors):
    """Workers; episodes in flight learn how far they are from the answers to pings."""

    def __init__(self, spec: WorkerSpec, num: int) -> None:
        stuck_s = max(1.0, _STUCK_SHARE * spec.config.errors.stall_timeout_s)
        config = EnvActorConfig(stuck_s=stuck_s, start_timeout_s=300.0, flag=FLAG)
        start = partial(LocalActor.start, partial(RolloutWorker, spec), FLAG, self._answer)
        super().__init__([start] * num, config)
        self.in_flight: dict[int, EpisodeProgress] = {}
        self.engines: dict[int, Any] = {}
        """Engines of the episodes in flight, by the number of the episode."""

    def pinged(self, answer: Iterable[Progress]) -> None:
        """Publish how far the episodes of a worker are."""
        for number, stage, turn_index, num_tokens in answer:
            if (progress := self.in_flight.get(number)) is not None:
                progress.stage, progress.turn_index, progress.num_tokens = Stage(stage), turn_index, num_tokens

    async def _answer(self, method: str, args: Any) -> Any:
        """Call the engine of an episode: `generate` or `score`."""
        number, prompt, *rest = args
        engine, prompt = self.engines[number], prompt.tolist() if isinstance(prompt, array) else prompt
        if method == "score":
            return await engine.score(prompt)
        sampling, request_id = rest
        return await engine.generate(prompt, sampling, request_id=request_id)


class WorkerSource:
    """Episodes that run in workers. A worker that dies fails its episodes as infrastructure, which runs them again."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._numbers = itertools.count()

    async def run(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        """Run one episode; see `Episode.run`."""
        workers, number = self._workers, next(self._numbers)
        workers.in_flight[number], workers.engines[number] = setup.progress, setup.engine
        setup.progress.attempt, setup.progress.stage = key.attempt, Stage.CREATE
        life = None
        try:
            life = await workers.place()
            answer = await workers.ask(life, "run", number, EpisodeCall.of(task, setup, key), where="run")
            trajectory: Trajectory
            if isinstance(answer, tuple):
                line, row = answer
                trajectory = EncodedTrajectory.of(line, row, task)
            else:
                trajectory = answer
            trajectory.task = task  # the runner's own object
        except (ConfigError, RunStopped):
            raise  # of the whole run, as in one loop
        except AgentEnvError as error:
            trajectory = Trajectory(
                task, setup.limits.max_length, key.episode_id, key.group_id, attempt=key.attempt, seed=key.seed
            )
            record_failure(trajectory, error, setup.progress.stage)
        finally:
            if life is not None:
                workers.leave(life, ended=life.lost is None)
            del workers.in_flight[number], workers.engines[number]
        return trajectory


@asynccontextmanager
async def open_workers(spec: WorkerSpec, num: int) -> AsyncIterator[WorkerSource]:
    """Start `num` workers, yield the source of their episodes, and end them.

    Raises:
        ConfigError: a worker cannot load the job.
        InfraError: a worker did not start.
    """
    workers = Workers(spec, num)
    try:
        await workers.start()
        yield WorkerSource(workers)
    finally:
        await workers.close()
