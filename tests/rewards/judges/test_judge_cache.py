"""Replies that are kept: what they are kept under, what survives a crash, and who asks when several want the same."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core.types import SamplingParams
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.grading import grade
from agentenv.rewards.judges.cache import CachedJudge, ReplyCache, reply_key
from agentenv.rewards.judges.openai import OpenAIJudge
from agentenv.rewards.judges.pointwise import JudgeReward, PointwiseReward
from agentenv.rewards.judges.protocol import ReplyIndex
from agentenv.rewards.judges.voting import JudgeRetry, Voting
from agentenv.rewards.types import Response

HELLO = [{"role": "user", "content": "hello"}]
QUICK = JudgeRetry(backoff_s=0.0)


class Counting:
    """A judge that replies with the index, or with `answer`; an exception is raised."""

    identity = "counting"

    def __init__(self, answer=None, *, gate=None):
        self.answer, self.gate, self.draws, self.closed = answer, gate, [], False
        self.num_cancelled = 0

    async def complete(self, messages):
        return await self.reply_at(messages, ReplyIndex())

    async def reply_at(self, messages, draw):
        self.draws.append(tuple(draw))
        try:
            await (self.gate.wait() if self.gate else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        reply = self.answer(draw) if callable(self.answer) else self.answer
        if isinstance(reply, Exception):
            raise reply
        return reply or f"{draw}"

    async def close(self):
        self.closed = True


# --- what a reply is kept under -------------------------------------------------------------------------------------


async def test_the_same_question_is_asked_once():
    judge = CachedJudge(inner := Counting("yes"))
    assert [await judge.complete(HELLO) for _ in range(3)] == ["yes"] * 3
    assert (inner.draws, judge.usage["cached"], judge.usage["shared"]) == ([(0, 0)], 2, 0)


async def test_votes_and_attempts_are_different_replies():
    judge = CachedJudge(inner := Counting())
    draws = [ReplyIndex(), ReplyIndex(1), ReplyIndex(0, 1)]
    first = [await judge.reply_at(HELLO, draw) for draw in draws]
    assert len(set(first)) == 3
    assert [await judge.reply_at(HELLO, draw) for draw in draws] == first
    assert len(inner.draws) == 3


def keyed(model="m", messages=HELLO, index=(0, 0), **sampling):
    return reply_key(
        OpenAIJudge("http://x", model, sampling=SamplingParams(**sampling)).identity, messages, ReplyIndex(*index)
    )


def test_a_key_depends_on_model_sampling_messages_and_draw_and_on_nothing_else():
    others = [
        keyed(model="n"), keyed(temperature=0.5), keyed(max_tokens=5), keyed(seed=1), keyed(stop=("a",)),
        keyed(messages=[{"role": "system", "content": "hello"}]), keyed(messages=[*HELLO, *HELLO]),
        keyed(index=ReplyIndex(1)),
        keyed(index=ReplyIndex(0, 1)), keyed(messages=[]),
    ]  # fmt: skip
    assert len({keyed(), *others}) == len(others) + 1
    assert keyed() == keyed(messages=({"content": "hello", "role": "user"},))
    elsewhere = OpenAIJudge("http://y:1/v1", "m", sampling=SamplingParams()).identity
    assert reply_key(elsewhere, HELLO, ReplyIndex()) == keyed()


@pytest.mark.long
def test_a_key_is_the_same_in_every_process():
    code = "from tests.rewards.judges.test_judge_cache import keyed; print(keyed(temperature=0.25))"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == keyed(temperature=0.25)


@pytest.mark.long
@given(st.lists(st.text(max_size=20), max_size=4), st.lists(st.text(max_size=20), max_size=4))
def test_different_texts_have_different_keys(one, other):
    keys = [
        reply_key("m", [{"role": "user", "content": text} for text in texts], ReplyIndex()) for texts in (one, other)
    ]
    assert (keys[0] == keys[1]) == (one == other)


async def test_messages_that_are_not_json_are_the_rows_fault():
    with pytest.raises(DataError):
        await CachedJudge(Counting("yes")).complete([{"role": "user", "content": {1}}])


# --- failures, and replies without a verdict ------------------------------------------------------------------------


async def test_failures_are_not_kept():
    replies = iter([InfraError("down"), "yes"])
    judge = CachedJudge(inner := Counting(lambda draw: next(replies)))
    with pytest.raises(InfraError):
        await judge.complete(HELLO)
    assert await judge.complete(HELLO) == "yes"
    assert len(inner.draws) == 2


async def test_a_reply_without_a_verdict_does_not_come_back_for_ever():
    """A cache that knows messages only gives each attempt the reply that could not be read."""
    judge = CachedJudge(inner := Counting(lambda draw: "Verdict: YES" if draw.attempt == 1 else "Hm."))
    reward = JudgeReward(judge, retry=QUICK)
    for _ in range(2):
        assert (await reward.grade(Response("4", label="4"))).reward == 1.0
    assert inner.draws == [(0, 0), (0, 1)]


async def test_a_question_that_came_to_nothing_is_asked_again_later(tmp_path):
    """A reply without a verdict is no answer: after a rerun, and in another process, it is another one."""
    replies = iter(["Hm."] * 3 + ["Verdict: YES"])
    for _ in range(2):
        judge = CachedJudge(inner := Counting(lambda draw: next(replies)), ReplyCache(tmp_path / "replies.jsonl"))
        result = await grade(JudgeReward(judge, retry=QUICK), Response("4", label="4"))
    assert (result.reward, inner.draws) == (1.0, [(0, 0)])
    kept = ReplyCache(tmp_path / "replies.jsonl")
    assert (await CachedJudge(Counting("new"), kept).complete(HELLO), kept.num_torn) == ("new", 0)


async def test_votes_are_votes_with_a_cache_as_well():
    """A cache that knows messages only makes k votes one."""
    judge = CachedJudge(inner := Counting(lambda draw: f"Score: {draw.vote}"))
    reward = PointwiseReward(judge, scale=(0, 10), voting=Voting(3), retry=QUICK)
    for _ in range(2):
        assert (await reward.grade(Response("4"))).reward == pytest.approx(0.1)
    assert len(inner.draws) == 3


# --- the same question at the same time -----------------------------------------------------------------------------


async def test_those_who_ask_the_same_at_the_same_time_share_one_reply():
    gate = asyncio.Event()
    judge = CachedJudge(inner := Counting("yes", gate=gate))
    asked = [asyncio.create_task(judge.complete(HELLO)) for _ in range(5)]
    other = asyncio.create_task(judge.complete([*HELLO, *HELLO]))
    while (len(inner.draws), judge.usage["shared"]) != (2, 4):
        await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*asked, other) == ["yes"] * 6
    assert (len(inner.draws), judge.usage["shared"], judge.usage["cached"]) == (2, 4, 0)


async def test_a_failure_is_everybodys_who_waits_and_the_next_asks_again():
    replies = iter([InfraError("down"), "yes"])
    judge = CachedJudge(inner := Counting(lambda draw: next(replies)))
    found = await asyncio.gather(*(judge.complete(HELLO) for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in found] == [InfraError] * 3
    assert await judge.complete(HELLO) == "yes"
    assert len(inner.draws) == 2


async def test_the_first_who_asks_may_go_and_the_others_get_their_reply():
    gate = asyncio.Event()
    judge = CachedJudge(inner := Counting("yes", gate=gate))
    first, second = (asyncio.create_task(judge.complete(HELLO)) for _ in range(2))
    while not (inner.draws and judge.usage["shared"]):
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    gate.set()
    assert await second == "yes"
    assert first.cancelled()
    assert (len(inner.draws), inner.num_cancelled) == (1, 0)


async def test_a_judge_without_waiters_is_cancelled_and_the_next_caller_asks_again():
    gate = asyncio.Event()
    judge = CachedJudge(inner := Counting("yes", gate=gate))
    asked = [asyncio.create_task(judge.complete(HELLO)) for _ in range(3)]
    while not inner.draws:
        await asyncio.sleep(0)
    for task in asked:
        task.cancel()
    again = asyncio.create_task(judge.complete(HELLO))
    await asyncio.wait(asked)
    gate.set()
    assert await again == "yes"
    assert all(task.cancelled() for task in asked)
    while not inner.num_cancelled:
        await asyncio.sleep(0.001)
    assert len(inner.draws) == 2


async def test_loops_in_several_threads_share_what_is_kept(tmp_path):
    judge = CachedJudge(inner := Counting("yes"), ReplyCache(tmp_path / "replies.jsonl"))

    async def asks():
        """All questions, at once."""
        questions = [[{"role": "user", "content": f"{i}"}] for i in range(20)]
        return await asyncio.gather(*(judge.complete(each) for each in questions))

    found = await asyncio.gather(*(asyncio.to_thread(lambda: asyncio.run(asks())) for _ in range(4)))
    assert found == [["yes"] * 20] * 4
    assert 20 <= len(inner.draws) <= 80
    assert await asks() == ["yes"] * 20
    kept = ReplyCache(tmp_path / "replies.jsonl")
    assert await CachedJudge(Counting("no"), kept).complete([{"role": "user", "content": "7"}]) == "yes"
    assert kept.num_torn == 0


async def test_closing_closes_the_judge():
    await CachedJudge(inner := Counting()).close()
    assert inner.closed


# --- the file -------------------------------------------------------------------------------------------------------


def key(number):
    return f"{number:064x}"


async def test_replies_outlive_the_process(tmp_path):
    path = tmp_path / "replies.jsonl"
    code = (
        "import asyncio; from agentenv.rewards.judges.cache import ReplyCache\n"
        f"asyncio.run(ReplyCache({str(path)!r}).put('{key(1)}', 'é \\ud800\\n\"x\"'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert await ReplyCache(path).get(key(1)) == 'é \ud800\n"x"'
    assert await ReplyCache(path).get(key(2)) is None


async def test_a_torn_line_costs_only_itself_wherever_it_is_cut(tmp_path):
    path = tmp_path / "replies.jsonl"
    await ReplyCache(path).put(key(1), "one")
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole + whole.replace(key(1).encode(), key(2).encode())[:cut])
        await ReplyCache(path).put(key(3), "three")
        kept = ReplyCache(path)
        assert (await kept.get(key(1)), await kept.get(key(3))) == ("one", "three")
        assert await kept.get(key(2)) in ((None, "one") if cut >= len(whole) - 1 else (None,))


@pytest.mark.long
@given(st.binary(max_size=200))
def test_no_bytes_in_the_file_raise_or_hide_what_follows(tmp_path_factory, junk):
    path = tmp_path_factory.mktemp("cache") / "replies.jsonl"
    path.write_bytes(junk)

    async def puts_and_gets():
        """One reply, by way of the file."""
        await ReplyCache(path).put(key(1), "one")
        return await ReplyCache(path).get(key(1))

    assert asyncio.run(puts_and_gets()) == "one"


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        1,
        {"key": 1, "reply": "x"},
        {"key": "zz", "reply": "x"},
        {"key": key(1)},
        {"key": key(1), "reply": None},
    ],
)
async def test_a_line_of_another_form_is_left_out_and_counted(tmp_path, found):
    path = tmp_path / "replies.jsonl"
    path.write_text(json.dumps(found) + "\n")
    kept = ReplyCache(path)
    assert await kept.get(key(1)) is None
    assert kept.num_torn == 1


async def test_a_line_that_is_too_deep_is_left_out(tmp_path):
    path = tmp_path / "replies.jsonl"
    path.write_text("[" * 100_000)
    assert await ReplyCache(path).get(key(1)) is None


async def test_processes_that_write_at_once_lose_nothing(tmp_path):
    path = tmp_path / "replies.jsonl"
    code = (
        "import asyncio, sys; from agentenv.rewards.judges.cache import ReplyCache\n"
        "async def main():\n"
        f"    cache = ReplyCache({str(path)!r})\n"
        "    await asyncio.gather(*(cache.put(f'{int(sys.argv[1]) * 100 + i:064x}', 'x' * 3000) for i in range(50)))\n"
        "asyncio.run(main())"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(i)]) for i in range(2)]
    assert [process.wait(120) for process in running] == [0, 0]
    kept = ReplyCache(path)
    found = [await kept.get(key(i * 100 + j)) for i in range(2) for j in range(50)]
    assert (found, kept.num_torn) == (["x" * 3000] * 100, 0)


async def test_a_file_that_cannot_be_written_costs_no_reply_and_is_reported_once(tmp_path, caplog):
    path = tmp_path / "folder" / "replies.jsonl"
    path.parent.mkdir()
    judge = CachedJudge(inner := Counting(), ReplyCache(path))
    path.parent.rmdir()
    with caplog.at_level(logging.WARNING):
        replies = await asyncio.gather(*(judge.reply_at(HELLO, ReplyIndex(i)) for i in range(3)))
    assert [await judge.reply_at(HELLO, ReplyIndex(i)) for i in range(3)] == replies
    assert len(inner.draws) == 3
    assert len([record for record in caplog.records if "stay in memory" in record.message]) == 1


async def test_a_slow_disk_holds_one_thread_and_not_the_loop(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)  # opening it waits for somebody at the other end
    before = set(threading.enumerate())

    def num_reading():
        """Threads that read the file."""
        return sum("ReplyCache" in thread.name for thread in set(threading.enumerate()) - before)

    cache = ReplyCache(path)
    asked = [asyncio.create_task(cache.get(key(i))) for i in range(50)]
    while not num_reading():
        await asyncio.sleep(0.001)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert num_reading() == 1
    line = json.dumps({"key": key(7), "reply": "seven"})
    await asyncio.to_thread(path.write_text, line)
    assert (await asyncio.wait_for(asyncio.gather(*asked), 60))[7] == "seven"


async def test_the_least_recently_used_go_first(tmp_path):
    path = tmp_path / "replies.jsonl"
    cache = ReplyCache(path, max_entries=2)
    await cache.put(key(1), "one")
    await cache.put(key(2), "two")
    assert await cache.get(key(1)) == "one"
    await cache.put(key(3), "three")
    assert [await cache.get(key(i)) for i in (1, 2, 3)] == ["one", None, "three"]
    kept = ReplyCache(path, max_entries=2)
    assert [await kept.get(key(i)) for i in (1, 2, 3)] == [None, "two", "three"]


async def test_lines_are_json_that_others_can_read(tmp_path):
    await ReplyCache(tmp_path / "replies.jsonl").put(key(1), "one")
    lines = [line for line in (tmp_path / "replies.jsonl").read_text().splitlines() if line]
    assert [json.loads(line) for line in lines] == [{"key": key(1), "reply": "one"}]


@pytest.mark.parametrize(
    "make", [lambda path: ReplyCache(max_entries=0), ReplyCache, lambda path: ReplyCache(path / "a" / "b")]
)
def test_wrong_arguments(tmp_path, make):
    with pytest.raises(ConfigError):
        make(tmp_path)
