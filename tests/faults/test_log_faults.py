"""Faults 16, 17, 21, 22: the run directory under late results, kills in its writes, disks that fail and fill."""

import errno
import json
import os
import signal
import subprocess
import sys
from itertools import product

import pytest

from agentenv.errors import ConfigError, RunStopped
from agentenv.runs.records import directory as record
from agentenv.runs.records.directory import RunWriter
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


def test_a_late_failure_does_not_replace_the_failure_of_a_later_attempt(tmp_path):
    """A bug once: a resumed run then counted attempts, and so its seeds, from the older one."""
    with RunWriter.open(tmp_path, CONFIG) as writer:
        writer.append(failed("a/0", 2))
        assert writer.append(failed("a/0", 1)).attempt == 2
    with RunWriter.open(tmp_path, CONFIG, resume=True) as writer:
        assert writer.failed["a/0"].attempt == 2
        assert writer.append(attempt_of(episode("a/0"), 1)).error_kind is None, "a success is worth more, however late"
    assert read_ids(tmp_path) == ["a/0"]


@pytest.mark.parametrize(
    ("call", "number"),
    [*product(["write"], DISK_ERRORS), *product(["fdatasync", "fsync", "replace"], [errno.ENOSPC])],
)
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


def test_an_error_on_opening_is_one_line_of_configuration_and_leaves_no_lock(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as faulty:
        faulty.setattr(record.os, "fsync", fail)
        with pytest.raises(ConfigError, match=os.strerror(errno.EIO)):
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
