"""The run directory under faults: damaged files, killed processes, full and failing disks."""

import inspect
import os
import random
import re
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from agentenv.errors import DataError, RunStopped
from agentenv.runs.records import scan
from agentenv.runs.records.directory import RunWriter, read_trajectories
from agentenv.runs.records.lines import decode_line
from agentenv.runs.records.scan import ReadReport
from tests.runs.test_record import CONFIG, episode, read_ids, write_run

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
HELPERS = f"""
from agentenv.errors import RunStopped
from agentenv.runs.records.directory import RunWriter, read_trajectories
from agentenv.runs.records.scan import ReadReport
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
CONFIG = {CONFIG}
{inspect.getsource(episode)}
"""
"""What the programs of this file start with: less than the imports of a test module."""


@pytest.mark.long
def test_a_forked_child_that_outlives_a_killed_run_does_not_keep_it_locked(tmp_path):
    code = (
        f"{HELPERS}\nimport os, sys, signal, time\n"
        "writer = RunWriter.open(sys.argv[1], CONFIG)\n"
        "child = os.fork()\n"
        "if child == 0:\n    os.close(1); os.close(2); time.sleep(60); os._exit(0)\n"
        "os.write(1, b'%d' % child); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    child = int(subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, env=ENV).stdout)
    try:
        RunWriter.open(tmp_path, CONFIG, resume=True).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_torn_last_line_is_cut_off_and_reported(tmp_path, caplog):
    log = write_run(tmp_path, "a/0", "a/1")
    first, second = log.read_bytes().splitlines(keepends=True)
    for kept in (1, 40, len(second) // 2, len(second) - 2):
        log.write_bytes(first + second[:kept])
        assert read_ids(tmp_path, ReadReport()) == ["a/0"]
        with RunWriter.open(tmp_path, CONFIG, resume=True) as writer:
            assert set(writer.finished) == {"a/0"}
            assert writer.report.torn_bytes == kept
            writer.append(episode("a/1"))
        assert "cut off a torn last line" in caplog.text
        assert log.read_bytes() == first + second


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path):
    log = write_run(tmp_path, "a/0")
    log.write_bytes(log.read_bytes().rstrip(b"\n"))
    with RunWriter.open(tmp_path, CONFIG, resume=True) as writer:
        assert set(writer.finished) == {"a/0"}
        writer.append(episode("a/1"))
    assert read_ids(tmp_path) == ["a/0", "a/1"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda lines: [lines[0], lines[1].replace(b"a/1", b"a/2"), lines[2]], r"skipped 1 damaged lines \(2\)"),
        (lambda lines: [*lines[:2], lines[2][:20]], "skipped 20 bytes of a torn last line"),
        (lambda lines: [b"?\n", *lines[:2], lines[2][:20]], r"1 damaged lines \(1\) and 20 bytes of a torn last line"),
    ],
    ids=["damaged", "torn", "both"],
)
def test_a_reader_warns_of_lines_that_it_skips_unless_it_reports_them(tmp_path, damage, said):
    log = write_run(tmp_path, "a/0", "a/1", "a/2")
    log.write_bytes(b"".join(damage(log.read_bytes().splitlines(keepends=True))))
    with pytest.warns(UserWarning, match=said):
        expected = [trajectory.episode_id for trajectory in read_trajectories(tmp_path)]
    report = ReadReport()
    assert read_ids(tmp_path, report) == expected
    assert re.search(said, report.damage)
    assert ReadReport(num_lines=3, num_superseded=1).damage == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"attempt":0', b'"attempt":' + b"9" * 6000),
        (b'"attempt":0', b'"attempt":' + b"9" * 400),
        (b'"wait_s":', b'"wait_s":1e999,"x":'),
        (b'"tools":', b'"tools":' + b"[" * 100_000 + b"]" * 100_000 + b',"x":'),
        (b'"num_cached_tokens":0', b'"num_cached_tokens":' + b"9" * 400),
        (b'"num_cached_tokens":0', b'"num_cached_tokens":"many"'),
        (b'"step_s":', b'"step_s":[1],"x":'),
    ],
)
def test_a_line_with_values_that_are_none_of_a_trajectory_is_a_data_error(tmp_path, old, new):
    log = write_run(tmp_path, "a/0", "a/1")
    first, second = log.read_bytes().splitlines(keepends=True)
    episode = decode_line(second).replace(old, new)
    assert new in episode
    log.write_bytes(first + b'{"v":%d,"crc":"%08x","episode":%b}\n' % (3, zlib.crc32(episode, 3), episode))
    told = f"{re.escape(str(log))}, line 2: .*: expected the values of a trajectory, .* Or delete the line"
    with pytest.raises(DataError, match=told):
        list(read_trajectories(tmp_path))
    with pytest.raises(DataError, match=told):
        RunWriter.open(tmp_path, CONFIG, resume=True)


