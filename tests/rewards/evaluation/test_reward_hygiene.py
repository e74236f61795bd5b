"""What a run's rewards depend on: correlations in any order, spread of groups, flags, and where they are shown."""

import json
import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.rewards.hygiene import Pairs, num_marks, repeated
from agentenv.runs.display.report import final_table, result_rows
from agentenv.runs.metrics import Summary, Tally, aggregate, summarize
from agentenv.training.evaluation import numbers_of


def near(value):
    return None if value is None else pytest.approx(value, rel=1e-9, abs=1e-9)


FLOATS = st.floats(-1e6, 1e6) | st.integers(-3, 3).map(float)
STEPS = st.integers(-(10**6), 10**6).map(lambda number: number / 8)
"""Floats whose differences are not lost in rounding."""


def episode(task, sample, reward, tokens=1, **values):
    return Summary(f"{task}/{sample}", task, reward=reward, num_action_tokens=tokens, **values)


def of(*summaries, num_samples=4):
    return aggregate(summaries, num_samples=num_samples)


def hygiene(*summaries):
    return of(*summaries).hygiene


# --- correlations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[], [(1.0, 2.0)], [(1.0, 2.0), (1.0, 3.0)], [(0.1, 0.1)] * 3])
def test_without_variance_the_correlation_is_unknown(values):
    pairs = Pairs()
    for x, y in values:
        pairs.add(x, y)
    assert pairs.correlation is None
    within = Pairs()
    within.add_within(pairs)
    assert within.correlation is None
    assert Pairs().correlation is None


@pytest.mark.long
@given(st.lists(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=6), min_size=1, max_size=8))
@settings(max_examples=60)
def test_within_groups_is_numpys_of_what_is_above_the_groups_means(groups):
    within, xs, ys = Pairs(), [], []
    for group in groups:
        pairs = Pairs()
        for x, y in group:
            pairs.add(x, y)
        within.add_within(pairs)
        xs += list(numpy.array([x for x, _ in group]) - numpy.mean([x for x, _ in group]))
        ys += list(numpy.array([y for _, y in group]) - numpy.mean([y for _, y in group]))
    if numpy.std(xs) > 1e-3 and numpy.std(ys) > 1e-3:
        assert within.correlation == pytest.approx(float(numpy.corrcoef(xs, ys)[0, 1]), abs=1e-6)


# --- of a run ---------------------------------------------------------------------------------------------------------


def test_higher_rewards_of_long_tasks_do_not_count_within_groups():
    found = hygiene(
        *(episode("a", index, 0.1 - 0.01 * index, 10 + index) for index in range(4)),
        *(episode("b", index, 0.9 - 0.01 * index, 100 + index) for index in range(4)),
    )
    assert found.length_correlation > 0.9
    assert found.length_correlation_in_group == near(-1.0)


def test_a_reward_of_marks_or_of_repetition_shows():
    marks = hygiene(*(episode("a", index, float(index), num_marks=2 * index) for index in range(3)))
    assert (marks.format_correlation, marks.format_correlation_in_group) == (near(1.0), near(1.0))
    assert (marks.length_correlation, marks.repetition_correlation) == (None, None)
    repeats = hygiene(*(episode("a", index, -float(index), repeated_share=0.25 * index) for index in range(3)))
    assert (repeats.repetition_correlation, repeats.repetition_correlation_in_group) == (near(-1.0), near(-1.0))


def test_the_spread_of_groups_is_over_those_with_two_rewards():
    found = hygiene(
        episode("flat", 0, 1.0), episode("flat", 1, 1.0), episode("flat", 2, 1.0),
        episode("wide", 0, 0.0), episode("wide", 1, 4.0),
        episode("single", 0, 9.0), episode("half", 0, 5.0), episode("half", 1, None),
    )  # fmt: skip
    assert found.std_in_group == 1.0
    assert found.zero_spread_share == 0.5


