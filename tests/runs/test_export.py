"""Exports: the tables are those of Run, whatever the format, and the records are those of interop."""

import csv
import importlib
import json
import sys
from typing import get_args

import pytest

from agentenv import load_run, read_trajectories
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Answer, Completion, StepResult, StopReason, Task
from agentenv.errors import ConfigError, DataError
from agentenv.runs.records import export as module
from agentenv.runs.records.directory import RunWriter
from agentenv.runs.records.export import TableFormat, TrainerFormat, export
from agentenv.runs.records.tables import EPISODE_COLUMNS, FLOATS, INTEGERS, TURN_COLUMNS, episode_row, turn_rows
from tests.drivers import command

ODD = 'comma, "quote"\nline\x00\ud800 é漢'


def record(episode_id, infos, *, error=None, observation="next", seed=7):
    task = Task([{"role": "user", "content": ODD}], label={"a": 1}, task_id=episode_id.split("/")[0])
    trajectory = Trajectory(task, 1000, episode_id, task.task_id, seed=seed, prompt=task.prompt)
    trajectory.append_observation([1, 2])
    for info in infos:
        trajectory.append_turn(Completion((3, 4), logprobs=(-0.5, -0.5), policy_version=3), ODD)
        trajectory.set_result(StepResult(observation, reward=0.25, score=1.0, info=info))
        trajectory.append_observation([5], bridge="exact")
    trajectory.finish(StopReason.ERROR if error else StopReason.TERMINATED, error)
    return trajectory


@pytest.fixture
def run(tmp_path):
    with RunWriter.open(tmp_path / "run", {"flags": {"model": "tiny-math"}}) as writer:
        writer.append(record("a/0", [{"n": 1.0, "mixed": 1.0}, {"late": "text"}]))
        writer.append(record("a/1", [{"n": 2.0, "mixed": "two"}], observation=[{"role": "tool", "content": "r"}]))
        writer.append(record("b/0", [], error=EpisodeError("env", "KeyError", "'x'", "reset", "e.py:3")))
    return tmp_path / "run"


def read(path, to):
    """The rows of a table, with the columns that are empty."""
    if to == "csv":
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    if to == "jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if to == "parquet":
        from pyarrow import parquet

        return parquet.read_table(path).to_pylist()
    import datasets

    return list(datasets.load_from_disk(str(path)))


def plain(text):
    return text.encode("utf-8", "backslashreplace").decode() if isinstance(text, str) else text


@pytest.mark.parametrize(
    "to", [pytest.param(to, marks=[pytest.mark.long] * (to == "hf")) for to in get_args(TableFormat)]
)
def test_a_table_has_the_rows_of_the_run(run, tmp_path, to):
    exported = export(run, to, tmp_path / "out")
    episodes, turns = exported.num_rows
    assert list(exported.num_rows.values()) == [3, 3]
    loaded = load_run(run)
    for path, expected in ((episodes, loaded.rows()), (turns, loaded.turn_rows())):
        rows = read(path, to)
        assert len(rows) == len(expected)
        for row, values in zip(rows, expected, strict=True):
            for column, cell in row.items():
                value = plain(values.get(column))
                value = str(value) if column == "info.mixed" and value is not None else value
                shown = "" if value is None else str(value)
                assert cell == (shown if to == "csv" else value), column
            assert row.keys() >= values.keys()
    assert not list((tmp_path / "out").glob(".*"))


def test_the_columns_are_the_documented_ones_and_then_those_of_info(run, tmp_path):
    export(run, "csv", tmp_path)
    infos = ["info.n", "info.mixed", "info.late"]
    assert next(csv.reader((tmp_path / "episodes.csv").read_text().splitlines())) == [*EPISODE_COLUMNS, *infos]
    assert next(csv.reader((tmp_path / "turns.csv").read_text().splitlines())) == [*TURN_COLUMNS, *infos]
    assert EPISODE_COLUMNS.keys() | TURN_COLUMNS.keys() >= INTEGERS | FLOATS


