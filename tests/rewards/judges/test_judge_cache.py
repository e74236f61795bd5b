"""Replies that are kept: what they are kept under, what survives a crash, and who asks when several want the same."""

import asyncio
import logging
import sqlite3

import pytest

from agentenv.core.types import SamplingParams
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.grading import grade
from agentenv.rewards.judges.asking import JudgeRetry, Voting
from agentenv.rewards.judges.openai import CachedJudge, OpenAIJudge, ReplyCache, reply_key
from agentenv.rewards.judges.pointwise import JudgeReward, PointwiseReward
from agentenv.rewards.judges.protocol import ReplyIndex
from agentenv.rewards.types import Response
from tests.waits import until

HELLO = [{"role": "user", "content": "hello"}]
QUICK = JudgeRetry(backoff_s=0.0)


class Counting:
    """A judge that replies with the index, or with `answer`; an exception is raised."""

    identity = "counting"

    def __init__(self, answer=None, *, gate=None):
        self.answer, self.gate, self.draws = answer, gate, []
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


# --- what a reply is kept under -------------------------------------------------------------------------------------


def keyed(model="m", messages=HELLO, index=(0, 0), **sampling):
    return reply_key(
        OpenAIJudge("http://x", model, sampling=SamplingParams(**sampling)).identity, messages, ReplyIndex(*index)
    )


def test_a_key_depends_on_model_sampling_messages_and_draw_and_on_nothing_else():
    others = [
        keyed(model="n"), keyed(temperature=0.5), keyed(max_tokens=5), keyed(seed=1), keyed(stop=("a",)),
        keyed(messages=[{"role": "system", "content": "hello"}]), keyed(index=(1, 0)), keyed(index=(0, 1)),
    ]  # fmt: skip
    assert len({keyed(), *others}) == len(others) + 1
    assert keyed() == keyed(messages=({"content": "hello", "role": "user"},))
    elsewhere = OpenAIJudge("http://y:1/v1", "m", sampling=SamplingParams()).identity
    assert reply_key(elsewhere, HELLO, ReplyIndex()) == keyed()


async def test_messages_that_are_not_json_are_the_rows_fault():
    with pytest.raises(DataError):
        await CachedJudge(Counting("yes")).complete([{"role": "user", "content": {1}}])


# --- failures, and replies without a verdict ------------------------------------------------------------------------


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
        judge = CachedJudge(inner := Counting(lambda draw: next(replies)), ReplyCache(tmp_path / "replies.db"))
        result = await grade(JudgeReward(judge, retry=QUICK), Response("4", label="4"))
    assert (result.reward, inner.draws) == (1.0, [(0, 0)])
    kept = ReplyCache(tmp_path / "replies.db")
    assert await CachedJudge(Counting("new"), kept).complete(HELLO) == "new"


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
    await until(lambda: (len(inner.draws), judge.usage["shared"]) == (2, 4))
    gate.set()
    assert await asyncio.gather(*asked, other) == ["yes"] * 6
    assert (len(inner.draws), judge.usage["shared"], judge.usage["cached"]) == (2, 4, 0)


async def test_a_failure_is_everybodys_who_waits_and_the_next_asks_again():
    replies, gate = iter([InfraError("down"), "yes"]), asyncio.Event()
    judge = CachedJudge(inner := Counting(lambda draw: next(replies), gate=gate))
    asked = [asyncio.create_task(judge.complete(HELLO)) for _ in range(3)]
    await until(lambda: judge.usage["shared"] == 2)
    gate.set()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(each) for each in found] == [InfraError] * 3
    assert await judge.complete(HELLO) == "yes"
    assert len(inner.draws) == 2


async def test_the_first_who_asks_may_go_and_the_others_get_their_reply():
    gate = asyncio.Event()
    judge = CachedJudge(inner := Counting("yes", gate=gate))
    first, second = (asyncio.create_task(judge.complete(HELLO)) for _ in range(2))
    await until(lambda: inner.draws and judge.usage["shared"])
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
    await until(lambda: inner.draws)
    for task in asked:
        task.cancel()
    again = asyncio.create_task(judge.complete(HELLO))
    await asyncio.wait(asked)
    gate.set()
    assert await again == "yes"
    assert all(task.cancelled() for task in asked)
    await until(lambda: inner.num_cancelled)
    assert len(inner.draws) == 2


async def test_loops_in_several_threads_share_what_is_kept(tmp_path):
    judge = CachedJudge(inner := Counting("yes"), ReplyCache(tmp_path / "replies.db"))

    async def asks():
        """All questions, at once."""
        questions = [[{"role": "user", "content": f"{i}"}] for i in range(20)]
        return await asyncio.gather(*(judge.complete(each) for each in questions))

    found = await asyncio.gather(*(asyncio.to_thread(lambda: asyncio.run(asks())) for _ in range(4)))
    assert found == [["yes"] * 20] * 4
    assert 20 <= len(inner.draws) <= 80
    assert await asks() == ["yes"] * 20
    kept = ReplyCache(tmp_path / "replies.db")
    assert await CachedJudge(Counting("no"), kept).complete([{"role": "user", "content": "7"}]) == "yes"


# --- the file -------------------------------------------------------------------------------------------------------


def key(number):
    return f"{number:064x}"


async def test_any_text_comes_back_from_the_file(tmp_path):
    path, text = tmp_path / "replies.db", 'é \ud800\n"x"'
    await ReplyCache(path).put(key(1), text)
    assert (await ReplyCache(path).get(key(1)), await ReplyCache(path).get(key(2))) == (text, None)


@pytest.mark.parametrize("found", ["no folder", "no database"])
async def test_a_file_that_cannot_be_used_costs_no_reply_and_is_reported_once(tmp_path, caplog, found):
    path = tmp_path / "folder" / "replies.db"
    path.parent.mkdir()
    judge = CachedJudge(inner := Counting(), ReplyCache(path))
    if found == "no folder":
        path.parent.rmdir()
    else:
        path.write_text('{"key": "of an earlier version"}\n' * 100)
    with caplog.at_level(logging.WARNING):
        replies = await asyncio.gather(*(judge.reply_at(HELLO, ReplyIndex(i)) for i in range(3)))
    assert [await judge.reply_at(HELLO, ReplyIndex(i)) for i in range(3)] == replies
    assert len(inner.draws) == 3
    assert len([record for record in caplog.records if "stay in memory" in record.message]) == 1


async def test_a_busy_file_does_not_hold_the_loop(tmp_path):
    path = tmp_path / "replies.db"
    await (cache := ReplyCache(path)).put(key(7), "seven")
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    putting = asyncio.create_task(cache.put(key(8), "eight"))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not putting.done()
    writer.execute("COMMIT")
    await asyncio.wait_for(putting, 60)
    writer.close()
    assert (await cache.get(key(7)), await cache.get(key(8))) == ("seven", "eight")


async def test_the_oldest_go_first(tmp_path):
    cache = ReplyCache(tmp_path / "replies.db", max_entries=2)
    for number, text in ((1, "one"), (2, "two"), (1, "again"), (3, "three")):
        await cache.put(key(number), text)
    assert [await cache.get(key(i)) for i in (1, 2, 3)] == ["again", None, "three"]


@pytest.mark.parametrize(
    "make", [lambda path: ReplyCache(max_entries=0), ReplyCache, lambda path: ReplyCache(path / "a" / "b")]
)
def test_wrong_arguments(tmp_path, make):
    with pytest.raises(ConfigError):
        make(tmp_path)
