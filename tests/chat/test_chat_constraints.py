"""Structural tags of calls in the syntax of real templates, and of JSON."""

import asyncio
import json
import random

import pytest

from agentenv.chat.constraints import calls_tag, json_tag
from agentenv.engines.constraints import Constrainer
from agentenv.errors import DataError
from tests.episode.endpoint.scenes import chat_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "maxLength": 9},
                    "top": {"type": "integer", "minimum": 1, "maximum": 9},
                    "mode": {"enum": ["a", "b c"]},
                    "exact": {"type": "boolean"},
                },
                "required": ["query", "exact"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]


def answers(chat, tag, *, num=4, most=300):
    """Texts of actions that a policy without knowledge draws under a tag; it closes what becomes long."""
    stops = sorted({chat.tokenizer.eos_token_id, *chat._stop_token_ids})
    constrainer, syntax = Constrainer(chat.tokenizer), chat.tool_format
    ways = chat.template.reasoning or ("", "", "")
    closes = [chat.encode(text) for text in (syntax.value_close, ways[1], '"', "}") if text]
    for seed in range(num):
        walk, rng, ids = asyncio.run(constrainer.follow(tag, stops)), random.Random(seed), []
        while len(ids) < most and (not ids or ids[-1] not in stops):
            legal = walk.legal()
            choices = legal.nonzero()[:, 0].tolist()
            assert choices, chat.decode(ids)
            ends = [token for token in choices if token in stops]
            next_ids = [rng.choice(ends or choices)]
            if len(ids) > 20 and not ends:
                next_ids = rng.choice([close for close in closes if can_take(walk, close)] or [next_ids])
            for token in next_ids:
                assert walk.take(token, walk.legal())
            ids += next_ids
        if ids[-1] in stops:
            yield chat.action_text(ids, chat._stop_token_ids)


def can_take(walk, ids):
    fork = walk.matcher.fork()
    return all(fork.accept_token(token) for token in ids)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "Qwen3", "Qwen3.5-think", "Qwen3-Coder", "Hermes-2-Pro", "Llama-3.1", "Mistral-Nemo", "Mistral-Small-3.2",
        "DeepSeek-V3", "DeepSeek-V3.2", "GLM-4.5", "GLM-5.1 (SentencePiece)", "Kimi-K2-Thinking", "Jamba-1.6",
        "gpt-oss", "Functionary-2.2", "Nemotron-3-Nano", "MiniMax-M2", "Qwen1.5",
    ],
)  # fmt: skip
def test_calls_come_out_in_the_syntax_that_the_template_is_read_by(name):
    chat = chat_of(name)
    drawn = list(answers(chat, calls_tag(chat, TOOLS, several=True)))
    assert drawn
    for text in drawn:
        parsed = chat.tool_format.parse(text, tools=TOOLS)
        assert parsed.calls
        assert not parsed.malformed
        for call in parsed.calls:
            assert call.name in ("look_up", "stop")
            if call.name == "look_up":
                assert {"query", "exact"} <= call.arguments.keys() <= {"query", "top", "mode", "exact"}
                assert isinstance(call.arguments["exact"], bool)
                assert call.arguments.get("mode", "a") in ("a", "b c")


def test_the_opening_of_a_call_is_its_token_and_cannot_be_spelled():
    chat = chat_of("Qwen3-Coder")
    walk = asyncio.run(Constrainer(chat.tokenizer).follow(calls_tag(chat, TOOLS[1:], several=False), ()))
    legal = walk.legal().nonzero()[:, 0].tolist()
    openings = [chat.decode([token]) for token in legal]
    assert "<tool_call>" in openings
    assert not [text for text in openings if text != "<tool_call>" and "<tool_call>".startswith(text)]


@pytest.mark.long
def test_reasoning_may_come_first_and_must_be_closed_where_the_prompt_opens_it():
    thinking, optional = chat_of("Qwen3.5-think"), chat_of("Qwen3")
    for text in answers(thinking, calls_tag(thinking, TOOLS[1:], several=False)):
        assert text.count("</think>") == 1
    elements = json.loads(calls_tag(optional, TOOLS, several=False))["format"]["elements"]
    assert [element["type"] for element in elements] == ["optional", "sequence"]
    silent = json.loads(json_tag(chat_of("Llama-3.1"), {"type": "object"}))["format"]["elements"]
    assert [element["type"] for element in silent] == ["json_schema"]


@pytest.mark.parametrize("name", ["LFM2.5", "Gemma4", "MiniCPM3"])
def test_calls_like_those_in_python_have_no_grammar(name):
    with pytest.raises(DataError, match="tool_choice: expected a template that writes calls as JSON or as markup"):
        calls_tag(chat_of(name), TOOLS, several=False)


def test_a_name_that_the_syntax_cannot_hold_is_refused():
    odd = [{"type": "function", "function": {"name": "look up>"}}]
    with pytest.raises(DataError, match="expected a call that the template's syntax reads back"):
        calls_tag(chat_of("Qwen3-Coder"), odd, several=False)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, r"json_schema.properties.a: .*not"),
        ({"oneOf": [{"type": "string"}]}, "oneOf"),
        ({"anyOf": [{"type": "string"}], "minLength": 3}, "anyOf, minLength"),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "maxLength, pattern"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
    ],
)
def test_a_schema_with_a_keyword_that_no_grammar_enforces_is_refused(schema, named):
    with pytest.raises(DataError, match=named):
        json_tag(chat_of("Qwen3"), schema)


BROKEN = [
    ({"anyOf": 5}, r"\.anyOf: expected a list, got 5"),
    ({"properties": {"a": {"enum": "ab"}}}, r"\.properties\.a\.enum: expected a list"),
    ({"$defs": "a"}, r"\.\$defs: expected an object"),
    ({"properties": {"a": 5}}, r"\.properties\.a: expected a JSON schema, got 5"),
    ({"anyOf": [{"type": "string"}, "b"]}, r"\.anyOf\[1\]: expected a JSON schema"),
    ({"properties": {"a": {"type": 5}}}, r"\.properties\.a\.type: expected a type or a list of types, got 5"),
]


@pytest.mark.parametrize(("schema", "named"), BROKEN)
@pytest.mark.parametrize("name", ["Qwen3", "Qwen3-Coder"])
def test_a_malformed_schema_is_refused_of_an_answer_and_of_a_tool(name, schema, named):
    chat = chat_of(name)
    with pytest.raises(DataError, match="^json_schema" + named):
        json_tag(chat, schema)
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(DataError, match=r"^tools\.f\.parameters" + named):
        calls_tag(chat, tools, several=True)


def test_a_schema_may_be_true_and_its_parts_may_be_null():
    schema = {"type": "object", "properties": {"a": True}, "additionalProperties": False, "required": None}
    schema["properties"]["b"] = {"anyOf": [True, {"type": None}]}
    assert json_tag(chat_of("Qwen3"), schema)
    for name in ("Qwen3", "Qwen3-Coder"):
        assert calls_tag(chat_of(name), [{"name": "f", "parameters": schema}], several=True)
