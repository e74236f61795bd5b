"""Warnings about a training that cannot learn: the conditions, and when to repeat a warning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agentenv.training.config import TrainConfig
from agentenv.training.config_checks import GROUP_ESTIMATORS

Numbers = Mapping[str, float]
"""The numbers of a train step, by the keys of metrics.jsonl. A number that is unknown is missing."""

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
_OF_ROLLOUT = ("rollout/reward_std", "rollout/reward/zero_spread_share")
_BY_CHANCE = ("constant_reward", "no_spread")
"""Conditions that a single step of a training that learns may have."""


@dataclass(frozen=True, slots=True)
class StepWarning:
    """A condition that holds in a train step."""

    name: str
    """Of the condition, which `warnings` in metrics.jsonl holds."""
    text: str
    """The problem and what to do about it."""
    show: str
    """Flags of `agentenv show` for the episodes that explain it."""


def check_step(numbers: Numbers, config: TrainConfig) -> list[StepWarning]:
    """Return the conditions that hold in a train step."""
    found = [*_problems_of_rewards(numbers, config), *_other_problems(numbers, config)]
    return [StepWarning(name, text, "--failed" if name == "failed" else "--worst 3") for name, text in found]


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
        new = {each.name for each in found if self._is_first or each.name not in _BY_CHANCE} - self._known
        shown = [each for each in found if each.name in new or self._in_a_row[each.name] == _REPEAT_AFTER]
        self._known |= new
        self._is_first = False
        return shown


def _problems_of_rewards(numbers: Numbers, config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield names and texts of conditions in which no token gets an advantage."""
    num_failed = numbers.get("rollout/num_rejected_failed", 0.0)
    if num_failed >= config.rollout_batch_size:
        text = (
            f"{num_failed:.0f} tasks were left out because their episodes failed, a step has "
            f"{config.rollout_batch_size}. Fix the environment, the engine or the data"
        )
        yield "failed", text
    # Episodes with equal rewards are learned from if they earned them in different turns.
    by_turn = config.credit == "turn" and numbers.get("rollout/turns", 1.0) > 1.0
    turns_differ = by_turn and config.init_kl_coef == 0.0 and numbers.get("train/policy_loss", 0.0) != 0.0
    is_shaped = "train/reward_std" in numbers  # by penalties: those rewards are trained
    std, flat = ("train/reward_std", "train/zero_spread_share") if is_shaped else _OF_ROLLOUT
    is_constant = numbers.get(std) == 0.0
    is_flat = numbers.get(flat) == 1.0 and config.advantage_estimator in GROUP_ESTIMATORS
    if is_constant and not turns_differ:
        text = (
            f"every episode has the reward {numbers['train/reward' if is_shaped else 'rollout/reward']:.3f}"
            f"{' after the penalties' if is_shaped else ''}, so nothing is learned. "
            "Check the reward, or use tasks that the model solves sometimes"
        )
        yield "constant_reward", text
    elif is_flat and not is_constant and not turns_differ:
        text = (
            "no task has two episodes with different rewards, so nothing is learned. "
            "Use tasks that the model solves sometimes, or more --n"
        )
        yield "no_spread", text
    elif not numbers.get("train/grad_norm", 1.0) > 0.0:
        flag = "--is_correction_threshold" if numbers.get("train/is_rejected") == 1.0 else "--reward_clip_range"
        yield "zero_gradient", f"rewards differ, but the gradient is 0, so nothing is learned. Widen {flag}"
    if numbers.get("train/num_tokens") == 0.0 and numbers["train/num_dropped_tokens"] == 0.0:
        text = (
            "a constraint forced every token, so nothing is learned. "
            "Loosen the tool_choice, response_format or structural tag of the agent's requests"
        )
        yield "no_tokens", text
    elif numbers.get("train/num_tokens") == 0.0:
        text = (
            f"{numbers['train/num_dropped_tokens']:.0f} tokens are left out because the engine returned no "
            "log-probability for them, and no other is left to learn from. Use another engine, or leave "
            "--is_correction out"
        )
        yield "no_tokens", text


def _other_problems(numbers: Numbers, config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield names and texts of conditions of limits, the policy and its learning rate."""
    shares = {reason: numbers.get(f"rollout/stop/{reason}", 0.0) for reason in _LIMITS}
    failed = numbers.get("rollout/stop/error", 0.0)
    if failed != 1.0 and sum(shares.values()) + failed >= 1.0 - 1e-9:
        most = max(shares, key=lambda reason: shares[reason])
        advice = f"Raise {_LIMITS[most]}, or use shorter tasks"
        if most == "max_turns":
            advice += (
                ". If the environment refuses the actions, say their form in the prompt, or raise --max_tokens if that "
                "cuts them"
            )
        yield "truncated", f"limits cut off every episode, most of them {most}. {advice}"
    rate = config.actor_learning_rate
    if rate < _MIN_LEARNING_RATE:  # the end of a schedule may be lower
        yield "learning_rate", f"the learning rate {rate:g} changes no weight. Raise --actor_learning_rate"
    kl, moved = numbers.get("train/kl", 0.0), numbers.get("train/approx_kl", 0.0)
    if kl > _MAX_KL:
        what = f"the KL divergence from the initial model is {kl:.2g} nats per token"
        yield "kl", f"{what}. Raise --init_kl_coef, or lower --actor_learning_rate"
    elif moved > _MAX_KL:
        what = f"the policy moved by {moved:.2g} nats per token within the step"
        yield "kl", f"{what}. Lower --actor_learning_rate or --max_epochs"
    difference = numbers.get("train/logprob_diff", 0.0)
    if difference > _MAX_LOGPROB_DIFF and config.is_correction == "off":
        # The engine's belong to the cut distribution, the learner's do not, so a correction is refused with --top_p.
        advice = "Set --top_p 1" if config.top_p < 1.0 else "Add --is_correction tis"
        what = f"log-probabilities of engine and learner differ by {difference:.2g} nats per token"
        yield "logprob_diff", f"{what}. {advice}"
    entropy = numbers.get("train/entropy", 1.0)
    if entropy < _MIN_ENTROPY:
        text = (
            f"the entropy is {entropy:.2g} nats per token, so all samples are nearly the same. "
            "Set --entropy_loss_coef, raise --temperature, or lower --actor_learning_rate"
        )
        yield "entropy", text
