"""`--group_reward` of `agentenv run`: when groups are graded, what is recorded, and what a resumed run does."""

import importlib
import json
import sys

import pytest

import agentenv
from agentenv import AgentInstance, ScriptedEngine, StepResult
from agentenv.errors import ConfigError, DataError, RunStopped
from agentenv.runs.records.directory import read_trajectories
from tests.drivers import command, write_rows

LENGTHS = """
calls = []

def longest(prompt, responses, extras):
    calls.append((prompt, list(responses), extras))
    return [float(len(text)) for text in responses], {"comparison_score": [float(len(text)) for text in responses]}
"""


class TwoTurns(AgentInstance):
    """Pays 1.0 for each of two actions; the action `bad` raises."""

    async def step(self, states):
        if "bad" in states["action_text"]:
            raise ValueError("a bug")
        last = states["turn_index"] == 1
        return StepResult("" if last else "On.", reward=1.0, score=0.5, terminated=last, info={"n": 2})


class OneTurn(AgentInstance):
    """Pays nothing."""

    async def step(self, states):
        if "bad" in states["action_text"]:
            raise ValueError("a bug")
        return StepResult(terminated=True)


def by_sample(*texts):
    """An engine whose n-th request is answered with the n-th text, and again from the first."""
    return ScriptedEngine(lambda request: texts[request.call_index % len(texts)])


ROWS = [{"prompt": f"Question {i}?", "label": "", "reference": "xx"} for i in range(3)]


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """A file of group rewards in the working directory, as a module."""
    from agentenv.rewards.loading import load_function

    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(LENGTHS)
    load_function("rewards.py:longest")
    return sys.modules[load_function("rewards.py:longest").__module__]


def run(env=OneTurn, engine=None, rows=ROWS, **flags):
    more = {"n": 3, "concurrency": 1, "progress": "none", "group_reward": "rewards.py:longest", "max_error_share": 1}
    return agentenv.rollout(env, rows, engine=engine or by_sample("x", "xx", "xxx"), **(more | flags))


def numbers(run):
    return [each.reward for each in run]


# --- what a group gets --------------------------------------------------------------------------------------------


def test_all_answers_of_a_task_are_graded_together_and_the_reward_lands_on_the_last_action(rewards):
    done = run(TwoTurns, by_sample("x", "xx", "x", "xxx", "x", "x"), ROWS[:1])
    ((prompt, responses, extras),) = rewards.calls
    assert "Question 0?" in prompt
    assert responses == ["xx", "xxx", "x"]
    assert [extra["reference"] for extra in extras] == ["xx"] * 3
    assert numbers(done) == [4.0, 5.0, 3.0], "1.0 for each turn, and the group's"
    first = done[0]
    assert [turn.result.reward for turn in first.turns] == [1.0, 3.0]
    rewarded = {index: value for index, value in enumerate(first.segments[0].rewards) if value}
    assert rewarded == {turn.end - 1: turn.result.reward for turn in first.turns}
    assert first.turns[-1].result.info == {"n": 2, "group/reward": 2.0, "group/comparison_score": 2.0}
    assert first.score == 0.5
    assert done.metrics.info["group/reward"]["last"] == 2.0


def test_a_sum_that_is_no_reward_is_a_failure_of_the_group_and_never_a_number(rewards, monkeypatch):
    monkeypatch.setattr(OneTurn, "step", lambda self, states: StepResult(reward=3e38, terminated=True))
    done = run(rows=ROWS[:1], group_reward=lambda prompt, responses, extras: ([3e38] * len(responses), {}))
    assert numbers(done) == [None] * 3
    assert {(each.error.type, each.error.where) for each in done} == {("GroupFailed", "group_reward")}


def test_a_group_function_that_raises_is_its_authors_error_with_file_and_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raises.py").write_text("def raises(prompt, responses, extras):\n    return 1 / 0\n")
    done = run(rows=ROWS[:1], group_reward="raises.py:raises")
    assert {each.error.kind for each in done} == {"contract"}
    assert "ZeroDivisionError: division by zero at " in done[0].error.message
    assert "raises.py:2" in done[0].error.message


