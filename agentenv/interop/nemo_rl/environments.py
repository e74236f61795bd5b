"""Our environments and reward models as environments of NeMo RL.

    from agentenv.interop.nemo_rl import TaskProcessor, register
    register("agentenv")
    register("agentenv_rm", "reward_model")
    register_processor("agentenv", TaskProcessor("guess_number"))    # from nemo_rl.data.processors

    env:
      agentenv: {env: guess_number, env_kwargs: {max_guesses: 4}, wrap_observation: chat, tokenizer: MODEL}
      agentenv_rm: {model_name: Skywork/Skywork-Reward-V2-Qwen3-0.6B, precision: bfloat16, max_model_len: 2048}

NeMo RL's interface has no place for these:

- Failures. An unknown reward cannot be expressed: every number counts in the baseline of its prompt, even in a masked
  row, and NaN makes the siblings' baseline NaN. `on_failure: raise` (the default) fails the call. If infrastructure
  failed, NeMo RL recognizes the error: its RolloutManager rolls the prompt out again, its older loops end the run.
  `mask` ends the row with the reward NaN; then `masked(batch)`, which `global_post_process_and_metrics` calls, must run
  between rollout and advantages, and NeMo RL calls neither itself. A step is repeated only where the environment
  itself asks for it.
- `reset`. Rows exist before the environment does: `TaskProcessor` asks it for its first observation.
- Limits. NeMo RL does not tell the environment that it cut an episode: the episode is closed after `idle_s`, without
  `on_truncate`. The class's `max_turns` limit an episode here, too.
- GPUs. `create_env` requests none, and Ray may hide them from the actor: name a reward model as `ray:MODEL`, with
  `rm_args: {num_gpus: 1}`, or a server's address.
- Tokens. The action is text without its special tokens, so that `step` sees the `action_ids` of that text, and neither
  why the generation ended nor how many tokens are left. Without a tokenizer, `tool_calls` are read in one common form.

Source: nemo_rl/environments/{interfaces,utils,reward_model_environment}.py and experience/rollouts.py, 0.6.0 of
2026-08-22 (7ea279a).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from agentenv._util.ray.cluster import import_ray
from agentenv.chat.chat import Chat, ChatOptions
from agentenv.core.arguments import construct, number, one_of
from agentenv.engines.models import load_tokenizer
from agentenv.errors import ConfigError, ContractError
from agentenv.interop.hosted import stepped_source
from agentenv.interop.nemo_rl.base import ON_FAILURE, Environment, StepRow
from agentenv.interop.nemo_rl.reward_model import RewardModelEnvironment
from agentenv.interop.nemo_rl.sessions import ID, Sessions
from agentenv.interop.nemo_rl.text import ChatObservations, plain_text

_MAX_CONCURRENT_CALLS = 1000
"""Maximum number of concurrent steps of an actor. With Ray's default, single-sample rollouts would run in turn."""


@dataclass(frozen=True, slots=True)
class AgentEnvironmentOptions:
    """Options in `env.NAME` of NeMo RL's configuration for one of our environments."""

    env: Any = None
    """A name of `agentenv list`, FILE.py[:Class], module:Class, or a class."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    on_failure: str = "raise"
    """`raise` or `mask`; see the module."""
    wrap_observation: str = "raw"
    """`raw`: an observation's text unchanged. `chat`: with the turn boundary, as a user's message."""
    tokenizer: Any = None
    """The policy's tokenizer: a name or {name: …}, or an object; needed for `chat` and for tool calls."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reward_components: tuple[str, ...] = ()
    """Numbers of a step's `info` that become `reward/NAME`, for GDPO. `reward/rest` is the reward without them, so that
    their sum is the reward."""
    step_timeout_s: float = 60.0
    """Time limit of the constructor, reset or a step."""
    idle_s: float = 3600.0
    """An episode without a step for this long counts as abandoned by NeMo RL."""
    check_prompt: bool = True
    """Refuse episodes whose `reset` returns another prompt than the model was shown."""

    def __post_init__(self) -> None:
        """Check the values."""
        one_of("env.on_failure", self.on_failure, ON_FAILURE)
        if self.env is None:
            raise ConfigError("env: expected the key env, got none. Name an environment; `agentenv list` shows them.")
        one_of("env.wrap_observation", self.wrap_observation, ("raw", "chat"))
        for name in ("step_timeout_s", "idle_s"):
            number(f"env.{name}", getattr(self, name), low=0.001)
        if self.wrap_observation == "chat" and self.tokenizer is None:
            raise ConfigError("env.tokenizer: expected the policy's for wrap_observation 'chat', got none. Name it.")


