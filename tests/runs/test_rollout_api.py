"""`agentenv.rollout`: the flags of `agentenv run` from Python, in scripts and inside a running event loop."""

import asyncio
import logging
import sys
from pathlib import Path

import pytest

import agentenv
from agentenv import AgentInstance, ScriptedEngine, StepResult, Task
from agentenv.errors import ConfigError, MissingDependency, RunStopped
from tests.drivers import write_rows

ROWS = [{"prompt": "Guess.", "label": "7"}, Task("Guess again.", label="3", task_id="three")]


class Guess(AgentInstance):
    """Rewards the label."""

    max_turns = 2

    def __init__(self, fail=False):
        self.fail = fail

    async def step(self, states):
        logging.getLogger("agentenv.guess").info("asked")
        if self.fail:
            raise ValueError("no")
        right = states["action_text"].startswith(states["label"])
        return StepResult("No.", reward=float(right), score=float(right), terminated=right, info={"tries": 1.0})


def guess(**flags):
    return agentenv.rollout(Guess, ROWS, engine=ScriptedEngine(["7", "3"]), progress="none", **flags)


def test_a_class_and_rows_become_trajectories_in_the_order_of_the_tasks():
    run = guess(n=2)
    assert [each.episode_id for each in run] == ["000000/0", "000000/1", "three/0", "three/1"]
    assert len(run) == 4
    assert run[0].reward == 1.0
    assert run.metrics.num_episodes == 4
    assert run.out is None
    assert repr(run) == "Run(4 episodes, reward 1.000, out=None)"
    assert repr(guess(env_kwargs={"fail": True}, max_error_share=1)) == "Run(2 episodes, reward unknown, out=None)"


class OutOfTen(AgentInstance):
    score_range = (0.0, 10.0)

    async def step(self, states):
        return StepResult(score=float(states["action_text"]), terminated=True)


def graded(cls, *answers, **flags):
    engine = ScriptedEngine(lambda request: (answers or ("1", "10"))[request.call_index % 2])
    return agentenv.rollout(cls, ROWS[:1], engine=engine, n=2, concurrency=1, progress="none", **flags).metrics


def test_an_episode_passes_with_the_full_score_of_the_declared_range():
    assert graded(OutOfTen).pass_at_k["1"].mean == 0.5
    assert graded(OutOfTen, pass_score=1.0).pass_at_k["1"].mean == 1.0
    signed = type("Signed", (OutOfTen,), {"score_range": (-1.0, 1.0)})
    assert graded(signed, "-1", "1").pass_at_k["1"].mean == 0.5


def test_scores_without_a_declared_range_have_no_pass_rate_outside_0_to_1():
    unknown = type("Unknown", (OutOfTen,), {"score_range": None})
    assert graded(unknown).pass_at_k["1"].mean is None


def test_data_frames_have_these_rows():
    pytest.importorskip("pandas")
    run = guess()
    assert run.to_pandas().to_dict("records") == run.rows()
    assert run.turns().to_dict("records") == run.turn_rows()


def test_a_dataset_has_the_columns_of_all_episodes():
    pytest.importorskip("datasets")

    class Parity(Guess):
        """Says in a key of `info` of its own whether the label is odd."""

        def step(self, states):
            return StepResult(reward=1.0, terminated=True, info={("even", "odd")[int(states["label"]) % 2]: 1})

    rows = [{"prompt": "q", "label": label} for label in "12"]
    dataset = agentenv.rollout(Parity, rows, engine=ScriptedEngine(["x"]), progress="none").to_dataset()
    assert (dataset["info.odd"][:], dataset["info.even"][:]) == ([1, None], [None, 1])


async def test_it_works_inside_a_running_loop_and_can_be_awaited():
    assert guess().metrics.num_episodes == 2
    engine = ScriptedEngine(["7", "3"])
    run = await agentenv.arollout(Guess, ROWS, engine=engine, progress="none")
    assert run[0].reward == 1.0
    assert asyncio.get_running_loop().is_running()


