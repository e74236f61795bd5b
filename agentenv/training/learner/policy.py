"""The policy: a causal model or its LoRA adapters, its reference, and its weights for engines and files.

And the critic of gae, which predicts the return of the rest of an episode at every action token. Shapes: B×T a
micro-batch's tokens, n its action tokens, s its sequences, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from agentenv.engines.models import resolve_model
from agentenv.errors import ConfigError, MissingDependency
from agentenv.training.algorithm.batch import MicroBatch
from agentenv.training.algorithm.logprobs import Scores
from agentenv.training.learner.scoring import (
    TokenScorer,
    autocast,
    backbone_states,
    best_attention,
    open_model,
    pick_dtype,
    separate_packed,
)
from agentenv.training.learner.sharding import Ranks, gather, gather_state, shard_like

if TYPE_CHECKING:
    from agentenv.training.config import TrainConfig

Layout = Literal["checkpoint", "module"]


class Policy:
    """A trained model.

    Trained weights are float32; bf16 and fp16 are data types of the computation. With adapters the model itself is
    frozen, and on a GPU it is stored in the data type of the computation.
    """

    def __init__(self, config: TrainConfig, path: str, *, device: torch.device) -> None:
        """Load the model, and a frozen copy as the reference if the KL divergence is used.

        Raises:
            ConfigError: the model cannot be loaded, or does not support packing.
            MissingDependency: adapters need peft, which is not installed.
        """
        self.path, self.device, self._dtype = path, device, pick_dtype(config.param_dtype, device)
        frozen = self._dtype if device.type == "cuda" else torch.float32
        attention = best_attention(packed=config.packing_samples, device=device, dtype=self._dtype)
        kept = frozen if config.lora_rank else torch.float32
        self.model = open_model(path, dtype=kept, device=device, attention=attention)
        self._temperature = config.temperature
        if config.packing_samples:
            separate_packed(self.model, dtype=self._dtype)
        self._adapters = _add_adapters(self.model, config) if config.lora_rank else None
        self.scorer = TokenScorer(self.model, dtype=self._dtype, temperature=config.temperature)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._reference: TokenScorer | None = None
        if config.init_kl_coef > 0 and self._adapters is None:
            model = open_model(path, dtype=frozen, device=device, attention=attention).requires_grad_(False).eval()
            if config.packing_samples:
                separate_packed(model, dtype=self._dtype)
            self._reference = TokenScorer(model, dtype=self._dtype, temperature=config.temperature)
        tied = getattr(self.model, "all_tied_weights_keys", None)
        tied = getattr(self.model, "_tied_weights_keys", None) if tied is None else tied
        own = self.model.state_dict()
        # Names that checkpoints leave out because another name has the same tensor.
        self._tied = {
            name
            for name in own.keys() & set(tied or ())
            if any(other != name and tensor.data_ptr() == own[name].data_ptr() for other, tensor in own.items())
        }

    def shard(self, ranks: Ranks) -> None:
        """Shard the weights and the reference over the ranks."""
        for scorer in (self.scorer, self._reference):
            if scorer is not None:
                ranks.shard(scorer, dtype=self._dtype)

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters, each once, by their names in the module."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def computes_in_fp16(self) -> bool:
        """True if gradients are computed in float16."""
        return self._dtype == torch.float16

    def score(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> Scores:
        """Return log-probabilities and entropies of a micro-batch's action tokens.

        Layers are in training mode (dropout, checkpointing) if gradients are enabled.
        """
        self.scorer.train(torch.is_grad_enabled())
        return self.scorer.score(micro, entropy_gradient=entropy_gradient)

    @torch.no_grad()
    def reference_logprobs(self, micro: MicroBatch) -> Tensor:
        """Return float32[n], log-probabilities of the initial model: a copy, or this model without adapters."""
        if self._reference is not None:
            return self._reference.score(micro).logprobs_n
        if self._adapters is None:
            raise ConfigError("Policy: expected a reference, got none. Set --init_kl_coef above 0.")
        with self._adapters.disable_adapter():
            return self.score(micro).logprobs_n

    def weights(self, *, layout: Layout = "checkpoint") -> Iterator[tuple[str, Tensor]]:
        """Yield every weight with its name, adapters merged, tied weights once. The model is not changed.

        With shards, all ranks must iterate: rank 0 gets each weight, the others get empty tensors. On a GPU weights
        have the checkpoint's dtype, which engines use; on a CPU they stay float32.

        Args:
            layout: "checkpoint" for readers of files, such as vLLM; "module" for a model of transformers, where some
                names differ (GPT-NeoX) and the experts of a layer are one tensor.
        """
        if layout == "module" or not getattr(self.model, "_weight_conversions", None):
            yield from self._module_weights()
            return
        from transformers.core_model_loading import revert_weight_conversion

        yield from revert_weight_conversion(self.model, dict(self._module_weights())).items()

    @torch.no_grad()
    def _module_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.model.state_dict().items():
            if ".lora_" in name or name in self._tied:
                continue
            layer_name, _, kind = name.rpartition(".base_layer.")
            if layer_name and kind == "weight":
                delta = self.model.get_submodule(layer_name).get_delta_weight("default")
                tensor = (tensor.float() + delta.float()).to(tensor.dtype)
            tensor = gather(tensor.detach())
            if self.device.type == "cuda" and tensor.is_floating_point():
                tensor = tensor.to(self.model.checkpoint_dtype)
            yield name.replace(".base_layer.", "."), tensor

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Write the weights with configuration and tokenizer in Hugging Face format.

        They equal the engines' weights, so the model scores as in the evaluations.
        """
        from transformers import AutoConfig

        weights = dict(self._module_weights())
        with torch.device("meta"):
            shell = type(self.model)(AutoConfig.from_pretrained(self.path))
        floating = next((t.dtype for t in weights.values() if t.is_floating_point()), torch.float32)
        shell = shell.to(floating)
        shell._weight_conversions = getattr(self.model, "_weight_conversions", None)
        shell.generation_config = self.model.generation_config
        shell.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)

    def state(self) -> dict[str, Tensor]:
        """Return the trained weights: the tensors themselves, or with shards copies on rank 0."""
        state: dict[str, Tensor] = gather_state({name: p.detach() for name, p in self.trained.items()})
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load trained weights.

        Raises:
            ConfigError: they belong to another model.
        """
        trained = self.trained
        if {n: tuple(t.shape) for n, t in state.items()} != {n: tuple(p.shape) for n, p in trained.items()}:
            raise ConfigError(
                f"checkpoint: expected the {len(trained)} trained weights of {self.path}, got others. Use the flags "
                "of the run that wrote it."
            )
        for name, parameter in trained.items():
            parameter.copy_(shard_like(state[name], parameter))


def _add_adapters(model: Any, config: TrainConfig) -> Any:
    """Return peft's wrapper of the model, with new adapters and everything else frozen."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingDependency(f"--lora_rank: expected peft, got {error}. pip install 'agentenv-rl[train]'") from error
    targets = list(config.target_modules)
    options = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        fan_in_fan_out=any(type(layer).__name__ == "Conv1D" for layer in model.modules()),  # GPT-2's linear layers
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            return get_peft_model(model, options)
    except ValueError as error:
        raise ConfigError(
            f"--target_modules: expected modules of the model, got {targets}. Change them ({error})."
        ) from error


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
