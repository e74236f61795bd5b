"""The critic of gae: it predicts the return of the rest of an episode at every action token.

Shapes: B×T a micro-batch's tokens, n its action tokens, s its sequences, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agentenv.engines.models import resolve_model
from agentenv.training.algorithm.batch import MicroBatch
from agentenv.training.learner.packing import separate_packed
from agentenv.training.learner.scoring import autocast, backbone_states, best_attention, open_model, pick_dtype
from agentenv.training.learner.sharding import Ranks, gather_state, shard_like

if TYPE_CHECKING:
    from agentenv.training.config import TrainConfig


class Critic(nn.Module):
    """A model's layers with a linear head. Its weights start at 0, so all initial values are 0."""

    def __init__(self, config: TrainConfig, path: str, *, device: torch.device) -> None:
        """Load the layers from `config.critic_pretrain`, or from the policy's `path`.

        Raises:
            ConfigError: the model cannot be loaded, or does not support packing.
        """
        super().__init__()
        self.device, self._dtype = device, pick_dtype(config.param_dtype, device)
        attention = best_attention(packed=config.packing_samples, device=device, dtype=self._dtype)
        self.backbone: Any = open_model(
            resolve_model(config.critic_pretrain) if config.critic_pretrain else path,
            head=False,
            dtype=torch.float32,
            device=device,
            attention=attention,
        )
        if config.packing_samples:
            separate_packed(self.backbone, dtype=self._dtype)
        if config.gradient_checkpointing:
            self.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.head = nn.Linear(self.backbone.config.get_text_config().hidden_size, 1, device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def shard(self, ranks: Ranks) -> None:
        """Shard the weights over the ranks."""
        ranks.shard(self, dtype=self._dtype, in_float32=[self.head])

    def state(self) -> dict[str, Tensor]:
        """Return all weights; with shards on rank 0."""
        state: dict[str, Tensor] = gather_state(self.state_dict())
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load weights."""
        own = self.state_dict()
        self.load_state_dict(
            {name: shard_like(full, own[name]) if name in own else full for name, full in state.items()}
        )

    def values(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return float32[n], the values before action tokens, and float32[s], after the last one of each sequence."""
        self.train(torch.is_grad_enabled())
        positions = micro.position_ids_BT if micro.packed else None
        values_x: Tensor = self(micro.input_ids_BT, positions, torch.cat([micro.predicts_n, micro.last_s]))
        return values_x[: len(micro.predicts_n)], values_x[len(micro.predicts_n) :]

    def forward(self, input_ids_BT: Tensor, position_ids_BT: Tensor | None, places_x: Tensor) -> Tensor:
        """Return float32[x], the values at some of the B·T places."""
        with autocast(self.device, self._dtype):
            states_xD = backbone_states(self.backbone, input_ids_BT, position_ids_BT)[places_x]
        values_x1: Tensor = self.head(states_xD.float())
        return values_x1[:, 0]
