"""The index of a record: what it says is what the record says, whatever happened to either, and without torch."""

import json
import math
import os
import random
import shutil
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv import load_run
from agentenv.core.trajectory import NO_VERSION
from agentenv.errors import ConfigError
from agentenv.runs.metrics import Tally, aggregate, summarize
from agentenv.runs.records.directory import RunWriter, read_trajectories
from agentenv.runs.records.index import (
    FIELDS,
    HEADER,
    INDEX,
    LOCK,
    TRAJECTORIES,
    make_row,
    read_index,
    store_index,
    summary_of,
)
from agentenv.runs.records.lines import decode_episode, decode_line, encode_line, split_line
from agentenv.runs.records.scan import ReadReport
from tests.runs.test_record import CONFIG, episode
from tests.runs.test_serialize import trajectories

PLACE = {name: place for place, name in enumerate(FIELDS)}


def facts_of(path):
    """The rows as a check of them cannot be: from the whole record, without `check`."""
    rows, offset = [], 0
    for line in (path / TRAJECTORIES).read_bytes().splitlines(keepends=True):
        parts = split_line(line)
        if parts is not None and line.endswith(b"\n"):
            trajectory = decode_episode(line[parts.start : parts.end])
            rows.append(make_row(trajectory, summarize(trajectory), offset, len(line), parts.crc))
        offset += len(line)
    return json.loads(json.dumps(rows))


def rows_of(path):
    return [row[: PLACE["check"]] for row in read_index(path)]


def metrics_of(tally):
    return tally.metrics(num_tasks=3, num_samples=2, wall_s=1.0).to_dict()


def write_run(path, *episodes):
    with RunWriter.open(path, CONFIG, resume=True, tally=Tally(2)) as writer:
        for each in episodes:
            writer.append(each)


def test_the_writer_leaves_a_row_for_each_line_behind_a_header_that_names_the_fields(tmp_path):
    write_run(tmp_path, episode("a/0", error="infra"), episode("a/0", attempt=1), episode("b/0", reward=0.25))
    header, *lines = (tmp_path / INDEX).read_text().splitlines()
    assert json.loads(header) == {"v": 1, "source": "trajectories.jsonl", "fields": list(FIELDS)}
    rows = [dict(zip(FIELDS, json.loads(line), strict=True)) for line in lines]
    assert [(row["episode_id"], row["error"], row["reward"]) for row in rows] == [
        ("a/0", "infra", None), ("a/0", None, 1.0), ("b/0", None, 0.25),
    ]  # fmt: skip
    assert rows[0]["error_text"] == ["SomeError", "it broke", "", ""]
    assert (rows[1]["action_tokens"], rows[1]["mean_logprob"], rows[1]["finish"]) == (50, -0.5, "s")
    assert rows[1]["action_hash"] == rows[2]["action_hash"]
    record = (tmp_path / TRAJECTORIES).read_bytes()
    for row in rows:
        line = record[row["offset"] : row["offset"] + row["length"]]
        assert json.loads(line)["episode"]["episode_id"] == row["episode_id"]
    assert rows_of(tmp_path) == facts_of(tmp_path)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(trajectories())
def test_a_row_has_the_summary_of_its_episode(trajectory):
    back = decode_episode(decode_line(encode_line(trajectory)))
    row = json.loads(json.dumps(make_row(trajectory, summarize(trajectory), 0, 1, "0"), allow_nan=False))
    assert row == json.loads(json.dumps(make_row(back, summarize(back), 0, 1, "0")))
    assert summary_of(row) == summarize(back)


def test_calls_of_step_again_and_reasons_of_refusals_are_in_the_metrics_of_a_reopened_run(tmp_path):
    again = episode("a/0")
    again.turns[0].num_retries = 2
    again.refusal_reasons = {"invalid_request": "n: expected 1, got 3"}
    write_run(tmp_path, again)
    with RunWriter.open(tmp_path, CONFIG, resume=True, tally=Tally(2)) as writer:
        found = metrics_of(writer.tally)
    assert (found["num_step_retries"], found["refusal_reasons"]) == (2, again.refusal_reasons)


