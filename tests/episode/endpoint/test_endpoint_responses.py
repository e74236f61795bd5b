"""The responses API: OpenAI's own SDK against it, in sessions that record what chat completions would."""

from __future__ import annotations

import json

import pydantic
import pytest

from agentenv.core.types import Limits, SamplingParams
from agentenv.episode.endpoint.responses import ResponseLog
from agentenv.episode.endpoint.wire import RequestError
from tests.episode.endpoint.scenes import CALLS, NAMES, TOOL, assert_exact, session_of, user
from tests.episode.endpoint.test_endpoint_server import served

openai = pytest.importorskip("openai")

LOOKUP = {"type": "function", "strict": False, **TOOL[0]["function"]}


async def response_of(client, *, stream, **fields):
    """The response, and the types of the events if it was streamed."""
    if not stream:
        return await client.responses.create(model="policy", **fields), []
    async with client.responses.stream(model="policy", **fields) as events:
        kinds = [event.type async for event in events]
        return await events.get_final_response(), kinds


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keeps", ["client", "server"])
async def test_a_tool_loop_is_one_segment_whoever_keeps_the_conversation(name, stream, keeps):
    session, engine = session_of([CALLS[name], "It is 42.", "Yes."], name)
    fields = {"tools": [LOOKUP], "instructions": "Be brief.", "stream": stream}
    async with served(session) as (_, _, client):
        given = [user("What is 6 x 7?")]
        first, kinds = await response_of(client, input=given, **fields)
        (call,) = first.output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "lookup", {"query": "6 x 7"})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
        if stream:
            assert kinds == [
                "response.created", "response.in_progress", "response.output_item.added",
                "response.function_call_arguments.delta", "response.function_call_arguments.done",
                "response.output_item.done", "response.completed",
            ]  # fmt: skip
        if keeps == "client":
            given += [call.model_dump(exclude={"parsed_arguments"}), result]
            second, kinds = await response_of(client, input=given, **fields)
            given += [second.output[0].model_dump(), user("Sure?")]
            third, _ = await response_of(client, input=given, **fields)
        else:
            second, kinds = await response_of(client, input=[result], previous_response_id=first.id, **fields)
            third, _ = await response_of(client, input="Sure?", previous_response_id=second.id, **fields)
    assert (second.output_text, third.output_text, second.status) == ("It is 42.", "Yes.", "completed")
    if stream:
        assert kinds == [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
            "response.output_text.delta", "response.output_text.done", "response.content_part.done",
            "response.output_item.done", "response.completed",
        ]  # fmt: skip
    assert second.usage.input_tokens == len(engine.requests[1].prompt_token_ids)
    trajectory = session.finish(1.0)
    assert (len(trajectory.segments), session.mismatches, trajectory.refusals) == (1, [], {})
    assert_exact(trajectory, engine)


async def test_text_and_calls_of_one_answer_stay_one_message():
    session, engine = session_of([f"I look.\n{CALLS['Qwen3']}\n{CALLS['Qwen3']}", "ok"])
    async with served(session) as (_, _, client):
        first = await client.responses.create(model="m", input="Q", tools=[LOOKUP])
        assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "42"}]}
            for call in first.output[1:]
        ]
        items = [item.model_dump() for item in first.output]
        await client.responses.create(model="m", input=[user("Q"), *items, *results], tools=[LOOKUP])
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        await client.responses.create(model="m", input=[user("Q"), *references, *results], tools=[LOOKUP])
    assert session.mismatches == ["branch"]  # the last is the second request once more
    assert engine.requests[1].prompt_token_ids == engine.requests[2].prompt_token_ids


async def test_a_conversation_may_continue_over_both_apis():
    session, _ = session_of(["a", "b"])
    async with served(session) as (_, _, client):
        first = await client.responses.create(model="m", input="Q")
        messages = [user("Q"), {"role": "assistant", "content": first.output_text}, user("R")]
        await client.chat.completions.create(model="m", messages=messages)
    assert session.mismatches == []


async def test_an_answer_that_was_cut_is_incomplete():
    session, _ = session_of(["one two three four five"])
    async with served(session) as (_, _, client):
        response = await client.responses.create(model="m", input="Q", max_output_tokens=3)
        async with client.responses.stream(model="m", input="R", max_output_tokens=3) as events:
            kinds = [event.type async for event in events]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.usage.output_tokens, kinds[-1]) == (3, "response.incomplete")


