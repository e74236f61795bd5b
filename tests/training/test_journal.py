"""The journal: a line per train step, once and without a gap, whatever kills the training; trackers never stop it."""

import logging
import math
import resource

import pytest

from agentenv.errors import ConfigError, DataError, RunStopped
from agentenv.runs import trackers as trackers_module
from agentenv.runs.records.steps import STEPS
from agentenv.training.logs.journal import METRICS, Journal, read_metrics


def log_steps(folder, *steps, **options):
    journal = Journal(folder, **options)
    for step in steps:
        journal.log(step, {"reward": float(step)})
    journal.close()


def steps_in(folder):
    return [row["step"] for row in read_metrics(folder)]


# --- the file -------------------------------------------------------------------------------------------------------


def test_a_line_is_a_json_object_with_the_step_first_and_null_for_what_is_not_finite(tmp_path):
    journal = Journal(tmp_path)
    journal.log(3, {"reward": 0.1, "num": 4, "loss": math.nan, "kl": math.inf, "low": -math.inf})
    text = (tmp_path / METRICS).read_text()  # at once, while the journal is open
    assert text == '{"step":3,"reward":0.1,"num":4,"loss":null,"kl":null,"low":null}\n'
    assert read_metrics(tmp_path)[0]["loss"] is None
    journal.close()


def test_numbers_that_come_late_are_in_the_line_of_the_last_step(tmp_path):
    hears = Service()
    log_steps(tmp_path, 1, 2)
    before = (tmp_path / METRICS).read_bytes().splitlines(keepends=True)
    journal = Journal(tmp_path, resume_step=2, trackers=[hears])
    assert not journal.has_evaluation
    journal.amend({"eval/score": 0.5, "eval/low": -math.inf})
    assert (journal.has_evaluation, hears.told) == (True, [(2, {"eval/score": 0.5, "eval/low": -math.inf})])
    journal.log(3, {"reward": 3.0})
    assert not journal.has_evaluation
    journal.amend({"eval/score": 0.75})
    journal.close()
    rows = read_metrics(tmp_path)
    assert rows[1] == {"step": 2, "reward": 2.0, "eval/score": 0.5, "eval/low": None}
    assert rows[2] == {"step": 3, "reward": 3.0, "eval/score": 0.75}
    assert (tmp_path / METRICS).read_bytes().startswith(before[0])
    assert [path.name for path in tmp_path.iterdir()] == [METRICS], "nothing else is left"


def test_without_a_line_of_the_checkpoints_step_late_numbers_are_its_line(tmp_path, caplog):
    log_steps(tmp_path, 1)
    journal = Journal(tmp_path, resume_step=2)
    journal.amend({"eval/score": 0.5})
    journal.close()
    assert read_metrics(tmp_path) == [{"step": 1, "reward": 1.0}, {"step": 2, "eval/score": 0.5}]
    assert "the last line belongs to step 1" in caplog.text


@pytest.mark.parametrize("step", [5, 4, 7, 0, -1])
def test_a_step_that_is_not_the_next_is_refused(tmp_path, step):
    journal = Journal(tmp_path)
    journal.log(5, {})
    with pytest.raises(ValueError, match=f"expected the step after 5, got {step} "):
        journal.log(step, {})
    journal.log(6, {})
    journal.close()
    assert steps_in(tmp_path) == [5, 6]


def test_a_number_called_step_is_refused(tmp_path):
    journal = Journal(tmp_path)
    with pytest.raises(ValueError, match="Log every step once"):
        journal.log(1, {"step": 2.0})
    journal.close()


def test_a_training_that_starts_does_not_write_on_where_another_was(tmp_path):
    log_steps(tmp_path, 0, 1, 2)
    with pytest.raises(ConfigError, match=r"got one of 2 steps\. Resume it with --resume"):
        Journal(tmp_path)
    assert steps_in(tmp_path) == [0, 1, 2]


