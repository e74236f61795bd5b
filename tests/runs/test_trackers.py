"""Trackers: a run and a training log the same numbers there, resumed ones continue, and none of them stops a run."""

import json
import math
import re
import sys

import pytest

import agentenv
from agentenv.errors import ConfigError, MissingDependency
from agentenv.runs import trackers as trackers_module
from agentenv.runs.config import RunConfig
from agentenv.runs.trackers import Tracked, flat_numbers, open_trackers
from agentenv.training.config import TrainConfig
from agentenv.training.logs.journal import Journal
from tests.drivers import command
from tests.runs.tracker_services import install_mlflow, install_trackio, install_wandb

KEY = "0123456789abcdef" * 2 + "01234567"
RUN = ["run", "--env", "guess_number", "--engine", "scripted", "--limit", 3, "--n", 2, "--max_error_share", 1,
       "--progress", "none", "--out", "out"]  # fmt: skip


def tracked(folder, **flags):
    config = TrainConfig.from_flags(env="math_retry", **flags)
    return Tracked(config.trackers, config.to_dict(), folder, "agentenv_train")


def log_steps(folder, *steps, trackers, resume_step=None):
    journal = Journal(folder, trackers=trackers, resume_step=resume_step)
    for step in steps:
        journal.log(step, {"reward": float(step)})
    journal.close()


@pytest.fixture(autouse=True)
def _there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# --- the flags --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "flag", "value", "name"),
    [
        ("torch.utils.tensorboard", "use_tensorboard", "logs", "'agentenv-rl[train]'"),
        ("wandb", "use_wandb", "True", "'agentenv-rl[wandb]'"),
        ("mlflow", "use_mlflow", "file:mlruns", "'agentenv-rl[mlflow]'"),
        ("trackio", "use_trackio", "True", "'agentenv-rl[trackio]'"),
    ],
)
def test_a_tracker_that_is_not_installed_is_answered_with_the_command(
    tmp_path, monkeypatch, package, flag, value, name
):
    monkeypatch.setitem(sys.modules, package, None)  # as where it is absent
    with pytest.raises(MissingDependency, match=rf"--{flag}: expected .*pip install {re.escape(name)}$"):
        open_trackers(tracked(tmp_path, **{flag: value}))


@pytest.mark.parametrize("config", [RunConfig, TrainConfig])
def test_run_and_train_refuse_the_same_flags(config):
    with pytest.raises(ConfigError, match=r"^--use_wandb: expected an API key, or True, got 'False'"):
        config.from_flags(env="e", use_wandb="False")
    with pytest.raises(ConfigError, match=r"^--wandb_group: expected --use_wandb or --use_trackio with it, got none"):
        config.from_flags(env="e", wandb_group="g")
    assert config.from_flags(env="e", use_wandb=KEY).to_dict()["use_wandb"] == "True"


def test_a_tracker_needs_a_run_directory():
    with pytest.raises(ConfigError, match=r"^out: expected a run directory for a tracker"):
        agentenv.rollout("guess_number", engine="scripted", use_trackio="True", progress="none")


