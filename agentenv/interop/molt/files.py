"""Molt's agent files in `agentenv run --agent_func_path`: the names that they import from `molt.agents`, over our loop.

Source: molt/agents/{base,chat_agent}.py, 0.1.6 and 0.2.1. A file's `AgentRunner` is a StepEnvRunner, which runs an Env
in our loop, a ChatAgentRunner, whose agent calls our endpoint, or a Runner with its own `execute`. Anthropic's API is
not offered, and such an `execute` may return one Trajectory, not several.

The classes carry Molt's names, because files import them by these names; MoltTrajectory is their `Trajectory`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from agentenv._util.calls import call, create
from agentenv.core.agent import AgentInstance, StepState
from agentenv.core.engine import Engine, Tokenizer
from agentenv.core.step_dict import StepDict
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Message, Task
from agentenv.episode.endpoint.agent import AgentContext, ChatAgentSource
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.errors import ConfigError, ContractError
from agentenv.interop.openrlhf.engine import LLMEngine
from agentenv.interop.openrlhf.executor import AgentExecutor, AgentFunc
from agentenv.interop.stand_in import stand_in


@dataclass
class Result:
    """The result of an Env's `step` or a ChatAgent's `run`, like Molt's class."""

    reward: Any = 0.0
    observation: str = ""
    terminated: bool = True
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    score: Any = None
    images: list[Any] | None = None
    sampling_params: Any = None


def step_dict(result: Any, where: str) -> StepDict:
    """Return a Result as the dict that `parse_step` reads; info that is neither number nor text is dropped.

    Raises:
        ContractError: `result` is not a Result.
    """
    if not isinstance(result, Result):
        raise ContractError(f"{where}: expected molt.agents.Result, got {type(result).__name__}. Return one.")
    info = {name: _fact(value) for name, value in (result.info or {}).items()}
    return {
        "rewards": _first(result.reward),
        "scores": None if result.score is None else _first(result.score),
        "environment_feedback": result.observation,
        "done": bool(result.terminated or result.truncated),
        "truncated": bool(result.truncated),
        "extra_logs": {name: value for name, value in info.items() if value is not None},
        "sampling_params": result.sampling_params,
        "environment_images": result.images or (),
    }


def _first(value: Any) -> Any:
    """Return the first of several numbers, as Molt does."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    while isinstance(value, list | tuple):
        value = value[0] if value else None
    return value


def _fact(value: Any) -> float | str | None:
    value = _first(value)
    return value if isinstance(value, int | float | str) else None


class Env(AgentInstance):
    """An environment, like Molt's class; a StepEnvRunner runs it."""

    score_range = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept any arguments."""


@functools.cache
def _as_agent_class(env_cls: Any) -> type[AgentInstance]:
    """Return the environment class with a `step` whose result our loop can read."""

    @functools.wraps(env_cls.step)
    async def step(self: Any, state: StepState) -> StepDict:
        return step_dict(await call(partial(env_cls.step, self), state), f"{env_cls.__name__}.step")

    more = {"step": step, "score_range": getattr(env_cls, "score_range", None), "__module__": env_cls.__module__}
    return type(env_cls.__name__, (env_cls, AgentInstance), more)


@dataclass
class MoltTrajectory:
    """An episode, like Molt's class Trajectory, for a file's own `execute`: the fields that a text-only one writes."""

    prompt: Any
    label: Any
    images: Any
    observation_text: str
    observation_tokens: list[int]
    mm_train_inputs: Any = None
    action_ranges: list[tuple[int, int]] = field(default_factory=list)
    off_policy_action_lens: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    reward: Any = 0.0
    scores: Any = 0.0
    truncated: bool = False
    extra_logs: dict[str, Any] = field(default_factory=dict)

    def append_action(
        self, action_tokens: Sequence[int], action_logprobs: Sequence[float] | None = None, off_policy_len: int = 0
    ) -> None:
        """Add sampled tokens."""
        start = len(self.observation_tokens)
        self.observation_tokens += action_tokens
        self.action_ranges.append((start, len(self.observation_tokens)))
        self.off_policy_action_lens.append(off_policy_len)
        if self.rollout_log_probs is not None:
            self.rollout_log_probs += action_logprobs or [0.0] * len(action_tokens)

    def append_feedback(self, action_text: str, feedback_text: str, feedback_tokens: Sequence[int]) -> None:
        """Add an environment's tokens, and the texts of the action and of the feedback."""
        self.observation_text += action_text + feedback_text
        self.observation_tokens += feedback_tokens
        if self.rollout_log_probs is not None:
            self.rollout_log_probs += [0.0] * len(feedback_tokens)


class Runner(AgentExecutor):
    """The base of runners, like Molt's class."""


