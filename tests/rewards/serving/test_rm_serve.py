"""The reward server: OpenRLHF's exact form, what it refuses, what it does when there is no room, what it counts."""

import asyncio
import json
import math

import httpx
import pytest
import pytest_asyncio

from agentenv._util.http.access import AccessPolicy
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.models.get_reward import FunctionScorer, GetRewardScorer
from agentenv.rewards.models.openrlhf_wire import read_rewards
from agentenv.rewards.models.reward import ModelReward
from agentenv.rewards.models.types import Scored
from agentenv.rewards.serving.server import RewardServer, ServeOptions, Shaping
from agentenv.rewards.types import Response
from tests.ports import held_port
from tests.waits import until

ours = pytest.mark.asyncio(loop_scope="module")
ROWS = {"query": ["a", "abc"], "prompts": ["", "a"], "labels": [None, {"any": 1}]}
SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "four"}]


class Lengths:
    """Gives the length of a text, or of the last message; certain texts fail."""

    def __init__(self, *, tokens=True):
        self.asked, self.tokens = [], tokens

    async def score(self, conversation):
        self.asked.append(conversation)
        text = conversation if isinstance(conversation, str) else conversation[-1]["content"]
        await asyncio.sleep(0)
        if text == "long":
            raise DataError("conversation: expected at most 3 tokens, got 4.")
        if text == "dead":
            raise InfraError("reward model: killed")
        if text == "bug":
            raise KeyError("secret")
        value = {"nan": math.nan, "inf": -math.inf}.get(text, float(len(text)))
        return Scored(value, len(text) if self.tokens else None, "cut" in text)

    async def close(self):
        pass


class Gate(Lengths):
    """Scores when it is let go on; remembers what was given up."""

    def __init__(self):
        super().__init__()
        self.go_on, self.cancelled = asyncio.Event(), 0

    async def score(self, conversation):
        self.asked.append(conversation)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Scored(1.0)


def serving(scorer, **options):
    return RewardServer(scorer, ServeOptions(**{"grace_s": 5.0, **options}))


def at(server, **more):
    return httpx.AsyncClient(base_url=server.url, trust_env=False, verify=False, timeout=60, **more)


@pytest.fixture
def port():
    """A port where nobody else listens when the server has ended."""
    with held_port() as held:
        yield held


async def answered(body=ROWS, scorer=None, **options):
    """The answer of a server of these options."""
    async with serving(scorer or Lengths(), **options) as server, at(server) as http:
        return await http.post("/get_reward", json=body)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served():
    """An HTTP client of one server that most tests share."""
    async with serving(Lengths(), max_items=8, max_body_bytes=1 << 16) as server, at(server) as http:
        http.server = server
        yield http


# --- OpenRLHF's form --------------------------------------------------------------------------------------------------


@ours
async def test_an_answer_has_openrlhfs_three_keys_and_a_number_per_query_in_each(served):
    response = await served.post("/get_reward", json=ROWS)
    logs = {"rm_value": [1.0, 3.0], "rm_truncated": [0.0, 0.0], "rm_num_tokens": [1.0, 3.0]}
    assert response.json() == {"rewards": [1.0, 3.0], "scores": [1.0, 3.0], "extra_logs": logs}
    assert [each.reward for each in read_rewards(response.json(), 2, "server")] == [1.0, 3.0]


@ours
async def test_an_empty_batch_has_an_empty_answer_where_openrlhfs_own_server_dies(served):
    response = await served.post("/get_reward", json={"query": [], "prompts": [], "labels": []})
    assert (response.status_code, response.json()["rewards"], response.json()["scores"]) == (200, [], [])


@ours
async def test_conversations_reach_the_scorer_as_they_are_for_its_own_template(served):
    body = {"messages": [SAID, [*SAID, {"role": "user", "content": "?"}, {"role": "assistant", "content": "cut"}]]}
    answer = (await served.post("/get_reward", json=body)).json()
    assert (answer["rewards"], answer["extra_logs"]["rm_truncated"]) == ([4.0, 3.0], [0.0, 1.0])
    assert served.server._scorer.asked[-2:] == body["messages"]


async def test_tokens_that_the_model_does_not_say_are_left_out_and_never_null():
    answer = (await answered(scorer=Lengths(tokens=False))).json()
    assert list(answer["extra_logs"]) == ["rm_value", "rm_truncated"]


@pytest.mark.long
@pytest.mark.parametrize("shaping", [Shaping(), Shaping(-2.0, 0.5), Shaping(1.0, -2.0, (-5.0, 5.0))])
async def test_rewards_are_shaped_as_model_reward_shapes_them(shaping):
    answer = (await answered({"query": ["", "a", "abcdef"]}, shaping=shaping)).json()
    reward = ModelReward(Lengths(), shift=shaping.shift, scale=shaping.scale, clip=shaping.clip)
    expected = [(await reward.grade(Response("", prompt=text))).reward for text in ("", "a", "abcdef")]
    assert (answer["rewards"], answer["scores"]) == (expected, expected)
    assert answer["extra_logs"]["rm_value"] == [0.0, 1.0, 6.0]