# --- the services -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_tensorboard_gets_every_number_and_hides_what_is_done_again(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tracked(tmp_path, use_tensorboard=str(tmp_path / "logs"), wandb_run_name="first")
    log_steps(tmp_path, 0, 1, 2, 3, trackers=open_trackers(run))
    log_steps(tmp_path, 2, trackers=open_trackers(run, resume_step=1), resume_step=1)
    events = accumulators.EventAccumulator(str(tmp_path / "logs" / "first")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_a_tensorboard_folder_that_cannot_be_written_is_a_wrong_flag(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--use_tensorboard: expected a writable folder"):
        open_trackers(tracked(tmp_path, use_tensorboard=str(tmp_path / "file")))


def test_wandb_continues_with_the_same_run_and_never_stores_the_key(tmp_path, monkeypatch):
    service = install_wandb(monkeypatch)
    run = tracked(tmp_path, use_wandb=KEY, wandb_project="some project", actor_learning_rate=0.125)
    log_steps(tmp_path, 0, 1, trackers=open_trackers(run))
    log_steps(tmp_path, 2, trackers=open_trackers(run, resume_step=1), resume_step=1)
    first, second = service.runs
    assert first.options["id"] == second.options["id"] == json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    assert first.options["config"]["actor_learning_rate"] == 0.125
    assert KEY not in str(first.options["config"])
    assert first.options["settings"].api_key == KEY
    assert (first.options["project"], first.options["name"]) == ("some project", tmp_path.name)
    assert (first.rows, second.rows) == ([(0, {"reward": 0.0}), (1, {"reward": 1.0})], [(2, {"reward": 2.0})])
    assert first.is_finished
    assert second.is_finished


def test_mlflow_gets_every_number_and_continues_with_the_same_run(tmp_path, monkeypatch):
    service = install_mlflow(monkeypatch)
    run = tracked(tmp_path, use_mlflow="file:mlruns", wandb_project="some project")
    log_steps(tmp_path, 0, 1, trackers=open_trackers(run))
    journal = Journal(tmp_path, trackers=open_trackers(run, resume_step=1), resume_step=1)
    journal.log(2, {"reward": 2.0, "eval/pass@1": 0.5})
    journal.close()
    (made,) = service.runs
    assert [row for row in made.rows if row[1] == "reward"] == [(0, "reward", 0), (1, "reward", 1), (2, "reward", 2)]
    assert (2, "eval/pass_1", 0.5) in made.rows
    assert made.params["actor_learning_rate"] == "1e-06"
    assert (made.status, list(service.experiments)) == ("FINISHED", ["some project"])


def test_trackio_continues_with_the_same_run_and_prints_nothing(tmp_path, monkeypatch, capsys):
    service = install_trackio(monkeypatch)
    run = tracked(tmp_path, use_trackio="me/space", wandb_run_name="mine", wandb_group="g")
    log_steps(tmp_path, 0, trackers=open_trackers(run))
    log_steps(tmp_path, 1, trackers=open_trackers(run, resume_step=0), resume_step=0)
    first, second = service.runs
    assert [first.options[name] for name in ("project", "name", "group", "space_id", "resume")] == [
        "agentenv_train", "mine", "g", "me/space", "never",
    ]  # fmt: skip
    assert (second.options["name"], second.options["resume"]) == ("mine", "allow")
    assert (first.rows, second.rows) == ([(0, {"reward": 0.0})], [(1, {"reward": 1.0})])
    assert capsys.readouterr().out == ""


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_logs_its_progress_and_its_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers_module, "_EVERY_S", 0.0)
    service = install_trackio(monkeypatch)
    assert command([*RUN, "--use_trackio", "--concurrency", 1]) == 0
    (run,) = service.runs
    progress = [(step, row) for step, row in run.rows if "progress/done" in row]
    assert [step for step, _ in progress] == [row["progress/done"] for _, row in progress] == [1, 2, 3, 4, 5, 6]
    step, numbers = run.rows[-1]
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    assert (step, numbers["num_episodes"]) == (6, 6)
    assert numbers["reward/mean"] == metrics["reward"]["mean"]
    assert numbers == flat_numbers(metrics)
    assert run.options["project"] == "agentenv_run"
    assert run.options["config"]["env"] == "guess_number"
    assert run.is_finished


def test_a_tracker_that_fails_does_not_stop_a_run(tmp_path, monkeypatch):
    service = install_wandb(monkeypatch)

    def log(run, data, step=None, commit=None):
        raise service.Error("no route to host")

    monkeypatch.setattr("tests.runs.tracker_services.WandbRun.log", log)
    assert command([*RUN, "--use_wandb"]) == 0
    assert json.loads((tmp_path / "out/metrics.json").read_text())["num_episodes"] == 6


def test_numbers_are_flat_finite_and_no_switches():
    tree = {"a": 1, "b": {"c": 2.5, "d": math.nan, "e": True, "f": None, "g": "x"}, "h": [1]}
    assert flat_numbers(tree) == {"a": 1, "b/c": 2.5}


@pytest.mark.parametrize("config", [RunConfig, TrainConfig])
def test_neither_records_nor_trackers_get_a_password_in_an_address(config):
    flags = config.from_flags(env="e", ray_address="ray://me:KEY@host:10001", use_mlflow="https://me:KEY@host/x")
    stored = flags.to_dict()
    assert (stored["use_mlflow"], stored["ray_address"]) == ("https://host/x", "ray://host:10001")
    assert flags.trackers.use_mlflow == "https://me:KEY@host/x"


def test_neither_records_nor_trackers_get_the_key_of_an_engine():
    flags = RunConfig.from_flags(env="e", engine_args={"api_key": "KEY", "timeout_s": 9})
    assert flags.to_dict()["engine_args"] == {"timeout_s": 9}