class StepEnvRunner(Runner):
    """Runs episodes of an Env in our loop, like Molt's class."""

    _passes_messages = False

    def __init__(self, env_cls: Any) -> None:
        super().__init__(_as_agent_class(env_cls))

    async def execute(self, prompt: Any, label: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> MoltTrajectory:
        """Run one episode."""
        response = await super().execute(prompt, label, sampling_params)
        return MoltTrajectory(**response, observation_text="")


@dataclass
class ChatContext:
    """The argument of a ChatAgent's `run`, like Molt's class."""

    messages: list[Message]
    tools: Any
    prompt: str
    label: Any
    images: list[Any] | None
    base_url: str
    model_name: str
    api_key: str
    session_id: str
    sampling_params: Any
    max_length: int

    @property
    def session_url(self) -> str:
        """The session's address for Anthropic's SDK.

        Raises:
            ContractError: always: our endpoint offers OpenAI's API only.
        """
        raise ContractError("ChatContext.session_url: expected OpenAI's client, got Anthropic's. Use ctx.base_url.")


class ChatAgent:
    """An agent with its own loop, like Molt's class; a ChatAgentRunner runs it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept any arguments."""


class ChatAgentRunner(Runner):
    """Runs episodes of an agent that requests completions itself from our endpoint, like Molt's class."""

    PRERENDER_PROMPT: ClassVar[bool] = False

    def __init__(self, agent_cls: Any) -> None:
        super().__init__()
        self.chat_agent_cls = agent_cls


class _MoltLLMEngine(LLMEngine):
    """Our engine with the `generate` that a file's own `execute` calls in Molt."""

    async def generate(  # type: ignore[override]
        self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None, session_id: Any = None
    ) -> Any:
        """Sample after these ids; returns the output and the number of its off-policy tokens, which is 0."""
        return await super().generate(prompt_token_ids, sampling_params, multi_modal_data), 0


class MoltFunc(AgentFunc):
    """A Molt file's `AgentRunner`, built once and then asked for episodes."""

    llm_engine_cls = _MoltLLMEngine

    def __init__(self, executor_cls: type) -> None:
        super().__init__(executor_cls)
        self._source: ChatAgentSource | None = None

    async def run(self, task: Task, setup: EpisodeSetup, key: EpisodeKey) -> Trajectory:
        """Run one episode; see `AgentFunc.run` and `ChatAgentSource.run`."""
        if not issubclass(self.executor_cls, ChatAgentRunner):
            return await super().run(task, setup, key)
        if self._source is None:
            runner_cls: Any = self.executor_cls
            agent_cls, max_length = runner_cls().chat_agent_cls, setup.limits.max_length

            class Agent:
                score_range = None

                async def run(self, context: AgentContext) -> StepDict:
                    agent: Any = await create(agent_cls, {})
                    asked = next((each["content"] for each in reversed(context.messages) if each["role"] == "user"), "")
                    ctx = ChatContext(
                        messages=context.messages,
                        tools=context.metadata.get("tools"),
                        prompt=asked if isinstance(asked, str) else "".join(part.get("text") or "" for part in asked),
                        label=context.label,
                        images=None,
                        base_url=context.base_url,
                        model_name=context.model,
                        api_key=context.api_key,
                        session_id=context.base_url.split("/")[-2],
                        sampling_params=context.sampling,
                        max_length=max_length,
                    )
                    return step_dict(await call(agent.run, ctx), f"{agent_cls.__name__}.run")

            self._source = ChatAgentSource(Agent)
        return await self._source.run(task, setup, key)

    def agent_class(self, engine: Engine, tokenizer: Tokenizer) -> Any:
        """Return the class of the file's environment.

        Raises:
            ConfigError: the file has a ChatAgent.
        """
        if issubclass(self.executor_cls, ChatAgentRunner):
            raise ConfigError(
                f"{self.executor_cls.__name__}: expected an Env to check, got a ChatAgent. "
                "Try it with agentenv run --agent_func_path FILE --limit 1."
            )
        return super().agent_class(engine, tokenizer)

    def _take(self, response: Any, call: Any) -> None:
        if isinstance(response, list) and len(response) == 1:
            response = response[0]
        if not isinstance(response, MoltTrajectory):
            raise ContractError(
                f"{self.executor_cls.__name__}.execute: expected one molt.agents.Trajectory, got {response!r:.200}. "
                "Return one sequence; for histories that are rendered again, write a ChatAgent, or use "
                "agentenv.interop.molt."
            )
        facts = {name: fact for name, value in response.extra_logs.items() if (fact := _fact(value)) is not None}
        super()._take({**vars(response), "extra_logs": facts}, call)


# --- the modules ------------------------------------------------------------------------------------------------------

_CLASSES = (ChatAgent, ChatAgentRunner, ChatContext, Env, Result, Runner, StepEnvRunner)
_OFFERED = {cls.__name__: cls for cls in _CLASSES} | {"Trajectory": MoltTrajectory}
_NAMES = ("molt.agents", "molt.agents.base", "molt.agents.chat_agent")


def molt_stand_in() -> AbstractContextManager[None]:
    """Replace `molt.agents` while a file is loaded, even if Molt is installed; see `stand_in`."""
    return stand_in({"molt": {}, **dict.fromkeys(_NAMES, _OFFERED)}, _NAMES)