@pytest.mark.parametrize("wrong", [(math.nan,), (0.0, 0.0), (0.0, math.inf), (0.0, 1.0, (1.0, 1.0))])
def test_a_shaping_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"--(shift|clip)"):
        Shaping(*wrong)


async def test_a_function_gets_prompts_and_labels_and_its_scores_and_logs_are_the_answer():
    asked = []

    def function(queries, prompts, labels):
        asked.extend(zip(queries, prompts, labels, strict=True))
        rewards = [float(len(query) - len(prompt)) for query, prompt in zip(queries, prompts, strict=True)]
        return {"rewards": rewards, "scores": [each / 4 for each in rewards], "extra_logs": {"size": rewards, "k": 3}}

    async with serving(FunctionScorer(function)) as server, at(server) as http:
        told = (await http.post("/get_reward", json=ROWS)).json()
        refused = await http.post("/get_reward", json={**ROWS, "labels": [1]})
        scorer = GetRewardScorer(f"{server.url}/get_reward")
        assert (await answered(ROWS, scorer)).json() == told, "a server before the server passes all of it on"
        await scorer.close()
    assert sorted(asked[:2]) == sorted(zip(*ROWS.values(), strict=True))
    assert (told["rewards"], told["scores"]) == ([1.0, 2.0], [0.25, 0.5])
    assert (told["extra_logs"]["size"], told["extra_logs"]["k"]) == ([1.0, 2.0], [3.0, 3.0])
    assert (refused.status_code, refused.json()["detail"][:40]) == (422, "labels: expected a list of 2, one per qu")


@ours
async def test_prompts_and_labels_that_a_model_ignores_are_of_any_kind(served):
    response = await served.post("/get_reward", json={"query": ["a", "abc"], "prompts": "?", "labels": [1]})
    assert response.status_code == 200


# --- what is refused --------------------------------------------------------------------------------------------------


@ours
@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"query": ["a"], "messages": []}, 422, "query and messages"),
        ({"query": "abc"}, 422, "query: expected a list"),
        ({"query": ["a", 7]}, 422, "query[1]: expected text"),
        ({"messages": [SAID, ["a"]]}, 422, "messages[1]: expected a list of messages"),
        ({"query": ["a"] * 9}, 413, "at most 8 items, got 9"),
        ({"query": ["a", "b" * (1 << 17)]}, 413, "at most 65536 bytes"),
    ],
)
async def test_input_that_is_not_a_request_is_refused_and_its_first_item_named(served, body, status, says):
    response = await served.post("/get_reward", json=body)
    assert (response.status_code, list(response.json())) == (status, ["detail"])
    assert says in response.json()["detail"]


@ours
@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b'{"query": [NaN]}', {}, 422),
        (json.dumps(ROWS), {"content-type": "text/plain"}, 415),
        (json.dumps(ROWS), {"content-encoding": "gzip"}, 415),
    ],
)
async def test_bodies_are_json_of_a_limited_size(served, content, headers, status):
    headers = {"content-type": "application/json", **headers}
    assert (await served.post("/get_reward", content=content, headers=headers)).status_code == status


@ours
@pytest.mark.parametrize("form", ["query", "messages"])
async def test_one_conversation_that_cannot_be_scored_refuses_the_request_and_is_named(served, form):
    texts = ["a", "long", "b", "long", "dead"]
    items = texts if form == "query" else [[{"role": "user", "content": text}] for text in texts]
    response = await served.post("/get_reward", json={form: items})
    told = response.json()
    assert (response.status_code, [each["index"] for each in told["errors"]]) == (422, [1, 3])
    assert told["detail"].startswith(f"{form}[1]: conversation: expected at most 3 tokens")
    assert not told.keys() & {"rewards", "scores"}


@ours
@pytest.mark.parametrize("text", ["dead", "nan", "inf"])
async def test_a_model_that_fails_is_503_to_be_tried_again_and_never_a_number(served, text):
    response = await served.post("/get_reward", json={"query": ["a", text]})
    assert (response.status_code, int(response.headers["retry-after"]) >= 1) == (503, True)
    assert [each["index"] for each in response.json()["errors"]] == [1]
    assert not response.json().keys() & {"rewards", "scores"}


async def test_messages_to_a_function_without_a_tokenizer_are_422_since_no_other_try_can_score_them():
    scorer = FunctionScorer(lambda queries, prompts, labels: [1.0] * len(queries))
    async with serving(scorer) as server, at(server) as http:
        response = await http.post("/get_reward", json={"messages": [SAID]})
        assert (response.status_code, "retry-after" in response.headers) == (422, False)
        assert "expected the reward model's to render messages with, got None" in response.json()["detail"]
        assert (await http.post("/get_reward", json=ROWS)).status_code == 200
    await scorer.close()


async def test_a_mistake_of_ours_is_500_and_keeps_its_text(caplog):
    async with serving(Lengths()) as server, at(server) as http:
        response = await http.post("/get_reward", json={"query": ["bug"]})
        assert (response.status_code, "secret" in response.text) == (500, False)
        assert (await http.post("/get_reward", json=ROWS)).status_code == 200
    assert "secret" in caplog.text


