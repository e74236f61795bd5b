"""Agents that own their loop: a class with `run`, any OpenAI-compatible SDK, and an endpoint that records it.

Example::

    class Agent:
        async def run(self, context):
            client = AsyncOpenAI(base_url=context.base_url, api_key=context.api_key)
            answer = await client.chat.completions.create(model=context.model, messages=context.messages)
            return float(answer.choices[0].message.content == context.label)
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv._util.calls import AgentThreads, StepTimeout, bounded, create
from agentenv._util.http.responses import require_server
from agentenv.core.agent import AgentInstance
from agentenv.core.step_dict import REQUIRED_STEP_KEYS, parse_step, scalar
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Message, SamplingParams, StepResult, StopReason, Task
from agentenv.episode.endpoint.session import Session, SessionOptions
from agentenv.episode.endpoint.wire import OutOfRoom, OutOfTurns
from agentenv.episode.loop import recording_errors
from agentenv.episode.setup import EpisodeKey, EpisodeSetup, Stage
from agentenv.episode.source import check_arguments
from agentenv.errors import ConfigError, ContractError
from agentenv.rewards.grading import collect_usage

if TYPE_CHECKING:
    from agentenv.episode.endpoint.server import Endpoint

logger = logging.getLogger(__name__)
_SAME_CHARS = 40
"""An error that quotes so much of a reason quotes it all."""


def owns_its_loop(value: Any) -> bool:
    """Return True for a class of agents that request completions themselves: it has `run`, and no `step`."""
    return inspect.isclass(value) and callable(getattr(value, "run", None)) and not hasattr(value, "step")


@dataclass(frozen=True, slots=True)
class AgentContext:
    """The argument of an agent's `run`: one episode."""

    base_url: str
    """The session's URL, for OpenAI's SDKs."""
    api_key: str
    """The session's key, for OpenAI's SDKs."""
    model: str
    """Name of the model for requests."""
    prompt: str | Sequence[Message]
    """Prompt of the task."""
    label: Any
    """Label of the task, for grading."""
    metadata: Mapping[str, Any]
    """The other columns of the row."""
    seed: int | None
    """Seed of the episode's environment."""
    sampling: SamplingParams
    """The run's sampling parameters; the defaults of requests that do not set them."""

    @property
    def messages(self) -> list[Message]:
        """The prompt as messages; text becomes a user message."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else list(self.prompt)

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables with which OpenAI's SDKs in another process find the session, past any proxy.

        openai-agents sends no traces of the episode to OpenAI, unless OPENAI_AGENTS_DISABLE_TRACING is set otherwise.
        """
        known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        direct = ",".join([*([known] if known else []), "127.0.0.1"])
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_DEFAULT_MODEL": self.model,  # of openai-agents, whose default asks for a reasoning effort
            "OPENAI_AGENTS_DISABLE_TRACING": os.environ.get("OPENAI_AGENTS_DISABLE_TRACING", "true"),
            "NO_PROXY": direct,
            "no_proxy": direct,
        }


