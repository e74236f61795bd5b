"""The policy: a causal model or its low-rank adapters, the reference it may not drift from, and weights for others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from agentenv.errors import ConfigError, MissingDependency
from agentenv.trainer.batch import MicroBatch
from agentenv.trainer.logprobs import Scores
from agentenv.trainer.scoring import TokenScorer, best_attention, check_packing, open_model, pick_dtype
from agentenv.trainer.sharding import Ranks, spread, stored, whole

if TYPE_CHECKING:
    from agentenv.trainer.config import TrainConfig

Layout = Literal["checkpoint", "module"]


class Policy:
    """A model that is trained.

    All its weights are kept in float32 and trained, with bf16 and fp16 as what is computed in; with adapters the model
    itself is frozen, and on a GPU kept in what is computed in.
    """

    def __init__(self, config: TrainConfig, path: str, *, device: torch.device) -> None:
        """Load the model, and a frozen copy as the reference where the KL divergence from it counts.

        Raises:
            ConfigError: the model cannot be loaded, or cannot be packed where that is asked for.
            MissingDependency: adapters without peft.
        """
        self.path, self.device, self._dtype = path, device, pick_dtype(config.param_dtype, device)
        frozen = self._dtype if device.type == "cuda" else torch.float32
        attention = best_attention(packed=config.packing_samples, device=device, dtype=self._dtype)
        kept = frozen if config.lora_rank else torch.float32
        self.model = open_model(path, dtype=kept, device=device, attention=attention)
        self._temperature = config.temperature
        if config.packing_samples:
            vocab_size = self.model.get_input_embeddings().num_embeddings
            check_packing(self.model.base_model, dtype=self._dtype, vocab_size=vocab_size)
        self._adapters = _add_adapters(self.model, config) if config.lora_rank else None
        self.scorer = TokenScorer(self.model, dtype=self._dtype, temperature=config.temperature)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._reference: TokenScorer | None = None
        if config.init_kl_coef > 0 and self._adapters is None:
            model = open_model(path, dtype=frozen, device=device, attention=attention).requires_grad_(False).eval()
            self._reference = TokenScorer(model, dtype=self._dtype, temperature=config.temperature)
        own = self.model.state_dict()
        self._tied = {name for name in own if _is_tied(self.model, name, own)}

    def shard(self, ranks: Ranks) -> None:
        """Leave this rank its part of the weights, and of the reference's."""
        for scorer in (self.scorer, self._reference):
            if scorer is not None:
                ranks.shard(scorer, dtype=self._dtype)

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """What the optimiser changes, each once, by the names of this module tree."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def computes_in_fp16(self) -> bool:
        """Whether gradients pass through float16."""
        return self._dtype == torch.float16

    def score(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> Scores:
        """Log-probabilities and entropies of a micro-batch's action tokens, with a gradient where one is recorded.

        Layers that differ between training and use (adapters' dropout, checkpointing) are in training when it is.
        """
        self.scorer.train(torch.is_grad_enabled())
        return self.scorer.score(micro, entropy_gradient=entropy_gradient)

    @torch.no_grad()
    def reference_logprobs(self, micro: MicroBatch) -> Tensor:
        """float32[n] of the model as it was at the start: a copy of it, or this one without its adapters."""
        if self._reference is not None:
            return self._reference.score(micro).logprobs_n
        if self._adapters is None:
            raise ConfigError("Policy: expected a reference, got none. Set --init_kl_coef above 0.")
        with self._adapters.disable_adapter():
            return self.score(micro).logprobs_n

    def weights(self, *, layout: Layout = "checkpoint") -> Iterator[tuple[str, Tensor]]:
        """Every weight under its name, adapters added in, tied ones once; nothing here is changed.

        Of weights in shards rank 0 gets each in turn, while all ranks go through them; the others get empty ones.

        On a GPU they have the checkpoint's dtype, which is what engines compute in; on a CPU they stay float32.

        Args:
            layout: "checkpoint" for what reads files, such as vLLM; "module" for another model of transformers, which
                has other names for a few (GPT-NeoX), and the experts of a layer in one tensor.
        """
        if layout == "module" or not getattr(self.model, "_weight_conversions", None):
            yield from self._module_weights()
            return
        from transformers.core_model_loading import revert_weight_conversion

        yield from revert_weight_conversion(self.model, dict(self._module_weights())).items()

    def _module_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.model.state_dict().items():
            if ".lora_" in name or name in self._tied:
                continue
            yield name.replace(".base_layer.", "."), self._merged(name, tensor.detach())

    @torch.no_grad()
    def _merged(self, name: str, tensor: Tensor) -> Tensor:
        layer_name, _, kind = name.rpartition(".base_layer.")
        if layer_name and kind == "weight":
            layer = self.model.get_submodule(layer_name)
            tensor = (tensor.float() + layer.get_delta_weight("default").float()).to(tensor.dtype)
        tensor = whole(tensor)
        if self.device.type == "cuda" and tensor.is_floating_point():
            return tensor.to(self.model.checkpoint_dtype)
        return tensor

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Write what `weights` gives, with configuration and tokenizer, in the format of Hugging Face.

        It is what engines have, so it scores as it did in the evaluations.
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
        """The trained weights; the tensors are those that go on being trained, of those in shards copies on rank 0."""
        found: dict[str, Tensor] = stored({name: p.detach() for name, p in self.trained.items()})
        return found

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put trained weights back.

        Raises:
            ConfigError: they are another model's.
        """
        trained = self.trained
        if {n: tuple(t.shape) for n, t in state.items()} != {n: tuple(p.shape) for n, p in trained.items()}:
            raise ConfigError(
                f"checkpoint: expected the {len(trained)} trained weights of {self.path}, got others. Give the flags "
                "of the run that wrote it."
            )
        for name, parameter in trained.items():
            parameter.copy_(spread(state[name], parameter))


def _add_adapters(model: Any, config: TrainConfig) -> Any:
    """The model's own wrapper of peft, with new adapters in its layers and everything else frozen."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingDependency(f"--lora_rank: expected peft, got {error}. pip install 'peft>=0.15'") from error
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


def _is_tied(model: Any, name: str, own: Mapping[str, Tensor]) -> bool:
    """Whether another name holds the same tensor and this one is not in a checkpoint."""
    tied = getattr(model, "all_tied_weights_keys", None)
    tied = getattr(model, "_tied_weights_keys", None) if tied is None else tied
    if name not in (tied or ()):
        return False
    return any(other != name and tensor.data_ptr() == own[name].data_ptr() for other, tensor in own.items())
