"""The client of judges behind HTTP, against real servers that fail in every way that servers do."""

import asyncio
import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from agentenv.core.types import SamplingParams
from agentenv.errors import ConfigError, InfraError
from agentenv.rewards.grading import collect_usage
from agentenv.rewards.judges.asking import JudgeRetry
from agentenv.rewards.judges.openai import OpenAIJudge, RequestOptions
from agentenv.rewards.judges.pointwise import JudgeReward
from agentenv.rewards.judges.protocol import (
    JudgeMisaddressed,
    JudgeRefused,
    JudgeTimeout,
    JudgeTruncated,
    JudgeUnreadable,
    JudgeUsage,
    Price,
    ReplyIndex,
)
from agentenv.rewards.types import Response
from tests.rewards.judges.servers import chat_server, completion
from tests.rewards.models.rm_servers import HANG, Status, http
from tests.waits import until

HELLO = [{"role": "user", "content": "hello \ud800 é"}]
SOON = RequestOptions(limit_s=60.0, request_s=30.0, first_pause_s=0.001, max_retries=3)
KINDS = {"unavailable", "timeouts", "unreadable", "truncated", "refused"}


def judge_at(server, **options):
    return OpenAIJudge(server.url, "m", request_options=options.pop("request_options", SOON), **options)


async def failing(server, kind, count_as, *, num_requests, request_options=SOON):
    """The judge's error, which is of that class, and its counts."""
    judge = judge_at(server, request_options=request_options)
    with pytest.raises(InfraError) as raised:
        await judge.complete(HELLO)
    assert type(raised.value) is kind
    assert len(server.bodies) == num_requests
    assert {name: judge.usage[name] for name in KINDS if judge.usage[name]} == {count_as: 1}
    assert (judge.usage["failures"], judge.usage["requests"]) == (1, num_requests)
    assert judge.usage["retries"] == max(0, num_requests - 1)
    return str(raised.value)


# --- what is sent, and what is read ---------------------------------------------------------------------------------


