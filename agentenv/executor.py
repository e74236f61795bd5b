"""AgentExecutor: OpenRLHF's `execute` signature over `run_episode`, for agent_func.py files."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal
from uuid import uuid4
from zlib import crc32

from agentenv.agent import AgentInstance, Engine, ResponseDict, Tokenizer, accepted, as_agent, create
from agentenv.chat import Chat, PromptText, stop_token_ids_of
from agentenv.engines.openrlhf import LLMEngine, VLLMStyleSampling, as_engine, last_of
from agentenv.episode import EpisodeKey, guarded, run_episode
from agentenv.errors import ConfigError, ContractError, InfraError, RunStopped
from agentenv.openrlhf import (
    LogRule,
    NeutralSample,
    check_logs,
    from_response,
    merge_response,
    to_response,
    to_sampling,
    training_response,
    with_items,
    without_reward,
)  # fmt: skip
from agentenv.openrlhf_module import register
from agentenv.trajectory import Trajectory
from agentenv.types import ChatOptions, Limits, SamplingParams, StopReason, Task

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Call:
    """What our own runner knows about an episode and OpenRLHF's signature has no place for."""

    task: Task
    engine: Engine
    chat: Chat
    limits: Limits
    key: EpisodeKey
    trajectory: Trajectory | None = None
    llm_engine: Any = None
    """One for all generations of the episode, which it numbers."""
    fatal: ConfigError | RunStopped | None = None
    """What the engine said of the whole run, whatever the file made of it."""
    queued: Any = None
    """What the file's own `execute` put on the queue instead of returning it, as the queue era did."""


_CALL: ContextVar[_Call | None] = ContextVar("agentenv_call", default=None)


class _ResultQueue:
    """The queue of OpenRLHF 0.8.7 to 0.9.0; what is put belongs to the episode that puts it."""

    async def put(self, item: Any) -> None:
        """Keep the response of the running episode."""
        self.put_nowait(item)

    def put_nowait(self, item: Any) -> None:
        """As `put`."""
        call = _CALL.get()
        if call is not None:
            call.queued = item


