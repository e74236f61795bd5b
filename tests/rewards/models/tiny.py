"""Tiny reward models with random weights, made on the spot: no download, half a megabyte, loaded in a moment.

`tiny_rm()` is the one that most tests share: a folder with a Qwen3ForSequenceClassification of one label, and a
byte-level tokenizer with a ChatML template, whose renderings end in "<|im_end|>\\n". Its head is drawn wide: different
texts, and a wrong pooled token, give plainly different scores.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from tests.models import CHATML, SPECIAL_TOKENS, make_tiny_tokenizer

EOS, PAD = SPECIAL_TOKENS.index("<|im_end|>"), SPECIAL_TOKENS.index("<|endoftext|>")
VOCAB_SIZE = 384
BOS_CHATML = "{{ bos_token }}" + CHATML


def make_tiny_rm(
    path: str | Path,
    *,
    num_labels: int = 1,
    pad: int | None = PAD,
    layers: int = 2,
    width: int = 64,
    seed: int = 0,
    max_length: int = 512,
) -> Path:
    """Write a reward model and its tokenizer into `path`, and return it.

    `pad` is the pad token in the model's config: `pad=EOS` is the trap in which transformers' own pooling leaves out
    the last token, None the one in which it refuses batches. The caller's random state is left as it was. `width` is a
    multiple of 64, in heads of 32, as vLLM's CPU kernels want them.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    path = Path(path)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    make_tiny_tokenizer(path, vocab_size=VOCAB_SIZE)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        initializer_range=0.15,
        num_labels=num_labels,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForSequenceClassification(config)
        torch.nn.init.normal_(model.score.weight, std=2.0)
        model.config.pad_token_id = pad  # only now: the weights are the same whichever pads
        model.save_pretrained(path)
    return path


@functools.cache
def tiny_rm(seed: int = 0) -> Path:
    """The folder of a reward model, made once a process and removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-rm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make_tiny_rm(folder / "rm", seed=seed)


def said(answer: str, *, question: str = "What is 12 + 30?", system: str = "") -> list[dict[str, str]]:
    """A conversation of one turn."""
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def tokenizer_with_bos(template: str | None = BOS_CHATML):
    """The tiny tokenizer with "<|endoftext|>" as its BOS, which it puts before what it encodes, as Llama's does."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_rm())
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = template
    return tokenizer
