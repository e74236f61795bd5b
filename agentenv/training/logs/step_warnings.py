"""Warnings about a training that cannot learn: the conditions, all in `CONDITIONS`, and when to repeat a warning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentenv.training.config import TrainConfig
from agentenv.training.config_checks import GROUP_ESTIMATORS

Numbers = Mapping[str, float]
"""The numbers of a train step, by the keys of metrics.jsonl. A number that is unknown is missing."""
Check = Callable[[Numbers, TrainConfig], str]
"""Returns the problem and what to do about it; "" if the condition does not hold."""

_REPEAT_AFTER = 10
"""Steps in a row after which a condition is reported again."""
_MAX_KL = 1.0
"""Nats per token. At this divergence the policy samples its tokens e times as often as the reference."""
_MAX_LOGPROB_DIFF = 0.1
"""Nats per token. bfloat16 and different kernels cause about 0.01."""
_MIN_ENTROPY = 0.002
"""Nats per token. Sampling then repeats nearly always the same tokens."""
_MIN_LEARNING_RATE = 1e-10
"""Adam changes a weight by about the learning rate, and float32 weights of 0.01 have steps of 1e-9."""
_LIMITS = {
    "max_length": "--max_length",
    "max_turns": "--max_turns",
    "step_timeout": "--step_timeout_s",
    "episode_timeout": "--episode_timeout_s",
}
"""Stop reasons that a flag sets, and the flag. An environment that ends its own episodes may do so by design."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A sign of a training that cannot learn."""

    check: Check
    show: str = "--worst 3"
    """Flags of `agentenv show` for the episodes that explain it."""
    by_chance: bool = False
    """True if a single step of a training that learns may have it."""


@dataclass(frozen=True, slots=True)
class StepWarning:
    """A condition that holds in a train step."""

    name: str
    """Key in `CONDITIONS`."""
    text: str
    """The problem and what to do about it."""
    show: str
    """Flags of `agentenv show` for the episodes that explain it."""


def check_step(numbers: Numbers, config: TrainConfig) -> list[StepWarning]:
    """Return the conditions that hold in a train step."""
    found = [StepWarning(name, each.check(numbers, config), each.show) for name, each in CONDITIONS.items()]
    return [each for each in found if each.text]


class RepeatedWarnings:
    """Chooses the warnings to show: each at its first step, and again when it has held for ten steps in a row.

    What may hold in a single step by chance is not shown in the middle of a training before the tenth step in a row.
    """

    def __init__(self) -> None:
        self._is_first = True
        self._known: set[str] = set()
        self._in_a_row: Counter[str] = Counter()

    def due(self, found: list[StepWarning]) -> list[StepWarning]:
        """Return those of a step's warnings to show. Call it once for each train step."""
        self._in_a_row = Counter({each.name: self._in_a_row[each.name] + 1 for each in found})
        new = {each.name for each in found if self._is_first or not CONDITIONS[each.name].by_chance} - self._known
        shown = [each for each in found if each.name in new or self._in_a_row[each.name] == _REPEAT_AFTER]
        self._known |= new
        self._is_first = False
        return shown


def _failed(numbers: Numbers, config: TrainConfig) -> str:
    num = numbers.get("rollout/num_rejected_failed", 0.0)
    if num < config.rollout_batch_size:
        return ""
    return (
        f"{num:.0f} tasks were left out because their episodes failed, a step has {config.rollout_batch_size}. "
        "Fix the environment, the engine or the data"
    )


def _constant_reward(numbers: Numbers, config: TrainConfig) -> str:
    if numbers.get("rollout/reward_std") != 0.0 or _turns_differ(numbers, config):
        return ""
    return (
        f"every episode has the reward {numbers['rollout/reward']:.3f}, so nothing is learned. "
        "Check the reward, or use tasks that the model solves sometimes"
    )


def _no_spread(numbers: Numbers, config: TrainConfig) -> str:
    is_flat = numbers.get("rollout/reward/zero_spread_share") == 1.0 and numbers.get("rollout/reward_std") != 0.0
    if config.advantage_estimator not in GROUP_ESTIMATORS or not is_flat or _turns_differ(numbers, config):
        return ""
    return (
        "no task has two episodes with different rewards, so nothing is learned. "
        "Use tasks that the model solves sometimes, or more --n"
    )


