"""The numbers of a run: what counts, what is left out, and that the estimators are the textbook's."""

import itertools
import json
import math
import sys
from fractions import Fraction
from statistics import fmean, variance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv._util.estimates import Moments, mean_over_tasks, pass_all_k, pass_at_k, share_over_tasks
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.runs.display.progress import Stats
from agentenv.runs.metrics import Summary, Tally, aggregate, summarize


def episode(task="a", sample=0, reward=1.0, score=None, **values):
    stop_reason = StopReason.ERROR if "error_kind" in values else StopReason.TERMINATED
    values = {"stop_reason": stop_reason, **values}
    return Summary(f"{task}/{sample}", task, reward=reward, score=score, **values)


def run(*summaries, num_tasks=1, num_samples=1, wall_s=2.0, group_size=None, pass_score=None):
    tally = Tally(group_size, pass_score=pass_score)
    for each in summaries:
        tally.add(each)
    return tally.metrics(num_tasks=num_tasks, num_samples=num_samples, wall_s=wall_s)


def two_turns():
    trajectory = Trajectory(Task("p"), max_length=100, episode_id="t/0", group_id="t", attempt=1, wait_s=0.5)
    trajectory.append_observation([1, 2, 3])
    trajectory.append_turn(Completion((4, 5), num_cached_tokens=2), "x", generate_s=1.0)
    trajectory.set_result(StepResult("no", 0.25, info={"tries": 1, "note": "text", "bad": math.nan}), step_s=0.25)
    trajectory.append_observation([6])
    trajectory.append_turn(Completion((7,), num_cached_tokens=5), "y", generate_s=2.0)
    trajectory.set_result(StepResult("", 1.0, score=0.5, terminated=True, info={"tries": 3.0}), step_s=0.5)
    trajectory.finish(StopReason.TERMINATED)
    return trajectory


def test_a_summary_has_the_facts_of_its_episode():
    assert summarize(two_turns()) == Summary(
        "t/0",
        "t",
        attempt=1,
        reward=1.25,
        score=0.5,
        stop_reason=StopReason.TERMINATED,
        num_turns=2,
        num_prompt_tokens=3,
        num_action_tokens=3,
        num_observation_tokens=1,
        num_input_tokens=3 + 6,
        num_cached_tokens=7,
        generate_s=3.0,
        step_s=0.75,
        wait_s=0.5,
        info_last={"tries": 3.0},
        info_sum={"tries": 4.0},
    )


def test_info_takes_numbers_of_any_library():
    numpy = pytest.importorskip("numpy")
    trajectory = Trajectory(Task("p"), max_length=100, episode_id="t/0")
    trajectory.append_observation([1])
    trajectory.append_turn(Completion((2,)), "x")
    info = {"np": numpy.float32(0.5), "flag": True, "huge": 1 << 500, "not": numpy.nan, "text": "1"}
    trajectory.set_result(StepResult(terminated=True, info=info))
    assert summarize(trajectory).info_last == {"np": 0.5, "flag": 1.0}


@pytest.mark.long
@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_and_pass_all_k_equal_the_enumeration_of_all_draws(case):
    num_samples, num_passed, k = case
    outcomes = [index < num_passed for index in range(num_samples)]
    draws = list(itertools.combinations(outcomes, k))
    assert pass_at_k(num_samples, num_passed, k) == float(Fraction(sum(map(any, draws)), len(draws)))
    assert pass_all_k(num_samples, num_passed, k) == float(Fraction(sum(map(all, draws)), len(draws)))


def test_an_info_near_the_largest_float_makes_no_sum_infinite():
    tally = Tally(1)
    for index in range(3):
        trajectory = Trajectory(Task("p"), max_length=100, episode_id=f"t{index}/0", group_id=f"t{index}")
        trajectory.append_observation([1])
        for turn in range(2):
            trajectory.append_turn(Completion((2,)), "x")
            info = {"best": sys.float_info.max, "fine": 2.0}
            trajectory.set_result(StepResult(terminated=turn == 1, info=info))
        trajectory.finish(StopReason.TERMINATED)
        tally.add(summarize(trajectory))
    info = json.loads(json.dumps(tally.metrics(num_tasks=3, num_samples=1, wall_s=1.0).to_dict(), allow_nan=False))[
        "info"
    ]
    assert set(info) == {"fine"}


