"""The index as pages get it: the stored rows and those of later lines, whatever happens to the record meanwhile."""

import json
import random

import pytest

from agentenv.runs.records.directory import RunWriter
from agentenv.runs.records.index import HEADER, read_index
from agentenv.view import tail as tails
from agentenv.view.tail import IndexTail, TailPlace
from agentenv.view.viewed import find_runs
from tests.view.viewed_runs import episode, write_run


def rows_after(tail, place=None):
    """All rows after a place without the header, the place behind them, and whether the reader had to start again."""
    place, rows, was_reset = place or TailPlace(), [], False
    while True:
        found = tail.read(place)
        place, was_reset = found.place, was_reset or found.was_reset
        if not found.lines:
            return [row for row in rows if isinstance(row, list)], place, was_reset
        rows += map(json.loads, found.lines.splitlines())


def ids(rows):
    return [row[2] for row in rows]


def index_of(folder):
    return IndexTail(find_runs([str(folder)])[0])


@pytest.mark.parametrize("is_stored", [True, False])
def test_the_rows_are_those_of_the_index_with_and_without_one(tmp_path, is_stored, monkeypatch):
    monkeypatch.setattr(tails, "_BLOCK_BYTES", 2000)
    write_run(tmp_path / "run", *(episode(f"a/{number}", action="x" * 100 * number) for number in range(9)))
    wanted = (tmp_path / "run" / "index.jsonl").read_bytes()
    if not is_stored:
        (tmp_path / "run" / "index.jsonl").unlink()
    tail = index_of(tmp_path / "run")
    first = tail.read(TailPlace())
    assert len(first.lines) == len(wanted) if is_stored else first.lines == HEADER
    rows, _, _ = rows_after(tail)
    assert rows == [json.loads(line) for line in wanted.splitlines()[1:]]
    assert (tmp_path / "run" / "index.jsonl").read_bytes() == wanted


def test_without_an_index_the_first_rows_come_before_the_record_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tails, "_BLOCK_BYTES", 2000)
    write_run(tmp_path / "run", *(episode(f"a/{number}") for number in range(40)))
    (tmp_path / "run" / "index.jsonl").unlink()
    tail = index_of(tmp_path / "run")
    header = tail.read(TailPlace())
    found = tail.read(header.place)
    assert 0 < len(found.lines.splitlines()) < 10
    assert found.progress[0] < found.progress[1] == (tmp_path / "run" / "trajectories.jsonl").stat().st_size


@pytest.mark.parametrize("seed", range(5))
def test_a_record_that_grows_by_pieces_has_the_rows_of_its_lines(tmp_path, seed):
    write_run(tmp_path / "whole", *(episode(f"a/{number}") for number in range(12)))
    content = (tmp_path / "whole" / "trajectories.jsonl").read_bytes()
    chance = random.Random(seed)
    cuts = sorted(chance.sample(range(len(content)), 9))
    write_run(tmp_path / "run")
    tail, place, rows = index_of(tmp_path / "run"), TailPlace(), []
    with (tmp_path / "run" / "trajectories.jsonl").open("ab", buffering=0) as record:
        for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
            record.write(content[start:end])
            new, place, was_reset = rows_after(tail, place)
            assert not was_reset
            rows += new
    assert rows == list(read_index(tmp_path / "whole"))


def test_failed_attempts_and_damaged_lines_keep_the_places_of_the_others(tmp_path):
    write_run(tmp_path / "run", *(episode(f"a/{number}") for number in range(4)))
    record = tmp_path / "run" / "trajectories.jsonl"
    lines = record.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"apples", b"appels")
    lines.insert(2, b"\x00\xff nonsense\r\n")
    record.write_bytes(b"".join(lines))
    rows, _, _ = rows_after(index_of(tmp_path / "run"))
    assert ids(rows) == ["a/0", "a/2", "a/3"]
    content = record.read_bytes()
    assert [json.loads(content[row[0] : row[0] + row[1]])["episode"]["episode_id"] for row in rows] == ids(rows)


def test_a_record_that_was_replaced_has_new_rows_from_the_beginning(tmp_path):
    write_run(tmp_path / "run", episode("a/0"), episode("a/1"))
    tail = index_of(tmp_path / "run")
    rows, place, _ = rows_after(tail)
    assert ids(rows) == ["a/0", "a/1"]
    (tmp_path / "run" / "trajectories.jsonl").unlink()
    write_run(tmp_path / "run", episode("b/0"), episode("b/1"), episode("b/2"))
    rows, place, was_reset = rows_after(tail, place)
    assert was_reset
    assert ids(rows) == ["b/0", "b/1", "b/2"]
    with RunWriter.open(tmp_path / "run", {}, resume=True, may_differ=["flags"]) as writer:
        writer.append(episode("b/3"))
    rows, place, was_reset = rows_after(tail, place)
    assert (ids(rows), was_reset) == (["b/3"], False)


def test_a_record_that_ends_as_the_one_that_it_replaced_is_another_one_in_the_same_inode_too(tmp_path):
    for name in "ab":
        write_run(tmp_path / name, episode(f"{name}/0"), episode(f"{name}/1"))
    tail = index_of(tmp_path / "a")
    _, place, _ = rows_after(tail)
    (tmp_path / "a" / "trajectories.jsonl").write_bytes((tmp_path / "b" / "trajectories.jsonl").read_bytes())
    rows, _, was_reset = rows_after(tail, place)
    assert (ids(rows), was_reset) == (["b/0", "b/1"], True)


def test_a_place_of_another_server_starts_again(tmp_path):
    write_run(tmp_path / "run", episode("a/0"))
    _, place, _ = rows_after(index_of(tmp_path / "run"))
    rows, _, was_reset = rows_after(index_of(tmp_path / "run"), place)
    assert was_reset
    assert ids(rows) == ["a/0"]