def _turns_differ(numbers: Numbers, config: TrainConfig) -> bool:
    """Return True if episodes with equal rewards were learned from because they earned them in different turns."""
    by_turn = config.credit == "turn" and numbers.get("rollout/turns", 1.0) > 1.0
    return by_turn and config.init_kl_coef == 0.0 and numbers.get("train/policy_loss", 0.0) != 0.0


def _zero_gradient(numbers: Numbers, config: TrainConfig) -> str:
    explained = _constant_reward(numbers, config) or _no_spread(numbers, config)
    if explained or numbers.get("train/grad_norm", 1.0) > 0.0:
        return ""
    flag = "--is_correction_threshold" if numbers.get("train/is_rejected") == 1.0 else "--reward_clip_range"
    return f"rewards differ, but the gradient is 0, so nothing is learned. Widen {flag}"


def _no_tokens(numbers: Numbers, config: TrainConfig) -> str:
    if numbers.get("train/num_tokens") != 0.0:
        return ""
    if numbers["train/num_dropped_tokens"] == 0.0:
        return (
            "a constraint forced every token, so nothing is learned. "
            "Loosen the tool_choice, response_format or structural tag of the agent's requests"
        )
    return (
        f"{numbers['train/num_dropped_tokens']:.0f} tokens are left out because the engine returned no log-probability "
        "for them, and no other is left to learn from. Use another engine, or leave --is_correction out"
    )


def _truncated(numbers: Numbers, config: TrainConfig) -> str:
    shares = {reason: numbers.get(f"rollout/stop/{reason}", 0.0) for reason in _LIMITS}
    failed = numbers.get("rollout/stop/error", 0.0)
    if failed == 1.0 or sum(shares.values()) + failed < 1.0 - 1e-9:
        return ""
    most = max(shares, key=lambda reason: shares[reason])
    advice = f"Raise {_LIMITS[most]}, or use shorter tasks"
    if most == "max_turns":
        advice += (
            ". If the environment refuses the actions, say their form in the prompt, or raise --max_tokens if that "
            "cuts them"
        )
    return f"limits cut off every episode, most of them {most}. {advice}"


def _learning_rate(numbers: Numbers, config: TrainConfig) -> str:
    if config.actor_learning_rate >= _MIN_LEARNING_RATE:  # the end of a schedule may be lower
        return ""
    return f"the learning rate {config.actor_learning_rate:g} changes no weight. Raise --actor_learning_rate"


def _kl(numbers: Numbers, config: TrainConfig) -> str:
    if numbers.get("train/kl", 0.0) > _MAX_KL:
        what = f"the KL divergence from the initial model is {numbers['train/kl']:.2g} nats per token"
        return f"{what}. Raise --init_kl_coef, or lower --actor_learning_rate"
    if numbers.get("train/approx_kl", 0.0) > _MAX_KL:
        what = f"the policy moved by {numbers['train/approx_kl']:.2g} nats per token within the step"
        return f"{what}. Lower --actor_learning_rate or --max_epochs"
    return ""


def _logprob_diff(numbers: Numbers, config: TrainConfig) -> str:
    if numbers.get("train/logprob_diff", 0.0) <= _MAX_LOGPROB_DIFF or config.is_correction != "off":
        return ""
    what = f"log-probabilities of engine and learner differ by {numbers['train/logprob_diff']:.2g} nats per token"
    # The engine's belong to the cut distribution, the learner's do not, so a correction is refused with --top_p.
    return f"{what}. " + ("Set --top_p 1" if config.top_p < 1.0 else "Add --is_correction tis")


def _entropy(numbers: Numbers, config: TrainConfig) -> str:
    if numbers.get("train/entropy", 1.0) >= _MIN_ENTROPY:
        return ""
    return (
        f"the entropy is {numbers['train/entropy']:.2g} nats per token, so all samples are nearly the same. "
        "Set --entropy_loss_coef, raise --temperature, or lower --actor_learning_rate"
    )


CONDITIONS: Mapping[str, Condition] = {
    "failed": Condition(_failed, show="--failed"),
    "constant_reward": Condition(_constant_reward, by_chance=True),
    "no_spread": Condition(_no_spread, by_chance=True),
    "zero_gradient": Condition(_zero_gradient),
    "no_tokens": Condition(_no_tokens),
    "truncated": Condition(_truncated),
    "learning_rate": Condition(_learning_rate),
    "kl": Condition(_kl),
    "logprob_diff": Condition(_logprob_diff),
    "entropy": Condition(_entropy),
}
"""By name, which `warnings` in metrics.jsonl holds."""
