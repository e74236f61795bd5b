"""What a run shows beside its progress: one line for each kind of failure, and how long a start has taken."""

import asyncio
import io
import json
import re
import time
from dataclasses import replace

import pytest
from rich.console import Console

import agentenv
from agentenv import ScriptedEngine, StepResult
from agentenv.core.types import StopReason
from agentenv.engines.pool import EngineDead, EnginePool, PoolPolicy
from agentenv.runs.display import progress
from agentenv.runs.display.report import FailureKinds, final_table, result_rows
from agentenv.runs.metrics import Summary, Tally, aggregate
from tests.drivers import command
from tests.training.trainings import flags, make_place, tiny_model


def failed(name="a/0", *, kind="env", error="KeyError", message="'x'", place="env.py:12"):
    return Summary(name, name[0], error_kind=kind, error_type=error, error_message=message, error_place=place)


def test_the_first_episode_of_a_kind_is_a_line_with_its_place():
    kinds = FailureKinds()
    assert kinds.first(failed()) == "a/0 failed (env): KeyError: 'x' (env.py:12)"
    assert kinds.first(failed("b/1", message="'y'")) == ""
    assert kinds.first(failed(place="env.py:40")) != ""
    assert kinds.first(failed(error="ValueError")) != ""
    assert kinds.first(Summary("c/0", "c", reward=1.0)) == ""


def test_a_long_message_is_cut_and_an_error_without_a_place_has_none():
    line = FailureKinds().first(failed(kind="infra", error="EngineError", message="lost\n" + "x" * 900, place=""))
    assert line.startswith("a/0 failed (infra): EngineError: lost xxx")
    assert line.endswith("x")
    assert len(line) < 600


def test_what_servers_and_environments_name_is_shown_and_never_obeyed():
    said = Summary(
        "a/0", "a", reward=1.0, models={"gpt\x1b[2J": 1}, info_last={"[red]\x07": 1}, info_sum={"[red]\x07": 1}
    )
    out = io.StringIO()
    metrics = aggregate([said], num_samples=1)
    Console(file=out, width=100).print(
        final_table(result_rows(metrics)), FailureKinds().first(failed(message="\x1b[2J"))
    )
    assert all(each in out.getvalue() for each in (r"gpt\x1b[2J 1", r"info [red]\x07", r"KeyError: \x1b[2J"))


