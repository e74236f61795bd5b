"""Episodes in workers: the same records as in one process, and none lost, whatever happens to a worker."""

import json
import signal
import time
from pathlib import Path

import pytest

import agentenv
from agentenv import ScriptedEngine, read_trajectories
from agentenv.engines.scripted import solves
from agentenv.errors import ConfigError, EngineError, MissingDependency
from agentenv.runs.records.index import read_index
from tests.drivers import command, forked, ids, lines, write_rows
from tests.drivers import without_times as without_durations
from tests.training.trainings import flags, make_place, without_times

SCENE = Path(__file__).parents[1] / "episode" / "env_actors" / "scene.py"

pytestmark = pytest.mark.long


def record(trajectory):
    """What an episode is, wherever it ran."""
    turns = [(turn.action, turn.result, turn.num_retries) for turn in trajectory.turns]
    # The last digits of log-probabilities depend on which episodes the engine computed together.
    arrays = [
        (list(each.token_ids), bytes(each.action_mask), [round(value, 3) for value in each.logprobs])
        for each in trajectory.segments
    ]
    error = trajectory.error and (trajectory.error.type, trajectory.error.where, trajectory.error.message)
    return trajectory.episode_id, trajectory.seed, trajectory.stop_reason, turns, arrays, error, trajectory.task


def records(run):
    return [record(trajectory) for trajectory in run]


def played(workers, **more):
    return agentenv.rollout(**more, rollout_workers=workers, progress="none")


# --- equal records ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "job",
    [
        {"env": "guess_number", "engine": "scripted", "limit": 4, "n": 3, "max_tokens": 8},
        {"env": "math_retry", "engine": "hf", "limit": 3, "n": 2, "max_tokens": 40},
        {"env": ["math_retry", "guess_number:0.5"], "engine": "scripted", "limit": 3},
        {"env": f"{SCENE}:Scene", "engine": "scripted", "data": [{"prompt": "p", "label": "own_error"}], "n": 2,
         "max_error_share": 1.0},
    ],
    ids=["own engine", "engine of the run", "mixture", "failures"],
)  # fmt: skip
def test_records_are_those_of_one_process(job):
    assert records(played(2, **job)) == records(played(0, **job))


def test_the_run_directory_is_that_of_one_process(tmp_path):
    data = [{"prompt": "p", "label": each} for each in ("play", "own_error", "play", "lock")]
    rows = write_rows(tmp_path / "rows.jsonl", data)
    args = ["run", "--env", f"{SCENE}:Scene", "--data", rows, "--engine", "scripted", "--n", 2, "--progress", "none"]
    kept = []
    for workers in (0, 2):
        out = tmp_path / f"out{workers}"
        assert command([*args, "--rollout_workers", workers, "--out", out, "--max_error_share", 1]) == 0
        episodes = lines(out)
        for turn in (turn for each in episodes for turn in each["turns"] if turn["result"]):
            del turn["result"]["info"]  # it names the process
        metrics = json.loads((out / "metrics.json").read_text())
        texts = [line for line in (out / "trajectories.jsonl").read_bytes().splitlines() if b"own_error" in line]
        kept.append((without_durations(episodes), {**metrics, "time": None, "info": None}, len(texts)))
    assert kept[1] == kept[0]
    assert sorted(row[2] for row in read_index(tmp_path / "out2")) == sorted(
        row[2] for row in read_index(tmp_path / "out0")
    )


def test_a_blocked_loop_of_a_worker_is_told_with_the_code_that_blocks_it(tmp_path, capfd):
    data = [{"prompt": "p", "label": "block 2"}]
    job = {"env": f"{SCENE}:Scene", "data": data, "engine": "scripted", "env_kwargs": {"marks": str(tmp_path)}}
    assert [each.error for each in played(1, **job)] == [None]
    told = [line for line in capfd.readouterr().err.splitlines() if "event loop" in line]
    assert len(told) == 1
    assert "by do_block at" in told[0]


def test_an_engine_that_is_given_answers_all_workers_with_their_sampling():
    engine = ScriptedEngine(solves(0.5, right="#### 4", wrong="#### 5"))
    data = [{"prompt": f"{number}?", "label": "#### 4"} for number in range(6)]
    one = records(played(0, env="math_retry", data=data, engine=engine, n=3))
    num = len(engine.requests)
    assert records(played(2, env="math_retry", data=data, engine=engine, n=3)) == one
    assert len(engine.requests) == 2 * num


