"""steps.jsonl: the last line counts, a resume cuts, a torn line is left out, and damage is an error."""

import pytest

from agentenv.errors import DataError, RunStopped
from agentenv.runs.metrics import Summary
from agentenv.runs.records.steps import EVAL_FIELDS, STEPS, append_step, cut_steps, evaluation_row, read_steps


def row(step, reward=1.0, kind="eval"):
    return evaluation_row(step, [Summary("b/0", "b", reward=0.0), Summary("a/0", "a", reward=reward)]) | {"kind": kind}


def rewards(folder, kind="eval"):
    return {step: line["groups"][0]["episodes"][0][1] for step, line in read_steps(folder, kind).items()}


def test_lines_are_read_by_kind_and_the_last_one_of_a_step_counts(tmp_path):
    for each in (row(2, 0.1), row(0, 0.2), row(2, 0.3, "train"), row(2, 0.4)):
        append_step(tmp_path, each)
    assert rewards(tmp_path) == {0: 0.2, 2: 0.4}
    assert list(rewards(tmp_path)) == [0, 2]
    assert rewards(tmp_path, "train") == {2: 0.3}
    assert read_steps(tmp_path / "nothing", "eval") == {}
    line = read_steps(tmp_path, "eval")[0]
    assert [group["group_id"] for group in line["groups"]] == ["a", "b"]
    assert len(line["groups"][0]["episodes"][0]) == len(line["episode_fields"]) == len(EVAL_FIELDS)


def test_a_resume_cuts_later_steps_and_a_torn_line(tmp_path):
    for step in (0, 2, 4):
        append_step(tmp_path, row(step))
    with (tmp_path / STEPS).open("ab") as file:
        file.write(b'{"v":1,"step":6')
    assert list(rewards(tmp_path)) == [0, 2, 4]
    cut_steps(tmp_path / STEPS, 2)
    assert list(rewards(tmp_path)) == [0, 2]
    append_step(tmp_path, row(3))
    assert list(rewards(tmp_path)) == [0, 2, 3]
    cut_steps(tmp_path / "nothing" / STEPS, 2)


@pytest.mark.parametrize("line", [b"{broken}\n", b"[1]\n", b'{"v":9,"step":1}\n', b'{"v":1,"step":"1"}\n'])
def test_a_damaged_line_and_another_schema_are_errors(tmp_path, line):
    append_step(tmp_path, row(0))
    with (tmp_path / STEPS).open("ab") as file:
        file.write(line)
    with pytest.raises(DataError, match=r"steps.jsonl: expected a line of schema version 1, .* in line 2"):
        read_steps(tmp_path, "eval")


def test_a_disk_that_fails_stops_the_training(tmp_path):
    (tmp_path / STEPS).mkdir()
    with pytest.raises(RunStopped, match=r"steps.jsonl: expected to write a line"):
        append_step(tmp_path, row(0))
