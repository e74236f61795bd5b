"""Tiny models made on the spot: no download, a few hundred kilobytes, the same bytes for the same arguments."""

from __future__ import annotations

import shutil
from pathlib import Path

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORKER_APART = {"distributed_executor_backend": "mp"}
"""For `engine_args`: vLLM's worker in a process of its own, as on several GPUs and on a CPU. `make test-slow` has it in
the engine's process, as on one GPU, which starts a third faster; some tests set this, so that both ways are tested."""
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = (
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?",
    "The answer is \\boxed{72}. Try again: what is 12 + 30? The answer is \\boxed{42}.",
    "user assistant system the model thinks and then it answers in a box; think, check, and answer again.",
    "She has 5 apples, gives 2 to her friend, and buys 13 more. How many apples does she have now?",
)


def make_tiny_tokenizer(path: Path, *, vocab_size: int = 384) -> None:
    """Write a byte-level BPE tokenizer of exactly `vocab_size` tokens with a ChatML template into `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([f"<extra_{index}>" for index in range(vocab_size - tokenizer.get_vocab_size())])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size: expected at least {tokenizer.get_vocab_size()}, got {vocab_size}. Raise it.")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )
    fast.save_pretrained(path)


def make_tiny_qwen2(
    path: str | Path, *, vocab_size: int = 384, layers: int = 2, width: int = 64, seed: int = 0
) -> Path:
    """Write a Qwen2 with random weights, its tokenizer and its generation config into `path`, and return it.

    The weights are drawn wide, so that the best token is well ahead of the second: greedy tokens do not depend on the
    order in which an engine sums. `width` is a multiple of 64 (two heads of at least 32, as vLLM's CPU kernels want).
    The caller's random state is left as it was.
    """
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    path = Path(path)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    make_tiny_tokenizer(path, vocab_size=vocab_size)
    eos, pad = SPECIAL_TOKENS.index("<|im_end|>"), SPECIAL_TOKENS.index("<|endoftext|>")
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.15,
        eos_token_id=eos,
        pad_token_id=pad,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
        model.save_pretrained(path)
    return path
