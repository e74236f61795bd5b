"""Reward functions: OpenRLHF's `--remote_rm_url`, a file with `reward_func(queries, prompts, labels)` or an address.

One turn per episode: the model answers the prompt, and the function judges it. Source of the contract:
openrlhf/utils/agent.py, SingleTurnAgentExecutor, 0.9.1 to 0.11.2; trainer/ray and remote_rm_utils.py before.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from agentenv._util.calls import bounded
from agentenv._util.per_loop import PerLoop
from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance, StepState
from agentenv.core.engine import Engine
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, Conversation, SamplingParams, StepResult, Task
from agentenv.episode.loop import Episode
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.rewards.models.openrlhf_wire import Outcome, Sample, read_rewards

MAX_CALLS = 32
"""Maximum number of concurrent calls of a reward_func: OpenRLHF calls it in at most this many threads."""


class AnswerJudge(Protocol):
    """A source of rewards for single-turn answers."""

    @property
    def patience_s(self) -> float:
        """Longest time for `judge`, including the wait for its turn; infinite if it enforces a step's limit itself."""

    async def judge(self, samples: Sequence[Sample], limit_s: float) -> Sequence[Outcome]:
        """Return an outcome for each sample; `limit_s` is the run's time limit for a step.

        Raises:
            ContractError: the answer as a whole cannot be read.
            InfraError: no answer is available.
        """


class RewardSource:
    """Episodes of one turn whose answers are judged; an EpisodeSource.

    An answer that the token limit cut is truncated, as in OpenRLHF, and still judged.
    """

    def __init__(self, judge: AnswerJudge, *, batch_size: int = 1, wait_s: float = 0.005) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size: expected an integer >= 1, got {batch_size!r}. Change the value.")
        if not 0 <= wait_s < math.inf:
            raise ConfigError(f"wait_s: expected seconds >= 0, got {wait_s!r}. Change the value.")
        self.judge = judge
        self._batches = PerLoop(partial(_Batches, judge, batch_size, wait_s))

    async def run(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        """Run one episode; see `Episode.run`."""
        limits, recorder = setup.limits, _PromptRecorder(setup.engine)
        ask = partial(self._batches.here().ask, limit_s=limits.step_timeout_s)

        async def make() -> AgentInstance:
            return _JudgedAnswer(ask, setup.chat, recorder)

        # The judge measures a step's time itself, from when its turn comes.
        patience_s = max(limits.step_timeout_s, self.judge.patience_s)
        limits = replace(limits, max_turns=1, step_timeout_s=patience_s)
        return await Episode(task, replace(setup, engine=recorder, limits=limits), key).run(make)


class _PromptRecorder(Engine):
    """An engine that remembers its last prompt: text cannot be turned back into the same ids."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.prompt_ids: list[int] = []

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample from the wrapped engine."""
        self.prompt_ids = [] if isinstance(prompt_token_ids, Conversation) else list(prompt_token_ids)
        return await self.engine.generate(prompt_token_ids, sampling, request_id=request_id)


class _JudgedAnswer(AgentInstance):
    """The environment of one answer."""

    score_range = None

    def __init__(self, ask: Callable[[Sample], Awaitable[Outcome]], chat: Chat, recorder: _PromptRecorder) -> None:
        self.ask = ask
        self.chat = chat
        self.recorder = recorder

    async def step(self, states: StepState) -> StepResult:
        """Send the answer to the judge."""
        prompt, action_ids = states["observation_text"], states["action_ids"]
        # Decode prompt and answer together, as OpenRLHF does: some tokenizers drop the space that a text starts with.
        query = self.chat.decode([*self.recorder.prompt_ids, *action_ids]) if action_ids else ""
        if not action_ids:  # of an engine that returns text
            query = f"{prompt} {states['action_text']}"
        elif not query.startswith(prompt):  # reward functions cut the prompt off the front
            query = prompt + self.chat.decode(action_ids)
        outcome = await self.ask(Sample(query, prompt, states["label"]))
        if isinstance(outcome, ContractError):
            raise outcome
        cut = states["finish_reason"] == "length"
        return replace(outcome, terminated=not cut, truncated=cut)


class _Batches:
    """Collects samples that arrive within a few milliseconds, up to `size` for one call of the judge."""

    def __init__(self, judge: AnswerJudge, size: int, wait_s: float) -> None:
        self.judge, self.size, self.wait_s = judge, size, wait_s
        self._waiting: list[tuple[Sample, asyncio.Future[Outcome]]] = []
        self._limit_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._judging: set[asyncio.Task[Sequence[Outcome]]] = set()

    async def ask(self, sample: Sample, *, limit_s: float) -> Outcome:
        """Return the outcome of one sample.

        Raises:
            Exception: the judge's error for this sample alone.
        """
        if self.size == 1:
            return (await self.judge.judge([sample], limit_s))[0]
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        self._waiting.append((sample, future))
        self._limit_s = limit_s
        if len(self._waiting) == 1:
            self._timer = loop.call_later(self.wait_s, self._send)
        if len(self._waiting) == self.size:
            self._send()
        return await future

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        batch, self._waiting = self._waiting, []
        self._judge([each for each in batch if not each[1].done()])  # the others were cancelled meanwhile

    def _judge(self, batch: list[tuple[Sample, asyncio.Future[Outcome]]]) -> None:
        if not batch:
            return
        work = self.judge.judge([sample for sample, _ in batch], self._limit_s)
        task = asyncio.ensure_future(work)
        self._judging.add(task)  # asyncio keeps only a weak reference
        task.add_done_callback(partial(self._settle, batch))

    def _settle(
        self, batch: list[tuple[Sample, asyncio.Future[Outcome]]], task: asyncio.Task[Sequence[Outcome]]
    ) -> None:
        self._judging.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and len(batch) > 1 and not isinstance(error, asyncio.CancelledError | InfraError):
            for one in batch:  # judge each alone to find the one at fault
                self._judge([one])
            return
        for index, (_, future) in enumerate(batch):
            if future.done():
                continue
            if error is None:
                future.set_result(task.result()[index])
            elif isinstance(error, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(error)


class RewardFunction:
    """Judges with a file's function, in threads: several calls run concurrently, as in OpenRLHF."""

    patience_s = math.inf  # waiting for a free thread is not the function's fault

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        self.function, self.where = function, where
        self._slots = PerLoop(partial(asyncio.Semaphore, MAX_CALLS))

    async def judge(self, samples: Sequence[Sample], limit_s: float) -> Sequence[Outcome]:
        """Call the function once, for at most `limit_s` from when a thread is free.

        Raises:
            Exception: the function raised it.
            StepTimeout: the call took longer.
            ContractError: the function's answer cannot be read.
        """
        lists = [each.query for each in samples], [each.prompt for each in samples], [each.label for each in samples]
        async with self._slots.here():
            answer = await bounded(self.function, *lists, limit_s=limit_s)
        return read_rewards(answer, len(samples), self.where)
