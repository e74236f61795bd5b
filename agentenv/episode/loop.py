"""The one loop: generate, step, append. Token in, token out.

`Episode.run` is the whole of it; the methods below it are its verbs, in the order in which it calls them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from agentenv._util.calls import AgentThreads, bounded, create, time_limit
from agentenv._util.off_loop import off_loop, size_of
from agentenv.chat.chat import Chat
from agentenv.chat.dialogue import Dialogue
from agentenv.chat.message_dialogue import MessageDialogue
from agentenv.core.agent import AgentInstance, StepState
from agentenv.core.engine import Engine, NoTokenizer, Tokenizer, sample
from agentenv.core.step_dict import FeedbackKind, feedback_kind, parse_reset, parse_step
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Limits, SamplingParams, StepResult, StopReason, Task, own_limits
from agentenv.episode.failures import Aborted, error_name, record_failure
from agentenv.episode.setup import EpisodeKey, EpisodeProgress, EpisodeSetup, Stage
from agentenv.errors import (
    AgentEnvError,
    ConfigError,
    DataError,
    EngineError,
    InfraError,
    MissingDependency,
    PromptTooLong,
)  # fmt: skip
from agentenv.rewards.grading import collect_usage, with_usage

logger = logging.getLogger(__name__)

AgentFactory = Callable[[], Awaitable[AgentInstance]]
"""Makes the agent instance of one episode."""

_INHERITED = frozenset([AgentInstance.reset, AgentInstance.on_truncate, AgentInstance.close])
"""Defaults that return at once: a deadline, and so a task, around each would only cost time."""
_LIMITS = (StopReason.MAX_TURNS, StopReason.MAX_LENGTH, StopReason.EPISODE_TIMEOUT)


async def run_episode(
    env: type[AgentInstance] | AgentFactory,
    task: Task,
    *,
    engine: Engine,
    tokenizer: Tokenizer | None = None,
    chat: Chat | None = None,
    sampling: SamplingParams | None = None,
    limits: Limits | None = None,
    key: EpisodeKey | None = None,
) -> Trajectory:
    """Run one episode and return its record.

    A failure inside the episode is data: the trajectory has stop_reason ERROR (or a timeout), the error, no reward.

    Args:
        env: a class, which is called without arguments; or an async function that makes the instance.
        task: the dataset row.
        engine: samples the actions.
        tokenizer: the engine's; default `engine.tokenizer`.
        chat: the tokenizer with its chat template and options; instead of `tokenizer`.
        sampling: default `SamplingParams()`.
        limits: default `Limits()`, with `max_turns` and `max_length` of the class where it sets them.
        key: the identity of the episode.

    Raises:
        asyncio.CancelledError: the call was cancelled; after `close`.
        ConfigError: the engine is set up wrongly, so that every other episode would fail too; after `close`.
    """
    if chat is None:
        tokenizer = tokenizer or engine.tokenizer
        if tokenizer is None:
            raise ConfigError("run_episode: expected a tokenizer or a chat, got neither. Pass the engine's tokenizer.")
        chat = Chat(tokenizer)
    make_agent: Any = env
    if inspect.isclass(env):
        make_agent, limits = partial(create, env, {}), limits or Limits(**own_limits(env))
    setup = EpisodeSetup(engine, chat, sampling or SamplingParams(), limits or Limits())
    return await Episode(task, setup, key or EpisodeKey()).run(make_agent)


class Action(NamedTuple):
    """A sampled action, as the next steps of its turn use it."""

    token_ids: Sequence[int]
    text: str
    """Without what closes it, as `Turn.action`."""
    closing: str
    """The text that closes it in the conversation."""


class Outcome(NamedTuple):
    """What `step` said of an action."""

    result: StepResult
    kind: FeedbackKind
    """How the observation is meant, which the form of the returned value tells."""


class Episode:
    """One running episode; `trajectory` is its record so far."""

    def __init__(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> None:
        """Run nothing yet."""
        self.task = task
        self.setup = setup
        self.key = key
        self.limits = setup.limits
        self.sampling = setup.sampling
        """In force for the next turn; the environment may replace it."""
        self.progress = setup.progress
        self.progress.attempt = key.attempt
        self.dialogue = (
            MessageDialogue(setup.limits.max_length)
            if isinstance(setup.chat.tokenizer, NoTokenizer)
            else Dialogue(setup.chat, setup.limits.max_length)
        )
        self.trajectory = Trajectory(
            task, setup.limits.max_length, key.episode_id, key.group_id, key.attempt, key.seed, retried=[*key.retried]
        )
        self.agent: Any = None
        """The agent instance, from `create` to `close`."""
        self.threads = AgentThreads()
        self.states: StepState = {}
        """The states of the last step."""
        self.outage: InfraError | None = None
        """What the step in progress raised, while it waits to be called again or is."""
        self.started_s = 0.0
        """When `run` was called, by `time.perf_counter`."""
        self.label: Any = None
        self.metadata: Mapping[str, Any] = {}

    async def run(self, make_agent: AgentFactory) -> Trajectory:
        """Run the episode from the making of its environment to `close` and return the record; see `run_episode`."""
        self.started_s, self.trajectory.began_s = time.perf_counter(), time.time()
        try:
            with recording_errors(self.trajectory, self.progress), self.threads.noted():
                reason = StopReason.EPISODE_TIMEOUT
                async with time_limit(self.limits.episode_timeout_s):  # it leaves the block when the time is over
                    await self.create(make_agent)
                    await self.reset()
                    reason = await self.take_turns()
                if self.outage is not None:  # no limit of the episode: it runs again
                    raise self.outage
                if reason in _LIMITS:
                    await self.report_limit()
                self.trajectory.finish(reason)
        finally:
            self.trajectory.finish(StopReason.ABORTED)  # no effect unless this call was cancelled or raises
            with recording_errors(self.trajectory, self.progress):
                await self.close()
            in_turns = sum(turn.generate_s + turn.step_s for turn in self.trajectory.turns)
            self.trajectory.wait_s = max(0.0, time.perf_counter() - self.started_s - in_turns)
        return self.trajectory

    async def take_turns(self) -> StopReason:
        """Take turns until the environment or a limit ends the episode; return which."""
        while True:
            action = await self.generate()
            if action is None:
                return StopReason.MAX_LENGTH
            outcome = await self.step(action)
            if outcome.result.terminated:
                return StopReason.TERMINATED
            if outcome.result.truncated:
                return StopReason.TRUNCATED_BY_ENV
            if len(self.trajectory.turns) == self.limits.max_turns:
                return StopReason.MAX_TURNS
            if not await self.append_observation(action, outcome):
                return StopReason.MAX_LENGTH

    async def create(self, make_agent: AgentFactory) -> None:
        """Make the agent instance."""

        async def make() -> None:
            self.agent = await make_agent()  # stored at once: a late instance is closed, too

        make.__qualname__ = "create"
        self.progress.stage = Stage.CREATE
        await bounded(make, limit_s=self.limits.step_timeout_s)

    async def reset(self) -> None:
        """Reset the environment and append the first observation."""
        self.progress.stage = Stage.RESET
        # Copies: siblings share the task, and an environment may write into what it receives.
        prompt, self.label, self.metadata = deepcopy((self.task.prompt, self.task.label, self.task.metadata))
        states = await self.call(
            self.agent.reset,
            {
                "observation": prompt,
                "label": self.label,
                "metadata": self.metadata,
                "images": self.task.images,
                "seed": self.key.seed,
                "renders_tools": self.dialogue.renders_tools,
            },
        )
        observation, tools = parse_reset(states, f"{type(self.agent).__name__}.reset")
        self.progress.stage = Stage.PROMPT
        try:
            await off_loop(size_of((observation, tools)), self.dialogue.begin, observation, tools)
        except ConfigError as error:
            error.kind = "data"  # the template cannot render the row
            raise
        self.trajectory.prompt, self.trajectory.tools = self.dialogue.observation, tuple(self.dialogue.tools or ())
        num, max_length = self.dialogue.num_tokens, self.limits.max_length
        if not self.dialogue.prompt:
            raise DataError("prompt: expected at least one token, got an empty observation. Set the task's prompt.")
        if num >= max_length:
            raise DataError(
                f"prompt: expected fewer than max_length={max_length} tokens, got {num}. "
                "Raise --max_length (in Python: Limits.max_length) or drop the row."
            )
        self.trajectory.append_observation(self.dialogue.ids)

    async def generate(self) -> Action | None:
        """Sample the next action and append it; return None if the context of the engine's model is full.

        Raises:
            Aborted: the engine gave up; tokens that it sampled before are appended.
            EngineError: no completion, or one that no record can hold.
            DataError: not even the first prompt fits into the context of the engine's model.
        """
        progress, prompt, turn_index = self.progress, self.dialogue.prompt, len(self.trajectory.turns)
        num_tokens = self.dialogue.num_tokens
        progress.stage, progress.turn_index, progress.num_tokens = Stage.GENERATE, turn_index, num_tokens
        sampling = self.sampling.for_turn(turn_index, self.limits.max_length - num_tokens)
        started, where = time.perf_counter(), self.setup.engine.base_url or "generate"
        request_id, limit_s = f"{self.key.episode_id}/{turn_index}", self.limits.generate_timeout_s
        try:
            completion = await sample(self.setup.engine, prompt, sampling, request_id=request_id, limit_s=limit_s)
        except PromptTooLong as error:
            if turn_index:
                return None
            progress.stage = Stage.PROMPT
            raise DataError(f"prompt: {error}") from error
        except (ConfigError, MissingDependency) as error:
            error.ends_run = True  # the engine is set up wrongly
            raise
        generate_s, is_aborted = time.perf_counter() - started, completion.finish_reason == "abort"
        text = closing = ""
        if completion.token_ids or not is_aborted:
            try:
                args = (completion, sampling.stop_token_ids)
                text, closing = await off_loop(len(completion.token_ids), self.dialogue.action_of, *args)
                self.trajectory.append_turn(completion, text, generate_s, began_s=started - self.started_s)
            except (EngineError, ArithmeticError, LookupError, TypeError, ValueError) as error:
                raise EngineError(f"{where}: {error}") from error
        if is_aborted:
            raise Aborted(f"{where}: expected a completion, got finish reason 'abort'. Run the episode again.")
        return Action(completion.token_ids, text, closing)

    async def step(self, action: Action) -> Outcome:
        """Pass the action to the environment and record its result."""
        self.progress.stage = Stage.STEP
        turn, action_ids = self.trajectory.turns[-1], list(action.token_ids)
        states: StepState = {
            "observation_text": self.dialogue.text,
            "action_text": turn.action,
            "label": self.label,
            "sampling_params": self.sampling,
            "finish_reason": turn.finish_reason,
            "turn_index": self.progress.turn_index,
            "tokens_left": max(0, self.limits.max_length - self.dialogue.num_tokens - len(action_ids)),
            "metadata": self.metadata,
            "seed": self.key.seed,
        }
        self.dialogue.append_action(action_ids, action.text + action.closing)
        started = time.perf_counter()
        with collect_usage() as spent:  # by judges and reward models
            value = await self.call_step(states, action_ids)
        result = parse_step(value, f"{type(self.agent).__name__}.step", getattr(self.agent, "score_range", None))
        if not isinstance(result.observation, str):  # a copy: an environment may write into its messages later
            result = replace(result, observation=deepcopy(result.observation))
        if spent:
            result = replace(result, info={**spent, **result.info})
        self.trajectory.set_result(result, time.perf_counter() - started)
        return Outcome(result, feedback_kind(value))

    async def call_step(self, states: StepState, action_ids: Sequence[int]) -> Any:
        """Call `step`, and call it again with equal states where an InfraError asks for it; return its value."""
        turn, retries = self.trajectory.turns[-1], self.setup.step_retries
        while True:
            self.states = {**states, "action_ids": list(action_ids)}
            if not self.dialogue.is_raw:
                index = self.progress.turn_index
                calls = await off_loop(len(turn.action), self.dialogue.parse_calls, turn.action, index)
                self.states["tool_calls"] = calls
            try:
                value = await bounded(self.agent.step, self.states, limit_s=self.limits.step_timeout_s)
            except InfraError as error:
                if not error.retry_step or turn.num_retries == retries.max_retries:
                    raise
                logger.info("episode %s: step failed and is called again: %s", self.key.episode_id, error)
                name, self.outage = error_name(error), error
            else:
                self.outage = None
                return value
            await asyncio.sleep(retries.wait_s * 2**turn.num_retries)
            self.trajectory.count_retry(name)

    async def append_observation(self, action: Action, outcome: Outcome) -> bool:
        """Append the observation; return False if it leaves no room for a further turn, and append nothing then."""
        observation = outcome.result.observation
        if not self.setup.host_samples:
            self.sampling = outcome.result.sampling or self.sampling
        size = size_of(observation)
        if self.setup.chat.options.history == "rerender":
            size += len(self.dialogue.text)
        args = (action.token_ids, action.text, observation)
        options = {"reserve": self.sampling.max_tokens, "kind": outcome.kind}
        reply = await off_loop(size, self.dialogue.reply_to, *args, **options)
        if reply is None:
            return False
        self.dialogue.append_reply(reply)
        reply.write_to(self.trajectory)
        return True

    async def report_limit(self) -> None:
        """Tell the environment that a limit ended the episode, and merge the result that it may return."""
        last = self.trajectory.turns[-1].result if self.trajectory.turns else None
        if last is None:  # the time ran out before the first result
            return
        self.progress.stage = Stage.ON_TRUNCATE
        with collect_usage() as spent:
            value = await self.call(self.agent.on_truncate, self.states)
        if value is None and not spent:
            return
        where, score_range = f"{type(self.agent).__name__}.on_truncate", getattr(self.agent, "score_range", None)
        more = StepResult() if value is None else parse_step(value, where, score_range)
        score = last.score if more.score is None else more.score
        info = {**with_usage(last.info, spent), **more.info}
        merged = replace(last, reward=last.reward + more.reward, score=score, info=info)
        self.trajectory.set_result(merged)

    async def close(self) -> None:
        """Close the environment, at any stage of the episode."""
        agent, self.agent, self.progress.stage = self.agent, None, Stage.CLOSE
        if agent is not None:
            await self.threads.then(partial(self.call, agent.close))

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the agent instance, for at most `step_timeout_s`."""
        if getattr(method, "__func__", None) in _INHERITED:
            return await method(*args)
        return await bounded(method, *args, limit_s=self.limits.step_timeout_s)


@contextlib.contextmanager
def recording_errors(trajectory: Trajectory, progress: EpisodeProgress) -> Iterator[None]:
    """Record on the trajectory what the block raises: the one `except` that turns errors into data.

    Two things pass: a cancellation of this task, and an error after which every other episode would fail too. A
    CancelledError that the block itself made is an error like any other.
    """
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        is_cancelled = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
        if is_cancelled or (isinstance(error, AgentEnvError) and error.ends_run):
            raise
        progress.error = error if trajectory.stop_reason is None else progress.error
        record_failure(trajectory, error, progress.stage)
