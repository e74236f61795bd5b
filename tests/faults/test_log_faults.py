"""Faults 16, 17, 21, 22: the run directory under late results, kills in its writes, disks that fail, fill and hang."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from agentenv.errors import ConfigError, RunStopped
from agentenv.runs.records import directory as record
from agentenv.runs.records.directory import RunWriter
from tests.drivers import forked, ids, lines
from tests.faults.places import FLAGS, RESUME, make_place, rows
from tests.runs.test_record import CONFIG, episode, read_ids
from tests.runs.test_record_faults import ENV, HELPERS

DISK_ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENOMEM]


def failed(episode_id, attempt):
    from agentenv.core.trajectory import EpisodeError
    from agentenv.core.types import StopReason, Task

    trajectory = record.Trajectory(Task("q", task_id="a"), 10, episode_id, "a", attempt=attempt)
    trajectory.finish(StopReason.ERROR, EpisodeError("infra", "EngineError", "down", "generate"))
    return trajectory


def attempt_of(whole, attempt):
    whole.attempt = attempt
    return whole


def test_a_late_result_of_a_superseded_attempt_changes_nothing(tmp_path):
    with RunWriter.open(tmp_path, CONFIG) as writer:
        assert writer.append(attempt_of(episode("a/0"), 1)).attempt == 1
        size = (tmp_path / "trajectories.jsonl").stat().st_size
        for late in (failed("a/0", 0), attempt_of(episode("a/0"), 0), failed("a/0", 2)):
            assert writer.append(late).attempt == 1
        assert (tmp_path / "trajectories.jsonl").stat().st_size == size


def test_a_late_failure_does_not_replace_the_failure_of_a_later_attempt(tmp_path):
    """A bug once: a resumed run then counted attempts, and so its seeds, from the older one."""
    with RunWriter.open(tmp_path, CONFIG) as writer:
        writer.append(failed("a/0", 2))
        assert writer.append(failed("a/0", 1)).attempt == 2
    with RunWriter.open(tmp_path, CONFIG, resume=True) as writer:
        assert writer.failed["a/0"].attempt == 2
        assert writer.append(attempt_of(episode("a/0"), 1)).error_kind is None, "a success is worth more, however late"
    assert read_ids(tmp_path) == ["a/0"]


@pytest.mark.parametrize("number", DISK_ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["write", "fdatasync", "fsync", "replace"])
def test_every_error_of_the_disk_stops_the_run_keeps_what_is_there_and_is_over_when_it_is(
    tmp_path, monkeypatch, number, call
):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    writer = RunWriter.open(tmp_path, CONFIG)
    writer.append(episode("a/0"))
    with monkeypatch.context() as faulty:
        if call == "fdatasync":
            faulty.setattr(record, "_fdatasync", fail)
            writer._synced_s -= 60
        elif call == "replace":
            faulty.setattr(record.Path, "replace", fail)
        else:
            faulty.setattr(record.os, call, fail)
        with pytest.raises(RunStopped, match=os.strerror(number)) as stopped:
            writer.append(episode("a/1")) if call in ("write", "fdatasync") else writer.write_metrics({"a": 1})
        assert "--resume" in str(stopped.value)
        assert stopped.value.exit_code == 3
    assert not (tmp_path / ".metrics.json.tmp").exists()
    writer.append(episode("a/1"))
    writer.append(episode("a/2"))
    writer.write_metrics({"a": 2})
    writer.close()
    assert read_ids(tmp_path) == ["a/0", "a/1", "a/2"]
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"a": 2}


@pytest.mark.parametrize("number", DISK_ERRORS, ids=errno.errorcode.get)
def test_every_error_on_opening_is_one_line_of_configuration_and_leaves_no_lock(tmp_path, monkeypatch, number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as faulty:
        faulty.setattr(record.os, "fsync", fail)
        with pytest.raises(ConfigError, match=os.strerror(number)):
            RunWriter.open(tmp_path, CONFIG)
    RunWriter.open(tmp_path, CONFIG).close()


KILLED_INSIDE = f"""
{HELPERS}
import itertools, os, signal, sys
from agentenv.runs.records import directory as record
count, at = itertools.count(), int(sys.argv[2])


def dying(function):
    def call(*args, **kwargs):
        if next(count) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call


writer = RunWriter.open(sys.argv[1], CONFIG, resume=True)
writer.append(episode("a/1"))
for name in ("open", "fsync", "write", "close", "ftruncate"):
    setattr(os, name, dying(getattr(os, name)))
for name in ("open", "replace"):
    setattr(record.Path, name, dying(getattr(record.Path, name)))