def test_a_reference_for_a_reward_that_compares_nothing_is_refused(rewards):
    with pytest.raises(ConfigError, match=r"--reference_key: expected a --group_reward that compares answers"):
        run(group_reward="length", reference_key="reference")


def test_a_reference_gives_win_rates_and_is_no_answer(rewards):
    done = run(reference_key="reference")
    assert len(rewards.calls) == 3
    assert all(responses == ["x", "xx", "xxx", "xx"] for _, responses, _ in rewards.calls)
    assert done.metrics.info["reference/win_rate"]["last"] == pytest.approx(1 / 3)
    assert done.metrics.info["reference/win_or_tie_rate"]["last"] == pytest.approx(2 / 3)


def test_a_reference_that_is_not_there_or_no_text_is_an_error_before_anything_runs(rewards):
    with pytest.raises(ConfigError, match=r"--reference_key: expected a column of the data, got 'nope'"):
        run(reference_key="nope")
    with pytest.raises(DataError, match=r"expected text in column 'reference', got 7"):
        run(rows=[{"prompt": "q", "label": "", "reference": 7}], reference_key="reference")
    with pytest.raises(ConfigError, match="--incomplete_groups: expected --group_reward with it"):
        run(group_reward=None, incomplete_groups="drop")
    with pytest.raises(ConfigError, match="--incomplete_groups: expected one of grade, drop, got 'droped'"):
        run(incomplete_groups="droped")
    assert not rewards.calls


def test_from_python_a_group_reward_may_be_a_function_or_settings(rewards):
    assert numbers(run(group_reward=rewards.longest)) == [1.0, 2.0, 3.0] * 3
    assert "group/length" in run(group_reward={"length": {"unit": "chars"}}).metrics.info
    with pytest.raises(ConfigError, match=r"--group_reward: expected one of pairwise, .* Did you mean 'pairwise'\?"):
        run(group_reward="pair_wise")


@pytest.mark.parametrize(("policy", "expected"), [("grade", [1.0, None, 3.0]), ("drop", [None, None, None])])
def test_a_group_with_a_failed_member_is_graded_without_it_or_dropped(rewards, policy, expected):
    done = run(engine=by_sample("x", "bad", "xxx"), rows=ROWS[:1], incomplete_groups=policy)
    assert numbers(done) == expected
    assert done.metrics.num_rewarded == 3 - expected.count(None)
    errors = [each.error and each.error.type for each in done]
    assert errors == (
        [None, "ValueError", None] if policy == "grade" else ["GroupDropped", "ValueError", "GroupDropped"]
    )


# --- groups do not wait for each other ----------------------------------------------------------------------------

WAITS = """
import asyncio

others, graded = asyncio.Event(), []

async def waits(prompt, responses, extras):
    if "Question 0?" in prompt:
        await others.wait()
    graded.append(prompt)
    if len(graded) == 2:
        others.set()
    return [1.0] * len(responses), {}
"""


def test_the_other_groups_do_not_wait_for_a_slow_one(rewards, tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    done = run(group_reward="waits.py:waits")
    assert numbers(done) == [1.0] * 9, (
        "the first group was graded after the others, although one episode runs at a time"
    )


def test_a_grader_that_fails_counts_into_the_share_of_failed_episodes(rewards, tmp_path):
    (tmp_path / "raises.py").write_text("def raises(prompt, responses, extras):\n    raise KeyError('no')\n")
    with pytest.raises(RunStopped, match=r"expected at most 20% .* got 9 of 9"):
        run(group_reward="raises.py:raises", max_error_share=0.2)


# --- records and resuming -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_function_as_group_reward_is_recorded_by_its_name_so_that_another_process_resumes(
    rewards, tmp_path, monkeypatch
):
    (tmp_path / "by_length.py").write_text(LENGTHS)
    monkeypatch.syspath_prepend(tmp_path)
    write_rows(tmp_path / "tasks.jsonl", ROWS[:1])
    flags = {"engine": "scripted", "rows": "tasks.jsonl", "out": "out"}
    given = importlib.import_module("by_length").longest
    before = numbers(run(group_reward=given, **flags))
    log = tmp_path / "out/trajectories.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]))  # three answers, ungraded
    del sys.modules["by_length"]  # another process
    assert command(["run", "--resume", "--out", "out", "--progress", "none"]) == 0
    assert [each.reward for each in read_trajectories("out")] == before
    again = importlib.import_module("by_length")
    assert again.longest is not given
    assert len(again.calls) == 1
    assert numbers(run(group_reward=again.longest, resume=True, **flags)) == before


