"""Molt's agent files in `agentenv run --agent_func_path`: what they import from `molt.agents`, over our loop.

Source: molt/agents/{base,chat_agent}.py, 0.1.6 and 0.2.1. A file's `AgentRunner` is a StepEnvRunner, which runs an Env
in our loop, a ChatAgentRunner, whose agent asks our endpoint, or a Runner with an `execute` of its own. Anthropic's
wire is not offered, and such an `execute` may give one Trajectory, not several.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from typing import Any, ClassVar

from agentenv.agent import AgentInstance, Engine, StepDict, StepState, Tokenizer, call, create
from agentenv.chat import Chat
from agentenv.endpoint.agent import AgentContext, ChatAgentSource
from agentenv.engines.openrlhf import LLMEngine
from agentenv.episode import EpisodeKey
from agentenv.errors import ConfigError, ContractError
from agentenv.executor import AgentExecutor, AgentFunc
from agentenv.trajectory import Trajectory as Episode
from agentenv.types import Limits, Message, SamplingParams, Task


@dataclass
class Result:
    """As Molt's: what an Env's `step` and a ChatAgent's `run` give."""

    reward: Any = 0.0
    observation: str = ""
    terminated: bool = True
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    score: Any = None
    images: list[Any] | None = None
    sampling_params: Any = None


def step_dict(result: Any, where: str) -> StepDict:
    """A Result in OpenRLHF's words, which `parse_step` reads; facts that are neither numbers nor text are left out.

    Raises:
        ContractError: it is none.
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
    """Molt takes the first of several numbers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    while isinstance(value, list | tuple):
        value = value[0] if value else None
    return value


def _fact(value: Any) -> float | str | None:
    value = _first(value)
    return value if isinstance(value, int | float | str) else None


class Env(AgentInstance):
    """As Molt's; a StepEnvRunner runs it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take anything."""


@functools.cache
def _answering(env_cls: Any) -> type[AgentInstance]:
    """The same environment, whose `step` answers in the words that our loop reads."""

    @functools.wraps(env_cls.step)
    async def step(self: Any, state: StepState) -> StepDict:
        """Step, and turn the Result round."""
        return step_dict(await call(partial(env_cls.step, self), state), f"{env_cls.__name__}.step")

    return type(env_cls.__name__, (env_cls, AgentInstance), {"step": step, "__module__": env_cls.__module__})


@dataclass
class Trajectory:
    """As Molt's, for an `execute` of a file's own: the fields that a text-only one writes."""

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
        """Add an environment's tokens, and the texts of the action and of them."""
        self.observation_text += action_text + feedback_text
        self.observation_tokens += feedback_tokens
        if self.rollout_log_probs is not None:
            self.rollout_log_probs += [0.0] * len(feedback_tokens)


class Runner(AgentExecutor):
    """As Molt's."""


