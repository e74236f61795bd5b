"""Which line of a template wrote what: on every family, and on templates that change what they have written."""

from __future__ import annotations

import copy
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.chat.certify.template_lines import source_line, template_lines, template_source
from agentenv.chat.template import as_parts, probe
from agentenv.errors import ConfigError
from agentenv.testing.tokenizers import CharTokenizer
from tests.chat.families import FAMILIES, ONE_OF_EACH, SUPPORTED, load
from tests.chat.test_families import ANSWER, NEXT, TOOLS, USER, asks, result, says
from tests.runs.tokens.episodes import BY_NAME

CHARACTERS = st.characters(exclude_categories=["Cs", "Co"])
TALK = [says("user", USER), says("assistant", ANSWER), says("user", NEXT)]


def given_to(family, messages=TALK):
    """The tokenizer, and messages and tools in the form that its template takes."""
    tokenizer = load(family)
    template = probe(tokenizer)
    shaped = [as_parts(message) for message in messages] if template.parts else messages
    return tokenizer, shaped, [] if template.needs_tools else None


def lines_of(tokenizer, messages, **kwargs):
    """Each part as (text, line, message), with the rendering they must be parts of."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    emitted = template_lines(tokenizer, messages, **kwargs)
    assert emitted is not None
    assert [part.start for part in emitted] + [len(text)] == [0] + [part.end for part in emitted]
    assert all(part.start < part.end for part in emitted)
    return [(text[part.start : part.end], part.line, part.message) for part in emitted]


def with_template(source, name="Qwen2.5"):
    tokenizer = copy.deepcopy(load(BY_NAME[name]))
    tokenizer.chat_template = source
    return tokenizer


@pytest.mark.parametrize("family", ONE_OF_EACH, ids=lambda f: f.name)
def test_every_kind_of_family_returns_the_message_of_every_content(family):
    tokenizer, messages, tools = given_to(family)
    parts = lines_of(tokenizer, messages, tools=tools, add_generation_prompt=True)
    found = {text: next(message for part, _, message in parts if text in part) for text in (USER, ANSWER, NEXT)}
    assert found == {USER: 0, ANSWER: 1, NEXT: 2}


@pytest.mark.long
def test_every_family_that_renders_a_conversation_gives_lines():
    known = [template_lines(t, m, tools=tools) for f in SUPPORTED for t, m, tools in [given_to(f)]]
    assert (len(FAMILIES), sum(lines is not None for lines in known)) == (91, 89)


@pytest.mark.long
def test_without_the_line_that_is_named_the_answer_is_gone():
    num = 0
    for family in SUPPORTED:
        tokenizer, messages, tools = given_to(family)
        parts = lines_of(tokenizer, messages, tools=tools)
        line = next(line for text, line, _ in parts if ANSWER in text)
        rows = template_source(tokenizer, tools).split("\n")
        without = re.sub(r"\{\{(-?).*?(-?)\}\}", r"{{\1 '' \2}}", rows[line - 1])
        if without == rows[line - 1]:
            continue  # written by more than one row
        rows[line - 1] = without
        kept = tokenizer.apply_chat_template(messages, tokenize=False, tools=tools, chat_template="\n".join(rows))
        assert ANSWER not in kept, family.name
        num += 1
    assert num >= 70


def test_the_lines_of_a_known_template():
    tokenizer = load(BY_NAME["Qwen3"])
    said = [says("user", USER), says("assistant", f"<think>\nhmm\n</think>\n\n{ANSWER}"), says("user", NEXT)]
    parts = lines_of(tokenizer, said, add_generation_prompt=True)
    assert [(line, message) for _, line, message in parts] == [(32, 0), (50, 1), (71, 1), (32, 2), (85, None)]
    assert source_line(tokenizer, 50) == r"{{- '<|im_start|>' + message.role + '\n' + content }}"
    assert parts[-1][0] == "<|im_start|>assistant\n"


def test_variables_of_the_template_change_its_lines():
    tokenizer = load(BY_NAME["Qwen3"])
    parts = lines_of(tokenizer, TALK[:1], add_generation_prompt=True, enable_thinking=False)
    assert parts[-1][0] == "<think>\n\n</think>\n\n"
    assert source_line(tokenizer, parts[-1][1]) == r"{{- '<think>\n\n</think>\n\n' }}"


def test_calls_and_results_belong_to_their_messages_and_tools_to_none():
    tokenizer = load(BY_NAME["Qwen2.5"])
    cycle = [TALK[0], asks(2, as_json=False, content=None), result(1), result(2)]
    parts = lines_of(tokenizer, cycle, tools=TOOLS, add_generation_prompt=True)
    owner = [next(m for text, _, m in parts if wanted in text) for wanted in ("# Tools", ANSWER, "RESULT1", "RESULT2")]
    assert owner == [None, 1, 2, 3]
    closes = [message for text, _, message in parts if "</tool_call>" in text]
    assert closes == [None, 1, 1], "the head explains the syntax, and the nested loop stays in its message"


def test_the_same_message_twice_is_two_messages():
    tokenizer = load(BY_NAME["Qwen2.5"])
    parts = lines_of(tokenizer, [TALK[0], TALK[0]])
    assert [message for text, _, message in parts if USER in text] == [0, 1]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% macro say(x) %}\n{{ x }}\n{% endmacro %}\n{{ say(messages[0].content) }}", [2]),
        ("{% macro say(x) %}\n {{ x }} \n{% endmacro %}\n{{ say(messages[0].content) | trim }}", [4]),
        ("{% macro say(x) %}\n{{ x }}{% endmacro %}\n{{ say(messages[0].content) ~ 'after' }}", [2, 3]),
        ("{% macro in(x) %}\n<{{ caller() | upper }}>{% endmacro %}\n{% call in(1) %}\nabc{% endcall %}", [2, 4]),
        ("\n{% macro in(x) %}{{ caller() | length }}{% endmacro %}\n{% call in(1) %}\nabc{% endcall %}", [1, 3]),
        ("{% set x %}\n{{ messages[0].content }}\n{% endset %}\n{{ x | upper }}", [2]),
        ("{% set x %}\nab{% endset %}\n{% if x | length == 2 %}\n{{ x }}\n{% endif %}", [4]),
        ("{% filter trim %}\n\n {{ messages[0].content }}{% endfilter %}", [1]),
        (
            "{% macro m(x) %} {{ x }} {% endmacro %}{{ m('a') | trim }}\n"
            "{% generation %}\n{{ messages[0].content }}{% endgeneration %}",
            [1, 3],
        ),
        ("one\ntwo\n{{ messages[0].content }}", [1, 2, 3]),
        ("{% generation %}\n{{ messages[0].content }}\n{% endgeneration %}", [2]),
    ],
    ids=[
        "macro",
        "macro changed",
        "macro in a text",
        "called",
        "call measured",
        "block changed",
        "block measured",
        "filtered",
        "generation beside a changed macro",
        "plain rows",
        "generation",
    ],
)
def test_what_is_changed_after_it_was_written_is_of_the_line_that_puts_it_out(source, expected):
    parts = lines_of(with_template(source), TALK[:1])
    assert sorted({line for _, line, _ in parts}) == expected


def test_nothing_is_reported_about_text_with_the_characters_that_marks_are_made_of():
    tokenizer = load(BY_NAME["Qwen2.5"])
    assert template_lines(tokenizer, [says("user", f"a{chr(0xF0001)}b")]) is None
    assert template_lines(tokenizer, [says("user", f"a{chr(0x100002)}b")]) is None
    assert template_lines(tokenizer, [says("user", "a\ue000b")]) is not None


def test_a_tokenizer_without_jinja_has_no_lines():
    assert template_lines(CharTokenizer(), TALK) is None
    assert source_line(CharTokenizer(), 1) == ""


def test_a_refusal_is_the_templates_own():
    unsupported = next(family for family in FAMILIES if family not in SUPPORTED)
    with pytest.raises(Exception, match=r".") as raised:
        template_lines(load(unsupported), TALK)
    assert not isinstance(raised.value, ConfigError)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(family=st.sampled_from(SUPPORTED), contents=st.lists(st.text(CHARACTERS, max_size=20), min_size=1, max_size=5))
def test_the_parts_of_any_conversation_are_its_rendering(family, contents):
    said = [says("user" if index % 2 == 0 else "assistant", text) for index, text in enumerate(contents)]
    tokenizer, messages, tools = given_to(family, said)
    parts = lines_of(tokenizer, messages, tools=tools, add_generation_prompt=True)
    assert {message for _, _, message in parts} <= {None, *range(len(said))}
