"""Our environments and reward models as environments of NeMo RL.

    from agentenv.interop.nemo_rl_env import TaskProcessor, register
    register("agentenv")
    register("agentenv_rm", "reward_model")
    register_processor("agentenv", TaskProcessor("guess_number"))    # of nemo_rl.data.processors

    env:
      agentenv: {env: guess_number, env_kwargs: {max_guesses: 4}, wrap_observation: chat, tokenizer: MODEL}
      agentenv_rm: {model_name: Skywork/Skywork-Reward-V2-Qwen3-0.6B, precision: bfloat16, max_model_len: 2048}

`FromNemo` is the other way around. What NeMo RL's interface has no place for:

- Failures. A reward that nobody knows cannot be told: every number counts in the baseline of its prompt, whatever mask
  there is, and NaN spoils that of all its siblings. `on_failure: raise` (the default) fails the call, with an error
  that NeMo RL takes for infrastructure's where it is: its RolloutManager rolls the prompt out again, its older loops
  end the run. `mask` ends the row with the reward NaN; then `masked(batch)`, which `global_post_process_and_metrics`
  calls, has to run between rollout and advantages, and NeMo RL calls neither itself. Steps are never repeated here: an
  environment may have acted already.
- `reset`. Rows are made before there is an environment: `TaskProcessor` asks it for its first observation.
- Limits. An episode that NeMo RL cuts is not told to its environment: it is closed after `idle_s`, without
  `on_truncate`.
- GPUs. `create_env` asks for none, and Ray may hide them from the actor: name a reward model as `ray:MODEL`, with
  `rm_args: {num_gpus: 1}`, or a server's address.
- Tokens. `step` sees no `action_ids`, no `finish_reason` and no `tokens_left`; the action is text without its special
  tokens. `tool_calls` are read where there is a tokenizer.

Source: nemo_rl/environments/{interfaces,utils,reward_model_environment}.py and experience/rollouts.py, 0.6.0 of
2026-08-22 (7ea279a).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from agentenv.agent import check_arguments
from agentenv.chat import Chat
from agentenv.errors import ConfigError, ContractError
from agentenv.interop._nemo_environment import Environment
from agentenv.interop._nemo_reverse import FromNemo
from agentenv.interop._nemo_reward_model import RewardModelOptions, RewardRows
from agentenv.interop._nemo_rows import TaskProcessor
from agentenv.interop._nemo_sessions import ID, Session, Sessions
from agentenv.interop._nemo_text import ChatObservations, plain_text
from agentenv.interop._nemo_types import (
    EnvironmentReturn,
    EnvironmentUnavailable,
    Row,
    RowsFailed,
    check_on_failure,
    masked,
    options_of,
)
from agentenv.loading import load_env, load_tokenizer
from agentenv.ray_import import import_ray
from agentenv.rewards._arguments import number, one_of
from agentenv.types import ChatOptions, StepResult

__all__ = [
    "AgentEnvironment",
    "AgentEnvironmentOptions",
    "EnvironmentReturn",
    "EnvironmentUnavailable",
    "FromNemo",
    "RewardModelEnvironment",
    "RewardModelOptions",
    "RowsFailed",
    "TaskProcessor",
    "masked",
    "register",
]
_MAX_CONCURRENT_CALLS = 1000
"""Steps of an actor at a time: with Ray's default of one, the rollouts of single samples would wait for each other."""


@dataclass(frozen=True, slots=True)
class AgentEnvironmentOptions:
    """What `env.NAME` of NeMo RL's configuration may hold for one of our environments."""

    env: Any = None
    """A name of `agentenv list`, FILE.py[:Class], module:Class, or a class."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    on_failure: str = "raise"
    """raise or mask; see the module."""
    wrap_observation: str = "raw"
    """raw: an observation's text as it is. chat: with the turn boundary, as a user's message, by the template."""
    tokenizer: Any = None
    """The policy's: a name or {name: …}, or a tokenizer; for `chat`, and for calls of tools."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reward_components: tuple[str, ...] = ()
    """Numbers of a step's `info` that become `reward/NAME`, for GDPO; `reward/rest` is the reward without them, so that
    their sum stays the reward."""
    step_timeout_s: float = 60.0
    """Longest that the constructor, reset or a step may take."""
    idle_s: float = 3600.0
    """An episode without a step for so long was given up by NeMo RL."""
    check_prompt: bool = True
    """Refuse episodes whose `reset` gives another prompt than the model was shown."""
    metrics_path: str | None = None
    """A file to which the figures since the start are appended, a line of JSON every ten seconds at most: NeMo RL asks
    no environment for its metrics."""

    def __post_init__(self) -> None:
        """Refuse what none of this can be."""
        check_on_failure(self.on_failure)
        if self.env is None:
            raise ConfigError("env: expected the key env, got none. Name an environment; `agentenv list` shows them.")
        one_of("env.wrap_observation", self.wrap_observation, ("raw", "chat"))
        for name in ("step_timeout_s", "idle_s"):
            number(f"env.{name}", getattr(self, name), low=0.001)
        if self.wrap_observation == "chat" and self.tokenizer is None:
            raise ConfigError("env.tokenizer: expected the policy's for wrap_observation 'chat', got none. Name it.")


