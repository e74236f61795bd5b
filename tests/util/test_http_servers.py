"""What all servers of ours do alike: who sends half a request, or leaves, costs nothing; errors name what to set."""

import asyncio
import base64
import json
import re
import sys
import threading
import time

import h11
import httpx
import pytest

from agentenv._util.brief import brief, brief_json
from agentenv._util.http import json_bodies
from agentenv._util.http.access import MAX_HEADER_BYTES, AccessPolicy, read_token
from agentenv._util.http.json_bodies import MAX_LEVELS, MAX_PARTS, json_text, parse_body, parse_json
from agentenv._util.off_loop import MAX_AT_ONCE, size_of
from agentenv.episode.endpoint.server import Endpoint
from agentenv.errors import ConfigError
from agentenv.rewards.serving.server import RewardServer
from agentenv.sandbox.fusion.server import FusionServer
from agentenv.sandbox.types import Isolation
from tests.util.connections import connected
from tests.waits import until


class Idle:
    """A sandbox and a scorer that are never asked."""

    isolation, run_slots = Isolation.NONE, 1


class IdleSession:
    """It is never asked, and counts nothing."""

    read = None

    def count_refusal(self, code, reason):
        pass


def endpoint():
    """One with a session that is never asked."""
    made = Endpoint()
    made._sessions["mine"] = IdleSession()
    return made


SERVERS = {
    "/run_code": lambda: FusionServer(Idle()),
    "/get_reward": lambda: RewardServer(Idle()),
    "/v1/chat/completions": endpoint,
}


