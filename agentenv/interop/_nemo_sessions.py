"""The live episodes of an environment under NeMo RL, which has no reset, no close and no word of what it gave up.

An episode begins with the first step of a row whose metadata have no id, goes on by the id that the step put there, and
ends with its last step, a failure, or `idle_s` without one. All of it runs on one event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentenv.agent import AgentInstance, create
from agentenv.deadlines import StepTimeout, bounded
from agentenv.errors import ContractError, DataError, InfraError
from agentenv.interop._nemo_text import prompt_of
from agentenv.interop._nemo_types import EnvironmentUnavailable, bare, last_action
from agentenv.openrlhf import parse_step, text_or_messages
from agentenv.types import Message, StepResult

ID = "agentenv_id"
"""Key of an episode's id in a row's metadata."""
OWN_KEYS = (ID, "label", "ground_truth", "seed", "metadata", "raw_prompt", "task_prompt", "tools")
"""What metadata say to us; the other keys are columns of the row."""


@dataclass(frozen=True, slots=True)
class First:
    """What `reset` gives at the start of an episode."""

    observation: str | Sequence[Message]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(slots=True, eq=False)
class Session:
    """One live episode."""

    agent: AgentInstance
    metadata: Mapping[str, Any]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    label: Any = None
    seed: int | None = None
    first: First = First("")
    num_actions: int = 0
    """Assistant's messages in the log at the last step; before the first one those of the prompt."""
    turn_index: int = 0
    stop: tuple[str, ...] | None = None
    """Strings that end the next generation; None where the environment never spoke of them."""
    stop_before: tuple[str, ...] = ()
    """Those that ended the last one."""
    busy: bool = False
    timer: asyncio.TimerHandle | None = None