class AgentEnvironment(Environment):
    """One of our environments as NeMo RL's: an AgentInstance for each row, from its first step to its last.

    Which one a row has is in its metadata: a step puts `agentenv_id` there, in a copy. `label` (or `ground_truth`),
    `seed`, `raw_prompt`, `task_prompt` (what `reset` gets in its place) and `metadata` are read at the first step; all
    other keys are columns of the row.

    Args:
        config: `AgentEnvironmentOptions` by name, as NeMo RL passes it.

    Raises:
        ConfigError: there is no such environment, or an option cannot have its value.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.options = options = options_of(AgentEnvironmentOptions, config)
        cls = load_env(options.env) if isinstance(options.env, str) else options.env
        if not callable(getattr(cls, "step", None)):
            raise ConfigError(
                f"env.env: expected an environment with `step`, got {cls!r}: under NeMo RL an agent has no loop of its "
                "own. Serve it with agentenv.interop.nemo_gym."
            )
        check_arguments(cls, options.env_kwargs)
        self._parts = tuple(options.reward_components)
        chat = _chat_of(options)
        self._wrapped = ChatObservations(chat) if options.wrap_observation == "chat" and chat is not None else None
        self._sessions = Sessions(
            cls, dict(options.env_kwargs), step_timeout_s=options.step_timeout_s, idle_s=options.idle_s,
            check_prompt=options.check_prompt, parse=None if chat is None else chat.tool_format.parse,
        )  # fmt: skip
        super().__init__("agentenv", options.on_failure, options.metrics_path)

    async def _row(self, log: Sequence[Any], metadata: Mapping[str, Any]) -> Row:
        session, result = await self._sessions.step(log, metadata)
        try:
            return self._told(log, metadata, session, result)
        except BaseException:
            await self._sessions.drop(session)
            raise

    def _told(self, log: Sequence[Any], metadata: Mapping[str, Any], session: Session, result: StepResult) -> Row:
        answer = result.info.get("extracted")
        return Row(
            self._observation(result, session, log),
            result.reward,
            terminated=result.done,
            metadata=None if result.done else {**metadata, ID: session.id},
            parts=self._in_parts(result),
            stop=None if session.stop is None else list(session.stop),
            answer=answer if isinstance(answer, str) else None,
        )

    def _observation(self, result: StepResult, session: Session, log: Sequence[Any]) -> str:
        if self._wrapped is None or result.done:
            return plain_text(result.observation)
        cut_at_stop = any(log[-1]["content"].endswith(stop) for stop in session.stop_before)
        return self._wrapped.text(result.observation, closed=not cut_at_stop)

    def _in_parts(self, result: StepResult) -> dict[str, float]:
        parts = {}
        for name in self._parts:
            value = result.info.get(name)
            if not isinstance(value, int | float):
                raise ContractError(f"info: expected a number under {name!r}, got {value!r}. Change reward_components.")
            parts[name] = float(value)
        return {**parts, "rest": result.reward - sum(parts.values())} if parts else {}

    def _failed(self, error: BaseException) -> Row:
        parts = dict.fromkeys((*self._parts, "rest"), float("nan")) if self._parts else {}
        return Row(f"Environment: failed: {type(error).__name__}", float("nan"), terminated=True, parts=parts)

    async def _give_up(self, rows: Sequence[Row]) -> None:
        ids = [row.metadata[ID] for row in rows if row.metadata is not None]
        await asyncio.gather(*map(self._sessions.forget, ids))

    async def _close(self) -> None:
        await self._sessions.close()

    def metrics(self) -> dict[str, float]:
        """Episodes that live, and those that started, ended, failed or were given up since the start."""
        names = ("num_live", "num_started", "num_ended", "num_failed", "num_abandoned")
        return {f"{self._name}/{name}": float(getattr(self._sessions, name)) for name in names}


def _chat_of(options: AgentEnvironmentOptions) -> Chat | None:
    named = options.tokenizer
    if named is None:
        return None
    name = named.get("name") if isinstance(named, Mapping) else named
    tokenizer: Any = load_tokenizer(name) if isinstance(name, str) else name
    return Chat(tokenizer, options=ChatOptions(template_kwargs=dict(options.chat_template_kwargs)))


class RewardModelEnvironment(Environment):
    """A reward model, or any reward of ours, as NeMo RL's environment of one turn.

    Args:
        config: `RewardModelOptions` by name; NeMo RL's keys of its own reward model environment are known.
        reward: a reward, or a reward model (`Scorer`), in place of one that the configuration names; the caller's.

    Raises:
        ConfigError: there is no such reward model, or an option cannot have its value.
    """

    def __init__(self, config: Mapping[str, Any], *, reward: Any = None) -> None:
        self._rows = RewardRows(config, reward)
        options = self._rows.options
        super().__init__("reward_model_env", options.on_failure, options.metrics_path)

    async def _row(self, log: Sequence[Any], metadata: Mapping[str, Any]) -> Row:
        return await self._rows.row(log, metadata)

    async def _close(self) -> None:
        await self._rows.close()

    def metrics(self) -> dict[str, float]:
        """NeMo RL's names over all rewards since the start, and the conversations that were cut or failed."""
        figures = self._rows.rewards.metrics() | self._rows.counts
        return {f"{self._name}/{name}": float(value) for name, value in figures.items()}