def test_a_row_has_no_version_and_no_finish_that_the_record_does_not_know():
    trajectory = episode("a/0")
    trajectory.turns[0].finish_reason = ""
    trajectory.segments[0].policy_versions[:] = array("i", [NO_VERSION]) * len(trajectory.segments[0])
    row = make_row(trajectory, summarize(trajectory), 0, 1, "")
    assert [row[PLACE[name]] for name in ("version_min", "version_max", "finish")] == [None, None, ""]


def test_log_probabilities_of_both_infinities_are_left_out_of_the_mean():
    odd = episode("a/0")
    turn = odd.turns[0]
    logprobs = odd.segments[turn.segment].logprobs
    logprobs[turn.start], logprobs[turn.start + 1] = math.inf, -math.inf
    row = make_row(odd, summarize(odd), 0, 1, "0")
    assert row[PLACE["mean_logprob"]] == -0.5


class Damage:
    """What may happen to a run directory between two sessions."""

    def __init__(self, path):
        self.index, self.record = path / INDEX, path / TRAJECTORIES

    def nothing(self, rng):
        pass

    def no_index(self, rng):
        self.index.unlink()

    def torn_index(self, rng):
        os.truncate(self.index, rng.randrange(self.index.stat().st_size + 1))

    def torn_record(self, rng):
        os.truncate(self.record, rng.randrange(self.record.stat().st_size + 1))

    def flipped_bit(self, rng):
        path = rng.choice([self.index, self.record])
        data = bytearray(path.read_bytes())
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)

    def lost_row(self, rng):
        lines = self.index.read_bytes().splitlines(keepends=True)
        del lines[rng.randrange(len(lines))]
        self.index.write_bytes(b"".join(lines))

    def moved_line(self, rng):
        lines = self.record.read_bytes().splitlines(keepends=True)
        rng.shuffle(lines)
        self.record.write_bytes(b"".join(lines))

    def other_index(self, rng):
        self.index.write_bytes(self.index.read_bytes().replace(b'"v":1', b'"v":9'))


HARM = [name for name in vars(Damage) if not name.startswith("_")]
attempts = st.tuples(
    st.sampled_from(["a/0", "a/1", "b/0", "b/1", "c/0"]), st.sampled_from([None, "infra"]), st.integers(0, 2),
    st.sampled_from([0.0, 0.5, 1.0]),
)  # fmt: skip


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.lists(attempts, max_size=4), st.booleans(), st.sampled_from(HARM)), min_size=1, max_size=5),
    st.integers(0, 10_000),
    st.booleans(),
)
def test_index_and_metrics_are_those_of_the_record_after_any_damage(tmp_path_factory, sessions, seed, reads_between):
    path, rng = tmp_path_factory.mktemp("run"), random.Random(seed)
    for number, (given_attempts, is_killed, harm) in enumerate(sessions):
        with RunWriter.open(path, CONFIG, resume=True, tally=Tally(2)) as writer:
            for key, error, attempt, reward in given_attempts:
                writer.append(episode(key, error=error, attempt=attempt, reward=reward, text=f"said {number}"))
            if is_killed:
                writer._close_files()  # rows that are not written yet are lost
        getattr(Damage(path), harm)(rng)
        if reads_between and harm not in ("flipped_bit", "moved_line"):  # readers check the last line only
            assert rows_of(path) == facts_of(path)
    full = Tally(2)
    for trajectory in read_trajectories(path, report=ReadReport()):
        full.add(summarize(trajectory))
    with RunWriter.open(path, CONFIG, resume=True, tally=Tally(2)) as writer:
        assert (writer.finished, writer.failed) == (full.finished, full.failed)
        assert metrics_of(writer.tally) == metrics_of(full)
    assert rows_of(path) == facts_of(path)
    assert (path / INDEX).read_bytes().startswith(HEADER)


def test_a_resumed_run_reads_no_episode_that_the_index_has(tmp_path, monkeypatch):
    write_run(tmp_path, *(episode(f"{number}/0") for number in range(5)))

    def refuse(*args):
        raise AssertionError("an episode was read")

    monkeypatch.setattr("agentenv.runs.records.scan.decode_episode", refuse)
    with RunWriter.open(tmp_path, CONFIG, resume=True) as writer:
        assert len(writer.finished) == 5
    assert len(list(read_index(tmp_path))) == 5


