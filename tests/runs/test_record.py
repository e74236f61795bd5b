"""The run directory: what was appended is there whatever happens, once, and nobody else writes into it."""

import json
import os
import stat
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.errors import ConfigError, DataError
from agentenv.runs.records import directory as record
from agentenv.runs.records.directory import RunWriter, read_config, read_trajectories
from agentenv.runs.records.index import EncodedTrajectory, entry_of
from agentenv.runs.records.lines import trajectory_to_dict
from agentenv.runs.records.scan import ReadReport

CONFIG = {"model": "tiny", "limits": {"max_turns": 4, "max_length": 100}, "concurrency": 8}


def episode(episode_id="a/0", *, reward=1.0, error=None, attempt=0, text="hello"):
    trajectory = Trajectory(Task("p"), 100_000, episode_id, episode_id.split("/")[0], attempt)
    trajectory.append_observation(range(20))
    trajectory.append_turn(Completion(tuple(range(50)), logprobs=(-0.5,) * 50), text)
    if error is None:
        trajectory.set_result(StepResult(reward=reward, terminated=True))
        trajectory.finish(StopReason.TERMINATED)
    else:
        trajectory.finish(StopReason.ERROR, EpisodeError(error, "SomeError", "it broke", "step"))
    return trajectory


def write_run(path, *ids):
    with RunWriter.open(path, CONFIG) as writer:
        for episode_id in ids:
            writer.append(episode(episode_id))
    return path / record.TRAJECTORIES


def read_ids(path, report=None):
    return [trajectory.episode_id for trajectory in read_trajectories(path, report=report)]


