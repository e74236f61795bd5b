"""Two runs in, a RunComparison out: symmetry, pairing, what is not comparable, and each number on runs made by hand."""

import dataclasses
import json
import math
import os
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.compare import compare
from agentenv.compare.comparison import compare_sides
from agentenv.compare.report import sections_of
from agentenv.compare.sides import read_side
from agentenv.core.types import Answer
from agentenv.errors import ConfigError
from agentenv.runs.records.directory import RecordedEpisodes, RunWriter, read_config, read_trajectories
from agentenv.runs.records.index import TRAJECTORIES
from agentenv.runs.rollout import load_run
from tests.compare.sides import outcome, side, trajectory, write_run, write_training

ROWS = st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=1, max_size=3)
TASKS = st.dictionaries(st.sampled_from("abcdefgh"), ROWS, min_size=2).filter(
    lambda rows: any(value is not None for row in rows.values() for value in row)
)
SWAPPED = {"better": "worse", "worse": "better"}


def compared(a, b, **options):
    defaults = {"by": "reward", "cluster": None, "margin": 0.0}
    return compare_sides(side(a, "a"), side(b, "b"), **defaults | options)


def values(comparison):
    """All numbers of a comparison that are not about the tasks of one run."""
    left_out = ("a", "b", "caveats")
    return {name: value for name, value in comparison.to_dict().items() if name not in left_out}


@settings(max_examples=40)
@given(TASKS, st.sampled_from(["reward", "passed"]))
def test_swapping_the_runs_negates_the_difference(rows, by):
    other = {task: [1.0, *(each and each / 2 for each in row)] for task, row in rows.items()}
    rows = {task: [*row, 0.5] for task, row in rows.items()}
    there, back = compared(rows, other, by=by), compared(other, rows, by=by)
    assert back.difference.mean == -there.difference.mean
    assert back.difference.se == there.difference.se
    if there.difference.ci95_low is not None:
        assert back.difference.ci95_low == pytest.approx(-there.difference.ci95_high)
    assert back.verdict == SWAPPED.get(there.verdict, there.verdict)
    assert back.sign_flips == there.sign_flips
    assert back.smallest_effect == there.smallest_effect
    assert (back.flips.gained_once, back.flips.lost_always) == (there.flips.lost_once, there.flips.gained_always)
    assert {t.task_id: (t.p, t.q, -t.difference) for t in back.tasks} == {
        t.task_id: (t.p, t.q, t.difference) for t in there.tasks
    }
    assert back.share_above.b == pytest.approx(1.0 - there.share_above.b)
    assert back.lengths.ratio == pytest.approx(1.0 / there.lengths.ratio)


@settings(max_examples=40)
@given(TASKS, TASKS, st.randoms())
def test_the_order_of_tasks_does_not_matter(a, b, random):
    a["z"], b["z"] = [0.5], [1.0]
    shuffled = {task: a[task] for task in random.sample(sorted(a), len(a))}
    assert compared(shuffled, b).to_dict() == compared(a, b).to_dict()


@settings(max_examples=40)
@given(TASKS, TASKS, ROWS)
def test_a_task_that_only_one_run_has_changes_no_number(a, b, row):
    a["z"], b["z"] = [0.5], [1.0]
    before, after = compared(a, b), compared(a | {"only": row}, b)
    assert values(after) == values(before)
    assert (after.a.mean, after.b.mean) == (before.a.mean, before.b.mean)
    assert after.a.num_only - before.a.num_only == any(each is not None for each in row)


def test_a_clear_difference_is_better_and_its_swap_is_worse():
    a = {str(i): [0.0, 0.0, float(i % 3 == 0)] for i in range(12)}
    b = {str(i): [1.0, 1.0, float(i % 2 == 0)] for i in range(12)}
    found = compared(a, b)
    assert found.verdict == "better"
    assert (found.a.mean, found.b.mean) == (pytest.approx(4 / 36), pytest.approx(30 / 36))
    assert found.difference.mean == pytest.approx(26 / 36)
    assert 0.0 < found.difference.ci95_low < 26 / 36 < found.difference.ci95_high
    assert compared(b, a).verdict == "worse"
    assert compared(a, b, margin=0.9).verdict == "no_worse"


def test_identical_runs_agree_on_every_task_and_have_a_bound_instead_of_an_interval():
    rows = {str(i): [float(i % 2), 1.0] for i in range(30)}
    found = compared(rows, rows)
    assert (found.verdict, found.are_identical, found.share_bound) == ("no_difference", True, 0.1)
    assert (found.difference.mean, found.difference.ci95_low, found.sign_flips.p) == (0.0, None, 1.0)
    assert found.smallest_effect is None
    assert found.precision is None
    assert compared(rows, rows, margin=0.01).verdict == "no_worse"


def test_one_task_has_no_interval_and_no_verdict():
    found = compared({"a": [0.0, 0.0]}, {"a": [1.0, 1.0]})
    assert (found.verdict, found.difference.mean, found.difference.se) == ("unknown", 1.0, None)
    assert (found.pairing, found.precision, found.share_bound) == (None, None, None)
    assert not found.are_identical


