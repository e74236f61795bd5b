"""The outbox: what is handed to it is stored, whoever is cancelled."""

import asyncio

import pytest

from agentenv.runs.records.directory import Outbox, RunWriter
from tests.runs.test_record import CONFIG, episode, held_writes, read_ids


async def test_appended_lines_are_in_the_file_when_the_call_returns_and_complete_after_the_end(tmp_path):
    async with Outbox(RunWriter.open(tmp_path, CONFIG)) as outbox:
        summary = await outbox.append(episode("a/0", reward=0.5))
        assert (summary.episode_id, summary.reward) == ("a/0", 0.5)
        assert read_ids(tmp_path) == ["a/0"]
        await asyncio.gather(*(outbox.append(episode(f"a/{i}")) for i in range(1, 30)))
        await outbox.settle()
        await outbox.write_metrics({"a": 1})
    assert sorted(read_ids(tmp_path)) == sorted(f"a/{i}" for i in range(30))
    assert (tmp_path / "metrics.json").exists()
    RunWriter.open(tmp_path, CONFIG, resume=True).close()


async def test_cancelling_a_waiter_does_not_cancel_the_episode(tmp_path, monkeypatch):
    async with Outbox(RunWriter.open(tmp_path, CONFIG)) as outbox:
        writing, may_write = held_writes(monkeypatch)
        waiting = asyncio.ensure_future(outbox.append(episode("a/0")))
        assert await asyncio.to_thread(writing.wait, 60)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        settling = asyncio.ensure_future(outbox.settle())
        await asyncio.sleep(0.05)
        assert not settling.done()
        may_write.set()
        await settling
        assert read_ids(tmp_path) == ["a/0"]
