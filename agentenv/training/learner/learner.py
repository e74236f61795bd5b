"""The learner: a train step on a batch of episodes, and the state for resuming.

Shapes: N action tokens of a batch, n of a micro-batch, E episodes, S sequences.

A `MicroBatchRunner` runs all forward and backward passes, one micro-batch after another. Losses have the
`token_weights` of the whole optimizer step, so the step does not depend on how a batch is split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentenv.engines.hf.torch_settings import NUM_TORCH_THREADS
from agentenv.errors import RunStopped
from agentenv.training.algorithm import experience
from agentenv.training.algorithm.batch import Batch, LearnedTokens, MicroBatch, to_cpu_dict
from agentenv.training.algorithm.corrections import mismatch
from agentenv.training.algorithm.losses import (
    PER_TOKEN,
    LossOptions,
    PolicyInputs,
    kl_estimate,
    policy_loss,
    token_weights,
    value_loss,
)
from agentenv.training.learner.micro_batches import MicroBatchRunner
from agentenv.training.learner.optimizer import Optimizer, learning_rate_factor
from agentenv.training.learner.policy import Critic, Layout, Policy
from agentenv.training.learner.sharding import Ranks

if TYPE_CHECKING:
    from agentenv.training.config import TrainConfig

_MAX_EMPTY = 3
"""Training stops after this many batches in a row without tokens to learn from."""

MicroLoss = Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""Function from a micro-batch to its part of the step's loss, with gradient, and of its metrics."""


@dataclass(slots=True, eq=False)
class TokenState:
    """The state of action tokens during a train step; float32[N] on the learner's device."""

    rollout_logprobs_N: Tensor
    """Of the engine; NaN if missing."""
    logprobs_N: Tensor
    """Of the policy before the step; NaN before they are computed."""
    advantages_N: Tensor
    returns_N: Tensor
    values_N: Tensor | None = None
    """Of the critic before the step."""
    ref_logprobs_N: Tensor | None = None
    has_old: bool = False
    """True if a separate pass computed `logprobs_N`; otherwise the only optimizer step fills it."""


@dataclass(slots=True)
class Totals:
    """Sums of metrics over a train step."""

    sums: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0
    num_skipped: int = 0
    """Optimizer steps that were skipped because float16 overflowed."""
    num_oom_splits: int = 0

    def add(self, numbers: Mapping[str, float]) -> None:
        """Add the numbers of an optimizer step."""
        self.num_steps += 1
        for name, number in numbers.items():
            self.sums[name] = self.sums.get(name, 0.0) + number

    def numbers(self) -> dict[str, float]:
        """Return finite means over the optimizer steps, and counts."""
        means = {name: total / max(1, self.num_steps) for name, total in self.sums.items()}
        means = {name: value for name, value in means.items() if math.isfinite(value)}
        skipped = {"num_skipped_steps": float(self.num_skipped)} if self.num_skipped else {}
        counts = {"num_oom_splits": float(self.num_oom_splits), "num_optimizer_steps": float(self.num_steps)}
        return means | counts | skipped