@pytest.mark.parametrize("env", ["Letters", "OwnLoop"])
def test_a_training_has_the_losses_of_one_process(env, tmp_path, monkeypatch):
    make_place(tmp_path, monkeypatch)
    steps = ["--max_train_steps", 2]
    assert command([*flags(*steps, out="one", env=f"env.py:{env}")]) == 0
    assert command([*flags(*steps, "--rollout_workers", 2, out="two", env=f"env.py:{env}")]) == 0
    assert without_times(tmp_path / "two") == without_times(tmp_path / "one")


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_loses_no_episode(tmp_path):
    data = [{"prompt": "p", "label": "die" if number == 3 else "play"} for number in range(12)]
    run = played(2, env=f"{SCENE}:Scene", data=data, engine="scripted", env_kwargs={"marks": str(tmp_path)}, n=2)
    assert (tmp_path / "died").exists()
    assert [each.error for each in run] == [None] * 24


def test_a_killed_driver_leaves_no_worker_and_the_run_resumes(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "p", "label": "play", "id": f"r{n}"} for n in range(40)])
    out = tmp_path / "out"
    args = ["run", "--env", f"{SCENE}:Scene", "--data", data, "--engine", "scripted", "--out", out]
    slow = ["--engine_args", '{"latency_s": 0.2}', "--concurrency", 2, "--rollout_workers", 2, "--progress", "none"]
    with forked([*args, *slow], tmp_path) as process:
        process.until(lambda: len(lines(out)) > 1, timeout_s=200)
        process.signal(signal.SIGKILL)
    pids = {int(turn.result.info["pid"]) for each in read_trajectories(out) for turn in each.turns}
    deadline = time.monotonic() + 60
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert pids
    assert not left
    assert command(["run", "--resume", "--out", out, "--progress", "none"]) == 0
    assert ids(out) == sorted(f"r{number}/0" for number in range(40))


class Failing(ScriptedEngine):
    """Fails each first attempt."""

    async def generate(self, prompt_token_ids, sampling, *, request_id):
        self.failed = getattr(self, "failed", set())
        if request_id not in self.failed:
            self.failed.add(request_id)
            raise EngineError("the server is down")
        return await super().generate(prompt_token_ids, sampling, request_id=request_id)


def test_a_failure_of_the_engine_is_infrastructure_and_runs_the_episode_again():
    data = [{"prompt": "p", "label": "play"}] * 3
    run = played(1, env=f"{SCENE}:Scene", data=data, engine=Failing(["a"]))
    assert [(each.error, each.attempt) for each in run] == [(None, 2)] * 3


def test_a_bug_of_the_engine_is_a_contract_error():
    data = [{"prompt": "p", "label": "play"}]
    run = played(1, env=f"{SCENE}:Scene", data=data, engine=ScriptedEngine(lambda _: 1 // 0), max_error_share=1.0)
    assert [each.error.kind for each in run] == ["contract"]


@pytest.mark.parametrize("kind", [ConfigError, MissingDependency])
def test_an_engine_that_is_set_up_wrongly_ends_the_run(kind):
    wrong = ScriptedEngine([kind("--engine: expected another one, got this.")])
    with pytest.raises(kind, match="expected another one"):
        played(1, env=f"{SCENE}:Scene", data=[{"prompt": "p", "label": "play"}], engine=wrong)


def test_a_class_that_a_worker_cannot_load_is_an_error_before_the_first_episode(tmp_path):
    class Here(agentenv.AgentInstance):
        async def step(self, states):
            return agentenv.StepResult(terminated=True)

    with pytest.raises(ConfigError, match="rollout_workers: expected a class that other processes can import"):
        played(1, env=Here, data=[{"prompt": "p", "label": "x"}], engine="scripted")
    with pytest.raises(ConfigError, match="env_actors: expected none with --rollout_workers"):
        played(1, env="guess_number", engine="scripted", env_actors=2)


def test_an_episode_that_is_cut_off_by_a_time_limit_is_cancelled_in_its_worker(tmp_path):
    data = [{"prompt": "p", "label": "wait"}]
    limits = {"step_timeout_s": 2.0, "max_error_share": 1.0}
    run = played(1, env=f"{SCENE}:Scene", data=data, engine="scripted", env_kwargs={"marks": str(tmp_path)}, **limits)
    assert run[0].stop_reason == "step_timeout"
    assert (tmp_path / "cancelled").exists()