def test_an_episode_that_another_process_encoded_is_recorded_as_the_episode_itself(tmp_path):
    given = [episode("a/0", reward=0.5), episode("b/0", text="é\ud800")]
    given[0].refusal_reasons = {"invalid_request": "n: expected 1, got 3"}
    encodings = [EncodedTrajectory.of(*entry_of(each)[:2], each.task) for each in given]
    summaries = []
    for name, trajectories in (("whole", given), ("encoded", encodings)):
        with RunWriter.open(tmp_path / name, CONFIG) as writer:
            summaries.append(writer.append_all(trajectories))
    assert summaries[0] == summaries[1]
    for name in ("trajectories.jsonl", "index.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "encoded" / name).read_bytes()


def test_an_encoded_episode_has_the_fields_of_a_recorded_one():
    whole = episode("a/0", reward=0.5)
    found = EncodedTrajectory.of(*entry_of(whole)[:2], whole.task)
    assert (found.episode_id, found.group_id, found.attempt, found.error) == ("a/0", "a", 0, None)
    assert found.stop_reason is StopReason.TERMINATED
    assert trajectory_to_dict(found) == trajectory_to_dict(whole)
    assert found.task is whole.task
    assert not hasattr(found, "nothing")


def test_a_resumed_run_knows_what_is_finished_and_what_failed(tmp_path):
    with RunWriter.open(tmp_path, CONFIG) as writer:
        writer.append(episode("a/0"))
        writer.append(episode("a/1", error="infra"))
    with RunWriter.open(tmp_path, CONFIG, resume=True) as writer:
        assert set(writer.finished) == {"a/0"}
        assert writer.failed.keys() == {"a/1"}
        assert writer.failed["a/1"].error_kind == "infra"
        metrics = writer.tally.metrics(num_tasks=1, num_samples=2, wall_s=1.0)
        assert (metrics.num_episodes, metrics.num_infra_errors, metrics.reward.mean) == (2, 1, 1.0)
        assert writer.report == ReadReport(num_lines=2)


def test_an_episode_that_comes_twice_is_written_once(tmp_path):
    with RunWriter.open(tmp_path, CONFIG) as writer:
        first = writer.append(episode("a/0", reward=1.0))
        writer.append(episode("b/0", reward=0.5))
        assert writer.append(episode("a/0", reward=0.0, attempt=1)) == first
        assert writer.append(episode("a/0", error="infra", attempt=2)) == first
        assert writer.tally.metrics(num_tasks=2, num_samples=1, wall_s=1.0).reward.mean == 0.75
    assert len((tmp_path / "trajectories.jsonl").read_bytes().splitlines()) == 2


def test_episodes_that_belong_together_are_written_with_one_call_or_not_at_all(tmp_path, monkeypatch):
    writes, endless = [], []
    endless.append(endless)
    with RunWriter.open(tmp_path, CONFIG) as writer:
        writer.append_all([episode("a/0", error="infra"), episode("a/1")])
        monkeypatch.setattr(record.os, "write", lambda fd, data, write=os.write: writes.append(fd) or write(fd, data))
        again = writer.append_all([episode("a/0", reward=2.0), episode("a/1", reward=9.0), episode("a/2", reward=3.0)])
        assert [summary.reward for summary in again] == [2.0, 1.0, 3.0], "of a/1 the first line counts"
        assert len(writes) == 1
        with pytest.raises(DataError):
            writer.append_all([episode("b/0"), replace(episode("b/1"), task=Task("p", label=endless))])
        assert len(writes) == 1
        assert "b/0" not in writer.finished
    assert {each.episode_id: each.reward for each in read_trajectories(tmp_path)} == {
        "a/0": 2.0,
        "a/1": 1.0,
        "a/2": 3.0,
    }


def test_a_failed_episode_gives_way_to_a_later_one_even_from_another_run(tmp_path):
    with RunWriter.open(tmp_path, CONFIG) as writer:
        writer.append(episode("a/0", error="infra", attempt=2))
        writer.append(episode("b/0"))
    with RunWriter.open(tmp_path, CONFIG, resume=True) as writer:
        writer.append(episode("a/0", reward=0.25))
        writer.append(episode("a/0", reward=0.75))
    report = ReadReport()
    assert [(t.episode_id, t.reward) for t in read_trajectories(tmp_path, report=report)] == [
        ("b/0", 1.0),
        ("a/0", 0.25),
    ]
    assert (report.num_lines, report.num_superseded) == (3, 1)


def test_an_unfinished_or_nameless_episode_is_refused(tmp_path):
    running = Trajectory(Task("p"), 100, "a/0")
    nameless = episode("")
    with RunWriter.open(tmp_path, CONFIG) as writer:
        for trajectory in (running, nameless):
            with pytest.raises(ValueError, match="expected a finished episode with an id"):
                writer.append(trajectory)


def test_a_closed_writer_refuses_and_closes_again(tmp_path):
    writer = RunWriter.open(tmp_path, CONFIG)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed one"):
        writer.append(episode())


def test_the_file_is_synced_at_most_once_a_second_and_on_close(tmp_path, monkeypatch):
    syncs, now_s = [], time.monotonic()
    monkeypatch.setattr(record, "_fdatasync", syncs.append)
    monkeypatch.setattr(record.time, "monotonic", lambda: now_s)
    with RunWriter.open(tmp_path, CONFIG) as writer:
        for index in range(20):
            writer.append(episode(f"a/{index}"))
        assert syncs == []
        now_s += 1.5
        writer.append(episode("b/0"))
        writer.append(episode("b/1"))
        assert len(syncs) == 1
    assert len(syncs) == 2


def test_metrics_are_on_the_disk_before_their_name_is_and_the_name_before_the_call_returns(tmp_path, monkeypatch):
    """What a power cut leaves is the old file or the new one, never a name without content."""
    calls, fsync, replace = [], os.fsync, Path.replace

    def synced(fd):
        calls.append("directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "content")
        fsync(fd)

    def replaced(path, target):
        calls.append("name")
        return replace(path, target)

    with RunWriter.open(tmp_path, CONFIG) as writer:
        monkeypatch.setattr(record.os, "fsync", synced)
        monkeypatch.setattr(record.Path, "replace", replaced)
        writer.write_metrics({"a": 1})
        assert calls == ["content", "name", "directory"]
        monkeypatch.undo()


def held_writes(monkeypatch):
    """Writes wait for a permission: the event of the first one, and that of the permission."""
    writing, may_write, write = threading.Event(), threading.Event(), os.write

    def slow(fd, data):
        writing.set()
        may_write.wait(60)
        return write(fd, data)

    monkeypatch.setattr(record.os, "write", slow)
    return writing, may_write


@pytest.mark.long
def test_an_episode_that_two_threads_bring_at_once_is_written_once(tmp_path, monkeypatch):
    with RunWriter.open(tmp_path, CONFIG) as writer:
        writing, may_write = held_writes(monkeypatch)
        threads = [threading.Thread(target=writer.append, args=(episode("a/0"),)) for _ in range(2)]
        threads[0].start()
        assert writing.wait(60)
        threads[1].start()
        threads[1].join(0.3)
        assert threads[1].is_alive(), "it waits for the first"
        may_write.set()
        for thread in threads:
            thread.join(60)
    assert len((tmp_path / record.TRAJECTORIES).read_bytes().splitlines()) == 1


def test_a_second_writer_is_refused_with_the_name_of_the_first(tmp_path):
    with (
        RunWriter.open(tmp_path, CONFIG),
        pytest.raises(ConfigError, match=rf"{tmp_path}.*process {os.getpid()} on .*another --out"),
    ):
        RunWriter.open(tmp_path, CONFIG, resume=True)
    RunWriter.open(tmp_path, CONFIG, resume=True).close()


def test_a_folder_that_cannot_be_made_is_a_wrong_flag(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file: expected a writable directory, got .*another --out"):
        RunWriter.open(tmp_path / "file", CONFIG)


def test_a_new_run_in_a_directory_with_episodes_is_refused_with_what_to_do(tmp_path):
    log = write_run(tmp_path, "a/0")
    before = log.read_bytes()
    with pytest.raises(ConfigError, match=r"one with episodes\. Continue that run with --resume, or use another --out"):
        RunWriter.open(tmp_path, CONFIG)
    assert log.read_bytes() == before


def test_a_run_that_recorded_nothing_may_be_started_again_with_another_config(tmp_path):
    write_run(tmp_path)
    for resume in (False, True):
        RunWriter.open(tmp_path, {**CONFIG, "model": f"other-{resume}"}, resume=resume).close()
        assert read_config(tmp_path)["config"]["model"] == f"other-{resume}"


@pytest.mark.parametrize("content", ['{"model_type": "qwen2"}', "[]", "not json", ""])
@pytest.mark.parametrize("resume", [True, False])
def test_another_owners_config_json_is_never_overwritten(tmp_path, content, resume):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json: expected .* use another --out|Use another --out"):
        RunWriter.open(tmp_path, CONFIG, resume=resume)
    assert (tmp_path / "config.json").read_text() == content


def test_resuming_with_another_config_is_refused_with_the_differences(tmp_path):
    write_run(tmp_path, "a/0")
    new = {"model": "large", "limits": {"max_turns": 4, "max_length": 200}, "concurrency": 99, "seed": 1}
    with pytest.raises(ConfigError) as caught:
        RunWriter.open(tmp_path, new, resume=True, may_differ=["concurrency"])
    message = str(caught.value)
    assert "model was 'tiny', is now 'large'" in message
    assert "limits.max_length was 100, is now 200" in message
    assert "seed was 'absent', is now 1" in message
    assert "concurrency" not in message
    assert "max_turns" not in message


def test_a_flag_that_an_older_version_did_not_know_and_that_is_not_set_is_no_change(tmp_path):
    with RunWriter.open(tmp_path, {"flags": {"n": 1}}) as writer:
        writer.append(episode())
    RunWriter.open(tmp_path, {"flags": {"n": 1, "structural_tag": None}}, resume=True).close()
    with pytest.raises(ConfigError, match="structural_tag was 'absent', is now"):
        RunWriter.open(tmp_path, {"flags": {"n": 1, "structural_tag": "{}"}}, resume=True)


def test_keys_that_may_differ_stand_for_what_is_below_them(tmp_path):
    write_run(tmp_path, "a/0")
    new = {**CONFIG, "limits": {"max_turns": 9}, "concurrency": 1}
    RunWriter.open(tmp_path, new, resume=True, may_differ=["concurrency", "limits"]).close()
    assert read_config(tmp_path)["config"] == CONFIG


@pytest.mark.parametrize("version", [2, 4])
def test_another_schema_is_refused_in_config_and_in_lines(tmp_path, version):
    log = write_run(tmp_path, "a/0")
    payload = b'{"episode_id":"b/0","error":null,"new":"field"}'
    before = log.read_bytes()
    log.write_bytes(before + b'{"v":%d,"crc":"%08x","episode":%b}\n' % (version, zlib.crc32(payload, version), payload))
    with pytest.raises(DataError, match=f"schema version 3, got {version}"):
        RunWriter.open(tmp_path, CONFIG, resume=True)
    log.write_bytes(before)
    document = read_config(tmp_path) | {"schema_version": version}
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=f"schema version 3, got {version}"):
        RunWriter.open(tmp_path, CONFIG, resume=True)


def test_reading_what_is_not_there_is_a_config_error(tmp_path):
    for path in (tmp_path / "gone", tmp_path / "gone" / "trajectories.jsonl"):
        with pytest.raises(ConfigError, match="expected a run directory, got nothing"):
            read_ids(path)
    assert read_ids(tmp_path) == []
    with pytest.raises(ConfigError, match="got no config"):
        read_config(tmp_path)
