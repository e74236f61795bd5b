"""What a training shows: a line per train step, the same in a terminal and in a log file."""

import io
import math
import time

import pytest
from rich.console import Console

from agentenv.runs.display.report import weakness
from agentenv.runs.metrics import Summary, aggregate
from agentenv.training.config import TrainConfig
from agentenv.training.evaluation import numbers_of
from agentenv.training.logs.screen import TrainScreen, describe, results

NUMBERS = {
    "rollout/reward": 0.61, "rollout/score": 0.58, "rollout/staleness_mean": 1.0, "train/entropy": 1.234567,
    "rollout/reward/zero_spread_share": 0.125, "train/grad_norm": 0.3456, "train/kl": 0.01234,
    "train/logprob_diff": 0.00456, "throughput/samples_per_s": 8.23, "time/wait_s": 3.14,
    "time/train_s": 120.0, "time/sync_s": 0.05, "time/eval_s": 0.0,
}  # fmt: skip
LINE = (
    "reward 0.610 · score 0.580 · no spread 12% · grad norm 0.35 · entropy 1.23 · kl 0.012 · logprob diff 0.0046 · "
    "stale 1.0 · 8.2 samples/s · wait 3.1s train 120.0s sync 0.05s"
)


def screen(mode="auto", *, terminal=False, width=200, **flags):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, color_system=None, _environ={"TERM": "xterm"})
    return TrainScreen(TrainConfig.from_flags(env="math_retry", progress=mode, **flags), console=console), out


def ended(*, score=1.0, reward=1.0, error=None):
    return Summary("a/0", "a", reward=reward, score=score, error_kind=error)


def test_a_step_is_one_line_of_what_is_known():
    assert describe(NUMBERS) == LINE
    assert describe({"eval/score": 0.5}) == "held-out score 0.500"
    assert describe({"rollout/rejection_rate": 0.25, "train/entropy": math.nan}) == "entropy nan · rejected 25%"
    assert describe({}) == ""
    survived = {"num_failed": 1, "num_retries": 2, "num_step_retries": 3, "num_failovers": 4, "num_engine_restarts": 5}
    line = "failed 1 · retried 2 · steps repeated 3 · failovers 4 · engine restarts 5"
    assert describe({f"rollout/{key}": value for key, value in survived.items()}) == line
    failed = {"eval/num_failed": 4.0, "rollout/num_failed": 2.0, "rollout/num_rejected_failed": 1.0}
    assert describe(failed) == "held-out failed 4 · failed 2 · failed tasks left out 1"


def test_a_train_step_counts_what_it_survived():
    calm = Summary("a/0", "a", reward=1.0)
    survivor = Summary("a/1", "a", reward=1.0, attempt=1, num_step_retries=2, num_failovers=1, isolation="landlock")
    numbers = [numbers_of(aggregate(episodes, num_samples=2)) for episodes in ([calm], [calm, survivor])]
    expected = {"num_retries": 1.0, "num_step_retries": 2.0, "num_failovers": 1.0, "sandbox/landlock": 0.5}
    assert expected.items() <= numbers[1].items()
    assert not expected.keys() & numbers[0].keys()


@pytest.mark.parametrize("mode", ["auto", "plain"])
def test_a_log_file_gets_a_plain_line_a_step_however_long(mode):
    shown, out = screen(mode, width=40)
    shown.start(100, 12)
    shown.episode(ended())
    shown.step(12, NUMBERS)
    shown.note("engine [1] was lost; it is started again")
    shown.step(100, {})
    shown.stop()
    first, note, last = out.getvalue().splitlines()
    assert first.startswith(f"step  12/100 · {LINE} · ETA ")
    assert note == "engine [1] was lost; it is started again"
    assert last == "step 100/100"


def test_nothing_is_shown_where_nothing_was_asked_for():
    shown, out = screen("none", terminal=True)
    shown.start(2, 1)
    shown.episode(ended())
    shown.step(1, NUMBERS)
    shown.note("a note")
    shown.stop()
    shown.final([{"step": 1}], {"model": "here"})
    assert out.getvalue() == ""


def test_a_terminal_gets_the_lines_and_a_live_line_of_the_step_that_continues():
    shown, out = screen(terminal=True, rollout_batch_size=2, n=4)
    shown.start(10, 3)
    shown.episode(ended(error="infra"))
    shown.step(3, NUMBERS)  # the counts start again
    shown.episode(ended(score=0.5))
    shown.episode(ended(score=None, reward=0.25))
    shown.episode(ended(score=None, reward=None, error="env"))
    expected = "step  4/10 · 3/8 episodes · score 0.375 so far · 1 failed · "
    deadline = time.monotonic() + 200
    while expected not in out.getvalue() and time.monotonic() < deadline:
        time.sleep(0.05)
    shown.stop()
    shown.stop()
    assert expected in out.getvalue()
    assert f"step  3/10 · {LINE}" in out.getvalue()


