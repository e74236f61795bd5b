"""The ways to encode and decode that go past transformers' own, against those they stand for."""

from __future__ import annotations

import asyncio
import copy
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


BYTE_LEVEL = [family for kind, family in ONE_OF_EACH_KIND if kind.startswith("byte_bpe")]


@pytest.mark.parametrize("family", BYTE_LEVEL, ids=[family.tokenizer for family in BYTE_LEVEL])
@given(data=st.data())
def test_byte_level_tokens_decode_as_the_tokenizer_decodes_them(family, data):
    tokenizer = load(family)
    known = st.integers(0, len(tokenizer) - 1)
    added = st.sampled_from(sorted(tokenizer.added_tokens_decoder) or [0])
    ids = data.draw(st.lists(known | added | st.integers(len(tokenizer), len(tokenizer) + 5000), max_size=60))
    assert decode_of(tokenizer)(ids) == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)


def test_a_token_that_is_added_later_is_decoded():
    tokenizer = copy.deepcopy(load(BYTE_LEVEL[0]))
    decode, new = decode_of(tokenizer), len(tokenizer)
    assert decode([new]) == ""
    tokenizer.add_tokens(["<｜new é｜>"])
    assert decode([new]) == "<｜new é｜>"


async def test_other_tasks_run_while_a_thread_encodes_a_long_text():
    tokenizer = load(FAMILIES[0])
    encode, text, rounds = encode_of(tokenizer), "word " * 20_000, 0

    def encodes():
        for _ in range(200):
            ids = encode(text, add_special_tokens=False)
            if rounds > 5:
                break
        return ids

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # so that tasks run only while the encoder lets go of the interpreter
    try:
        encoding = asyncio.ensure_future(asyncio.to_thread(encodes))
        while not encoding.done():
            await asyncio.sleep(0.001)
            rounds += 1
    finally:
        sys.setswitchinterval(interval)
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