class AgentEnvironment(Environment):
    """One of our environments for NeMo RL: an AgentInstance for each row, from its first step to its last.

    A step puts `agentenv_id`, which identifies the row's episode, into a copy of its metadata. The first step reads
    `label` (or `ground_truth`), `seed`, `raw_prompt`, `task_prompt` (the prompt that `reset` gets instead) and
    `metadata`; all other keys are columns of the row.

    Args:
        config: the fields of `AgentEnvironmentOptions`, as NeMo RL passes them.

    Raises:
        ConfigError: the environment does not exist, or an option has an invalid value.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.options = options = construct("env", AgentEnvironmentOptions, config)
        advice = "Serve it with agentenv.interop.nemo_gym.GymServer."
        source = stepped_source(options.env, options.env_kwargs, "env.env", advice)
        chat = None
        if options.tokenizer is not None:
            name = options.tokenizer.get("name") if isinstance(options.tokenizer, Mapping) else options.tokenizer
            tokenizer: Any = load_tokenizer(name) if isinstance(name, str) else name
            chat = Chat(tokenizer, options=ChatOptions(chat_template_kwargs=dict(options.chat_template_kwargs)))
        self._wrapped = ChatObservations(chat) if options.wrap_observation == "chat" and chat is not None else None
        self._sessions = Sessions(
            source,
            step_timeout_s=options.step_timeout_s,
            idle_s=options.idle_s,
            check_prompt=options.check_prompt,
            parse=None if chat is None else chat.tool_format.parse,
        )
        super().__init__("agentenv", options.on_failure, tuple(options.reward_components))

    async def _row(self, log: Sequence[Any], metadata: Mapping[str, Any]) -> StepRow:
        session, result = await self._sessions.step(log, metadata)
        try:
            if self._wrapped is None or result.done:
                observation = plain_text(result.observation)
            else:
                cut_at_stop = any(log[-1]["content"].endswith(stop) for stop in session.stop_before)
                observation = self._wrapped.text(result.observation, closed=not cut_at_stop)
            parts = {}
            for name in self._parts:
                value = result.info.get(name)
                if not isinstance(value, int | float):
                    raise ContractError(
                        f"info: expected a number under {name!r}, got {value!r}. Change reward_components."
                    )
                parts[name] = float(value)
        except BaseException:
            await self._sessions.forget(session.id)
            raise
        answer = result.info.get("extracted")
        return StepRow(
            observation,
            result.reward,
            terminated=result.done,
            metadata=None if result.done else {**metadata, ID: session.id},
            parts={**parts, "rest": result.reward - sum(parts.values())} if parts else {},
            stop=None if session.stop is None else list(session.stop),
            answer=answer if isinstance(answer, str) else None,
        )

    async def _end_unfinished(self, rows: Sequence[StepRow]) -> None:
        await asyncio.gather(*(self._sessions.forget(row.metadata[ID]) for row in rows if row.metadata is not None))

    async def _close(self) -> None:
        await self._sessions.close()

    def metrics(self) -> dict[str, float]:
        """Return the numbers of live, started, ended, failed and abandoned episodes."""
        names = ("num_live", "num_started", "num_ended", "num_failed", "num_abandoned")
        return {f"{self._name}/{name}": float(getattr(self._sessions, name)) for name in names}


# --- registering ------------------------------------------------------------------------------------------------------

ACTORS = {
    "agent": "agentenv.interop.nemo_rl.AgentEnvironmentActor",
    "reward_model": "agentenv.interop.nemo_rl.RewardModelEnvironmentActor",
}
"""Paths of the Ray classes, which `create_env` looks up; they are created on access."""
_CLASSES = {"AgentEnvironmentActor": AgentEnvironment, "RewardModelEnvironmentActor": RewardModelEnvironment}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    ray = import_ray("agentenv.interop.nemo_rl")
    return ray.remote(num_cpus=0, max_concurrency=_MAX_CONCURRENT_CALLS)(_CLASSES[name])


def register(name: str | None = None, kind: str = "agent") -> None:
    """Register `env.NAME` of NeMo RL's configuration as one of our environments; a second call does nothing.

    Call it in the driver, before `create_env`. `register_env`, which is all that NeMo RL's guide shows, is not enough:
    the class must also be in ACTOR_ENVIRONMENT_REGISTRY, because `create_env` refuses classes whose interpreter it does
    not know. Ours is the driver's own (`PY_EXECUTABLES.SYSTEM`), in which agentenv must be installed. Do not use the
    name `reward_model`: NeMo RL reserves GPUs for it.

    Args:
        name: the environment's name; by default `agentenv`, or `agentenv_reward_model`.
        kind: `agent` or `reward_model`.

    Raises:
        ConfigError: another environment has this name.
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