@ours
async def test_other_routes_and_methods_are_refused_in_json(served):
    assert (await served.get("/get_reward")).status_code == 405
    assert (await served.get("/../etc/passwd")).json() == {"detail": "Not Found"}
    assert (await served.get("/")).json()["max_items"] == 8


# --- who may ask ------------------------------------------------------------------------------------------------------


async def test_with_a_token_all_but_health_needs_it():
    access = AccessPolicy("127.0.0.1", "hush", without_token=("/health",))
    async with serving(Lengths(), access=access) as server, at(server) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/")).status_code == 401
        for auth, status in ((None, 401), (("rm", "hash"), 401), (("rm", "hush"), 200)):
            assert (await http.post("/get_reward", json=ROWS, auth=auth)).status_code == status
        headers = {"authorization": "Bearer hush"}
        assert (await http.post("/get_reward", json=ROWS, headers=headers)).status_code == 200


# --- many at once -----------------------------------------------------------------------------------------------------


async def test_no_room_is_429_with_a_time_and_what_waits_is_answered():
    gate = Gate()
    async with serving(gate, max_waiting=3, max_items=3) as server, at(server) as http:
        work = [asyncio.create_task(http.post("/get_reward", json={"query": ["a", "b"]}))]
        await until(lambda: server.waiting == 2)
        response = await http.post("/get_reward", json={"query": ["a", "b"]})
        assert (response.status_code, int(response.headers["retry-after"]) >= 1) == (429, True)
        work.append(asyncio.create_task(http.post("/get_reward", json={"query": ["c"]})))
        await until(lambda: server.waiting == 3)
        assert (await http.post("/get_reward", content=b"{")).status_code == 429  # its body is not read
        assert (await http.get("/health")).json()["turned_away"] == 3
        gate.go_on.set()
        assert [(await task).status_code for task in work] == [200, 200]
        assert (await http.post("/get_reward", json={"query": ["a", "b"]})).status_code == 200
        assert (server.waiting, len(gate.asked)) == (0, 5)


async def test_a_client_that_goes_away_gives_up_its_conversations():
    gate = Gate()
    async with serving(gate) as server, at(server) as http:
        task = asyncio.create_task(http.post("/get_reward", json={"query": ["a", "b", "c"]}))
        await until(lambda: len(gate.asked) == 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: gate.cancelled == 3 and server.waiting == 0)
        assert (await http.get("/health")).json()["cancelled"] == 3


async def test_a_model_that_hangs_is_503_in_time():
    gate = Gate()
    response = await answered(ROWS, gate, timeout_s=0.05)
    assert response.status_code == 503
    assert gate.cancelled == len(gate.asked), "whatever was asked by then"
    assert "retry-after" in response.headers


# --- health, the end --------------------------------------------------------------------------------------------------


class Loading(Gate):
    """A scorer that loads when it is let go on, and scores after that."""

    async def load(self):
        await self.go_on.wait()


async def test_health_is_503_while_the_model_loads_and_requests_wait():
    scorer = Loading()
    async with serving(scorer) as server, at(server) as http:
        load = asyncio.create_task(server.load())
        health = await http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        task = asyncio.create_task(http.post("/get_reward", json=ROWS))
        await until(lambda: server.waiting == 2)
        scorer.go_on.set()
        await load
        assert (await task).json()["rewards"] == [1.0, 1.0]
        assert (await http.get("/health")).json()["status"] == "ok"


async def test_health_counts_the_conversations():
    async with serving(Lengths(), max_items=4) as server, at(server) as http:
        asked = [["a", "cut"], ["long", "b", "dead"], ["dead"], ["a"] * 5, [], ["ab"]]
        statuses = [(await http.post("/get_reward", json={"query": each})).status_code for each in asked]
        assert statuses == [200, 422, 503, 413, 200, 200]
        told = (await http.get("/health")).json()
    counts = {"scored": 4, "refused": 1, "failed": 2, "cancelled": 0, "truncated": 1, "turned_away": 0}
    assert told == {"status": "ok", "waiting": 0, **counts}


async def test_stopping_answers_what_is_being_scored_and_503_to_the_new(port):
    gate = Gate()
    server = serving(gate, port=port)
    await server.start()
    async with at(server) as http:
        work = asyncio.create_task(http.post("/get_reward", json=ROWS))
        await until(lambda: server.waiting == 2)
        stop = asyncio.create_task(server.close())
        await until(lambda: server._closing)
        response = await http.post("/get_reward", json=ROWS)
        assert (response.status_code, "retry-after" in response.headers) == (503, True)
        assert (await http.get("/health")).json()["status"] == "stopping"
        gate.go_on.set()
        assert (await work).status_code == 200
        await stop
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")
    await server.close()


async def test_stopping_gives_up_what_has_no_end():
    gate = Gate()
    server = serving(gate, grace_s=0.05)
    await server.start()
    async with at(server) as http:
        task = asyncio.create_task(http.post("/get_reward", json=ROWS))
        await until(lambda: len(gate.asked) == 2)
        await server.close()
        assert ((await task).status_code, gate.cancelled) == (503, 2)
