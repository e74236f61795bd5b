"""`agentenv diff`: what a person, a pull request and a pipeline read, and the exit code."""

import json
import re

import pytest

from agentenv.compare import compare
from agentenv.compare.comparison import compare_sides
from agentenv.compare.report import as_markdown, as_text
from tests.compare.sides import outcome, side, write_run
from tests.drivers import command

HOSTILE = "a`b```|<img src=x onerror=alert(1)>\n# @team #1 \x1b[2J\u202e"
LOW = {str(i): [0.0, 0.0, float(i % 3 == 0), 0.0] for i in range(12)}
HIGH = {str(i): [1.0, 1.0, float(i % 2 == 0), 1.0] for i in range(12)}


def compared(a, b, **options):
    return compare_sides(
        side(a, "runs/a"), side(b, "runs/b"), **{"by": "reward", "cluster": None, "margin": 0} | options
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    flags = {"env": "guess", "seed": 0, "max_turns": 3}
    return {
        "low": write_run(path / "low", LOW, flags=flags),
        "high": write_run(path / "high", HIGH, flags=flags | {"seed": 1}),
        "other": write_run(path / "other", HIGH, flags=flags | {"max_turns": 5}),
        "one": write_run(path / "one", {"0": [1.0]}, flags=flags),
    }


def test_the_text_says_what_is_not_comparable_before_the_verdict():
    text = as_text(compared(LOW | {"x": [1.0]}, HIGH))
    assert text.index("1 task (x) only in A") < text.index("reward: B is better") < text.index("sign flips")
    assert "B - A             +0.792  95% CI [+0.678, +0.906] over 12 tasks" in text
    assert "runs/a: 49 episodes of 13 tasks" in text


@pytest.mark.parametrize("width", [80, 40])
def test_lines_fit_the_terminal(width):
    rows = {f"a-long-task-id-{i}" * (i % 3 + 1): [outcome(0.0, info={"some_key_of_info": 1.0})] * 2 for i in range(14)}
    others = {task: [outcome(i % 2, stop="max_turns", tokens=9)] * 2 for i, task in enumerate(rows)}
    text = as_text(compared(rows, others), width)
    assert [line for line in text.splitlines() if len(line) > width] == []
    assert "4 other tasks" not in text
    assert "7 did not" not in text


def test_of_a_run_graded_again_the_episodes_that_changed_are_listed_and_nothing_is_by_chance():
    flags = {"seed": 0, "model": "m"}
    old = side({task: [1.0, 0.0, 0.5, 1.0] for task in "abcd"}, "runs/old", config={"flags": flags})
    config = {"flags": flags, "rescored": {"run": "runs/old"}}
    new = side({task: [0.5, 0.0, 0.5, 0.5 * (task < "d")] for task in "abcd"}, "runs/new one", config=config)
    text = as_text(compare_sides(old, new, by="reward", cluster=None, margin=0))
    listed = text.partition("Episodes that changed: 8 of 16, 0 higher and 8 lower\n")[2].splitlines()
    assert listed[0] == "  d/3               1.000 → 0.000  -1.000"
    assert listed[8:] == [
        "  in A              agentenv show runs/old --episode d/3",
        "  in B              agentenv show 'runs/new one' --episode d/3",
    ]
    assert "  d                 0.625 → 0.250  -0.375\n" in text
    assert not [word for word in ("chance", "★", "draws make") if word in text]


def test_small_numbers_of_info_have_two_digits():
    a, b = ({task: [outcome(0.0, info={"cost": cost})] for task in "xyz"} for cost in (0.00002, 0.000351))
    assert "cost              0.000020 → 0.00035  +0.00033" in as_text(compared(a, b))


def test_the_cost_of_the_policy_is_compared_where_both_runs_know_it():
    a = {task: [outcome(0.0, cost=0.0001), outcome(0.0, cost=cost)] for task, cost in {"x": 0.0005, "y": None}.items()}
    b = {"x": [outcome(0.0, cost=0.002)], "y": [outcome(0.0, cost=0.002), outcome(0.0)]}
    unknown = {"z": [outcome(0.0)]}
    text = as_text(compared(a | {"z": [outcome(0.0, cost=9.0)]}, b | unknown))
    assert "Dollars per episode\n  policy cost       0.00020 → 0.0020  +0.0018" in text
    assert "Dollars" not in as_text(compared(a | unknown, unknown))


def test_only_the_first_changed_tasks_are_listed():
    text = as_text(compared(LOW, HIGH))
    assert "2 other tasks changed; 0 did not." in text
    surely = {str(i): [0.0] * 8 for i in range(11)}, {str(i): [1.0] * 8 for i in range(11)}
    assert "1 other task changed, 1 of them ★; 0 did not." in as_text(compared(*surely))
    assert len(re.findall(r"^  \d+ +.*  q ", text, re.MULTILINE)) == 10


def test_texts_of_runs_neither_control_a_terminal_nor_become_markup():
    comparison = compared({HOSTILE: [0.0], "b": [1.0]}, {HOSTILE: [1.0], "b": [0.5]})
    text, markdown = as_text(comparison), as_markdown(comparison)
    assert "\x1b" not in text + markdown
    assert "\u202e" not in text + markdown
    outside = re.sub(r"(`+) ?(?:(?!\1).)*? ?\1(?!`)", "", markdown)
    assert not re.search(r"<img|@team|#1", outside), outside
    assert all(line.count("|") - line.count("\\|") in (0, 3) for line in markdown.splitlines())


def test_identical_runs_have_a_bound_and_no_interval():
    text = as_text(compared(HIGH, HIGH))
    assert "reward: no difference is shown, the runs agree on every task" in text
    assert "at most 25.0% of such tasks differ (rule of three)" in text
    assert "95% CI" not in text


@pytest.mark.parametrize(
    ("a", "b", "options", "line"),
    [
        (LOW, HIGH, {"margin": 0.1}, "reward: B is better than A by more than 0.1"),
        (LOW, HIGH, {"margin": 0.7}, "reward: B is no worse than A by 0.7"),
        (HIGH, LOW, {"margin": 0.7}, "reward: B is worse than A, but not surely by more than 0.7"),
        (HIGH, LOW, {"by": "passed"}, "passed: B is worse"),
        ({"a": [0.0]}, {"a": [1.0]}, {}, "reward: unknown: one task says nothing about others"),
        ({"a": [0.0], "b": [1.0]}, {"a": [1.0], "b": [0.0]}, {}, "reward: no difference is shown"),
    ],
)
def test_the_verdict_is_a_line(a, b, options, line):
    assert line in as_text(compared(a, b, **options)).splitlines()


def test_with_clusters_more_of_them_make_the_interval_narrower():
    sides = side(LOW), side(HIGH, "b")
    for each in sides:
        each.metadata = {task: {"passage": int(task) % 5} for task in LOW}
    text = " ".join(as_text(compare_sides(*sides, by="reward", cluster="passage", margin=0.0)).split())
    assert "with 4 times the clusters Checks" in text
    assert "tasks Checks" in " ".join(as_text(compared(LOW, HIGH)).split())


def test_numbers_of_info_that_some_tasks_lack_have_the_number_of_tasks():
    a, b = (
        {task: [outcome(0.0, info={"all": n} | ({"few": n} if task != "z" else {}))] for task in "xyz"}
        for n in (1.0, 2.0)
    )
    text = as_text(compared(a, b))
    assert "few               1.000 → 2.000  +1.000  q 0.500  (2 tasks)\n" in text
    assert "all               1.000 → 2.000  +1.000  q 0.500\n" in text


def test_of_evaluations_the_report_says_how_to_read_the_tasks():
    told = "To read episodes of these tasks, run both models on this data and compare these runs: agentenv run --model"
    a, b = side(LOW, "t"), side(HIGH, "t")
    a.step, b.step = 0, 4
    assert told in " ".join(as_text(compare_sides(a, b, by="reward", cluster=None, margin=0)).split())
    assert told not in " ".join(as_text(compared(LOW, HIGH)).split())


def test_equal_changes_of_all_tasks_have_a_sentence_instead_of_an_interval():
    text = as_text(compared({"a": [0.0], "b": [0.0]}, {"a": [1.0], "b": [1.0]}))
    assert "All tasks differ by the same amount" in text
    assert "2 tasks gained, 0 lost (McNemar's p = 0.500)" in text


# --- the command ----------------------------------------------------------------------------------------------------


def printed(capsys, *args):
    code = command(["diff", *args])
    return code, *capsys.readouterr()


def test_the_command_prints_the_report(runs, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    code, text, errors = printed(capsys, runs["low"], runs["high"])
    assert (code, errors) == (0, "")
    assert text == as_text(compare(runs["low"], runs["high"]))
    assert "--seed            0 → 1" in text


def test_json_is_the_comparison_and_md_is_markdown(runs, capsys):
    comparison = compare(runs["low"], runs["high"], by="passed")
    code, text, _ = printed(capsys, runs["low"], runs["high"], "--by", "passed", "--json")
    assert (code, json.loads(text)) == (0, comparison.to_dict())
    code, text, _ = printed(capsys, runs["low"], runs["high"], "--by", "passed", "--md")
    assert (code, text) == (0, as_markdown(comparison))
    code, _, errors = printed(capsys, runs["low"], runs["high"], "--md", "--json")
    assert (code, "--md: expected no --json with it" in errors) == (2, True)


@pytest.mark.parametrize(
    ("a", "b", "flags", "expected"),
    [
        ("low", "high", ["--fail_if", "worse"], 0),
        ("high", "low", ["--fail_if", "worse"], 1),
        ("high", "high", ["--fail_if", "worse"], 0),
        ("high", "high", ["--fail_if", "maybe_worse"], 1),
        ("high", "high", ["--fail_if", "maybe_worse", "--margin", "0.05"], 0),
        ("high", "low", ["--fail_if", "maybe_worse", "--margin", "0.7"], 1),
        ("high", "low", ["--fail_if", "worse", "--margin", "0.7"], 0),
        ("high", "low", ["--fail_if", "not_better", "--margin", "0.7"], 1),
        ("high", "high", ["--fail_if", "not_better"], 1),
        ("low", "high", ["--fail_if", "not_better"], 0),
        ("low", "high", ["--fail_if", "different"], 1),
        ("high", "high", ["--fail_if", "different"], 0),
        ("high", "low", [], 0),
    ],
)
def test_the_exit_code_follows_the_verdict(runs, capsys, a, b, flags, expected):
    assert printed(capsys, runs[a], runs[b], *flags)[0] == expected


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("high", "other", "--fail_if: expected runs that can be compared, got: --max_turns: 3 in A, 5 in B."),
        ("one", "one", "--fail_if: expected runs that can be compared, got: fewer than two tasks."),
    ],
)
def test_a_pipeline_gets_no_verdict_on_runs_that_are_not_comparable(runs, capsys, a, b, message):
    code, text, errors = printed(capsys, runs[a], runs[b], "--fail_if", "worse")
    assert (code, message in errors) == (2, True)
    assert "reward: " in text  # the report is printed all the same
    assert printed(capsys, runs[a], runs[b])[0] == 0


def test_wrong_arguments_are_one_line(runs, capsys):
    assert "expected two runs, got 3" in printed(capsys, *[runs["low"]] * 3)[2]
    assert "or a training with two evaluations, got one run with 0" in printed(capsys, runs["low"])[2]
    assert "--margin: expected a number >= 0" in printed(capsys, runs["low"], runs["low"], "--margin", "-1")[2]
    assert "expected a run directory" in printed(capsys, runs["low"], "nothing")[2]