async def test_sampling_and_log_probabilities_are_those_of_chat_completions():
    session, engine = session_of(["42"], sampling=SamplingParams(temperature=0.7), logprob=-0.5)
    async with served(session) as (_, _, client):
        response = await client.responses.create(
            model="m", input="Q", temperature=0, top_p=0.5, include=["message.output_text.logprobs"]
        )
    assert (engine.requests[0].sampling.temperature, engine.requests[0].sampling.top_p) == (0.0, 0.5)
    assert {entry.logprob for entry in response.output[0].content[0].logprobs} == {-0.5}


class Total(pydantic.BaseModel):
    total: int


async def test_calls_and_json_are_demanded_as_of_chat_completions():
    session, engine = session_of([CALLS["Qwen3"], CALLS["Qwen3"], '{"total": 7}', '{"total": 7}'])
    async with served(session) as (_, _, client):
        named = {"type": "function", "name": "lookup"}
        response = await client.responses.create(model="m", input="Q", tools=[LOOKUP], tool_choice=named)
        assert response.output[0].type == "function_call"
        function = {key: value for key, value in LOOKUP.items() if key != "type"}
        await client.chat.completions.create(
            model="m", messages=[user("Q")], tools=[{"type": "function", "function": function}],
            tool_choice={"type": "function", "function": {"name": "lookup"}},
        )  # fmt: skip
        parsed = await client.responses.parse(model="m", input="Q", text_format=Total)
        assert parsed.output_parsed == Total(total=7)
        await client.chat.completions.parse(model="m", messages=[user("Q")], response_format=Total)
    tags = [request.sampling.structural_tag for request in engine.requests]
    assert None not in tags
    assert (tags[0], tags[2]) == (tags[1], tags[3])


async def test_reasoning_apart_is_an_item_that_may_be_sent_back_or_not():
    said = ["<think>\nsix sevens\n</think>\n\n42", "ok"]
    for num_sent in (1, 2):
        session, engine = session_of(said)
        async with served(session) as (_, _, client):
            first = await client.responses.create(model="m", input="Q")
            assert [item.type for item in first.output] == ["reasoning", "message"]
            assert first.output[0].content[0].text == "six sevens"
            items = [item.model_dump() for item in first.output[-num_sent:]]
            await client.responses.create(model="m", input=[user("Q"), *items, user("R")])
        assert session.mismatches == []
        assert "six sevens" in engine.requests[1].prompt


async def test_instructions_are_of_one_request():
    session, engine = session_of(["a", "b"])
    async with served(session) as (_, _, client):
        first = await client.responses.create(model="m", input="Q", instructions="Be brief.")
        await client.responses.create(model="m", input="R", previous_response_id=first.id, instructions="Be long.")
    assert "Be brief." not in engine.requests[1].prompt
    assert session.mismatches == ["system"]


async def test_a_response_that_the_client_does_not_store_cannot_be_continued():
    session, _ = session_of(["a"])
    async with served(session) as (_, _, client):
        first = await client.responses.create(model="m", input="Q", store=False)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(model="m", input="R", previous_response_id=first.id)


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"input": 5},
        {"input": [5]},
        {"input": "Q", "previous_response_id": "resp_x"},
        {"input": [{"type": "item_reference", "id": "msg_x"}]},
        {"input": [{"type": "computer_call"}]},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
        {"input": "Q", "background": True},
        {"input": "Q", "tools": [{"type": "web_search"}]},
        {"input": "Q", "tools": 5},
        {"input": "Q", "text": 5},
    ],
)
async def test_requests_that_cannot_be_answered_say_why(body):
    session, engine = session_of(["a"])
    with pytest.raises(RequestError, match=r"expected .* got"):
        await session.complete(ResponseLog().chat_body(body))
    assert engine.requests == []


async def test_the_end_of_the_turns_is_final_for_codex_which_streams_and_for_litellm_which_does_not():
    session, _ = session_of(["a"], limits=Limits(max_length=4096, max_turns=1))
    async with served(session) as (_, _, client):
        await client.responses.create(model="m", input="Q")
        for stream, status in ((True, 400), (False, 404)):
            with pytest.raises(openai.APIStatusError) as refused:
                await client.responses.create(model="m", input="R", stream=stream)
            assert (refused.value.status_code, refused.value.code) == (status, "max_turns_exceeded")


@pytest.mark.parametrize("kind", ["namespace", "web_search", "custom"])
async def test_a_tool_that_is_no_function_is_refused_by_its_type(kind):
    session, _ = session_of(["a"])
    async with served(session) as (_, _, client):
        with pytest.raises(openai.BadRequestError, match=rf"tools\[1\]: expected the type 'function', got '{kind}'"):
            await client.responses.create(model="m", input="Q", tools=[LOOKUP, {"type": kind, "name": "n"}])
