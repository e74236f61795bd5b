"""Reward functions: OpenRLHF's `--remote_rm_url`, a file with `reward_func(queries, prompts, labels)` or an address.

One turn per episode: the model answers the prompt, and the function judges it. Source of the contract:
openrlhf/utils/agent.py, SingleTurnAgentExecutor, 0.9.1 to 0.11.2; trainer/ray and remote_rm_utils.py before.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from agentenv import molt_files
from agentenv.agent import AgentInstance, Engine, StepState
from agentenv.chat import Chat
from agentenv.deadlines import bounded
from agentenv.episode import EpisodeKey, run_episode
from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.executor import AgentExecutor
from agentenv.loading import load_file
from agentenv.openrlhf_module import stand_in
from agentenv.openrlhf_rewards import Outcome, Sample, read_rewards
from agentenv.reward_http import TIMEOUT_S, RewardServers
from agentenv.rewards.per_loop import PerLoop
from agentenv.trajectory import Trajectory
from agentenv.types import Completion, Limits, SamplingParams, StepResult, Task

MAX_CALLS = 32
"""Calls of a reward_func at once: the most threads that OpenRLHF calls it in."""


class Judge(Protocol):
    """What gives rewards."""

    @property
    def patience_s(self) -> float:
        """Longest that `judge` may take, with the wait for its turn; infinite where it keeps a step's limit itself."""

    async def judge(self, samples: Sequence[Sample], limit_s: float) -> Sequence[Outcome]:
        """An outcome for each sample; `limit_s` is the run's time limit of a step.

        Raises:
            ContractError: the answer as a whole cannot be read.
            InfraError: none can be had.
        """


def load_reward_source(
    spec: str, *, batch_size: int = 1, wait_s: float = 0.005, timeout_s: float = TIMEOUT_S
) -> RewardSource:
    """Episodes of one turn, judged by a `FILE.py` with `reward_func`, or by the servers at `http://…[,http://…]`.

    Args:
        spec: as `--remote_rm_url` has it.
        batch_size: most samples of one call. 1, as OpenRLHF since 0.9.1: what a function makes of its whole list, such
            as a mean, then is that of one sample, and rewards do not depend on who comes at the same time. With more,
            what arrives within `wait_s` is judged together, as up to 0.9.0: for a model that is faster in batches.
        wait_s: longest wait for a batch to fill.
        timeout_s: deadline of one answer over HTTP, with all attempts.

    Raises:
        ConfigError: neither a file nor addresses, or the file has no `reward_func` of three arguments.
    """
    if spec.startswith(("http://", "https://")):
        judge: Judge = RewardServers([url.strip() for url in spec.split(",")], timeout_s=timeout_s)
    elif spec.endswith(".py"):
        judge = RewardFunction(load_reward_func(spec), f"{spec}: reward_func")
    else:
        raise ConfigError(
            f"--remote_rm_url: expected FILE.py or http://HOST/get_reward[,http://…], got {spec!r}. "
            "Name a file with reward_func(queries, prompts, labels), or write http:// before the address."
        )
    return RewardSource(judge, batch_size=batch_size, wait_s=wait_s)


def load_reward_func(path: str | Path) -> Callable[..., Any]:
    """The function `reward_func` of a file; imports of OpenRLHF's agent module work there without OpenRLHF.

    Raises:
        ConfigError: no such file, it cannot be imported, or it has no `reward_func` of three arguments.
    """
    with stand_in(AgentExecutor, AgentInstance), molt_files.stand_in():
        module = load_file(path)
    function = getattr(module, "reward_func", None)
    mend = "Write `def reward_func(queries, prompts, labels)`."
    if not callable(function):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"{path}: expected a function reward_func, got the functions {names}. {mend}")
    try:
        inspect.signature(function).bind([], [], [])
    except TypeError as error:
        raise ConfigError(
            f"{path}: expected reward_func to take queries, prompts and labels by their places, got "
            f"def reward_func{inspect.signature(function)} ({error}). {mend}"
        ) from error
    return function  # type: ignore[no-any-return]


