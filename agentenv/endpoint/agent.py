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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from agentenv.agent import Engine, call
from agentenv.chat import Chat
from agentenv.endpoint.server import Endpoint
from agentenv.endpoint.session import Session, SessionOptions
from agentenv.episode import EpisodeKey, guarded
from agentenv.errors import ConfigError, ContractError
from agentenv.openrlhf import parse_step, scalar
from agentenv.trajectory import EpisodeError, Trajectory
from agentenv.types import Limits, Message, SamplingParams, StepResult, StopReason, Task

_CANCEL_GRACE_S = 1.0
"""Time for a cancelled agent to let go of what it holds."""


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


@dataclass
class ChatAgentSource:
    """Episodes of an agent class; the runner's EpisodeSource.

    The class has `run(context)`, async or plain (which runs in a thread), that gives the reward, or a StepResult with
    it. It may have `on_truncate(context)`, asked for the reward when time or room is out, and `close()`. One server is
    shared by the episodes that run at the same time, and stops with the last of them.
    """

    cls: type
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: SessionOptions = field(default_factory=SessionOptions)
    _endpoint: asyncio.Task[Endpoint] | None = field(default=None, init=False, repr=False)
    _num_users: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse a class without `run`, and arguments that its constructor does not take."""
        if not callable(getattr(self.cls, "run", None)):
            raise ConfigError(
                f"--env: expected a class with a `run` method, got {self.cls!r}. Write `run(self, context)`."
            )
        try:
            inspect.signature(self.cls).bind(**self.kwargs)
        except TypeError as error:
            raise ConfigError(
                f"--env_kwargs: expected arguments of {self.cls.__name__}, got {dict(self.kwargs)!r}: {error}. "
                "Change the JSON."
            ) from error

    async def episode(
        self, task: Task, *, engine: Engine, chat: Chat, sampling: SamplingParams, limits: Limits, key: EpisodeKey
    ) -> Trajectory:
        """Run one episode and give its record; what the agent raises is recorded.

        Raises:
            ConfigError: the engine is set up wrongly.
            MissingDependency: the server's libraries are not installed.
        """
        session = Session(chat, engine, sampling=sampling, limits=limits, task=task, key=key, options=self.options)
        async with self._running() as endpoint:
            with endpoint.open(session) as address:
                prompt, label, metadata = deepcopy((task.prompt, task.label, task.metadata))
                context = AgentContext(
                    address.base_url, address.api_key, self.options.model, prompt, label, metadata, key.seed, sampling
                )
                trajectory = await _Run(self, session, context, limits).trajectory()
        if session.fatal is not None:
            raise session.fatal
        return trajectory

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[Endpoint]:
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


class _TimedOut(Exception):
    """A method of the agent took longer than it may."""


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
            if self.stop_reason is not None and self.stop_reason is not StopReason.TRUNCATED_BY_ENV:
                error = await self._guarded(self._last_word())
        finally:
            self.session.is_closed = True
            await self._guarded(self._close())
        word = self.result
        return self.session.finish(
            word.reward if word else None,
            word.score if word else None,
            word.info if word else None,
            stop_reason=StopReason.ERROR if error else self.stop_reason,
            error=error,
        )

    async def _guarded(self, work: Awaitable[None]) -> EpisodeError | None:
        """What `work` raised, as the loop would record it."""
        session = self.session
        record = Trajectory(session.task, self.limits.max_length, session.key.episode_id)
        await guarded(work, record, lambda: self.where)
        return record.error

    async def _run(self) -> None:
        self.agent = self.source.cls(**deepcopy(dict(self.source.kwargs)))
        self.where = "run"
        try:
            value = await _bounded(self.agent.run, self.context, limit_s=self.limits.episode_timeout_s)
        except _TimedOut:
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
        value = None if ask is None else await _bounded(ask, self.context, limit_s=self.limits.step_timeout_s)
        if value is not None:
            self.result = _result(value, f"{self.source.cls.__name__}.on_truncate")

    async def _close(self) -> None:
        self.where = "close"
        if getattr(self.agent, "close", None) is not None:
            await _bounded(self.agent.close, limit_s=self.limits.step_timeout_s)


def _result(value: Any, where: str) -> StepResult:
    """What an agent gives at its end: a StepResult, OpenRLHF's step dict, or the reward alone."""
    if isinstance(value, StepResult | Mapping):
        return parse_step(value, where)
    return StepResult(reward=scalar(value, where))


async def _bounded(method: Callable[..., Any], *args: Any, limit_s: float) -> Any:
    """Call a method of the agent; one that ignores being cancelled is left behind and holds nobody up."""
    work = asyncio.ensure_future(call(method, *args))
    work.add_done_callback(_forget)
    try:
        await asyncio.wait({work}, timeout=limit_s)
        if work.done():
            return work.result()
    finally:
        if not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=_CANCEL_GRACE_S)
    raise _TimedOut(f"{method.__qualname__}: expected an end within {limit_s:g} s, got none. Raise the limit.")


def _forget(work: asyncio.Future[Any]) -> None:
    # Of a call that was given up nobody asks for the exception, which asyncio would complain about.
    if not work.cancelled():
        work.exception()
