"""The learner: one train step from a batch of episodes, and all that a run needs to go on from.

Shapes: N action tokens of a batch, n of a micro-batch, E episodes.

Everything that goes through a model goes through a `Sweep`, one micro-batch after another. What a micro-batch adds is
weighed by `token_weights` of the whole optimiser step: however a batch is split, the step is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentenv.errors import RunStopped
from agentenv.trainer import experience
from agentenv.trainer.batch import Batch, MicroBatch, plain
from agentenv.trainer.corrections import mismatch
from agentenv.trainer.critic import Critic
from agentenv.trainer.losses import PER_TOKEN, token_weights
from agentenv.trainer.objective import Known, Share, critic_share, policy_share
from agentenv.trainer.optimizer import Optimizer, learning_rate_factor
from agentenv.trainer.policy import Layout, Policy
from agentenv.trainer.scoring import be_deterministic, pick_device
from agentenv.trainer.sharding import Ranks
from agentenv.trainer.sweep import Sweep

if TYPE_CHECKING:
    from agentenv.trainer.config import TrainConfig

_MAX_EMPTY = 3
"""Batches in a row that may have nothing to learn from."""


@dataclass(slots=True)
class Totals:
    """Sums of a train step's metrics."""

    sums: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0
    num_skipped: int = 0
    """Steps that were not taken, since float16 overflowed."""
    num_oom_splits: int = 0

    def add(self, numbers: Mapping[str, float]) -> None:
        """Add the numbers of one optimiser step that was taken."""
        self.num_steps += 1
        for name, number in numbers.items():
            self.sums[name] = self.sums.get(name, 0.0) + number

    def numbers(self) -> dict[str, float]:
        """Means over the optimiser steps that were taken, of what is a number; and how many there were."""
        found = {name: total / max(1, self.num_steps) for name, total in self.sums.items()}
        means = {name: value for name, value in found.items() if math.isfinite(value)}
        skipped = {"num_skipped_steps": float(self.num_skipped)} if self.num_skipped else {}
        counts = {"num_oom_splits": float(self.num_oom_splits), "num_optimizer_steps": float(self.num_steps)}
        return means | counts | skipped