class RewardSource:
    """Episodes of one turn whose answers are judged; the runner's EpisodeSource.

    An answer that the limit of tokens cut is truncated, as in OpenRLHF, and judged all the same.
    """

    def __init__(self, judge: Judge, *, batch_size: int = 1, wait_s: float = 0.005) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size: expected an integer >= 1, got {batch_size!r}. Change the value.")
        if not 0 <= wait_s < math.inf:
            raise ConfigError(f"wait_s: expected seconds >= 0, got {wait_s!r}. Change the value.")
        self.judge = judge
        self._batches = PerLoop(partial(_Batches, judge, batch_size, wait_s))

    async def episode(
        self, task: Task, *, engine: Engine, chat: Chat, sampling: SamplingParams, limits: Limits, key: EpisodeKey
    ) -> Trajectory:
        """Run one episode; see `run_episode`."""
        heard = _Heard(engine)
        ask = partial(self._batches.here().ask, limit_s=limits.step_timeout_s)

        async def make() -> AgentInstance:
            """The environment of this episode."""
            return _Answer(ask, chat, heard)

        # The judge keeps the time of a step itself, from when its turn has come.
        patience_s = max(limits.step_timeout_s, self.judge.patience_s)
        limits = replace(limits, max_turns=1, step_timeout_s=patience_s)
        return await run_episode(make, task, engine=heard, chat=chat, sampling=sampling, limits=limits, key=key)


class _Heard:
    """An engine that remembers the prompt it was last given: text cannot be turned into the same ids again."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.prompt_ids: list[int] = []

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """As the engine does."""
        self.prompt_ids = list(prompt_token_ids)
        return await self.engine.generate(prompt_token_ids, sampling, request_id=request_id)


class _Answer(AgentInstance):
    """The environment of one answer."""

    def __init__(self, ask: Callable[[Sample], Awaitable[Outcome]], chat: Chat, heard: _Heard) -> None:
        self.ask, self.chat, self.heard = ask, chat, heard

    async def step(self, states: StepState) -> StepResult:
        """Have the answer judged."""
        prompt, action_ids = states["observation_text"], states["action_ids"]
        # Together, as OpenRLHF does: some tokenizers drop the space that a text begins with.
        query = self.chat.decode([*self.heard.prompt_ids, *action_ids])
        if not query.startswith(prompt):  # files cut the prompt off its front
            query = prompt + self.chat.decode(action_ids)
        outcome = await self.ask(Sample(query, prompt, states["label"]))
        if isinstance(outcome, ContractError):
            raise outcome
        cut = states["finish_reason"] == "length"
        return replace(outcome, terminated=not cut, truncated=cut)


class _Batches:
    """Gathers what is to be judged, up to `size` samples of the same few milliseconds."""

    def __init__(self, judge: Judge, size: int, wait_s: float) -> None:
        self.judge, self.size, self.wait_s = judge, size, wait_s
        self._waiting: list[tuple[Sample, asyncio.Future[Outcome]]] = []
        self._limit_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._judging: set[asyncio.Task[Sequence[Outcome]]] = set()

    async def ask(self, sample: Sample, *, limit_s: float) -> Outcome:
        """The outcome of one sample.

        Raises:
            Exception: what the judge raised, for this sample alone.
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
        self._judge([each for each in batch if not each[1].done()])  # the others were given up meanwhile

    def _judge(self, batch: list[tuple[Sample, asyncio.Future[Outcome]]]) -> None:
        if not batch:
            return
        work = self.judge.judge([sample for sample, _ in batch], self._limit_s)
        task = asyncio.ensure_future(work)
        self._judging.add(task)  # asyncio itself keeps no hold on it
        task.add_done_callback(partial(self._settle, batch))

    def _settle(
        self, batch: list[tuple[Sample, asyncio.Future[Outcome]]], task: asyncio.Task[Sequence[Outcome]]
    ) -> None:
        self._judging.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and len(batch) > 1 and not isinstance(error, asyncio.CancelledError | InfraError):
            for one in batch:  # whose fault it is shows when each is alone
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
    """Judges with a function of a file, in threads: it is called from several at once, as OpenRLHF does."""

    patience_s = math.inf  # waiting for a free thread is no fault of the function's

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        self.function, self.where = function, where
        self._slots = PerLoop(partial(asyncio.Semaphore, MAX_CALLS))

    async def judge(self, samples: Sequence[Sample], limit_s: float) -> Sequence[Outcome]:
        """Call the function once, for at most `limit_s` from when a thread is free for it.

        Raises:
            Exception: what it raised.
            StepTimeout: it took longer.
            ContractError: its answer cannot be read.
        """
        lists = [each.query for each in samples], [each.prompt for each in samples], [each.label for each in samples]
        async with self._slots.here():
            answer = await bounded(self.function, *lists, limit_s=limit_s)
        return read_rewards(answer, len(samples), self.where)