async def test_a_reply_is_the_message_and_the_request_says_how_to_sample(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    sampling = SamplingParams(temperature=0.5, max_tokens=7, seed=3, stop=("x",))
    async with chat_server("Verdict: YES") as server:
        judge = OpenAIJudge(server.url, "m", api_key_env="JUDGE_KEY", sampling=sampling)
        assert await judge.complete(HELLO) == "Verdict: YES"
    body = {"temperature": 0.5, "top_p": 1.0, "max_tokens": 7, "seed": 3, "stop": ["x"]}
    assert server.bodies == [{"model": "m", "messages": HELLO, **body}]
    assert server.headers[0]["authorization"] == "Bearer sk-1"
    assert server.headers[0]["accept-encoding"] == "identity"


async def test_other_fields_replace_ours_and_none_leaves_one_out():
    async with chat_server("ok") as server:
        fields = {"max_tokens": None, "max_completion_tokens": 9, "chat_template_kwargs": {"enable_thinking": False}}
        await judge_at(server, extra_body=fields).complete(HELLO)
        assert "authorization" not in server.headers[0]
    assert server.bodies[0] == {
        "model": "m", "messages": HELLO, "temperature": 0.0, "top_p": 1.0, "max_completion_tokens": 9,
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip


async def test_each_draw_has_its_own_seed_where_there_is_one():
    async with chat_server("ok") as server:
        judge = judge_at(server, sampling=SamplingParams(seed=5))
        for draw in (ReplyIndex(), ReplyIndex(0, 1), ReplyIndex(1, 0)):
            await judge.reply_at(HELLO, draw)
        assert len({body["seed"] for body in server.bodies}) == 3
        await judge_at(server, sampling=SamplingParams()).reply_at(HELLO, ReplyIndex(1, 0))
        assert "seed" not in server.bodies[-1]


@pytest.mark.parametrize(
    ("message", "reply"),
    [
        ({"content": "Verdict: NO", "reasoning_content": "Verdict: YES"}, "Verdict: NO"),
        ({"content": [{"type": "text", "text": "Verdict:"}, {"type": "text", "text": " NO"}]}, "Verdict: NO"),
        ({"content": [{"type": "thinking", "text": "YES"}, {"type": "text", "text": "NO"}]}, "NO"),
        ({"content": "<think>Verdict: YES</think>Verdict: NO"}, "<think>Verdict: YES</think>Verdict: NO"),
    ],
)
async def test_the_reasoning_of_a_judge_is_not_its_reply(message, reply):
    body = completion("")
    body["choices"][0]["message"] = message
    async with chat_server(http(body)) as server:
        assert await judge_at(server).complete(HELLO) == reply


@pytest.mark.parametrize(
    ("body", "kind", "count_as", "says"),
    [
        (completion("Verdict: YES", finish_reason="length"), JudgeTruncated, "truncated", "Raise max_tokens"),
        (completion("Verdict: YES", finish_reason="content_filter"), JudgeRefused, "refused", "content_filter"),
        (completion(None, refusal="I will not"), JudgeRefused, "refused", "I will not"),
        (completion(""), JudgeUnreadable, "unreadable", "no text"),
        (completion(None, finish_reason="tool_calls"), JudgeUnreadable, "unreadable", "tool_calls"),
        (completion(None, reasoning_content="Verdict: YES"), JudgeUnreadable, "unreadable", "nothing after it"),
    ],
)
async def test_an_invalid_reply_is_a_typed_failure_and_not_requested_again(body, kind, count_as, says):
    """Elsewhere half a reply is read like a whole one, and reasoning that says YES in passing is the verdict."""
    async with chat_server(http(body)) as server:
        assert says in await failing(server, kind, count_as, num_requests=1)


def test_a_judge_without_a_price_has_no_cost_in_the_usage_of_its_caller():
    with collect_usage() as spent:
        JudgeUsage().add(requests=1)
        assert spent == {"judge/requests": 1}
        JudgeUsage(Price(prompt=1.0)).add(cached=1)
    assert spent == {"judge/requests": 1, "judge/cached": 1, "judge/cost": 0.0}


UNCOUNTED = {**completion("three"), "usage": {"prompt_tokens": -1, "completion_tokens": 1.5}}


async def test_tokens_are_counted_and_priced_and_what_was_cut_off_is_paid_for():
    async with chat_server("one", completion("two", finish_reason="length"), UNCOUNTED) as server:
        judge = judge_at(server, usage=JudgeUsage(Price(prompt=2.0, completion=10.0)))
        await judge.complete(HELLO)
        with pytest.raises(JudgeTruncated):
            await judge.complete(HELLO)
        await judge.complete(HELLO)
    assert judge.usage.cost == pytest.approx((20 * 2.0 + 10 * 10.0) / 1e6)
    metrics = judge.usage.metrics("j/")
    assert metrics == {
        "j/requests": 3.0, "j/retries": 0.0, "j/replies": 3.0, "j/prompt_tokens": 20.0, "j/completion_tokens": 10.0,
        "j/uncounted": 1.0, "j/cached": 0.0, "j/shared": 0.0, "j/unclear": 0.0, "j/failures": 1.0, "j/unavailable": 0.0,
        "j/timeouts": 0.0, "j/unreadable": 0.0, "j/truncated": 1.0, "j/refused": 0.0, "j/cost": judge.usage.cost,
    }  # fmt: skip


# --- what may pass is tried again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [408, 409, 429, 500, 502, 503, 529])
async def test_a_status_that_may_pass_is_tried_again(code):
    trouble = Status(code)
    async with chat_server(trouble, trouble, http(completion("ok"))) as server:
        judge = judge_at(server)
        assert await judge.complete(HELLO) == "ok"
    assert (judge.usage["requests"], judge.usage["retries"], judge.usage["failures"]) == (3, 2, 0)


@pytest.mark.parametrize("code", [301, 400, 401, 403, 404, 413, 422])
async def test_other_statuses_are_not(code):
    async with chat_server(Status(code, "too long")) as server:
        kind = JudgeMisaddressed if code in (301, 401, 403, 404) else JudgeRefused
        assert "too long" in await failing(server, kind, "refused", num_requests=1)


async def test_a_refused_key_is_named_by_its_variable_and_a_missing_one_by_the_setting(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    async with chat_server(Status(401)) as server:
        with pytest.raises(JudgeMisaddressed, match=r"Check the API key \(JUDGE_KEY\)\.$"):
            await judge_at(server, api_key_env="JUDGE_KEY").complete(HELLO)
        with pytest.raises(JudgeMisaddressed, match="No API key was sent: set api_key_env of the judge"):
            await judge_at(server).complete(HELLO)


@pytest.mark.long
async def test_a_server_that_always_hangs_is_a_timeout_by_the_deadline_of_all_attempts__verl_roll_1_3_nemo_6_8():
    """There clients have no timeout, and what did fail is a reward of 0."""
    async with chat_server(HANG) as server:
        request_options = replace(SOON, limit_s=1.0)
        said = await failing(server, JudgeTimeout, "timeouts", num_requests=1, request_options=request_options)
        assert "within 1 s" in said
        server.bodies.clear()
        request_options = replace(SOON, request_s=1.0, max_retries=1)
        said = await failing(server, JudgeTimeout, "timeouts", num_requests=2, request_options=request_options)
        assert "within 1 s" in said


@pytest.mark.parametrize(
    "trouble",
    [
        None,
        http(json.dumps(completion("ok")).encode()[:-9]),
        http(b"null"),
        http({"choices": []}),
        http({"error": {"message": "overloaded"}}),
    ],
    ids=["reset", "cut JSON", "null", "no choice", "error with status 200"],
)
async def test_an_answer_that_breaks_is_tried_again(trouble):
    async with chat_server(trouble, trouble, http(completion("ok"))) as server:
        judge = judge_at(server)
        assert await judge.complete(HELLO) == "ok"
    assert judge.usage["retries"] == 2


async def test_an_answer_larger_than_allowed_is_not_read(monkeypatch):
    monkeypatch.setattr("agentenv.rewards.judges.openai._MAX_BODY_BYTES", 1000)
    async with chat_server("x" * 1000) as server:
        await failing(server, JudgeUnreadable, "unreadable", num_requests=1, request_options=SOON)


# --- load, loops, ends ----------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_a_wait_for_its_turn_takes_no_time_of_who_asks():
    async def slowly(body):
        """After a while."""
        await asyncio.sleep(0.5)
        return completion("Verdict: YES")

    async with chat_server(slowly) as server:
        judge = judge_at(server, request_options=replace(SOON, max_concurrent=1, limit_s=5.0))
        reward = JudgeReward(judge, retry=JudgeRetry(attempts=1, limit_s=3.0))
        rows = [Response(f"{i}", label="4") for i in range(8)]
        results = await asyncio.gather(*(reward.grade(row) for row in rows))
    assert [result.reward for result in results] == [1.0] * 8


async def test_long_texts_are_made_ready_in_a_thread():
    ran = set()

    class Judge:
        async def complete(self, messages):
            return "Verdict: YES"

    reward = JudgeReward(Judge())
    messages = reward._template.messages
    reward._template = SimpleNamespace(
        messages=lambda *args, **more: ran.add(threading.current_thread()) or messages(*args, **more), expected=""
    )
    for text in ("short", "long " * 5000):
        assert (await reward.grade(Response(text, label="4"))).reward == 1.0
    assert len(ran) == 2


async def test_a_cancelled_request_frees_its_turn_and_its_connection():
    async with chat_server(HANG, "ok") as server:
        judge = judge_at(server, request_options=replace(SOON, max_concurrent=1))
        task = asyncio.create_task(judge.complete(HELLO))
        await until(lambda: server.bodies)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.wait_for(judge.complete(HELLO), 30) == "ok"
        assert judge.usage["failures"] == 0


async def test_a_closed_client_sends_nothing_and_closing_again_does_nothing():
    async with chat_server("ok") as server:
        judge = judge_at(server)
        await judge.complete(HELLO)
        await judge.close()
        await judge.close()
        with pytest.raises(JudgeRefused, match="closed"):
            await judge.complete(HELLO)
        assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: OpenAIJudge("localhost:8000", "m"),
        lambda: OpenAIJudge("http://x", ""),
        lambda: OpenAIJudge("http://x", "m", api_key_env="NO_SUCH_VARIABLE"),
        lambda: RequestOptions(limit_s=0),
        lambda: RequestOptions(max_concurrent=0),
        lambda: Price(prompt=-1.0),
    ],
)
def test_wrong_arguments(make):
    with pytest.raises(ConfigError):
        make()


def test_a_key_that_no_header_can_hold_is_refused_unseen(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-\u00e9vil")
    with pytest.raises(ConfigError) as raised:
        OpenAIJudge("http://x", "m", api_key_env="JUDGE_KEY")
    assert "vil" not in str(raised.value)
