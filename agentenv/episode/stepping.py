"""SteppedEpisode: an episode of the one loop whose actions its caller passes in, one at a time.

Gymnasium's `reset` and `step` and `agentenv play` are built on it. An engine that waits for the next action takes the
place of the policy, so limits, tokens, deadlines and the record are those of any other episode.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, cast

from agentenv.chat.chat import Chat
from agentenv.chat.encoding import encoder_of
from agentenv.core.agent import AgentInstance, StepState
from agentenv.core.engine import Engine
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, Limits, Message, SamplingParams, StepResult, Task
from agentenv.episode.loop import AgentFactory, Episode, recording_errors
from agentenv.episode.setup import EpisodeKey, EpisodeProgress, EpisodeSetup, Stage
from agentenv.errors import ContractError, EpisodeFailed


@dataclass(frozen=True, slots=True)
class ActionRequest:
    """What an engine would be asked now."""

    prompt_token_ids: Sequence[int]
    """Everything so far, which the action is appended to."""
    sampling: SamplingParams
    """`max_tokens` is the room of this action."""


class SteppedEpisode(Engine):
    """One episode, from `begin` over as many `act` as it takes to `aclose`; used from one event loop.

    It is the engine of its episode: what `act` says is what it samples.

    Time between the calls does not count: `step_timeout_s` is the only time limit that applies.

    Example::

        async with SteppedEpisode(partial(create, MathRetry, {}), task, chat=Chat(CharTokenizer())) as episode:
            observation = await episode.begin()
            while not episode.over:
                result = await episode.act("The answer is 42.")
    """

    def __init__(
        self,
        make_agent: AgentFactory,
        task: Task,
        *,
        chat: Chat,
        sampling: SamplingParams | None = None,
        limits: Limits | None = None,
        key: EpisodeKey | None = None,
        host_samples: bool = False,
    ) -> None:
        """Start nothing; the arguments are those of `run_episode`, and `EpisodeSetup.host_samples`."""
        limits = replace(limits or Limits(), episode_timeout_s=math.inf, generate_timeout_s=math.inf)
        self._make_agent, self._chat = make_agent, chat
        setup = EpisodeSetup(self, chat, sampling or SamplingParams(), limits, host_samples=host_samples)
        self._episode = Episode(task, setup, key or EpisodeKey())
        self._running: asyncio.Task[Trajectory] | None = None
        self._is_cancelled = False
        self._asking: asyncio.Future[ActionRequest] | None = None
        self._action: asyncio.Future[Completion] | None = None
        self.asked: ActionRequest | None = None
        """What the next action answers; None before `begin` and after the end."""

    @property
    def trajectory(self) -> Trajectory:
        """The record so far; complete once the episode is over."""
        return self._episode.trajectory

    @property
    def over(self) -> bool:
        """True if the episode has ended or was closed."""
        return self._running is not None and self._running.done()

    async def begin(self) -> str | Sequence[Message]:
        """Make the environment, reset it, and return the first observation. Call it once, and first.

        Raises:
            EpisodeFailed: the environment raised, or its prompt leaves no room; it is closed.
        """
        if self._running is not None:
            raise ContractError(
                "SteppedEpisode.begin: expected a new episode, got one that has started. Create another."
            )
        self._asking = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._episode.run(self._make_agent))
        await self._until_asked()
        return self.trajectory.prompt

    async def act(self, action: str | Sequence[int] | Completion) -> StepResult:
        """Pass an action and return the environment's result.

        If a limit ended the episode, the result is `truncated` and has the reward of the last word.

        Args:
            action: text, to which a terminator is added; or token ids as they are, at least one. Either is cut to the
                room that is left, like an engine's output. Or a whole completion, which must fit.

        Raises:
            ContractError: no action is asked for.
            EpisodeFailed: the environment raised, hung, or returned something other than a result; it is closed.
        """
        if self.asked is None or self._action is None:
            raise self._asks_nothing("act")
        if isinstance(action, Completion):
            completion = action
        else:
            if isinstance(action, str):  # as a model samples it: no token is special but the terminator at the end
                eos = self._chat.tokenizer.eos_token_id
                ids = [*encoder_of(self._chat.tokenizer).plain(action), *([] if eos is None else [eos])]
            else:
                ids = [int(i) for i in action]
            if not ids:
                raise ContractError(
                    "SteppedEpisode.act: expected at least one token id, got none. End it with a terminator."
                )
            room = self.asked.sampling.max_tokens
            is_cut = room is not None and len(ids) > room
            completion = Completion(tuple(ids[:room]), "length" if is_cut else "stop")
        self.asked, self._asking = None, asyncio.get_running_loop().create_future()
        self._action.set_result(completion)
        await self._until_asked()
        result = self.trajectory.turns[-1].result
        if result is None:
            raise EpisodeFailed(f"SteppedEpisode.act: expected a result, got none: {self.trajectory.stop_reason}.")
        cut = self.over and self.trajectory.truncated and not result.done
        return replace(result, truncated=True) if cut else result

    @property
    def agent(self) -> AgentInstance | None:
        """The environment's instance; None before `begin` and after the end."""
        agent: AgentInstance | None = self._episode.agent
        return agent

    async def gold(self) -> str | None:
        """Return an action that earns the full score now; None if the environment has none.

        Raises:
            ContractError: no action is asked for, or the environment returned something other than text or None.
        """
        if self.asked is None:
            raise self._asks_nothing("gold")
        episode, agent = self._episode, self._episode.agent
        states: StepState = {
            "observation_text": episode.dialogue.text,
            "label": deepcopy(episode.label),
            "turn_index": len(self.trajectory.turns),
            "metadata": deepcopy(episode.metadata),
            "seed": episode.key.seed,
        }
        with episode.threads.noted():
            action = await episode.call(agent.gold, states)
        if action is not None and not isinstance(action, str):
            raise ContractError(
                f"{type(agent).__name__}.gold: expected text or None, got {action!r:.200}. Return the action as a "
                "policy would write it."
            )
        return action

    async def tried_gold(self) -> tuple[str | None, EpisodeError | None]:
        """Return what `gold` returns, or None and the error that it raised, as data."""
        action, record = None, Trajectory(self.trajectory.task, self.trajectory.max_length)
        with recording_errors(record, EpisodeProgress(stage=Stage.GOLD)):
            action = await self.gold()
        return action, record.error

    async def aclose(self) -> None:
        """End the episode and close its environment; a second call does nothing."""
        self.asked = None
        if self._running is not None and not self._running.done():
            self._cancel(self._running)
            await asyncio.wait({self._running})

    async def __aenter__(self) -> SteppedEpisode:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Wait for the action; see `core.engine.Engine`."""
        self._action = asyncio.get_running_loop().create_future()
        self.asked = ActionRequest(prompt_token_ids, sampling)
        if self._asking is not None and not self._asking.done():
            self._asking.set_result(self.asked)
        return await self._action

    def _asks_nothing(self, method: str) -> ContractError:
        state, advice = "works on an action", "Await that"
        if self._running is None or self.over:
            state, advice = ("is over" if self.over else "has not started"), "Begin one"
        return ContractError(f"SteppedEpisode.{method}: expected an episode that asks, got one that {state}. {advice}.")

    async def _until_asked(self) -> None:
        """Wait for the next request of an action or the end.

        Raises:
            EpisodeFailed: the end is a failure.
        """
        running, asking = self._running, self._asking
        if running is None or asking is None:
            return
        try:
            await asyncio.wait(cast(set[asyncio.Future[Any]], {running, asking}), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._cancel(running)
            raise
        if not running.done():
            return
        error = running.result().error
        if error is not None:
            text = f"{error.where}: {error.type}: {error.message}"
            if not text.endswith("."):
                text = f"{text} at {error.place}." if error.place else f"{text}."
            elif error.place:  # the message consists of sentences
                text = f"{text} ({error.where} at {error.place})"
            if error.kind == "infra":
                text = f"{text} A service may be back later: play the episode again."
            raise EpisodeFailed(text) from self._episode.progress.error

    def _cancel(self, running: asyncio.Task[Trajectory]) -> None:
        """Cancel once: a second time would interrupt the environment's `close`."""
        if not self._is_cancelled:
            self._is_cancelled = True
            running.cancel()
