"""The order of tasks: environments by weight at any point, the same after a resume, and weights by a curriculum."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.errors import ConfigError, RunStopped
from agentenv.training.task_order import EnvStats, GroupStats, TaskOrder, load_curriculum, spread

WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 100.0), min_size=1)


def make_tasks(names, num=3):
    return [Task("q", task_id=f"{name}/{index}", env=name) for name in names for index in range(num)]


def order_of(weights, *, seed=0, curriculum=None, num=3):
    return TaskOrder(make_tasks(weights, num), seed, weights, curriculum)


def group(task, *rewards):
    """The trajectories of a group with these rewards."""
    made = []
    for reward in rewards:
        made.append(Trajectory(task, 100, group_id=task.task_id))
        made[-1].append_observation([1])
        made[-1].append_turn(Completion((2,), logprobs=(-0.5,)), "a")
        made[-1].set_result(StepResult(reward=reward, score=reward))
        made[-1].finish(StopReason.TERMINATED)
    return made


@pytest.mark.long
@given(weights=WEIGHTS, num=st.integers(1, 200))
def test_after_any_number_of_groups_every_environment_has_its_share(weights, num):
    order = order_of(weights)
    drawn, total = Counter(order.task(number).env for number in range(num)), sum(weights.values())
    for name, weight in weights.items():
        assert drawn[name] < num * weight / total + 1 + 1e-6, "less than a group ahead"
        assert drawn[name] > num * weight / total - len(weights), "and not far behind"


def test_equal_weights_take_turns_a_weight_of_two_comes_twice_and_one_of_zero_never():
    for weights, drawn in (({"a": 1, "b": 1}, "ababab"), ({"a": 2, "b": 1}, "abaaba"), ({"a": 1, "b": 0}, "aaaaaa")):
        order = order_of(weights)
        assert "".join(order.task(number).env for number in range(6)) == drawn


def test_every_environment_passes_over_its_own_tasks_in_its_own_order():
    order = order_of({"a": 3, "b": 1}, num=8)
    tasks = [order.task(number) for number in range(64)]
    ids = {name: [task.task_id for task in tasks if task.env == name] for name in "ab"}
    assert len(set(ids["a"])) == 48, "six passes, in none of which a task comes twice"
    assert [Counter(each.split("@")[0] for each in ids["a"][lap * 8 :][:8]) for lap in range(6)] == (
        [Counter(f"a/{index}" for index in range(8))] * 6
    )
    assert [each.split("@")[0] for each in ids["a"][8:16]] != ids["a"][:8], "in another order"
    assert [each.split("@")[0][1:] for each in ids["a"][:8]] != [each[1:] for each in ids["b"][:8]]


@pytest.mark.long
@settings(deadline=None)
@given(
    weights=WEIGHTS,
    seed=st.integers(0, 99),
    stops=st.sets(st.integers(0, 59), max_size=5),
    rewards=st.lists(st.sampled_from([(0.0, 0.0), (0.0, 1.0), (1.0, 1.0)]), min_size=60, max_size=60),
    curriculum=st.sampled_from([None, spread]),
)
def test_a_resume_at_any_point_gives_the_same_order(weights, seed, stops, rewards, curriculum):
    def played(stops):
        order, ids = order_of(weights, seed=seed, curriculum=curriculum), []
        for number in range(60):
            if number in stops:
                state = json.loads(json.dumps(order.state({*range(max(0, number - 4), number)})))
                order = order_of(weights, seed=seed, curriculum=curriculum)
                order.load_state(state)
                assert [order.task(each).task_id for each in range(max(0, number - 4), number)] == ids[-4:][:number]
            task = order.task(number)
            ids.append(task.task_id)
            order.observe(number, group(task, *rewards[number]))
            if number % 5 == 4:
                order.update()
        return ids, order.shares

    assert played(stops) == played(())


def test_without_a_mixture_there_is_no_state_and_old_checkpoints_are_read():
    order = TaskOrder([Task("q", task_id=str(index)) for index in range(4)], 3)
    assert order.state({0, 1}) == {}
    order.load_state({})
    assert order.shares == {}
    assert [order.task(number).task_id for number in (3, 1, 3)] == [
        TaskOrder([Task("q", task_id=str(index)) for index in range(4)], 3).task(number).task_id for number in (3, 1, 3)
    ]


def test_the_timing_of_groups_does_not_change_what_a_curriculum_sees():
    seen = []
    for numbers in ((0, 1, 2), (2, 0, 1)):
        order = order_of({"a": 1.0}, curriculum=lambda stats: seen.append(stats["a"]) or {"a": 1.0})
        tasks = [order.task(number) for number in range(3)]
        for number in numbers:
            order.observe(number, group(tasks[number], 0.0, float(number)))
        order.update()
    assert seen[:2] == seen[2:]
    assert [(each.weight, each.num_groups) for each in seen[:2]] == [(1.0, 0), (1.0, 3)]
    assert [(each.reward, each.score, each.spread) for each in seen[1].groups] == [
        (0.0, 0.0, 0.0), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0)
    ]  # fmt: skip


def test_a_curriculum_is_called_without_groups_before_the_first_one_only_and_not_on_a_resume():
    seen = []
    started = order_of({"a": 1.0}, curriculum=lambda stats: seen.append(stats["a"].num_groups) or {"a": 1.0})
    for number in range(3):
        started.observe(number, group(started.task(number), 0.0))
    started.update()
    assert seen == [0, 3]
    resumed = order_of({"a": 1.0}, curriculum=lambda stats: {"a": 1 / stats["a"].num_groups})
    resumed.load_state(started.state(set()))
    resumed.task(3)
    resumed.update()
    assert resumed.weights == {"a": 1 / 3}


def test_spread_prefers_environments_whose_groups_differ_and_leaves_none_out():
    def env(*spreads, weight=1.0):
        return EnvStats(weight, len(spreads), [GroupStats("t", 0.5, None, each) for each in spreads])

    weights = spread({
        "mixed": env(*[0.5] * 64), "solved": env(*[0.0] * 64), "new": env(), "half": env(0.5, 0.0),
        "heavy": env(*[0.5] * 64, weight=3.0), "failed": env(None, None), "late": env(*[0.0] * 64, *[0.5] * 64),
    })  # fmt: skip
    assert weights == pytest.approx({
        "mixed": 65 / 66, "solved": 1 / 66, "new": 0.5, "half": 0.5, "heavy": 3 * 65 / 66, "failed": 0.5,
        "late": 65 / 66,
    })  # fmt: skip


@pytest.mark.parametrize("made", [{}, {"a": 1.0}, {"a": -1.0, "b": 1.0}, {"a": 0, "b": 0}, {"a": "1", "b": 1}, None])
def test_a_curriculum_that_returns_something_else_stops_the_training(made):
    with pytest.raises(ConfigError, match="--curriculum: expected"):
        order_of({"a": 1.0, "b": 1.0}, curriculum=lambda stats: made).task(0)
    order = order_of({"a": 1.0, "b": 1.0}, curriculum=lambda stats: made if stats["a"].groups else {"a": 1.0, "b": 0})
    order.observe(0, group(order.task(0), 0.0))
    with pytest.raises(RunStopped, match="--curriculum: expected"):
        order.update()


def test_a_curriculum_is_found_by_name_and_in_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def only_a(environments):\n    return {name: name == 'a' for name in environments}\n"
        "def raises(environments):\n    return {name: 1 / stats.num_groups for name, stats in environments.items()}\n"
    )
    order = order_of({"a": 1.0, "b": 1.0}, curriculum=load_curriculum(f"{tmp_path}/mine.py:only_a"))
    assert {order.task(number).env for number in range(5)} == {"a"}
    with pytest.raises(ConfigError, match=r"/mine\.py:4: expected weights of environments for --curriculum, got Zero"):
        order_of({"a": 1.0}, curriculum=load_curriculum(f"{tmp_path}/mine.py:raises")).task(0)
    assert load_curriculum("spread") is spread
    for wrong, expected in (("spraed", "Did you mean 'spread'"), (f"{tmp_path}/mine.py:nothing", "--curriculum: ")):
        with pytest.raises(ConfigError, match=expected):
            load_curriculum(wrong)
