"""Tools of MCP servers: real servers, over stdio and HTTP, that work, hang, die and lose their answers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from agentenv.errors import ConfigError, InfraError
from agentenv.tools.calling import ToolCall
from agentenv.tools.mcp import McpServer, close_shared
from agentenv.tools.toolset import Toolset
from tests.damage import nested

pytest.importorskip("mcp")
SERVER = (sys.executable, "-I", str(Path(__file__).parent / "mcp_stdio_server.py"))


@asynccontextmanager
async def opened(*servers, **options):
    tools = await Toolset(*servers, **options).begin()
    try:
        yield tools
    finally:
        await tools.aclose()
        await close_shared()


def stdio(**options):
    return McpServer(command=SERVER, **options)


async def said(tools, name, **arguments):
    return (await results(tools, (name, arguments)))[0]


def limit(tools, name, limit_s):
    """Give one tool a limit: the others have the time that a busy machine needs."""
    tools.tools[name] = tools.tools[name].within(limit_s)


async def results(tools, *calls):
    items = [ToolCall(name, arguments, f"c{i:08}", "") for i, (name, arguments) in enumerate(calls)]
    return [message["content"] for message in (await tools.answer(items)).messages]


def is_running(pid):
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- what a server offers ---------------------------------------------------------------------------------------------


async def test_all_pages_of_tools_are_listed_and_schemas_are_passed_on_unchanged():
    async with opened(stdio()) as tools:
        assert list(tools.tools)[:3] == ["add", "echo", "count"]
        assert len(tools.tools) == 13
        schema = tools.tools["echo"].schema
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "x-kept": [1, {"any": "thing"}]}
    function = {"name": "echo", "description": "Tool echo.", "parameters": parameters}
    assert schema == {"type": "function", "function": function}


async def test_virtual_time_stands_still_while_a_server_works(virtual_clock, monkeypatch):
    monkeypatch.setattr("agentenv.testing.clock._QUIET_S", 0.001)  # of its pipes alone it would not be known
    async with opened(stdio(per_episode=True)) as tools:
        await asyncio.sleep(3600)
        assert await said(tools, "add", a=2, b=3) == "5"
        assert virtual_clock.elapsed_s == 3600


async def test_a_subset_with_a_prefix_is_called_by_the_name_that_the_server_knows():
    async with opened(stdio(tools=["add"]), stdio(tools=["add"], prefix="far_")) as tools:
        assert list(tools.tools) == ["add", "far_add"]
        assert await said(tools, "far_add", a=2, b=3) == "5"


async def test_content_of_a_tool_other_than_text_is_named():
    async with opened(stdio()) as tools:
        assert await said(tools, "picture") == (
            "[Content that is not text, not shown: image, image/png]\na cat\n[A resource, not shown: file:///x]\n"
            "[Resource file:///y]\ninside"
        )


async def test_an_error_in_a_call_is_reported_to_the_model():
    async with opened(stdio()) as tools:
        assert await said(tools, "fail") == "Error: it does not work"
        assert (await said(tools, "refuse")).startswith("Error: ")
        assert "no such argument" in await said(tools, "refuse")
        assert (await said(tools, "nothing")).startswith("Error: unknown tool 'nothing'")
        assert await said(tools, "add", a=1) == "1"


UNSENDABLE = {
    "half a character in a key": {"\ud800": 1},
    "101 levels": nested(100),
    "too many digits": 10**5000,
    "no JSON": object(),
}


@pytest.mark.parametrize("value", UNSENDABLE.values(), ids=UNSENDABLE)
async def test_arguments_that_cannot_be_sent_are_reported_and_the_connection_stays(value):
    async with opened(stdio()) as tools:
        pid = await said(tools, "pid")
        bad, good = await results(tools, ("echo", {"text": value}), ("add", {"a": 2, "b": 3}))
        assert bad.startswith("Error: wrong arguments for echo: expected JSON ")
        assert good == "5"
        assert await said(tools, "pid") == pid


async def test_the_deepest_arguments_that_a_call_can_have_are_sent():
    async with opened(stdio()) as tools:
        assert not (await said(tools, "add", a=1, b=2, c=nested(99))).startswith("Error: wrong arguments for")


# --- what a server may not do -----------------------------------------------------------------------------------------


async def test_a_program_sees_none_of_our_variables_but_those_that_are_passed(monkeypatch):
    monkeypatch.setenv("SECRET_OF_OURS", "s3cret")
    monkeypatch.setenv("TOKEN_OF_ITS", "given")
    async with opened(stdio(env={"MODE": "test"}, pass_env=["TOKEN_OF_ITS"])) as tools:
        found = json.loads(await said(tools, "env"))
    assert found["MODE"] == "test"
    assert found["TOKEN_OF_ITS"] == "given"
    assert "SECRET_OF_OURS" not in found
    assert set(found) <= {"MODE", "TOKEN_OF_ITS", "HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LC_CTYPE"}


async def test_stderr_of_a_program_is_not_ours(capfd):
    async with opened(stdio()) as tools:
        pid = await said(tools, "pid")
        assert os.readlink(f"/proc/{pid}/fd/2").startswith("pipe:")
    assert capfd.readouterr() == ("", "")


async def test_a_call_without_an_end_is_reported_and_the_server_continues():
    async with opened(stdio()) as tools:
        limit(tools, "hang", 0.2)
        assert await said(tools, "hang") == "Error: hang returned no result within 0.2 s."
        assert await said(tools, "add", a=1, b=1) == "2"


@pytest.mark.long
async def test_a_shorter_limit_of_the_toolset_counts_and_a_longer_one_does_not():
    async with opened(stdio(), timeout_s=0.2) as tools:
        assert await said(tools, "hang") == "Error: hang returned no result within 0.2 s."
    async with opened(stdio(timeout_s=0.2), timeout_s=60) as tools:
        assert await said(tools, "hang") == "Error: hang returned no result within 0.2 s."


@pytest.mark.long
async def test_a_server_that_no_longer_answers_at_all_is_an_infra_error(monkeypatch):
    monkeypatch.setattr("agentenv.tools.mcp._PING_LIMIT_S", 0.2)
    async with opened(stdio(timeout_s=0.2)) as tools:
        with pytest.raises(InfraError, match="expected a sign of life"):
            await said(tools, "freeze")


@pytest.mark.parametrize("per_episode", [False, True])
async def test_a_server_that_dies_is_an_infra_error_and_the_next_episode_has_a_new_one(per_episode):
    server = stdio(per_episode=per_episode)
    tools = await Toolset(server).begin()
    first = await said(tools, "pid")
    with pytest.raises(InfraError, match=r"(?s)expected an answer.*last words"):
        await said(tools, "die")
    with pytest.raises(InfraError, match="expected a connection"):
        await said(tools, "add", a=1)
    await tools.aclose()
    async with opened(server) as tools:
        assert await said(tools, "pid") != first
    assert not is_running(int(first))


async def test_an_answer_that_was_lost_is_an_infra_error_of_that_call_alone():
    async with opened(stdio()) as tools, opened(stdio()) as others:
        waiting = asyncio.ensure_future(said(others, "meet"))
        with pytest.raises(InfraError, match=r"expected an answer, got .*lost\.$"):
            await said(tools, "server_error")
        assert [await said(tools, "meet"), await waiting] == ["met", "met"]


@pytest.mark.parametrize("program", ["no-such-program-here", __file__])
async def test_a_program_that_is_not_there_or_cannot_be_run_is_a_config_error(program, tmp_path):
    with pytest.raises(ConfigError, match="expected a program"):
        await Toolset(McpServer(command=(program,), cwd=tmp_path)).begin()


async def test_a_program_that_ends_at_once_is_an_infra_error_that_quotes_it():
    with pytest.raises(InfraError, match="no such module"):
        await Toolset(McpServer(command=(*SERVER, "broken"))).begin()


@pytest.mark.long
async def test_a_program_that_says_nothing_is_given_up_in_time():
    with pytest.raises(InfraError, match=r"not open after 0\.3 s"):
        await Toolset(McpServer(command=(*SERVER, "silent"), open_timeout_s=0.3)).begin()


async def test_episodes_that_wait_for_a_server_that_cannot_start_do_not_try_each_in_turn(tmp_path):
    server = McpServer(command=("sh", "-c", f"echo tried >> {tmp_path}/log; echo no licence >&2; exit 1"))
    failed = await asyncio.gather(*(Toolset(server).begin() for _ in range(4)), return_exceptions=True)
    assert [type(error) for error in failed] == [InfraError] * 4
    assert all("no licence" in str(error) for error in failed)
    with pytest.raises(InfraError):
        await Toolset(server).begin()
    assert (tmp_path / "log").read_text() == "tried\n" * 2


# --- sharing and closing ----------------------------------------------------------------------------------------------


async def test_episodes_share_a_server_and_each_its_own_where_it_is_so_declared():
    async with opened(stdio()) as one, opened(stdio()) as other:
        assert await said(one, "pid") == await said(other, "pid")
    mine = stdio(per_episode=True)
    async with opened(mine) as one, opened(mine) as other:
        assert await said(one, "pid") != await said(other, "pid")


@pytest.mark.parametrize("per_episode", [False, True])
async def test_opened_and_closed_in_different_tasks_it_leaves_no_process_and_no_task(per_episode):
    before = asyncio.all_tasks()
    tools = await asyncio.create_task(Toolset(stdio(per_episode=per_episode)).begin())
    pid = int(await asyncio.create_task(said(tools, "pid")))
    assert is_running(pid)
    await asyncio.create_task(tools.aclose())
    assert is_running(pid) is not per_episode
    await close_shared()
    assert not is_running(pid)
    assert asyncio.all_tasks() == before


@pytest.mark.long
async def test_cancelled_while_it_opens_it_leaves_no_process_and_no_task(tmp_path):
    before = asyncio.all_tasks()
    command = ("sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    opening = asyncio.ensure_future(Toolset(McpServer(command=command)).begin())
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        await asyncio.sleep(0.01)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not is_running(int((tmp_path / "pid").read_text()))
    assert asyncio.all_tasks() == before


def test_a_shared_server_ends_with_the_event_loop():
    async def run():
        tools = await Toolset(stdio()).begin()
        pid = int(await said(tools, "pid"))
        await tools.aclose()
        return pid

    assert not is_running(asyncio.run(run()))


async def test_a_cancelled_call_leaves_the_connection_as_it_was():
    async with opened(stdio()) as tools:
        call = asyncio.ensure_future(said(tools, "hang"))
        while await said(tools, "count") == "1":
            pass
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await said(tools, "add", a=4) == "4"


# --- HTTP, with the package's own server ------------------------------------------------------------------------------


MANY = 110
"""More calls at a time than an HTTP client has connections by default."""


@contextmanager
def served(port=0, transport="http", gateway=lambda app: app):
    """The package's server on loopback, in a thread, behind a gateway; gives its address and a way to end it."""
    import uvicorn
    from mcp.server import MCPServer

    server = MCPServer("test", log_level="CRITICAL")
    meeting = asyncio.Barrier(MANY)

    @server.tool()
    def add(a: int, b: int = 0) -> int:
        """Add."""
        return a + b

    @server.tool()
    async def hang() -> str:
        """Hang."""
        await asyncio.sleep(1000)
        return ""

    @server.tool()
    async def meet() -> str:
        """Meet."""
        await meeting.wait()
        return "met"

    @server.tool()
    def much() -> str:
        """Say much."""
        return "x" * 2_000_000

    app = gateway(server.streamable_http_app() if transport == "http" else server.sse_app())
    listening = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=0)  # other tests read these loggers
    web = uvicorn.Server(config)
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listening]})
    thread.start()

    def stop():
        web.should_exit = True
        thread.join()
        listening.close()

    number = listening.getsockname()[1]
    try:
        yield f"http://127.0.0.1:{number}/{'mcp' if transport == 'http' else 'sse'}", stop
    finally:
        stop()


