"""The text of each token: joined it is the decoded text, characters are never torn, and nothing stays invisible."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.chat.token_text import escaped, token_texts, visible
from agentenv.testing.tokenizers import ByteFallbackTokenizer, CharTokenizer, MergingTokenizer
from tests.chat.families import FAMILIES, load
from tests.runs.tokens.episodes import BY_NAME

PIECES = ("日本", "😀", "é", "a b", "  x", "\n", "<|im_end|>", "م", "𝔘", "</s>", "<think>", " ", "\t")
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8).map("".join)


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.long
def test_joined_texts_are_the_decoded_text_on_every_family():
    @settings(max_examples=400, deadline=None)
    @given(family=st.sampled_from(FAMILIES), text=texts)
    def check(family, text):
        tokenizer = load(family)
        ids = tokenizer.encode(text, add_special_tokens=False)
        found = token_texts(tokenizer, ids)
        assert len(found) == len(ids)
        assert "".join(found) in (decoded(tokenizer, ids), " " + decoded(tokenizer, ids))

    check()


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(seed=st.randoms(use_true_random=False), size=st.integers(0, 40))
def test_joined_texts_of_any_byte_level_ids_are_the_decoded_text(seed, size):
    tokenizer = load(BY_NAME["Qwen2.5"])
    ids = [seed.randrange(len(tokenizer)) for _ in range(size)]
    assert "".join(token_texts(tokenizer, ids)) == decoded(tokenizer, ids)


@pytest.mark.parametrize("kind", [CharTokenizer, MergingTokenizer, ByteFallbackTokenizer])
def test_tokenizers_that_are_not_hugging_faces_are_read_too(kind):
    tokenizer = kind()
    ids = tokenizer.encode("the é🙂 1234<|im_end|>\n")
    assert "".join(token_texts(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_character_of_several_tokens_is_of_the_one_that_completes_it():
    tokenizer = load(BY_NAME["Qwen2.5"])
    ids = [i for byte in "é😀".encode() for i in tokenizer.convert_tokens_to_ids([byte_token(byte)])]
    assert token_texts(tokenizer, ids) == ["", "é", "", "", "", "😀"]
    assert token_texts(tokenizer, ids[:4]) == ["", "é", "", "�"], "cut within a character"


def byte_token(byte):
    """GPT-2's printable stand-in for a byte."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in own else chr(256 + [b for b in range(256) if b not in own].index(byte))


def test_many_torn_bytes_do_not_wait_for_each_other():
    tokenizer = load(BY_NAME["Qwen2.5"])
    [lead] = tokenizer.convert_tokens_to_ids([byte_token(0xE6)])
    found = token_texts(tokenizer, [lead] * 100)
    assert "".join(found) == "�" * 100
    assert max(map(len, found)) <= 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "⋯"),
        ("  a b ", "··a b "),
        ("a\n\nb", "a↵\n↵\nb"),
        ("\t", "⇥"),
        ("\x1b[31m", "\\u{1b}[31m"),
        ("\u202e", "\\u{202e}"),
        ("\r", "\\u{d}"),
        ("é日😀", "é日😀"),
        ("\ufffd", "�"),
    ],
)
def test_invisible_characters_are_made_visible(text, expected):
    assert visible(text) == expected


@pytest.mark.long
@given(st.text())
def test_no_text_steers_a_terminal(text):
    assert all(character.isprintable() or character == "\n" for character in escaped(text) + visible(text))
