"""The event loop turns while many bytes of programs, policies, clients and servers are handled.

A neighbor ticks: each function whose time grows with foreign bytes first waits, in its thread, until the loop has
turned.
One that is called on the loop itself, where nothing can turn meanwhile, is named.
"""

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest

from agentenv._util.http import client as http_client
from agentenv._util.http.client import HTTPClient
from agentenv.chat.chat import Chat, ChatOptions
from agentenv.chat.encoding import Encoder
from agentenv.chat.tool_calls.parse import ToolFormat
from agentenv.core.agent import AgentInstance
from agentenv.core.types import Completion, Conversation, Limits, SamplingParams, StepResult, StopReason, Task
from agentenv.engines.chat import engine as chat_engine
from agentenv.engines.scripted import ScriptedEngine
from agentenv.engines.vllm import http as vllm_engine
from agentenv.episode.endpoint import wire
from agentenv.episode.endpoint.server import Endpoint
from agentenv.episode.endpoint.wire import OutOfTurns
from agentenv.episode.loop import run_episode
from agentenv.errors import AgentEnvError
from agentenv.interop.nemo_gym import server as gym_server
from agentenv.interop.openrlhf import reward_func
from agentenv.rewards.models import get_reward, render
from agentenv.rewards.models import vllm_http as vllm_scorer
from agentenv.rewards.models.openrlhf_wire import Sample
from agentenv.rewards.serving import server as rm_server
from agentenv.sandbox import ExecLimits, ExecResult
from agentenv.sandbox.fusion import run_code
from agentenv.sandbox.fusion import server as fusion_server
from agentenv.sandbox.fusion import wire as fusion_wire
from agentenv.sandbox.fusion.client import FusionSandbox
from agentenv.sandbox.fusion.server import FusionServer
from agentenv.sandbox.grading import (
    AssertSuite,
    AssertTest,
    FunctionSuite,
    FunctionTest,
    StdioSuite,
    StdioTest,
    asserts,
    functions,
    grade,
)
from agentenv.sandbox.grading import stdio as stdio_grading
from agentenv.sandbox.local import execution
from agentenv.sandbox.local import session as session_module
from agentenv.tools import mcp
from tests.episode.endpoint.scenes import chat_of, session_of, user
from tests.sandbox.conftest import opened

pytestmark = pytest.mark.long
LARGE = 100_000
"""Bytes or characters that take time on a loop."""
WATCHED = [
    (json, "loads"),
    (json, "dumps"),
    (json.JSONEncoder, "iterencode"),
    (Encoder, "start"),
    (Encoder, "follow"),
    (Chat, "split_action"),
    (ToolFormat, "parse"),
    (execution, "readable"),
    (session_module, "readable"),
    (run_code, "run_answer"),
    (fusion_server, "result_body"),
    (fusion_wire, "read_result"),
    (rm_server, "read_request"),
    (gym_server, "read_run"),
    (run_code, "read_run_request"),
    (fusion_server, "read_program"),
    (fusion_server, "read_grade_request"),
    (http_client, "json_bytes"),
    (vllm_engine, "completion_of"),
    (chat_engine, "completion_of"),
    (vllm_scorer, "answers_of"),
    (get_reward, "rewards_of"),
    (reward_func, "read_rewards"),
    (render, "checked"),
    (wire, "logprobs_of"),
    (stdio_grading, "_output_verdict"),
    (stdio_grading, "own_traceback"),
    (functions, "show"),
    (asserts, "show"),
]
"""What takes time that grows with its arguments."""