def test_flags_are_shares_of_the_episodes_that_report_them():
    found = hygiene(
        episode("a", 0, 1.0, info_last={"rm/clipped": 0.0}, info_sum={"rm/clipped": 1.0}),
        episode("a", 1, 1.0, info_last={"clipped": 0.0, "x": 1.0}, info_sum={"clipped": 0.0, "x": 1.0}),
        episode("a", 2, 1.0),
        episode("a", 3, None, info_last={"clipped": 1.0}, info_sum={"clipped": 1.0}),
    )
    assert (found.clipped_share, found.input_truncated_share) == (0.5, None)


def test_a_run_that_says_nothing_has_no_hygiene():
    for metrics in (of(), of(episode("a", 0, None)), of(episode("a", 0, 1.0))):
        assert metrics.hygiene.numbers() == {}
        assert json.loads(json.dumps(metrics.to_dict(), allow_nan=False))["hygiene"]["std_in_group"] is None


@pytest.mark.long
@given(st.lists(st.lists(st.tuples(STEPS, st.integers(0, 50)), min_size=3, max_size=3), min_size=1, max_size=6),
       st.randoms(use_true_random=False))  # fmt: skip
@settings(max_examples=40)
def test_episodes_that_are_forgotten_count_as_those_that_are_kept(groups, rng):
    summaries = [
        episode(str(task), index, reward, tokens)
        for task, group in enumerate(groups)
        for index, (reward, tokens) in enumerate(group)
    ]
    expected = hygiene(*summaries)
    rng.shuffle(summaries)
    tally = Tally(3)
    for summary in summaries:
        tally.add(summary)
    counts = {"num_tasks": len(groups), "num_samples": 3, "wall_s": 1.0}
    assert tally.metrics(**counts).hygiene == tally.metrics(**counts).hygiene
    assert tally.metrics(**counts).hygiene.numbers() == pytest.approx(expected.numbers(), rel=1e-6, abs=1e-6)


def trajectory(*actions, error=None):
    made = Trajectory(Task("p"), max_length=100, episode_id="t/0", group_id="t")
    made.append_observation([1])
    for action in actions:
        made.append_turn(Completion((2, 3)), action)
        made.set_result(StepResult("", 1.0), step_s=0.0)
    made.finish(StopReason.ERROR if error else StopReason.TERMINATED, error)
    return made


def test_a_summary_counts_marks_and_repeats_of_all_actions():
    found = summarize(trajectory("# Head\n- one", "a b c d", "a b c d a b c d"))
    assert found.num_marks == 2
    assert found.repeated_share > 0.3


def test_an_episode_without_a_reward_is_not_looked_at():
    failed = summarize(trajectory("# Head", error=EpisodeError("infra", "EngineError", "gone", "generate")))
    assert (failed.reward, failed.num_marks, failed.repeated_share) == (None, 0, 0.0)


def test_looking_at_a_hostile_text_takes_no_time():
    import time

    begun = time.process_time()
    for text in ("**" * 500_000, " " * 1_000_000, "\n" * 1_000_000, "*" * 1_000_000, "- " * 500_000, "1" * 1_000_000):
        num_marks(text)
        repeated(text)
    assert time.process_time() - begun < 30.0


# --- where it is shown ------------------------------------------------------------------------------------------------


def shown(metrics):
    table = final_table(result_rows(metrics))
    return dict(zip(*(map(str, column._cells) for column in table.columns), strict=True))


def test_the_final_table_says_what_rewards_go_by_where_that_is_known():
    rows = shown(of(*(episode("a", index, float(index % 2), 5 + index % 2, num_marks=index) for index in range(10))))
    assert rows["reward against"].startswith("length +1.00 (+1.00 within tasks), Markdown marks +0.17")
    assert "repetition" not in rows["reward against"]
    assert rows["reward within tasks"] == "std 0.500 (mean), none in 0% of the tasks"
    few = (episode("a", index, float(index % 2), 5 + index % 2) for index in range(9))
    assert "reward against" not in shown(of(*few))


def test_a_train_step_logs_them():
    numbers = numbers_of(aggregate([episode("a", index, float(index), index) for index in range(3)], num_samples=3))
    assert numbers["reward/length_correlation_in_group"] == near(1.0)
    assert numbers["reward/std_in_group"] == pytest.approx(math.sqrt(2 / 3))
    assert numbers["reward/zero_spread_share"] == 0.0
    assert "reward/clipped_share" not in numbers