async def stopped(stop):
    await asyncio.get_running_loop().run_in_executor(None, stop)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["http", "sse"])
async def test_a_server_over_http_is_called_and_its_refusals_are_reported(transport):
    with served(transport=transport) as (url, stop):
        async with opened(McpServer(url=url, transport=transport)) as tools:
            assert set(tools.tools) == {"add", "hang", "meet", "much"}
            limit(tools, "hang", 0.5)
            assert await results(tools, ("add", {"a": 1, "b": 2}), ("add", {"a": "3"})) == ["3", "3"]
            assert (await said(tools, "add", a="x")).startswith("Error: ")
            assert await said(tools, "hang") == "Error: hang returned no result within 0.5 s."
            assert await said(tools, "add", a=1) == "1"
        await stopped(stop)


def refuses(status, word):
    """A gateway that answers requests with that word in them itself."""

    def around(app):
        async def gate(scope, receive, send):
            message = await receive() if scope["type"] == "http" else {}
            if word in message.get("body", b""):
                headers = [(b"content-type", b"text/html")]
                await send({"type": "http.response.start", "status": status, "headers": headers})
                await send({"type": "http.response.body", "body": b"<h1>Not now</h1>"})
                return
            messages = [message] if message else []

            async def receive_again():
                return messages.pop() if messages else await receive()

            await app(scope, receive_again, send)

        return gate

    return around


