"""What all servers of ours do alike: who sends half a request, or leaves, costs nothing; errors name what to set."""

import asyncio

import pytest

from agentenv.endpoint.server import Endpoint
from agentenv.errors import ConfigError
from agentenv.http_serving.doors import Doors, token_of
from agentenv.rm.serve import RewardServer
from agentenv.sandbox.fusion_server import FusionServer
from agentenv.sandbox.types import Isolation
from tests.connections import connected


class Idle:
    """A sandbox and a scorer that are never asked."""

    isolation, run_slots = Isolation.NONE, 1


def endpoint():
    """One with a session that is never asked."""
    made = Endpoint()
    made._sessions["mine"] = object()
    return made


SERVERS = {
    "/run_code": lambda: FusionServer(Idle()),
    "/get_reward": lambda: RewardServer(Idle()),
    "/v1/chat/completions": endpoint,
}


@pytest.mark.parametrize("path", SERVERS)
async def test_half_a_head_is_cut_off(path):
    server = SERVERS[path]()
    server._header_s = 0.2
    async with server, connected(server) as (reader, writer):
        writer.write(b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\nx-a: " % path.encode())
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("path", SERVERS)
async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error(path, caplog):
    async with SERVERS[path]() as server:
        async with connected(server) as (_, writer):
            head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\ncontent-type: application/json\r\n"
            session = "x-session-id: mine\r\n"
            writer.write(f'{head}{session}content-length: 100\r\n\r\n{{"code": "print'.encode())
            await writer.drain()
        await asyncio.sleep(0.1)
    assert caplog.text == ""


@pytest.mark.parametrize("path", SERVERS)
async def test_a_server_that_was_closed_starts_again(path):
    server = SERVERS[path]()
    for _ in range(2):
        async with server, connected(server) as (reader, writer):
            writer.write(f"GET /health HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\nconnection: close\r\n\r\n".encode())
            said = await asyncio.wait_for(reader.read(), 60)
            assert said.startswith(b"HTTP/1.1 200"), said
        await server.close()


@pytest.mark.parametrize(
    ("doors", "says"),
    [
        ({"variable": "MY_TOKEN"}, "--host: .* Set MY_TOKEN or --token_file; and the names .* by --allowed_hosts"),
        ({}, r"Doors\.host: .* Set Doors\.token; and the names .* by Doors\.hosts"),
        ({"variable": "MY_TOKEN", "token": "hush"}, "--allowed_hosts: expected the names"),
        ({"token": "hush"}, r"Doors\.hosts: expected the names"),
    ],
)
def test_others_than_this_machine_need_a_token_and_the_error_says_where_it_is_set(doors, says):
    with pytest.raises(ConfigError, match=says):
        Doors("0.0.0.0", **doors)


def test_a_token_is_read_from_its_file_or_else_from_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "of the variable")
    (tmp_path / "token").write_text(" hush\n")
    (tmp_path / "empty").write_text("\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert token_of("~/token", "MY_TOKEN") == "hush"
    assert token_of(None, "MY_TOKEN") == "of the variable"
    assert token_of(None, "MY_OTHER_TOKEN") is None
    for name, says in (("empty", "expected a token, got nothing"), ("none", "expected a file with a token")):
        with pytest.raises(ConfigError, match=f"--token_file: {says}"):
            token_of(str(tmp_path / name), "MY_TOKEN")
