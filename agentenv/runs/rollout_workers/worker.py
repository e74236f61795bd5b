"""The side of the worker: it runs whole episodes, and opens an engine or asks that of its parent process."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple, Self

from agentenv._util.version import __version__
from agentenv.chat.chat import Chat
from agentenv.core.engine import Engine
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, Conversation, Limits, SamplingParams, Task
from agentenv.engines.factory import open_engine
from agentenv.episode.setup import EpisodeKey, EpisodeProgress, EpisodeSetup, StepRetries
from agentenv.episode.source import EpisodeSource
from agentenv.errors import DataError, EngineError
from agentenv.runs.config import RunConfig
from agentenv.runs.prepare import Part, load_parts, open_source
from agentenv.runs.records.encoded import encoded
from agentenv.runs.records.index import Row
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


_values_of = {
    cls: attrgetter(*(field.name for field in fields(cls)))
    for cls in (Task, SamplingParams, Limits, StepRetries, EpisodeKey)
}


class EpisodeCall(NamedTuple):
    """An episode to run, as tuples: frozen dataclasses with slots take many times as long to pickle."""

    task: tuple[Any, ...]
    sampling: tuple[Any, ...]
    limits: tuple[Any, ...]
    step_retries: tuple[Any, ...]
    key: tuple[Any, ...]

    @classmethod
    def of(cls, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Self:
        """Return the call for an episode of `task`."""
        values = ((Task, task), (SamplingParams, setup.sampling), (Limits, setup.limits))
        more = ((StepRetries, setup.step_retries), (EpisodeKey, key))
        return cls(*(_values_of[kind](value) for kind, value in (*values, *more)))


def _with_options(part: Part, options: Any) -> Part:
    """Return the part with the options that the job's agent has."""
    return part if options is None else replace(part, source=replace(part.source, options=options))  # type: ignore[type-var]


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
        parts = [_with_options(*each) for each in zip(load_parts(spec.config), spec.agent_options, strict=True)]
        self._source = await open_source(parts, self._stack)
        if spec.engine is not None:
            opening = open_engine(tokenizer=spec.chat.tokenizer, **spec.engine)
            self._engine = await self._stack.enter_async_context(opening)
        LagMonitor(_tell).start()
        return os.getpid(), __version__, "the worker", None

    async def run(self, number: int, call: EpisodeCall) -> Trajectory | tuple[bytes, Row]:
        """Run one episode and return it; `number` names its engine in the process that started this one.

        If this worker encodes, return the line and the row of `encoded`, unless the episode failed.
        """
        assert self._source is not None
        progress = self._in_flight[number] = EpisodeProgress()
        setup = EpisodeSetup(
            self._engine or RemoteEngine(self._call_parent, number, **self._spec.engine_facts),
            self._spec.chat,
            SamplingParams(*call.sampling),
            Limits(*call.limits),
            progress,
            StepRetries(*call.step_retries),
        )
        try:
            trajectory = await self._source.run(Task(*call.task), setup, EpisodeKey(*call.key))
        finally:
            del self._in_flight[number]
        if self._spec.encodes and trajectory.error is None:
            with contextlib.suppress(DataError):  # the process that writes the record reports it
                return encoded(trajectory)
        return trajectory

    async def ping(self) -> list[Progress]:
        """Return how far the episodes are."""
        return [
            (number, each.stage.value, each.turn_index, each.num_tokens) for number, each in self._in_flight.items()
        ]