writer.write_metrics({{"of": "the second"}})
writer.append(episode("a/2"))
writer.close()
"""


@pytest.mark.long
def test_a_kill_before_any_call_of_a_write_leaves_the_old_file_or_the_new_one(tmp_path):
    with RunWriter.open(tmp_path, CONFIG) as writer:
        writer.append(episode("a/0"))
        writer.write_metrics({"of": "the first"})
    seen, at = set(), 0
    while True:
        killed = subprocess.run([sys.executable, "-c", KILLED_INSIDE, tmp_path, str(at)], env=ENV, check=False)
        seen.add(json.loads((tmp_path / "metrics.json").read_text())["of"])
        with RunWriter.open(tmp_path, CONFIG, resume=True) as writer:
            assert {"a/0", "a/1"} <= set(writer.finished)
            assert (writer.report.torn_bytes, writer.report.corrupt_lines) == (0, [])
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL
        at += 1
    assert at >= 5
    assert seen == {"the first", "the second"}
    assert read_ids(tmp_path) == ["a/0", "a/1", "a/2"]


# --- a disk that hangs ------------------------------------------------------------------------------------------------

STUCK = """
import asyncio, os, threading
from pathlib import Path
from agentenv import AgentInstance, StepResult
from agentenv.runs import watchdog
from agentenv.runs.records import async_writer as outbox

outbox.HUNG_AFTER_S = watchdog._SAVE_GRACE_S = 0.5


class Env(AgentInstance):
    def __init__(self):
        self.log = Path("out/{file}").resolve()

    async def step(self, states):
        if states["label"] == "stick":
            while len(self.log.parent.joinpath("trajectories.jsonl").read_bytes().splitlines()) < 3:
                await asyncio.sleep(0.01)
            real = os.{call}

            def stuck(fd, *args):
                if Path(os.readlink(f"/proc/self/fd/{{fd}}")) == self.log:
                    Path("stuck").touch()
                    threading.Event().wait()
                return real(fd, *args)

            os.{call} = stuck
        return StepResult(reward=1.0, terminated=True)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    rows(make_place(tmp_path, monkeypatch), ["ok"] * 3 + ["stick"] + ["ok"] * 20)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_whose_disk_hangs_ends_after_a_signal_and_names_what_is_not_stored(place, number):
    """A bug once: the writer's lock was waited for on the event loop, and its thread at the interpreter's end."""
    (place / "env.py").write_text(STUCK.format(call="write", file="trajectories.jsonl"))
    with forked([*FLAGS, "--concurrency", 1, "--grace_s", 0.2], place) as running:
        running.until((place / "stuck").exists)
        running.signal(number)
        assert running.wait(280) == 3
        last = running.stderr.splitlines()[-1]
        assert "not stored: 1 finished episodes (000003/0) and metrics.json" in last
        assert "--resume" in last
        assert "Traceback" not in running.stderr
    assert ids(place / "out") == [f"{i:06d}/0" for i in range(3)]
    (place / "env.py").write_text(STUCK.format(call="getpid", file="trajectories.jsonl"))
    with forked(RESUME, place) as running:
        assert running.wait() == 0
    assert ids(place / "out") == [f"{i:06d}/0" for i in range(24)]


@pytest.mark.long
def test_a_run_whose_disk_hangs_is_stopped_by_the_watchdog_without_a_signal(place):
    """The dump cannot be written either, as its folder is a pipe here that nobody reads."""
    (place / "env.py").write_text(STUCK.format(call="write", file="trajectories.jsonl"))
    (place / "out").mkdir()
    os.mkfifo(place / "out/stall-1.txt")
    deadlines = ["--stall_timeout_s", 0.5, "--step_timeout_s", 0.5, "--generate_timeout_s", 0.5]
    with forked([*FLAGS, "--concurrency", 1, *deadlines], place) as running:
        assert running.wait(280) == 3
        assert "waits in runner of turn 0" in running.stderr
        assert "stall-1.txt cannot be written (the disk does not answer)" in running.stderr
        assert "not stored: 1 finished episodes (000003/0)" in running.stderr.splitlines()[-1]
    assert len(lines(place / "out")) == 3


@pytest.mark.long
def test_a_run_whose_last_sync_hangs_says_so_and_ends(place):
    (place / "env.py").write_text(STUCK.format(call="fsync", file=".metrics.json.tmp"))
    with forked([*FLAGS, "--concurrency", 1], place) as running:
        assert running.wait(280) == 3
        assert "not stored: metrics.json." in running.stderr.splitlines()[-1]
    assert ids(place / "out") == [f"{i:06d}/0" for i in range(24)]
