"""The server: OpenAI's own SDK against it, errors with their statuses, clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import httpx
import pytest

from agentenv.core.types import Limits
from agentenv.episode.endpoint import server
from agentenv.episode.endpoint.server import Endpoint
from agentenv.episode.endpoint.session import SessionOptions
from tests.episode.endpoint.scenes import CALLS, NAMES, TOOL, assert_exact, session_of, user
from tests.waits import until

openai = pytest.importorskip("openai")


@contextlib.asynccontextmanager
async def served(session, **options):
    async with Endpoint(**options) as endpoint:
        with endpoint.open(session) as address:
            client = openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0)
            async with client:
                yield endpoint, address, client


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stream", [False, True])
async def test_openais_sdk_runs_a_tool_loop(name, stream):
    session, engine = session_of([CALLS[name], "It is 42."], name)
    async with served(session) as (_, _, client):
        messages = [user("What is 6 x 7?")]
        if stream:
            async with client.chat.completions.stream(model="policy", messages=messages, tools=TOOL) as events:
                completion = await events.get_final_completion()
        else:
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOL)
        choice = completion.choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"query": "6 x 7"}
        messages += [
            choice.message.model_dump(exclude={"parsed"}) if not stream else said(choice.message),
            {"role": "tool", "tool_call_id": call.id, "content": "42"},
        ]
        if stream:
            text, usage = "", None
            chunks = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOL, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in chunks:
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                usage = chunk.usage or usage
            assert usage.prompt_tokens == len(engine.requests[1].prompt_token_ids)
        else:
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOL)
            text = completion.choices[0].message.content
    assert text == "It is 42."
    trajectory = session.finish(1.0)
    assert (len(trajectory.segments), session.mismatches) == (1, [])
    assert_exact(trajectory, engine)


def said(message):
    calls = [call.model_dump(exclude={"function": {"parsed_arguments"}}) for call in message.tool_calls]
    return {"role": "assistant", "content": message.content, "tool_calls": calls}


@pytest.mark.long
async def test_a_session_is_named_by_path_header_or_key():
    session, _ = session_of(["a"], options=SessionOptions(model="tiny"))
    async with served(session) as (endpoint, address, _), httpx.AsyncClient(base_url=endpoint.url) as http:
        body = {"messages": [user("Q")]}
        for headers in ({"x-session-id": address.api_key}, {"authorization": f"Bearer {address.api_key}"}):
            answer = await http.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
        models = await http.get(f"/s/{address.api_key}/v1/models")
        assert [model["id"] for model in models.json()["data"]] == ["tiny"]
        model = await http.get(f"/s/{address.api_key}/v1/models/org/any")
        assert (model.json()["id"], model.json()["object"]) == ("org/any", "model")
        assert (await http.get("/health")).json() == {"status": "ok", "sessions": 1}


@pytest.mark.long
async def test_errors_have_openais_form_and_their_own_status():
    session, _ = session_of(["a"], crash_at=[0], limits=Limits(max_length=512))
    async with (
        served(session, max_body_bytes=10_000) as (endpoint, address, _),
        httpx.AsyncClient(base_url=endpoint.url) as http,
    ):
        route = f"/s/{address.api_key}/v1/chat/completions"
        cases = [
            (http.post("/s/nobody/v1/chat/completions", json={}), 404, "unknown_session"),
            (http.post("/v1/chat/completions", json={}), 404, "unknown_session"),
            (http.get("/v2"), 404, "http_error"),
            (http.get("/s/nobody/v1/models/m"), 404, "unknown_session"),
            (http.get(route), 405, "http_error"),
            (http.post(route, content=b"{"), 400, "invalid_request"),
            (http.post(route, content=b"[" * 9_000), 400, "invalid_request"),
            (http.post(route, content=b"\xff\xfe"), 400, "invalid_request"),
            (http.post(route, json={"messages": [], "x": "y" * 20_000}), 413, "body_too_large"),
            (http.post(route, json={"messages": [user("Q")]}), 503, "engine_failed"),
            (http.post(route, json={"messages": [user("long " * 1500)]}), 400, "context_length_exceeded"),
        ]
        for request, status, code in cases:
            answer = await request
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            # litellm takes every error of this type for 400, and its agents send the request again
            assert (answer.json()["error"]["type"] == "invalid_request_error") == (status not in (404, 503))
            assert answer.json()["error"]["message"]


@pytest.fixture
def impatient(monkeypatch):
    """Start streams before their answer at once."""
    monkeypatch.setattr(server, "_STATUS_S", 0.01)
    monkeypatch.setattr(server, "_PING_S", 0.01)


@pytest.mark.parametrize("api", ["chat/completions", "responses"])
async def test_a_stream_starts_before_its_answer_and_is_kept_alive(impatient, api):
    may_answer = asyncio.Event()

    async def script(request):
        await may_answer.wait()
        return "hello"

    session, _ = session_of(script)
    seen = []
    async with served(session) as (_, address, _), httpx.AsyncClient(timeout=30) as http:
        body = {"messages": [user("Q")], "input": "Q", "stream": True}
        async with http.stream("POST", f"{address.base_url}/{api}", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                seen.append(line)
                if line.startswith(":"):
                    may_answer.set()
    first = next(json.loads(line.removeprefix("data: ")) for line in seen if line.startswith("data: "))
    assert first.get("type") == "response.created" or first["choices"][0]["delta"]["role"] == "assistant"
    assert seen.index(": no answer yet") < min(index for index, line in enumerate(seen) if "hello" in line)
    assert session.finish(1.0).refusals == {}


async def test_a_bug_of_the_engine_is_a_503_and_the_records_contract_error():
    session, _ = session_of(lambda _: 1 // 0)
    async with served(session) as (_, address, _), httpx.AsyncClient(timeout=30) as http:
        answer = await http.post(f"{address.base_url}/chat/completions", json={"messages": [user("Q")]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
    assert session.finish(1.0).error.kind == "contract"


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_an_error_after_the_start_of_a_stream_is_an_error_of_the_sdk_and_counted(impatient, api):
    may_fail = asyncio.Event()

    async def script(request):
        await may_fail.wait()
        raise RuntimeError("gone")

    session, _ = session_of(script)
    async with served(session) as (_, _, client):
        if api == "chat":
            stream = await client.chat.completions.create(model="m", messages=[user("Q")], stream=True)
        else:
            stream = await client.responses.create(model="m", input="Q", stream=True)
        may_fail.set()
        with pytest.raises(openai.APIError, match="RuntimeError: gone"):
            [event async for event in stream]
    trajectory = session.finish(1.0)
    assert (trajectory.error.kind, trajectory.refusals) == ("infra", {"engine_failed": 1})


async def test_an_error_before_the_start_of_a_stream_has_its_status():
    session, _ = session_of(["a"], crash_at=[0])
    async with served(session) as (_, _, client):
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=[user("Q")], stream=True)


async def test_a_client_that_leaves_a_stream_cancels_its_generation(impatient):
    session, engine = session_of(["a"], latency_s=60)
    async with served(session) as (_, _, client):
        stream = await client.chat.completions.create(model="m", messages=[user("Q")], stream=True)
        await stream.close()
        await until(lambda: engine.num_cancelled)
        await until(lambda: session.refusals)
    trajectory = session.finish()
    assert (trajectory.error, trajectory.refusals) == (None, {"cancelled": 1})


@pytest.mark.long
async def test_a_client_that_goes_away_cancels_its_generation():
    session, engine = session_of(["a"], latency_s=3600)
    async with served(session) as (_, _, client):
        asked = asyncio.ensure_future(client.chat.completions.create(model="m", messages=[user("Q")]))
        await until(lambda: engine.requests)
        asked.cancel()
        await until(lambda: engine.num_cancelled)
    assert engine.num_cancelled == 1
    assert session.finish().error is None


async def test_a_generation_ends_with_its_session_also_where_the_client_stays():
    session, engine = session_of(["a"], latency_s=60)
    async with Endpoint() as endpoint, httpx.AsyncClient(timeout=30) as http:
        with endpoint.open(session) as address:
            url = f"{address.base_url}/chat/completions"
            asked = asyncio.ensure_future(http.post(url, json={"messages": [user("Q")]}))
            await until(lambda: engine.requests)
        answer = await asked
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_session")
    assert engine.num_cancelled == 1


async def test_a_connection_outlives_the_idle_time_of_every_client_and_answers_at_once():
    """httpx closes idle connections after 5 s, aiohttp after 15 s; if the server is first, a request may be lost.

    With Nagle's algorithm each answer would come 40 ms late.
    """
    session, _ = session_of(["a"])
    async with served(session) as (endpoint, address, _), httpx.AsyncClient(timeout=30) as http:
        await http.post(f"{address.base_url}/chat/completions", json={"messages": [user("Q")]})
        (connection,) = endpoint._uvicorn._server.server_state.connections
        assert connection.timeout_keep_alive > 60
        taken = connection.transport.get_extra_info("socket")
        assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_client_that_wants_a_websocket_is_refused_without_a_word_in_the_runs_output(caplog):
    session, _ = session_of(["a"])
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "x"}
    async with served(session) as (_, address, _), httpx.AsyncClient() as http:
        answer = await http.get(f"{address.base_url}/responses", headers=upgrade)
    assert answer.status_code == 405
    assert caplog.records == []