class AgentExecutor:
    """Runs the episodes of one agent class; subclass it in an agent_func.py and name the class.

    The same file runs under `agentenv run` and inside OpenRLHF. There a sample must always be given, whatever became of
    the episode, and its group must keep its size: `on_error`, `logs` and `max_concurrent` are for that.

    Example::

        class AgentExecutor(AgentExecutor):
            agent_cls = MathRetry
            agent_kwargs = {"max_attempts": 3}
            logs = {"correct": "last"}
    """

    agent_cls: ClassVar[type[AgentInstance] | None] = None
    """The environment; the constructor's first argument wins over it."""
    agent_kwargs: ClassVar[Mapping[str, Any]] = {}
    """Arguments of its constructor."""
    limits: ClassVar[Limits] = Limits(max_turns=10_000)
    """Budgets where the caller gives none; `max_length` is the caller's."""
    on_error: ClassVar[Literal["mask", "raise"]] = "mask"
    """What OpenRLHF gets for an episode that failed. mask: a sample of one action token with `failed_reward`, and the
    log `failed` says 1.0 (it still counts in its group's mean); raise: an InfraError, which ends OpenRLHF's job."""
    failed_reward: ClassVar[float] = 0.0
    logs: ClassVar[Mapping[str, LogRule]] = {}
    """Numbers of the turns' infos that OpenRLHF logs beside `num_turns` and `failed`; every sample has all of them."""
    max_failed_in_a_row: ClassVar[int] = 64
    """So many failures without a success between them raise whatever `on_error` says: the set-up is broken."""
    max_concurrent: ClassVar[int] = 256
    """Episodes alive at once when OpenRLHF calls, which starts those of a whole rollout batch together."""
    chat_options: ClassVar[ChatOptions] = ChatOptions()
    """How messages become tokens when OpenRLHF calls; under `agentenv run` its flags say that. `history` stays keep:
    a sample of OpenRLHF's is one sequence."""
    _one_sequence: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check what the subclass sets, and let OpenRLHF, where it is imported, accept it as its own."""
        super().__init_subclass__(**kwargs)
        check_logs(cls.logs, cls.__name__)
        if cls.on_error not in ("mask", "raise"):
            raise ContractError(f"{cls.__name__}.on_error: expected mask or raise, got {cls.on_error!r}. Change it.")
        if cls._one_sequence and cls.chat_options.history != "keep":
            raise ContractError(
                f"{cls.__name__}.chat_options: expected history='keep', got {cls.chat_options.history!r}. Leave "
                "it out: OpenRLHF takes one sequence of an episode."
            )
        register(cls)

    def __init__(
        self,
        agent_instance_cls: type | None = None,
        max_steps: int | None = None,
        max_length: int | None = None,
        llm_engine: Any = None,
        hf_tokenizer: Any = None,
        result_queue: Any = None,
    ) -> None:
        """Take OpenRLHF's arguments: none or the class since 0.9.1, all of them from 0.8.7 to 0.9.0."""
        self.agent_instance_cls = agent_instance_cls or type(self).agent_cls
        self.max_steps, self.max_length = max_steps, max_length
        self.llm_engine, self.hf_tokenizer, self.result_queue = llm_engine, hf_tokenizer, result_queue
        self._slots: asyncio.Semaphore | None = None
        self._seen: Counter[int] = Counter()
        self._failed_in_a_row = 0
        self._chat: Chat | None = None
        self._undeclared: set[str] = set()

    async def execute(
        self,
        prompt: Any,
        label: Any,
        sampling_params: Any,
        max_length: int | None = None,
        hf_tokenizer: Any = None,
        llm_engine: Any = None,
        images: Any = None,
    ) -> Any:
        """Run one episode and return OpenRLHF's response dict (`agent.ResponseDict`).

        Raises:
            ConfigError: the agent class, the engine or the tokenizer is not known.
        """
        call = _CALL.get()
        if call is not None:
            await self._run(call, prompt, label, sampling_params)
            response = to_response(_made(call))
        else:
            call = self._call(prompt, label, max_length, hf_tokenizer, llm_engine, images)
            call.engine = as_engine(call.engine, sampling_params)
            trajectory = await self._run_for_trainer(call, sampling_params)
            response, problem = self._sample(trajectory, sampling_params, call.chat)
            self._note(trajectory, problem)
            if self.result_queue is not None:
                with_items(response)
        if self.result_queue is not None:
            await self.result_queue.put(response)
        return response

    async def generate(self, prompt_token_ids: Any, sampling_params: Any) -> Any:
        """One generation, as the queue era's overrides of `execute` ask for it; gives vLLM's RequestOutput in shape."""
        call = _CALL.get()
        if call is not None:
            return await call.llm_engine.generate(prompt_token_ids, sampling_params)
        prompt = {"prompt_token_ids": list(prompt_token_ids)}
        return await last_of(self.llm_engine.generate(prompt, sampling_params, request_id=uuid4().hex))

    async def _run(self, call: _Call, prompt: Any, label: Any, sampling_params: Any) -> None:
        """Run the episode and keep its record in the call."""
        if self.agent_instance_cls is None:
            raise ConfigError(
                f"{type(self).__name__}: expected `agent_cls`, got None. "
                "Set it in the class, or pass the class to super().__init__."
            )
        task, sampling = replace(call.task, prompt=prompt, label=label), to_sampling(sampling_params)
        try:
            call.trajectory = await run_episode(
                partial(create, as_agent(self.agent_instance_cls), type(self).agent_kwargs),
                task,
                engine=call.engine,
                chat=call.chat,
                sampling=sampling or SamplingParams(),
                limits=call.limits,
                key=call.key,
            )
        except (ConfigError, RunStopped) as error:  # of the engine: `run_episode` records all others
            call.fatal = error
            raise

    async def _run_for_trainer(self, call: _Call, sampling_params: Any) -> Trajectory:
        """As `_run`, once fewer than `max_concurrent` episodes are alive."""
        if self._slots is None:
            self._slots = asyncio.Semaphore(type(self).max_concurrent)
        async with self._slots:
            await self._run(call, call.task.prompt, call.task.label, sampling_params)
        return _made(call)

    def _sample(
        self, trajectory: Trajectory, sampling_params: Any, chat: Chat, segment_index: int | None = None
    ) -> tuple[ResponseDict, str | None]:
        """The response that a trainer can learn from, whatever became of the episode, and what stood in its way."""
        cls, eos = type(self), chat.tokenizer.eos_token_id
        return training_response(
            trajectory,
            logs=cls.logs,
            wants_logprobs=getattr(sampling_params, "logprobs", 0) is not None,
            neutral=NeutralSample(0 if eos is None else eos, cls.failed_reward),
            segment_index=segment_index,
        )

    def _note(self, trajectory: Trajectory, problem: str | None) -> None:
        """Count a failed episode, and tell of it or raise."""
        cls = type(self)
        self._tell_undeclared(trajectory)
        self._failed_in_a_row = 0 if problem is None else self._failed_in_a_row + 1
        if problem is not None:
            told = f"{cls.__name__}.execute: expected an episode to train on, got one that failed: {problem}"
            if cls.on_error == "raise" or self._failed_in_a_row >= cls.max_failed_in_a_row:
                raise InfraError(f"{told} Failures in a row: {self._failed_in_a_row}. Mend what failed.")
            logger.warning("%s A neutral sample with the reward %s stands for it.", told, cls.failed_reward)

    def _tell_undeclared(self, trajectory: Trajectory) -> None:
        """Say once of every number in the turns' infos that it is not logged."""
        infos = [turn.result.info for turn in trajectory.turns if turn.result is not None]
        numbers = {name for info in infos for name, value in info.items() if not isinstance(value, str)}
        new = numbers - set(type(self).logs) - self._undeclared
        if new:
            self._undeclared |= new
            logger.warning(
                "%s.logs: expected the names of all numbers that OpenRLHF shall log, got none for %s. "
                "Add them, each with how the turns' values are joined.", type(self).__name__, sorted(new),
            )  # fmt: skip

    def _call(
        self, prompt: Any, label: Any, max_length: int | None, hf_tokenizer: Any, llm_engine: Any, images: Any
    ) -> _Call:
        """The same facts when a foreign trainer calls: from its arguments, then the constructor's."""
        tokenizer, engine = hf_tokenizer or self.hf_tokenizer, llm_engine or self.llm_engine
        max_length = max_length or self.max_length
        if tokenizer is None or engine is None or max_length is None:
            raise ConfigError(
                f"{type(self).__name__}.execute: expected max_length, hf_tokenizer and llm_engine, got {max_length}, "
                f"{type(tokenizer).__name__} and {type(engine).__name__}. Pass them, as OpenRLHF does."
            )
        limits = replace(type(self).limits, max_length=max_length)
        if self.max_steps is not None:
            limits = replace(limits, max_turns=self.max_steps)
        if images and hasattr(tokenizer, "image_processor"):
            raise ConfigError(
                f"{type(self).__name__}.execute: expected text only, got {len(images)} images and a processor for "
                "them. agentenv does not sample from images yet: leave data.image_key unset."
            )
        task = Task(prompt, label, images=tuple(images or ()))
        return _Call(
            task,
            engine,
            self._chat_of(tokenizer),
            limits,
            EpisodeKey(f"episode-{uuid4().hex}", seed=self._seed(prompt)),
        )

    def _chat_of(self, tokenizer: Tokenizer) -> Chat:
        """One for all samples of a prompt; OpenRLHF sends another copy of the tokenizer with every prompt."""
        if self._chat is None or self._chat.tokenizer is not tokenizer:
            stops = stop_token_ids_of(str(getattr(tokenizer, "name_or_path", "")))
            self._chat = Chat(tokenizer, stop_token_ids=stops, options=type(self).chat_options)
        return self._chat

    def _seed(self, prompt: Any) -> int:
        """Of the environment: another for every sample of a prompt, and the same when the job is run again."""
        task = crc32(repr(prompt).encode(errors="surrogatepass"))
        self._seen[task] += 1
        return (task + 7919 * self._seen[task]) % 2**31