@pytest.mark.long
@pytest.mark.parametrize("path", SERVERS)
async def test_half_a_head_is_cut_off(path):
    server = SERVERS[path]()
    server._header_s = 0.2
    async with server, connected(server) as (reader, writer):
        writer.write(b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\nx-a: " % path.encode())
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("before", ["", "GET /health HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n"])
@pytest.mark.parametrize("path", SERVERS)
async def test_a_head_that_is_too_long_is_refused_even_if_it_arrives_at_once(path, before):
    async with SERVERS[path]() as server, connected(server) as (reader, writer):
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\n" + "a:\r\n" * (MAX_HEADER_BYTES // 4)
        writer.write(f"{before.format(port=server.port)}{head}\r\n".encode())
        said = await asyncio.wait_for(reader.read(), 60)
    assert re.findall(rb"HTTP/1.1 (\d+)", said) == [b"200"] * bool(before) + [b"400"]


@pytest.mark.parametrize("path", SERVERS)
async def test_trailers_that_are_too_long_are_refused_even_if_they_arrive_at_once(path, caplog):
    caplog.set_level("WARNING", "agentenv._util.http.server.connections")
    async with SERVERS[path]() as server, connected(server) as (reader, writer):
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(f"{head}0\r\n".encode() + b"a:\r\n" * (MAX_HEADER_BYTES // 4) + b"\r\n")
        await asyncio.wait_for(reader.read(), 60)
    assert "Invalid HTTP request received." in caplog.text


class CountingHeaders(list):
    """Headers that count how often one of them is looked at."""

    looks = 0

    def __iter__(self):
        for header in super().__iter__():
            type(self).looks += 1
            yield header


@pytest.mark.parametrize("num", [100, 1000])
def test_the_time_to_refuse_a_request_is_linear_in_its_headers(num, monkeypatch):
    monkeypatch.setattr(CountingHeaders, "looks", 0)
    headers = CountingHeaders([(b"host", b"127.0.0.1:80"), *((b"x-%d" % i, b"") for i in range(num))])
    access = AccessPolicy("0.0.0.0", token="hush", hosts=("node7",))
    assert access.refusal({"headers": headers, "path": "/run_code"}, 80)[0] == 401
    assert CountingHeaders.looks <= 4 * (num + 1)


HUSH = {"token": "hush"}
NODES = {"hosts": ("node7", "node8:80")}
BASIC = "Basic " + base64.b64encode(b"me:hush").decode()


@pytest.mark.parametrize(
    ("policy", "headers", "status"),
    [
        ({}, [], 200), ({}, [("host", "localhost:8000")], 200), ({}, [("host", "[::1]:8000")], 200),
        ({}, [("host", "evil.com")], 400), ({}, [("host", "localhost:1")], 400), ({}, [("host", None)], 400),
        ({}, [("host", "localhost:8000"), ("host", "localhost:8000")], 400),
        ({}, [("host", "localhost:8000"), ("host", "evil.com")], 400),
        (NODES, [("host", "node7:8000")], 200), (NODES, [("host", "node8:80")], 200),
        (NODES, [("host", "node9:8000")], 400), (NODES, [("host", "node8:8000")], 400),
        ({}, [("origin", "http://127.0.0.1:8000")], 200), ({}, [("origin", "http://evil.com")], 403),
        ({}, [("origin", "null")], 403), ({}, [("sec-fetch-site", "same-origin")], 200),
        ({}, [("sec-fetch-site", "cross-site")], 403), ({}, [("sec-fetch-site", "same-site")], 403),
        (HUSH, [("authorization", "Bearer hush")], 200), (HUSH, [("authorization", "bearer hush")], 200),
        (HUSH, [("authorization", BASIC)], 200), (HUSH, [("authorization", "Bearer hus")], 401),
        (HUSH, [("authorization", "hush")], 401), (HUSH, [("authorization", "Bearer")], 401),
        (HUSH, [("authorization", "Basic !")], 401), (HUSH, [], 401),
    ],
)  # fmt: skip
def test_requests_are_of_this_site_by_its_own_name_and_have_its_token(policy, headers, status):
    own = [] if any(name == "host" for name, _ in headers) else [("host", "127.0.0.1:8000")]
    sent = [(name.encode(), value.encode()) for name, value in [*own, *headers] if value is not None]
    scope = {"method": "GET", "path": "/run_code", "headers": sent}
    refusal = AccessPolicy(**policy).refusal(scope, 8000)
    assert (200 if refusal is None else refusal[0]) == status


def test_the_token_is_asked_before_anything_else():
    access = AccessPolicy("0.0.0.0", token="hush", hosts=("node7",))
    foreign = [(b"host", b"evil"), (b"origin", b"http://evil"), (b"sec-fetch-site", b"cross-site")]
    assert access.refusal({"headers": foreign, "path": "/run_code"}, 80)[0] == 401
    known = [*foreign, (b"authorization", b"Bearer hush")]
    assert access.refusal({"headers": known, "path": "/run_code"}, 80)[0] == 400
    assert access.refusal({"headers": foreign, "path": "/v1/ping"}, 80)[0] == 400


@pytest.mark.long
@pytest.mark.parametrize("path", SERVERS)
async def test_an_answer_that_is_not_read_is_dropped(path, monkeypatch):
    monkeypatch.setattr("agentenv._util.http.server._ANSWER_S", 2.0)
    server = SERVERS[path]()

    async def send_much(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * (64 << 20)})

    monkeypatch.setattr(server, "_application", lambda: send_much)
    async with server, connected(server) as (_, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        state = server._uvicorn._server.server_state
        for present in (True, False):
            await until(lambda present=present: bool(state.connections) is present)


@pytest.mark.long
@pytest.mark.parametrize("path", SERVERS)
async def test_half_a_body_is_cut_off(path, monkeypatch):
    monkeypatch.setattr("agentenv._util.http.access.BODY_S", 0.2)
    async with SERVERS[path]() as server, connected(server) as (reader, writer):
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\ncontent-type: application/json\r\n"
        writer.write(f'{head}x-session-id: mine\r\ncontent-length: 100\r\n\r\n{{"query": ["a'.encode())
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 408")


@pytest.mark.long
@pytest.mark.parametrize("path", SERVERS)
async def test_a_client_that_leaves_in_the_middle_of_its_body_is_not_an_error(path, caplog):
    async with SERVERS[path]() as server:
        async with connected(server) as (_, writer):
            head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\ncontent-type: application/json\r\n"
            session = "x-session-id: mine\r\n"
            writer.write(f'{head}{session}content-length: 100\r\n\r\n{{"code": "print'.encode())
            await writer.drain()
        await asyncio.sleep(0.1)
    assert caplog.text == ""


@pytest.mark.long
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
    ("access", "says"),
    [
        ({"variable": "MY_TOKEN"}, "--host: .* Set MY_TOKEN or --token_file; and the names .* by --allowed_hosts"),
        ({}, r"AccessPolicy\.host: .* Set AccessPolicy\.token; and the names .* by AccessPolicy\.hosts"),
        ({"variable": "MY_TOKEN", "token": "hush"}, "--allowed_hosts: expected the names"),
        ({"token": "hush"}, r"AccessPolicy\.hosts: expected the names"),
    ],
)
def test_others_than_this_machine_need_a_token_and_the_error_says_where_it_is_set(access, says):
    with pytest.raises(ConfigError, match=says):
        AccessPolicy("0.0.0.0", **access)


def test_a_token_is_read_from_its_file_or_else_from_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "of the variable")
    (tmp_path / "token").write_text(" hush\n")
    (tmp_path / "empty").write_text("\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_token("~/token", "MY_TOKEN") == "hush"
    assert read_token(None, "MY_TOKEN") == "of the variable"
    assert read_token(None, "MY_OTHER_TOKEN") is None
    for name, says in (("empty", "expected a token, got an empty file"), ("none", "expected a file with a token")):
        with pytest.raises(ConfigError, match=f"--token_file: {says}"):
            read_token(str(tmp_path / name), "MY_TOKEN")


# --- bodies in JSON -------------------------------------------------------------------------------------------------


LARGE = b"[" + b"1," * 2 * MAX_PARTS + b"0]"


async def test_the_event_loop_turns_between_the_chunks_of_a_body(monkeypatch):
    taken = []
    receive = h11.Connection.receive_data
    monkeypatch.setattr(
        h11.Connection, "receive_data", lambda self, data: taken.append(len(data)) or receive(self, data)
    )
    content = b"1\r\n \r\n" * 20_000 + b"2\r\n{}\r\n0\r\n\r\n"
    head = b"POST /run_code HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    head += b"transfer-encoding: chunked\r\n\r\n"
    async with SERVERS["/run_code"]() as server, connected(server) as (reader, writer):
        writer.write(head + content)
        await asyncio.wait_for(reader.read(1), 60)
    assert max(taken) <= 8192


async def test_the_event_loop_continues_while_large_bodies_are_read_one_at_a_time():
    now, most, go = [], [], threading.Event()

    def read(body):
        now.append(body)
        most.append(len(now))
        turned, value = go.wait(60), parse_json(body)
        now.pop()
        return turned, value

    reading = [asyncio.ensure_future(parse_body(LARGE, read)) for _ in range(3)]
    await until(lambda: now)
    go.set()
    assert await asyncio.gather(*reading) == [(True, json.loads(LARGE))] * 3
    assert most == [1, 1, 1]


def test_a_large_body_is_read_by_python_code_which_lets_other_threads_run():
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        value = parse_json(LARGE)
    finally:
        sys.setprofile(None)
    assert value == json.loads(LARGE)
    assert calls.count("call") > 50_000  # one for each number: the reader that is written in C makes a few in all


def test_an_object_of_many_keys_is_made_while_other_threads_run():
    pairs, made, turns = [(f"{number:x}", number) for number in range(200_000)], threading.Event(), []

    def turn():
        while not made.is_set():
            turns.append(0)
            time.sleep(0)

    interval, other = sys.getswitchinterval(), threading.Thread(target=turn)
    sys.setswitchinterval(1e-4)
    try:
        other.start()
        before = len(turns)
        value = json_bodies._PythonDecoder().object_pairs_hook(pairs)
        num_turns = len(turns) - before
    finally:
        sys.setswitchinterval(interval)
        made.set()
        other.join()
    assert value == dict(pairs)
    assert num_turns > 5  # a dict of all of them at once: 1


def test_other_threads_run_between_long_integers(monkeypatch):
    monkeypatch.setattr(json_bodies, "_MAX_INTEGERS_BYTES", 10_000)
    body, calls = b"[" + b"9" * 4300 + b",-" + b"9" * 4300 + b"," + b"1" * 2000 + b",1.5]", []
    sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        value = parse_json(body)
    finally:
        sys.setprofile(None)
    assert value == json.loads(body)
    assert calls.count("_integer") == 3


@pytest.mark.parametrize("levels", [MAX_LEVELS + 1, 900, 100_000])
@pytest.mark.parametrize("path", SERVERS)
async def test_deep_json_is_refused(path, levels):
    body = "[" * levels + "]" * levels
    async with SERVERS[path]() as server, httpx.AsyncClient(timeout=60) as http:
        headers = {"content-type": "application/json", "x-session-id": "mine"}
        answer = await http.post(f"{server.url}{path}", content=body, headers=headers)
    assert answer.status_code == 400


@pytest.mark.parametrize("one", [b"[]", b"{}", b'{"a":[]}'])
def test_json_of_too_many_lists_and_objects_is_refused(one, monkeypatch):
    """The collector of garbage would look at all of them while everything stands still."""
    monkeypatch.setattr(json_bodies, "MAX_PARTS", 10)
    monkeypatch.setattr(json_bodies, "MAX_CONTAINERS", 101)
    size = one.count(b"[") + one.count(b"{")
    body = b"[" + b",".join([one] * (100 // size)) + b"]"
    assert parse_json(body) == json.loads(body)
    with pytest.raises(ValueError, match="more than 101 lists and objects"):
        parse_json(body[:-1] + b"," + one + b"]")


@pytest.mark.parametrize("text", ["[" * 300_000, "{" * 300_000, "a,b" * 300_000])
def test_brackets_and_commas_of_texts_are_no_lists(text, monkeypatch):
    monkeypatch.setattr(json_bodies, "MAX_CONTAINERS", 3)
    assert parse_json(json.dumps([text, {}]).encode()) == [text, {}]


def test_json_of_as_many_levels_as_are_taken_is_read():
    body = b"[" * MAX_LEVELS + b"]" * MAX_LEVELS
    assert parse_json(body) == json.loads(body)
    padded = b"[" + b"0," * MAX_PARTS + body[1:]
    assert parse_json(padded) == json.loads(padded)


class Watched(list):
    """A list that counts the items that are looked at."""

    looks = 0

    def __iter__(self):
        for item in super().__iter__():
            type(self).looks += 1
            yield item


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("abc", 3), (b"abcd", 4), (None, 1), ([], 1), ({"ab": "c", "d": [1, 2]}, 8), ([["a" * 9]] * 3, 31),
        ("x" * 10**6, 10**6), (["x"] * 10**6, MAX_AT_ONCE + 1), ({"a": [[]] * 10**6}, MAX_AT_ONCE + 1),
    ],
)  # fmt: skip
def test_the_size_of_a_value_is_counted_as_far_as_it_matters(value, size):
    assert size_of(value) == size


@pytest.mark.parametrize("value", ["é" * 50_000, [1.5] * 50_000, {"a": ["\ud800", {"b": None}] * 20_000}])
def test_a_large_value_is_the_same_in_json(value):
    assert json_text(value) == json.dumps(value)
    assert json_text([value], ensure_ascii=False) == json.dumps([value], ensure_ascii=False)
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text([value, float("nan")], allow_nan=False)


def test_an_error_shows_the_beginning_of_a_large_value_in_json():
    assert brief_json({"a": None, "b": [True, 1.5, "x"]}) == '{"a": null, "b": [true, 1.5, "x"]}'
    assert brief_json([1] * 10**6, 9) == "[1, 1, 1,"


def test_an_error_shows_a_large_value_without_looking_at_all_of_it(monkeypatch):
    monkeypatch.setattr(Watched, "looks", 0)
    Watched.__name__ = "list"
    shown = brief({"role": "system", "content": Watched([[]] * 1000), "name": "x" * 100_000})
    assert shown.startswith("{'content': [[], [], [], [], [], [], ...], 'name': 'xxx")
    assert len(shown) == 200
    assert Watched.looks < 10
    assert brief({"role": "narrator"}) == "{'role': 'narrator'}"
