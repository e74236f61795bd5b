"""The live episodes of an environment under NeMo RL, which has no reset or close and reports no abandoned episodes.

An episode starts with the first step of a row whose metadata has no id. The step adds the id, by which the next step
finds the episode. It ends with its last step, a failure, or `idle_s` without a step. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentenv._util.calls import StepTimeout, bounded, create
from agentenv.core.agent import AgentInstance
from agentenv.core.step_dict import parse_step, text_or_messages
from agentenv.core.types import Message, StepResult
from agentenv.errors import ContractError, DataError, InfraError
from agentenv.interop.nemo_rl.text import prompt_of
from agentenv.interop.nemo_rl.types import EnvironmentUnavailable, bare, last_action

ID = "agentenv_id"
"""Key of an episode's id in a row's metadata."""
OWN_KEYS = (ID, "label", "ground_truth", "seed", "metadata", "raw_prompt", "task_prompt", "tools")
"""Keys of the metadata that have a meaning here; the other keys are columns of the row."""


@dataclass(frozen=True, slots=True)
class ResetResult:
    """The result of `reset`."""

    observation: str | Sequence[Message]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(slots=True, eq=False)
class EpisodeSession:
    """One live episode."""

    agent: AgentInstance
    metadata: Mapping[str, Any]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    label: Any = None
    seed: int | None = None
    first: ResetResult = ResetResult("")
    num_actions: int = 0
    """Number of assistant messages in the log at the last step; before the first step, those of the prompt."""
    turn_index: int = 0
    stop: tuple[str, ...] | None = None
    """Strings that end the next generation; None if the environment never set any."""
    stop_before: tuple[str, ...] = ()
    """Strings that ended the last generation."""
    busy: bool = False
    timer: asyncio.TimerHandle | None = None


class Sessions:
    """Creates, finds, steps and closes the episodes of one environment class."""

    def __init__(
        self,
        cls: type[AgentInstance],
        kwargs: Mapping[str, Any],
        *,
        step_timeout_s: float,
        idle_s: float,
        check_prompt: bool = True,
        parse: Callable[..., Any] | None = None,
    ) -> None:
        self.num_started = self.num_ended = self.num_abandoned = self.num_failed = 0
        self._cls = cls
        self._kwargs = kwargs
        self._limit_s = step_timeout_s
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
            EnvironmentUnavailable: the episode is unknown here, or too slow.
            DataError: the log does not belong to this episode's next turn, or the model saw another prompt than `reset`
                returns.
            Exception: the environment raised it.
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
            result = await self._step_agent(session, log, action)
        except BaseException:
            self.num_failed += 1
            await self.drop(session)
            raise
        session.busy = False
        if result.done:
            self.num_ended += 1
            await self.drop(session)
        else:
            loop = asyncio.get_running_loop()
            session.timer = loop.call_later(self._idle_s, partial(self._abandon, session))
        return session, result

    async def first(self, metadata: Mapping[str, Any], prompt: str | Sequence[Message]) -> ResetResult:
        """Return the result of `reset` for a row, from an agent that is closed afterwards.

        Raises:
            Exception: the environment raised it.
        """
        agent = await self._make()
        try:
            return await self._reset(agent, metadata, prompt)
        finally:
            await bounded(agent.close, limit_s=self._limit_s)

    async def drop(self, session: EpisodeSession) -> None:
        """Close an episode, once."""
        self._disarm(session)
        if self._live.pop(session.id, None) is not None:
            await asyncio.gather(bounded(session.agent.close, limit_s=self._limit_s), return_exceptions=True)

    async def forget(self, session_id: str) -> None:
        """Close the episode of this id if it is live."""
        session = self._live.get(session_id)
        if session is not None:
            await self.drop(session)

    async def close(self) -> None:
        """Close all episodes."""
        await asyncio.gather(*map(self.drop, list(self._live.values())), *self._closing)

    async def _make(self) -> AgentInstance:
        """Return a new agent; one that is made while the call is cancelled is closed."""
        made: list[AgentInstance] = []

        async def make() -> None:
            made.append(await create(self._cls, self._kwargs))

        make.__qualname__ = "create"
        try:
            await bounded(make, limit_s=self._limit_s)
        except BaseException:
            for agent in made:
                await bounded(agent.close, limit_s=self._limit_s)
            raise
        return made[0]

    async def _start(self, log: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> EpisodeSession:
        shown = prompt_of(log, bare(log))
        task_prompt = metadata.get("task_prompt", metadata.get("raw_prompt"))
        prompt: Any = shown if task_prompt is None else task_prompt
        agent = await self._make()
        session = EpisodeSession(agent, deepcopy(_columns(metadata)), num_actions=_num_actions(log) - 1)
        self._live[session.id] = session
        self.num_started += 1
        try:
            session.label, session.seed = deepcopy(_label(metadata)), metadata.get("seed")
            session.first = await self._reset(agent, metadata, prompt)
            if self._check_prompt:
                # An episode for another prompt than the model's would have the reward of another task.
                first, shown = session.first, metadata.get("raw_prompt", shown)
                tools = [dict(tool) for tool in metadata.get("tools") or ()]
                if _plain(first.observation) != _plain(shown) or [dict(tool) for tool in first.tools] != tools:
                    raise DataError(
                        f"reset: expected the prompt that the model was shown, {shown!r:.200}, got "
                        f"{first.observation!r:.200}. NeMo RL does not show what reset returns: create the rows with "
                        "TaskProcessor, which does, or set check_prompt=false."
                    )
        except BaseException:
            self.num_failed += 1
            await self.drop(session)
            raise
        return session

    async def _reset(
        self, agent: AgentInstance, metadata: Mapping[str, Any], prompt: str | Sequence[Message]
    ) -> ResetResult:
        columns, label, observation = deepcopy((_columns(metadata), _label(metadata), prompt))
        states = {"observation": observation, "label": label, "metadata": columns, "images": ()}
        where = f"{type(agent).__name__}.reset"
        answer = await self._bounded(agent.reset, {**states, "seed": metadata.get("seed")})
        if not isinstance(answer, Mapping) or "observation" not in answer:
            raise ContractError(
                f"{where}: expected a dict with the key 'observation', got {answer!r:.200}. Return one."
            )
        return ResetResult(text_or_messages(answer["observation"], where), tuple(answer.get("tools") or ()))

    async def _step_agent(self, session: EpisodeSession, log: Sequence[Mapping[str, Any]], action: str) -> StepResult:
        num_actions = _num_actions(log)
        if num_actions != session.num_actions + 1:
            raise DataError(
                f"step: expected the log of turn {session.turn_index}, with {session.num_actions + 1} assistant "
                f"messages, got {num_actions}. Send each action once, with everything before it."
            )
        states = {
            "observation_text": "".join(str(message.get("content") or "") for message in log[:-1]),
            "action_text": action,
            "label": session.label,
            "sampling_params": None,
            "turn_index": session.turn_index,
            "metadata": session.metadata,
            "seed": session.seed,
        }
        if self._parse is not None:
            states["tool_calls"] = self._parse(action, turn_index=session.turn_index, tools=session.first.tools or None)
        value = await self._bounded(session.agent.step, states)
        result = parse_step(value, f"{type(session.agent).__name__}.step", session.agent.score_range)
        session.num_actions, session.turn_index = num_actions, session.turn_index + 1
        session.stop_before = session.stop or ()
        session.stop = result.sampling.stop if result.sampling is not None else session.stop
        return result

    async def _bounded(self, method: Any, *args: Any) -> Any:
        try:
            return await bounded(method, *args, limit_s=self._limit_s)
        except StepTimeout as error:
            raise InfraError(str(error)) from error

    def _disarm(self, session: EpisodeSession) -> None:
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None

    def _abandon(self, session: EpisodeSession) -> None:
        self.num_abandoned += 1
        task = asyncio.get_running_loop().create_task(self.drop(session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _num_actions(log: Sequence[Mapping[str, Any]]) -> int:
    return sum(message.get("role") == "assistant" for message in log)


def _label(metadata: Mapping[str, Any]) -> Any:
    return metadata.get("label", metadata.get("ground_truth"))


def _columns(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other columns of the row."""
    rest = {key: value for key, value in metadata.items() if key not in OWN_KEYS}
    return rest | dict(metadata.get("metadata") or {})


def _plain(observation: Any) -> Any:
    if isinstance(observation, str):
        return observation
    return [(message.get("role"), message.get("content")) for message in observation or ()]
