"""AgentExecutor: OpenRLHF's `execute` signature over `run_episode`, for agent_func.py files; AgentFunc runs them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal
from uuid import uuid4
from zlib import crc32

from agentenv._util.calls import accepted_arguments, create
from agentenv._util.calls import call as call_agent
from agentenv.chat.chat import Chat, ChatOptions, PromptText
from agentenv.chat.rendered_prompt import messages_of
from agentenv.core.agent import AgentInstance, StepState
from agentenv.core.engine import Engine, Tokenizer
from agentenv.core.messages import check_open
from agentenv.core.step_dict import to_sampling
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Limits, Message, SamplingParams, StopReason, Task, own_limits
from agentenv.episode.loop import Episode, recording_errors
from agentenv.episode.runner import PlannedEpisode
from agentenv.episode.setup import EpisodeKey, EpisodeProgress, EpisodeSetup, Stage, StepRetries
from agentenv.episode.source import as_agent, check_arguments
from agentenv.errors import ConfigError, ContractError, EngineError, MissingDependency, RunStopped
from agentenv.interop.hosted import FailureCount, chat_of, run_planned
from agentenv.interop.openrlhf.engine import LLMEngine, VLLMStyleSampling, as_engine, last_of
from agentenv.interop.openrlhf.response import (
    LogRule,
    ResponseDict,
    SiblingRewards,
    check_logs,
    from_response,
    merge_response,
    to_response,
    training_response,
    without_reward,
)
from agentenv.interop.openrlhf.shim import register

logger = logging.getLogger(__name__)

_NUM_SOUND = 32
"""Sound episodes after which a declared log that none of them had is a wrong name; before, it may be optional."""


@dataclass(slots=True)
class _EpisodeCall:
    """What our runner knows about an episode and OpenRLHF's signature has no parameter for."""

    task: Task
    engine: Engine
    chat: Chat
    limits: Limits
    key: EpisodeKey
    progress: EpisodeProgress = field(default_factory=EpisodeProgress)
    step_retries: StepRetries = field(default_factory=StepRetries)
    trajectory: Trajectory | None = None
    told: tuple[float | None, float | None] = (None, None)
    """The reward and the score that `super().execute` returned: a file that returns both unchanged adds no score."""
    llm_engine: Any = None
    """One engine for all generations of the episode: it numbers them."""
    fatal: ConfigError | MissingDependency | RunStopped | None = None
    """The engine's error that ends the whole run, even if the file swallowed it."""
    queued: Any = None
    """What the file's `execute` put on the queue instead of returning it, as until OpenRLHF 0.9.0."""
    siblings: SiblingRewards = field(default_factory=SiblingRewards)


_CALL: ContextVar[_EpisodeCall | None] = ContextVar("agentenv_call", default=None)


class _ResultQueue:
    """The queue of OpenRLHF 0.8.7 to 0.9.0: what an episode puts on it belongs to that episode."""

    async def put(self, item: Any) -> None:
        """Store the running episode's response."""
        self.put_nowait(item)

    def put_nowait(self, item: Any) -> None:
        """Store the running episode's response."""
        call = _CALL.get()
        if call is not None:
            call.queued = item


class AgentInstanceBase(AgentInstance):
    """The base class of agents in OpenRLHF's own files, whose scores may have any scale."""

    score_range = None