class StepEnvRunner(Runner):
    """As Molt's: episodes of an Env, in our loop."""

    def __init__(self, env_cls: Any) -> None:
        """Take the environment's class."""
        super().__init__(_answering(env_cls))

    async def execute(self, prompt: Any, label: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Trajectory:
        """Run one episode."""
        response = await super().execute(prompt, label, sampling_params)
        return Trajectory(**response, observation_text="")


@dataclass
class ChatContext:
    """As Molt's: what a ChatAgent is given."""

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
        """Where Anthropic's SDK would find the session.

        Raises:
            ContractError: always: our endpoint speaks OpenAI's wire.
        """
        raise ContractError("ChatContext.session_url: expected OpenAI's client, got Anthropic's. Use ctx.base_url.")


class ChatAgent:
    """As Molt's; a ChatAgentRunner runs it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take anything."""


class ChatAgentRunner(Runner):
    """As Molt's: episodes of an agent that asks for completions itself, over our endpoint."""

    PRERENDER_PROMPT: ClassVar[bool] = False

    def __init__(self, agent_cls: Any) -> None:
        """Take the agent's class."""
        super().__init__()
        self.chat_agent_cls = agent_cls


def _chat_source(agent_cls: Any, max_length: int) -> ChatAgentSource:
    class Agent:
        """The agent as our endpoint runs it."""

        async def run(self, context: AgentContext) -> StepDict:
            """Run it, and turn its Result round."""
            agent: Any = await create(agent_cls, {})
            asked = _text_of(context.messages)
            ctx = ChatContext(
                context.messages, context.metadata.get("tools"), asked, context.label, None, context.base_url,
                context.model, context.api_key, context.base_url.split("/")[-2], context.sampling, max_length,
            )  # fmt: skip
            return step_dict(await call(agent.run, ctx), f"{agent_cls.__name__}.run")

    return ChatAgentSource(Agent)


def _text_of(messages: Sequence[Message]) -> str:
    """What the user said last."""
    content = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


class _TwofoldEngine(LLMEngine):
    """Our engine as an `execute` of a file's own asks it."""

    async def generate(  # type: ignore[override]
        self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None, session_id: Any = None
    ) -> Any:
        """Sample after these ids; gives the output and that none of its tokens is off-policy."""
        return await super().generate(prompt_token_ids, sampling_params, multi_modal_data), 0


class MoltFunc(AgentFunc):
    """A Molt file's `AgentRunner`, built once and asked for episodes."""

    llm_engine_cls = _TwofoldEngine

    def __init__(self, executor_cls: type) -> None:
        super().__init__(executor_cls)
        self._source: ChatAgentSource | None = None

    async def episode(
        self, task: Task, *, engine: Engine, chat: Chat, sampling: SamplingParams, limits: Limits, key: EpisodeKey
    ) -> Episode:
        """Run one episode; see `AgentFunc.episode` and `ChatAgentSource.episode`."""
        source: Any = super()
        if issubclass(self.executor_cls, ChatAgentRunner):
            if self._source is None:
                runner_cls: Any = self.executor_cls
                self._source = _chat_source(runner_cls().chat_agent_cls, limits.max_length)
            source = self._source
        made: Episode = await source.episode(
            task, engine=engine, chat=chat, sampling=sampling, limits=limits, key=key
        )  # fmt: skip
        return made

    def agent_class(self, engine: Engine, tokenizer: Tokenizer) -> Any:
        """The class of the file's environment.

        Raises:
            ConfigError: it has a ChatAgent.
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
        if not isinstance(response, Trajectory):
            raise ContractError(
                f"{self.executor_cls.__name__}.execute: expected one molt.agents.Trajectory, got {response!r:.200}. "
                "Return one sequence; for histories that are rendered anew write a ChatAgent, or use agentenv.molt."
            )
        facts = {name: fact for name, value in response.extra_logs.items() if (fact := _fact(value)) is not None}
        super()._take({**vars(response), "extra_logs": facts}, call)


# --- the modules ------------------------------------------------------------------------------------------------------

_LOADING = threading.RLock()
_OFFERED = (ChatAgent, ChatAgentRunner, ChatContext, Env, Result, Runner, StepEnvRunner, Trajectory)
_NAMES = ("molt.agents", "molt.agents.base", "molt.agents.chat_agent")


@contextmanager
def stand_in() -> Iterator[None]:
    """For the time that a file is loaded, `molt.agents` is ours, also where Molt is installed; see `openrlhf_module`.

    Where Molt is not installed the stand-in stays, for what the file imports later.
    """
    with _LOADING:
        package = sys.modules.get("molt") or _package()
        real = {name: sys.modules.get(name) for name in _NAMES}
        attribute = getattr(package, "agents", None)
        modules = {name: _module(name) for name in _NAMES}
        agents = modules["molt.agents"]
        vars(agents).update(base=modules["molt.agents.base"], chat_agent=modules["molt.agents.chat_agent"])
        package.agents = agents  # type: ignore[attr-defined]
        sys.modules.update(modules)
        try:
            yield
        finally:
            if package.__path__:
                _put_back(package, attribute, real)


def _package() -> types.ModuleType:
    """The package `molt`: Molt's own where it is installed, otherwise one without a path."""
    if importlib.util.find_spec("molt") is not None:
        return importlib.import_module("molt")
    return sys.modules.setdefault("molt", _module("molt"))


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name, "agentenv's stand-in for Molt's module of this name.")
    module.__spec__ = ModuleSpec(name, None)  # without one, find_spec raises
    module.__path__ = []
    vars(module).update({cls.__name__: cls for cls in _OFFERED if name != "molt"})
    return module


def _put_back(package: types.ModuleType, attribute: Any, real: dict[str, types.ModuleType | None]) -> None:
    vars(package).pop("agents")
    if attribute is not None:
        package.agents = attribute  # type: ignore[attr-defined]
    for name, module in real.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module
