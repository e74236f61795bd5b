"""The reward server against arbitrary bytes, heads and JSON: always an answer of the right kind, and it lives on."""

import asyncio
import json
import socket
import threading

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import DataError
from agentenv.rewards.models.render import checked
from agentenv.rewards.models.types import Scored
from agentenv.rewards.serving.server import RewardServer, ServeOptions

MAX_ITEMS = 3


class Strict:
    """Scores texts that are not empty and conversations that a renderer takes, as real scorers do."""

    async def score(self, conversation):
        if not conversation:
            raise DataError("conversation: expected something, got nothing.")
        text = conversation if isinstance(conversation, str) else checked(conversation)[-1]["content"]
        return Scored(float(len(text)), len(text))

    async def close(self):
        pass


@pytest.fixture(scope="module")
def port():
    """The port of a server on an event loop in another thread, which gives heads and bodies little time."""
    patch = pytest.MonkeyPatch()
    patch.setattr("agentenv._util.http.access.BODY_S", 2.0)
    loop, server = asyncio.new_event_loop(), RewardServer(Strict(), ServeOptions(max_items=MAX_ITEMS, header_s=2.0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(60)
    yield server.port
    with httpx.Client(trust_env=False, verify=False) as http:
        health = http.get(f"{server.url}/health").json()
        assert (health["status"], health["waiting"], health["failed"]) == ("ok", 0, 0)
        assert http.post(f"{server.url}/get_reward", json={"query": ["abc"]}).json()["rewards"] == [3.0]
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    patch.undo()


def told(port, content):
    """The status and what follows the head of the first answer to these bytes."""
    said = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(content)
        while part := connection.recv(1 << 16):
            said += part
            head, end, body = said.partition(b"\r\n\r\n")
            if end and len(body) >= _length(head):
                break
    head, end, body = said.partition(b"\r\n\r\n")
    version, _, rest = head.partition(b" ")
    assert (version, end) == (b"HTTP/1.1", b"\r\n\r\n"), said
    return int(rest[:3]), body


def _length(head):
    lines = [line.lower().split(b":") for line in head.split(b"\r\n")[1:]]
    return next((int(line[1]) for line in lines if line[0] == b"content-length"), 0)


def request(port, content, *, path="/get_reward", **headers):
    named = {"host": f"127.0.0.1:{port}", "content-type": "application/json", "content-length": len(content), **headers}
    lines = [f"POST {path} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in named.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=200))
def test_bytes_that_are_not_http_are_answered_4xx(port, content):
    assert 400 <= told(port, content + b"\r\n\r\n")[0] < 500


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
MESSAGES = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "x"]), "content": st.text(max_size=9)})
JSON = st.recursive(
    SCALARS | MESSAGES,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=12,
)
ITEMS = st.lists(st.text(max_size=9) | st.lists(MESSAGES, max_size=3) | JSON, max_size=5)
FORMS = ("query", "messages", "prompts", "labels")
BODIES = JSON | st.dictionaries(st.sampled_from(FORMS), JSON | ITEMS | st.lists(st.text(max_size=9)), max_size=3)


def expected_status(body):
    forms = [name for name in ("query", "messages") if isinstance(body, dict) and name in body]
    if len(forms) != 1 or not isinstance(items := body[forms[0]], list):
        return 422
    if len(items) > MAX_ITEMS:
        return 413
    return 200 if all(is_scored(forms[0], item) for item in items) else 422


def is_scored(form, item):
    if form == "query":
        return isinstance(item, str) and item != ""
    try:
        return isinstance(item, list) and bool(checked(item))
    except DataError:
        return False


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(body=BODIES)
def test_json_of_any_kind_is_scored_or_refused_as_it_should_be(port, body):
    status, said = told(port, request(port, json.dumps(body).encode()))
    assert status == expected_status(body)
    answer = json.loads(said)
    if status == 200:
        (items,) = (body[name] for name in ("query", "messages") if name in body)
        texts = [item if isinstance(item, str) else item[-1]["content"] for item in items]
        assert answer["rewards"] == answer["scores"] == [float(len(text)) for text in texts]
    else:
        assert answer["detail"]
        assert "rewards" not in answer
