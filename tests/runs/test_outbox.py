"""The outbox: what is handed to it is stored, whoever is cancelled."""

import asyncio
import threading

import pytest

from agentenv.runs.records import directory as record
from agentenv.runs.records.directory import Outbox, RunWriter
from tests.runs.test_record import CONFIG, episode, read_ids


class Gate:
    """Stands for a call of the operating system that does not return until it is opened."""

    def __init__(self, monkeypatch, module, name):
        self.real, self.opened, self.reached = getattr(module, name), threading.Event(), threading.Event()
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args):
        self.reached.set()
        self.opened.wait(60)
        return self.real(*args)

    async def hangs(self):
        while not self.reached.is_set():
            await asyncio.sleep(0.005)


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
        gate = Gate(monkeypatch, record.os, "write")
        waiting = asyncio.ensure_future(outbox.append(episode("a/0")))
        await gate.hangs()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        settling = asyncio.ensure_future(outbox.settle())
        await asyncio.sleep(0.05)
        assert not settling.done()
        gate.opened.set()
        await settling
        assert read_ids(tmp_path) == ["a/0"]
