"""Chat deltas: one close of every turn, the template's own ids, and never an action tokenized again."""

import copy
import re

import pytest

from agentenv.chat.chat import Chat
from agentenv.errors import ConfigError
from agentenv.testing.tokenizers import ByteFallbackTokenizer, CharTokenizer, MergingTokenizer
from tests.chat.families import BY_NAME, load

USER = [{"role": "user", "content": "again"}]
HEADER = "<|im_start|>assistant\n"
NEXT = f"\n<|im_start|>user\nagain<|im_end|>\n{HEADER}"
CLOSE = "<|im_end|>"


@pytest.fixture(params=[CharTokenizer, MergingTokenizer, ByteFallbackTokenizer])
def chat(request):
    return Chat(request.param())


# --- the template's own ids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "one", "a<|im_start|>b", "  \n\n12", "é🙂"])
def test_text_is_encoded_as_it_is(chat, text):
    assert chat.prompt(text) == chat.reply(chat.encode("x"), text) == chat.encode(text)
    assert chat.decode(chat.encode(text)) == text


def test_invariant_13_the_beginning_of_a_sequence_comes_once_and_first():
    tokenizer = copy.deepcopy(load(BY_NAME["Qwen2.5"]))
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    chat = Chat(tokenizer)
    ids = chat.prompt(USER)
    for text in ("one" + CLOSE, "two"):
        action = chat.encode(text)
        ids += action + chat.reply(action, USER)
    assert [i for i, token in enumerate(ids) if token == tokenizer.bos_token_id] == [0]


# --- tokenizers without a template, templates that refuse -----------------------------------------------------------


class Templateless(CharTokenizer):
    chat_template = None


def test_a_tokenizer_without_a_template_speaks_in_paragraphs():
    chat = Chat(Templateless())
    assert not chat.has_template
    assert (
        chat.decode(chat.prompt([{"role": "system", "content": "S"}, *USER]))
        == "System: S\n\nUser: again\n\nAssistant:"
    )
    assert chat.decode(chat.reply(chat.encode(" fine"), USER)) == "\n\nUser: again\n\nAssistant:"
    assert chat.render(USER) == "User: again\n\nAssistant:"


@pytest.mark.parametrize(
    "render",
    [
        lambda messages: "".join(m["content"] for m in messages if m["role"] != "assistant"),
        lambda messages: "".join(m["content"] * 2 for m in messages),
        lambda messages: "".join(m["content"].lower() for m in messages),
    ],
    ids=["drops", "doubles", "rewrites"],
)
def test_a_template_that_does_not_keep_the_assistants_text_once_is_refused(render):
    class Odd(CharTokenizer):
        def apply_chat_template(self, conversation, **_):
            return render(conversation)

    chat = Chat(Odd())
    with pytest.raises(ConfigError, match=re.escape("keep the assistant's text once")):
        chat.reply(chat.encode("x"), USER)


# --- ids to text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "shown"),
    [
        ("fine" + CLOSE, "fine"),
        ("fine", "fine"),
        (CLOSE, ""),
        ("", ""),
        (f"a{CLOSE}b", f"a{CLOSE}b"),
        (CLOSE * 2, CLOSE),
    ],
)
def test_the_text_of_an_action_lacks_its_one_final_terminator(chat, sampled, shown):
    assert chat.action_text(chat.encode(sampled)) == shown


def test_a_stop_token_of_the_request_is_a_terminator_too():
    chat = Chat(CharTokenizer())
    ids = chat.encode("42;")
    assert (chat.action_text(ids), chat.action_text(ids, [ids[-1]])) == ("42;", "42")


def test_a_tokenizer_without_an_end_of_sequence_works():
    class Endless(CharTokenizer):
        eos_token_id = None

    chat = Chat(Endless())
    assert chat.decode(chat.reply(chat.encode("x"), USER)) == CLOSE + NEXT
