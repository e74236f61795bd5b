"""AdamW with what belongs to it: clipping, the learning rate's course, and a loss scale where gradients are float16."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from agentenv.trainer.sharding import spread, stored

if TYPE_CHECKING:
    from agentenv.trainer.config import Scheduler, TrainConfig

MIN_LR_RATIO = 0.1
"""Of cosine_with_min_lr: what is left of the learning rate at the end."""
FP16_LOSS_SCALE = 2.0**16


def learning_rate_factor(scheduler: Scheduler, step: int, num_steps: int, *, warmup_ratio: float = 0.0) -> float:
    """What the learning rate is multiplied with in train step `step`, from 0, of `num_steps`.

    It rises in equal parts to 1 over the first `warmup_ratio` of the steps, and is never 0 before the end.
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
    """The parameters of one model and what changes them."""

    def __init__(self, parameters: Iterable[Tensor], config: TrainConfig, *, peak: float, fp16: bool = False) -> None:
        """Weight decay is for matrices only: norms and biases have no reason to be small.

        Args:
            parameters: those that are trained.
            config: everything but the learning rate, which the critic has of its own.
            peak: the learning rate that the schedule is a factor of.
            fp16: whether gradients pass through float16, where they need to be larger than they are.
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
        """Forget the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's share of the loss."""
        (loss * self._scale).backward()  # type: ignore[no-untyped-call]

    def norm(self) -> float:
        """The gradient's norm before it was clipped, as it now is; once for a step."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self._scale != 1.0:
            for gradient in gradients:
                gradient.div_(self._scale)
        norm = clip_grad_norm_(self.parameters, self._max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self, factor: float) -> float:
        """Change the parameters by the clipped gradient; the learning rate that was used."""
        rate = self._peak * factor
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self.clear()
        return rate

    def lower_scale(self) -> bool:
        """Whether a gradient that is not finite may be float16's fault: then the next ones are scaled less."""
        if self._scale <= 1.0:
            return False
        self._scale /= 2
        return True

    def state(self) -> dict[str, Any]:
        """What resuming needs; of parameters in shards all of it, on rank 0."""
        return {"adam": stored(self._adam.state_dict()), "scale": self._scale}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        parameters = [p for group in self._adam.param_groups for p in group["params"]]
        moments = {
            index: {name: spread(value, parameters[index]) if value.dim() else value for name, value in each.items()}
            for index, each in state["adam"]["state"].items()
        }
        mine = [{name: group[name] for name in ("weight_decay", "betas")} for group in self._adam.param_groups]
        self._adam.load_state_dict({**state["adam"], "state": moments})
        for group, flags in zip(self._adam.param_groups, mine, strict=True):
            group |= flags  # of this session's flags, which may be others
        self._scale = state["scale"]