def test_episodes_without_a_reward_are_left_out_and_said():
    a = {"a": [0.0, None], "b": [0.5], "c": [None], "d": [1.0]}
    b = {"a": [1.0], "b": [1.0, None, None], "c": [1.0], "e": [1.0]}
    found = compared(a, b)
    assert (found.difference.num_tasks, found.difference.mean) == (2, 0.75)
    assert found.a.num_unrewarded == {"infra": 2}
    assert (found.a.num_only, found.b.num_only) == (1, 2)
    assert [(each.kind, each.text, each.refuses) for each in found.caveats] == [
        ("tasks", "1 task (d) only in A: left out", True),
        ("tasks", "1 task (e) only in B: left out", True),
        ("tasks", "1 task (c) without a value in A: left out", True),
        ("unrewarded", "2 of 5 episodes of A have no reward: 2 infra", False),
        ("unrewarded", "2 of 6 episodes of B have no reward: 2 infra", False),
    ]


def regraded(a, b, *, source="a", **options):
    """B is A graded again, or both are `source` graded again."""
    config = {"rescored": {"run": source}}
    sides = side(a, "a", config=config if source != "a" else {}), side(b, "b", config=config)
    return compare_sides(*sides, **{"by": "reward", "cluster": None, "margin": 0.0} | options)


@pytest.mark.parametrize("source", ["a", "runs/first"])
def test_of_a_run_graded_again_the_episodes_that_both_graded_are_compared(source):
    a = {"x": [0.5, 1.0, 0.5], "y": [0.5, 1.0, 0.0, 0.0], "z": [0.5], "u": [None, 1.0]}
    b = {"x": [None, 1.0, 0.5], "y": [None, 1.0], "z": [None], "u": [0.0, 1.0]}
    found = regraded(a, b, source=source)
    assert (found.verdict, found.are_identical, found.a.mean, found.b.mean) == ("no_difference", True, 11 / 12, 11 / 12)
    assert found.stop_reasons[0].difference.mean == 0.0
    assert [(each.text, each.refuses) for each in found.caveats if "only" in each.text] == [
        ("3 episodes graded only in A: left out; mean in A 0.5, of the others 0.875", False),
        ("2 episodes only in A: left out; mean in A 0, of the others 0.875", False),
        ("1 episode graded only in B: left out; mean in B 0, of the others 0.875", False),
    ]


def test_a_run_graded_again_is_paired_by_episode():
    a = {"x": [1.0, 0.0, 0.5, 1.0], "y": [0.0, 1.0, 1.0, 1.0], "z": [1.0, 0.0, 0.0, 0.0]}
    b = {"x": [0.5, 0.0, 0.0, 1.0], "y": [1.0, 0.0, 1.0, 1.0], "z": [0.5, 0.0, 0.0, 0.0]}
    found = regraded(a, b)
    assert [(each.episode_id, each.task_id, each.a, each.b) for each in found.episodes] == [
        ("y/0", "y", 0.0, 1.0), ("y/1", "y", 1.0, 0.0), ("x/0", "x", 1.0, 0.5), ("x/2", "x", 0.5, 0.0),
        ("z/0", "z", 1.0, 0.5),
    ]  # fmt: skip
    assert found.share_above.b == pytest.approx((1 / 4 + 1 / 2 + 3 / 8) / 3)
    within = (1 / 12 + 2 / 3 + 1 / 16) / 4 / 9  # of the differences, over tasks
    assert found.precision.share_within == pytest.approx(min(1.0, within / found.difference.se**2))
    assert {(each.p, each.q, each.is_named) for each in found.tasks} == {(None, None, False)}
    assert (found.num_needed, compared(a, b).episodes) == (None, None)
    same = regraded(a, a)
    assert (same.are_identical, same.episodes) == (True, ())


def test_runs_of_another_model_are_not_the_same_episodes_whatever_the_name_of_their_source():
    sides = [
        side({"x": [row], "y": [None, row]}, name, config={"rescored": {"run": "old"}, "flags": {"model": name}})
        for name, row in (("a", 0.0), ("b", 1.0))
    ]
    found = compare_sides(*sides, by="reward", cluster=None, margin=0.0)
    assert [each.kind for each in found.caveats] == ["unrewarded", "unrewarded"]


def test_a_run_of_the_same_name_in_another_folder_is_not_the_one_that_was_graded_again(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "base").mkdir(parents=True)
    a = side({"x": [0.0], "y": [1.0]}, str(tmp_path / "two" / "base"))
    b = side({"x": [1.0], "y": [1.0]}, "b", config={"rescored": {"run": str(tmp_path / "one" / "base")}})
    assert compare_sides(a, b, by="reward", cluster=None, margin=0.0).episodes is None
    (tmp_path / "one" / "base").rmdir()  # moved
    assert compare_sides(a, b, by="reward", cluster=None, margin=0.0).episodes is not None
    b = side({"x": [1.0], "y": [1.0]}, "b", config={"rescored": {"run": os.path.relpath(tmp_path / "two" / "base")}})
    assert compare_sides(a, b, by="reward", cluster=None, margin=0.0).episodes is not None


