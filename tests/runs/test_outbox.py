"""The outbox: what is handed to it is stored, whoever is cancelled, and a disk that hangs keeps no run from ending."""

import asyncio
import os
import threading

import pytest

from agentenv.errors import RunStopped
from agentenv.runs.records import async_writer as outbox_module
from agentenv.runs.records import directory as record
from agentenv.runs.records.async_writer import Outbox
from agentenv.runs.records.directory import RunWriter
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


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(outbox_module, "HUNG_AFTER_S", 0.2)


async def joined(name):
    """Wait for the threads that hung."""
    for thread in threading.enumerate():
        if thread.name.startswith(f"agentenv-{name}"):
            await asyncio.to_thread(thread.join, 30)
    await asyncio.sleep(0)


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


async def test_an_error_of_the_disk_reaches_only_its_waiters(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    async with Outbox(RunWriter.open(tmp_path, CONFIG)) as outbox:
        with monkeypatch.context() as faulty:
            faulty.setattr(record.os, "write", full)
            with pytest.raises(RunStopped, match="No space left"):
                await outbox.append(episode("a/0"))
        await outbox.settle()
        await outbox.append(episode("a/0"))
    assert read_ids(tmp_path) == ["a/0"]


@pytest.mark.long
async def test_an_append_that_hangs_is_named_and_neither_the_metrics_nor_the_end_wait_for_it(
    tmp_path, monkeypatch, quick
):
    outbox = Outbox(RunWriter.open(tmp_path, CONFIG))
    await outbox.append(episode("kept/0"))
    gate = Gate(monkeypatch, record.os, "write")
    waiting = [asyncio.ensure_future(outbox.append(episode(f"a/{i}"))) for i in range(10)]
    await gate.hangs()
    with pytest.raises(RunStopped) as stopped:
        await asyncio.wait_for(outbox.settle(), 60)
    message = str(stopped.value)
    assert "within 0.2 s, got no answer. Perhaps not stored: 10 finished episodes (a/0, " in message
    assert ", …) and metrics.json." in message
    assert "--resume" in message
    with pytest.raises(RunStopped, match=r"not stored: metrics\.json"):
        await asyncio.wait_for(outbox.write_metrics({}), 60)
    monkeypatch.setattr(outbox_module, "HUNG_AFTER_S", 3600)
    await asyncio.wait_for(outbox.close(), 60)  # known to hang: it is not asked again
    gate.opened.set()
    await asyncio.gather(*waiting)
    await joined("RunWriter")
    outbox.writer.close()
    assert sorted(read_ids(tmp_path)) == [*(f"a/{i}" for i in range(10)), "kept/0"]


@pytest.mark.long
async def test_a_disk_that_is_slow_and_continues_is_not_given_up(tmp_path, monkeypatch):
    """Every write that comes through starts the wait again."""
    monkeypatch.setattr(outbox_module, "HUNG_AFTER_S", 2.0)
    real = os.write

    def slow(fd, data):
        threading.Event().wait(0.5)
        return real(fd, data)

    async with Outbox(RunWriter.open(tmp_path, CONFIG)) as outbox:
        monkeypatch.setattr(record.os, "write", slow)
        waiting = [asyncio.ensure_future(outbox.append(episode(f"a/{i}"))) for i in range(6)]  # 3 s in all
        await asyncio.sleep(0)
        await outbox.settle()
        await asyncio.gather(*waiting)
    assert len(read_ids(tmp_path)) == 6


@pytest.mark.long
async def test_metrics_that_hang_are_named_and_the_writer_is_left_alone(tmp_path, quick):
    outbox = Outbox(RunWriter.open(tmp_path, CONFIG))
    await outbox.append(episode("a/0"))
    os.mkfifo(tmp_path / ".metrics.json.tmp")  # opening it for writing waits for a reader
    with pytest.raises(RunStopped, match=r"Perhaps not stored: metrics\.json\."):
        await asyncio.wait_for(outbox.write_metrics({"a": 1}), 60)
    await asyncio.wait_for(outbox.close(), 60)
    assert read_ids(tmp_path) == ["a/0"]
    reader = os.open(tmp_path / ".metrics.json.tmp", os.O_RDONLY)
    await joined("RunWriter")  # with an error: a pipe cannot be synced
    os.close(reader)
    outbox.writer.close()


async def test_a_last_sync_that_hangs_is_reported(tmp_path, monkeypatch, quick):
    outbox = Outbox(RunWriter.open(tmp_path, CONFIG))
    await outbox.append(episode("a/0"))
    gate = Gate(monkeypatch, record, "_fdatasync")
    with pytest.raises(RunStopped, match="not stored: records of the last second"):
        await asyncio.wait_for(outbox.close(), 60)
    gate.opened.set()
    await joined("RunWriter")
    RunWriter.open(tmp_path, CONFIG, resume=True).close()


@pytest.mark.long
async def test_without_a_free_thread_episodes_are_stored_anyway(tmp_path, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("agentenv._util.calls._THREAD_WAITS_S", ())
    with monkeypatch.context() as poor:
        poor.setattr(threading.Thread, "start", refuse)
        async with Outbox(RunWriter.open(tmp_path, CONFIG)) as outbox:
            assert (await outbox.append(episode("a/0"))).reward == 1.0
            await outbox.write_metrics({"a": 1})
    assert read_ids(tmp_path) == ["a/0"]
    RunWriter.open(tmp_path, CONFIG, resume=True).close()
