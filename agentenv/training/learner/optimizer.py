"""AdamW with gradient clipping, a learning rate schedule, and a loss scale for float16."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from agentenv.training.learner.sharding import gather_state, shard_like

if TYPE_CHECKING:
    from agentenv.training.config import Scheduler, TrainConfig

MIN_LR_RATIO = 0.1
"""Final share of the learning rate with cosine_with_min_lr."""
FP16_LOSS_SCALE = 2.0**16


def learning_rate_factor(scheduler: Scheduler, step: int, num_steps: int, *, warmup_ratio: float = 0.0) -> float:
    """Return the factor of the learning rate in train step `step`, from 0, of `num_steps`.

    It rises linearly to 1 over the first `warmup_ratio` of the steps, and is never 0 before the end.
    """
    num_warmup = round(warmup_ratio * num_steps)
    if step < num_warmup:
        return (step + 1) / (num_warmup + 1)
    progress = min(1.0, (step - num_warmup) / max(1, num_steps - num_warmup))
    if scheduler == "constant":
        return 1.0
    if scheduler == "linear":
        return 1.0 - progress
    cosine = (1.0 + math.cos(math.pi * progress)) / 2
    return cosine if scheduler == "cosine" else MIN_LR_RATIO + (1.0 - MIN_LR_RATIO) * cosine


class Optimizer:
    """The parameters of a model and their optimizer."""

    def __init__(self, parameters: Iterable[Tensor], config: TrainConfig, *, peak: float, fp16: bool = False) -> None:
        """Create the optimizer. Weight decay applies to matrices only, not to norms and biases.

        Args:
            parameters: the trained parameters.
            config: all settings except the learning rate.
            peak: the learning rate, to be multiplied by the factor of the schedule.
            fp16: True if gradients are computed in float16 and need a loss scale.
        """
        self.parameters = list(parameters)
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2], "weight_decay": config.l2},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        kept = [group for group in groups if group["params"]]
        self._adam = torch.optim.AdamW(kept, lr=peak, betas=config.adam_betas, fused=True)
        self._peak, self._max_norm = peak, config.max_norm or math.inf
        self._scale = FP16_LOSS_SCALE if fp16 else 1.0

    def clear(self) -> None:
        """Clear the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's part of the loss."""
        (loss * self._scale).backward()  # type: ignore[no-untyped-call]

    def norm(self) -> float:
        """Clip the gradient and return its norm before clipping. Call it once per step."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self._scale != 1.0:
            for gradient in gradients:
                gradient.div_(self._scale)
        norm = clip_grad_norm_(self.parameters, self._max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self, factor: float) -> float:
        """Update the parameters with the clipped gradient and return the learning rate."""
        rate = self._peak * factor
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self.clear()
        return rate

    def lower_scale(self) -> bool:
        """Lower the loss scale and return True if float16 may have overflowed; otherwise return False."""
        if self._scale <= 1.0:
            return False
        self._scale /= 2
        return True

    def state(self) -> dict[str, Any]:
        """Return the state for resuming; with shards, all of it on rank 0."""
        return {"adam": gather_state(self._adam.state_dict()), "scale": self._scale}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a state."""
        parameters = [p for group in self._adam.param_groups for p in group["params"]]
        moments = {
            index: {
                name: shard_like(value, parameters[index]) if value.dim() else value for name, value in each.items()
            }
            for index, each in state["adam"]["state"].items()
        }
        mine = [{name: group[name] for name in ("weight_decay", "betas")} for group in self._adam.param_groups]
        self._adam.load_state_dict({**state["adam"], "state": moments})
        for group, flags in zip(self._adam.param_groups, mine, strict=True):
            group |= flags  # this session's flags, which may differ
        self._scale = state["scale"]
