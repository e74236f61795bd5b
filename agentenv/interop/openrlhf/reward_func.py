"""Reward functions: OpenRLHF's `--remote_rm_url`, a file with `reward_func(queries, prompts, labels)` or an address.

One turn per episode: the model answers the prompt, and the function, or a reward model over HTTP, judges it. Source of
the contract: openrlhf/utils/agent.py, SingleTurnAgentExecutor, 0.9.1 to 0.11.2; trainer/ray and remote_rm_utils.py
before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from agentenv._util.calls import bounded
from agentenv._util.http.client import AttemptFailure, HTTPAnswer, HTTPClient, HTTPErrors, RetryPolicy
from agentenv._util.per_loop import PerLoop
from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance, StepState
from agentenv.core.engine import Engine
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, Conversation, SamplingParams, StepResult, Task
from agentenv.episode.loop import Episode
from agentenv.episode.registry import load_file
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.interop.openrlhf.executor import _CALL, AgentExecutor
from agentenv.rewards.grading import collect_usage
from agentenv.rewards.models.openrlhf_wire import Outcome, Sample, read_rewards

logger = logging.getLogger(__name__)

MAX_CALLS = 32
"""Maximum number of concurrent calls of a reward_func: OpenRLHF calls it in at most this many threads."""
TIMEOUT_S = 180.0
"""Deadline of an answer, including all attempts and pauses; OpenRLHF's."""
MAX_ATTEMPTS = 5
"""OpenRLHF's."""
FIRST_PAUSE_S = 0.5
MAX_ANSWER_BYTES = 64 << 20
_MARGIN_S = 5.0
_ERRORS = HTTPErrors(misaddressed=ContractError, refused=ContractError, unreadable=ContractError)


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
            raise ConfigError(f"batch_size: expected an integer >= 1, got {batch_size!r}.")
        if not 0 <= wait_s < math.inf:
            raise ConfigError(f"wait_s: expected seconds >= 0, got {wait_s!r}.")
        self.judge = judge
        self._batches = PerLoop(partial(_Batches, judge, batch_size, wait_s))

    async def run(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        """Run one episode; see `Episode.run`."""
        limits, recorder = setup.limits, _PromptRecorder(setup.engine)
        ask = partial(self._batches.here().ask, limit_s=limits.step_timeout_s)

        async def make() -> AgentInstance:
            return _JudgedAnswer(ask, setup.chat, recorder)

        # The judge measures a step's time itself, from when its turn comes.
        limits = replace(limits, max_turns=1, step_timeout_s=max(limits.step_timeout_s, self.judge.patience_s))
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


class _OpenBatch:
    """Samples that arrive within a few milliseconds."""

    def __init__(self) -> None:
        self.samples: list[Sample | None] = []
        """None for those whose episodes were cancelled meanwhile."""
        self.full = asyncio.Event()
        self.judging: asyncio.Task[Mapping[int, Outcome]]


class _Batches:
    """Collects samples in batches of up to `size`, each for one call of the judge."""

    def __init__(self, judge: AnswerJudge, size: int, wait_s: float) -> None:
        self.judge, self.size, self.wait_s = judge, size, wait_s
        self._open: _OpenBatch | None = None

    async def ask(self, sample: Sample, *, limit_s: float) -> Outcome:
        """Return the outcome of one sample.

        Raises:
            Exception: the judge's error for this sample alone.
        """
        if self.size > 1:
            if (batch := self._open) is None:
                batch = self._open = _OpenBatch()
                batch.judging = asyncio.create_task(self._judge(batch, limit_s))
            number = len(batch.samples)
            batch.samples.append(sample)
            if number + 1 == self.size:
                batch.full.set()
                self._open = None
            try:
                outcomes = await asyncio.shield(batch.judging)
            except asyncio.CancelledError:
                batch.samples[number] = None
                raise
            if number in outcomes:
                return outcomes[number]
        return (await self.judge.judge([sample], limit_s))[0]

    async def _judge(self, batch: _OpenBatch, limit_s: float) -> Mapping[int, Outcome]:
        """Return the outcomes by the samples' numbers; none if each has to be judged alone to find the one at fault."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(batch.full.wait(), self.wait_s)
        if self._open is batch:
            self._open = None
        samples = {number: each for number, each in enumerate(batch.samples) if each is not None}
        if not samples:
            return {}
        try:
            with collect_usage() as spent:  # it would be the first episode's
                outcomes = await self.judge.judge([*samples.values()], limit_s)
        except Exception as error:
            if len(samples) > 1 and not isinstance(error, InfraError):
                return {}
            raise
        share = {name: count / len(samples) for name, count in spent.items()}
        shared = [
            replace(each, info={**share, **each.info}) if isinstance(each, StepResult) else each for each in outcomes
        ]
        return dict(zip(samples, shared, strict=True))


class RewardFunction:
    """Judges with a file's function, in threads: several calls run concurrently, as in OpenRLHF."""

    patience_s = math.inf  # waiting for a free thread is not the function's fault

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        self.function, self.where, self._is_told = function, where, False
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
        if not (isinstance(answer, Mapping) or self._is_told):
            self._is_told = True
            logger.error(  # there it is one; `run` shows no warnings
                "%s: expected a dict, as OpenRLHF reads it, got %s. Return {'rewards': …} for the same rewards there.",
                self.where,
                type(answer).__name__,
            )
        return read_rewards(answer, len(samples), self.where)


class RewardServers:
    """Judges by `POST {"query": […], "prompts": […], "labels": […]}` to the server with the fewest requests in flight.

    The answer is `{"rewards": […], "scores": […], "extra_logs": {…}}`. Failed attempts are repeated by
    `agentenv._util.http.client.RetryPolicy`, at another server if there is one; only with a single server is
    `Retry-After` respected.
    """

    def __init__(
        self, urls: Sequence[str], *, timeout_s: float = TIMEOUT_S, first_pause_s: float = FIRST_PAUSE_S
    ) -> None:
        wrong = [url for url in urls if not url.startswith(("http://", "https://"))]
        if wrong or not urls:
            raise ConfigError(
                f"--remote_rm_url: expected addresses with http://, split by commas, got {wrong or urls!r}."
            )
        self.in_flight = dict.fromkeys(urls, 0)
        """Current requests to each server. Equally busy servers take turns: the last one asked is at the end."""
        self.timeout_s = timeout_s
        self._policy = RetryPolicy(max_attempts=MAX_ATTEMPTS, timeout_s=timeout_s, first_pause_s=first_pause_s)
        self._clients = {url: HTTPClient(url, errors=_ERRORS) for url in urls}

    async def judge(self, samples: Sequence[Sample], limit_s: float) -> Sequence[Outcome]:
        """Ask a server; `limit_s` is ignored, since reward models have `timeout_s`.

        Raises:
            InfraError: no server answered before the deadline or within the allowed attempts.
            ContractError: the answer has another form, or the server refused the request.
        """
        body = {
            "query": [each.query for each in samples],
            "prompts": [each.prompt for each in samples],
            "labels": [each.label for each in samples],
        }
        content = json.dumps(body).encode()
        url = ""

        async def attempt(number: int) -> HTTPAnswer | AttemptFailure:
            nonlocal url
            others = [each for each in self.in_flight if each != url]  # not the server that just failed
            url = min(others or [url], key=self.in_flight.__getitem__)
            self.in_flight[url] = self.in_flight.pop(url) + 1
            try:
                answer = await self._clients[url].attempt("", content, max_bytes=MAX_ANSWER_BYTES)
            finally:
                self.in_flight[url] -= 1
            if isinstance(answer, AttemptFailure) and len(self._clients) > 1:
                return replace(answer, retry_after_s=0.0)
            return answer

        timeout = InfraError(
            f"{', '.join(client.url for client in self._clients.values())}: expected rewards within "
            f"{self.timeout_s:g} s, got none. Check the server's load."
        )
        answer = await self._policy.run(attempt, timeout)
        client = self._clients[url]
        rewards = await client.parse_json(answer, "", partial(read_rewards, num=len(samples), where=client.url))
        if isinstance(rewards, AttemptFailure):
            raise rewards.error
        return rewards

    @property
    def patience_s(self) -> float:
        """A little more than the deadline of an answer, whose own error is more precise."""
        return self.timeout_s + _MARGIN_S

    async def close(self) -> None:
        """Close all connections; calling it again does nothing."""
        for client in self._clients.values():
            await client.close()


class OneAnswer(AgentInstance):
    """The environment of one answer, which says nothing about its worth."""

    score_range = None

    async def step(self, states: StepState) -> StepResult:
        """End the episode."""
        cut = states["finish_reason"] == "length"
        return StepResult(terminated=not cut, truncated=cut)


class SingleTurnAgentExecutor(AgentExecutor):
    """Samples one answer. Its reward is that of `remote_rm_url`, else None until a subclass sets it in the response."""

    agent_cls = OneAnswer

    def __init__(self, remote_rm_url: str | Sequence[str] | None = None) -> None:
        """Take a FILE.py with `reward_func`, or addresses of reward servers."""
        super().__init__()
        self.reward_endpoints = [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url or ())
        self._judged: RewardSource | None = None
        if self.reward_endpoints and self.reward_endpoints[0].endswith(".py"):
            path = self.reward_endpoints[0]
            self._judged = RewardSource(RewardFunction(load_file(path).reward_func, f"{path}: reward_func"))
        elif self.reward_endpoints:
            self._judged = RewardSource(RewardServers(self.reward_endpoints))

    async def execute(self, prompt: Any, label: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        """Return OpenRLHF's response dict of one answer; the arguments are those of `AgentExecutor.execute`."""
        response = await super().execute(prompt, label, sampling_params, *args, **kwargs)
        if self._judged is not None:
            return response
        if (call := _CALL.get()) is not None:
            call.told = None, None
        return {**response, "reward": None, "scores": None}

    async def _play(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        return await (super()._play(task, setup, key) if self._judged is None else self._judged.run(task, setup, key))