# --- registering ------------------------------------------------------------------------------------------------------

ACTORS = {
    "agent": "agentenv.interop.nemo_rl_env.AgentEnvironmentActor",
    "reward_model": "agentenv.interop.nemo_rl_env.RewardModelEnvironmentActor",
}
"""Names of the classes for Ray, which `create_env` looks up; they are made when asked for."""
_CLASSES = {"AgentEnvironmentActor": AgentEnvironment, "RewardModelEnvironmentActor": RewardModelEnvironment}


def __getattr__(name: str) -> Any:
    """The classes for Ray: NeMo RL calls `.options(…).remote(config)` on what a name gives."""
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    ray = import_ray("agentenv.interop.nemo_rl_env")
    return ray.remote(num_cpus=0, max_concurrency=_MAX_CONCURRENT_CALLS)(_CLASSES[name])


def register(name: str | None = None, kind: str = "agent") -> None:
    """Make `env.NAME` of NeMo RL's configuration one of ours; calling it again does nothing.

    Call it in the driver, before `create_env`. Besides `register_env`, which NeMo RL's guide shows alone, the class has
    to be in ACTOR_ENVIRONMENT_REGISTRY: `create_env` refuses every class of which it does not know the interpreter.
    Ours is the driver's own (`PY_EXECUTABLES.SYSTEM`), in which agentenv has to be installed. Do not take the name
    `reward_model`: NeMo RL sets GPUs aside for it.

    Args:
        name: of the environment; by default `agentenv`, or `agentenv_reward_model`.
        kind: `agent` or `reward_model`.

    Raises:
        ConfigError: the name is another environment's.
        ImportError: NeMo RL is not installed.
    """
    place = ACTORS[one_of("kind", kind, ACTORS)]
    name = name or ("agentenv" if kind == "agent" else f"agentenv_{kind}")
    actors = import_module("nemo_rl.distributed.ray_actor_environment_registry")
    system = import_module("nemo_rl.distributed.virtual_cluster").PY_EXECUTABLES.SYSTEM
    environments = import_module("nemo_rl.environments.utils")
    import_module("nemo_rl.environments.interfaces").EnvironmentInterface.register(_CLASSES[place.rpartition(".")[2]])
    known = environments.ENV_REGISTRY.get(name)
    if known is not None and known["actor_class_fqn"] != place:
        raise ConfigError(f"register: expected a free name, got {name!r}, which is {known['actor_class_fqn']}. Rename.")
    actors.ACTOR_ENVIRONMENT_REGISTRY[place] = system
    if known is None:
        environments.register_env(name, place)
