"""What goes wrong while a training runs, and what is left of it: signals, failures, memory, numbers, disks, actors."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from agentenv.runs.records.directory import read_trajectories
from agentenv.training.algorithm.logprobs import Scores
from agentenv.training.checkpoint import Checkpoints
from agentenv.training.learner.policy import Policy
from agentenv.training.logs.journal import read_metrics
from tests.drivers import command, forked, overriding, write_rows
from tests.engines.test_ray import actors
from tests.training.trainings import flags, make_place

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


@pytest.fixture
def place(tmp_path, monkeypatch):
    return make_place(tmp_path, monkeypatch)


def change_env(place, old, new):
    (place / "env.py").write_text((place / "env.py").read_text().replace(old, new))


def num_lines(place):
    """Steps in metrics.jsonl; read as it is written."""
    path = place / "out/metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def steps(place):
    return [line["step"] for line in read_metrics(place / "out")]


def saved(place):
    return sorted(Checkpoints.step_of(path) for path in (place / "out/checkpoints").glob("step-*"))


def goes_on(place, *more, after=None):
    """Resume for one step more than was done, and see that no line is missing, double, or of a step done again.

    `after` is the step that it goes on after; None for the last one that was told.
    """
    before = read_metrics(place / "out") if num_lines(place) else []
    last = before[-1]["step"] if before else 0
    after = last if after is None else after
    assert command(flags(*more, "--max_train_steps", last + 1, "--resume")) == 0
    assert steps(place) == list(range(1, last + 2))
    untouched = [new == old for new, old in zip(read_metrics(place / "out"), before, strict=False)]
    assert untouched == [line["step"] <= after for line in before], "lines have seconds: no two are alike"


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=str)
def test_a_signal_finishes_the_step_saves_it_and_says_how_to_continue(place, number, code):
    with forked(flags("--max_train_steps", 10**6, "--async_train"), place) as running:
        running.until(lambda: num_lines(place) >= 2)
        running.signal(number)
        assert running.wait(WAIT_S) == code
        said = running.stderr
    assert "Traceback" not in said
    done = steps(place)[-1]
    assert f"interrupted after step {done} of 1000000. Resume with: agentenv train --resume" in said
    assert saved(place) == [done], "what is told is saved"
    assert not (place / "out/model").exists(), "a model is what a training ends with"
    goes_on(place, "--async_train")


@pytest.mark.long
def test_the_second_signal_ends_it_at_once(place):
    """An evaluation that hangs: the first signal lets it finish, which it never does."""
    write_rows(place / "held.jsonl", [{"prompt": "Say no.", "label": "hang"}])
    argv = flags("--eval_dataset", "held.jsonl", "--eval_steps", 1, "--step_timeout_s", 3600, "--save_steps", 1)
    with forked(argv, place) as running:
        running.until(lambda: (place / "hanging").exists())
        running.signal(signal.SIGINT)
        running.until(lambda: "Once more cancels" in running.stderr, WAIT_S)
        assert running.alive
        running.signal(signal.SIGINT)
        assert running.wait(WAIT_S) == 130
        assert "Traceback" not in running.stderr
    assert saved(place) == []
    goes_on(place, "--eval_dataset", None, "--eval_steps", -1)


# --- episodes --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_an_episode_that_fails_in_a_group_is_left_out_of_it_and_counted(place):
    """A group of four of which one hangs still has three to compare."""
    change_env(place, 'if label == "hang":', 'if not Path("hung").exists() and not Path("hung").touch():')
    assert command(flags("--step_timeout_s", 1, "--max_error_share", 0.5)) == 0
    assert [line["rollout/num_failed"] for line in read_metrics(place / "out")] == [1.0, 0.0, 0.0]
    assert all(line["train/grad_norm"] > 0 for line in read_metrics(place / "out"))


@pytest.mark.long
def test_a_loss_that_is_not_a_number_stops_it_with_the_batch_saved_and_the_checkpoint_whole(place, monkeypatch, capfd):
    score, calls = Policy.score, []

    def broken(self, micro, **options):
        """From the third train step on there are no numbers."""
        scores = score(self, micro, **options)
        calls.append(1)
        return scores if len(calls) < 3 else Scores(scores.logprobs_n * torch.nan, scores.entropy_n)

    monkeypatch.setattr(Policy, "score", broken)
    capfd.readouterr()
    assert command(flags("--max_train_steps", 4, "--save_steps", 1)) == 3
    said = capfd.readouterr().err
    assert "train step 3: expected a finite loss and gradient" in said
    assert "out/failed-batch.pt" in said
    monkeypatch.undo()
    monkeypatch.chdir(place)

    batch = torch.load(place / "out/failed-batch.pt", weights_only=True)
    assert len(batch["sequences"]) == 8
    assert (saved(place), steps(place)) == ([1, 2, 2], [1, 2]), "once more, without the batch"
    assert command(flags("--max_train_steps", 4, "--resume")) == 0
    assert steps(place) == [1, 2, 3, 4]


# --- disks -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_full_disk_stops_it_with_a_line_that_says_where_and_it_continues_from_its_checkpoint(place):
    """A checkpoint of step 5 is there when the disk fills up; then there is no room for another."""
    more = ["--save_samples", 0, "--save_steps", 5]
    with forked(flags("--max_train_steps", 10**6, *more), place) as running:
        running.until(lambda: 5 in saved(place) and num_lines(place) % 5 == 1)  # the next checkpoint is steps away
        limit = (place / "out/metrics.jsonl").stat().st_size + 500
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        assert running.wait(WAIT_S) == 3
        said = running.stderr
    assert any(f"out/{name}: expected to write a line" in said for name in ("metrics.jsonl", "steps.jsonl"))
    assert "File too large" in said
    assert "Traceback" not in said
    assert not list((place / "out").glob("checkpoints/.tmp-*")), "nothing half written is left"
    after = saved(place)[-1]
    assert steps(place)[-1] > after
    goes_on(place, *more, after=after)


# --- what there is to go on from -------------------------------------------------------------------------------------


@pytest.mark.long
def test_missing_or_damaged_checkpoints_are_reported_and_earlier_files_are_kept(place, capfd):
    assert command(flags("--max_train_steps", 2)) == 0
    before = [(place / "out" / name).read_bytes() for name in ("metrics.jsonl", "trajectories.jsonl")]
    for path in (place / "out/checkpoints").glob("*/state.pt"):
        path.write_bytes(path.read_bytes()[:-1])
    capfd.readouterr()
    assert command(flags("--max_train_steps", 1, "--resume")) == 0
    said = " ".join(capfd.readouterr().err.split())
    assert "got none in out/checkpoints but 1 damaged ones; starting at step 1" in said
    assert "kept in out: metrics.jsonl.1, trajectories.jsonl.1" in said
    kept = [(place / "out" / name).read_bytes() for name in ("metrics.jsonl.1", "trajectories.jsonl.1")]
    assert kept == before
    assert steps(place) == [1]
    assert len(list(read_trajectories(place / "out"))) == 8, "of this attempt only"


# --- who samples how -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_actions_that_are_sampled_in_another_way_than_they_are_trained_are_refused(place, capfd):
    change_env(place, "from agentenv import", "from agentenv.core.types import SamplingParams\nfrom agentenv import")
    change_env(place, '"Go on.",', '"Go on.", sampling=SamplingParams(temperature=0.3, max_tokens=8),')
    assert command(flags("--env", "env.py:Turns", env=None)) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "expected actions that are sampled as they are trained, with temperature 1.0, got 0.3" in said
    assert "Traceback" not in said
    assert command(flags("--env", "env.py:Turns", "--temperature", 0.3, out="other", env=None)) == 0
    assert all(line["train/logprob_diff"] < 1e-4 for line in read_metrics(place / "other"))


INSISTS = """
import json
from urllib.request import Request, urlopen


