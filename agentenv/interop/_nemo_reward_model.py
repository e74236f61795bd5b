"""Rows of NeMo RL's message logs as responses, and a reward model's grades of them as rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.interop._nemo_text import is_templated, prompt_of
from agentenv.interop._nemo_types import Row, Running, bare, check_on_failure, last_action, options_of
from agentenv.rewards._arguments import is_reward, number
from agentenv.rewards.grading import graded
from agentenv.rewards.models.opening import open_scorer
from agentenv.rewards.models.reward import ModelReward
from agentenv.rewards.models.types import ready
from agentenv.rewards.registry import reward_from
from agentenv.rewards.types import Response, Reward, Status
from agentenv.types import Message

IGNORED = (
    "enabled", "tokenizer", "logprob_batch_size", "offload_optimizer_for_logprob", "resources", "dtensor_cfg",
    "dynamic_batching", "sequence_packing", "max_grad_norm", "generation",
)  # fmt: skip
"""Keys of NeMo RL's reward model environment that mean nothing here: the model's tokenizer is its own, batches are
formed of whatever is asked at a time, and Ray's cluster is not ours to divide."""


@dataclass(frozen=True, slots=True)
class RewardModelOptions:
    """What `env.NAME` of NeMo RL's configuration may hold for a reward model; the first six keys are NeMo RL's."""

    model_name: str | None = None
    """A model's folder or name, or any spec of `agentenv.rewards.models.opening`."""
    checkpoint_path: str | None = None
    """Weights in the place of `model_name`'s."""
    precision: str | None = None
    batch_size: int | None = None
    """Most conversations in one forward pass; a batch of any number is taken."""
    max_model_len: int | None = None
    reward_model_cfg: Mapping[str, Any] = field(default_factory=dict)
    """`reward_model_type` is bradley_terry, the only one."""
    overflow: str | None = None
    """error, left or right: what becomes of longer conversations."""
    rm_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the scorer's constructor."""
    reward: Any = None
    """In place of a model: any reward, as `reward_from` has it."""
    shift: float = 0.0
    scale: float = 1.0
    clip: tuple[float, float] | None = None
    part: str = "final"
    """What of the last answer is judged: `final`, without its thinking, or `all`."""
    on_failure: str = "raise"
    """raise or mask; see `nemo_rl_env`."""
    timeout_s: float = 600.0
    """Longest that one conversation may take."""
    metrics_path: str | None = None
    """As that of an `AgentEnvironment`."""

    def __post_init__(self) -> None:
        """Refuse what none of this can be."""
        check_on_failure(self.on_failure)
        number("env.timeout_s", self.timeout_s, low=0.001)
        kind = self.reward_model_cfg.get("reward_model_type", "bradley_terry")
        if kind != "bradley_terry":
            raise ConfigError(
                f"env.reward_model_cfg: expected the type bradley_terry, got {kind!r}. Use another model."
            )

    @property
    def scorer_args(self) -> dict[str, Any]:
        """Arguments of the scorer's constructor that are given."""
        named = {
            "dtype": self.precision, "max_batch": self.batch_size, "max_length": self.max_model_len,
            "overflow": self.overflow,
        }  # fmt: skip
        return {name: value for name, value in named.items() if value is not None} | dict(self.rm_args)


class RewardRows:
    """Judges the rows of message logs.

    Args:
        config: `RewardModelOptions` by name, and NeMo RL's keys that mean nothing here.
        judge: a reward or a scorer in place of what the configuration names; its owner closes it.
    """

    def __init__(self, config: Mapping[str, Any], judge: Any = None) -> None:
        self.options = options = options_of(RewardModelOptions, config, unused=IGNORED)
        self.counts = {"num_truncated": 0, "num_failed": 0}
        self.rewards = Running()
        self._scorer: Any = None
        if judge is None and options.reward is None:
            name = options.checkpoint_path or options.model_name
            if not name:
                raise ConfigError("env: expected model_name or reward, got neither. Name a reward model.")
            judge = self._scorer = open_scorer(name, **options.scorer_args)
        self._reward = self._as_reward(reward_from(options.reward) if judge is None else judge)
        self._asked: Any = judge
        self._is_ready = False

    def _as_reward(self, judge: Any) -> Reward:
        if callable(getattr(judge, "score", None)) and not hasattr(judge, "grade"):
            shape = self.options
            return ModelReward(judge, shift=shape.shift, scale=shape.scale, clip=shape.clip, part=shape.part)
        is_reward("env.reward", judge, "grade")
        reward: Reward = judge
        return reward

    async def row(self, log: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> Row:
        """The last answer's reward; the row ends.

        Raises:
            ConfigError: there is no such reward model, or it cannot score messages.
            DataError: the conversation is none that can be judged; a template has been at it already, for one.
            InfraError: the reward model failed.
        """
        try:
            if not self._is_ready:
                await ready(self._asked)
                self._is_ready = True
            return await self._row(log, metadata)
        except (ConfigError, DataError, InfraError):
            self.counts["num_failed"] += 1
            raise

    async def _row(self, log: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> Row:
        answer = last_action(log)
        prompt = conversation_of(log, metadata)[:-1]
        label = metadata.get("label", metadata.get("ground_truth"))
        result = await graded(self._reward, Response(answer, label, prompt, metadata), limit_s=self.options.timeout_s)
        if result.reward is None:
            kind = DataError if result.status is Status.LABEL else InfraError
            raise kind(f"reward: expected a number, got {result.status}: {result.detail}")
        self.rewards.add(result.reward)
        self.counts["num_truncated"] += bool(result.components.get("truncated"))
        return Row(f"Environment: {result.reward:g}", result.reward, terminated=True, answer=answer)

    async def close(self) -> None:
        """Free the reward model that was opened here."""
        scorer, self._scorer = self._scorer, None
        if scorer is not None:
            await scorer.close()


def conversation_of(log: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> list[Message]:
    """The conversation of a log in raw messages: `raw_prompt` of its metadata before what was said in the rollout.

    Raises:
        DataError: the prompt is a chat template's text, which the reward model's template would wrap again (#854), and
            there is no `raw_prompt`.
    """
    messages = bare(log)
    asked = prompt_of(log, messages)
    said, raw = messages[len(asked) :], metadata.get("raw_prompt")
    if raw is not None:
        return [*([{"role": "user", "content": raw}] if isinstance(raw, str) else raw), *said]
    templated = next((m["content"] for m in asked if is_templated(m["content"])), None)
    if templated is not None:
        raise DataError(
            f"message_log: expected raw messages, got a chat template's text {templated!r:.120}. Put the messages into "
            "extra_env_info under raw_prompt; NeMo RL's data processors keep only the rendering."
        )
    return [*asked, *said]