@dataclass
class ChatAgentSource:
    """Episodes of an agent class; an EpisodeSource of the runner.

    The class has `run(context)`, async or plain (run in a thread), which returns the reward or a StepResult. It may
    have `on_truncate(context)`, which returns the reward when time or room is exhausted, and `close()`. Concurrent
    episodes share one server, which stops with the last of them; `serving` keeps it running in between. The class sets
    options of its endpoint with the attribute `session_options`.
    """

    cls: type[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: SessionOptions = field(default_factory=SessionOptions)
    _endpoint: asyncio.Task[Endpoint] | None = field(default=None, init=False, repr=False)
    _num_users: int = field(default=0, init=False, repr=False)
    _has_hinted: bool = field(default=False, init=False, repr=False)
    _codes_told: set[str] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        """Raise if the class has no `run`, its arguments do not fit, or the server's libraries are missing."""
        if not owns_its_loop(self.cls):
            raise ConfigError(
                f"--env: expected a class with a `run` method and no `step`, got {self.cls!r}. "
                "Write `run(self, context)`."
            )
        check_arguments(self.cls, self.kwargs)
        require_server("endpoint")

    @classmethod
    def of(cls, agent_cls: type[Any], kwargs: Mapping[str, Any]) -> ChatAgentSource:
        """Return the source of an agent class, with the class's own `session_options`."""
        return cls(agent_cls, kwargs, getattr(agent_cls, "session_options", SessionOptions()))

    @property
    def datasets(self) -> Mapping[str, str | Path]:
        """Data included with the agent, by name."""
        found: Mapping[str, str | Path] = getattr(self.cls, "datasets", {})
        return found

    async def run(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        """Run one episode and return its record; exceptions of the agent are recorded.

        Raises:
            ConfigError: the engine is configured wrongly.
            MissingDependency: the server's libraries are not installed.
        """
        session = Session(setup, task=task, key=key, options=self.options)
        started = time.perf_counter()
        async with self.serving() as endpoint:
            with endpoint.open(session) as address:
                prompt, label, metadata = deepcopy((task.prompt, task.label, task.metadata))
                context = AgentContext(
                    address.base_url, address.api_key, self.options.model, prompt, label, metadata, key.seed,
                    setup.sampling,
                )  # fmt: skip
                with collect_usage() as spent:  # by judges and reward models
                    trajectory = await _Run(self, session, context).trajectory(spent)
        if session.fatal is not None:
            raise session.fatal
        self.tell_refusals(session)
        worked = sum(turn.generate_s + turn.step_s for turn in trajectory.turns)
        trajectory.wait_s = max(0.0, time.perf_counter() - started - worked)
        return trajectory

    def hint(self, reason: StopReason | None) -> None:
        """Log once why episodes that ran out of time or room have no reward, and how to give them one."""
        if not self._has_hinted:
            self._has_hinted = True
            text = "%s.on_truncate: expected a reward for an episode that ended as %s, got no such method. "
            text += "Write `on_truncate(self, context)`, or such episodes have none."
            logger.warning(text, self.cls.__name__, reason)

    def tell_refusals(self, session: Session) -> None:
        """Log once for each code why a request was refused, except for the limits of an episode."""
        for code, reason in session.refusal_reasons.items():
            if code not in {OutOfRoom.code, OutOfTurns.code, *self._codes_told}:
                self._codes_told.add(code)
                text = "%s: a request was refused (%s); more of this code are only counted, as `refusals`: %s"
                logger.warning(text, self.cls.__name__, code, reason)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Endpoint]:
        """Yield the shared server, started for its first user and closed after its last."""
        if self._endpoint is None:
            self._endpoint = asyncio.create_task(_started())
        starting = self._endpoint
        self._num_users += 1
        try:
            yield await asyncio.shield(starting)
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._endpoint = None
                await (await starting).close()


async def _started() -> Endpoint:
    from agentenv.episode.endpoint.server import Endpoint  # every run imports this module, and few serve

    endpoint = Endpoint()
    await endpoint.start()
    return endpoint


class _Run:
    """One agent in one session."""

    def __init__(self, source: ChatAgentSource, session: Session, context: AgentContext) -> None:
        self.source = source
        self.session = session
        self.context = context
        self.limits = session.limits
        self.progress = session.progress
        self.progress.stage, self.progress.attempt = Stage.CREATE, session.key.attempt
        self.agent: Any = None
        self.threads = AgentThreads()
        self.result: StepResult | None = None
        self.stop_reason: StopReason | None = None

    async def trajectory(self, spent: Mapping[str, float]) -> Trajectory:
        """Run the agent to its end, close it, and return the record; its info has what was `spent` meanwhile."""
        try:
            error = await self._guarded(self._run())
            if error is not None and self.session.limit is not None and self.progress.stage is Stage.RUN:
                # The agent raised the error that the endpoint returned.
                error, self.stop_reason = None, self.session.limit
            reason, num = self.session.last_refusal, self.session.refusals.total()
            if error is not None and self.session.num_calls == 0 and reason[:_SAME_CHARS] not in error.message:
                why = f"the last of {num} requests without an answer: {reason}"
                error = replace(error, message=f"{error.message.rstrip()} ({why})")
            if error is None and self.stop_reason not in (None, StopReason.TRUNCATED_BY_ENV):
                error = await self._guarded(self._closing_result())
        finally:
            self.session.is_closed, first = True, self.stop_reason
            await self._guarded(self._close())
            self.stop_reason = first
        last = self.result
        facts = (last.reward, last.score, {**spent, **last.info}) if last else ()
        return self.session.finish(*facts, stop_reason=self.stop_reason, error=error)

    async def _guarded(self, work: Awaitable[None]) -> EpisodeError | None:
        """Return the error raised by `work`, in the loop's form, and set the stop reason."""
        session = self.session
        record = Trajectory(session.task, self.limits.max_length, session.key.episode_id)
        with recording_errors(record, self.progress), self.threads.noted():
            await work
        self.stop_reason = record.stop_reason or self.stop_reason
        return record.error

    async def _run(self) -> None:
        kwargs = deepcopy(dict(self.source.kwargs))
        self.agent = await bounded(create, self.source.cls, kwargs, limit_s=self.limits.step_timeout_s)
        self.progress.stage = Stage.RUN
        limit_s = self.limits.episode_timeout_s
        try:
            value = await bounded(self.agent.run, self.context, limit_s=limit_s, flag="episode_timeout_s")
        except StepTimeout:
            self.stop_reason = StopReason.EPISODE_TIMEOUT
            return
        self.result = self._parse(value, "run")
        if self.session.num_calls == 0 and self.session.limit is None:
            raise ContractError(
                f"{self.source.cls.__name__}.run: expected a chat completion or more, got none. "
                + ("" if self.session.refusals else "Use context.base_url.")
            )
        if self.result.truncated:
            self.stop_reason = StopReason.TRUNCATED_BY_ENV

    async def _closing_result(self) -> None:
        self.progress.stage, self.session.is_closed = Stage.ON_TRUNCATE, True
        ask = getattr(self.agent, "on_truncate", None)
        if ask is None:
            return self.source.hint(self.stop_reason)
        value = await bounded(ask, self.context, limit_s=self.limits.step_timeout_s)
        if value is not None:
            self.result = self._parse(value, "on_truncate")

    async def _close(self) -> None:
        self.progress.stage = Stage.CLOSE
        if getattr(self.agent, "close", None) is not None:
            limit_s = self.limits.step_timeout_s
            await self.threads.then(lambda: bounded(self.agent.close, limit_s=limit_s))

    def _parse(self, value: Any, method: str) -> StepResult:
        """Return the result of an agent: a StepResult, OpenRLHF's step dict, or only the reward."""
        where = f"{self.source.cls.__name__}.{method}"
        if isinstance(value, Mapping) and not set(REQUIRED_STEP_KEYS) <= value.keys():
            raise ContractError(
                f"{where}: expected the reward or a StepResult, got a dict with the keys {sorted(map(str, value))}. "
                "Return the number, or StepResult(reward=…, score=…, info=…)."
            )
        if isinstance(value, StepResult | Mapping):
            return parse_step(value, where, getattr(self.agent, "score_range", AgentInstance.score_range))
        return StepResult(reward=scalar(value, where))