@pytest.mark.parametrize(("wait_s", "num_lines"), [(0.0, 3), (3600.0, 1)])
def test_the_last_line_of_plain_progress_is_written_once(wait_s, num_lines, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY_S", wait_s)
    for kind in (progress.PlainProgress, progress.JSONProgress):
        stream, stats = io.StringIO(), progress.Stats(3, Tally(1))
        shown = kind(stats, stream)
        shown.start()
        for name in "abc":
            stats.add(Summary(f"{name}/0", name, reward=1.0))
            shown.update()
        shown.stop()
        written = stream.getvalue().splitlines()
        assert len(written) == num_lines
        assert "3/3" in written[-1] or json.loads(written[-1])["done"] == 3


def test_plain_progress_without_an_episode_ends_with_a_line():
    stream = io.StringIO()
    shown = progress.PlainProgress(progress.Stats(3, Tally(1)), stream)
    shown.start()
    shown.stop()
    assert stream.getvalue().startswith("0/3 episodes")


def test_the_table_of_a_run_says_how_each_episode_ended():
    ends = [Summary("a/0", "a", reward=1.0), failed("b/0"), Summary("c/0", "c", stop_reason=StopReason.EPISODE_TIMEOUT)]
    rows = dict(result_rows(aggregate(ends, num_samples=1)))
    assert rows["episodes"] == "3  (3 tasks × 1; 1 rewarded, 1 failed, 1 ended without a reward)"


def test_the_mean_cost_of_an_episode_leaves_out_the_parts_that_failed_ones_paid_for():
    ends = [Summary("a/0", "a", reward=1.0, cost_usd=0.5), replace(failed("b/0"), cost_usd=0.25), failed("c/0")]
    rows = dict(result_rows(aggregate(ends, num_samples=1)))
    assert rows["policy cost"] == "$0.7500  ($0.5000 per episode that did not fail; 1 episode unknown)"
    rows = dict(result_rows(aggregate(ends[1:], num_samples=1)))
    assert rows["policy cost"] == "$0.2500  (1 episode unknown)"


def test_an_info_that_some_episodes_lack_is_shown_with_the_number_that_have_it():
    ends = [Summary(f"{name}/0", name, reward=1.0, info_last={"c": 2.0}, info_sum={"c": 3.0}) for name in "abc"]
    ends[0] = replace(ends[0], info_last={"c": 2.0, "failures": 1.0}, info_sum={"c": 3.0, "failures": 1.0})
    rows = dict(result_rows(aggregate([*ends, failed("d/0")], num_samples=1)))
    assert rows["info c"] == "last turn 2.000, sum 3.000"
    assert rows["info failures"] == "last turn 1.000, sum 1.000  (1 of 3 episodes)"


def test_a_small_cost_is_shown_with_digits_that_are_not_0_and_that_of_judges_in_all():
    info = {"judge/cost": 0.000068}
    ends = [Summary(f"{name}/0", name, reward=1.0, cost_usd=1e-5, info_last=info, info_sum=info) for name in "ab"]
    rows = dict(result_rows(aggregate(ends, num_samples=1)))
    assert rows["policy cost"] == "$0.000020  ($0.000010 per episode)"
    assert rows["judge cost"] == "0.00014"
    assert rows["info judge/cost"] == "last turn 0.000068, sum 0.000068"


@pytest.fixture
def every_moment(monkeypatch):
    monkeypatch.setattr(progress, "_WAIT_LINE_S", 0.01)


def test_a_start_that_takes_long_is_told_again_and_again_even_while_it_blocks(every_moment):
    told = []
    with progress.waiting("starting vLLM", told.append):
        deadline = time.monotonic() + 60
        while len(told) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert all(re.fullmatch(r"starting vLLM, \d+ s", line) for line in told)
    assert len(told) >= 2
    num = len(told)
    time.sleep(0.05)
    assert len(told) == num, "nothing after the end"


@pytest.mark.long
def test_engines_and_learners_that_start_are_told_unless_progress_is_off(every_moment, tmp_path, monkeypatch, capfd):
    make_place(tmp_path, monkeypatch)
    run = ["run", "--env", "env.py:Letters", "--data", "tasks.jsonl", "--model", tiny_model(), "--engine", "hf"]
    run += ["--limit", 1, "--max_tokens", 2]
    assert command(run) == 0
    assert re.search(r"starting transformers, \d+ s\n", capfd.readouterr().err)
    assert command(flags("--max_train_steps", 1)) == 0
    said = capfd.readouterr().err
    assert re.search(r"starting transformers, \d+ s\n", said)
    assert re.search(r"loading the learner, \d+ s\n", said)
    for argv in (run, flags("--max_train_steps", 1, "--out", "quiet")):
        assert command([*argv, "--progress", "none"]) == 0
        said = capfd.readouterr().err
        assert "starting" not in said
        assert "loading the learner" not in said


class Mortal(ScriptedEngine):
    """Dies of its first request."""

    async def generate(self, prompt_token_ids, sampling, *, request_id):
        raise EngineDead("gone")


class Isolated(agentenv.AgentInstance):
    """Waits for the new engine; its programs ran in a weaker sandbox."""

    pool: EnginePool

    async def step(self, states):
        while not self.pool.num_restarts:
            await asyncio.sleep(0.001)
        return StepResult(reward=1.0, terminated=True, info={"isolation": "landlock"})


async def test_an_info_of_the_environment_that_is_no_level_of_the_sandbox_is_not_one_of_the_table():
    class Own(agentenv.AgentInstance):
        async def step(self, states):
            return StepResult(terminated=True, info={"isolation": "total"})

    run = await agentenv.arollout(Own, [{"prompt": "?", "label": ""}], engine="scripted", progress="none")
    assert run.metrics.isolation == {}


async def test_what_a_run_survived_is_in_its_table_in_its_metrics_and_on_the_record_of_the_episode(tmp_path):
    engines, policy = [Mortal(["x"]), ScriptedEngine(["x"])], PoolPolicy(restart_wait_s=0.0)
    Isolated.pool = EnginePool(engines, make=lambda _: ScriptedEngine(["x"]), policy=policy)
    Isolated.pool.tokenizer = engines[0].tokenizer
    rows = [{"prompt": "?", "label": ""}] * 2
    run = await agentenv.arollout(Isolated, rows, engine=Isolated.pool, out=str(tmp_path / "out"), progress="none")
    await Isolated.pool.close()
    shown = dict(result_rows(run.metrics))
    assert shown["sandbox"] == "landlock 2, weaker than namespaces: `agentenv sandbox doctor` says why"
    assert shown["failovers"] == "1 action was sampled by another engine"
    assert shown["engine restarts"] == "1"
    stored = json.loads((tmp_path / "out/metrics.json").read_text())
    assert [stored[name] for name in ("num_engine_restarts", "num_failovers", "isolation")] == [1, 1, {"landlock": 2}]
    again = agentenv.load_run(tmp_path / "out")
    assert sorted(turn.num_failovers for each in again for turn in each.turns) == [0, 1]
    assert (again.metrics.num_failovers, again.metrics.isolation) == (1, {"landlock": 2})
