"""RewardModelEnvironment: a reward model, or any reward of ours, as NeMo RL's environment of one turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentenv.core.arguments import construct, is_reward, number, one_of
from agentenv.core.types import Message
from agentenv.errors import AgentEnvError, ConfigError, DataError
from agentenv.interop.nemo_rl.base import ON_FAILURE, Environment, StepRow, bare, last_action
from agentenv.interop.nemo_rl.text import is_templated, prompt_of
from agentenv.rewards.grading import grade
from agentenv.rewards.models.factory import open_scorer
from agentenv.rewards.models.reward import ModelReward
from agentenv.rewards.models.types import ready
from agentenv.rewards.registry import reward_from
from agentenv.rewards.types import Response, Reward

IGNORED = (
    "enabled", "tokenizer", "logprob_batch_size", "offload_optimizer_for_logprob", "resources", "dtensor_cfg",
    "dynamic_batching", "sequence_packing", "max_grad_norm", "generation",
)  # fmt: skip
"""Keys of NeMo RL's reward model environment that have no effect here: the model has its own tokenizer, batches are
formed from concurrent requests, and we do not divide Ray's cluster."""


@dataclass(frozen=True, slots=True)
class RewardModelOptions:
    """Options in `env.NAME` of NeMo RL's configuration for a reward model; the first six keys are NeMo RL's."""

    model_name: str | None = None
    """A model's folder or name, or any spec of `agentenv.rewards.models.factory`."""
    checkpoint_path: str | None = None
    """Weights to use instead of `model_name`'s."""
    precision: str | None = None
    batch_size: int | None = None
    """Maximum number of conversations in one forward pass; a batch may have any size."""
    max_model_len: int | None = None
    reward_model_cfg: Mapping[str, Any] = field(default_factory=dict)
    """`reward_model_type` must be bradley_terry."""
    overflow: str | None = None
    """For longer conversations: error, left or right."""
    rm_args: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of the scorer's constructor."""
    reward: Any = None
    """Any reward instead of a model, as for `reward_from`."""
    shift: float = 0.0
    scale: float = 1.0
    clip: tuple[float, float] | None = None
    part: str = "final"
    """The judged part of the last answer: `final`, without its thinking, or `all`."""
    on_failure: str = "raise"
    """`raise` or `mask`; see `environments`."""
    timeout_s: float = 600.0
    """Time limit of one conversation."""

    def __post_init__(self) -> None:
        """Check the values."""
        one_of("env.on_failure", self.on_failure, ON_FAILURE)
        number("env.timeout_s", self.timeout_s, low=0.001)
        kind = self.reward_model_cfg.get("reward_model_type", "bradley_terry")
        if kind != "bradley_terry":
            raise ConfigError(
                f"env.reward_model_cfg: expected the type bradley_terry, got {kind!r}. Use another model."
            )

    @property
    def scorer_args(self) -> dict[str, Any]:
        """Arguments of the scorer's constructor that have a value."""
        arguments = {
            "dtype": self.precision,
            "max_batch": self.batch_size,
            "max_length": self.max_model_len,
            "overflow": self.overflow,
        }
        return {name: value for name, value in arguments.items() if value is not None} | dict(self.rm_args)


class RewardModelEnvironment(Environment):
    """A reward model, or any reward of ours, as NeMo RL's environment of one turn.

    Args:
        config: the fields of `RewardModelOptions`; the keys of NeMo RL's own reward model environment are accepted.
        reward: a reward, or a reward model (`Scorer`), instead of the configured one; the caller closes it.

    Raises:
        ConfigError: the reward model does not exist, or an option has an invalid value.
    """

    def __init__(self, config: Mapping[str, Any], *, reward: Any = None) -> None:
        used = {key: value for key, value in config.items() if key not in IGNORED}
        self.options = options = construct("env", RewardModelOptions, used)
        self.counts = {"num_samples": 0, "num_truncated": 0, "num_failed": 0}
        self._scorer: Any = None
        if reward is None and options.reward is None:
            name = options.checkpoint_path or options.model_name
            if not name:
                raise ConfigError("env: expected model_name or reward, got neither. Name a reward model.")
            reward = self._scorer = open_scorer(name, **options.scorer_args)
        self._model: Any = reward
        self._is_ready = False
        self._reward: Reward = reward_from(options.reward) if reward is None else reward
        if callable(getattr(reward, "score", None)) and not hasattr(reward, "grade"):
            self._reward = ModelReward(
                reward, shift=options.shift, scale=options.scale, clip=options.clip, part=options.part
            )
        is_reward("env.reward", self._reward, "grade")
        super().__init__("reward_model_env", options.on_failure)

    async def _row(self, log: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> StepRow:
        """Return the last answer's reward; the row ends.

        Raises:
            ConfigError: the reward model does not exist, or cannot score messages.
            DataError: the conversation cannot be judged, for example because it is already rendered by a template.
            ContractError: the reward's own code is wrong.
            InfraError: the reward model failed.
        """
        try:
            if not self._is_ready:
                await ready(self._model)
                self._is_ready = True
            answer = last_action(log)
            prompt = conversation_of(log, metadata)[:-1]
            response = Response(answer, metadata.get("label", metadata.get("ground_truth")), prompt, metadata)
            result = await grade(self._reward, response, limit_s=self.options.timeout_s)
            if result.reward is None:
                raise result.error("reward: no number")
        except AgentEnvError:
            self.counts["num_failed"] += 1
            raise
        self.counts["num_samples"] += 1
        self.counts["num_truncated"] += bool(result.components.get("truncated"))
        return StepRow(f"Environment: {result.reward:g}", result.reward, terminated=True, answer=answer)

    async def _close(self) -> None:
        scorer, self._scorer = self._scorer, None
        if scorer is not None:
            await scorer.close()

    def metrics(self) -> dict[str, float]:
        """Return counts of judged, cut and failed conversations since the start."""
        return {f"{self._name}/{name}": float(value) for name, value in self.counts.items()}


def conversation_of(log: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> list[Message]:
    """Return a log's conversation in raw messages: `raw_prompt` of its metadata, then the rollout's messages.

    Raises:
        DataError: the prompt is a chat template's text, which the reward model's template would wrap again (#854), and
            there is no `raw_prompt`.
    """
    messages = bare(log)
    prompt = prompt_of(log, messages)
    replies, raw = messages[len(prompt) :], metadata.get("raw_prompt")
    if raw is not None:
        return [*([{"role": "user", "content": raw}] if isinstance(raw, str) else raw), *replies]
    templated = next((m["content"] for m in prompt if is_templated(m["content"])), None)
    if templated is not None:
        raise DataError(
            f"message_log: expected raw messages, got a chat template's text {templated!r:.120}. Put the messages into "
            "extra_env_info under raw_prompt; NeMo RL's data processors keep only the rendering."
        )
    return [*prompt, *replies]