class Sessions:
    """Makes, finds, steps and closes episodes of one environment class."""

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
        self._cls, self._kwargs = cls, kwargs
        self._limit_s, self._idle_s, self._check_prompt = step_timeout_s, idle_s, check_prompt
        self._parse = parse
        self._live: dict[str, Session] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def num_live(self) -> int:
        """Episodes that began and did not end."""
        return len(self._live)

    async def step(self, log: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> tuple[Session, StepResult]:
        """Take the log's last message as the episode's next action. An episode that ends or fails is closed.

        Raises:
            EnvironmentUnavailable: it is not known here any more, or too slow.
            DataError: the log is none of this episode's next turn, or the model saw another prompt than `reset` gives.
            Exception: what the environment raised.
        """
        action = last_action(log)
        session = self._known(metadata[ID]) if metadata.get(ID) is not None else await self._begin(log, metadata)
        if session.busy:
            raise ContractError(f"step: expected one row of an episode at a time, got two of {session.id}. Mend {ID}.")
        session.busy = True
        try:
            self._disarm(session)
            result = await self._stepped(session, log, action)
        except BaseException:
            self.num_failed += 1
            await self.drop(session)
            raise
        session.busy = False
        if result.done:
            self.num_ended += 1
            await self.drop(session)
        else:
            self._arm(session)
        return session, result

    async def first(self, metadata: Mapping[str, Any], prompt: str | Sequence[Message]) -> First:
        """What `reset` gives for a row, from an agent that is closed again.

        Raises:
            Exception: what the environment raised.
        """
        agent = await bounded(create, self._cls, self._kwargs, limit_s=self._limit_s)
        try:
            return await self._reset(agent, metadata, prompt)
        finally:
            await bounded(agent.close, limit_s=self._limit_s)

    async def drop(self, session: Session) -> None:
        """Close an episode, once."""
        self._disarm(session)
        if self._live.pop(session.id, None) is not None:
            await asyncio.gather(bounded(session.agent.close, limit_s=self._limit_s), return_exceptions=True)

    async def forget(self, session_id: str) -> None:
        """Close the episode of this id, if it lives."""
        session = self._live.get(session_id)
        if session is not None:
            await self.drop(session)

    async def close(self) -> None:
        """Close all episodes."""
        await asyncio.gather(*map(self.drop, list(self._live.values())), *self._closing)

    def _known(self, session_id: Any) -> Session:
        session = self._live.get(session_id) if isinstance(session_id, str) else None
        if session is None:
            raise EnvironmentUnavailable(
                f"step: expected the id of a live episode, got {session_id!r:.80}: it ended, had no step for "
                f"{self._idle_s:g} s, or this process is another. Roll the prompt out again, or raise idle_s."
            )
        return session

    async def _begin(self, log: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> Session:
        asked = prompt_of(log, bare(log))
        given = metadata.get("task_prompt", metadata.get("raw_prompt"))
        prompt: Any = asked if given is None else given
        agent = await bounded(create, self._cls, self._kwargs, limit_s=self._limit_s)
        session = Session(agent, deepcopy(_columns(metadata)), num_actions=_num_actions(log) - 1)
        self._live[session.id] = session
        self.num_started += 1
        try:
            session.label, session.seed = deepcopy(_label(metadata)), metadata.get("seed")
            session.first = await self._reset(agent, metadata, prompt)
            if self._check_prompt:
                _check_shown(session.first, metadata, metadata.get("raw_prompt", asked))
        except BaseException:
            self.num_failed += 1
            await self.drop(session)
            raise
        return session

    async def _reset(self, agent: AgentInstance, metadata: Mapping[str, Any], prompt: str | Sequence[Message]) -> First:
        columns, label, observation = deepcopy((_columns(metadata), _label(metadata), prompt))
        states = {"observation": observation, "label": label, "metadata": columns, "images": ()}
        where = f"{type(agent).__name__}.reset"
        answer = await self._bounded(agent.reset, {**states, "seed": metadata.get("seed")})
        if not isinstance(answer, Mapping) or "observation" not in answer:
            raise ContractError(
                f"{where}: expected a dict with the key 'observation', got {answer!r:.200}. Return one."
            )
        return First(text_or_messages(answer["observation"], where), tuple(answer.get("tools") or ()))

    async def _stepped(self, session: Session, log: Sequence[Mapping[str, Any]], action: str) -> StepResult:
        num_actions = _num_actions(log)
        if num_actions != session.num_actions + 1:
            raise DataError(
                f"step: expected the log of turn {session.turn_index}, with {session.num_actions + 1} assistant "
                f"messages, got {num_actions}. Send each action once, with all before it."
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
        result = parse_step(value, f"{type(session.agent).__name__}.step")
        session.num_actions, session.turn_index = num_actions, session.turn_index + 1
        session.stop_before = session.stop or ()
        session.stop = result.sampling.stop if result.sampling is not None else session.stop
        return result

    async def _bounded(self, method: Any, *args: Any) -> Any:
        try:
            return await bounded(method, *args, limit_s=self._limit_s)
        except StepTimeout as error:
            raise InfraError(str(error)) from error

    def _arm(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        session.timer = loop.call_later(self._idle_s, partial(self._abandon, session))

    def _disarm(self, session: Session) -> None:
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None

    def _abandon(self, session: Session) -> None:
        self.num_abandoned += 1
        task = asyncio.get_running_loop().create_task(self.drop(session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _num_actions(log: Sequence[Mapping[str, Any]]) -> int:
    return sum(message.get("role") == "assistant" for message in log)


def _label(metadata: Mapping[str, Any]) -> Any:
    return metadata.get("label", metadata.get("ground_truth"))


def _columns(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The other columns of the row."""
    rest = {key: value for key, value in metadata.items() if key not in OWN_KEYS}
    return rest | dict(metadata.get("metadata") or {})


def _check_shown(first: First, metadata: Mapping[str, Any], shown: Any) -> None:
    """Refuse an episode whose first observation is not what the model has been asked: its reward is of another task."""
    tools = [dict(tool) for tool in metadata.get("tools") or ()]
    if _plain(first.observation) == _plain(shown) and [dict(tool) for tool in first.tools] == tools:
        return
    raise DataError(
        f"reset: expected the prompt that the model was shown, {shown!r:.200}, got {first.observation!r:.200}. NeMo RL "
        "never shows what reset returns: make the rows with TaskProcessor, which does; or set check_prompt to false."
    )


def _plain(observation: Any) -> Any:
    if isinstance(observation, str):
        return observation
    return [(message.get("role"), message.get("content")) for message in observation or ()]