def test_clusters_are_the_units_of_the_interval_and_of_the_flips():
    a = {str(i): [0.0] for i in range(12)}
    b = {str(i): [0.1 * (i // 4) + 0.01 * i] for i in range(12)}
    sides = side(a), side(b)
    for each in sides:
        each.metadata = {str(i): {"passage": i // 4} for i in range(12)}
    found = compare_sides(*sides, by="reward", cluster="passage", margin=0.0)
    assert (found.difference.num_tasks, found.difference.num_clusters) == (12, 3)
    assert found.sign_flips.num == 8
    assert found.verdict == "no_difference"
    assert compare_sides(*sides, by="reward", cluster=None, margin=0.0).verdict == "better"
    with pytest.raises(ConfigError, match=r"^--cluster: expected a key .* got 'pasage'. Did you mean 'passage'\?"):
        compare_sides(*sides, by="reward", cluster="pasage", margin=0.0)
    rows = {str(i): {"passage": i // 4, "env": "x"} for i in range(11)}
    for other, advice in (({"env": "y"}, r"--where 'env=x'\."), ({"env": "x"}, r"--where\.")):
        for each in sides:
            each.metadata = rows | {"11": other}
        with pytest.raises(
            ConfigError, match=rf"got 'passage'\. Other tasks have it: compare those alone with {advice}"
        ):
            compare_sides(*sides, by="reward", cluster="passage", margin=0.0)


def test_flips_of_single_episodes_have_a_test_and_those_of_several_are_counted():
    a = {"a": [0.0], "b": [1.0], "c": [0.0], "d": [1.0]}
    b = {"a": [1.0], "b": [0.0], "c": [1.0], "d": [1.0]}
    single = compared(a, b).flips
    assert (single.gained_once, single.lost_once, single.p) == (2, 1, 1.0)
    several = compared(a | {"e": [0.0, 1.0]}, b | {"e": [1.0, 1.0]}).flips
    assert (several.gained_once, several.gained_always, several.p) == (2, 3, None)


def test_pass_at_k_is_that_of_the_metrics(tmp_path):
    rows = {"a": [1.0, 0.0, 0.0], "b": [1.0, 1.0, 1.0], "c": [0.0, 0.0, 0.0]}
    path = write_run(tmp_path / "a", rows)
    found, metrics = compare(path, write_run(tmp_path / "b", rows)), load_run(path).metrics
    expected = {f"pass@{k}": each.mean for k, each in metrics.pass_at_k.items()}
    expected |= {f"pass^{k}": each.mean for k, each in metrics.pass_all_k.items() if k != "1"}
    assert {each.name: each.a for each in found.passes} == pytest.approx(expected)
    assert found.a.mean == pytest.approx(metrics.reward.mean)


def test_lengths_are_a_geometric_mean_over_tasks():
    a = {"a": [outcome(1.0, tokens=10)], "b": [outcome(0.0, tokens=20), outcome(1.0, tokens=40)]}
    b = {"a": [outcome(1.0, tokens=20)], "b": [outcome(0.0, tokens=240)]}
    found = compared(a, b)
    assert found.lengths.ratio == pytest.approx(math.sqrt(2 * 8))
    assert found.lengths.ci95_low < 4 < found.lengths.ci95_high
    assert (found.lengths_passed.ratio, found.lengths_passed.num_tasks) == (pytest.approx(2.0), 1)
    silent = {"a": [outcome(1.0, tokens=0)]}
    assert compared(silent, silent).lengths is None


def test_stop_reasons_and_info_are_paired_and_corrected():
    a = {str(i): [outcome(1.0, info={"turns": 1.0, "same": 2.0})] for i in range(10)}
    b = {str(i): [outcome(1.0, stop="max_turns", info={"turns": 2.0 + i, "same": 2.0})] for i in range(10)}
    found = compared(a, b)
    assert [(each.name, each.difference.mean, each.q) for each in found.stop_reasons] == [
        ("max_turns", 1.0, 2 / 1024),
        ("terminated", -1.0, 2 / 1024),
    ]
    assert [(each.name, each.b, each.q) for each in found.info] == [("same", 2.0, 1.0), ("turns", 6.5, 4 / 1024)]


def test_tasks_are_sorted_by_what_is_least_likely_by_chance():
    a = {"a": [0.0] * 8, "b": [0.0, 1.0] * 4, "c": [1.0] * 8}
    b = {"a": [1.0] * 8, "b": [1.0] * 8, "c": [1.0] * 8}
    found = compared(a, b)
    assert [each.task_id for each in found.tasks] == ["a", "b", "c"]
    assert found.tasks[0].p == pytest.approx(2 / math.comb(16, 8))
    assert [each.is_named for each in found.tasks] == [True, False, False]
    assert found.num_needed is None
    assert compared({t: r[:2] for t, r in a.items()}, {t: r[:2] for t, r in b.items()}).num_needed == 4


def test_of_tasks_with_one_q_the_one_with_the_smaller_p_is_first():
    found = compared({"a": [0.0] * 4, "b": [1.0] + [0.0] * 7}, {"a": [0.5] * 4, "b": [1.0] * 6 + [0.0] * 2}).tasks
    assert [(each.task_id, each.difference) for each in found] == [("a", 0.5), ("b", 0.625)]
    assert (found[0].q == found[1].q, found[0].p < found[1].p) == (True, True)


# --- runs on disk ---------------------------------------------------------------------------------------------------


def test_a_run_in_memory_and_trajectories_are_those_of_the_directory(tmp_path):
    a = write_run(tmp_path / "a", {"a": [0.0, 1.0], "b": [0.0]})
    b = write_run(tmp_path / "b", {"a": [1.0, 1.0], "b": [0.5]})
    expected = compare(a, b)
    assert compare(load_run(a), b / TRAJECTORIES).difference == expected.difference
    assert compare(tuple(load_run(a)), list(load_run(b))).difference == expected.difference
    assert compare(load_run(a), load_run(b)).a.name == str(a)
    assert json.loads(json.dumps(expected.to_dict(), allow_nan=False)) == expected.to_dict()
    assert dataclasses.is_dataclass(expected)


def test_a_filter_keeps_episodes_of_both(tmp_path):
    a = write_run(tmp_path / "a", {"a": [0.0, 1.0], "b": [0.0]})
    b = write_run(tmp_path / "b", {"a": [1.0, 1.0], "b": [0.5]})
    assert compare(a, b, where="task=a").difference.num_tasks == 1
    assert compare(load_run(a), list(load_run(b)), where="task=a").difference.num_tasks == 1
    with pytest.raises(ConfigError, match=r"^--where: "):
        compare(a, b, where="taks=a")
    for sides in ((a, b), (load_run(a), load_run(b))):
        with pytest.raises(
            ConfigError, match=r"^--where: expected a filter .*a, got none of 3, such as one of task 'a'\."
        ):
            compare(*sides, where="task=c")
        with pytest.raises(ConfigError, match=r"^--where: expected an environment of .*a, got 'x'\."):
            compare(*sides, where="env=x")


def test_what_passed_follows_the_runs_own_pass_score(tmp_path):
    a = write_run(tmp_path / "a", {"a": [0.4], "b": [0.6]}, flags={"pass_score": 0.5})
    b = write_run(tmp_path / "b", {"a": [0.5], "b": [0.6]}, flags={"pass_score": 0.5})
    assert compare(a, b, by="passed").difference.mean == 0.5
    beyond = write_run(tmp_path / "c", {"a": [4.0], "b": [6.0]})
    assert compare(beyond, beyond).flips is None
    with pytest.raises(ConfigError, match=r"expected episodes with a value of passed, got none of 2. .*--pass_score"):
        compare(beyond, beyond, by="passed")


def test_scores_are_compared_where_both_have_them(tmp_path):
    a, b = (write_run(tmp_path / name, {"a": [1.0], "b": [0.0]}, score=s) for name, s in (("a", 0.25), ("b", 0.5)))
    assert compare(a, b, by="score").difference.mean == 0.25
    none = write_run(tmp_path / "c", {"a": [1.0]})
    with pytest.raises(
        ConfigError, match=r"expected episodes with a value of score, got none of 1. Compare by another"
    ):
        compare(a, none, by="score")


@pytest.mark.parametrize(
    ("flags", "kind", "text"),
    [
        ({"env": "other"}, "environment", "--env: guess in A, other in B"),
        ({"max_turns": 5}, "limits", "--max_turns: 3 in A, 5 in B"),
        ({"remote_rm_url": "f.py"}, "rewards", "--remote_rm_url: None in A, f.py in B"),
        ({"seed": 1}, None, None),
    ],
)
def test_flags_that_change_the_task_are_said_first_and_others_are_listed(tmp_path, flags, kind, text):
    shared = {"env": "guess", "max_turns": 3, "remote_rm_url": None, "seed": 0, "model": "m", "out": "x"}
    a = write_run(tmp_path / "a", {"a": [0.0]}, flags=shared)
    b = write_run(tmp_path / "b", {"a": [0.0]}, flags=shared | flags | {"out": "y"})
    found = compare(a, b)
    assert [(each.kind, each.text) for each in found.refused] == ([(kind, text)] if kind else [])
    assert found.changed == ({} if kind else {"seed": (0, 1)})
    assert found.has_common_seed == (kind is not None)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"weight": 2, "limit": 9}, None),
        ({"max_turns": 5}, "--env.b.max_turns: None in A, 5 in B"),
        ({"name": "c"}, "--env: a+b in A, a+c in B"),
    ],
)
def test_entries_of_a_mixture_are_compared_by_key_and_how_they_are_trained_on_is_no_other_task(tmp_path, entry, text):
    first, second = {"env": "a.py", "name": "a", "weight": 1}, {"env": "b.py", "name": "b", "weight": 1}
    a = write_training(tmp_path / "a", {1: {"t": [0.0]}}, flags={"env": [first, second]})
    b = write_training(tmp_path / "b", {1: {"t": [0.0]}}, flags={"env": [second | entry, first]})
    found = compare(a, b)
    assert [each.text for each in found.refused] == [text] * (text is not None)
    assert found.changed == ({} if text else {"env.b.weight": (1, 2), "env.b.limit": (None, 9)})


def test_of_a_mixture_only_the_environments_of_compared_episodes_count(tmp_path):
    files = {"a.py": "1", "b.py": "1", "reward.py": "1", "curriculum.py": "1"}
    flags = {"env": [{"env": "a.py", "name": "a"}, {"env": "b.py:B", "name": "b"}], "remote_rm_url": "reward.py"}
    mended = {"env": [flags["env"][0], flags["env"][1] | {"limit": 2, "max_turns": 5}], "remote_rm_url": "reward.py"}
    a = write_run(tmp_path / "a", {"a/t": [0.0], "b/t": [0.0]}, flags=flags, agent_file=files)
    rows = {"a/t": [0.0], "b/t": [0.0], "b/u": [0.0]}
    b = write_run(tmp_path / "b", rows, flags=mended, agent_file=files | {"b.py": "2", "curriculum.py": "2"})
    assert [each.text for each in compare(a, b).refused] == [
        "--env.b.max_turns: None in A, 5 in B",
        "code: other content of b.py in B",
        "1 task (b/u) only in B: left out",
    ]
    assert (compare(a, b, where="env=a").caveats, compare(a, b, where="env=a").changed) == ((), {})
    c = write_run(tmp_path / "c", rows, flags=flags, agent_file=files | {"reward.py": "2"})
    assert [each.text for each in compare(a, c, where="env=a").refused] == ["code: other content of reward.py in B"]


@pytest.mark.parametrize("reward", ["gj.py:best", '{"gj.py:best": {"limit_s": 5.0}}', '{"sum": {"a": "gj.py:best"}}'])
def test_the_code_of_a_group_reward_is_compared_also_in_json(tmp_path, reward):
    a, b = (
        write_run(tmp_path / name, BEFORE, flags={"group_reward": reward}, agent_file={"gj.py": name}) for name in "ab"
    )
    assert [each.text for each in compare(a, b).refused] == ["code: other content of gj.py in B"]


def test_code_that_one_run_lacks_is_only_in_the_other(tmp_path):
    files = [{"env.py": "1", "old.py": "1"}, {"env.py": "2", "new.py": "1", "strict.py": "1"}]
    flags = [
        {"env": "env.py", "remote_rm_url": "old.py"},
        {"env": "env.py", "env_kwargs": {"a": ["new.py", "strict.py:f"]}},
    ]
    a, b = (write_run(tmp_path / name, BEFORE, flags=flags[i], agent_file=files[i]) for i, name in enumerate("ab"))
    text = "code: other content of env.py in B; old.py only in A; new.py, strict.py only in B"
    assert text in [each.text for each in compare(a, b).refused]


def test_episodes_that_two_versions_of_a_file_graded_are_named(tmp_path):
    flags = {"env": "env.py", "remote_rm_url": "other.py"}
    a, b = (write_run(tmp_path / name, BEFORE, flags=flags, agent_file={"env.py": "1"}) for name in "ab")
    document = read_config(b)
    document["changed"] = [[{"env.py": "1"}, {"env.py": "2"}], [{"env.py": "2"}, {"env.py": "1"}]]
    (b / "config.json").write_text(json.dumps(document))
    text = "code: env.py changed before a resume of B: its episodes are of more than one version"
    assert [each.text for each in compare(a, b).refused] == [text]


def test_draws_are_common_with_one_seed_of_one_model(tmp_path):
    seeded = {"seed": 0, "model": "m", "engine": "hf"}
    changes = ({}, {"model": "other"}, {"seed": None}, {"engine": "chat"})  # to a chat server, a seed is a wish
    runs = [write_run(tmp_path / str(n), {"a": [0.0]}, flags=seeded | each) for n, each in enumerate(changes)]
    same, other, unseeded, chat = runs
    pairs = ((same, same), (same, other), (unseeded, unseeded), (chat, chat), (same, chat))
    assert [compare(a, b).has_common_seed for a, b in pairs] == [True, False, False, False, False]
    trained = write_training(tmp_path / "trained", {0: BEFORE, 9: AFTER}, flags=seeded)
    pairs = (f"{trained}@0", f"{trained}@0"), (f"{trained}@0", trained), (trained, trained)
    assert [compare(a, b).has_common_seed for a, b in pairs] == [True, False, False]


@pytest.mark.parametrize("cluster", [None, "kind"])
def test_intervals_of_shares_end_where_shares_do(cluster):
    a, b = dict.fromkeys("wxyz", [0.0] * 4), dict.fromkeys("wxy", [1.0] * 4) | {"z": [1.0, 0.0, 0.0, 0.0]}
    metadata = {name: {"kind": name < "y"} for name in a}
    sides = [side(rows, metadata=metadata) for rows in (a, b)]
    found = compare_sides(*sides, by="reward", cluster=cluster, margin=0.0)
    ends = {each.name: each.difference.ci95_high for each in found.passes}
    assert (found.difference.ci95_high, ends["pass^4"], found.share_above.difference.ci95_high) == (1.0, 1.0, 0.5)
    beyond = compared(a | {"w": [-1.0] * 4}, b)
    assert beyond.difference.ci95_high > 1.0


def test_other_data_is_said_by_the_tasks_that_differ(tmp_path):
    rows = {"1": [0.0], "2": [1.0]}
    a, b = write_run(tmp_path / "a", rows), write_run(tmp_path / "b", rows, prompt="another")
    assert [(each.kind, each.text) for each in compare(a, b).refused] == [
        ("data", "2 tasks (1, 2) with another prompt or label in B"),
    ]


def test_the_index_has_what_the_episodes_of_a_run_have_and_one_of_each_task_is_read(tmp_path, monkeypatch):
    rows = {"a": [0.0, 1.0, None], "b": [0.5, 0.5]}
    run = write_run(tmp_path / "a", rows, metadata={"source": "x"}, info={"steps": 3.0}, score=0.5)
    reads, read = [], RecordedEpisodes.read
    monkeypatch.setattr(RecordedEpisodes, "read", lambda episodes, place: reads.append(place) or read(episodes, place))
    by_index = read_side(run)
    assert reads == [0, 3]
    whole = read_side(list(read_trajectories(run)))
    assert (by_index.outcomes, by_index.contents, by_index.metadata) == (whole.outcomes, whole.contents, whole.metadata)
    assert len(reads) == 2


@pytest.mark.parametrize(
    ("models", "flags", "text"),
    [
        (("good", "good", "good", "cheap"), ("good", "auto"), "answered by good 2 in A, good 1, cheap 1 in B"),
        (("good-1", "good-1", "good-2", "good-2"), ("good", "good"), "answered by good-1 2 in A, good-2 2 in B"),
        (("good", "good", "cheap", "cheap"), ("good", "cheap"), None),
        (("good", "good", "good", "good"), ("good", "good"), None),
    ],
)
def test_models_that_answered_for_another_one_are_said(tmp_path, models, flags, text):
    for name, flag, answering in (("a", flags[0], models[:2]), ("b", flags[1], models[2:])):
        with RunWriter.open(tmp_path / name, {"flags": {"model": flag}, "resolved": {}}) as writer:
            for number, model in enumerate(answering):
                episode = trajectory("t", number, 1.0)
                episode.turns[0].answer = Answer("four", model=model)
                writer.append(episode)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert [(each.kind, each.text) for each in found.caveats] == [("answers", text)] * (text is not None)


def test_damaged_lines_are_said(tmp_path):
    a = write_run(tmp_path / "a", {"a": [0.0], "b": [1.0]})
    with (a / TRAJECTORIES).open("ab") as file:
        file.write(b'{"v":3,"crc":"00000000","episode":{}}\n')
    assert "A: skipped 1 damaged lines (3)" in [each.text for each in compare(a, a).caveats]


def test_runs_without_a_common_task_or_without_episodes_are_refused(tmp_path):
    a = write_run(tmp_path / "a", {"a": [0.0]})
    with pytest.raises(ConfigError, match=r"expected tasks of .*a, such as 'a', got others, such as 'z'"):
        compare(a, write_run(tmp_path / "b", {"z": [0.0]}))
    with pytest.raises(ConfigError, match=r"expected episodes with a value of reward, got none of 0. Run it first."):
        compare(a, write_run(tmp_path / "c", {}))
    with pytest.raises(ConfigError, match="expected a run directory"):
        compare(a, tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"^--margin: expected a number >= 0"):
        compare(a, a, margin=-0.1)


def test_episodes_that_a_training_kept_are_those_of_the_task_in_every_pass(tmp_path):
    rows = {"a": [0.0], "a@1": [1.0], "b@2": [1.0], "a@x": [1.0]}
    kept = read_side(write_run(tmp_path / "a", rows, flags={"rollout_batch_size": 4}))
    assert {task: len(row) for task, row in kept.outcomes.items()} == {"a": 2, "b": 1, "a@x": 1}
    plain = read_side(write_run(tmp_path / "b", rows))
    assert set(plain.outcomes) == set(rows)
    assert [each.kind for each in compare(tmp_path / "a", tmp_path / "a").caveats] == ["kept", "kept"]


def test_a_reward_of_a_group_does_not_decide_who_passed():
    won = trajectory("a", 0, 1.0, info={"group/reward": 1.0})
    assert compare([won], [won]).a.mean == 1.0
    assert compare([won], [won], by="passed").a.mean == 0.0


# --- trainings ------------------------------------------------------------------------------------------------------

BEFORE = {str(i): [0.0, float(i % 4 == 0)] for i in range(12)}
AFTER = {str(i): [1.0, float(i % 3 == 0)] for i in range(12)}
ONE_OF_EACH = (
    "the verdict is about these two models: another seed of a training may make as large a difference. "
    "To judge flags, train with several seeds each"
)


def test_a_training_is_better_after_than_before_and_as_good_as_itself(tmp_path):
    run = write_training(tmp_path / "a", {0: BEFORE, 30: BEFORE, 60: AFTER})
    found = compare(run)
    assert (found.a.step, found.b.step, found.verdict) == (0, 60, "better")
    assert found.difference.ci95_low > 0.0
    assert found.caveats == ()
    assert [(each.name, each.a, each.b) for each in found.info] == [("n", 0.0, 60.0)]
    assert compare(f"{run}@0", f"{run}@60").to_dict() == found.to_dict()
    assert compare(run, f"{run}@60").are_identical
    other = write_training(tmp_path / "b", {0: BEFORE, 60: AFTER})
    same = compare(run, other)
    assert (same.verdict, [each.text for each in same.caveats]) == ("no_difference", [ONE_OF_EACH])
    runs = [
        write_run(tmp_path / f"of_{each.parent.name}_{each.name}", BEFORE, flags={"model": str(each)})
        for each in (run / "model", other / "model", run / "model-best")
    ]
    assert [[each.text for each in compare(runs[0], b).caveats] for b in runs[1:]] == [[ONE_OF_EACH], []]


def test_evaluations_at_different_steps_or_on_other_tasks_are_said(tmp_path):
    a = write_training(tmp_path / "a", {0: BEFORE, 60: AFTER}, flags={"eval_dataset": ["x"], "data": "p"})
    b = write_training(tmp_path / "b", {0: BEFORE, 40: AFTER}, flags={"eval_dataset": ["y"], "data": "q"})
    assert [(each.kind, each.text, each.refuses) for each in compare(a, b).caveats] == [
        ("data", "--eval_dataset: ['x'] in A, ['y'] in B", True),
        ("steps", "step 60 of A against step 40 of B", False),
        ("seeds", ONE_OF_EACH, False),
    ]
    assert compare(a, b).changed == {"data": ("p", "q")}
    assert compare(f"{a}@0", b).caveats[-1].kind == "steps"  # one of the models is of no training


def test_an_evaluation_has_the_flags_of_its_step(tmp_path):
    now = {"lr": 3, "eval_dataset": ["x"], "agent_func_path": "f.py"}
    run = write_training(tmp_path / "a", {2: BEFORE, 4: BEFORE, 6: AFTER}, flags=now)
    document = json.loads((run / "config.json").read_text())
    files = [{"f.py": "1"}, {"f.py": "2"}]
    document["config"]["agent_file"] = files[1]
    document["changed"] = [
        {"from_step": 3, "was_and_is": {"eval_dataset": [None, ["x"]]}},
        {"from_step": 3, "was_and_is": {"actor_lr": [1, 2], "lr": [1, 2]}},
        {"from_step": 5, "was_and_is": {"lr": [2, 3], "agent_file": files}},
    ]
    (run / "config.json").write_text(json.dumps(document))
    other = write_training(tmp_path / "b", {4: BEFORE}, flags={"lr": 2, "eval_dataset": ["x"]})
    assert [compare(f"{run}@{step}", other).changed for step in (2, 4, 6)] == [{"lr": (1, 2)}, {}, {"lr": (3, 2)}]
    assert [each.text for each in compare(f"{run}@4", run).caveats] == ["code: other content of f.py in B"]


def test_a_resume_that_trains_longer_is_no_difference_of_two_evaluations(tmp_path):
    run = write_training(tmp_path / "a", {0: BEFORE, 2: AFTER}, flags={"max_train_steps": 2, "eval_temperature": 0.5})
    document = json.loads((run / "config.json").read_text())
    was_and_is = {"max_train_steps": [1, 2], "eval_temperature": [0.6, 0.5]}
    document["changed"] = [{"from_step": 1, "was_and_is": was_and_is}]
    (run / "config.json").write_text(json.dumps(document))
    assert compare(run).changed == {"eval_temperature": (0.6, 0.5)}


def test_an_evaluation_of_one_set_is_compared_with_that_set_among_several(tmp_path):
    one = write_training(tmp_path / "a", {0: BEFORE}, flags={"eval_dataset": "add=data/held.jsonl"})
    both = {f"{name}/{task}": row for name in ("held", "x") for task, row in BEFORE.items()}
    two = write_training(tmp_path / "b", {0: both}, flags={"eval_dataset": ["add=held.jsonl", "x"]})
    for a, b in ((one, two), (two, one)):
        found = compare(a, b)
        assert (found.difference.num_tasks, {each.kind for each in found.caveats}) == (12, {"data", "tasks"})


def test_the_same_set_is_compared_whatever_it_is_named_beside_others(tmp_path):
    entries = [{"name": name, "env": f"{name}.py"} for name in ("x", "y")]
    named = [{"x=held": "x=held/", "y=held": "y=held/"}, {"x=held": "held/", "y=d/last.jsonl": "last/"}, {"x=held": ""}]
    runs = []
    for number, sets in enumerate(named):
        rows = {f"{name}{task}": row for name in sets.values() for task, row in BEFORE.items()}
        specs = list(sets)
        flags = {"env": entries, "eval_dataset": specs if len(specs) > 1 else specs[0]}
        run = write_training(tmp_path / str(number), {0: rows}, flags=flags)
        rows = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
        for group in rows[0]["groups"]:  # of a mixture, the beginning of an id is no environment
            group["env"] = "y" if group["group_id"].startswith(("y", "last")) else "x"
        (run / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs.append(run)
    for a, b in permutations(runs, 2):
        found = compare(a, b, where="env=x")
        assert (found.difference.num_tasks, found.caveats) == (12, ())
    found = compare(*runs[:2])
    assert (found.difference.num_tasks, {each.kind for each in found.caveats}) == (12, {"data", "tasks"})


def test_a_run_is_compared_with_the_evaluation_of_a_training(tmp_path):
    run, training = write_run(tmp_path / "a", BEFORE), write_training(tmp_path / "b", {0: BEFORE})
    assert compare(run, training).are_identical


def test_tasks_that_a_run_and_an_evaluation_name_differently_are_no_other_data_in_the_message(tmp_path):
    run = write_run(tmp_path / "a", {f"env/{task}": row for task, row in BEFORE.items()})
    several = write_training(tmp_path / "b", {0: {f"held/{task}": row for task, row in BEFORE.items()}})
    for sides in ((run, several), (several, run), (run, write_training(tmp_path / "d", {0: BEFORE}))):
        with pytest.raises(
            ConfigError, match=r"begin with the environment's name in a run and with the set's in an eva"
        ):
            compare(*sides)
    with pytest.raises(ConfigError, match=r"Compare runs on the same data\.$"):
        compare(run, write_training(tmp_path / "c", {0: {"held/x": [0.0]}}))


@pytest.mark.parametrize("where", ["env=x", "task:x/*"])
def test_one_environment_or_set_of_evaluations_is_compared(tmp_path, where):
    both = [{f"{env}/{task}": row for env in "xy" for task, row in rows.items()} for rows in (BEFORE, AFTER)]
    both[1] |= {f"y/{task}": row for task, row in BEFORE.items()}
    entries = [{"name": "x", "env": "x.py"}, {"name": "y", "env": "y.py", "max_turns": 2}]
    a = write_training(tmp_path / "a", {0: both[0], 9: both[1]}, flags={"env": entries})
    found = compare(a, where=where)
    assert (found.verdict, found.difference.num_tasks, found.a.num_episodes) == ("better", 12, 24)
    assert found.environments == ()
    mixture = compare(a)
    assert [(each.name, each.difference.num_tasks) for each in mixture.environments] == [("x", 12), ("y", 12)]
    assert [each.difference.mean for each in mixture.environments] == [found.difference.mean, 0.0]
    assert [each.verdict for each in mixture.environments] == [found.verdict, "no_difference"]
    rows = sections_of(mixture)["Environments, mean reward"]
    assert [(name, text.rpartition("  ")[2]) for name, text in rows] == [("x", "better"), ("y", "no difference")]
    b = write_training(tmp_path / "b", {9: both[1]}, flags={"env": [entries[0], entries[1] | {"max_turns": 3}]})
    assert [each.text for each in compare(a, b).refused] == ["--env.y.max_turns: 2 in A, 3 in B"]
    assert compare(a, b, where=where).refused == ()
    assert compare(a, b, where=where).changed == {"env.y.max_turns": (2, 3)}  # the other one trained the same model
    alone = write_training(tmp_path / "c", {9: both[1]}, flags={"env": entries[:1]})
    assert compare(alone, b, where=where).changed == {"env": ("x", "x+y")}
    with pytest.raises(ConfigError, match=r"^--where: expected an environment of .*a@9, got 'z'\. There are x, y\."):
        compare(a, b, where="env=z")


def test_the_last_line_of_a_step_counts(tmp_path):
    run = write_training(tmp_path / "a", {0: BEFORE, 2: AFTER})
    write_again = write_training(tmp_path / "b", {2: BEFORE})
    with (run / "steps.jsonl").open("ab") as file:
        file.write((write_again / "steps.jsonl").read_bytes() + b'{"v":1,"torn')
    assert compare(run).are_identical


def test_a_training_without_such_an_evaluation_is_refused(tmp_path):
    run = write_training(tmp_path / "a", {0: BEFORE, 2: AFTER})
    with pytest.raises(ConfigError, match=r"a@1: expected a train step with an evaluation, got those of steps 0, 2"):
        compare(f"{run}@1", run)
    with pytest.raises(ConfigError, match=r"^--where: expected a filter by task or env, got a text, reward\. .*a@2\.$"):
        compare(run, run, where='env=x reward<1 "text"')
    with pytest.raises(ConfigError, match=r"^--where: expected .*a@2, got none of 24, such as one of task '0'\."):
        compare(run, run, where="task=x")
    with pytest.raises(ConfigError, match=r"^--where: expected an env.* of .*a@2, got 'x'\. It has one env"):
        compare(run, run, where="env=x")
    with pytest.raises(ConfigError, match=r"of task 0, got 'kind'\. .* of a training keeps no metadata: compare two"):
        compare(run, cluster="kind")
    with pytest.raises(ConfigError, match="expected two runs, or a training with two evaluations, got one run with 0"):
        compare(write_run(tmp_path / "b", BEFORE))
    with pytest.raises(ConfigError, match="got those of steps none"):
        compare(f"{tmp_path / 'b'}@0", run)


def test_a_path_with_an_at_sign_and_one_that_ends_with_a_slash_are_paths(tmp_path):
    flags = {"pass_score": 0.5}
    run = write_run(tmp_path / "run@3", {"a": [0.5], "b": [0.5]}, flags=flags)
    assert compare(str(run), f"{run}/", by="passed").a.mean == 1.0
