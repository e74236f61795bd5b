"""An untrained policy: a Llama with random weights, and a tokenizer of the words of guess_number.

    python examples/make/untrained_model.py runs/untrained --seed 0

Takes seconds. Every number up to --high is one token; byte-level BPE, ChatML; equal arguments produce equal bytes.
The model is not a Qwen2, because transformers 5 gives each of those a tokenizer that splits numbers into digits.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agentenv_envs.guess_number.env import hint_text, invalid_text, rules_text

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PIECES = r"\d+| ?[^\s\d]+|\s"
"""Numbers are split off without the space before them, so that each is one token everywhere."""
INITIAL_STD = 0.1
"""Standard deviation of the weights: about one over the root of the width, so that the input affects the output from
the first step."""


def make_tokenizer(high: int) -> Any:
    """Return a byte-level BPE in which every word of the environment, and every number up to `high`, is one token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    numbers = [str(number) for number in range(high + 1)]
    sentences = ["Guess my number.", rules_text(1, high, 2), hint_text(1, 2), hint_text(2, 1), invalid_text(1, high)]
    texts = [*sentences, "user\n", "assistant\n", *numbers]
    tokenizer = Tokenizer(models.BPE())
    pieces, to_bytes = Regex(PIECES), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pieces, "isolated"), to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=1,
        special_tokens=list(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts * 2, trainer)
    named = {"pad_token": MARKS[0], "eos_token": MARKS[2], "additional_special_tokens": [MARKS[1]]}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=2048, chat_template=CHAT_TEMPLATE, **named
    )


def make_model(tokenizer: Any, *, width: int = 64, num_layers: int = 2, seed: int = 0) -> Any:
    """Return a LlamaForCausalLM for the tokenizer, with weights drawn from the seed; heads are 32 wide."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=INITIAL_STD,
        dtype="float32",
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=ends["eos_token_id"], pad_token_id=ends["pad_token_id"])
    return model


def main() -> None:
    """Write the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--high", type=int, default=15, help="the largest number that is one token")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    args = parser.parse_args()
    tokenizer = make_tokenizer(args.high)
    make_model(tokenizer, seed=args.seed).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