@pytest.mark.long
@pytest.mark.parametrize("status", [404, 503])
async def test_a_gateways_refusal_of_a_call_is_an_infra_error_and_no_words_of_the_tool(status):
    with served(gateway=refuses(status, b'"add"')) as (url, stop):
        async with opened(McpServer(url=url)) as tools:
            with pytest.raises(InfraError, match=f"HTTP status {status}"):
                await said(tools, "add", a=1)
            assert len(await said(tools, "much")) > 8000  # the connection serves the others
        await stopped(stop)


@pytest.mark.long
async def test_over_http_many_calls_run_at_the_same_time_and_a_result_may_be_long():
    with served() as (url, stop):
        async with opened(McpServer(url=url), max_calls_per_turn=MANY, max_chars=10**7) as tools:
            assert await said(tools, "much") == "x" * 2_000_000
            assert set(await results(tools, *[("meet", {})] * MANY)) == {"met"}
        await stopped(stop)


@pytest.mark.long
async def test_an_http_server_that_dies_is_an_infra_error_and_is_found_again():
    with served() as (url, stop):
        server = McpServer(url=url)
        tools = await Toolset(server).begin()
        assert await said(tools, "add", a=1) == "1"
        await stopped(stop)
        with pytest.raises(InfraError):
            await said(tools, "add", a=1)
        await tools.aclose()
        with pytest.raises(InfraError):
            await Toolset(server).begin()
    with served(port=int(url.rpartition(":")[2].partition("/")[0])) as (_, stop):
        async with opened(server) as tools:
            assert await said(tools, "add", a=2) == "2"
        await stopped(stop)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "expected command or url"),
        ({"command": ["x"], "url": "http://x"}, "expected command or url"),
        ({"command": "python server.py"}, "expected a list of texts"),
        ({"url": "ftp://x"}, "expected http://"),
        ({"url": "http://x", "transport": "udp"}, "expected http or sse"),
        ({"url": "http://x", "timeout_s": 0}, "expected seconds > 0"),
        ({"command": ["x"], "pass_env": ["NOT_SET_ANYWHERE"]}, "NOT_SET_ANYWHERE"),
        ({"comand": ["x"]}, r"expected an object with some of command, .*got \['comand'\]"),
        (["x"], "expected an object"),
    ],
)
def test_settings_that_describe_no_server_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        McpServer.of(settings)


async def test_a_tool_that_the_server_lacks_is_a_config_error():
    with pytest.raises(ConfigError, match=r"got \['sub'\]"):
        await Toolset(stdio(tools=["sub"])).begin()
    assert not [task for task in asyncio.all_tasks() if "Held" in repr(task)]


async def test_headers_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "Bearer x")
    seen = []

    async def answer(reader, writer):
        seen.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as web:
        url = f"http://127.0.0.1:{web.sockets[0].getsockname()[1]}/mcp"
        with pytest.raises(InfraError):
            await Toolset(McpServer(url=url, headers_env={"authorization": "A_TOKEN"}, open_timeout_s=60)).begin()
    assert "authorization: Bearer x" in seen[0]
    assert "A_TOKEN" in os.environ