class Learner:
    """The policy that is trained, its optimiser, its reference and its critic."""

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
            model: the policy at the very start of training, which is also the reference; `load_state` goes on from it.
            num_train_steps: of the whole run, for the learning rate.
            device: "cuda:0", "cpu"; None: a GPU where there is one.
            ranks: the processes that have this learner together, each its part of every weight.

        Raises:
            ConfigError: a model cannot be loaded, or flags contradict each other.
            MissingDependency: adapters without peft.
        """
        self._config, self._num_train_steps, self._device = config, num_train_steps, pick_device(device)
        if config.full_determinism:
            be_deterministic()
        if config.lora_dropout:
            torch.manual_seed(config.seed)  # the one thing here that draws from the process's generator
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
        self._sweep = Sweep(config, self._device, self._ranks)
        self.num_steps = self._num_empty = 0
        """Train steps that were taken."""
        self.is_whole = True
        """The weights are those after a whole train step: the last one did not end in its middle."""
        self.failed_batch_path: Path | None = None
        """Where a batch is written whose loss or gradient is not finite."""

    # --- a train step ---

    def train_step(self, batch: Batch) -> dict[str, float]:
        """Learn from a batch: `max_epochs` passes over its episodes, in shuffled parts of `optimizer_batch_size`.

        Returns:
            Metrics, means over the optimiser steps; without those that nothing is known of, such as logprob_diff where
            the engine gave no log-probabilities.

        Raises:
            RunStopped: a loss or gradient is not finite, before any weight was changed by it; one sequence alone does
                not fit into memory; or batch after batch has nothing to learn from.
        """
        self._check_trained(batch)
        totals = Totals()
        parts = list(self._parts(batch))
        known = self._look(batch, totals, several=len(parts) > 1)
        for episodes in parts:
            self._optimizer_step(batch, known, episodes, totals)
        trained_N, logprobs_N = batch.trained_N, self._ranks.merged(known.logprobs_N).cpu()
        difference = mismatch(logprobs_N[trained_N], batch.logprobs_N[trained_N])
        metrics = totals.numbers() | ({} if math.isnan(difference) else {"logprob_diff": difference}) | {
            "learning_rate": self._config.actor_learning_rate * self._factor(),
            "num_tokens": float(trained_N.sum()),
            "num_dropped_tokens": float(batch.num_dropped_tokens),
        }  # fmt: skip
        self.num_steps, self.is_whole = self.num_steps + 1, True  # last: what fails before leaves no whole step
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
        """int64 the episodes of each optimiser step, in parts of nearly equal size; nothing of an empty batch."""
        num = len(batch.tokens.group_E)
        count = max(1, round(num / self._config.optimizer_batch_size))
        for _ in range(self._config.max_epochs if bool(batch.trained_N.any()) else 0):
            if count == 1:
                yield torch.arange(num)
            else:
                yield from torch.randperm(num, generator=self._shuffle).tensor_split(count)

    # --- before the first change: old log-probabilities, those of the reference, values ---

    def _look(self, batch: Batch, totals: Totals, *, several: bool) -> Known:
        """Compute what the models say before the step, no more of it than is used, and the advantages."""
        config, everything = self._config, replace(batch, trained_N=torch.ones_like(batch.trained_N))
        nothing_N = torch.full(batch.logprobs_N.shape, torch.nan, device=self._device)
        known = Known(batch.logprobs_N.to(self._device), nothing_N.clone(), nothing_N, nothing_N)
        known.has_old = several or experience.kl_in_reward(config) or self._actor_is_frozen
        after_S = torch.full((len(batch.sequences),), torch.nan, device=self._device)
        if config.init_kl_coef > 0:
            known.ref_logprobs_N = nothing_N.clone()
        if self.critic is not None:
            known.values_N = nothing_N.clone()

        def look(micro: MicroBatch) -> None:
            """Write down what the models say of one micro-batch."""
            if known.has_old:
                known.logprobs_N[micro.index_n] = self.policy.score(micro).logprobs_n
            if known.ref_logprobs_N is not None:
                known.ref_logprobs_N[micro.index_n] = self.policy.reference_logprobs(micro)
            if known.values_N is not None and self.critic is not None:
                known.values_N[micro.index_n], after_S[list(micro.sequences)] = self.critic.values(micro)

        if known.has_old or config.init_kl_coef > 0 or self.critic is not None:
            with torch.no_grad():
                totals.num_oom_splits += self._sweep.run(everything, look)
            known.logprobs_N, after_S = self._ranks.merged(known.logprobs_N), self._ranks.merged(after_S)
            if known.ref_logprobs_N is not None:
                known.ref_logprobs_N = self._ranks.merged(known.ref_logprobs_N)
            if known.values_N is not None:
                known.values_N = self._ranks.merged(known.values_N)
        return self._with_advantages(batch, known, after_S.cpu())

    def _with_advantages(self, batch: Batch, known: Known, after_S: Tensor) -> Known:
        def on_cpu(tensor: Tensor | None) -> Tensor | None:
            """Where the arithmetic is done, in float64."""
            return None if tensor is None else tensor.cpu()

        found = experience.advantages(
            batch,
            self._config,
            logprobs_N=on_cpu(known.logprobs_N) if known.has_old else None,
            ref_logprobs_N=on_cpu(known.ref_logprobs_N),
            values_N=on_cpu(known.values_N),
            bootstrap_E=experience.bootstrap(batch, after_S) if self.critic is not None else None,
        )
        known.advantages_N = found.advantages_N.to(self._device)
        known.returns_N = found.returns_N.to(self._device)
        return known

    # --- one optimiser step ---

    def _optimizer_step(self, batch: Batch, known: Known, episodes: Tensor, totals: Totals) -> None:
        chosen_N = torch.isin(batch.tokens.episode_N, episodes) & batch.trained_N
        if not bool(chosen_N.any()):
            return
        mode, most = experience.aggregation(self._config)
        weights_N = torch.zeros(len(chosen_N))
        weights_N[chosen_N] = token_weights(batch.tokens.episode_N[chosen_N], mode, max_tokens=most)
        weights_N = weights_N.to(self._device)
        sequences = torch.unique(batch.sequence_N[chosen_N]).tolist()
        steps: list[tuple[Optimizer, str]] = []
        sums: dict[str, Tensor] = {}
        if not self._actor_is_frozen:
            loss = policy_share(self.policy, known, weights_N, self._loss_options)
            sums |= self._gradients(batch, sequences, loss, self._adam, totals)
            steps.append((self._adam, "grad_norm"))
        if self.critic is not None:
            loss = critic_share(self.critic, known, weights_N, clip=self._config.value_clip)
            sums |= self._gradients(batch, sequences, loss, self._critic_adam, totals)
            steps.append((self._critic_adam, "critic_grad_norm"))
        numbers = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}
        numbers |= {name: numbers[name] / float(weights_N.sum()) for name in PER_TOKEN if name in numbers}
        numbers |= {name: adam.norm() for adam, name in steps}
        if self._all_finite(batch, known, numbers, steps):
            self.is_whole = False
            for adam, _ in steps:
                adam.step(self._factor())
            totals.add(numbers)
        else:
            totals.num_skipped += 1

    def _gradients(
        self,
        batch: Batch,
        sequences: list[int],
        share: Share,
        adam: Optimizer,
        totals: Totals,
    ) -> dict[str, Tensor]:
        """Add up the gradients and metrics of some sequences."""
        sums: dict[str, Tensor] = {}

        def begin() -> None:
            """Forget what was added up."""
            adam.clear()
            sums.clear()

        def learn(micro: MicroBatch) -> None:
            """Add one micro-batch's share."""
            loss, metrics = share(micro)
            adam.backward(loss * self._ranks.size)  # the ranks' gradients are averaged
            for name, value in metrics.items():
                sums[name] = sums.get(name, torch.zeros((), device=self._device)) + value

        begin()
        totals.num_oom_splits += self._sweep.run(batch, learn, sequences=sequences, begin=begin)
        return self._ranks.totals(sums)

    # --- what can go wrong ---

    def _check_trained(self, batch: Batch) -> None:
        """Count batches in a row in which there is nothing to learn from."""
        self._num_empty = 0 if bool(batch.trained_N.any()) else self._num_empty + 1
        if self._num_empty >= _MAX_EMPTY:
            raise RunStopped(
                f"train step {self.num_steps + 1}: expected action tokens to learn from, got none in {self._num_empty} "
                f"steps in a row, and {batch.num_dropped_tokens} without log-probabilities in this one. Use an engine "
                "that gives them, or leave --is_correction out."
            )

    def _all_finite(
        self, batch: Batch, known: Known, numbers: Mapping[str, float], steps: list[tuple[Optimizer, str]]
    ) -> bool:
        """Whether the step may be taken; False where float16 overflowed and the gradients were cleared.

        Raises:
            RunStopped: something is not finite, and is not float16's doing.
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
            torch.save(plain(batch) | {"known": plain(known)}, self.failed_batch_path)
            where = f" The batch is in {self.failed_batch_path}."
        said = ", ".join(f"{name} {number}" for name, number in wrong.items())
        raise RunStopped(
            f"train step {self.num_steps + 1}: expected a finite loss and gradient, got {said}.{where} No weight was "
            "changed by it: go on with --load_checkpoint, which leaves this batch out, and where that is not enough "
            "with a lower learning rate."
        )

    # --- weights, files, going on ---

    def weights(self, *, layout: Layout = "checkpoint") -> Iterator[tuple[str, Tensor]]:
        """The policy's weights for engines: complete, adapters added in; see `Policy.weights` for the names."""
        return self.policy.weights(layout=layout)

    def save_model(self, folder: Path, tokenizer: Any) -> None:
        """Write the policy in Hugging Face format, which vLLM serves."""
        self.policy.save(folder, tokenizer)

    def state(self) -> dict[str, Any]:
        """All that resuming needs, of types that `torch.load(weights_only=True)` takes; of several ranks, on rank 0.

        The tensors are those in use: write them before the next train step.
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
        """Go on from `state`, in a learner made with the flags and model of the one that gave it.

        Raises:
            ConfigError: the weights are another model's.
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