def policy_micro_loss(policy: Policy, known: TokenState, weights_N: Tensor, options: LossOptions) -> MicroLoss:
    """Return the policy's loss function. `weights_N` comes from `token_weights`, 0 outside of the optimizer step."""

    def micro_loss(micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        scores = policy.score(micro, entropy_gradient=options.entropy_coef != 0.0)
        at, weights_n = micro.index_n, weights_N[micro.index_n]
        if not known.has_old:  # in the only optimizer step these are the log-probabilities before it
            known.logprobs_N[at] = scores.logprobs_n.detach()
        ref_n = None if known.ref_logprobs_N is None else known.ref_logprobs_N[at]
        inputs = PolicyInputs(
            scores.logprobs_n,
            known.logprobs_N[at],
            known.advantages_N[at],
            weights_n,
            micro.sequence_n,
            rollout_logprobs_n=known.rollout_logprobs_N[at],
            ref_logprobs_n=ref_n,
            entropy_n=scores.entropy_n,
        )
        loss, metrics = policy_loss(inputs, options)
        if ref_n is not None:
            kl_n = kl_estimate(scores.logprobs_n.detach(), ref_n, options.kl_estimator)
            metrics["kl"] = (weights_n * kl_n).sum()
        return loss, metrics | {"loss": loss.detach()}

    return micro_loss


def critic_micro_loss(critic: Critic, known: TokenState, weights_N: Tensor, *, clip: float) -> MicroLoss:
    """Return the critic's loss function, with the same weights."""

    def micro_loss(micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert known.values_N is not None
        at = micro.index_n
        values_n, _ = critic.values(micro)
        loss_n = value_loss(values_n, known.values_N[at], known.returns_N[at], clip=clip)
        loss = (weights_N[at] * loss_n).sum()
        return loss, {"value_loss": loss.detach()}

    return micro_loss


class Learner:
    """The trained policy with its optimizer, reference and critic."""

    def __init__(
        self,
        config: TrainConfig,
        model: str,
        *,
        num_train_steps: int,
        device: str | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Load the models.

        Args:
            config: the flags.
            model: the initial policy, which is also the reference.
            num_train_steps: train steps of the whole run, for the learning rate.
            device: "cuda:0" or "cpu". None uses a GPU if one is available.
            ranks: the processes that share this learner, each with a shard of every weight.

        Raises:
            ConfigError: a model cannot be loaded, or flags contradict each other.
            MissingDependency: adapters need peft, which is not installed.
        """
        self._config, self._num_train_steps = config, num_train_steps
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if config.lora_dropout:
            torch.manual_seed(config.seed)  # dropout draws from the process's generator
        self._ranks = ranks or Ranks()
        self.policy = Policy(config, model, device=self._device)
        self.policy.shard(self._ranks)
        fp16 = self.policy.computes_in_fp16
        self._adam = Optimizer(self.policy.trained.values(), config, peak=config.actor_learning_rate, fp16=fp16)
        self.critic: Critic | None = None
        if config.advantage_estimator == "gae":
            self.critic = Critic(config, model, device=self._device)
            self.critic.shard(self._ranks)
            self._critic_adam = Optimizer(self.critic.parameters(), config, peak=config.critic_learning_rate, fp16=fp16)
        self._loss_options = experience.loss_options(config)
        self._shuffle = torch.Generator().manual_seed(config.seed)
        self._runner = MicroBatchRunner(config, self._device, self._ranks)
        self.num_steps = 0
        """Train steps taken."""
        self._num_empty = 0
        self.step_completed = True
        """False while a train step has changed some of the weights and not all."""
        self.failed_batch_path: Path | None = None
        """File for a batch with a loss or gradient that is not finite."""
        self.learned: LearnedTokens | None = None
        """Of the last train step."""

    # --- a train step ---

    def train_step(self, batch: Batch) -> dict[str, float]:
        """Learn from a batch: `max_epochs` passes over its episodes, in shuffled parts of `optimizer_batch_size`.

        Returns:
            Metrics, as means over the optimizer steps. Unknown ones are left out, such as logprob_diff if the engine
            returned no log-probabilities.

        Raises:
            RunStopped: a loss or gradient is not finite (it changed no weight), a single sequence does not fit into
                memory, or several batches in a row had no tokens to learn from.
        """
        self._num_empty = 0 if bool(batch.trained_N.any()) else self._num_empty + 1
        if self._num_empty >= _MAX_EMPTY:
            raise RunStopped(
                f"train step {self.num_steps + 1}: expected action tokens to learn from, got none in {self._num_empty} "
                f"steps in a row, {int(batch.forced_N.sum())} that a constraint forced and {batch.num_dropped_tokens} "
                "without log-probabilities in this one. Loosen the constraint, or use an engine that returns "
                "log-probabilities, or leave --is_correction out."
            )
        torch.set_num_threads(NUM_TORCH_THREADS)
        totals = Totals()
        parts = list(self._parts(batch))
        known = self._score_batch(batch, totals, several=len(parts) > 1)
        for episodes in parts:
            self._optimizer_step(batch, known, episodes, totals)
        trained_N, logprobs_N = batch.trained_N, self._ranks.merge(known.logprobs_N).cpu()
        same_N = trained_N & ~batch.constrained_N  # tokens whose two log-probabilities should be equal
        difference = mismatch(logprobs_N[same_N], batch.logprobs_N[same_N])
        metrics = totals.numbers() | experience.reward_numbers(batch, self._config)
        metrics |= ({} if math.isnan(difference) else {"logprob_diff": difference}) | {
            "learning_rate": self._config.actor_learning_rate * self._factor(),
            "num_tokens": float(trained_N.sum()),
            "num_dropped_tokens": float(batch.num_dropped_tokens),
        }  # fmt: skip
        self.learned = LearnedTokens(known.advantages_N.cpu(), logprobs_N.masked_fill(~trained_N, math.nan))
        self.num_steps, self.step_completed = self.num_steps + 1, True  # last, so that a failure before leaves it False
        return metrics

    @property
    def _actor_is_frozen(self) -> bool:
        return self.num_steps < self._config.freezing_actor_steps

    def _factor(self) -> float:
        config = self._config
        return learning_rate_factor(
            config.lr_scheduler, self.num_steps, self._num_train_steps, warmup_ratio=config.lr_warmup_ratio
        )

    def _parts(self, batch: Batch) -> Iterator[Tensor]:
        """Yield int64 indices of the episodes of each optimizer step, in parts of nearly equal size."""
        num = len(batch.tokens.group_E)
        count = max(1, round(num / self._config.optimizer_batch_size))
        for _ in range(self._config.max_epochs if bool(batch.trained_N.any()) else 0):
            shuffled = torch.arange(num) if count == 1 else torch.randperm(num, generator=self._shuffle)
            yield from shuffled.tensor_split(count)

    # --- before the first change: log-probabilities of policy and reference, values, advantages ---

    def _score_batch(self, batch: Batch, totals: Totals, *, several: bool) -> TokenState:
        """Compute log-probabilities and values before the step, as far as they are used, and the advantages."""
        config, everything = self._config, replace(batch, trained_N=torch.ones_like(batch.trained_N))
        nothing_N = torch.full(batch.logprobs_N.shape, torch.nan, device=self._device)
        known = TokenState(batch.logprobs_N.to(self._device), nothing_N.clone(), nothing_N, nothing_N)
        known.has_old = several or experience.kl_in_reward(config) or self._actor_is_frozen
        after_S = torch.full((len(batch.sequences),), torch.nan, device=self._device)
        if config.init_kl_coef > 0:
            known.ref_logprobs_N = nothing_N.clone()
        if self.critic is not None:
            known.values_N = nothing_N.clone()

        def look(micro: MicroBatch) -> None:
            if known.has_old:
                known.logprobs_N[micro.index_n] = self.policy.score(micro).logprobs_n
            if known.ref_logprobs_N is not None:
                known.ref_logprobs_N[micro.index_n] = self.policy.reference_logprobs(micro)
            if known.values_N is not None and self.critic is not None:
                known.values_N[micro.index_n], after_S[list(micro.sequences)] = self.critic.values(micro)

        if known.has_old or config.init_kl_coef > 0 or self.critic is not None:
            with torch.no_grad():
                totals.num_oom_splits += self._runner.run(everything, look)
            known.logprobs_N, after_S = self._ranks.merge(known.logprobs_N), self._ranks.merge(after_S)
            if known.ref_logprobs_N is not None:
                known.ref_logprobs_N = self._ranks.merge(known.ref_logprobs_N)
            if known.values_N is not None:
                known.values_N = self._ranks.merge(known.values_N)

        def on_cpu(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.cpu()  # advantages are computed there, in float64

        estimated = experience.advantages(
            batch,
            self._config,
            logprobs_N=on_cpu(known.logprobs_N) if known.has_old else None,
            ref_logprobs_N=on_cpu(known.ref_logprobs_N),
            values_N=on_cpu(known.values_N),
            bootstrap_E=experience.bootstrap(batch, after_S.cpu()) if self.critic is not None else None,
        )
        known.advantages_N = estimated.advantages_N.to(self._device)
        known.returns_N = estimated.returns_N.to(self._device)
        return known

    # --- an optimizer step ---

    def _optimizer_step(self, batch: Batch, known: TokenState, episodes: Tensor, totals: Totals) -> None:
        chosen_N = torch.isin(batch.tokens.episode_N, episodes) & batch.trained_N
        if not bool(chosen_N.any()):
            return
        mode, limit = experience.aggregation(self._config)
        weights_N = torch.zeros(len(chosen_N))
        weights_N[chosen_N] = token_weights(batch.tokens.episode_N[chosen_N], mode, limit_tokens=limit)
        weights_N = weights_N.to(self._device)
        sequences = torch.unique(batch.sequence_N[chosen_N]).tolist()
        steps: list[tuple[Optimizer, str]] = []
        sums: dict[str, Tensor] = {}
        if not self._actor_is_frozen:
            loss = policy_micro_loss(self.policy, known, weights_N, self._loss_options)
            sums |= self._gradients(batch, sequences, loss, self._adam, totals)
            steps.append((self._adam, "grad_norm"))
        if self.critic is not None:
            loss = critic_micro_loss(self.critic, known, weights_N, clip=self._config.value_clip)
            sums |= self._gradients(batch, sequences, loss, self._critic_adam, totals)
            steps.append((self._critic_adam, "critic_grad_norm"))
        numbers = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}
        numbers |= {name: numbers[name] / float(weights_N.sum()) for name in PER_TOKEN if name in numbers}
        numbers |= {name: adam.norm() for adam, name in steps}
        if self._all_finite(batch, known, numbers, steps):
            self.step_completed = False
            for adam, _ in steps:
                adam.step(self._factor())
            totals.add(numbers)
        else:
            totals.num_skipped += 1

    def _gradients(
        self,
        batch: Batch,
        sequences: list[int],
        micro_loss: MicroLoss,
        adam: Optimizer,
        totals: Totals,
    ) -> dict[str, Tensor]:
        """Accumulate gradients and return the sums of metrics of some sequences."""
        sums: dict[str, Tensor] = {}

        def begin() -> None:
            adam.clear()
            sums.clear()

        def learn(micro: MicroBatch) -> None:
            loss, metrics = micro_loss(micro)
            adam.backward(loss * self._ranks.size)  # the ranks' gradients are averaged
            for name, value in metrics.items():
                sums[name] = sums.get(name, torch.zeros((), device=self._device)) + value

        begin()
        totals.num_oom_splits += self._runner.run(batch, learn, sequences=sequences, begin=begin)
        return self._ranks.sum_over_ranks(sums)

    # --- checks ---

    def _all_finite(
        self, batch: Batch, known: TokenState, numbers: Mapping[str, float], steps: list[tuple[Optimizer, str]]
    ) -> bool:
        """Return True if all numbers are finite, False if float16 overflowed and the gradients were cleared.

        Raises:
            RunStopped: a number is not finite for another reason.
        """
        wrong = {name: number for name, number in numbers.items() if not math.isfinite(number)}
        if not wrong:
            return True
        norms = {name for _, name in steps}
        overflowed = wrong.keys() <= norms and all(a.lower_scale() for a, name in steps if name in wrong)
        for adam, _ in steps:
            adam.clear()
        if overflowed:
            return False
        where = ""
        if self.failed_batch_path is not None:
            self.failed_batch_path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(to_cpu_dict(batch) | {"known": to_cpu_dict(known)}, self.failed_batch_path)
            where = f" The batch is in {self.failed_batch_path}."
        got = ", ".join(f"{name} {number}" for name, number in wrong.items())
        raise RunStopped(
            f"train step {self.num_steps + 1}: expected a finite loss and gradient, got {got}.{where} It changed no "
            "weight. Resume with --resume, which leaves this batch out; if it happens again, lower the "
            "learning rate."
        )

    # --- weights and state ---

    def weights(self, *, layout: Layout = "checkpoint") -> Iterator[tuple[str, Tensor]]:
        """Yield all of the policy's weights for engines, with adapters merged; see `Policy.weights` for the names."""
        return self.policy.weights(layout=layout)

    def save_model(self, folder: Path, tokenizer: Any) -> None:
        """Write the policy in Hugging Face format."""
        self.policy.save(folder, tokenizer)

    def state(self) -> dict[str, Any]:
        """Return the state for resuming, in types for `torch.load(weights_only=True)`; with several ranks on rank 0.

        The tensors are not copies: write them before the next train step.
        """
        state: dict[str, Any] = {
            "num_steps": self.num_steps,
            "policy": self.policy.state(),
            "optimizer": self._adam.state(),
            "shuffle": self._shuffle.get_state(),
            "rng": {"cpu": torch.get_rng_state()},
        }
        if self._device.type == "cuda":
            state["rng"]["cuda"] = torch.cuda.get_rng_state(self._device)
        if self.critic is not None:
            state |= {"critic": self.critic.state(), "critic_optimizer": self._critic_adam.state()}
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, in a learner with the same flags and model.

        Raises:
            ConfigError: the weights belong to another model.
        """
        self.policy.load_state(state["policy"])
        self._adam.load_state(state["optimizer"])
        if self.critic is not None:
            self.critic.load_state(state["critic"])
            self._critic_adam.load_state(state["critic_optimizer"])
        self._shuffle.set_state(state["shuffle"].cpu())
        torch.set_rng_state(state["rng"]["cpu"].cpu())
        if self._device.type == "cuda" and "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"].cpu(), self._device)
        self.num_steps = state["num_steps"]
