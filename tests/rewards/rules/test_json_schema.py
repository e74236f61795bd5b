"""JSON under a schema: what is read, what is refused, partial credit, and hostile documents."""

import asyncio
import json

import pytest

from agentenv._util.lenient_json import MAX_CHARS, MAX_DEPTH, MAX_DIGITS, LiteralError, read_json
from agentenv.errors import DataError
from agentenv.rewards.grading import grade
from agentenv.rewards.rules.json_schema import JsonSchemaReward
from agentenv.rewards.types import Response, Status

PERSON = {
    "type": "object",
    "required": ["name", "age"],
    "additionalProperties": False,
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
}
ADA = '{"name": "Ada", "age": 36}'


async def judged(text, schema=PERSON, **options):
    return await JsonSchemaReward(schema=schema, **options).grade(Response(text))


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        (ADA, 1, 1),
        (f"\n {ADA} <|im_end|>", 1, 1),
        (f"<think>{{}}</think>\n{ADA}", 1, 1),
        (f"```json\n{ADA}\n```", 1, 1),
        (f"Here you are:\n```json\n{ADA}\n```", 0, 1),
        (f"```json\n{{}}\n```\nbetter:\n```json\n{ADA}\n```", 0, 1),
        (f"```json\n{ADA}\n```\nnot:\n```json\n{{}}\n```", 0, 0),
        (f"The person is {ADA}, I think.", 0, 1),
        (f"{ADA}{ADA}", 0, 0),
        ("```json\n" + ADA, 0, 1),
        ("{'name': 'Ada', 'age': 36}", 0, 0),
        ('{"name": "Ada", "age": 36,}', 0, 0),
    ],
)
async def test_places_where_the_document_is_searched(text, strict, lenient):
    for mode, expected in (("strict", strict), ("lenient", lenient)):
        result = await judged(text, mode=mode)
        assert (result.reward, result.score) == (expected, expected)
        assert result.components["valid"] == expected


@pytest.mark.parametrize(
    ("document", "status", "required"),
    [
        (ADA, Status.OK, 1.0),
        ('{"name": "Ada", "age": "36"}', Status.OK, 0.5),
        ('{"name": "", "age": -1}', Status.OK, 0.0),
        ('{"name": "Ada", "age": 36, "x": 1}', Status.OK, 1.0),
        ('{"name": "Ada", "age": 36.0}', Status.OK, 1.0),
        ('{"name": "Ada", "age": true}', Status.OK, 0.5),
        ('{"name": "Ada", "age": 1, "age": 36}', Status.PARSE_ERROR, 0.0),
        ('{"name": "Ada", "age": NaN}', Status.PARSE_ERROR, 0.0),
        ('{"name": "Ada", "age": 1' + "0" * MAX_DIGITS + "}", Status.PARSE_ERROR, 0.0),
        ('{"name": "Ada", "age": ' + "9" * 100_000 + "}", Status.PARSE_ERROR, 0.0),
        ("[" * 100_000, Status.PARSE_ERROR, 0.0),
        ("", Status.NO_ANSWER, 0.0),
        ("<think>" + ADA, Status.NO_ANSWER, 0.0),
        (" " * 9 + '"' + "x" * MAX_CHARS + '"', Status.PARSE_ERROR, 0.0),
    ],
)
async def test_validity_and_partial_credit(document, status, required):
    valid = document == ADA or "36.0" in document
    for partial in (0.0, 0.5):
        result = await judged(document, partial=partial)
        assert result.status is status
        assert result.reward == (1.0 if valid else partial * required)
        assert result.components == {"json": float(status is Status.OK), "valid": float(valid), "required": required}


async def test_only_the_required_keys_earn_partial_credit():
    schema = {"required": ["a", "b"], "properties": {"a": {"type": "integer"}, "c": {"type": "integer"}}}
    assert (await judged('{"a": 1, "c": ""}', schema, partial=0.5)).reward == 0.25
    assert (await judged('{"a": 1, "b": 2, "c": ""}', schema, partial=0.5)).reward == 0.5
    optional = {"properties": {"a": {"type": "integer"}, "c": {"type": "integer"}}}
    assert (await judged('{"a": 1, "c": ""}', optional, partial=0.5)).reward == 0.25


