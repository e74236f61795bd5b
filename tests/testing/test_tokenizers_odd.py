"""The public test tokenizers: what each does wrong on purpose, and that the loop is right on all of them."""

import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.chat.chat import Chat
from agentenv.testing.tokenizers import (
    BosTokenizer,
    ByteFallbackTokenizer,
    CharTokenizer,
    LongPromptTokenizer,
    MergingTokenizer,
    OpenEndedTokenizer,
    RewritingTokenizer,
)

ALL = [
    CharTokenizer, MergingTokenizer, ByteFallbackTokenizer, RewritingTokenizer, LongPromptTokenizer,
    OpenEndedTokenizer, BosTokenizer,
]  # fmt: skip
TALK = [
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "<think>hm</think>\n\nA"},
    {"role": "user", "content": "again"},
]
odd_texts = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im", "_end|>", "abc", "ab", "12", "  ", "\n\n", "é", "日", "😀"])
    | st.text(max_size=5)
).map("".join)


@pytest.mark.long
@pytest.mark.parametrize("made", ALL)
@settings(deadline=None, max_examples=40)
@given(text=odd_texts)
def test_encoded_text_decodes_to_the_text(made, text):
    tokenizer = made()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == re.sub(
        "|".join(map(re.escape, tokenizer.specials)) or r"(?!)", "", text
    )


def test_encoding_looks_at_a_text_once():
    class Counted(str):
        looked = 0

        def __getitem__(self, key):
            Counted.looked += 1
            return super().__getitem__(key)

    CharTokenizer().encode(Counted("x" * 1000))
    assert Counted.looked == 0  # slicing the rest of the text for every character is what made it quadratic
    assert len(MergingTokenizer().encode("abc" * 200_000)) == 200_000


@pytest.mark.parametrize("made", ALL)
def test_it_can_be_sent_elsewhere(made):
    again = pickle.loads(pickle.dumps(made()))
    assert again.encode("<|im_end|>é") == made().encode("<|im_end|>é")


def rendered(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, **options)


def test_reasoning_of_earlier_turns_is_rewritten():
    tokenizer = RewritingTokenizer()
    assert "hm" in rendered(tokenizer, TALK[:2])
    assert not rendered(tokenizer, TALK).startswith(rendered(tokenizer, TALK[:2]))
    assert "R" in Chat(tokenizer).template.codes


def test_the_generation_prompt_is_several_tokens_that_vanish_from_history():
    tokenizer = LongPromptTokenizer()
    asked = rendered(tokenizer, TALK[:1], add_generation_prompt=True)
    assert asked.endswith("<|im_start|>assistant\n<think>\n")
    assert not rendered(tokenizer, [*TALK[:1], {"role": "assistant", "content": "A"}]).startswith(asked)
    assert "G" in Chat(tokenizer).template.codes


def test_nothing_closes_a_turn():
    template = Chat(OpenEndedTokenizer()).template
    assert template.close_ids == ()
    assert set("tc") <= set(template.codes)


def test_bos_comes_from_both_the_template_and_the_encoding():
    tokenizer = BosTokenizer()
    assert tokenizer.encode(rendered(tokenizer, TALK[:1]))[:2] == [2, 2]
    assert Chat(tokenizer).prompt(TALK[:1]).count(2) == 1
