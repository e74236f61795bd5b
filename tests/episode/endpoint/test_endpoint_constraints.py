"""What a request may demand of an answer: a call of a tool, or JSON; on engines that can constrain and on others."""

import json

import pytest

from agentenv.chat.chat import Chat
from agentenv.core.types import Limits, SamplingParams
from agentenv.engines.hf.engine import HFEngine
from agentenv.engines.models import load_tokenizer, resolve_model
from agentenv.episode.endpoint.agent import ChatAgentSource
from agentenv.episode.endpoint.session import Session, SessionOptions
from agentenv.episode.endpoint.wire import RequestError, read_request
from agentenv.episode.registry import env_source
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from tests.episode.endpoint.scenes import CALLS, TOOL, session_of, user

NAMED = {"type": "function", "function": {"name": "lookup"}}
OTHER = {"type": "function", "function": {"name": "stop"}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
IN_JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def body(**fields):
    return {"messages": [user("6 x 7?")], "tools": TOOL, **fields}


def tag_of(engine):
    return json.loads(engine.requests[-1].sampling.structural_tag)


def functions_in(tag):
    text = json.dumps(tag)
    return [name for name in ("lookup", "stop") if f'\\\\\\"{name}\\\\\\"' in text or f'\\"{name}\\"' in text]


# --- reading requests


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required", "tools": []},
        {"tool_choice": OTHER},
        {"tool_choice": "any"},
        {"tool_choice": {"type": "allowed_tools"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
        {"response_format": {"type": "xml"}},
    ],
)
def test_demands_that_make_no_sense_are_refused(fields):
    with pytest.raises(RequestError, match=rf"^{next(iter(fields))}: expected"):
        read_request(body(**fields))


# --- answering them


async def test_a_required_call_is_a_structural_tag_of_all_tools_and_a_named_one_of_that_tool():
    session, engine = session_of([CALLS["Qwen3"]])
    tools = [*TOOL, OTHER]
    for choice, names in (("required", ["lookup", "stop"]), (NAMED, ["lookup"])):
        answer = await session.complete(body(tools=tools, tool_choice=choice))
        assert functions_in(tag_of(engine)) == names
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
    await session.complete(body(tools=tools, tool_choice="auto"))
    assert engine.requests[-1].sampling.structural_tag is None


async def test_an_answer_in_json_is_a_structural_tag_that_also_allows_the_tools():
    session, engine = session_of(['<think>\nsix\n</think>\n\n{"x": 42}', '{"x": 1}', "{}"])
    answer = await session.complete(body(response_format=IN_JSON))
    assert '"lookup\\\\\\"' in json.dumps(json.dumps(tag_of(engine))) or functions_in(tag_of(engine)) == ["lookup"]
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ('{"x": 42}', "six")
    await session.complete({"messages": [user("7?")], "response_format": IN_JSON})
    assert [e["json_schema"] for e in tag_of(engine)["format"]["elements"] if e["type"] == "json_schema"] == [SCHEMA]
    await session.complete({"messages": [user("8?")], "response_format": {"type": "json_object"}})
    assert {"type": "object"} in [e.get("json_schema") for e in tag_of(engine)["format"]["elements"]]


async def test_marks_of_reasoning_in_json_are_part_of_it():
    session, _ = session_of(['{"x": "a</think>b"}'])
    answer = await session.complete({"messages": [user("?")], "response_format": {"type": "json_object"}})
    assert answer["choices"][0]["message"]["content"] == '{"x": "a</think>b"}'


async def test_what_has_no_grammar_is_the_requests_fault():
    session, _ = session_of(["a"], name="LFM2.5")
    with pytest.raises(RequestError, match="tool_choice: expected a template that writes calls as JSON"):
        await session.complete(body(tool_choice="required"))
    for schema, told in (({"type": "array", "uniqueItems": True}, ": .* uniqueItems"), ({"anyOf": 5}, ".anyOf: ")):
        with pytest.raises(RequestError, match=f"json_schema{told}"):
            await session.complete(body(response_format={**IN_JSON, "json_schema": {"schema": schema}}))


async def test_a_run_with_a_least_length_cannot_demand():
    session, _ = session_of(["a"], sampling=SamplingParams(min_tokens=5))
    with pytest.raises(RequestError, match="min_tokens: expected 0 with a structural_tag"):
        await session.complete(body(tool_choice="required"))


# --- engines that cannot constrain


async def test_an_engine_that_cannot_constrain_refuses_with_the_reason_and_the_option():
    session, engine = session_of(["a"])
    engine.constraint_problem = "xgrammar is not installed: pip install it"
    with pytest.raises(RequestError, match=r"because xgrammar is not installed: pip install it, .* required_as_auto"):
        await session.complete(body(tool_choice="required"))
    with pytest.raises(RequestError, match="response_format: expected text, because xgrammar is not installed"):
        await session.complete(body(response_format=IN_JSON))
    assert engine.requests == []


async def test_a_demanded_call_is_optional_by_an_option_and_json_is_not():
    session, engine = session_of(["no call", CALLS["Qwen3"]], options=SessionOptions(required_as_auto=True))
    engine.constraint_problem = "it is old"
    answer = await session.complete(body(tool_choice="required"))
    assert answer["choices"][0]["message"]["content"] == "no call"
    assert engine.requests[-1].sampling.structural_tag is None
    with pytest.raises(RequestError, match="response_format: expected text, because it is old"):
        await session.complete(body(response_format=IN_JSON))
    assert [turn.forced for turn in session.finish(1.0).turns] == [None]


def test_a_class_of_agents_sets_the_options_of_its_endpoint():
    class Agent:
        session_options = SessionOptions(required_as_auto=True)

        async def run(self, context):
            return 1.0

    source = env_source(Agent, {})
    assert isinstance(source, ChatAgentSource)
    assert source.options.required_as_auto


# --- a real engine


@pytest.mark.long
async def test_a_model_that_never_calls_tools_calls_one_where_a_request_demands_it():
    model = resolve_model("tiny-math")
    tokenizer = load_tokenizer(model)
    engine = HFEngine(model, tokenizer=tokenizer)
    setup = EpisodeSetup(engine, Chat(tokenizer), SamplingParams(seed=0), Limits(max_length=1024, max_turns=8))
    session = Session(setup, key=EpisodeKey("session"))
    tool = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}}
    try:
        called = await session.complete(body(tools=[tool], tool_choice=OTHER))
        document = await session.complete({"messages": [user("7?")], "response_format": IN_JSON})
        bad = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "("}}}
        with pytest.raises(RequestError, match="structural_tag: expected one that xgrammar compiles"):
            await session.complete({"messages": [user("8?")], "response_format": bad})
    finally:
        await engine.close()
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "stop", "arguments": "{}"}
    choice = document["choices"][0]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"])["x"], int)
    first, second = session.finish(1.0).turns
    assert first.forced
    assert second.forced is not None
    assert first.end - first.start - 1 in first.forced  # the end of the action
