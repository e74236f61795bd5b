"""`--rollout_workers`: processes of this machine that run whole episodes, each for many at once.

First the side of the worker, which opens an engine or asks that of its parent process; then that of the driver: a
source whose episodes run in workers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import sys
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any

from agentenv._util.version import __version__
from agentenv.chat.chat import Chat
from agentenv.core.engine import Engine, checked_errors
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, Conversation, Limits, SamplingParams, Task
from agentenv.engines.opening import open_engine
from agentenv.episode.env_actors.actors import EnvActorConfig, EnvActors
from agentenv.episode.env_actors.local import LocalActor
from agentenv.episode.failures import record_failure
from agentenv.episode.setup import EpisodeKey, EpisodeProgress, EpisodeSetup, Stage, StepRetries
from agentenv.episode.source import EpisodeSource
from agentenv.errors import AgentEnvError, ConfigError, DataError, EngineError, MissingDependency, RunStopped
from agentenv.runs.config import RunConfig
from agentenv.runs.prepare import load_parts, open_source
from agentenv.runs.records.index import EncodedTrajectory, Row, entry_of
from agentenv.runs.watchdog import LagMonitor

Progress = tuple[int, str, int, int]
"""Of an episode in flight: its number, stage, turn and number of tokens."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker loads; sent to the worker."""

    config: RunConfig
    """The flags of the job."""
    chat: Chat
    folder: str
    """Working folder, for relative paths."""
    engine: Mapping[str, Any] | None
    """Arguments of `open_engine`; None to use the engine of the process that started the worker."""
    engine_facts: Mapping[str, str]
    """Attributes of that engine that episodes read."""
    agent_options: Sequence[Any]
    """Options of each environment that is an agent with its own loop, None for others."""
    encodes: bool = False
    """True if all that the job does with an episode is to record it: the workers encode the lines of the record."""


EpisodeCall = Sequence[tuple[Any, ...]]
"""An episode to run, as tuples: frozen dataclasses with slots take many times as long to pickle."""
_PARTS: tuple[Any, ...] = (Task, SamplingParams, Limits, StepRetries, EpisodeKey)
_values_of_parts = [attrgetter(*(field.name for field in fields(cls))) for cls in _PARTS]


def _tell(text: str) -> None:
    """Write a line to stderr: log records would wait for the event loop that is blocked."""
    with contextlib.suppress(OSError, ValueError):  # it is closed
        sys.stderr.write(f"worker {os.getpid()}: {text}\n")
        sys.stderr.flush()


class RemoteEngine(Engine):
    """The engine of another process, for one episode.

    Args:
        call: calls the other process; see `Calls.call`.
        number: number of the episode there, which names the engine.
        base_url: the engine's.
        constraint_problem: the engine's.
    """

    constraint_problem = ""

    def __init__(
        self, call: Callable[[bytes], Awaitable[bytes]], number: int, *, base_url: str, constraint_problem: str
    ) -> None:
        self._call, self._number = call, number
        self.base_url, self.constraint_problem = base_url, constraint_problem

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.core.engine.Engine`."""
        is_text = isinstance(prompt_token_ids, Conversation)
        prompt = prompt_token_ids if is_text else array("i", prompt_token_ids)
        completion: Completion = await self._ask("generate", prompt, sampling, request_id)
        return completion

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token; see `Engine`."""
        logprobs: list[float] = await self._ask("score", array("i", token_ids))
        return logprobs

    async def _ask(self, method: str, *args: Any) -> Any:
        status, value = pickle.loads(await self._call(pickle.dumps((method, (self._number, *args)))))
        if status == "returned":
            return value
        raise value if status == "raised" else EngineError(f"{method}: {value}")


class RolloutWorker:
    """Runs episodes; methods are called from the process that started this one."""

    def __init__(self, spec: WorkerSpec, call_parent: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._spec, self._call_parent = spec, call_parent
        self._stack = contextlib.AsyncExitStack()
        self._source: EpisodeSource | None = None
        self._engine: Engine | None = None
        self._in_flight: dict[int, EpisodeProgress] = {}

    async def start(self) -> tuple[int, str, str, None]:
        """Load the environments, open the engine, and return the process id and the version of agentenv."""
        spec = self._spec
        os.chdir(spec.folder)
        parts = load_parts(spec.config)
        for number, options in enumerate(spec.agent_options):
            if options is not None:
                own: Any = parts[number].source  # an agent with its own loop
                parts[number] = replace(parts[number], source=replace(own, options=options))
        self._source = await open_source(parts, self._stack)
        if spec.engine is not None:
            opening = open_engine(tokenizer=spec.chat.tokenizer, **spec.engine)
            self._engine = await self._stack.enter_async_context(opening)
        LagMonitor(_tell).start()
        return os.getpid(), __version__, "the worker", None

    async def run(self, number: int, call: EpisodeCall) -> Trajectory | tuple[bytes, Row]:
        """Run one episode and return it; `number` names its engine in the process that started this one.

        If this worker encodes, return the line and the row of `entry_of`, unless the episode failed.
        """
        assert self._source is not None
        progress = self._in_flight[number] = EpisodeProgress()
        task, sampling, limits, step_retries, key = (cls(*values) for cls, values in zip(_PARTS, call, strict=True))
        engine = self._engine or RemoteEngine(self._call_parent, number, **self._spec.engine_facts)
        setup = EpisodeSetup(engine, self._spec.chat, sampling, limits, progress, step_retries)
        try:
            trajectory = await self._source.run(task, setup, key)
        finally:
            del self._in_flight[number]
        if self._spec.encodes and trajectory.error is None:
            with contextlib.suppress(DataError):  # the process that writes the record reports it
                return entry_of(trajectory)[:2]
        return trajectory

    async def ping(self) -> list[Progress]:
        """Return how far the episodes are."""
        return [
            (number, each.stage.value, each.turn_index, each.num_tokens) for number, each in self._in_flight.items()
        ]


# --- the side of the driver -----------------------------------------------------------------------------------------

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
        with checked_errors(engine.base_url or "generate"):
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
        life, parts = None, (task, setup.sampling, setup.limits, setup.step_retries, key)
        call: EpisodeCall = [values(part) for values, part in zip(_values_of_parts, parts, strict=True)]
        try:
            life = await workers.place()
            answer = await workers.ask(life, "run", number, call, where="run")
            if isinstance(answer, tuple):
                line, row = answer
                answer = EncodedTrajectory.of(line, row, task)
            trajectory: Trajectory = answer
            trajectory.task = task  # the runner's own object
        except (ConfigError, MissingDependency, RunStopped):
            raise  # of the whole run, as in one loop
        except AgentEnvError as error:
            trajectory = Trajectory(
                task,
                setup.limits.max_length,
                key.episode_id,
                key.group_id,
                key.attempt,
                key.seed,
                retried=[*key.retried],
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