async def test_feedback_names_the_place_and_the_rule_and_not_the_answer():
    schema = {"type": "object", "properties": {"city": {"const": "Reykjavik"}}}
    result = await judged('{"city": "Oslo"}', schema)
    assert "$.city" in result.feedback
    assert "const" in result.feedback
    assert "Reykjavik" not in result.feedback + result.detail


@pytest.mark.parametrize("label", [PERSON, json.dumps(PERSON)])
async def test_the_schema_is_given_or_in_the_metadata_or_the_label(label):
    right, wrong = Response(ADA, label), Response("{}", label)
    assert [(await JsonSchemaReward().grade(response)).reward for response in (right, wrong)] == [1.0, 0.0]
    in_row = Response("{}", "the label is something else", metadata={"schema": {"type": "object"}})
    assert (await JsonSchemaReward().grade(in_row)).reward == 1.0
    assert (await JsonSchemaReward(schema=PERSON).grade(in_row)).reward == 0.0


@pytest.mark.parametrize(
    "label",
    [
        None, 5, "", "[]", "{", '{"type": "object", "type": "array"}', [], True, float("nan"), {"type": "objekt"},
        {"x": {1, 2}}, {"minimum": float("nan")}, {"$ref": "#"}, {"$ref": "#/$defs/absent"},
        {"$ref": "http://127.0.0.1:9/x"}, {"pattern": "("},
    ],
)  # fmt: skip
async def test_a_label_that_is_not_a_schema_is_a_data_error(label):
    with pytest.raises(DataError, match="schema"):
        await JsonSchemaReward().grade(Response('"x"', label))
    assert (await grade(JsonSchemaReward(), Response('"x"', label))).status is Status.LABEL


async def test_a_schema_elsewhere_is_never_downloaded():
    calls = []

    async def on_call(_, writer):
        calls.append(1)
        writer.close()

    async with await asyncio.start_server(on_call, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(DataError, match="schema"):
            await JsonSchemaReward().grade(Response("1", {"$ref": f"http://127.0.0.1:{port}/x"}))
    assert calls == []


async def test_the_draft_is_that_of_the_schema():
    draft4 = {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True}
    assert [(await judged(document, draft4)).reward for document in ("3", "4")] == [0.0, 1.0]


async def test_a_schema_may_refer_to_itself_and_a_document_be_deep():
    node = {"type": "array", "items": {"$ref": "#/$defs/node"}}
    for _ in range(6):  # more of Python's frames for each level
        node = {"allOf": [node]}
    tree = {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    assert (await judged("[" * MAX_DEPTH + "]" * MAX_DEPTH, tree)).reward == 1.0
    assert (await judged("[" * (MAX_DEPTH - 1) + "1" + "]" * (MAX_DEPTH - 1), tree)).reward == 0.0
    for text in ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), '["a", ' + "[" * 30000 + "]" * 30001):
        assert (await judged(text, tree)).status is Status.PARSE_ERROR


@pytest.mark.long
async def test_a_pattern_that_runs_away_is_a_timeout():
    result = await judged(json.dumps("a" * 40 + "!"), {"pattern": "^(a+)+$"}, cpu_limit_s=0.3)
    assert (result.status, result.reward) == (Status.TIMEOUT, 0.0)


@pytest.mark.long
async def test_no_number_is_too_large_for_the_check():
    for document in ("1" + "0" * (MAX_DIGITS - 1), "1e300", "-1e300"):
        for divisor in (1e-10, 0.1, 3, 1e300):
            assert (await judged(document, {"multipleOf": divisor})).status is Status.OK


@pytest.mark.parametrize("text", ['"' + '\\"' * 100_000, "\\" * 200_000, '"\\' * 80_000, '["' * 80_000])
def test_the_depth_of_hostile_texts_is_found_in_linear_time(text):
    with pytest.raises(LiteralError):
        read_json(text)