def _made(call: _Call) -> Trajectory:
    if call.trajectory is None:
        raise ContractError("AgentExecutor.execute: expected a record, got none. Report this as a bug.")
    return call.trajectory


def _judged(made: Trajectory | None, record: Trajectory) -> Trajectory:
    """The loop's record, with what `record` says of the file's own code: where that failed, the reward is unknown."""
    if made is None:
        return record
    if record.stop_reason is not None and made.error is None:
        made.stop_reason, made.error = record.stop_reason, record.error
        without_reward(made)
    return made


class AgentFunc:
    """An agent_func's `AgentExecutor`, built once and asked for episodes, of whatever OpenRLHF version.

    The file sees what OpenRLHF would show it, the prompt as text above all; our limits, keys and record go around it.
    """

    llm_engine_cls: ClassVar[type[LLMEngine]] = LLMEngine
    """What the file's own code asks for tokens."""

    def __init__(self, executor_cls: type) -> None:
        self.executor_cls = executor_cls
        self._executor: Any = None
        self._agent_cls: type[AgentInstance] | None = None

    async def episode(
        self, task: Task, *, engine: Engine, chat: Chat, sampling: SamplingParams, limits: Limits, key: EpisodeKey
    ) -> Trajectory:
        """Run one episode; what the file's own code raises is recorded like an environment's error."""
        call = _Call(task, engine, chat, limits, key)
        record = Trajectory(task, limits.max_length, key.episode_id, key.group_id, attempt=key.attempt, seed=key.seed)
        token = _CALL.set(call)
        # The loop keeps the limits itself; this one is for files with a loop of their own.
        limit_s = limits.episode_timeout_s + 3 * limits.step_timeout_s
        try:
            async with asyncio.timeout(limit_s) as deadline:
                await guarded(self._execute(call, sampling), record, lambda: "execute")
        except TimeoutError:
            if not deadline.expired():
                raise
            record.finish(StopReason.EPISODE_TIMEOUT)
        finally:
            _CALL.reset(token)
        fatal = call.fatal or (call.llm_engine and call.llm_engine.fatal)
        if fatal is not None:
            raise fatal
        return _judged(call.trajectory, record)

    async def _execute(self, call: _Call, sampling: SamplingParams) -> None:
        task, chat = call.task, call.chat
        prompt = task.prompt
        if not isinstance(prompt, str):
            prompt = PromptText(chat.render(prompt), prompt)
        execute = self._built(call).execute
        call.llm_engine = self.llm_engine_cls(call.engine, chat, call.key.episode_id, sampling.seed)
        late = {
            "max_length": call.limits.max_length,
            "hf_tokenizer": chat.tokenizer,
            "llm_engine": call.llm_engine,
            "images": list(task.images) or None,
        }
        asked = VLLMStyleSampling.of(sampling)
        response = await execute(prompt, task.label, asked, **accepted(execute, late))
        response = call.queued if response is None else response
        if response is not None or call.trajectory is None:
            self._take(response, call)

    def _built(self, call: _Call) -> Any:
        if self._executor is None:
            context = {
                "max_steps": call.limits.max_turns,
                "max_length": call.limits.max_length,
                "llm_engine": call.engine,
                "hf_tokenizer": call.chat.tokenizer,
                "result_queue": _ResultQueue(),
            }
            self._executor = self.executor_cls(**accepted(self.executor_cls, context))
            if self._agent_cls is not None:
                self._executor.agent_instance_cls = self._agent_cls
        return self._executor

    def agent_class(self, engine: Engine, tokenizer: Tokenizer) -> Any:
        """The class of the file's agent instances, as its executor names it."""
        executor = self._built(_Call(Task(""), engine, Chat(tokenizer), Limits(), EpisodeKey()))
        return getattr(executor, "agent_instance_cls", None)

    def with_agent(self, agent_cls: type[AgentInstance]) -> AgentFunc:
        """The same file with another class for its agent instances."""
        other = type(self)(self.executor_cls)
        other._agent_cls = agent_cls
        return other

    def _take(self, response: Any, call: _Call) -> None:
        """Make the episode's record what `execute` gave, which an override may have changed or made itself."""
        if not isinstance(response, Mapping):
            raise ContractError(
                f"{self.executor_cls.__name__}.execute: expected OpenRLHF's response dict, "
                f"got {type(response).__name__}. Return what super().execute returns."
            )
        if call.trajectory is not None and merge_response(response, call.trajectory):
            return
        made = from_response(response, call.task, max_length=call.limits.max_length, decode=call.chat.action_text)
        made.episode_id, made.group_id, made.attempt = call.key.episode_id, call.key.group_id, call.key.attempt
        made.seed = call.key.seed
        call.trajectory = made