def test_a_training_that_continues_cuts_off_what_it_does_again(tmp_path):
    log_steps(tmp_path, 0, 1, 2, 3, 4)
    before = (tmp_path / METRICS).read_bytes()
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b'{"step": 5, "rew')
    log_steps(tmp_path, 3, resume_step=2)
    after = (tmp_path / METRICS).read_bytes()
    assert before.startswith(after)  # what was written before is not written anew
    assert steps_in(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("steps", [(), (0, 1)])
def test_lost_lines_are_reported_and_steps_keep_their_numbers(tmp_path, caplog, steps):
    (tmp_path / "another").mkdir()
    Journal(tmp_path / "another", resume_step=3).close()  # a new folder, with the checkpoints of another one
    assert not caplog.records
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / STEPS).touch()
    Journal(tmp_path / "lost", resume_step=3).close()
    assert "lost/metrics.jsonl: the last line belongs to step None, the checkpoint to step 3" in caplog.text
    log_steps(tmp_path, *steps)
    with caplog.at_level(logging.WARNING):
        journal = Journal(tmp_path, resume_step=3)
    assert f"the last line belongs to step {steps[-1] if steps else None}, the checkpoint to step 3" in caplog.text
    with pytest.raises(ValueError, match="the step after 3"):
        journal.log(2, {})
    journal.log(4, {})
    journal.close()


def test_a_torn_last_line_is_passed_over_and_a_damaged_or_repeated_one_is_named(tmp_path):
    log_steps(tmp_path, 1, 2, 3)
    path = tmp_path / METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines)[:-1])
    assert steps_in(tmp_path) == [1, 2]
    for damage in (b"{\n", b"7\n", b'{"reward": 1}\n', lines[0]):
        path.write_bytes(lines[0] + damage + lines[2])
        with pytest.raises(DataError, match=r"metrics.jsonl: expected the numbers of a train step in line 2"):
            read_metrics(tmp_path)
        with pytest.raises(DataError):
            Journal(tmp_path, resume_step=1)
    assert path.read_bytes() == lines[0] + lines[0] + lines[2]


def test_a_full_disk_stops_the_training_and_leaves_whole_lines(tmp_path):
    journal = Journal(tmp_path)
    journal.log(1, {"reward": 0.5})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / METRICS).stat().st_size + 10, hard))
    try:
        with pytest.raises(RunStopped, match=r"expected to write a line, got.*resume with --resume"):
            journal.log(2, {"reward": 0.5})
        with pytest.raises(RunStopped, match="expected to write a line, got"):
            journal.amend({"eval/a long name": 0.5, "eval/another one": 0.25})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / METRICS).read_text() == '{"step":1,"reward":0.5}\n'
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]
    journal.log(2, {"reward": 0.75})
    journal.close()
    assert steps_in(tmp_path) == [1, 2]


# --- trackers -------------------------------------------------------------------------------------------------------


class Away(Exception):
    """What a service that cannot be reached raises."""


class Service:
    """A tracker whose service is away at some steps."""

    name = "the service"
    failures = (Away,)

    def __init__(self, away=(), *, error=Away):
        self.away, self.error = away, error
        self.told, self.tries, self.is_closed = [], [], False

    def log(self, step, numbers):
        self.tries.append(step)
        if step in self.away:
            raise self.error("no route to host")
        self.told.append((step, dict(numbers)))

    def close(self):
        self.is_closed = True
        if self.away:
            raise self.error("still away")


def test_a_tracker_that_fails_is_warned_of_once_and_the_training_continues(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(trackers_module, "_RETRY_AFTER_S", 0.0)
    away, well = Service(away=(1, 2)), Service()
    with caplog.at_level(logging.WARNING):
        log_steps(tmp_path, 0, 1, 2, 3, trackers=[away, well])
    assert [step for step, _ in away.told] == [0, 3]
    assert [step for step, _ in well.told] == steps_in(tmp_path) == [0, 1, 2, 3]
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        "the service failed at step 1",
        "the service could not be closed: Away: still away",
    ]
    assert well.is_closed


def test_a_tracker_that_failed_is_left_alone_for_a_while(tmp_path):
    away = Service(away=(1,))
    log_steps(tmp_path, 0, 1, 2, 3, trackers=[away])
    assert away.tries == [0, 1]


def test_an_error_that_is_not_a_failure_of_a_service_is_not_hidden(tmp_path):
    with pytest.raises(ZeroDivisionError):
        log_steps(tmp_path, 0, trackers=[Service(away=(0,), error=ZeroDivisionError)])


def test_trackers_are_updated_every_logging_steps_and_at_every_evaluation(tmp_path):
    service = Service()
    journal = Journal(tmp_path, trackers=[service], logging_steps=3)
    for step in range(8):
        journal.log(step, {"eval/score": 1.0} if step == 5 else {"reward": 1.0})
    journal.close()
    assert [step for step, _ in service.told] == [0, 3, 5, 6]
    assert steps_in(tmp_path) == list(range(8))
