"""Small tokenizers of the kinds that real families use, trained here on `corpus.txt`: the same ids each time.

| kind | as in | what it does |
|---|---|---|
| byte_bpe | Qwen without its NFC, Tekken | byte-level BPE, digits one by one |
| byte_bpe_nfc | Qwen | the same, and text is composed (NFC) first |
| byte_bpe_digits | Llama 3, DeepSeek, o200k | byte-level BPE, digits in threes |
| byte_gpt2 | GPT-2, Granite | byte-level BPE, GPT-2's split |
| spm_legacy | Llama 2, Mistral 7B | SentencePiece BPE, a dummy space at the start and after every added token |
| spm_none | Gemma | SentencePiece BPE, no dummy space, newlines merge |
| byte_fallback | Yi, Llama 2 with `legacy=False` | SentencePiece BPE, a dummy space at the start only |

`decode(encode(x)) == x` for every kind, but for: byte_bpe_nfc, which composes; spm_legacy, which shows the dummy space
as a space after each added token; byte_fallback, which loses the first space of a text that begins with one; the three
SentencePiece kinds, for which a literal `▁` is a space; and added tokens with `lstrip` or `rstrip`, which swallow the
whitespace beside them. Ids out of the middle of a text lose their leading space in spm_legacy and byte_fallback.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any, Literal

Kind = Literal["byte_bpe", "byte_bpe_nfc", "byte_bpe_digits", "byte_gpt2", "spm_legacy", "spm_none", "byte_fallback"]
VOCAB_SIZE = 2048
UNKNOWN = "<unk>"
CORPUS = (Path(__file__).parent / "corpus.txt").read_text(encoding="utf-8")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def trained(kind: Kind) -> str:
    """The trained tokenizer of one kind, as the JSON that `Tokenizer.from_str` reads."""
    tokenizer = _byte_level(kind) if kind.startswith("byte_") and kind != "byte_fallback" else _sentencepiece(kind)
    return str(tokenizer.to_str())


def _byte_level(kind: Kind) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    if kind == "byte_gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        split = Regex(_SPLIT.replace("DIGITS", "{1,3}" if kind == "byte_bpe_digits" else ""))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(split, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if kind == "byte_bpe_nfc":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, min_frequency=1, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    return tokenizer


def _sentencepiece(kind: Kind) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    words = r" ?[^ \n\d]+|\d| +" if kind != "spm_none" else r"[)}\].]?\n+| ?[^ \n\d]+|\d| +"
    pieces = [word.replace(" ", "▁") for word in re.findall(words, CORPUS)]
    learner = Tokenizer(models.BPE())
    learner.train_from_iterator(
        pieces, trainers.BpeTrainer(vocab_size=VOCAB_SIZE - 257, min_frequency=1, show_progress=False)
    )
    model = json.loads(learner.to_str())["model"]
    fixed = [UNKNOWN, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: i for i, token in enumerate([*fixed, *sorted(model["vocab"], key=model["vocab"].__getitem__)])}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(UNKNOWN, special=True, normalized=False)])
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "spm_legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind == "spm_none":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(undo if kind == "spm_none" else [*undo, decoders.Strip(" ", 1, 0)])
    return tokenizer