def test_a_damaged_line_of_a_resumed_run_is_said_and_its_episode_runs_again(tmp_path, capsys):
    out = str(tmp_path / "run")
    log = guess(out=out).out / "trajectories.jsonl"
    log.write_bytes(log.read_bytes().replace(b"Guess again.", b"Guess agaim.", 1))
    capsys.readouterr()
    again = guess(out=out, resume=True)
    assert [each.episode_id for each in again] == ["000000/0", "three/0"]
    assert len(log.read_bytes().splitlines()) == 3
    assert "skipped 1 damaged lines (2); their episodes run again" in capsys.readouterr().err


def test_the_traceback_of_a_failed_step_is_the_environments_alone():
    failed, *_ = guess(env_kwargs={"fail": True}, max_error_share=1)
    assert failed.error.traceback.startswith(f'Traceback (most recent call last):\n  File "{__file__}", line')


@pytest.mark.parametrize(("flags", "shown"), [({}, 0), ({"log_level": "warning"}, 2)])
def test_a_script_without_logging_of_its_own_sees_the_records_of_log_level(flags, shown, monkeypatch, capsys):
    for name in ("", "agentenv"):  # pytest's, and what a command in this process left
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    guess(env_kwargs={"fail": True}, max_error_share=1, **flags)
    assert capsys.readouterr().err.count("step failed: ValueError: no\n") == shown
    assert not logging.getLogger("agentenv").hasHandlers()


def test_log_level_takes_no_record_from_a_handler_of_the_script(monkeypatch, capsys):
    records = []
    own = logging.Handler()
    own.emit = records.append
    for name, level, handlers in (("", "WARNING", []), ("agentenv", "INFO", []), ("agentenv.guess", "NOTSET", [own])):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", handlers)
        monkeypatch.setattr(logger, "level", logging.getLevelName(level))
        monkeypatch.setattr(logger, "_cache", {})
    guess(log_level="warning")
    assert {each.getMessage() for each in records} == {"asked"}
    assert "asked" not in capsys.readouterr().err


@pytest.mark.parametrize(("method", "package"), [("to_pandas", "pandas"), ("to_dataset", "datasets")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(method, package, monkeypatch):
    run = guess()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match="pip install"):
        getattr(run, method)()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env": Guess()}, r"env: expected a class, a name or a list of them, got <.*Guess object"),
        ({"env": [Guess]}, r"--env: expected text, got <class .*Guess'>"),
        ({"env": "_", "dtype": "float8"}, "--dtype: expected one of auto, float32, bfloat16, float16, got 'float8'"),
        ({"env": "_", "ray_placement": None}, "--ray_placement: expected one of .*, got None"),
        ({"data": Task("q")}, r"data: expected a list of rows, got one, Task"),
        ({"data": {"prompt": "q"}}, r"data: expected a list of rows, got one, {'prompt'"),
        ({"n": "2"}, r"--n: expected an integer, got '2'"),
        ({"n": 2.0}, r"--n: expected an integer, got 2.0"),
        ({"temperature": "hot"}, r"--temperature: expected a number, got 'hot'"),
        ({"resume": 1}, r"--resume: expected True or False, got 1"),
        ({"model": 7}, r"--model: expected text, got 7"),
    ],
)
def test_a_value_that_is_no_flags_is_one_line(arguments, message):
    with pytest.raises(ConfigError, match=message):
        agentenv.rollout(**{"env": Guess, "data": ROWS, "engine": "scripted", "progress": "none"} | arguments)


def test_an_environment_and_its_data_may_be_paths(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", ROWS[:1])
    path = Path(f"{__file__}:Guess")
    for env in (path, [path]):
        run = agentenv.rollout(env, rows, engine=ScriptedEngine(["7"]), progress="none")
        assert [each.reward for each in run] == [1.0]


def test_a_rollout_that_stops_early_keeps_what_ended():
    class Fails(AgentInstance):
        async def step(self, states):
            if states["label"] == "bad":
                raise ValueError("no")
            return StepResult(reward=1.0, terminated=True)

    rows = [{"prompt": "q", "label": label} for label in ["good", *["bad"] * 40]]
    with pytest.raises(RunStopped) as stopped:
        agentenv.rollout(Fails, rows, engine="scripted", concurrency=1, progress="none")
    run = stopped.value.run
    assert [each.reward for each in run][:2] == [1.0, None]
    assert 10 < len(run) < 41
    assert run.metrics.num_env_errors == len(run) - 1