def test_load_run_reads_an_episode_when_it_is_used_and_once(tmp_path):
    write_run(tmp_path, *(episode(f"{number}/0", reward=number / 4) for number in range(5)))
    os.truncate(tmp_path / TRAJECTORIES, (tmp_path / TRAJECTORIES).stat().st_size - 9)
    with pytest.warns(UserWarning, match="torn last line"):
        run = load_run(tmp_path)
    assert (len(run), run.metrics.reward.mean) == (4, 0.375)
    (tmp_path / TRAJECTORIES).rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        run[0]
    (tmp_path / "elsewhere").rename(tmp_path / TRAJECTORIES)
    assert run[-1] is run[3] is list(run)[3]
    assert [each.episode_id for each in run.trajectories[1:3]] == ["1/0", "2/0"]
    assert aggregate(map(summarize, run), num_samples=1) == run.metrics


def test_an_index_whose_every_checksum_is_right_but_is_that_of_another_record_is_not_believed(tmp_path):
    write_run(tmp_path / "a", episode("a/0", reward=1.0))
    write_run(tmp_path / "b", episode("a/0", reward=0.0))
    shutil.copy(tmp_path / "b" / INDEX, tmp_path / "a" / INDEX)
    assert [row[PLACE["reward"]] for row in read_index(tmp_path / "a")] == [1.0]
    shutil.copy(tmp_path / "b" / INDEX, tmp_path / "a" / INDEX)
    with RunWriter.open(tmp_path / "a", CONFIG, resume=True) as writer:
        assert metrics_of(writer.tally)["reward"]["mean"] == 1.0


def test_a_reader_leaves_the_index_of_a_run_that_is_writing_alone_and_has_its_rows_nevertheless(tmp_path):
    with RunWriter.open(tmp_path, CONFIG) as writer:
        for number in range(3):
            writer.append(episode(f"{number}/0"))
        before = (tmp_path / INDEX).read_bytes()
        assert rows_of(tmp_path) == facts_of(tmp_path)
        assert len(facts_of(tmp_path)) == 3
        assert (tmp_path / INDEX).read_bytes() == before
    assert (tmp_path / INDEX).read_bytes().startswith(before)
    assert rows_of(tmp_path) == facts_of(tmp_path)


def test_a_link_in_a_directory_leads_the_index_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, target = tmp_path / "run", tmp_path / "target"
    folder.mkdir()
    (folder / LOCK).symlink_to(target)
    store_index(folder, b"rows")
    assert not target.exists()
    assert not (folder / INDEX).exists()
    (stored,) = (tmp_path / "cache" / "agentenv" / "index").glob(f"*/{INDEX}")
    assert stored.read_bytes() == b"rows"


def test_a_file_that_a_killed_process_left_is_removed_when_the_index_is_stored_and_one_being_written_stays(tmp_path):
    left, written = (tmp_path / f".{INDEX}.{number}.tmp" for number in (1, 2))
    for each in (left, written):
        each.write_bytes(b"ro")
    os.utime(left, (0, 0))
    store_index(tmp_path, b"rows")
    assert {path.name for path in tmp_path.iterdir()} == {INDEX, LOCK, written.name}


def test_a_directory_that_cannot_be_written_has_its_index_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    write_run(run, episode("a/0"))
    (run / INDEX).unlink()
    (run / ".lock").unlink()
    (run / ".lock").mkdir()  # what root, who runs tests, cannot open either
    first = list(read_index(run))
    (stored,) = (tmp_path / "cache" / "agentenv" / "index").glob(f"*/{INDEX}")
    assert [json.loads(line) for line in stored.read_bytes().splitlines()[1:]] == first
    monkeypatch.setattr("agentenv.runs.records.index.make_row", pytest.fail)
    assert list(read_index(run)) == first


def test_a_disk_that_takes_no_row_costs_rows_only(tmp_path, monkeypatch, caplog):
    with RunWriter.open(tmp_path, CONFIG) as writer:
        writer.append(episode("a/0"))
        monkeypatch.setattr(writer._index, "_fd", os.open("/dev/full", os.O_WRONLY))
        writer._index.flush()
        writer.append(episode("a/1"))
    assert "no more rows are written" in caplog.text
    assert (tmp_path / INDEX).read_bytes() == HEADER
    assert rows_of(tmp_path) == facts_of(tmp_path)


def test_a_directory_without_a_record_has_no_index(tmp_path):
    with pytest.raises(ConfigError, match=r"expected a run directory with trajectories\.jsonl"):
        read_index(tmp_path / "nowhere")
