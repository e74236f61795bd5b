"""Chat deltas: one close of every turn, the template's own ids, and never an action tokenized again."""

import copy
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.chat.chat import Chat
from agentenv.errors import ConfigError
from agentenv.testing.tokenizers import ByteFallbackTokenizer, CharTokenizer, MergingTokenizer
from tests.models import make_tiny_tokenizer

USER = [{"role": "user", "content": "again"}]
HEADER = "<|im_start|>assistant\n"
NEXT = f"\n<|im_start|>user\nagain<|im_end|>\n{HEADER}"
CLOSE = "<|im_end|>"
CLASSES = {"char": CharTokenizer, "merging": MergingTokenizer, "bytes": ByteFallbackTokenizer}

plain = st.text(st.characters(codec="utf-8", exclude_characters="<|"), max_size=10) | st.sampled_from(
    ["1234", "\n\n", " the "]
)
conversations = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "system"]), "content": plain}),
    min_size=1,
    max_size=3,
)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A real byte-level BPE tokenizer, trained on the spot, with a ChatML template."""
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("bpe")
    make_tiny_tokenizer(path)
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(params=[*CLASSES, "bpe"])
def chat(request):
    tokenizer = CLASSES[request.param]() if request.param in CLASSES else request.getfixturevalue("bpe")
    return Chat(tokenizer)


def everything(chat, action, reply):
    return chat.decode([*action, *reply])


# --- one close, whatever ended the action -------------------------------------------------------------------------


@pytest.mark.long
def test_a_stopped_action_is_not_closed_again(chat):
    action = chat.encode("fine" + CLOSE)
    assert chat.decode(chat.reply(action, USER)) == NEXT


def test_a_cut_action_is_closed(chat):
    assert chat.decode(chat.reply(chat.encode("fin"), USER)) == CLOSE + NEXT


def test_an_action_that_ended_at_a_stop_string_is_closed(chat):
    assert chat.decode(chat.reply(chat.encode("x</answer>"), USER)) == CLOSE + NEXT


def test_an_action_of_the_terminator_alone_is_closed_once(chat):
    assert chat.decode(chat.reply(chat.encode(CLOSE), USER)) == NEXT


def test_a_close_in_the_middle_of_a_cut_action_does_not_count(chat):
    action = chat.encode(f"one{CLOSE}two")
    assert chat.decode(chat.reply(action, USER)) == CLOSE + NEXT


def test_a_foreign_terminator_stands_for_the_close(bpe):
    chat = Chat(bpe)
    action = [*chat.encode("fine"), bpe.convert_tokens_to_ids("<|endoftext|>")]
    assert chat.decode(chat.reply(action, USER)) == NEXT


def test_a_special_token_that_opens_a_turn_is_not_a_terminator():
    chat = Chat(CharTokenizer())
    action = chat.encode("fine<|im_start|>")
    assert chat.decode(chat.reply(action, USER)) == CLOSE + NEXT


@pytest.mark.long
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=plain, tail=st.sampled_from(["", CLOSE]), messages=conversations)
def test_invariant_8_there_is_exactly_one_close_between_an_action_and_the_next_header(chat, text, tail, messages):
    action = chat.encode(text + tail)
    between, found, _ = everything(chat, action, chat.reply(action, messages)).partition("<|im_start|>")
    assert found
    assert between == f"{text}{CLOSE}\n"


# --- the template's own ids ---------------------------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=conversations, turns=st.lists(st.tuples(plain, conversations), min_size=1, max_size=3))
def test_canonical_actions_produce_the_ids_of_the_whole_conversation(chat, first, turns):
    ids, messages = chat.prompt(first), list(first)
    for text, reply in turns:
        action = chat.encode(text + CLOSE)
        ids += action + chat.reply(action, reply)
        messages += [{"role": "assistant", "content": text}, *reply]
    whole = chat.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.decode(ids) == whole
    if not isinstance(chat.tokenizer, MergingTokenizer):  # it merges over the special tokens' newlines, others do not
        assert ids == chat.encode(whole)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=conversations)
def test_invariant_14_prompts_and_replies_end_where_the_assistant_begins(chat, messages):
    assert chat.decode(chat.prompt(messages)).endswith("\n" + HEADER)
    assert chat.decode(chat.reply(chat.encode("x"), messages)).endswith("\n" + HEADER)


@pytest.mark.long
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(one=plain, other=plain, messages=conversations, tail=st.sampled_from(["end", CLOSE]))
def test_invariant_10_a_reply_does_not_depend_on_the_history(chat, one, other, messages, tail):
    end = chat.encode(tail)
    assert chat.reply([*chat.encode(one), *end], messages) == chat.reply([*chat.encode(other), *end], messages)


@pytest.mark.long
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=conversations, text=plain)
def test_invariant_16_messages_and_action_are_only_read(chat, messages, text):
    action = chat.encode(text)
    before = copy.deepcopy((messages, action))
    chat.reply(action, messages)
    chat.prompt(messages)
    assert (messages, action) == before


def test_invariant_11_two_messages_in_one_reply_have_one_generation_prompt(chat):
    reply = chat.decode(chat.reply(chat.encode("x"), [*USER, *USER]))
    assert reply.count(HEADER) == 1


@pytest.mark.parametrize("text", ["", "one", "a<|im_start|>b", "  \n\n12", "é🙂"])
def test_text_is_encoded_as_it_is(chat, text):
    assert chat.prompt(text) == chat.reply(chat.encode("x"), text) == chat.encode(text)
    assert chat.decode(chat.encode(text)) == text


def test_no_messages_add_nothing(chat):
    assert chat.reply(chat.encode("x"), []) == []


def test_invariant_13_the_beginning_of_a_sequence_comes_once_and_first(bpe):
    tokenizer = copy.deepcopy(bpe)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = "{{ bos_token }}" + bpe.chat_template
    chat = Chat(tokenizer)
    ids = chat.prompt(USER)
    for text in ("one" + CLOSE, "two"):
        action = chat.encode(text)
        ids += action + chat.reply(action, USER)
    assert [i for i, token in enumerate(ids) if token == tokenizer.bos_token_id] == [0]


# --- content --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", ["qzSENTINELqz", "a qzSENTINELqz b", "qzSENTINELqzqzSENTINELqz", "qzSENTINELqz" + "z" * 9]
)
def test_content_that_holds_the_sentinel_is_content_like_any_other(chat, content):
    reply = chat.reply(chat.encode("fine" + CLOSE), [{"role": "user", "content": content}])
    assert chat.decode(reply) == NEXT.replace("again", content)


def test_content_of_a_nested_message_may_hold_the_sentinel():
    class Parts(CharTokenizer):
        def apply_chat_template(self, conversation, **options):
            flat = [
                m | {"content": m["content"] if isinstance(m["content"], str) else m["content"][0]["text"]}
                for m in conversation
            ]
            return super().apply_chat_template(flat, **options)

    chat = Chat(Parts())
    message = {"role": "user", "content": [{"type": "text", "text": "qzSENTINELqz"}]}
    assert chat.decode(chat.reply(chat.encode(CLOSE), [message])) == NEXT.replace("again", "qzSENTINELqz")


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


def test_a_template_that_refuses_a_role_says_so_in_its_own_words(bpe):
    tokenizer = copy.deepcopy(bpe)
    refusal = (
        "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('Only user and assistant roles!') }}{% endif %}"
    )
    tokenizer.chat_template = refusal + bpe.chat_template
    chat, tool = Chat(tokenizer), [{"role": "tool", "content": "7"}]
    with pytest.raises(ConfigError, match=r"got roles \['tool'\]: Only user and assistant roles!"):
        chat.prompt(tool)
    with pytest.raises(ConfigError, match=r"got roles \['user', 'assistant', 'tool'\]: Only user"):
        chat.reply(chat.encode("x"), tool)


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
