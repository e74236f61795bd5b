"""Calls made from schemas: the right ones fit, and the wrong ones are each wrong in their own way."""

import json
from datetime import date, datetime, time
from uuid import UUID

import jsonschema
import pytest

from agentenv.testing.odd_actions import odd_forms, slow_pattern
from agentenv.testing.tool_calls import (
    call_text,
    calls_with_world,
    example,
    late_tool,
    only_call,
    right_calls,
    writing_calls,
    wrong_calls,
)

SCHEMAS = [
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a", "b"]},
    {"properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "null"}]}}},
    {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0.5}, "minItems": 3},
    {"type": "string", "minLength": 10},
    {"type": "string", "maxLength": 2},
    {"type": ["null", "boolean"]},
    {"const": {"a": [1]}},
    {"type": "string", "examples": ["Oslo"], "pattern": "^O"},
    {"properties": {"a": {"type": "string"}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "required": ["a"]},
    {"$ref": "#/$defs/p", "$defs": {"p": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}}},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_the_example_of_a_schema_fits_it(schema):
    jsonschema.validate(example(schema), schema)


def test_a_schema_that_contains_itself_has_an_example_that_ends():
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    assert json.dumps(example(node)).count("next") < 20


ODD = [
    {"$ref": "#/nowhere"},
    {"properties": True},
    {"properties": {"a": {"minimum": None, "type": "integer"}, "b": {"examples": {"x": 1}}}, "required": ["a", "b"]},
    {"properties": {"a": {"type": "array", "items": [{"type": "string"}]}}, "required": ["a"]},
    {"type": "string"},
]


@pytest.mark.parametrize("parameters", [*ODD, *SCHEMAS], ids=json.dumps)
def test_every_schema_has_calls_with_an_object_as_arguments(parameters):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    (call,) = right_calls(tools).values()
    assert isinstance(json.loads(call.splitlines()[1])["arguments"], dict)
    assert len(set(wrong_calls(tools).values())) > 8


@pytest.mark.parametrize("function", [{}, {"parameters": None}, {"name": "f", "parameters": {"type": "object"}}])
def test_a_tool_without_parameters_is_called_too(function):
    assert list(right_calls([{"function": function}]).values()) == [call_text(str(function.get("name")), {})]
    assert len(set(wrong_calls([{"function": function}]).values())) > 8


def test_without_tools_there_are_no_calls():
    assert right_calls([]) == wrong_calls([]) == {}


def tool(**properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": "go", "parameters": parameters}}


@pytest.mark.parametrize("kind", ["integer", "number", ["integer", "null"]])
def test_calls_with_words_have_a_number_in_every_number_and_a_word_in_every_text(kind):
    tools = [tool(item={"type": "string"}, num={"type": kind}, state={"enum": ["on"]})]
    (call,) = calls_with_world(tools, ["pear"], numbers=[-7], each=1).values()
    assert call == call_text("go", {"item": "pear", "num": -7, "state": "on"})
    tools[0]["function"]["parameters"]["required"].remove("num")
    (without,) = calls_with_world(tools, ["pear"], each=1).values()
    assert without == call_text("go", {"item": "pear", "state": "on"})
    (optional,) = calls_with_world(tools, ["pear"], numbers=[-7], each=1, optional=True).values()
    assert optional == call_text("go", {"item": "pear", "state": "on", "num": -7})


@pytest.mark.parametrize(
    ("kind", "read"),
    [("date", date.fromisoformat), ("date-time", datetime.fromisoformat), ("time", time.fromisoformat), ("uuid", UUID)],
)
def test_an_argument_of_a_format_gets_a_value_of_it_and_those_of_the_world(kind, read):
    form = {"type": "string", "format": kind}
    tools = [tool(when=form, until={"anyOf": [form, {"type": "null"}]}, who={"type": "string"})]
    said = [*calls_with_world(tools, ["Book Monday, 2026-03-09, please."]).values(), *right_calls(tools).values()]
    values = [only_call(call)[1][key] for call in said for key in ("when", "until")]
    assert all(map(read, values))
    assert ("2026-03-09" in values) == (kind == "date")


@pytest.mark.parametrize(("kind", "value"), [("string", "9"), ("integer", 9), (["string", "null"], "9")])
def test_a_value_is_written_by_a_tool_that_takes_a_key_and_a_value(kind, value):
    tools = [tool(name={"type": "string"}, value={"type": kind}), tool(name={"type": "string"})]
    assert writing_calls(tools, [("x", 9)]) == [call_text("go", {"name": "x", "value": value})]


@pytest.mark.parametrize(
    ("gold", "slow"),
    [
        (r"`\d{4}-[A-Z]+`", "`(.+)+@@`"), (r"Pattern: ^[a-z]+$", "Pattern: (.+)+@@"), ("The answer is 4.5", None),
        ("[1, 2]", None),
    ],
)  # fmt: skip
def test_a_regular_expression_in_gold_is_replaced_by_a_slow_one(gold, slow):
    assert slow_pattern(gold) == slow


def test_the_name_of_a_late_tool_may_have_any_sign():
    assert late_tool("Error: files/read-all.v2 returned no result within 0.2 s.") == "files/read-all.v2"


@pytest.mark.parametrize("gold", ['{"a": 1}', '["a", [1]]', '{"name": "f", "arguments": {}}', "{}"])
def test_odd_forms_are_odd_and_different(gold):
    forms = [gold, *odd_forms(gold).values()]
    assert len(forms) > 1
    assert len(forms) == len(set(forms))


def test_the_whole_last_number_is_replaced_and_the_digits_of_all():
    forms = odd_forms("flour=12.5, sugar=30.75 g")
    assert (forms["nan"], forms["no_value"]) == ("flour=12.5, sugar=nan g", "flour=12.5, sugar= g")
    assert (forms["nines"], forms["zero"]) == ("flour=99.9, sugar=99.99 g", "flour=12.5, sugar=0 g")


def test_the_parts_of_an_answer_are_said_alone_and_those_of_a_call_are_not():
    forms = odd_forms('{"a": 1, "b": 2}')
    assert (forms["first_key"], forms["last_key"]) == ('{"a": 1}', '{"b": 2}')
    assert odd_forms('["a", [1]]')["first_key"] == '["a"]'
    assert "first_key" not in odd_forms('{"name": "f", "arguments": {"a": 1, "b": 2}}')