def test_an_answer_is_on_the_disk_before_its_group_is_graded_and_has_one_record_that_counts(rewards, tmp_path):
    run(out="out")
    rows = [json.loads(line)["episode"] for line in (tmp_path / "out/trajectories.jsonl").read_text().splitlines()]
    kinds = [(row["episode_id"], row["error"] and row["error"]["type"], row["reward"]) for row in rows]
    for index, reward in enumerate([1.0, 2.0, 3.0]):
        key = f"000000/{index}"
        assert [kind for kind in kinds if kind[0] == key] == [(key, "GroupPending", None), (key, None, reward)]
    assert rows[0]["stop_reason"] == "terminated"
    assert [each.reward for each in read_trajectories(tmp_path / "out")] == [1.0, 2.0, 3.0] * 3


def test_a_resumed_run_samples_no_ungraded_answer_again_and_grades_no_group_twice(rewards, tmp_path):
    (tmp_path / "half.py").write_text(
        "import pathlib\n"
        "def half(prompt, responses, extras):\n"
        "    with open('asked', 'a') as file: print(prompt.split()[-1], file=file)\n"
        "    if not pathlib.Path('up').exists() and '1?' in prompt: raise OSError('the judge is down')\n"
        "    return [float(len(text)) for text in responses], {}\n"
    )
    flags = {"group_reward": "half.py:half", "out": "out"}
    assert numbers(run(**flags)) == [1.0, 2.0, 3.0, None, None, None, 1.0, 2.0, 3.0]
    (tmp_path / "up").touch()
    engine = by_sample("never")
    done = run(engine=engine, resume=True, **flags)
    assert numbers(done) == [1.0, 2.0, 3.0] * 3
    assert not engine.requests
    assert (tmp_path / "asked").read_text().split() == ["0?", "1?", "2?", "1?"]
    assert done.metrics.num_no_reward == 0


def test_a_resumed_run_leaves_a_graded_group_closed_and_completes_a_dropped_one(rewards, tmp_path):
    texts = ["x", "bad", "xxx"]
    closed = run(engine=by_sample(*texts), rows=ROWS[:1], out="closed")
    engine = by_sample("xx")
    again = run(engine=engine, rows=ROWS[:1], out="closed", resume=True)
    assert numbers(closed) == numbers(again) == [1.0, None, 3.0]
    assert not engine.requests
    drop = {"rows": ROWS[:1], "out": "dropped", "incomplete_groups": "drop"}
    run(engine=by_sample(*texts), **drop)
    done = run(engine=engine, resume=True, **drop)
    assert numbers(done) == [1.0, 2.0, 3.0]
    assert len(engine.requests) == 1


def test_a_group_that_an_interruption_cut_is_completed_and_graded_whole(rewards, tmp_path):
    whole = run(rows=ROWS[:1], out="out")
    log = tmp_path / "out/trajectories.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))  # two of three answers, ungraded
    rewards.calls.clear()
    engine = by_sample("xxx")
    done = run(engine=engine, rows=ROWS[:1], out="out", resume=True)
    assert numbers(done) == numbers(whole) == [1.0, 2.0, 3.0]
    assert [responses for _, responses, _ in rewards.calls] == [["x", "xx", "xxx"]]
    assert len(engine.requests) == 1


def test_a_thought_that_the_prompt_opened_is_part_of_the_answer(rewards):
    run(rows=[{"prompt": "Question 0? <think>", "label": ""}], apply_chat_template=False)
    assert [responses for _, responses, _ in rewards.calls] == [["<think>x", "<think>xx", "<think>xxx"]]
    said = []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        said.append(solution_str)
        return 1.0

    run(rows=[{"prompt": "Question 0? <think>", "label": ""}], apply_chat_template=False, group_reward=compute_score)
    assert sorted(said) == ["x", "xx", "xxx"], "a function of verl's kind gets the text as verl passes it"