def test_the_estimate_of_the_end_is_made_from_the_last_steps(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    shown, out = screen("plain")
    shown.start(30, 0)
    now_s += 5.0
    shown.step(0, {"eval/score": 0.5})
    for step in range(1, 31):
        now_s += 1000.0 if step == 1 else 10.0
        shown.step(step, {})
    lines = out.getvalue().splitlines()
    assert lines[0] == "step  0/30 · held-out score 0.500"
    assert lines[1].endswith("ETA 8h03m")  # 29 steps of 1000 s
    assert lines[20].endswith("ETA 1m40s")
    assert lines[30] == "step 30/30"


ROWS = [
    {"step": 0, "eval/score": 0.25, "time/wall_s": 10.0, "time/eval_s": 10.0},
    *({"step": step, "rollout/reward": step / 4, "time/wall_s": 20.0, "time/wait_s": 5.0} for step in range(1, 5)),
    {"step": 5, "eval/score": 0.75, "rollout/reward": None},
    {"step": 6, "eval/score": 0.5, "rollout/reward": 1.0},
]


def test_the_results_are_read_from_the_metrics():
    assert results(ROWS) == {
        "steps": "6",
        "held-out score": "0.250 at step 0, 0.500 at step 6",
        "best": "0.750 at step 5",
        "training reward": "0.250 in the first quarter of the steps, 1.000 in the last",
        "time": "1m30s  (wait 22%, eval 11%)",
    }
    assert results([]) == {"steps": "none"}
    last = {"step": 2, "rollout/sandbox/landlock": 1.0}
    assert results([last]) == {"steps": "2", "sandbox": "landlock" + weakness(["landlock"])}
    assert results([{"step": 1, "eval/reward": 2.0}])["held-out reward"] == "2.000 at step 1, 2.000 at step 1"


def test_the_results_have_a_row_for_each_set_and_environment_with_intervals_and_say_that_nothing_was_learned():
    evaluated = {"eval/score": 0.5, "eval/score_ci95_low": 0.4, "eval/score_ci95_high": 0.6}
    sets = {"eval/set/easy/score": 0.9, "eval/set/easy/score_ci95_low": 0.8, "eval/set/easy/score_ci95_high": 1.0,
            "eval/set/hard/score": None, "eval/set/hard/reward": 0.1}  # fmt: skip
    trained = {"rollout/reward": 0.0, "warnings": ["constant_reward"], "rollout/env/one/score": 0.2,
               "rollout/env/two/reward": 0.3, "rollout/env/two/info/reward": 7.0}  # fmt: skip
    shown = results(
        [{"step": 0, **evaluated, **sets}, {"step": 1, **trained}, {"step": 2, **trained, "eval/score": 0.7}]
    )
    assert shown == {
        "steps": "2",
        "held-out score": "0.500 [0.400, 0.600] at step 0, 0.700 at step 2",
        "best": "0.700 at step 2",
        "held-out score, easy": "0.900 [0.800, 1.000] at step 0, 0.900 [0.800, 1.000] at step 0",
        "held-out reward, hard": "0.100 at step 0, 0.100 at step 0",
        "training reward": "0.000 in the first quarter of the steps, 0.000 in the last",
        "training score, one": "0.200 in the first quarter of the steps, 0.200 in the last",
        "training reward, two": "0.300 in the first quarter of the steps, 0.300 in the last",
        "warning": "every reward was 0.000: nothing was learned from them",
    }


def test_an_environment_has_no_number_of_a_quarter_of_the_steps_that_it_was_not_in():
    scores = {"early": range(1, 4), "middle": range(3, 6), "late": range(7, 9)}
    rows = [
        {"step": step, **{f"rollout/env/{name}/score": step / 8 for name, steps in scores.items() if step in steps}}
        for step in range(9)
    ]
    assert results(rows) == {
        "steps": "8",
        "training score, early": "0.188 in the first quarter of the steps, – in the last",
        "training score, late": "– in the first quarter of the steps, 0.938 in the last",
    }


def test_the_results_say_how_much_of_the_evaluations_and_of_each_environment_failed():
    evaluated = {"eval/score": 0.5, "eval/num_episodes": 20.0, "eval/num_failed": 4.0}
    one = {"rollout/num_failed": 1.0, "rollout/num_rejected_failed": 2.0}
    rows = [{"step": 0, **evaluated}, {"step": 1, **one}, {"step": 2, **one, **evaluated, "eval/num_failed": 0.0}]
    shown = results(rows)
    assert shown["held-out score"] == "0.500 at step 0 (4 of 20 episodes failed), 0.500 at step 2"
    assert shown["training failures"] == "4 tasks left out, 2 episodes of tasks trained on"
    mixed = {"rollout/env/a/share": 0.5, "rollout/env/a/num_rejected_failed": 1.0,
             "rollout/env/b/share": 0.5, "rollout/env/b/num_failed": 3.0, "rollout/env/c/share": 0.5}  # fmt: skip
    assert {key: value for key, value in results([{"step": 1, **one, **mixed}]).items() if "failures" in key} == {
        "training failures, a": "1 task left out",
        "training failures, b": "3 episodes of tasks trained on",
    }


def test_the_results_say_that_all_episodes_of_the_evaluations_or_of_one_set_failed():
    failed = {"num_episodes": 8.0, "num_failed": 8.0}
    sets = {"eval/set/easy/score": 0.5, **{f"eval/set/hard/{key}": value for key, value in failed.items()}}
    rows = [{"step": step, **{f"eval/{key}": value for key, value in failed.items()}} for step in (0, 2)]
    assert results(rows) == {"steps": "2", "held-out reward": "none: 16 of 16 episodes failed"}
    shown = results([{"step": 0, "eval/score": 0.5, **sets}])
    assert shown["held-out score, easy"] == "0.500 at step 0, 0.500 at step 0"
    assert shown["held-out reward, hard"] == "none: 8 of 8 episodes failed"


def test_equal_rewards_that_turns_earned_differently_taught_something():
    assert "warning" not in results([{"step": 1, "rollout/reward": 0.0, "rollout/reward_std": 0.0}])


def test_the_table_at_the_end_shows_results_and_what_the_caller_knows():
    shown, out = screen("plain")
    shown.start(6, 1)
    shown.final(ROWS, {"model": "runs/a/model [final]"})
    text = out.getvalue()
    assert "Result" in text
    assert "0.750 at step 5" in text
    assert "runs/a/model [final]" in text