def test_every_value_of_a_row_has_the_type_of_its_column(run):
    task = Task("Q", task_id="c", env="e")
    priced = Trajectory(task, 1000, "c/0", "c", attempt=1, seed=1, prompt="Q", retried=["InfraError"])
    answer = Answer("hi", model="m", num_input_tokens=3, num_output_tokens=2, cost_usd=0.5)
    priced.append_turn(Completion((), answer=answer), "hi", 0.1)
    priced.set_result(StepResult(reward=1.0, score=0.5), 0.1)
    priced.finish(StopReason.TERMINATED)
    columns = set()
    for trajectory in [priced, *read_trajectories(run)]:
        for row in (episode_row(trajectory), *turn_rows(trajectory)):
            for name, value in row.items():
                if value is not None and not name.startswith("info."):
                    assert type(value) is (int if name in INTEGERS else float if name in FLOATS else str), name
                    columns.add(name)
    assert columns == EPISODE_COLUMNS.keys() | TURN_COLUMNS.keys()


@pytest.mark.parametrize("late", [{"n": "text"}, {"new": 1.0}])
def test_an_episode_recorded_during_an_export_that_its_columns_cannot_hold_is_an_error(
    run, tmp_path, monkeypatch, late
):
    kinds = module._kinds

    def kinds_then_record(*args):
        found = kinds(*args)
        with RunWriter.open(run, {"flags": {"model": "tiny-math"}}, resume=True) as writer:
            writer.append(record("c/0", [late]))
        return found

    monkeypatch.setattr(module, "_kinds", kinds_then_record)
    with pytest.raises(DataError, match=r"the run changed while it was exported.* Export again\."):
        export(run, "csv", tmp_path / "out")


def test_a_number_that_parquet_cannot_hold_is_an_error_and_the_earlier_file_stays(run, tmp_path):
    export(run, "parquet", tmp_path)
    before = (tmp_path / "episodes.parquet").read_bytes()
    with RunWriter.open(tmp_path / "big", {}) as writer:
        writer.append(record("a/0", [{}], seed=2**70))
    with pytest.raises(DataError, match="expected values that Parquet holds"):
        export(tmp_path / "big", "parquet", tmp_path)
    assert (tmp_path / "episodes.parquet").read_bytes() == before
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("to", get_args(TrainerFormat))
def test_records_of_a_trainer_are_those_of_interop(run, tmp_path, to):
    keeps_failed = to == "nemo_rl"
    exported = export(run, to, tmp_path, decode=lambda: str)
    lines = read(tmp_path / f"{to}.jsonl", "jsonl")
    to_records = importlib.import_module(f"agentenv.interop.{to}").to_records
    options = {"decode": str} if to == "nemo_rl" else {}
    kept = [each for each in read_trajectories(run) if keeps_failed or each.reward is not None]
    expected = [row for each in kept for row in to_records(each, **options)]
    assert lines == json.loads(json.dumps(expected))
    assert exported.num_rows == {tmp_path / f"{to}.jsonl": len(expected)}
    assert exported.num_left_out == (0 if keeps_failed else 1)


def test_the_command_names_its_files_and_what_it_left_out(run, capsys):
    assert command(["export", run, "--to", "csv"]) == 0
    assert capsys.readouterr().out == f"{run}/export/episodes.csv: 3 rows\n{run}/export/turns.csv: 3 rows\n"
    assert command(["export", run, "--to", "verl", "--out", run / "verl"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{run}/verl/verl.jsonl: 2 rows\n"
    assert captured.err == "agentenv export: 1 episode without a reward is left out\n"


def test_no_folder_is_made_for_a_run_that_does_not_exist(tmp_path):
    with pytest.raises(ConfigError, match="expected a run directory"):
        export(tmp_path / "no run", "csv", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("to", "package"), [("parquet", "pyarrow"), ("hf", "datasets")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(run, capsys, monkeypatch, to, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert command(["export", run, "--to", to]) == 2
    assert f"expected {package}, got none. Run: pip install 'agentenv-rl[data]'" in capsys.readouterr().err