def size_of(value):
    """How many bytes and characters a value has."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, ExecResult):
        return size_of((value.stdout, value.stderr))
    if isinstance(value, Completion):
        return 8 * len(value.token_ids)
    if isinstance(value, Mapping):
        return sum(map(size_of, (*value, *value.values())), 1)
    return sum(map(size_of, value), 1) if isinstance(value, list | tuple) else 1


class Neighbor:
    """Ticks beside the work."""

    def __init__(self):
        self.loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
        self.delayed, self.handled = [], []
        """Functions that were called on the loop with much, and those during which it turned."""

    def beside(self, name, function):
        """The function, which waits for a tick."""

        def called(*args, **more):
            if size_of(args) + size_of(more) >= LARGE:
                if threading.get_ident() == self.thread:
                    self.delayed.append(name)
                else:
                    ticked = threading.Event()
                    self.loop.call_soon_threadsafe(ticked.set)
                    assert ticked.wait(60)
                    self.handled.append(name)
            return function(*args, **more)

        return called


@pytest.fixture
async def neighbor(monkeypatch):
    """One that watches."""
    neighbor = Neighbor()
    for owner, name in WATCHED:
        monkeypatch.setattr(owner, name, neighbor.beside(name, getattr(owner, name)))
    yield neighbor
    assert neighbor.delayed == []
    assert neighbor.handled


async def answer_to(server, path, body, **headers):
    """The JSON that a server answers to a client in a thread of its own."""

    def ask():
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60, headers=headers) as http:
            return http.post(path, json=body).json()

    return await asyncio.to_thread(ask)


CONTROLS = "import os\nfor fd in 1, 2:\n    os.write(fd, b'\\x01' * 60_000)\n    os.write(fd, b'\\xff' * 60_000)\n"
KEPT = ExecLimits(stdout_kb=256, stderr_kb=256)
ESCAPED = "\\x01" * 60_000 + "\\xff" * 60_000


async def a_program(sandbox):
    result = await sandbox.run(CONTROLS, limits=KEPT)
    assert result.stdout == result.stderr == ESCAPED


async def a_session(sandbox):
    async with sandbox.session(limits=KEPT) as turns:
        turn = await turns.run(CONTROLS + "'\\x01\\u20ac' * 60_000")
        assert turn.stdout == turn.stderr == ESCAPED


async def a_session_whose_program_ends(sandbox):
    async with sandbox.session(limits=KEPT) as turns:
        turn = await turns.run(CONTROLS + "os._exit(0)")
        assert turn.stdout == turn.stderr == ESCAPED


async def graded_functions(sandbox):
    suite = FunctionSuite("f", hidden=(FunctionTest((1,), 1),))
    result = await grade(sandbox, CONTROLS + "def f(x): return 'y' * 100_000", suite, limits=KEPT)
    assert result.score == 0.0


async def graded_asserts(sandbox):
    suite = AssertSuite(("f",), hidden=(AssertTest("assert f(f(1)) == 1"),))
    result = await grade(sandbox, CONTROLS + "def f(x): return 'y' * 100_000", suite, limits=KEPT)
    assert result.score == 0.0


@pytest.mark.parametrize("mode", ["exact", "lines", "tokens", "floats", "apps", "livecodebench"])
async def test_graded_output(neighbor, mode):
    sandbox = await opened()
    suite = StdioSuite(hidden=(StdioTest("", "1 " * 60_000),), mode=mode)
    program = "import os, sys\nsys.stderr.write('  File \"x\", line 1\\n' * 9000)\nsys.stdout.write('1 ' * 60_000)"
    assert (await grade(sandbox, program, suite, limits=KEPT)).score == 1.0
    await sandbox.aclose()


async def served(sandbox):
    async with FusionServer(sandbox) as server:
        found = await answer_to(server, "/run_code", {"code": CONTROLS, "language": "python"})
        assert found["run_result"]["stdout"] == "\x01" * 60_000 + "\\xff" * 60_000


async def a_fusion_client(sandbox):
    async with FusionServer(sandbox) as server, FusionSandbox(server.url) as far:
        assert (await far.run(CONTROLS, limits=KEPT)).stdout.startswith("\\x01" * 60_000)


async def a_far_grade(sandbox):
    async with FusionServer(sandbox) as server, FusionSandbox(server.url) as far:
        await graded_functions(far)


SANDBOX = [
    a_program, a_session, a_session_whose_program_ends, graded_functions, graded_asserts, served, a_fusion_client,
    a_far_grade,
]  # fmt: skip


@pytest.mark.parametrize("path", SANDBOX, ids=lambda path: path.__name__)
async def test_outputs_of_programs(neighbor, path):
    sandbox = await opened()
    await path(sandbox)
    await sandbox.aclose()


MESSAGE = {"role": "user", "content": "x " * LARGE}
ROOM = Limits(max_length=1 << 20, max_turns=9)


async def ask_an_endpoint(*conversations):
    """The answers of an endpoint to messages that begin or continue a conversation."""
    session, _ = session_of(["4"] * 9, limits=ROOM)
    found = []
    async with Endpoint() as endpoint:
        with endpoint.open(session) as address:
            for messages in conversations:
                headers = {"authorization": f"Bearer {address.api_key}"}
                found.append(await answer_to(endpoint, "/v1/chat/completions", {"messages": messages}, **headers))
    assert [each["choices"][0]["message"]["content"] for each in found] == ["4"] * len(conversations)


async def test_a_message_to_an_endpoint(neighbor):
    await ask_an_endpoint([MESSAGE])


async def test_a_message_that_continues_a_conversation(neighbor):
    await ask_an_endpoint([user("?")], [user("?"), {"role": "assistant", "content": "4"}, MESSAGE])


async def test_a_request_counts_while_its_messages_are_encoded():
    session, _ = session_of(["4"] * 9, limits=Limits(max_length=1 << 20, max_turns=1))
    both = [session.complete({"messages": [MESSAGE]}), session.complete({"messages": [user("?")]})]
    answered, refused = await asyncio.gather(*both, return_exceptions=True)
    assert answered["choices"]
    assert isinstance(refused, OutOfTurns)


async def test_a_session_that_ends_while_messages_are_encoded_records_nothing_of_them():
    session, _ = session_of(["4"] * 9, limits=ROOM)
    await session.complete({"messages": [user("?")]})
    asking = asyncio.ensure_future(session.complete({"messages": [MESSAGE]}))
    await asyncio.sleep(0)
    session.close()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(session.finish(1.0).turns) == 1


@pytest.mark.parametrize("observation", ["x " * LARGE, [MESSAGE]], ids=["text", "message"])
@pytest.mark.parametrize("history", ["keep", "rerender"])
@pytest.mark.parametrize("is_first", [True, False])
async def test_what_an_environment_says(neighbor, observation, history, is_first):
    class Talker(AgentInstance):
        """It says much."""

        async def reset(self, states, **_):
            return {"observation": observation if is_first else [user("?")]}

        async def step(self, states, **_):
            return StepResult("." if is_first else observation, terminated=states["turn_index"] > 0)

    chat = Chat(chat_of("Qwen3").tokenizer, options=ChatOptions(history=history))
    chat._encode = neighbor.beside("encode", chat._encode)
    engine = ScriptedEngine(["4"] * 2, chat.tokenizer)
    done = await run_episode(Talker, Task("?"), engine=engine, chat=chat, limits=ROOM)
    assert (done.stop_reason, done.error) == (StopReason.TERMINATED, None)


async def test_what_a_policy_says(neighbor):
    class Listener(AgentInstance):
        """It ends at once."""

        async def step(self, states, **_):
            return StepResult("", terminated=True)

    chat = chat_of("Qwen3")
    engine = ScriptedEngine(["<tool_call>" * LARGE], chat.tokenizer)
    done = await run_episode(Listener, Task([user("?")]), engine=engine, chat=chat, limits=ROOM)
    assert (done.stop_reason, done.error) == (StopReason.TERMINATED, None)


async def test_tokens_that_an_endpoint_names(neighbor):
    chat = chat_of("Qwen3")
    session, _ = session_of(["<tool_call>" * LARGE], limits=ROOM)
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with Endpoint() as endpoint:
        with endpoint.open(session) as address:
            headers = {"authorization": f"Bearer {address.api_key}"}
            body = {"messages": [user("?")], "tools": tools, "logprobs": True}
            (choice,) = (await answer_to(endpoint, "/v1/chat/completions", body, **headers))["choices"]
    assert len(choice["logprobs"]["content"]) >= LARGE
    assert "parse" in neighbor.handled
    assert "logprobs_of" in neighbor.handled
    assert chat.tokenizer


class Idle:
    """A scorer and a sandbox that are never asked."""

    isolation, run_slots = "none", 1


GYM_CHAT = SimpleNamespace(options=SimpleNamespace(history="keep"))
REQUESTS = {
    "/get_reward": (
        "read_request", lambda: rm_server.RewardServer(Idle()), {"messages": [[{"role": "user"}] * 40_000, 1]},
    ),
    "/run_code": (
        "read_run_request",
        lambda: FusionServer(Idle()),
        {"code": "", "language": "python", "files": {f"{number}/a": "" for number in range(60_000)}},
    ),
    "/grade": ("read_grade_request", lambda: FusionServer(Idle()), {"code": "x" * LARGE}),
    "/run": (
        "read_run",
        lambda: gym_server.GymServer(None, engine=None, chat=GYM_CHAT),
        {"responses_create_params": {"input": [{"role": 1}] * 60_000}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_request_to_a_server(neighbor, path):
    read, serve, body = REQUESTS[path]
    async with serve() as server:
        assert await answer_to(server, path, body)
    assert read in neighbor.handled


@asynccontextmanager
async def answering(content):
    """The address of a server that answers so to whatever is asked of it."""

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        await reader.readexactly(int(length[1]) if length else 0)
        status, body = b"200 OK", content
        if b"/models" in head:
            body = b'{"data": [{"id": "m"}]}'
        elif b"/inference" in head:
            status = b"404 Not Found"
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (status, len(body), body))
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def asked(client, ask):
    """The answer that a client gets; it is closed."""
    try:
        return await ask(client)
    finally:
        await client.close()


def generated(engine, prompt):
    return asked(engine, lambda each: each.generate(prompt, SamplingParams(max_tokens=9), request_id="a/0"))


def scored_by(scorer, conversation="?"):
    return asked(scorer, lambda each: each.score(conversation))


LOGPROBS = {"tokens": ["token_id:5"] * 60_000, "token_logprobs": [-1.0] * 60_000}
CHOICE = {"prompt_token_ids": [1, 2, 3], "token_ids": [5] * 60_000, "finish_reason": "length", "logprobs": LOGPROBS}
TALK = [{"role": role, "content": "."} for role in ("user", "assistant")] * 20_000
ANSWERS = {
    "an object": (
        "loads",
        lambda url: asked(HTTPClient(url), lambda client: client.attempt_json("/", None, len)),
        {"values": [[]] * 40_001},
    ),
    "tokens": (
        "completion_of",
        lambda url: generated(vllm_engine.VLLMHTTPEngine(url, max_retries=0), [1, 2, 3]),
        {"choices": [CHOICE]},
    ),
    "a chat completion": (
        "completion_of",
        lambda url: generated(chat_engine.ChatEngine(url, model="m", max_retries=0), Conversation([user("?")])),
        {"choices": [{"finish_reason": "stop", "message": {"content": "x" * LARGE}}]},
    ),
    "a list of numbers": (
        "answers_of",
        lambda url: scored_by(vllm_scorer.VLLMHTTPScorer(url, label=0, bounded=True)),
        {"data": [{"index": 0, "data": [1.5] * LARGE}]},
    ),
    "rewards": (
        "rewards_of",
        lambda url: scored_by(get_reward.GetRewardScorer(f"{url}/get_reward", retries=0)),
        {"rewards": [1.5] * LARGE},
    ),
    "rewards to OpenRLHF": (
        "read_rewards",
        lambda url: reward_func.RewardServers([url]).judge([Sample("?", "", None)], 60.0),
        {"rewards": [1.5] * LARGE},
    ),
    "a conversation": (
        "checked",
        lambda url: scored_by(get_reward.GetRewardScorer(f"{url}/get_reward", retries=0, send_messages=True), TALK),
        {"rewards": [1.5]},
    ),
}


@pytest.mark.parametrize("kind", ANSWERS)
async def test_the_answer_of_a_server(neighbor, kind):
    read, ask, content = ANSWERS[kind]
    async with answering((await asyncio.to_thread(json.dumps, content)).encode()) as url:
        with contextlib.suppress(AgentEnvError):
            await ask(url)
    assert read in neighbor.handled


@pytest.mark.parametrize(
    ("status", "content", "told"),
    [
        (503, b"x" * 10**6, {"code": mcp.LOST, "message": "HTTP status 503"}),
        (400, b'{"error": {"code": 7, "message": "%s"}}' % (b"x" * 50_000), {"code": 7, "message": "x" * 50_000}),
    ],
)
async def test_the_refusal_of_an_mcp_server(neighbor, status, content, told):
    async def send(request):
        return httpx.Response(status, content=content, request=request)

    call = {"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": {"x": [1] * LARGE}}
    request = await asyncio.to_thread(httpx.Request, "POST", "http://127.0.0.1/", json=call)
    answer = await mcp._sent(httpx, send, request)
    assert answer.json()["error"] == told
