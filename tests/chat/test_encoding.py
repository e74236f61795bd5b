"""The ways to encode and decode that go past transformers' own, against those they stand for."""

from __future__ import annotations

import asyncio
import random

import pytest

from agentenv.chat.encoding import decode_of, encode_of
from tests.chat.families import FAMILIES, load

ONE_OF_EACH_KIND = sorted({family.tokenizer: family for family in FAMILIES}.items())
TEXTS = ["", " ", "word", " two  words\n", "naïve ☃ 🙂", "<|im_start|>user\nhi<|im_end|>", "</s><s>", "\ufffd\x00é"]


@pytest.mark.parametrize("family", [f for _, f in ONE_OF_EACH_KIND], ids=[kind for kind, _ in ONE_OF_EACH_KIND])
def test_encoding_and_decoding_are_those_of_transformers(family):
    tokenizer = load(family)
    encode, decode, chance = encode_of(tokenizer), decode_of(tokenizer), random.Random(3)
    for text in TEXTS:
        for special in (False, True):
            assert encode(text, add_special_tokens=special) == tokenizer.encode(text, add_special_tokens=special)
    for _ in range(200):
        ids = [chance.randrange(len(tokenizer)) for _ in range(chance.randrange(1, 40))]
        plain = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert decode(ids) == plain


async def test_other_tasks_run_while_a_thread_encodes_a_long_text():
    tokenizer = load(FAMILIES[0])
    text = "word " * 20_000
    encoding = asyncio.ensure_future(asyncio.to_thread(encode_of(tokenizer), text, add_special_tokens=False))
    rounds = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        rounds += 1
    assert rounds > 5
    assert await encoding == tokenizer.encode(text, add_special_tokens=False)


def test_a_tokenizer_class_with_its_own_way_keeps_it():
    class Loud(type(load(FAMILIES[0]))):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).upper()

        def encode(self, text, **kwargs):
            return [7, *super().encode(text, **kwargs)]

    tokenizer = load(FAMILIES[0])
    ids = tokenizer.encode("word", add_special_tokens=False)
    loud = Loud(tokenizer_object=tokenizer.backend_tokenizer)
    assert decode_of(loud)(ids) == "WORD"
    assert encode_of(loud)("word", add_special_tokens=False) == [7, *ids]


def test_truncation_and_padding_that_the_caller_enabled_are_switched_off_again():
    tokenizer = load(FAMILIES[0])
    encode = encode_of(tokenizer)
    whole = encode("one two three four", add_special_tokens=False)
    try:
        tokenizer("one two three four", truncation=True, max_length=2)
        assert encode("one two three four", add_special_tokens=False) == whole
        tokenizer.backend_tokenizer.enable_padding(length=64)
        assert encode("one two three four", add_special_tokens=False) == whole
    finally:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
