"""SteppedEpisode: an episode of the one loop whose actions whoever holds it gives, one at a time.

Gymnasium's `reset` and `step` and `agentenv play` are made of it. The policy's place in `run_episode` is taken by an
engine that waits for the next action, so limits, tokens, deadlines and the record are those of any other episode.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from agentenv.chat import Chat
from agentenv.encoding import encoder_of
from agentenv.episode import AgentFactory, Episode, EpisodeKey
from agentenv.errors import ContractError, EpisodeFailed
from agentenv.trajectory import EpisodeError, Trajectory
from agentenv.types import Completion, Limits, Message, SamplingParams, StepResult, Task


@dataclass(frozen=True, slots=True)
class Asked:
    """What an engine would be asked now."""

    prompt_token_ids: Sequence[int]
    """Everything so far, which the action is appended to."""
    sampling: SamplingParams
    """`max_tokens` is the room of this action."""


class SteppedEpisode:
    """One episode, from `begin` over as many `act` as it takes to `aclose`; used from one event loop.

    Time that passes between the calls is nobody's: of `limits` only `step_timeout_s` is a clock.

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
    ) -> None:
        """Nothing runs yet; the arguments are those of `run_episode`."""
        limits = replace(limits or Limits(), episode_timeout_s=math.inf, generate_timeout_s=math.inf)
        self._make_agent, self._chat = make_agent, chat
        self._episode = Episode(
            task, engine=self, chat=chat, sampling=sampling or SamplingParams(), limits=limits,
            key=key or EpisodeKey(),
        )  # fmt: skip
        self._running: asyncio.Task[Trajectory] | None = None
        self._is_cancelled = False
        self._asking: asyncio.Future[Asked] | None = None
        self._action: asyncio.Future[Completion] | None = None
        self.asked: Asked | None = None
        """What the next action answers; None before `begin` and when the episode is over."""

    @property
    def trajectory(self) -> Trajectory:
        """The record so far; whole once the episode is over."""
        return self._episode.trajectory

    @property
    def over(self) -> bool:
        """The episode has ended, or was closed."""
        return self._running is not None and self._running.done()

    async def begin(self) -> str | Sequence[Message]:
        """Make the environment, reset it, and give the first observation. Once, and first.

        Raises:
            EpisodeFailed: the environment raised, or its prompt leaves no room; it is closed.
        """
        if self._running is not None:
            raise ContractError("SteppedEpisode.begin: expected a new episode, got one that has begun. Make another.")
        self._asking = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._episode.whole(self._make_agent))
        await self._until_asked()
        return self.trajectory.prompt

    async def act(self, action: str | Sequence[int] | Completion) -> StepResult:
        """Give an action, and what the environment answered.

        Where a limit ended the episode the result says so: `truncated`, with the reward of the last word.

        Args:
            action: a text, which a terminator ends; or token ids as they are, at least one. What is longer than the
                room that is left is cut, as an engine would have been. Or a whole completion, which must fit.

        Raises:
            ContractError: no action is asked for.
            EpisodeFailed: the environment raised, hung, or gave what is no result; it is closed.
        """
        if self.asked is None or self._action is None:
            raise self._asks_nothing("act")
        completion = self._completion(action, self.asked.sampling)
        self.asked, self._asking = None, asyncio.get_running_loop().create_future()
        self._action.set_result(completion)
        await self._until_asked()
        result = self.trajectory.turns[-1].result
        if result is None:
            raise EpisodeFailed(f"SteppedEpisode.act: expected a result, got none: {self.trajectory.stop_reason}.")
        cut = self.over and self.trajectory.truncated and not result.done
        return replace(result, truncated=True) if cut else result

    async def gold(self) -> str | None:
        """An action that earns the full score from here, as the environment knows it; None where it knows none.

        Raises:
            ContractError: no action is asked for, or the environment gave something else than a text or None.
        """
        if self.asked is None:
            raise self._asks_nothing("gold")
        return await self._episode.gold()

    async def aclose(self) -> None:
        """End the episode, wherever it is; its environment is closed. Again is harmless."""
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
        """The engine of the loop: wait for the action; see `agent.Engine`."""
        self._action = asyncio.get_running_loop().create_future()
        self.asked = Asked(prompt_token_ids, sampling)
        if self._asking is not None and not self._asking.done():
            self._asking.set_result(self.asked)
        return await self._action

    def _asks_nothing(self, method: str) -> ContractError:
        state, mend = "works on an action", "Await that"
        if self._running is None or self.over:
            state, mend = ("is over" if self.over else "has not begun"), "Begin one"
        return ContractError(f"SteppedEpisode.{method}: expected an episode that asks, got one that {state}. {mend}.")

    async def _until_asked(self) -> None:
        """Wait for the next question or the end.

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
            raise EpisodeFailed(_told(error))

    def _cancel(self, running: asyncio.Task[Trajectory]) -> None:
        """Once: a second time would cut the environment's `close` short."""
        if not self._is_cancelled:
            self._is_cancelled = True
            running.cancel()

    def _completion(self, action: str | Sequence[int] | Completion, sampling: SamplingParams) -> Completion:
        if isinstance(action, Completion):
            return action
        ids = self._encoded(action) if isinstance(action, str) else [int(i) for i in action]
        if not ids:
            raise ContractError(
                "SteppedEpisode.act: expected at least one token id, got none. End it with a terminator."
            )
        room = sampling.max_tokens
        if room is not None and len(ids) > room:
            return Completion(tuple(ids[:room]), "length")
        return Completion(tuple(ids))

    def _encoded(self, text: str) -> list[int]:
        """A text as a model would have said it: no part of it becomes a special token; the terminator ends it."""
        eos = self._chat.tokenizer.eos_token_id
        return [*encoder_of(self._chat.tokenizer).plain(text), *([] if eos is None else [eos])]


def _told(error: EpisodeError) -> str:
    """A failure in words. Where it says sentences of its own, the place in the code stands behind them."""
    said = f"{error.where}: {error.type}: {error.message}"
    if not said.endswith("."):
        return f"{said} at {error.place}." if error.place else f"{said}."
    return f"{said} ({error.where} at {error.place})" if error.place else said
