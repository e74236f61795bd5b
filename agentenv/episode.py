"""run_episode: the one loop that generates, steps and appends. Token in, token out."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentenv.agent import AgentInstance, Engine, StepState
from agentenv.chat import Chat
from agentenv.deadlines import StepTimeout, bounded, sample
from agentenv.dialogue import Dialogue
from agentenv.errors import ConfigError, ContractError, DataError, EngineError, InfraError, RunStopped
from agentenv.openrlhf import parse_step, text_or_messages
from agentenv.trajectory import EpisodeError, ErrorKind, Trajectory
from agentenv.types import Limits, SamplingParams, StepResult, StopReason, Task

logger = logging.getLogger(__name__)

_LIBRARY = str(Path(__file__).parent)
_DEFAULTS = frozenset([AgentInstance.reset, AgentInstance.on_truncate, AgentInstance.close])
"""They do nothing, which needs no deadline."""

AgentFactory = Callable[[], Awaitable[AgentInstance]]
"""Makes the agent instance of one episode."""


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """Which episode this is: deterministic, so that a resumed run knows it again."""

    episode_id: str = "episode"
    group_id: str = ""
    attempt: int = 0
    seed: int | None = None
    """Seed of the environment; handed to `reset` and `step`."""


async def run_episode(
    make_agent: AgentFactory,
    task: Task,
    *,
    engine: Engine,
    chat: Chat,
    sampling: SamplingParams,
    limits: Limits,
    key: EpisodeKey = EpisodeKey(),
) -> Trajectory:
    """Run one episode to its end and give its record.

    What goes wrong inside is data: the trajectory has stop_reason ERROR (or a timeout), the error as text, no reward.

    Raises:
        asyncio.CancelledError: the call was cancelled; after `close`.
        ConfigError: the engine is set up wrongly, so that no other episode could be sampled either; after `close`.
    """
    episode = Episode(task, engine=engine, chat=chat, sampling=sampling, limits=limits, key=key)  # watchdog.py reads it
    return await episode.whole(make_agent)


async def guarded(work: Awaitable[None], trajectory: Trajectory, where: Callable[[], str]) -> None:
    """Await `work` and record on the trajectory what it raises: the one `except` that makes an error data.

    A cancellation of this task passes, and what is said of the whole run: a RunStopped, an engine's ConfigError. A
    CancelledError that the work made itself is an error like any other.
    """
    try:
        await work
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        _record(trajectory, error, where())
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, RunStopped) or (isinstance(error, ConfigError) and where() == "generate"):
            raise
        _record(trajectory, error, where())


def _record(trajectory: Trajectory, error: BaseException, where: str) -> None:
    kind: ErrorKind = "env"
    if isinstance(error, InfraError) or where == "generate":
        kind = "infra"
    elif isinstance(error, ContractError):
        kind = "contract"
    elif isinstance(error, DataError) or (isinstance(error, ConfigError) and where == "prompt"):
        kind = "data"
    timed_out, name = isinstance(error, StepTimeout), type(error).__name__
    told = str(error).encode("utf-8", "backslashreplace").decode()  # logs go to files, which take no lone surrogates
    logger.warning("episode %s: %s failed: %s: %s", trajectory.episode_id, where, name, told)
    logger.debug("episode %s", trajectory.episode_id, exc_info=error)
    reason = StopReason.STEP_TIMEOUT if timed_out else StopReason.ERROR
    trajectory.finish(reason, EpisodeError(kind, name, str(error) or repr(error), where, place_of(error)))


def place_of(error: BaseException) -> str:
    """file:line of the innermost frame that is neither agentenv's nor a library's; errors of actors bring theirs."""
    if (place := getattr(error, "place", None)) is not None:
        return str(place)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((_LIBRARY, sys.base_prefix, sys.prefix, "<"))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


class Episode:
    """The state of one running episode; `trajectory` is its record so far."""

    def __init__(
        self, task: Task, *, engine: Engine, chat: Chat, sampling: SamplingParams, limits: Limits, key: EpisodeKey
    ) -> None:
        self.task, self.engine, self.chat, self.sampling, self.limits, self.key = (
            task, engine, chat, sampling, limits, key,
        )  # fmt: skip
        self.agent: AgentInstance | None = None
        self.where = "create"
        self.dialogue = Dialogue(chat, limits.max_length)
        self.is_openrlhf = False  # the last step answered in OpenRLHF's form
        self.states: StepState = {}
        self.label: Any = None
        self.metadata: Mapping[str, Any] = {}
        self.trajectory = Trajectory(
            task, limits.max_length, key.episode_id, key.group_id, attempt=key.attempt, seed=key.seed
        )

    async def whole(self, make_agent: AgentFactory) -> Trajectory:
        """Everything from the making of the agent to its `close`; see `run_episode`."""
        started = time.perf_counter()
        try:
            await self.guard(self.run(make_agent))
        finally:
            self.trajectory.finish(StopReason.ABORTED)
            await self.guard(self.close())
            worked = sum(turn.generate_s + turn.step_s for turn in self.trajectory.turns)
            self.trajectory.wait_s = max(0.0, time.perf_counter() - started - worked)
        return self.trajectory

    async def run(self, make_agent: AgentFactory) -> None:
        """Reset, take turns until something ends the episode, and let the environment have its last word."""
        try:
            async with asyncio.timeout(self.limits.episode_timeout_s) as deadline:
                reason = await self._turns(make_agent)
        except TimeoutError:
            if not deadline.expired():
                raise
            reason = StopReason.EPISODE_TIMEOUT
        if reason in (StopReason.MAX_TURNS, StopReason.MAX_LENGTH, StopReason.EPISODE_TIMEOUT):
            await self._last_word()
        self.trajectory.finish(reason)

    async def gold(self) -> str | None:
        """What the environment would have a perfect policy say now; see `AgentInstance.gold`.

        Raises:
            ContractError: it gave something else than a text or None.
        """
        states: StepState = {
            "observation_text": self.dialogue.text,
            "label": deepcopy(self.label),
            "turn_index": len(self.trajectory.turns),
            "metadata": deepcopy(self.metadata),
            "seed": self.key.seed,
        }
        agent = self._running_agent()
        action = await self._bounded(agent.gold, states)
        if action is not None and not isinstance(action, str):
            raise ContractError(
                f"{type(agent).__name__}.gold: expected a text or None, got {action!r:.200}. Give the action "
                "as a policy would say it."
            )
        return action

    async def guard(self, work: Awaitable[None]) -> None:
        """Await `work`; what it raises goes on the trajectory, unless that is finished."""
        await guarded(work, self.trajectory, lambda: self.where)

    async def close(self) -> None:
        """Close the agent, whatever state the episode is in."""
        agent, self.agent, self.where = self.agent, None, "close"
        if agent is not None:
            await self._bounded(agent.close)

    async def _turns(self, make_agent: AgentFactory) -> StopReason:
        await self._reset(make_agent)
        num = len(self.dialogue.ids)
        if num >= self.limits.max_length:
            raise DataError(
                f"prompt: expected fewer than max_length={self.limits.max_length} tokens, got {num}. "
                "Raise --max_length or drop the row."
            )
        self.trajectory.append_observation(self.dialogue.ids)
        for turn_index in range(self.limits.max_turns):
            reason = await self._turn(turn_index)
            if reason is not None:
                return reason
        return StopReason.MAX_TURNS

    async def _create(self, make_agent: AgentFactory) -> None:
        self.agent = await make_agent()  # kept at once, so that it is closed whatever comes next

    async def _reset(self, make_agent: AgentFactory) -> None:
        await self._bounded(self._create, make_agent)
        self.where = "reset"
        # Copies: siblings have the same task, and an environment may write into what it is given.
        prompt, self.label, self.metadata = deepcopy((self.task.prompt, self.task.label, self.task.metadata))
        states = await self._bounded(
            self._running_agent().reset,
            {
                "observation": prompt,
                "label": self.label,
                "metadata": self.metadata,
                "images": self.task.images,
                "seed": self.key.seed,
                "renders_tools": self.dialogue.renders_tools,
            },
        )
        if not isinstance(states, Mapping) or "observation" not in states:
            raise ContractError(
                f"{type(self.agent).__name__}.reset: expected a dict with the key 'observation', got {states!r:.200}. "
                "Return the states you were given, or {'observation': text_or_messages}."
            )
        self.where = "prompt"
        where = f"{type(self.agent).__name__}.reset: observation"
        self.dialogue.begin(text_or_messages(states["observation"], where), states.get("tools"))
        self.trajectory.prompt = self.dialogue.observation
        self.trajectory.tools = tuple(self.dialogue.tools or ())
        if not self.dialogue.ids:
            raise DataError("prompt: expected at least one token, got an empty observation. Give the task a prompt.")

    async def _turn(self, turn_index: int) -> StopReason | None:
        """Generate, step, append; the reason why the episode ends with this turn, or None."""
        trajectory = self.trajectory
        action_ids = await self._generate(turn_index)
        if action_ids is None:
            aborted = "generate: expected a completion, got finish reason 'abort'. Run the episode again."
            trajectory.finish(StopReason.ABORTED, EpisodeError("infra", "Aborted", aborted, "generate"))
            return StopReason.ABORTED
        result = await self._step(turn_index, action_ids)
        if result.terminated:
            return StopReason.TERMINATED
        if result.truncated:
            return StopReason.TRUNCATED_BY_ENV
        if turn_index + 1 == self.limits.max_turns:
            return StopReason.MAX_TURNS
        self.sampling = result.sampling or self.sampling
        reply = self.dialogue.reply(
            action_ids, trajectory.turns[-1].action, result.observation,
            reserve=self.sampling.max_tokens, openrlhf=self.is_openrlhf,
        )  # fmt: skip
        if reply is None:
            return StopReason.MAX_LENGTH
        self.dialogue.take(reply)
        if reply.opens_segment:
            trajectory.open_segment(reply.ids, cut=reply.cut)
        else:
            trajectory.append_observation(
                reply.ids, bridge=reply.kind, num_synthesised=reply.num_synthesised, cut=reply.cut
            )
        return None

    async def _generate(self, turn_index: int) -> list[int] | None:
        """Sample an action and append it; None when the engine gave up on it."""
        self.where = "generate"
        room = self.limits.max_length - len(self.dialogue.ids)
        max_tokens = min(self.sampling.max_tokens or room, room)
        seed = None if self.sampling.seed is None else self.sampling.seed + turn_index
        sampling = replace(
            self.sampling, max_tokens=max_tokens, min_tokens=min(self.sampling.min_tokens, max_tokens), seed=seed
        )
        started = time.perf_counter()
        completion = await sample(
            self.engine, self.dialogue.ids, sampling,
            request_id=f"{self.key.episode_id}/{turn_index}", limit_s=self.limits.generate_timeout_s,
        )  # fmt: skip
        generate_s = time.perf_counter() - started
        aborted = completion.finish_reason == "abort"
        if aborted and not completion.token_ids:
            return None
        text = self.chat.action_text(completion.token_ids, sampling.stop_token_ids)
        try:
            self.trajectory.append_turn(completion, text, generate_s)
        except ValueError as error:
            raise EngineError(f"generate: {error}") from error
        return None if aborted else list(completion.token_ids)

    async def _step(self, turn_index: int, action_ids: list[int]) -> StepResult:
        """Hand the last action to the environment and record its reply."""
        turn = self.trajectory.turns[-1]
        self.where = "step"
        self.states = {
            "observation_text": self.dialogue.text,
            "action_text": turn.action,
            "label": self.label,
            "sampling_params": self.sampling,
            "action_ids": list(action_ids),
            "finish_reason": turn.finish_reason,
            "turn_index": turn_index,
            "tokens_left": self.limits.max_length - len(self.dialogue.ids) - len(action_ids),
            "metadata": self.metadata,
            "seed": self.key.seed,
        }
        if not self.dialogue.is_raw:
            self.states["tool_calls"] = self.dialogue.parse(turn.action, turn_index)
        started = time.perf_counter()
        agent = self._running_agent()
        value = await self._bounded(agent.step, self.states)
        result = parse_step(value, f"{type(agent).__name__}.step")
        if not isinstance(result.observation, str):  # a copy: an environment may write into its messages later
            result = replace(result, observation=deepcopy(result.observation))
        self.is_openrlhf = not isinstance(value, StepResult)
        self.trajectory.set_result(result, time.perf_counter() - started)
        closing = self.chat.closing_text(action_ids, self.sampling.stop_token_ids)
        self.dialogue.act(action_ids, turn.action + closing)
        return result

    async def _last_word(self) -> None:
        """Tell the environment that a limit ended the episode, and add the reward it may still give."""
        last = self.trajectory.turns[-1].result if self.trajectory.turns else None
        if last is None:
            return
        self.where = "on_truncate"
        agent = self._running_agent()
        value = await self._bounded(agent.on_truncate, self.states)
        if value is None:
            return
        word = parse_step(value, f"{type(agent).__name__}.on_truncate")
        score = last.score if word.score is None else word.score
        merged = replace(last, reward=last.reward + word.reward, score=score, info={**last.info, **word.info})
        self.trajectory.set_result(merged)

    def _running_agent(self) -> AgentInstance:
        if self.agent is None:
            raise ContractError("run_episode: expected a running agent, got a closed one. Report this as a bug.")
        return self.agent

    async def _bounded(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the agent, for at most `step_timeout_s`."""
        if getattr(method, "__func__", None) in _DEFAULTS:
            return await method(*args)
        return await bounded(method, *args, limit_s=self.limits.step_timeout_s)
