"""Tools: every template's own calls read back, whatever else a model writes answered, and no call that was not made."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import json
import subprocess
import sys
import time
from dataclasses import replace
from datetime import date
from enum import Enum, StrEnum

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from agentenv._util.lenient_json import LiteralError, read_literal, read_whole_literal
from agentenv.chat.chat import Chat
from agentenv.chat.message_dialogue import MessageDialogue
from agentenv.chat.template import as_parts, probe, render
from agentenv.chat.tool_calls.messages import assistant_message, result_message
from agentenv.core import tool_schemas
from agentenv.core.messages import normalized, without_nulls
from agentenv.core.tool_schemas import Parameter
from agentenv.errors import ConfigError, ContractError, InfraError
from agentenv.tools.arguments import read_arguments
from agentenv.tools.calling import (
    MalformedCall,
    ParsedAction,
    ToolCall,
    ToolFormat,
    answer_calls,
    run_calls,
    tool_format,
)
from agentenv.tools.schemas import schema_of
from tests.chat.families import BY_NAME, SUPPORTED, load, stop_ids
from tests.damage import nested

HERMES = ToolFormat()


def template_of(family):
    return probe(load(family), stop_ids(family))


@functools.cache
def format_of(family):
    return tool_format(load(family), stop_ids(family))


KINDS = {
    "json": [
        "Qwen2.5", "Qwen3", "Qwen3 (TRL patch)", "Qwen3-2507", "Qwen3-VL", "Hermes-2-Pro", "Hermes-3", "Llama-3.1",
        "Llama-3.2", "Llama-4", "Mistral v0.3", "Mistral v2v3 (axolotl)", "Mistral-Nemo", "xLAM",
        "Inkling", "Mistral-Small (no close of the user)", "Command-A-tools", "EXAONE-4", "Jamba-1.6",
    ],
    "named": [
        "Mistral-Small-3.2", "DeepSeek-V3", "DeepSeek-R1", "DeepSeek-V3.1", "gpt-oss", "Kimi-K2-Thinking",
        "Functionary-2.2",
    ],
    "markup": [
        "Qwen3.5-think", "Qwen3.5-nothink", "Qwen3.6", "Qwen3-Coder", "MiniCPM5", "Onyx",
        "DeepSeek-V3.2", "GLM-4.5", "GLM-5.1", "GLM-5.1 (SentencePiece)", "Nemotron-3-Nano", "MiniMax-M2", "Seed-OSS",
    ],
    "keywords": ["MiniCPM3", "Gemma4", "Gemma4 (TRL)", "LFM2.5"],
}  # fmt: skip
CALLING = [family for family in SUPPORTED if any(family.name in names for names in KINDS.values())]
STRINGS_ONLY = {"Gemma4", "LFM2.5"}
"""Their templates write every value between quotes: without a schema all of them are strings."""
UNESCAPED = {"LFM2.5": "'\\", "Gemma4": "", "Gemma4 (TRL)": ""}
"""What strings cannot hold, as the template does not escape it."""
every_calling = pytest.mark.parametrize("family", CALLING, ids=lambda f: f.name)
one_of_each_form = pytest.mark.parametrize("family", [BY_NAME[name] for name in (
    "Qwen2.5", "Llama-3.1", "Mistral-Nemo", "xLAM", "Mistral-Small-3.2", "DeepSeek-V3", "gpt-oss", "Functionary-2.2",
    "Qwen3.5-think", "DeepSeek-V3.2", "GLM-4.5", "MiniMax-M2", "MiniCPM3", "Gemma4", "LFM2.5",
)], ids=lambda f: f.name)  # fmt: skip


def as_call(family, index, name, arguments):
    syntax = format_of(family)
    call_id = f"functions.{name}:{index}" if syntax.id_is_name else f"callid{index:03d}"
    given = json.dumps(arguments, ensure_ascii=False) if syntax.arguments_as_json else arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


@functools.cache
def prompt_of(family, today):
    """Some templates write the date."""
    tools = [schema_of(lookup)] if template_of(family).needs_tools else None
    messages = [{"role": "user", "content": "Look it up."}]
    return render(load(family), [as_parts(m) if family.parts else m for m in messages], tools=tools)


def action(family, calls, content=""):
    """What the policy would have written for the template to render these calls: behind the generation prompt."""
    answer = {
        "role": "assistant",
        "content": content,
        "tool_calls": [as_call(family, i, *c) for i, c in enumerate(calls)],
    }
    messages = [{"role": "user", "content": "Look it up."}, answer]
    tools = [schema_of(lookup)] if template_of(family).needs_tools else None
    text = render(load(family), [as_parts(m) if family.parts else m for m in messages], gen=False, tools=tools)
    prompt, close = prompt_of(family, date.today()), format_of(family).reasoning_close
    start = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(prompt))
    while start < len(prompt) and text[start - 1] in "<|｜":  # half a tag of a generation prompt that history drops
        start -= 1
    said = text[start:].removesuffix("\n")
    return said if not close or said.lstrip().startswith(close) else close + said


def found_in(parsed):
    return [(call.name, dict(call.arguments)) for call in parsed.calls]


def lookup(q: str, limit: int = 3) -> str:
    """Look something up.

    Args:
        q: What.
        limit: How many results.
    """
    return f"{q}:{limit}"


# --- round trips -----------------------------------------------------------------------------------------------------


def test_every_family_that_renders_calls_has_a_known_kind():
    found = {}
    for family in SUPPORTED:
        if any("tool" in shape for shape in family.shapes) and template_of(family).calls:
            found.setdefault(format_of(family).kind, []).append(family.name)
    assert found == KINDS


@pytest.mark.parametrize("name", ["Qwen1.5", "SmolLM3", "Llama-3", "gpt2 (no roles)"])
def test_a_template_without_calls_takes_hermes_form(name):
    syntax = format_of(BY_NAME[name])
    text = f'{syntax.reasoning_close}<tool_call>\n{{"name": "f", "arguments": {{"a": 1}}}}\n</tool_call>'
    assert syntax.kind == "plain"
    assert found_in(syntax.parse(text)) == [("f", {"a": 1})]


def test_calls_that_nothing_closes_are_read():
    call = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
    syntax = format_of(BY_NAME["DeepSeek-R1-Distill"])
    assert found_in(syntax.parse(f"{syntax.reasoning_close}<｜tool▁calls▁begin｜>{call}")) == [("f", {"a": 1})]


def test_an_answer_that_is_a_list_of_calls_is_read_and_another_list_is_text():
    syntax = format_of(BY_NAME["xLAM"])
    assert found_in(syntax.parse('[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]')) == [
        ("f", {"a": 1}),
        ("g", {}),
    ]
    for text in ("[]", "[1, 2]", '[{"name": "Rome"}]', '["f"]', "[INST]"):
        assert syntax.parse(text) == ParsedAction(text)
    assert found_in(syntax.parse('[{"name": "f", "arguments": {}}, {"name": "g"}]')) == [("f", {}), ("g", {})]
    (odd,) = syntax.parse('[{"name": "f", "arguments": {}}, 3]').items
    assert isinstance(odd, MalformedCall)


def test_the_key_of_a_templates_arguments_is_read_where_the_answer_is_only_a_list():
    syntax = replace(format_of(BY_NAME["xLAM"]), arguments_key="args")
    assert found_in(syntax.parse('[{"name": "f", "args": {"a": 1}}]')) == [("f", {"a": 1})]


def test_an_object_is_read_by_the_key_of_its_template_behind_the_name_of_its_tool():
    syntax = format_of(BY_NAME["Inkling"])
    said = 'f<|invoke|>{"name":"f","args":{"a":1}}<|end_message|><|model|>g<|invoke|>{"name":"g","args":{}}'
    assert found_in(syntax.parse(said)) == [("f", {"a": 1}), ("g", {})]


def test_strings_with_markup_come_back_from_cdata():
    family = BY_NAME["MiniCPM5"]
    tags = 'x</param><param name="e">y</function><function name="g">'
    arguments = {"a": "x <b>\n& y", "b": "<![CDATA[", "c": "3", "d": tags}
    said = action(family, [("f", arguments)])
    assert "<![CDATA[x <b>" in said
    (cut,) = format_of(family).parse(said[: said.index("y</function>")]).items
    assert isinstance(cut, MalformedCall)
    assert found_in(format_of(family).parse(said)) == [("f", {**arguments, "c": 3})]


def test_text_that_the_template_addresses_like_a_call_is_not_a_call():
    syntax = format_of(BY_NAME["Onyx"])
    for text in ("Fine.", "Copy with dd if=a to=b, or range(from=1, to=2), goto=3."):
        assert syntax.parse(f" to=user<|message|>{text}").items == ()


def test_the_error_about_a_call_holds_no_sign_of_its_own():
    (malformed,) = format_of(BY_NAME["Onyx"]).parse(" to=f<|message|>x").items
    assert "NAME" in malformed.problem
    assert malformed.problem.isascii()


TEXTS = st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from(
    ['"', "\\", "\n", "a\nb", "{", "}", "</tool_call>", "<tool_call>", '{"name": "x", "arguments": {}}', "]", "é😀",
     "'", "", "<think>", "</think>", "[TOOL_CALLS]", "<|tool_call_start|>", "</parameter>", "\\u0041", " x "]
)  # fmt: skip
NUMBERS = st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False, width=32)
SCALARS = TEXTS | NUMBERS | st.booleans() | st.none()
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3), max_leaves=6)
NAMES = st.from_regex(r"[a-z][a-zA-Z0-9_]{0,10}", fullmatch=True)
OTHER_NAMES = NAMES.filter(lambda name: name not in ("all", "functions"))


def calls_of(values):
    arguments = st.dictionaries(NAMES, values, max_size=3)
    return st.lists(st.tuples(OTHER_NAMES, arguments), min_size=1, max_size=2)


def fits(family, calls):
    return len(calls) == 1 or format_of(family).parallel


JSON_LIKE = [f for f in CALLING if f.name in (*KINDS["json"], *KINDS["named"], "MiniCPM3")]


@pytest.mark.long
@given(family=st.sampled_from(JSON_LIKE), calls=calls_of(VALUES))
@settings(max_examples=1_000, deadline=None)
def test_if_arguments_are_json_any_value_comes_back(family, calls):
    assume(fits(family, calls))
    parsed = format_of(family).parse(action(family, calls))
    assert found_in(parsed) == calls
    assert parsed.malformed == ()


def markup_text(family):
    """Strings that markup can hold: not its own tags, nor line breaks at the ends, which templates or models strip."""
    tags = [t for f in (format_of(family),) for t in (f.value_close.strip(), f.call_open.strip(), f.section_open) if t]
    return TEXTS.filter(lambda text: not any(tag in text for tag in [*tags, "<tool_call>"]) and text == text.strip())


@pytest.mark.long
@given(family=st.sampled_from([BY_NAME[name] for name in KINDS["markup"]]), data=st.data())
@settings(max_examples=500, deadline=None)
def test_in_markup_strings_come_back_as_the_schema_has_them(family, data):
    calls = data.draw(calls_of(markup_text(family)))
    tools = [{"function": {"name": name, "parameters": schema_for(arguments)}} for name, arguments in calls]
    assume(len({name for name, _ in calls}) == len(calls))
    parsed = format_of(family).parse(action(family, calls), tools=tools)
    assert found_in(parsed) == calls
    assert parsed.malformed == ()


def schema_for(arguments):
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return {"type": "object", "properties": {k: {"type": kinds.get(type(v), "null")} for k, v in arguments.items()}}


TYPED = {
    "a": 3,
    "b": -1.5,
    "c": True,
    "d": [1, "x", None],
    "e": {"f": {"g": [False]}},
    "h": "3",
    "i": "true",
    "j": None,
}


@every_calling
def test_calls_with_values_of_every_type_and_without_any_come_back(family):
    chat = Chat(load(family), stop_token_ids=stop_ids(family))
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": schema_for(TYPED)}}]
    for calls in ([("lookup", TYPED)], [("now", {})]):
        said = action(family, calls)
        decoded = chat.action_text(chat._encoder.follow(said), stop_ids(family))
        for text in (said, decoded):
            assert found_in(format_of(family).parse(text, tools=tools)) == calls


@one_of_each_form
def test_without_a_schema_text_that_reads_as_a_value_is_one_unless_the_format_distinguishes_them(family):
    values = found_in(format_of(family).parse(action(family, [("lookup", {"n": 3, "s": "3", "b": True})])))[0][1]
    if family.name in KINDS["markup"] and family.name != "DeepSeek-V3.2":  # it says which values are strings
        assert values == {"n": 3, "s": 3, "b": True}
    elif family.name in STRINGS_ONLY:
        assert values == {"n": "3", "s": "3", "b": "True"}
    else:
        assert values == {"n": 3, "s": "3", "b": True}


@pytest.mark.long
@given(family=st.sampled_from([BY_NAME[name] for name in KINDS["keywords"]]), data=st.data())
@settings(max_examples=200, deadline=None)
def test_in_keyword_form_strings_come_back(family, data):
    unsafe = UNESCAPED.get(family.name, "")
    texts = TEXTS.filter(lambda text: not set(unsafe) & set(text))
    calls = data.draw(calls_of(texts))
    assert found_in(format_of(family).parse(action(family, calls))) == calls


@one_of_each_form
def test_content_beside_calls_is_kept_and_is_not_a_call(family):
    calls = [("lookup", {"q": "x"}), ("other_tool", {"n": "y", "m": "z"})]
    for some in (calls[:1], calls) if format_of(family).parallel else (calls[:1],):
        said = action(family, some, "I will look.")
        parsed = format_of(family).parse(said)
        assert found_in(parsed) == some
        assert ("I will look." in parsed.content) == ("I will look." in said)
        assert "lookup" not in parsed.content


@one_of_each_form
def test_hermes_form_is_taken_in_every_format(family):
    syntax = format_of(family)
    text = syntax.reasoning_close + 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'
    assert found_in(syntax.parse(text)) == [("f", {"a": [1]})]


# --- templates that no family has -------------------------------------------------------------------------------------

TURN = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content or '' }}
{%- if m.tool_calls %}CALLS{% endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}EACH{% endfor %}"
OTHERS = {
    "name, mark, object": ("json", "named", "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "other keys in a list": ("list", "json",
        """{{ '{"tool_call_id": "' + c.id + '", "tool_name": "' + f.name + '", ' }}
{{- '"parameters": ' + f.arguments | tojson + '}' }}
{{- ',\n' if not loop.last }}"""),
    "an object in an object": ("json", "json",
        """<call>{{ {'type': 'function', 'function': {'name': f.name, 'arguments': f.arguments}} | tojson }}</call>"""),
    "arguments before the name": ("json", "json",
        """<call>{{ {'arguments': f.arguments, 'name': f.name} | tojson }}</call>"""),
    "name, id, object": ("json", "named",
        "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}"),
    "id, name, object": ("json", "named", "<call id={{ c.id }}>{{ f.name }}<args>{{ f.arguments | tojson }}</call>"),
    "keywords, or JSON as it is": ("json", "keywords",
        """{% macro said(value) %}{% if value is string %}<|"|>{{ value }}<|"|>{% elif value is mapping %}{
{%- for key, item in value | dictsort %}{{ key }}:{{ said(item) }}{{ ',' if not loop.last }}{% endfor %}}
{%- elif value is sequence %}[{% for item in value %}{{ said(item) }}{{ ',' if not loop.last }}{% endfor %}]
{%- else %}{{ value | tojson }}{% endif %}{% endmacro -%}
<|tool_call>call:{{ f.name }}{{ '{' }}
{%- if f.arguments is string %}{{ f.arguments }}
{%- else %}{% for key, value in f.arguments | dictsort %}{{ key }}:{{ said(value) }}{{ ',' if not loop.last }}
{%- endfor %}{% endif %}{{ '}' }}<tool_call|>"""),
    "JSON, of a mapping as Python has it": ("json", "json",
        """<call>{"name": "{{ f.name }}", "arguments": {{ f.arguments }}}</call>"""),
    "arguments in a string": ("json", "json",
        """<call>{{ {'name': f.name, 'arguments': f.arguments | tojson} | tojson }}</call>"""),
}  # fmt: skip


RENDERED = (
    {"a": 'x"y\n', "b": [1, None]},
    {},
    {"q": "sun in Rome", "n": 3},
    {"n": -1.5, "yes": True, "none": None},
    {"deep": {"of": [{"a": "b"}, []], "more": {}}, "text": ""},
    {"s": "3", "t": "true", "u": "é 日本 😀 \u2028"},
)
"""Arguments of every kind."""


@functools.cache
def other(name):
    """A tokenizer with one of `OTHERS` as its template."""
    frame, _, each = OTHERS[name]
    tokenizer = copy.copy(load(BY_NAME["Qwen2.5"]))
    calls = EACH.replace("EACH", each)
    if frame == "list":
        calls = "<|START_ACTION|>[\n" + calls + "\n]<|END_ACTION|>"
    tokenizer.chat_template = TURN.replace("CALLS", calls)
    return tokenizer


@pytest.mark.parametrize("content", ["", "Hm."], ids=["alone", "after text"])
@pytest.mark.parametrize("name", OTHERS)
def test_every_call_that_another_template_renders_is_read_back(name, content):
    tokenizer, (_, kind, _) = other(name), OTHERS[name]
    syntax = tool_format(tokenizer)
    assert syntax.kind == kind
    for number, arguments in enumerate(RENDERED):
        wanted = [("get_weather", arguments), ("g", RENDERED[number - 1])][: 1 + number % 2 + (number == 0)]
        shaped = [
            {
                "id": f"own{number}-{i}",
                "type": "function",
                "function": {"name": tool, "arguments": json.dumps(given) if syntax.arguments_as_json else given},
            }
            for i, (tool, given) in enumerate(wanted)
        ]
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": shaped}]
        said = render(tokenizer, messages, gen=False).split("assistant\n")[1].removesuffix("<|im_end|>\n")
        parsed = syntax.parse(said)
        assert found_in(parsed) == wanted, said
        assert parsed.content == content
        if shaped[0]["id"] in said:
            assert [call.call_id for call in parsed.calls] == [call["id"] for call in shaped]


# --- ids -------------------------------------------------------------------------------------------------------------


def test_a_result_has_an_enum_as_a_call_gives_it():
    cabin = Enum("Cabin", {"FIRST": "first"})
    call = ToolCall("price", {}, "c00000000", "")
    assert json.loads(result_message(call, {"cabin": cabin.FIRST})["content"]) == {"cabin": "first"}
    assert result_message(call, cabin.FIRST)["content"] == '"first"'


def test_ids_are_kept_where_the_format_renders_them():
    assert format_of(BY_NAME["Mistral-Nemo"]).parse(action(BY_NAME["Mistral-Nemo"], [("f", {})])).calls[0].call_id == (
        "callid000"
    )
    kimi = format_of(BY_NAME["Kimi-K2-Thinking"]).parse(action(BY_NAME["Kimi-K2-Thinking"], [("f", {}), ("g", {})]))
    assert [(c.name, c.call_id) for c in kimi.calls] == [("f", "functions.f:0"), ("g", "functions.g:1")]


def test_an_id_that_the_template_would_refuse_is_replaced():
    said = '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "1"}]'
    call_id = format_of(BY_NAME["Mistral-Nemo"]).parse(said).calls[0].call_id
    assert len(call_id) == 9
    assert call_id.isalnum()


def test_made_up_ids_are_nine_alphanumerics_and_unique_in_an_episode():
    said = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>nothing'
    ids = [item.call_id for turn in range(50) for item in HERMES.parse(said * 3, turn_index=turn).items]
    assert len(set(ids)) == len(ids) >= 150
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


def test_an_id_given_twice_is_kept_once():
    said = '<tool_call>{"name": "f", "arguments": {}, "id": "same"}</tool_call>'
    ids = [call.call_id for call in HERMES.parse(said * 2).calls]
    assert ids[0] == "same" != ids[1]


# --- malformed -------------------------------------------------------------------------------------------------------

BROKEN = {
    "not JSON": ('<tool_call>{"name": f}</tool_call>', "expected a value, got 'f}"),
    "single quotes": ("<tool_call>{'name': 'f', 'arguments': {}}</tool_call>", "a key in double quotes"),
    "a line break": ('<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', "line break"),
    "a list as arguments": ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not an object"),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', '"name"'),
    "no arguments": ('<tool_call>{"name": "f", "args": {}}</tool_call>', '"arguments"'),
    "cut": ('Let me.\n<tool_call>\n{"name": "f", "arguments": {"q": "hal', "never closed"),
    "one brace more": ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "text between"),
    "too deep": ('<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 500, "levels"),
    "a digit too many": ('<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 4301 + "}}</tool_call>", "digits"),
    "infinity": ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "too large"),
}


@pytest.mark.parametrize(("said", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_malformed_call_says_what_is_wrong(said, problem):
    syntax = format_of(BY_NAME["Qwen2.5"])
    parsed = syntax.parse(said)
    assert parsed.calls == ()
    assert len(parsed.malformed) == 1
    assert problem in parsed.malformed[0].problem
    assert parsed.malformed[0].text in said


def test_calls_around_a_malformed_one_are_found_in_order():
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    items = HERMES.parse(f"{good}\n<tool_call>{{oops}}</tool_call>\n{good}").items
    assert [type(item) for item in items] == [ToolCall, MalformedCall, ToolCall]


@one_of_each_form
def test_a_call_cut_anywhere_is_never_another_call(family):
    """Cut short, an action gives no call, the whole one, or a malformed one: not one with other arguments."""
    whole = ("lookup", {"query": "some words", "more": "other words"})
    said = action(family, [whole])
    for end in range(len(said)):
        parsed = format_of(family).parse(said[:end])
        assert found_in(parsed) in ([], [whole]), said[:end]
    before = said.index("some words") + 4
    assert format_of(family).parse(said[:before]).malformed or format_of(family).lead


@one_of_each_form
def test_broken_arguments_in_every_format_are_one_malformed_call(family):
    said = action(family, [("lookup", {"query": "VALUE"})])
    for old, new in (("VALUE", "x</x></parameter"), ('{"query"', "{query'"), ("query", 'a"b c<')):
        parsed = format_of(family).parse(said.replace(old, new))
        assert len(parsed.items) <= 1
        assert format_of(family).parse(said[: said.index("VALUE")]).calls == ()


def test_a_value_that_is_not_closed_does_not_swallow_the_next_call():
    good = "<tool_call>\n<function=g>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
    said = f"<tool_call>\n<function=f>\n<parameter=a>\nopen\n{good}"
    items = format_of(BY_NAME["Qwen3-Coder"]).parse(said).items
    assert [(type(item), item.name) for item in items] == [(MalformedCall, "f"), (ToolCall, "g")]
    assert "never closed with '</parameter>'" in items[0].problem


def test_prose_about_json_is_not_a_call_in_the_bare_format():
    syntax = format_of(BY_NAME["Llama-3.1"])
    assert syntax.parse('{"answer": 4}').items == ()
    assert syntax.parse('The call {"name": "f", "parameters": {}} is wrong.').items == ()
    assert found_in(syntax.parse('<|python_tag|>{"name": "f", "parameters": {"a": 1}}')) == [("f", {"a": 1})]
    assert len(syntax.parse('{"name": "f", "parameters": {"a": }').malformed) == 1


# --- reasoning -------------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def test_a_call_that_reasoning_mentions_is_not_called():
    syntax = format_of(BY_NAME["Qwen3"])
    assert syntax.parse(f"<think>Maybe {CALL}?</think>No.").items == ()
    assert len(syntax.parse(f"<think>Maybe {CALL}?</think>\n\n{CALL}").calls) == 1


def test_reasoning_that_the_prompt_opened_counts_as_reasoning():
    syntax = format_of(BY_NAME["Qwen3.5-think"])
    assert syntax.reasoning_close == "</think>"
    assert syntax.parse(f"Maybe {CALL}?</think>No.").items == ()
    assert len(syntax.parse(f"Hm.</think>{CALL}").calls) == 1


def test_text_before_a_stray_end_of_reasoning_is_reasoning():
    assert format_of(BY_NAME["Qwen2.5"]).parse(f"Maybe {CALL}?</think>No.").items == ()


def test_a_call_in_reasoning_that_is_never_closed_is_answered_but_not_run():
    for syntax, said in ((HERMES, f"<think>So {CALL}"), (format_of(BY_NAME["Qwen3.5-think"]), f"So {CALL}")):
        parsed = syntax.parse(said)
        assert parsed.calls == ()
        assert ["never closed" in bad.problem for bad in parsed.malformed] == [True]
    assert HERMES.parse("<think>Still thinking").items == ()


def test_tags_of_reasoning_inside_arguments_are_text():
    said = '<tool_call>{"name": "f", "arguments": {"a": "</think><think>"}}</tool_call>'
    assert found_in(HERMES.parse(said)) == [("f", {"a": "</think><think>"})]
    bare = '{"name": "f", "parameters": {"a": "</think><think>"}}'
    assert found_in(format_of(BY_NAME["Llama-3.1"]).parse(bare)) == [("f", {"a": "</think><think>"})]


def test_what_a_gpt_oss_model_writes_is_read_with_the_recipient_in_either_place():
    syntax = format_of(BY_NAME["gpt-oss"])
    analysis = "<|channel|>analysis<|message|>to=functions.g <|message|>{}<|end|><|start|>assistant"
    for header in (
        " to=functions.f<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
    ):
        assert found_in(syntax.parse(analysis + header + '{"a": 1}<|call|>')) == [("f", {"a": 1})]


# --- hostile text ----------------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "{", "}", "[", "]", '"', "'", "\\", ":", ",", "(", ")", "=", "\n", " ", "name",
        "f", "1e9", '"name": "f"', '"arguments": {', "<function=f>", "<parameter=a>", "</parameter>", "</function>",
        "<arg_key>", "</arg_key>", "<arg_value>", "<think>", "</think>", "[TOOL_CALLS]", "<|tool_call_start|>",
        "<|python_end|>",
        "<|tool_call>call:", '<|"|>', "<tool_call|>", "f(a=1)", "to=functions.f", "<|message|>", "<|channel|>",
        "<|recipient|>", "<|content|>", "<|from|>assistant\n<|recipient|>", "all", "<minimax:tool_call>",
        '<invoke name="f">',
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "\ud800", "😀", "```json",
    ]
)  # fmt: skip


@pytest.mark.long
@given(family=st.sampled_from([*CALLING, None]), text=st.lists(PIECES, max_size=25).map("".join) | st.text(max_size=50))
@example(family=None, text="")
@settings(max_examples=3_000, deadline=None)
def test_no_text_makes_parsing_fail(family, text):
    syntax = HERMES if family is None else format_of(family)
    parsed = syntax.parse(text, turn_index=3)
    ids = [item.call_id for item in parsed.items]
    assert len(set(ids)) == len(ids)
    assert all(bad.problem for bad in parsed.malformed)
    if not parsed.items:
        assert parsed.content == text or any(text.endswith(end) for end in syntax.ends) or syntax.kind != "plain"


HOSTILE = {
    "openers": "<tool_call>",
    "open objects": '<tool_call>{"name": "',
    "open parameters": "<tool_call>\n<function=f>\n<parameter=a>\n",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>",
    "sections": "<|tool_call_start|>[f(a='",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
    "mistral": "[TOOL_CALLS][{",
    "gemma": '<|tool_call>call:f{a:<|"|>',
    "minimax": '<minimax:tool_call><invoke name="f"><parameter name="a">',
    "harmony": " to=functions.f<|channel|>",
    "functionary": "\n<|from|>assistant\n<|recipient|>f\n<|content|>{",
    "thoughts": "<think>",
    "braces": '{"name": {',
    "spaces": "<tool_call> \n ",
    "names": "<tool_call>" + "a" * 300,
    "arrays": "<tool_calls>[[",
}


@pytest.mark.long
@pytest.mark.parametrize("piece", HOSTILE.values(), ids=HOSTILE)
def test_a_megabyte_of_hostile_text_is_parsed_in_linear_time(piece):
    """In the first formats in which the piece means anything: the others walk over it."""
    size = 1_000_000
    text = (piece * (size // len(piece) + 1))[:size]
    heeding = {format_of(family): family.name for family in CALLING if format_of(family).patterns.call.search(piece)}
    for syntax, name in [*heeding.items(), (HERMES, "plain")][:2]:
        started = time.process_time()
        syntax.parse(text)
        assert time.process_time() - started < 30.0, name  # quadratic time would be hours


# --- literals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, True, [1, (2,)], {"a": {"b": -1.5}, "c": "it's \"\\\n"}, "é'", "", {}, []])
def test_python_reads_back(value):
    assert read_whole_literal(repr(value)) == json.loads(json.dumps(value))


@given(st.lists(st.sampled_from(list('{}[]",:\\0.eE-+tfn1 \n\tutruefalsnull'))).map("".join))
def test_only_json_is_read_as_json(text):
    try:
        expected = json.loads(text)
    except ValueError:
        expected = LiteralError
    try:
        found, end = read_literal(text, 0)
        found = found if not text[end:].strip(" \t\r\n") else LiteralError
    except LiteralError:
        found = LiteralError
    assert found == expected or "inf" in repr(expected)


@pytest.mark.parametrize("num_digits", [308, 309, 400, 4300])
def test_whole_numbers_of_thousands_of_digits_are_read_whole(num_digits):
    digits = "9" * num_digits
    for text in (digits, "-" + digits):
        assert read_literal(text, 0) == (int(text), len(text))
        said = f'<tool_call>{{"name": "f", "arguments": {{"a": {text}}}}}</tool_call>'
        assert found_in(HERMES.parse(said)) == [("f", {"a": int(text)})]
    with pytest.raises(LiteralError, match="too large"):
        read_literal(digits + "e4000", 0)


def test_halves_of_characters_never_come_out_alone():
    assert read_literal(r'"\ud83d\ude00 \ud800!"', 0)[0] == "😀 \ufffd!"


# --- answers ---------------------------------------------------------------------------------------------------------


def call(name, **arguments):
    return ToolCall(name, arguments, f"id_{name}", "")


def parsed(*items):
    return ParsedAction("", tuple(items))


async def said(item, tools, **options):
    (message,) = await answer_calls(parsed(item), tools, **options)
    assert (message["role"], message["tool_call_id"]) == ("tool", item.call_id)
    return message["content"]


async def test_plain_and_async_tools_are_run_and_answered_in_order():
    async def slow(q):
        await asyncio.sleep(0.05)
        return {"q": q, "é": None}

    messages = await answer_calls(parsed(call("slow", q="a"), call("lookup", q="b")), {"slow": slow, "lookup": lookup})
    assert [m["content"] for m in messages] == ['{"q": "a", "é": null}', "b:3"]
    assert [m["name"] for m in messages] == ["slow", "lookup"]


def leaves():
    raise SystemExit(3)


async def leaves_async():
    raise SystemExit(3)


class Called:
    """A tool that is an object: it has no name of its own."""

    def __init__(self, function):
        self.function = function

    def __call__(self):
        return self.function()


LEAVING = {"plain": leaves, "async": leaves_async, "partial": functools.partial(leaves_async), "object": Called(leaves)}


@pytest.mark.parametrize("tool", LEAVING.values(), ids=LEAVING)
async def test_a_tool_that_leaves_is_named_and_no_address_is_reported(tool):
    answer = await said(call("go"), {"go": tool})
    assert "ContractError: go: expected a return value, got SystemExit(3)." in answer
    assert "0x" not in answer


class Untold:
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


@pytest.mark.parametrize("value", [Untold(), [Untold()], {Untold(): 1}, nested(5000)], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_result_that_cannot_be_text_is_reported_and_counts_as_raised(value, is_async):
    async def give():
        return value

    tool = give if is_async else lambda: value
    good, bad = await run_calls([call("lookup", q="x"), call("give")], {"give": tool, "lookup": lookup})
    assert (good.problem, good.message["content"]) == ("", "x:3")
    assert (bad.problem, bad.item.name) == ("raised", "give")
    kind = "RecursionError" if isinstance(value, list) and isinstance(value[0], list) else "ValueError"
    assert bad.message["content"].startswith("Error: give: expected a result that can be written as text, got a ")
    assert kind in bad.message["content"]


@pytest.mark.parametrize("value", [object(), [{"a": object()}], (each for each in "a")])
async def test_a_result_without_a_text_of_its_own_is_an_error_of_its_tool(value):
    answer = await said(call("give"), {"give": lambda: value})
    kind = "object" if isinstance(value, list) else type(value).__name__
    assert answer == (
        "Error: agentenv.errors.ContractError: give: expected text, numbers, lists or dicts, got an object of "
        f"builtins.{kind}, which has no text. Convert it."
    )


def test_an_argument_without_a_text_of_its_own_is_an_error_that_names_its_call():
    made = {"id": "1", "type": "function", "function": {"name": "give", "arguments": {"x": object()}}}
    with pytest.raises(ContractError, match="tool_calls: give: expected text, numbers, lists or dicts, got an object"):
        MessageDialogue(100).begin([{"role": "assistant", "content": "", "tool_calls": [made]}, {"role": "tool"}])


async def test_a_result_is_reported_as_it_was_when_the_tool_returned_it():
    kept = [1]
    (result,) = await run_calls([call("give")], {"give": lambda: kept})
    kept[:] = nested(5000)
    assert result.message["content"] == "[1]"


@pytest.mark.parametrize("levels", [500, 990, 5000])
async def test_arguments_that_are_nested_too_deep_are_reported(levels):
    good, bad = await run_calls([call("lookup", q="x"), call("lookup", q=nested(levels))], {"lookup": lookup})
    assert (good.problem, bad.problem) == ("", "arguments")
    assert bad.message["content"] == (
        "Error: wrong arguments for lookup: they are nested too deep. Write them with fewer levels."
    )


async def test_a_type_error_inside_a_tool_is_not_blamed_on_the_arguments():
    assert (await said(call("f", q=1), {"f": lambda q: q + "x"})).startswith("Error: TypeError: unsupported operand")


async def test_a_tool_that_takes_too_long_is_given_up_and_leaves_no_task():
    cancelled = asyncio.Event()

    async def endless():
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    answer = await said(call("endless"), {"endless": endless}, timeout_s=0.05)
    assert answer == "Error: endless returned no result within 0.05 s."
    assert cancelled.is_set()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_infrastructure_errors_pass_and_cancel_the_other_calls():
    async def down():
        raise InfraError("search: expected an answer, got 503. Try again.")

    async def endless():
        await asyncio.sleep(60)

    with pytest.raises(InfraError, match="503"):
        await answer_calls(parsed(call("endless"), call("down")), {"endless": endless, "down": down})
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_infrastructure_errors_at_the_same_time_are_all_looked_at(complaints):
    """Each fails a step of the event loop after the one before it: some just as they are cancelled."""

    async def down(steps):
        for _ in range(steps):
            await asyncio.sleep(0)
        raise InfraError("search: expected an answer, got 503. Try again.")

    with pytest.raises(InfraError, match="503"):
        await answer_calls(parsed(*[call("down", steps=steps) for steps in range(12)]), {"down": down})
    assert complaints() == []


@pytest.fixture
async def complaints():
    """What asyncio has complained of so far."""
    found = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context["message"]))

    def so_far():
        gc.collect()
        return found

    return so_far


async def test_a_tool_cannot_change_the_call():
    item = call("f", q=[1])
    await said(item, {"f": lambda q: q.append(2)})
    assert item.arguments == {"q": [1]}


@one_of_each_form
async def test_answers_to_good_and_malformed_calls_are_rendered_by_the_bridge(family):
    good = action(family, [("lookup", {"q": "x"})])
    for text in (good, good[: good.index("lookup") + 3]):
        items = format_of(family).parse(text)
        answers = await answer_calls(items, {"lookup": lookup})
        chat = Chat(load(family), stop_token_ids=stop_ids(family))
        for message in answers:
            assert message["content"] in chat.decode(chat.bridge(chat._encoder.follow(text), [message]).ids)


@every_calling
def test_an_action_rendered_again_from_its_message_has_the_same_calls(family):
    said = action(family, [("lookup", {"q": "x y"})])
    syntax = format_of(family)
    message = assistant_message(syntax.parse(said), as_json=syntax.arguments_as_json)
    (again,) = message["tool_calls"]
    arguments = again["function"]["arguments"]
    assert (json.loads(arguments) if syntax.arguments_as_json else arguments) == {"q": "x y"}
    messages = [{"role": "user", "content": "Look it up."}, {**message, "content": ""}]
    tools = [schema_of(lookup)] if template_of(family).needs_tools else None
    assert "x y" in render(load(family), messages, gen=False, tools=tools)


def test_a_malformed_call_keeps_its_place_in_the_message():
    message = assistant_message(HERMES.parse(f"Hm. {CALL}<tool_call>oops</tool_call>"))
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["f", "invalid"]
    assert message["content"] == "Hm."
    assert "tool_calls" not in assistant_message(HERMES.parse("Only words."))


def test_results_are_text_or_json_and_can_be_encoded():
    item = call("f")
    assert result_message(item, "as it is")["content"] == "as it is"
    assert result_message(item, [1, {"é": None}])["content"] == '[1, {"é": null}]'
    assert result_message(item, {(1, 2): object})["content"].startswith("{(1, 2)")
    assert result_message(item, "\ud800x")["content"] == "?x"


# --- schemas ---------------------------------------------------------------------------------------------------------


def test_a_function_becomes_a_tool():
    function = schema_of(lookup)["function"]
    assert (function["name"], function["description"]) == ("lookup", "Look something up.")
    assert function["parameters"]["properties"]["q"] == {"type": "string", "description": "What."}
    assert function["parameters"]["required"] == ["q"]


def test_a_function_without_hints_is_refused_with_advice():
    with pytest.raises(ConfigError, match="under Args"):
        schema_of(lambda q: q)


@pytest.mark.long
def test_what_schemas_need_is_imported_with_the_name_and_not_in_the_first_reset():
    program = '''
import sys
import agentenv.tools
assert "transformers" not in sys.modules
from agentenv.tools import schema_of
before = set(sys.modules)
def double(n: int) -> int:
    """Double a number.

    Args:
        n: The number.
    """
schema_of(double)
print(len(set(sys.modules) - before))
'''
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (ran.stdout, ran.returncode) == ("0\n", 0), ran.stderr


TEXT, NUMBER = {"type": "string"}, {"type": "number"}
PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
PADDED, WHOLE = {"a": 1, "b": None}, {"a": 1}


@pytest.mark.parametrize(
    ("schema", "given", "kept"),
    [
        (PAIR, PADDED, WHOLE),
        (PAIR, {"a": 1, "c": None}, WHOLE),
        ({"anyOf": [{"$ref": "#/$defs/Pair"}, {"type": "null"}]}, PADDED, WHOLE),
        ({"type": "array", "items": PAIR}, [PADDED, {"a": None, "b": "x"}], [WHOLE, {"b": "x"}]),
        ({"type": "array", "prefixItems": [{}, PAIR]}, [PADDED, PADDED], [PADDED, WHOLE]),
        ({"type": "object", "additionalProperties": PAIR}, {"k": PADDED, "l": None}, {"k": WHOLE}),
        ({"properties": {"p": {"allOf": [PAIR]}}}, {"p": PADDED}, {"p": WHOLE}),
        ({"properties": {"a": {}, "b": {"type": ["string", "null"]}}}, PADDED, PADDED),
        ({"type": "array", "items": {"type": "integer"}}, [1, None], [1, None]),
        ({"type": "object"}, PADDED, PADDED),
        ({}, [PADDED], [PADDED]),
        (True, PADDED, PADDED),
        *[(schema, None, None) for schema in ({}, {"anyOf": [NUMBER, {"type": "null"}]}, {**TEXT, "nullable": True})],
        *[(schema, None, ...) for schema in (None, TEXT)],
    ],
)
def test_nulls_that_fill_objects_within_an_argument_are_dropped_by_its_schema(schema, given, kept):
    asks = assistant_message(ParsedAction("", (ToolCall("f", {"q": given, "r": None}, "1", ""),)))
    parameters = {"properties": {"q": schema}, "$defs": {"Pair": PAIR}}
    (read,) = normalized([asks], [{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert read["tool_calls"][0]["function"]["arguments"] == ({} if kept is ... else {"q": kept})


def test_nulls_of_a_schema_are_dropped_unless_they_are_a_value():
    parameters = {"x": {"type": "integer", "enum": None, "default": None}, "y": {"anyOf": [None], "default": None}}
    written = {"name": "f", "strict": None, "parameters": {"properties": {**parameters, "z": None}}}
    assert without_nulls(written) == {
        "name": "f",
        "parameters": {"properties": {"x": {"type": "integer"}, "y": {"anyOf": [None], "default": None}}},
    }


class Version(StrEnum):
    OLD = "3.9"
    NEW = "3.10"


class Release(BaseModel):
    version: Version
    other: Version | None = None
    retries: int = 0


ENUM = {"enum": ["3.9", "3.10"]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"$ref": "#/$defs/V"}, "3.10", "3.10"),
        ({"$ref": "#/$defs/indirect"}, "3.10", "3.10"),
        ({"$ref": "#/$defs/a~1b%20c"}, "3.10", "3.10"),
        ({"allOf": [{"$ref": "#/$defs/V"}], "description": "d"}, "3.10", "3.10"),
        ({"allOf": [{"description": "d"}, {"anyOf": [{"allOf": [ENUM]}]}]}, "3.10", "3.10"),
        ({"anyOf": [{"$ref": "#/$defs/V"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"const": "1"}, {"const": "2"}]}, "1", "1"),
        ({"enum": ["3.10", 3]}, "3", 3),
        ({"enum": ["auto", True, None]}, "true", True),
        ({"const": "007"}, "007", "007"),
        ({"type": ["string", "null"]}, "1", "1"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, "3", 3),
        ({"$ref": "#/$defs/count", "nullable": True}, "null", None),
        ({"type": "integer"}, "null", None),
        ({"$ref": "#/$defs/loop"}, "3", 3),
        ({"$ref": "#/$defs/absent"}, "3", 3),
        ({}, "3.10", 3.1),
    ],
)
def test_text_becomes_the_type_that_a_schema_says_also_by_reference(schema, text, value):
    definitions = {
        "V": {**ENUM, **TEXT}, "indirect": {"$ref": "#/$defs/V"}, "a/b c": ENUM, "count": {"type": "integer"},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}], "allOf": [{"$ref": "#/$defs/loop"}]},
    }  # fmt: skip
    parameters = {"properties": {"x": schema}, "$defs": definitions, "definitions": definitions}
    assert Parameter(parameters).at("x").read(text) == value


@pytest.mark.parametrize("family", [BY_NAME[name] for name in KINDS["markup"]], ids=lambda f: f.name)
def test_in_markup_pydantics_enums_come_back_as_text(family):
    tools = [{"function": {"name": "lookup", "parameters": Release.model_json_schema()}}]
    calls = [("lookup", {"version": "3.10", "other": "3.9", "retries": 3})]
    assert found_in(format_of(family).parse(action(family, calls), tools=tools)) == calls


ARGS = {"properties": {"x": TEXT}}


@pytest.mark.parametrize(
    ("parameters", "value"),
    [
        ({"$ref": "#/$defs/Args", "$defs": {"Args": ARGS}}, "3.10"),
        ({"allOf": [{"properties": {"y": {}}}, ARGS]}, "3.10"),
        ({"additionalProperties": TEXT}, "3.10"),
        ({"properties": {"y": NUMBER}, "additionalProperties": TEXT}, "3.10"),
        ({**ARGS, "additionalProperties": NUMBER}, "3.10"),
        ({"properties": {"y": TEXT}, "additionalProperties": NUMBER}, 3.1),
        ({"anyOf": [ARGS, {"properties": {"y": NUMBER}}]}, "3.10"),
        ({"anyOf": [{"properties": {"x": NUMBER}}, {"properties": {"x": {"type": "null"}}}]}, 3.1),
        ({"anyOf": [ARGS, {"type": "object"}]}, 3.1),
        ({**ARGS, "anyOf": [{"required": ["x"]}, {"required": ["y"]}]}, "3.10"),
        ({"properties": {"x": {"$ref": "#/properties/y/anyOf/0"}, "y": {"anyOf": [TEXT]}}}, "3.10"),
    ],
)
def test_a_parameter_is_found_wherever_the_schema_of_a_tool_names_it(parameters, value):
    assert Parameter(parameters).at("x").read("3.10") == value


@pytest.mark.parametrize(("ref", "kinds"), [("#", {"object"}), ("#Args", set()), ("#/", set()), ("Args", set())])
def test_an_anchor_is_not_known(ref, kinds):
    assert Parameter({"$ref": ref}, {"type": "object", "$defs": {"Args": {"$anchor": "Args", **TEXT}}}).kinds == kinds


WAYS = {str(i): {"anyOf": [{"$ref": f"#/$defs/{(i + step) % 9}"} for step in (1, 2)]} for i in range(9)}
PUZZLE = {"properties": {"a": {"$ref": "#/$defs/0"}}, "$ref": "#/$defs/0", "$defs": WAYS}


@pytest.fixture
def parts_read(monkeypatch):
    """One item for each part of a schema that is looked at."""
    read = []
    monkeypatch.setattr(tool_schemas, "_listed", lambda *args, find=tool_schemas._listed: read.append(1) or find(*args))
    return read


def test_an_action_of_many_calls_reads_a_schema_that_refers_to_itself_only_once(parts_read):
    family = BY_NAME[KINDS["markup"][0]]
    calls = [("f", {"a": "1", f"b{number}": "2"}) for number in range(8)]
    tools = [{"function": {"name": "f", "parameters": PUZZLE}}]
    assert len(format_of(family).parse(action(family, calls), tools=tools).calls) == 8
    assert len(parts_read) < 20_000


def test_a_call_of_many_arguments_reads_a_schema_that_refers_to_itself_only_so_far(parts_read):
    given = {f"b{number}": number for number in range(60)}
    assert read_arguments(lambda **_: None, given, PUZZLE) == given
    assert len(parts_read) < 20_000


def test_a_schema_that_refers_to_itself_many_times_is_read_in_a_moment():
    wide = {"anyOf": [{"$ref": "#/$defs/wide"}] * 1000}
    parameters = {"properties": {"x": {"$ref": "#/$defs/wide"}}, "$defs": {"wide": wide}}
    started = time.perf_counter()
    assert Parameter(parameters).at("x").read("3") == 3
    assert time.perf_counter() - started < 30
