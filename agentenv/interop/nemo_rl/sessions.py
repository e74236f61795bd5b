"""The live episodes of an environment under NeMo RL, which has no reset or close and reports no abandoned episodes.

An episode starts with the first step of a row whose metadata has no id. The step adds the id, by which the next step
finds the episode. It ends with its last step, a failure, or `idle_s` without a step. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentenv._util.calls import create
from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance, StepState
from agentenv.core.types import Limits, Message, StepResult, Task, own_limits
from agentenv.engines.scripted import PlainTextTokenizer
from agentenv.episode.setup import EpisodeKey
from agentenv.episode.source import EnvSource
from agentenv.episode.stepping import SteppedEpisode
from agentenv.errors import ContractError, DataError, EpisodeFailed, InfraError
from agentenv.interop.hosted import kind_of
from agentenv.interop.nemo_rl.base import EnvironmentUnavailable, bare, last_action
from agentenv.interop.nemo_rl.text import prompt_of

ID = "agentenv_id"
"""Key of an episode's id in a row's metadata."""
OWN_KEYS = (ID, "label", "ground_truth", "seed", "metadata", "raw_prompt", "task_prompt", "tools")
"""Keys of the metadata that have a meaning here; the other keys are columns of the row."""
_NO_LIMIT = 1_000_000_000
"""Tokens, which are characters here, and turns: NeMo RL has its own limits."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class EpisodeSession:
    """One live episode."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    episode: SteppedEpisode = field(init=False)
    num_actions: int = 0
    """Number of assistant messages in the log at the last step; before the first step, those of the prompt."""
    text: str = ""
    """The text of the log before the current action: what the model saw."""
    stop: tuple[str, ...] | None = None
    """Strings that end the next generation; None if the environment never set any."""
    stop_before: tuple[str, ...] = ()
    """Strings that ended the last generation."""
    busy: bool = False
    timer: asyncio.TimerHandle | None = None


class Sessions:
    """Creates, finds, steps and closes the episodes of one environment class.

    An episode runs in our loop, in plain text. Its environment sees the text of NeMo RL's log, and the calls that
    `parse` finds in an action.
    """

    def __init__(
        self,
        source: EnvSource,
        *,
        step_timeout_s: float,
        idle_s: float,
        check_prompt: bool = True,
        parse: Callable[..., Any] | None = None,
    ) -> None:
        self.num_started = self.num_ended = self.num_abandoned = self.num_failed = 0
        self._source = source
        max_turns = own_limits(source.cls, max_turns=_NO_LIMIT)["max_turns"]
        self._limits = Limits(max_length=_NO_LIMIT, max_turns=max_turns, step_timeout_s=step_timeout_s)
        self._idle_s = idle_s
        self._check_prompt = check_prompt
        self._parse = parse
        self._live: dict[str, EpisodeSession] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def num_live(self) -> int:
        """Number of episodes that started and did not end."""
        return len(self._live)

    async def step(
        self, log: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]
    ) -> tuple[EpisodeSession, StepResult]:
        """Take the log's last message as the episode's next action. An episode that ends or fails is closed.

        Raises:
            EnvironmentUnavailable: the episode is unknown here.
            InfraError: infrastructure failed, or the environment is too slow.
            DataError: the log does not belong to this episode's next turn, or the model saw another prompt than `reset`
                returns.
            EpisodeFailed: the environment failed.
        """
        action = last_action(log)
        session_id = metadata.get(ID)
        if session_id is None:
            session = await self._start(log, metadata)
        elif isinstance(session_id, str) and session_id in self._live:
            session = self._live[session_id]
        else:
            raise EnvironmentUnavailable(
                f"step: expected the id of a live episode, got {session_id!r:.80}: it ended, had no step for "
                f"{self._idle_s:g} s, or belongs to another process. Roll the prompt out again, or raise idle_s."
            )
        if session.busy:
            raise ContractError(f"step: expected one row of an episode at a time, got two of {session.id}. Fix {ID}.")
        session.busy = True
        try:
            self._disarm(session)
            result = await self._act(session, log, action)
        except BaseException:
            self.num_failed += 1
            await self.forget(session.id)
            raise
        session.busy = False
        if result.done:
            self.num_ended += 1
            await self.forget(session.id)
        else:
            session.timer = asyncio.get_running_loop().call_later(self._idle_s, self._abandon, session)
        return session, result

    async def first(
        self, metadata: Mapping[str, Any], prompt: str | Sequence[Message]
    ) -> tuple[str | Sequence[Message], Sequence[Mapping[str, Any]]]:
        """Return the first observation of a row and its tools, from an episode that is closed afterwards.

        Raises:
            EpisodeFailed: the environment failed.
        """
        async with self._session(metadata, prompt).episode as episode:
            await _played(episode, episode.begin())
            return episode.trajectory.prompt, episode.trajectory.tools

    async def forget(self, session_id: str) -> None:
        """Close the episode of this id if it is live."""
        session = self._live.pop(session_id, None)
        if session is not None:
            self._disarm(session)
            await session.episode.aclose()

    async def close(self) -> None:
        """Close all episodes."""
        await asyncio.gather(*map(self.forget, list(self._live)), *self._closing)

    def _session(self, metadata: Mapping[str, Any], prompt: str | Sequence[Message]) -> EpisodeSession:
        """Return a new episode of a row, not yet started."""
        session = EpisodeSession()
        label = metadata.get("label", metadata.get("ground_truth"))
        columns = {key: value for key, value in metadata.items() if key not in OWN_KEYS}
        task = Task(prompt, label, session.id, metadata=columns | dict(metadata.get("metadata") or {}))

        async def make() -> AgentInstance:
            agent = await create(self._source.cls, self._source.kwargs)
            step = agent.step

            # It sees the text of NeMo RL's log, and the calls in the policy's own form.
            def told(states: StepState) -> StepState:
                states = {**states, "observation_text": session.text}
                if self._parse is not None:
                    tools = session.episode.trajectory.tools or None
                    calls = self._parse(states["action_text"], turn_index=states["turn_index"], tools=tools)
                    states["tool_calls"] = calls
                return states

            @functools.wraps(step)
            async def async_step(states: StepState) -> Any:
                return await step(told(states))

            @functools.wraps(step)
            def plain_step(states: StepState) -> Any:
                return step(told(states))

            object.__setattr__(agent, "step", async_step if inspect.iscoroutinefunction(step) else plain_step)
            return agent

        key = EpisodeKey(session.id, seed=metadata.get("seed"))
        chat = Chat(PlainTextTokenizer())
        session.episode = SteppedEpisode(make, task, chat=chat, limits=self._limits, key=key, host_samples=True)
        return session

    async def _start(self, log: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> EpisodeSession:
        shown = prompt_of(log, bare(log))
        task_prompt = metadata.get("task_prompt", metadata.get("raw_prompt"))
        session = self._session(metadata, shown if task_prompt is None else task_prompt)
        session.num_actions, episode = _num_actions(log) - 1, session.episode
        self._live[session.id] = session
        self.num_started += 1
        try:
            first = await _played(episode, episode.begin())
            if self._check_prompt:
                # An episode for another prompt than the model's would have the reward of another task.
                shown = metadata.get("raw_prompt", shown)
                tools = [dict(tool) for tool in metadata.get("tools") or ()]
                if _plain(first) != _plain(shown) or [dict(tool) for tool in episode.trajectory.tools] != tools:
                    raise DataError(
                        f"reset: expected the prompt that the model was shown, {shown!r:.200}, got {first!r:.200}. "
                        "NeMo RL does not show what reset returns: create the rows with TaskProcessor, which does, or "
                        "set check_prompt=false."
                    )
        except BaseException:
            self.num_failed += 1
            await self.forget(session.id)
            raise
        return session

    async def _act(self, session: EpisodeSession, log: Sequence[Mapping[str, Any]], action: str) -> StepResult:
        num_actions = _num_actions(log)
        if num_actions != session.num_actions + 1:
            raise DataError(
                f"step: expected the log of the next turn, with {session.num_actions + 1} assistant messages, got "
                f"{num_actions}. Send each action once, with everything before it."
            )
        session.text = "".join(str(message.get("content") or "") for message in log[:-1])
        result = await _played(session.episode, session.episode.act(action))
        session.num_actions = num_actions
        session.stop_before = session.stop or ()
        session.stop = result.sampling.stop if result.sampling is not None else session.stop
        return result

    def _disarm(self, session: EpisodeSession) -> None:
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None

    def _abandon(self, session: EpisodeSession) -> None:
        self.num_abandoned += 1
        task = asyncio.get_running_loop().create_task(self.forget(session.id))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _played(episode: SteppedEpisode, work: Awaitable[T]) -> T:
    """Return the result of a call of the episode.

    Raises:
        InfraError: it failed by infrastructure, or by a time limit.
        EpisodeFailed: it failed otherwise.
    """
    try:
        return await work
    except EpisodeFailed as failure:
        if kind_of(episode.trajectory) == "infra" or isinstance(failure.__cause__, ConnectionError | TimeoutError):
            raise InfraError(str(failure)) from failure
        raise


def _num_actions(log: Sequence[Mapping[str, Any]]) -> int:
    return sum(message.get("role") == "assistant" for message in log)


def _plain(observation: Any) -> Any:
    if isinstance(observation, str):
        return observation
    return [(message.get("role"), message.get("content")) for message in observation or ()]
