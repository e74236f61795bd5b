"""What the learner's tests share: tiny models of many architectures, flags, and batches of made-up episodes."""

from __future__ import annotations

import torch

from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.training.algorithm.batch import build
from agentenv.training.config import TrainConfig

VOCAB = 96
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
GPT = {"vocab_size": VOCAB, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2}
ARCHITECTURES = {
    "qwen2": ("Qwen2", COMMON | {"tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2", COMMON | {"tie_word_embeddings": True}),
    "llama": ("Llama", COMMON),
    "gemma2": ("Gemma2", COMMON | {"final_logit_softcapping": 3.0, "sliding_window": 4}),
    "gemma3": ("Gemma3Text", COMMON | {"final_logit_softcapping": 3.0, "sliding_window": 4}),
    "phi3": ("Phi3", COMMON),
    "cohere": ("Cohere", COMMON | {"logit_scale": 0.25}),
    "granite": ("Granite", COMMON | {"logits_scaling": 4.0}),
    "gpt_neox": ("GPTNeoX", COMMON),
    "gpt2": ("GPT2", GPT | {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}),
    "minicpm3": (
        "MiniCPM3",
        COMMON | {
            "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8, "v_head_dim": 16, "dim_model_base": 8,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        COMMON | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": []},
    ),
    "bloom": ("Bloom", GPT | {"hidden_size": 32, "n_layer": 2, "n_head": 2}),
}  # fmt: skip
SEPARATE_NOT = ("bloom",)
"""Architectures without positions: packed sequences see one another."""


def make_model(folder, name="qwen2", *, seed=0, **changes):
    """Write a tiny random model of an architecture into a folder, and return the folder's name."""
    import transformers

    kind, options = ARCHITECTURES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = getattr(transformers, f"{kind}Config")(**options | changes)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases, which all start alike
                parameter.data += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(folder)
    return str(folder)


def flags(**changes):
    return TrainConfig.from_flags(**{"env": "math_retry", "actor_learning_rate": 1e-2, **changes})


def episode(turns, *, group="g", name="e", prompt=3, stop=StopReason.TERMINATED, seed=0, logprob=-0.5):
    """Turns as (number of tokens, reward), with random tokens; between them two of the environment's."""
    generator = torch.Generator().manual_seed(seed)

    def draw(num):
        return torch.randint(3, VOCAB, (num,), generator=generator).tolist()

    made = Trajectory(Task("?"), 1000, episode_id=name, group_id=group)
    made.append_observation(draw(prompt))
    for index, (num, reward) in enumerate(turns):
        made.append_turn(Completion(tuple(draw(num)), logprobs=(logprob,) * num), "a")
        made.set_result(StepResult(reward=reward))
        if index < len(turns) - 1:
            made.append_observation(draw(2))
    made.finish(stop)
    return made


def batch_of(shapes=None, **options):
    """A batch of episodes in groups of two; by default of six, of all lengths."""
    shapes = shapes or [
        [(3, 0.0), (2, 1.0)], [(4, 0.5)], [(1, 0.0), (2, 0.2), (1, 0.0)], [(6, 1.0)], [(2, 0.0)], [(9, 0.3), (3, 0.0)]
    ]  # fmt: skip
    return build(
        [episode(turns, group=f"g{i // 2}", name=f"e{i}", prompt=2 + i % 3, seed=i) for i, turns in enumerate(shapes)],
        **options,
    )
