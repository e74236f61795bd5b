"""Agents that own their loop: a class with `run`, any SDK of OpenAI's form, and an endpoint that records it.

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
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.agent import Engine, check_arguments, create
from agentenv.chat import Chat
from agentenv.deadlines import StepTimeout, bounded
from agentenv.endpoint.server import Endpoint
from agentenv.endpoint.session import Session, SessionOptions
from agentenv.episode import EpisodeKey, guarded
from agentenv.errors import ConfigError, ContractError
from agentenv.http_serving import require_server
from agentenv.openrlhf import REQUIRED_STEP_KEYS, parse_step, scalar
from agentenv.trajectory import EpisodeError, Trajectory
from agentenv.types import Limits, Message, SamplingParams, StepResult, StopReason, Task

logger = logging.getLogger(__name__)


def owns_its_loop(value: Any) -> bool:
    """Whether this is a class of agents that ask for completions themselves: it has `run`, and no `step`."""
    return inspect.isclass(value) and callable(getattr(value, "run", None)) and not hasattr(value, "step")


@dataclass(frozen=True, slots=True)
class AgentContext:
    """What an agent is given for one episode."""

    base_url: str
    """Of its session, for OpenAI's SDKs."""
    api_key: str
    model: str
    prompt: str | Sequence[Message]
    label: Any
    metadata: Mapping[str, Any]
    seed: int | None
    sampling: SamplingParams
    """The run's; requests that give none of these get them anyway."""

    @property
    def messages(self) -> list[Message]:
        """The prompt as messages: text is a user's."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else list(self.prompt)

    @property
    def environ(self) -> dict[str, str]:
        """The variables by which OpenAI's SDKs find the session in another process: add them to its environment."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}