@pytest.mark.parametrize("counts", [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses_impossible_counts(counts):
    with pytest.raises(ValueError, match=r"pass@k: expected"):
        pass_at_k(*counts)
    with pytest.raises(ValueError, match=r"pass@k: expected"):
        pass_all_k(*counts)


@pytest.mark.parametrize("passed", range(1, 11))
def test_the_interval_of_a_share_is_wilsons_for_one_task_less(passed):
    # Its ends are where the mean is 1.96 standard errors away; estimating the spread costs one task.
    estimate = share_over_tasks([1.0] * passed + [0.0] * (11 - passed), 11)
    for end in (estimate.ci95_low, estimate.ci95_high):
        assert abs(end - passed / 11) / math.sqrt(end * (1 - end) / 10) == pytest.approx(1.96, abs=1e-3)


@pytest.mark.parametrize("rewards", [[1.0] * 9 + [0.0], [1.0] * 10, [0.9, 1.0, 0.95]])
def test_the_interval_of_rewards_that_are_all_in_0_to_1_stays_there(rewards):
    found = aggregate([episode(str(i), 0, r) for i, r in enumerate(rewards)], num_samples=1)
    assert 0.0 <= found.reward.ci95_low < found.reward.mean <= found.reward.ci95_high <= 1.0


def test_the_interval_of_rewards_outside_0_to_1_ends_beyond_those_that_were_seen():
    found = aggregate([episode("a", 0, 0.8), episode("b", 0, -0.3)], num_samples=1)
    half = 12.7062 * 0.55  # Student's t of one degree times half the distance, the standard error of two
    assert (found.reward.ci95_low, found.reward.ci95_high) == (pytest.approx(0.25 - half), pytest.approx(0.25 + half))


def test_equal_rewards_outside_0_to_1_have_no_interval():
    found = aggregate([episode(task, 0, -0.1) for task in "abc"], num_samples=1)
    assert (found.reward.mean, found.reward.ci95_low, found.reward.ci95_high) == (pytest.approx(-0.1), None, None)


def test_the_interval_of_rewards_outside_0_to_1_is_students_even_if_the_means_of_tasks_are_inside():
    summaries = [episode(task, index, reward) for task in "ab" for index, reward in enumerate([1.5, -0.5])]
    found = aggregate([*summaries, episode("c", 0, 1.0)], num_samples=2)
    assert found.reward.ci95_low == pytest.approx(mean_over_tasks([0.5, 0.5, 1.0]).ci95_low)


def test_the_progress_line_and_the_table_show_the_same_mean():
    tally = Tally(2)
    tally.add(episode("earlier", 0, 1.0))
    stats = Stats(6, tally)
    # The mean over episodes is 0.5; over tasks it is a third, as task a has a reward for one of its episodes only.
    for each in (episode("earlier", 1, 1.0), episode("a", 0, 0.0), episode("a", 1, None), episode("b", 0, 0.0)):
        tally.add(each)
        stats.add(each)
    assert (stats.facts()["reward"], stats.facts()["done"]) == (pytest.approx(1 / 3), 5)
    assert tally.metrics(num_tasks=3, num_samples=2, wall_s=1.0).reward.mean == pytest.approx(stats.facts()["reward"])


def test_each_task_counts_once_however_many_of_its_episodes_have_a_reward():
    summaries = [episode("a", index, 1.0) for index in range(3)] + [episode("b", 0, 0.0)]
    failed = [episode("b", index, None, error_kind="infra", error_type="EngineError") for index in (1, 2)]
    metrics = run(*summaries, *failed, num_tasks=2, num_samples=3)
    assert metrics.reward.mean == 0.5
    assert metrics.pass_at_k["1"].mean == 0.5
    assert metrics.pass_at_k["3"].num_tasks == 1
    assert metrics.pass_at_k["2"].mean == 1.0


def test_episodes_without_a_reward_are_left_out_of_means_and_counted():
    summaries = [
        episode("a", 0, 1.0, num_turns=2),
        episode("b", 0, None, error_kind="infra", error_type="EngineError", num_turns=9),
        episode("c", 0, None, error_kind="env", error_type="KeyError"),
        episode("d", 0, None, error_kind="contract", error_type="ContractError"),
        episode("e", 0, None, stop_reason=StopReason.STEP_TIMEOUT),
    ]
    metrics = run(*summaries, num_tasks=6)
    assert metrics.reward.mean == 1.0
    assert (metrics.turns_mean, metrics.turns_max) == (2.0, 2)
    assert (metrics.num_episodes, metrics.num_missing, metrics.num_rewarded, metrics.num_no_reward) == (5, 1, 1, 4)
    assert (metrics.num_infra_errors, metrics.num_env_errors) == (1, 2)
    assert metrics.error_types == {"infra:EngineError": 1, "env:KeyError": 1, "contract:ContractError": 1}
    assert metrics.stop_reasons == {"error": 3, "terminated": 1, "step_timeout": 1}
    assert metrics.truncated_share == 0.2


def test_an_episode_passes_by_its_score_and_by_its_reward_where_it_has_none():
    assert run(episode(reward=0.1, score=1.0)).pass_at_k["1"].mean == 1.0
    assert run(episode(reward=5.0, score=0.9)).pass_at_k["1"].mean == 0.0
    assert run(episode(reward=5.0, score=0.9), pass_score=0.5).pass_at_k["1"].mean == 1.0
    assert run(episode(reward=1.0)).pass_at_k["1"].mean == 1.0
    assert run(episode(reward=0.0)).pass_at_k["1"].mean == 0.0


@pytest.mark.parametrize("score", [sum([1 / 9] * 9), sum([1 / 6] * 6)])
def test_a_sum_of_weights_that_misses_1_by_rounding_passes(score):
    assert score != 1.0
    assert run(episode(score=score)).pass_at_k["1"].mean == 1.0


def test_the_part_of_a_reward_that_the_group_earned_passes_no_episode():
    info = {"group/reward": 1.0}
    assert run(episode(reward=1.5, info_last=info, info_sum=info)).pass_at_k["1"].mean == 0.0


@pytest.mark.parametrize("rewards", [[-1.7, 0.4], [0.9, 1.3], [-0.2, -0.1], [0.5, 475.0]])
def test_without_a_pass_score_pass_at_k_is_missing(rewards):
    raw = [episode("a", index, reward) for index, reward in enumerate(rewards)]
    for episodes, size in ((raw, None), (raw, 2), (raw[::-1], 2)):
        unknown = run(*episodes, num_samples=2, group_size=size)
        assert [each.mean for k in "12" for each in (unknown.pass_at_k[k], unknown.pass_all_k[k])] == [None] * 4
        assert (unknown.pass_at_k["1"].num_tasks, unknown.pass_score) == (0, 1.0)
        assert unknown.reward.mean == pytest.approx(fmean(rewards))
    assert run(*raw, num_samples=2, pass_score=rewards[1]).pass_at_k["1"].mean == 0.5
    # One that scores what it finished has said what passes.
    assert run(*raw, episode("b", score=1.0), num_tasks=2, num_samples=2).pass_at_k["1"].num_tasks == 2


def test_tokens_and_time_add_up_over_all_episodes():
    tokens = {"num_prompt_tokens": 5, "num_action_tokens": 10, "num_observation_tokens": 2}
    times = {"generate_s": 3.0, "step_s": 1.0, "wait_s": 0.0}
    first = episode("a", num_input_tokens=20, num_cached_tokens=5, **tokens, **times)
    second = episode("b", reward=None, error_kind="env", num_input_tokens=20, num_cached_tokens=10, **tokens, **times)
    metrics = run(first, second, num_tasks=2, wall_s=4.0)
    assert (metrics.tokens.num_prompt, metrics.tokens.num_action, metrics.tokens.num_observation) == (10, 20, 4)
    assert (metrics.tokens.num_input, metrics.tokens.cached_share) == (40, 0.375)
    assert (metrics.time.generate_share, metrics.time.step_share, metrics.time.wait_share) == (0.75, 0.25, 0.0)
    assert (metrics.time.episodes_per_s, metrics.time.action_tokens_per_s) == (0.5, 5.0)


def test_info_gives_last_and_sum_of_each_key_over_the_episodes_that_have_it():
    first = episode("a", info_last={"tries": 1.0}, info_sum={"tries": 3.0})
    second = episode("b", info_last={"tries": 2.0, "z": 0.5}, info_sum={"tries": 5.0, "z": 0.5})
    third = episode("c", reward=None, error_kind="env", info_last={"tries": 99.0}, info_sum={"tries": 99.0})
    assert run(first, second, third, num_tasks=3).info == {
        "tries": {"last": 1.5, "sum": 4.0, "num_episodes": 2},
        "z": {"last": 0.5, "sum": 0.5, "num_episodes": 1},
    }


def test_a_run_without_episodes_has_metrics():
    metrics = run(num_tasks=3, num_samples=2, wall_s=0.0)
    assert (metrics.num_episodes, metrics.num_missing) == (0, 6)
    assert metrics.reward.mean is metrics.turns_mean is metrics.truncated_share is None
    assert metrics.time.episodes_per_s is metrics.time.step_share is metrics.tokens.cached_share is None
    assert metrics.pass_at_k["1"].mean is None


FINITE = st.floats(-1e38, 1e38) | st.floats(-1.0, 1.0)


@given(st.lists(FINITE, min_size=2, max_size=40))
def test_moments_are_those_of_statistics(values):
    moments = Moments(values)
    size = max(map(abs, values))
    assert moments.num == len(values)
    assert moments.total == pytest.approx(math.fsum(values), rel=1e-12, abs=1e-12 * size)
    assert moments.mean == pytest.approx(fmean(values), rel=1e-12, abs=1e-12 * size)
    underflow = sys.float_info.min
    assert moments.variance == pytest.approx(variance(values), rel=1e-9, abs=1e-12 * size**2 + underflow)


def flat(values, name=""):
    """The leaves of nested dicts by their paths."""
    if not isinstance(values, dict):
        return {name: math.nan if values is None else values}
    return {key: leaf for part, value in values.items() for key, leaf in flat(value, f"{name}/{part}").items()}


def test_a_tally_that_forgets_returns_the_metrics_of_all_summaries():
    """Whatever the order, and whatever failed before it succeeded."""
    failed = {"reward": None, "error_kind": "infra", "error_type": "EngineError", "num_turns": 1}
    last = [
        episode("a", 0, 1.0, 0.25, attempt=1, num_turns=3, num_action_tokens=20, generate_s=1.5),
        episode("a", 1, -0.5, attempt=1, info_last={"n": 0.5}, info_sum={"n": 1.5}),
        episode("a", 2, attempt=1, **failed),
        episode("b", 0, 0.0, 1.0, attempt=1, bridges={"exact": 2, "cut": 1}, info_last={"n": 2.0}, info_sum={"n": 2.0}),
        episode("b", 1, 1.7, 0.5, attempt=1, num_action_tokens=7, bridges={"exact": 1}),
        episode("b", 2, None),
    ]
    first = [episode(task, sample, **failed) for task in "ab" for sample in range(2)]
    counts = {"num_tasks": 2, "num_samples": 3, "wall_s": 2.0}
    expected = flat(run(*last, **counts, pass_score=0.5).to_dict())
    for order in (last, last[::-1], last[1::2] + last[::2]):
        tally = Tally(3, pass_score=0.5)
        for summary in [*first, *order]:
            tally.add(summary)
        found = tally.metrics(**counts)
        assert flat(found.to_dict()) == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)
        assert tally.metrics(**counts) == found, "asking changes nothing"
        assert len(tally) == len(last)


def test_a_tally_holds_nothing_of_tasks_that_are_over():
    tally = Tally(2)
    for task in range(50):
        for sample in range(2):
            tally.add(episode(f"{task:03d}", sample, info_last={"x": 1.0}, info_sum={"x": 1.0}))
    assert not tally._counts.open
    assert not tally.failed


def test_a_success_that_comes_twice_counts_once_and_no_failure_takes_its_place():
    tally = Tally(1)
    tally.add(episode("a", reward=1.0))
    tally.add(episode("a", reward=0.0))
    assert tally.metrics(num_tasks=1, num_samples=1, wall_s=1.0).reward.mean == 1.0
    tally.add(episode("a", reward=None, error_kind="infra"))
    assert (len(tally), tally.failed) == (1, {})


def test_pass_at_k_is_the_share_of_one_value_per_task_even_if_equal_tasks_are_counted_together():
    passed = [0, 1, 1, 1, 2, 2]
    metrics = run(
        *(episode(f"{task}", index, float(index < num)) for task, num in enumerate(passed) for index in range(2)),
        num_tasks=6,
        num_samples=2,
    )
    for k in (1, 2):
        assert metrics.pass_at_k[str(k)] == share_over_tasks([pass_at_k(2, num, k) for num in passed], 12)
        assert metrics.pass_all_k[str(k)] == share_over_tasks([pass_all_k(2, num, k) for num in passed], 12)