class AgentExecutor:
    """Runs the episodes of one agent class. Subclass it in an agent_func.py and name the class.

    The same file runs under `agentenv run` and inside OpenRLHF. OpenRLHF needs a sample for every episode, failed ones
    included, because the group must keep its size: see `on_error`, `logs` and `max_concurrent`.

    Example::

        class AgentExecutor(AgentExecutor):
            agent_cls = MathRetry
            agent_kwargs = {"max_attempts": 3}
            logs = {"correct": "last"}
    """

    agent_cls: ClassVar[type[AgentInstance] | None] = None
    """The environment; the constructor's first argument takes precedence."""
    agent_kwargs: ClassVar[Mapping[str, Any]] = {}
    """Arguments of the environment's constructor."""
    limits: ClassVar[Limits] = Limits(max_turns=10_000)
    """Budgets that the caller does not give; `max_length` is always the caller's. Without them, `max_turns` and a
    smaller `max_length` are those of `agent_cls`."""
    on_error: ClassVar[Literal["mask", "raise"]] = "mask"
    """What OpenRLHF gets for a failed episode. `mask`: a sample of one action token with the log `failed` = 1.0 and the
    mean reward of its siblings, which leaves their mean as it is. `raise`: an InfraError, which ends OpenRLHF's job."""
    failed_reward: ClassVar[float] = 0.0
    """The reward of a failed episode none of whose siblings has one in this process. It moves the baseline of its
    group, and has the log `failed_alone` = 1.0."""
    max_retries: ClassVar[int] = 2
    """How often OpenRLHF's episodes run again after an infrastructure error, as those of `agentenv run`."""
    logs: ClassVar[Mapping[str, LogRule]] = {}
    """Numbers of the turns' infos that OpenRLHF logs besides its own three; every sample has all of them."""
    max_failed_in_a_row: ClassVar[int] = 64
    """This many failures in a row raise even under `on_error="mask"`: the set-up is broken."""
    max_concurrent: ClassVar[int] = 256
    """Maximum number of concurrent episodes under OpenRLHF, which starts those of a whole rollout batch together."""
    chat_options: ClassVar[ChatOptions] = ChatOptions()
    """How messages become tokens under OpenRLHF; under `agentenv run` its flags decide. `history` must be `keep`: a
    sample of OpenRLHF's is one sequence."""
    _one_sequence: ClassVar[bool] = True
    _passes_messages = True
    """Whether a class of ours gets the messages of a rendered prompt."""
    _own_cls: Any = None
    """The file's class, if `agent_instance_cls` is one that stands in for it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the subclass's attributes; register it with OpenRLHF if that is imported."""
        super().__init_subclass__(**kwargs)
        check_logs(cls.logs, cls.__name__)
        if cls.on_error not in ("mask", "raise"):
            raise ContractError(f"{cls.__name__}.on_error: expected mask or raise, got {cls.on_error!r}.")
        for name, kind in (("limits", Limits), ("chat_options", ChatOptions)):
            if not isinstance(value := getattr(cls, name), kind):
                raise ContractError(
                    f"{cls.__name__}.{name}: expected {kind.__name__}(…), got {value!r}. Import it from agentenv."
                )
        if cls.agent_cls is not None and cls.agent_kwargs:
            check_arguments(cls.agent_cls, cls.agent_kwargs, f"{cls.__name__}.agent_kwargs")
        if cls._one_sequence and cls.chat_options.history != "keep":
            raise ContractError(
                f"{cls.__name__}.chat_options: expected history='keep', got {cls.chat_options.history!r}. Remove it: "
                "OpenRLHF takes one sequence of an episode."
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
        """Accept OpenRLHF's arguments: none or the class since 0.9.1, all of them from 0.8.7 to 0.9.0."""
        self.agent_instance_cls = agent_instance_cls or type(self).agent_cls
        self.max_steps, self.max_length = max_steps, max_length
        self.llm_engine, self.hf_tokenizer, self.result_queue = llm_engine, hf_tokenizer, result_queue
        self._slots: asyncio.Semaphore | None = None
        self._seen: Counter[int] = Counter()
        self._siblings: dict[str, SiblingRewards] = {}
        self._failures = FailureCount(f"{type(self).__name__}.execute")
        self._chat: Chat | None = None
        self._returned: set[str] = set()
        self._num_sound = 0

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
        """Run one episode and return OpenRLHF's response dict (`ResponseDict`).

        Raises:
            ConfigError: the agent class, the engine or the tokenizer is missing.
        """
        call = _CALL.get()
        if call is not None:
            self._check_agent()
            task, sampling = replace(call.task, prompt=prompt, label=label), to_sampling(sampling_params)
            setup = EpisodeSetup(
                call.engine, call.chat, sampling or SamplingParams(), call.limits, call.progress, call.step_retries
            )
            call.progress.error = None
            try:
                call.trajectory = await self._play(task, setup, call.key)
            except (
                ConfigError,
                MissingDependency,
                RunStopped,
            ) as error:  # of the engine: `Episode.run` records all others
                call.fatal = error
                raise
            is_own = type(self).execute.__module__.startswith("agentenv.")
            if call.progress.error is not None and not is_own:  # a file's own `execute` may handle it, as in OpenRLHF
                raise call.progress.error
            response = to_response(call.trajectory) | {"prompt": prompt}
            call.told = response["reward"], response["scores"]
        else:
            call = self._foreign_call(prompt, label, max_length, hf_tokenizer, llm_engine, images)
            call.engine = as_engine(call.engine, sampling_params)
            trajectory = await self._run_for_trainer(call, sampling_params)
            response, problem = self._sample(trajectory, sampling_params, call.chat)
            response["prompt"] = prompt
            await self._report(call, trajectory, response, problem)
            if self.result_queue is not None:  # OpenRLHF 0.8.7 to 0.9.0 calls `item` of these numbers
                import numpy as np

                response["extra_logs"] = {name: np.float64(value) for name, value in response["extra_logs"].items()}
        if self.result_queue is not None:
            await self.result_queue.put(response)
        return response

    async def generate(self, prompt_token_ids: Any, sampling_params: Any) -> Any:
        """Sample once, for overrides of `execute` until 0.9.0; returns an object shaped like vLLM's RequestOutput."""
        call = _CALL.get()
        if call is not None:
            return await call.llm_engine.generate(prompt_token_ids, sampling_params)
        prompt = {"prompt_token_ids": list(prompt_token_ids)}
        return await last_of(self.llm_engine.generate(prompt, sampling_params, request_id=uuid4().hex))

    @property
    def _is_ours(self) -> bool:
        cls: Any = self._own_cls or self.agent_instance_cls
        return issubclass(cls, AgentInstance) and not issubclass(cls, AgentInstanceBase)

    @property
    def takes_messages(self) -> bool:
        """Return True if the environment gets the prompt's messages, as elsewhere, instead of text."""
        return self._is_ours and self._passes_messages

    async def _play(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        cls: Any = self.agent_instance_cls
        if self.takes_messages:
            prompt = task.prompt
            if isinstance(prompt, PromptText):
                prompt = prompt.messages
            elif isinstance(prompt, str):
                prompt = messages_of(prompt, setup.chat) or prompt
            task = replace(task, prompt=prompt)

        async def make() -> AgentInstance:
            agent = await create(as_agent(cls), type(self).agent_kwargs)
            step = agent.step

            @functools.wraps(step)
            async def writable(states: StepState) -> Any:
                written = VLLMStyleSampling.of(states["sampling_params"])
                result = await call_agent(step, {**states, "sampling_params": written})
                is_unchanged = written == VLLMStyleSampling.of(states["sampling_params"])
                if is_unchanged or not isinstance(result, Mapping) or result.get("sampling_params") is not None:
                    return result
                return {**result, "sampling_params": written}

            if not self._is_ours:  # the next turns sample with what its `step` writes into `states["sampling_params"]`
                object.__setattr__(agent, "step", writable)
            return agent

        return await Episode(task, setup, key).run(make)

    def _check_agent(self) -> None:
        if self.agent_instance_cls is None:
            raise ConfigError(
                f"{type(self).__name__}: expected `agent_cls`, got None. "
                "Set it in the class, or pass the class to super().__init__."
            )

    async def _run_for_trainer(self, call: _EpisodeCall, sampling_params: Any) -> Trajectory:
        """Run the episode once fewer than `max_concurrent` are running, and again where infrastructure failed."""
        self._check_agent()
        if self._slots is None:
            self._slots = asyncio.Semaphore(type(self).max_concurrent)
        setup = EpisodeSetup(call.engine, call.chat, to_sampling(sampling_params) or SamplingParams(), call.limits)
        planned = PlannedEpisode(call.task, 0)
        source: Any = SimpleNamespace(run=self._play)
        prompt = repr((call.task.prompt, call.task.label))
        call.siblings = self._siblings.setdefault(prompt, call.siblings)
        with call.siblings.running(on_last=partial(self._siblings.pop, prompt)):
            async with self._slots:
                (trajectory,) = await run_planned(source, setup, [planned], max_retries=type(self).max_retries)
            call.siblings.add(trajectory)
        return trajectory

    def _sample(
        self, trajectory: Trajectory, sampling_params: Any, chat: Chat, segment_index: int | None = None
    ) -> tuple[ResponseDict, str | None]:
        """Return a response that a trainer can learn from, and the problem if the episode failed."""
        cls, eos = type(self), chat.tokenizer.eos_token_id
        return training_response(
            trajectory,
            logs=cls.logs,
            wants_logprobs=getattr(sampling_params, "logprobs", 0) is not None,
            terminator=0 if eos is None else eos,
            failed_reward=cls.failed_reward,
            segment_index=segment_index,
        )

    async def _report(
        self, call: _EpisodeCall, trajectory: Trajectory, response: ResponseDict, problem: str | None
    ) -> None:
        """Warn once of each number that `logs` lacks, and once of names that no info of the first sound episodes had.

        Count a failed episode, and raise, or warn and set its reward.
        """
        cls = type(self)
        infos = [turn.result.info for turn in trajectory.turns if turn.result is not None]
        numbers = {name for info in infos for name, value in info.items() if not isinstance(value, str)}
        if new := numbers - set(cls.logs) - self._returned:
            logger.warning(
                "%s.logs: expected the names of all numbers that OpenRLHF should log, got none for %s. "
                "Add them, each with a rule that combines the turns' values.",
                cls.__name__,
                sorted(new),
            )
        self._returned |= numbers
        self._num_sound += problem is None
        if problem is None and self._num_sound == _NUM_SOUND and (unknown := set(cls.logs) - self._returned):
            logger.warning(
                "%s.logs: expected names of numbers in the turns' `info`, got %s, which none of %d episodes had: "
                "OpenRLHF logs 0.0. Remove or rename what the environment does not return.",
                cls.__name__,
                sorted(unknown),
                _NUM_SOUND,
            )
        reward = None
        if problem is not None and cls.on_error == "mask":
            reward = await call.siblings.replace_reward(response)
        self._failures.add(
            trajectory,
            problem,
            max_in_a_row=1 if cls.on_error == "raise" else cls.max_failed_in_a_row,
            result=f"A sample of one token with the reward {cls.failed_reward} replaces it, and moves the baseline of "
            "its group: no sibling of it has a reward here."
            if reward is None
            else f"A sample of one token with the mean reward of its siblings, {reward}, replaces it: the mean of its "
            "group stays as it is.",
        )

    def _foreign_call(
        self, prompt: Any, label: Any, max_length: int | None, hf_tokenizer: Any, llm_engine: Any, images: Any
    ) -> _EpisodeCall:
        """Return the facts of a call by a foreign trainer: from its arguments, else from the constructor's."""
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
        if type(self).limits is AgentExecutor.limits:
            own = own_limits(self.agent_instance_cls, max_turns=limits.max_turns, max_length=max_length)
            limits = replace(limits, **own)
        if images and hasattr(tokenizer, "image_processor"):
            raise ConfigError(
                f"{type(self).__name__}.execute: expected text only, got {len(images)} images and a processor for "
                "them. agentenv does not sample from images: leave data.image_key unset."
            )
        task = Task(prompt, label, images=tuple(images or ()))
        # One Chat for all samples of a prompt; OpenRLHF sends a new copy of the tokenizer with every prompt.
        if self._chat is None or self._chat.tokenizer is not tokenizer:
            self._chat = chat_of(tokenizer, type(self).chat_options)
        # The environment's seed: other for each sample of a prompt, the same when the job runs again.
        prompt_hash = crc32(repr(prompt).encode(errors="surrogatepass"))
        self._seen[prompt_hash] += 1
        seed = (prompt_hash + 7919 * self._seen[prompt_hash]) % 2**31
        task = replace(task, task_id=f"episode-{uuid4().hex}", seed=seed)
        return _EpisodeCall(task, engine, self._chat, limits, EpisodeKey(task.task_id))


class AgentFunc:
    """An agent_func's `AgentExecutor`, built once and then asked for episodes. Accepts any OpenRLHF version.

    The file sees what OpenRLHF would show it, such as the prompt as text. Our limits, keys and records wrap around it.
    """

    llm_engine_cls: ClassVar[type[LLMEngine]] = LLMEngine
    """The engine that the file's code samples from."""

    def __init__(self, executor_cls: type) -> None:
        self.executor_cls = executor_cls
        self._executor: Any = None
        self._agent_cls: type[AgentInstance] | None = None
        self._server_failures: deque[EngineError | ContractError] = deque(maxlen=1)

    @property
    def datasets(self) -> Mapping[str, str | Path]:
        """Data that ships with the file's environment class, by name."""
        found: Mapping[str, str | Path] = getattr(getattr(self.executor_cls, "agent_cls", None), "datasets", {})
        return found

    @property
    def agent_kwargs(self) -> Mapping[str, Any]:
        """Arguments of the environment's constructor."""
        found: Mapping[str, Any] = getattr(self.executor_cls, "agent_kwargs", {})
        return found

    async def run(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        """Run one episode; an exception of the file's code is recorded like an environment's error.

        If the episode's engine failed meanwhile, it is recorded like the engine's; also if the engine of the file's own
        server did, whose requests name no episode: a server turns the error into a status.
        """
        known = [*self._server_failures]
        limits = setup.limits
        call = _EpisodeCall(task, setup.engine, setup.chat, limits, key, setup.progress, setup.step_retries)
        setup.progress.stage, setup.progress.attempt = Stage.EXECUTE, key.attempt
        record = Trajectory(
            task, limits.max_length, key.episode_id, key.group_id, key.attempt, key.seed, retried=[*key.retried]
        )
        token = _CALL.set(call)
        # The loop enforces the limits; this one is for files that have their own loop.
        limit_s = limits.episode_timeout_s + 3 * limits.step_timeout_s
        try:
            async with asyncio.timeout(limit_s) as deadline:
                with recording_errors(record, EpisodeProgress(stage=Stage.EXECUTE)):
                    await self._execute(call, setup.sampling)
        except TimeoutError:
            if not deadline.expired():
                raise
            record.finish(StopReason.EPISODE_TIMEOUT)
        finally:
            _CALL.reset(token)
            if call.llm_engine is not None:
                call.llm_engine.is_over = True
        fatal = call.fatal or (call.llm_engine and call.llm_engine.fatal)
        if fatal is not None:
            raise fatal
        failure = call.llm_engine and call.llm_engine.failure
        if failure is None and known != [*self._server_failures]:
            failure = self._server_failures[-1]
        if record.error is not None and record.error.kind == "env" and failure is not None:
            message = f"{record.error.message} (after: {failure})"
            record.error = replace(record.error, kind=failure.kind, message=message)
        trajectory = call.trajectory
        if trajectory is None:
            return record
        if record.stop_reason is not None and trajectory.error is None:  # the file's code failed after the loop
            trajectory.stop_reason, trajectory.error = record.stop_reason, record.error
            without_reward(trajectory)
        return trajectory

    async def _execute(self, call: _EpisodeCall, sampling: SamplingParams) -> None:
        task, chat = call.task, call.chat
        execute = self._executor_for(call).execute
        call.llm_engine = self.llm_engine_cls(call.engine, chat, call.key.episode_id, sampling.seed)
        call.llm_engine.server_failures = self._server_failures
        arguments = {
            "max_length": call.limits.max_length,
            "hf_tokenizer": chat.tokenizer,
            "llm_engine": call.llm_engine,
            "images": list(task.images) or None,
        }
        params = VLLMStyleSampling.of(sampling)
        prompt, more = _as_text(task.prompt, chat), accepted_arguments(execute, arguments)
        response = await execute(prompt, task.label, params, **more)
        response = call.queued if response is None else response
        if response is not None or call.trajectory is None:
            self._take(response, call)

    def _executor_for(self, call: _EpisodeCall) -> Any:
        if self._executor is None:
            context = {
                "max_steps": call.limits.max_turns,
                "max_length": call.limits.max_length,
                "llm_engine": call.engine,
                "hf_tokenizer": call.chat.tokenizer,
                "result_queue": _ResultQueue(),
            }
            self._executor = self.executor_cls(**accepted_arguments(self.executor_cls, context))
            if self._agent_cls is not None:
                self._executor._own_cls = self._executor.agent_instance_cls
                self._executor.agent_instance_cls = self._agent_cls
        return self._executor

    def agent_class(self, engine: Engine, tokenizer: Tokenizer) -> Any:
        """Return the class of the file's agent instances, as its executor names it."""
        executor = self._executor_for(_EpisodeCall(Task(""), engine, Chat(tokenizer), Limits(), EpisodeKey()))
        return getattr(executor, "agent_instance_cls", None)

    def as_given(self, task: Task, chat: Chat) -> Task:
        """Return a task as the class that `agent_class` returned gets it: with text, unless it takes messages.

        Messages that the chat template refuses stay as they are: the episode says why.
        """
        if getattr(self._executor, "takes_messages", False):
            return task
        with contextlib.suppress(ConfigError):
            return replace(task, prompt=_as_text(task.prompt, chat))
        return task

    def with_agent(self, agent_cls: type[AgentInstance]) -> AgentFunc:
        """Return the same file with another class for its agent instances."""
        other = type(self)(self.executor_cls)
        other._agent_cls = agent_cls
        return other

    def _take(self, response: Any, call: _EpisodeCall) -> None:
        """Set the episode's record from the response, which an override may have changed or built itself."""
        if not isinstance(response, Mapping):
            raise ContractError(
                f"{self.executor_cls.__name__}.execute: expected OpenRLHF's response dict, "
                f"got {type(response).__name__}. Return what super().execute returns."
            )
        if call.trajectory is not None and merge_response(response, call.trajectory, call.told):
            return
        trajectory = from_response(response, call.task, max_length=call.limits.max_length, decode=call.chat.action_text)
        trajectory.episode_id, trajectory.group_id = call.key.episode_id, call.key.group_id
        trajectory.attempt, trajectory.seed, trajectory.retried = call.key.attempt, call.key.seed, [*call.key.retried]
        call.trajectory = trajectory


def _as_text(prompt: str | Sequence[Message], chat: Chat) -> str:
    """Return a prompt as OpenRLHF passes it: messages rendered by the chat template."""
    if isinstance(prompt, str):
        return prompt
    check_open(prompt)
    return PromptText(chat.unmarked(*chat.rendering(prompt)), prompt)