@dataclass
class ChatAgentSource:
    """Episodes of an agent class; the runner's EpisodeSource.

    The class has `run(context)`, async or plain (which runs in a thread), that gives the reward, or a StepResult with
    it. It may have `on_truncate(context)`, asked for the reward when time or room is out, and `close()`. One server is
    shared by the episodes that run at the same time, and stops with the last of them; `serving` keeps it up between.
    """

    cls: type[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: SessionOptions = field(default_factory=SessionOptions)
    _endpoint: asyncio.Task[Endpoint] | None = field(default=None, init=False, repr=False)
    _num_users: int = field(default=0, init=False, repr=False)
    _has_hinted: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse a class without `run`, arguments that its constructor does not take, and a server that lacks."""
        if not owns_its_loop(self.cls):
            raise ConfigError(
                f"--env: expected a class with a `run` method and no `step`, got {self.cls!r}. "
                "Write `run(self, context)`."
            )
        check_arguments(self.cls, self.kwargs)
        require_server("endpoint")

    @property
    def datasets(self) -> Mapping[str, str | Path]:
        """Data that comes with the agent, by name."""
        found: Mapping[str, str | Path] = getattr(self.cls, "datasets", {})
        return found

    async def episode(
        self, task: Task, *, engine: Engine, chat: Chat, sampling: SamplingParams, limits: Limits, key: EpisodeKey
    ) -> Trajectory:
        """Run one episode and give its record; what the agent raises is recorded.

        Raises:
            ConfigError: the engine is set up wrongly.
            MissingDependency: the server's libraries are not installed.
        """
        session = Session(chat, engine, sampling=sampling, limits=limits, task=task, key=key, options=self.options)
        started = time.perf_counter()
        async with self.serving() as endpoint:
            with endpoint.open(session) as address:
                prompt, label, metadata = deepcopy((task.prompt, task.label, task.metadata))
                context = AgentContext(
                    address.base_url, address.api_key, self.options.model, prompt, label, metadata, key.seed, sampling
                )
                trajectory = await _Run(self, session, context, limits).trajectory()
        if session.fatal is not None:
            raise session.fatal
        worked = sum(turn.generate_s + turn.step_s for turn in trajectory.turns)
        trajectory.wait_s = max(0.0, time.perf_counter() - started - worked)
        return trajectory

    def hint(self, reason: StopReason | None) -> None:
        """Say once why episodes that ran out of time or room have no reward, and how they get one."""
        if not self._has_hinted:
            self._has_hinted = True
            logger.warning(
                "%s.on_truncate: expected a reward for an episode that ended as %s, got no such method. "
                "Write `on_truncate(self, context)`, or such episodes have none.",
                self.cls.__name__,
                reason,
            )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Endpoint]:
        """The shared server, started by the first who needs it and closed by the last."""
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
    endpoint = Endpoint()
    await endpoint.start()
    return endpoint


class _Run:
    """One agent in one session."""

    def __init__(self, source: ChatAgentSource, session: Session, context: AgentContext, limits: Limits) -> None:
        self.source, self.session, self.context, self.limits = source, session, context, limits
        self.agent: Any = None
        self.where = "create"
        self.result: StepResult | None = None
        self.stop_reason: StopReason | None = None

    async def trajectory(self) -> Trajectory:
        """Run the agent to its end, close it, and make the record."""
        try:
            error = await self._guarded(self._run())
            if error is not None and self.session.limit is not None and self.where == "run":
                error, self.stop_reason = None, self.session.limit  # it raised what the endpoint told it
            if error is None and self.stop_reason not in (None, StopReason.TRUNCATED_BY_ENV):
                error = await self._guarded(self._last_word())
        finally:
            self.session.is_closed = True
            await self._guarded(self._close())
        word = self.result
        return self.session.finish(
            word.reward if word else None,
            word.score if word else None,
            word.info if word else None,
            stop_reason=self.stop_reason,
            error=error,
        )

    async def _guarded(self, work: Awaitable[None]) -> EpisodeError | None:
        """What `work` raised, as the loop would record it; the stop reason follows it."""
        session = self.session
        record = Trajectory(session.task, self.limits.max_length, session.key.episode_id)
        await guarded(work, record, lambda: self.where)
        self.stop_reason = record.stop_reason or self.stop_reason
        return record.error

    async def _create(self) -> None:
        self.agent = await create(self.source.cls, deepcopy(dict(self.source.kwargs)))

    async def _run(self) -> None:
        await bounded(self._create, limit_s=self.limits.step_timeout_s)
        self.where = "run"
        limit_s = self.limits.episode_timeout_s
        try:
            value = await bounded(self.agent.run, self.context, limit_s=limit_s, flag="episode_timeout_s")
        except StepTimeout:
            self.stop_reason = StopReason.EPISODE_TIMEOUT
            return
        self.result = _result(value, f"{self.source.cls.__name__}.run")
        if self.session.num_calls == 0 and self.session.limit is None:
            raise ContractError(
                f"{self.source.cls.__name__}.run: expected a chat completion or more, got none. Use context.base_url."
            )
        if self.result.truncated:
            self.stop_reason = StopReason.TRUNCATED_BY_ENV

    async def _last_word(self) -> None:
        self.where, self.session.is_closed = "on_truncate", True
        ask = getattr(self.agent, "on_truncate", None)
        if ask is None:
            return self.source.hint(self.stop_reason)
        value = await bounded(ask, self.context, limit_s=self.limits.step_timeout_s)
        if value is not None:
            self.result = _result(value, f"{self.source.cls.__name__}.on_truncate")

    async def _close(self) -> None:
        self.where = "close"
        if getattr(self.agent, "close", None) is not None:
            await bounded(self.agent.close, limit_s=self.limits.step_timeout_s)


def _result(value: Any, where: str) -> StepResult:
    """What an agent gives at its end: a StepResult, OpenRLHF's step dict, or the reward alone."""
    if isinstance(value, Mapping) and not set(REQUIRED_STEP_KEYS) <= value.keys():
        raise ContractError(
            f"{where}: expected the reward or a StepResult, got a dict with the keys {sorted(map(str, value))}. "
            "Return the number, or StepResult(reward=…, score=…, info=…)."
        )
    if isinstance(value, StepResult | Mapping):
        return parse_step(value, where)
    return StepResult(reward=scalar(value, where))