class Insists:
    def run(self, context):
        body = {"model": "m", "messages": context.messages, "temperature": 0.3}
        headers = {"Authorization": f"Bearer {context.api_key}", "Content-Type": "application/json"}
        request = Request(context.base_url + "/chat/completions", json.dumps(body).encode(), headers)
        answer = json.loads(urlopen(request).read())["choices"][0]["message"]["content"]
        return (answer or "").count("e") / 8
"""


@pytest.mark.long
def test_sampling_parameters_of_an_agent_with_its_own_loop_are_not_those_of_training(place):
    pytest.importorskip("uvicorn")
    (place / "insists.py").write_text(INSISTS)
    assert command(flags("--env", "insists.py:Insists", "--max_train_steps", 2, env=None)) == 0
    assert all(line["train/logprob_diff"] < 1e-4 for line in read_metrics(place / "out"))


@pytest.mark.slow
def test_an_engine_actor_that_is_killed_comes_back_with_the_newest_weights(place):
    pytest.importorskip("ray")
    step = "    async def step(self, states):\n"
    change_env(place, step, f"{step}        await asyncio.sleep(1.5)\n")  # else it has ended before the engine is back
    more = ["--num_engines", 2, "--max_train_steps", 16, "--max_tokens", 32, "--async_train"]
    argv = overriding(*(arg for arg in flags(*more) if arg != "--no_ray"))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}"}
    program = [sys.executable, "-m", "agentenv.cli", *map(str, argv)]
    with (place / "said").open("w") as said:
        process = subprocess.Popen(program, env=environment, cwd=place, stdout=said, stderr=said)
    try:
        _until(process, place, lambda: num_lines(place) >= 3 and len(actors(process.pid)) == 2)
        os.kill(actors(process.pid)[0], signal.SIGKILL)
        _until(process, place, lambda: len(actors(process.pid)) == 2)
        assert process.wait(800) == 0, (place / "said").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    assert steps(place) == list(range(1, 17)), "no step is lost"
    lines = read_metrics(place / "out")
    assert sum(line["rollout/num_failed"] for line in lines) == 0, "its episodes were tried again"
    assert max(line["rollout/staleness_max"] for line in lines) <= 1
    # Other weights than those of the version that they carry would be off by far more, as those of a step ago are.
    fresh = [line["train/logprob_diff"] for line in lines if line["rollout/staleness_max"] == 0]
    stale = [line["train/logprob_diff"] for line in lines if line["rollout/staleness_max"] > 0]
    assert max(fresh) < 1e-4
    assert not stale or max(stale) > 1e-2


def _until(process, place, condition, timeout_s=600.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, (place / "said").read_text()[-3000:]
        assert time.monotonic() < deadline, (place / "said").read_text()[-3000:]
        time.sleep(0.05)