def test_a_flipped_byte_costs_its_line_only_and_is_reported(tmp_path):
    log = write_run(tmp_path, "a/0", "a/1", "a/2")
    lines = log.read_bytes().splitlines(keepends=True)
    rng = random.Random(0)
    for position in [0, 6, 10, len(lines[1]) - 1, *(rng.randrange(len(lines[1])) for _ in range(60))]:
        middle = bytearray(lines[1])
        middle[position] ^= 1 << rng.randrange(8)
        log.write_bytes(lines[0] + bytes(middle) + lines[2])
        report = ReadReport()
        ids = read_ids(tmp_path, report)
        merged = position == len(lines[1]) - 1  # without its newline it takes the next line along
        assert ids == (["a/0"] if merged else ["a/0", "a/2"])
        assert len(report.corrupt_lines) in (1, 2)
        assert f"{len(report.corrupt_lines)} damaged lines" in report.damage
    log.write_bytes(lines[0] + bytes(middle) + lines[2])
    with RunWriter.open(tmp_path, CONFIG, resume=True) as writer:
        assert set(writer.finished) == {"a/0", "a/2"}
        assert "1 damaged lines (2)" in writer.report.damage
        writer.append(episode("a/1"))
    assert read_ids(tmp_path, ReadReport()) == ["a/0", "a/2", "a/1"]


def test_byte_order_mark_crlf_blank_lines_and_an_empty_file_are_read(tmp_path):
    log = write_run(tmp_path, "a/0", "a/1")
    lines = log.read_bytes().splitlines()
    log.write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\r\n\r\n\n" + lines[1] + b"\r\n")
    report = ReadReport()
    assert read_ids(tmp_path, report) == ["a/0", "a/1"]
    assert report == ReadReport(num_lines=2)
    for content in (b"", b"\xef\xbb\xbf"):
        log.write_bytes(content)
        with RunWriter.open(tmp_path, CONFIG, resume=True) as writer:
            assert not writer.finished
            writer.append(episode("b/0"))
        assert read_ids(tmp_path) == ["b/0"]


def test_a_line_beyond_the_limit_is_skipped_without_being_held_in_memory(tmp_path, monkeypatch):
    log = write_run(tmp_path, "a/0", "a/1")
    first, second = log.read_bytes().splitlines(keepends=True)
    monkeypatch.setattr(scan, "MAX_LINE_BYTES", len(first) + 10)
    log.write_bytes(first + b"x" * 10 * len(first) + b"\n" + second)
    report = ReadReport()
    assert read_ids(tmp_path, report) == ["a/0", "a/1"]
    assert report.corrupt_lines == [2]
    log.write_bytes(first + b"x" * 10 * len(first))
    report = ReadReport()
    assert read_ids(tmp_path, report) == ["a/0"]
    assert report.torn_bytes == 10 * len(first)


def test_a_short_write_that_cannot_be_taken_back_is_taken_back_later(tmp_path, monkeypatch):
    with RunWriter.open(tmp_path, CONFIG) as writer:
        writer.append(episode("a/0"))
        real_write, real_truncate = os.write, os.ftruncate

        def write(fd, data):
            if len(data) > 10:
                return real_write(fd, bytes(data)[:10])
            raise OSError(5, "Input/output error")

        def truncate(fd, size):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
        monkeypatch.setattr(os, "ftruncate", truncate)
        with pytest.raises(RunStopped, match="Input/output error"):
            writer.append(episode("a/1"))
        monkeypatch.setattr(os, "write", real_write)
        with pytest.raises(RunStopped, match="Input/output error"):
            writer.append(episode("a/1"))
        monkeypatch.setattr(os, "ftruncate", real_truncate)
        writer.append(episode("a/1"))
    report = ReadReport()
    assert read_ids(tmp_path, report) == ["a/0", "a/1"]
    assert report == ReadReport(num_lines=2)
