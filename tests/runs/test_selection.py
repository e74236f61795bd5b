"""Episodes that are chosen: every filter of filters.json, the extremes, tasks, and a record that is never in memory."""

import json
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.errors import ConfigError
from agentenv.runs.records.directory import RunWriter
from agentenv.runs.records.filters import GROUP_COLUMNS, INDEX_COLUMNS, parse_filter
from agentenv.runs.records.selection import Selection, select
from agentenv.runs.records.tables import EPISODE_COLUMNS, TURN_COLUMNS
from tests.runs.filter_run import episode, write_filter_run

LANGUAGE = json.loads((Path(__file__).parent / "filters.json").read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_filter_run(tmp_path_factory.mktemp("run"))


def ids(run, **selection):
    return [trajectory.episode_id for trajectory in select(run, Selection(**selection))]


@pytest.mark.parametrize(("text", "expected"), LANGUAGE["cases"])
def test_a_filter_keeps_these_episodes(run, text, expected):
    assert ids(run, where=parse_filter(text)) == expected


def test_each_column_has_a_case_so_that_the_page_is_asked_for_it_too():
    asked = {column for text, kept in LANGUAGE["cases"] if kept for column in parse_filter(text).columns}
    turns = {f"turn.{name}" for name in TURN_COLUMNS}
    assert not {*EPISODE_COLUMNS, *INDEX_COLUMNS, *GROUP_COLUMNS, *turns} - asked


@pytest.mark.parametrize(("text", "message"), LANGUAGE["errors"])
def test_a_wrong_filter_is_refused(run, text, message):
    with pytest.raises(ConfigError, match=f"^--where: .*{re.escape(message)}"):
        ids(run, where=parse_filter(text))


def test_a_key_of_info_that_a_run_does_not_have_is_no_error_where_no_episode_has_info(tmp_path):
    with RunWriter.open(tmp_path, {}) as writer:
        writer.append(episode("a/0", "?", ("x", 1.0, {})))
    assert ids(tmp_path, where=parse_filter("info.n=1")) == []


def test_the_worst_and_the_best_are_in_order_and_have_a_reward(run):
    assert ids(run, worst=2) == ["a/1", "b/0"]
    assert ids(run, best=3) == ["a/0", "b/1", "d/0"]
    assert ids(run, best=9) == ["a/0", "b/1", "d/0", "d/1", "d/2", "b/0", "a/1"]
    assert ids(run, worst=1, where=parse_filter("task=b")) == ["b/0"]


def test_failed_episodes_tasks_and_texts_are_found(run):
    assert ids(run, failed=True) == ["c/0"]
    assert ids(run, task="b") == ["b/0", "b/1"]
    assert ids(run, grep=re.compile(r"final \w+$")) == ["b/0"]
    with pytest.raises(ConfigError, match=r"--task: expected the id of a task of .*, got 'e'"):
        ids(run, task="e")


def test_of_a_task_that_a_training_did_not_keep_the_message_says_that_it_keeps_some(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    for folder in (tmp_path, tmp_path / "eval"):
        with RunWriter.open(folder, {}) as writer:
            writer.append(episode("a@0/0", "?", ("x", 1.0, {})))
        with pytest.raises(ConfigError, match=r"'b'\. The first is 'a@0'\. .* keeps .* as --save_samples says\.$"):
            ids(folder, task="b")


def test_a_task_is_named_by_its_number_and_without_the_pass_of_a_training(tmp_path):
    with RunWriter.open(tmp_path, {}) as writer:
        for episode_id in ("000003/0", "000003@1/0", "000004/0"):
            writer.append(episode(episode_id, "?", ("x", 1.0, {})))
    assert ids(tmp_path, task="3") == ids(tmp_path, task="000003") == ["000003/0", "000003@1/0"]
    assert ids(tmp_path, task="000003@1") == ["000003@1/0"]


def test_a_task_of_an_evaluation_is_named_by_its_step_too(tmp_path):
    with RunWriter.open(tmp_path, {}) as writer:
        for step in range(2):
            found = episode(f"000003@{step}/0", "?", ("x", 1.0, {}))
            writer.append(replace(found, task=replace(found.task, task_id="000003")))
    assert ids(tmp_path, task="000003@1") == ["000003@1/0"]
    assert len(ids(tmp_path, task="000003")) == 2
    with pytest.raises(ConfigError, match=r"got '000003@2'\. Did you mean '000003@\d'\?"):
        ids(tmp_path, task="000003@2")


def test_the_train_step_is_no_column_and_the_message_names_what_has_it():
    with pytest.raises(ConfigError, match=r"got 'step'\. .* version=30 .* group:\*@31 "):
        parse_filter("step=31")


def test_a_search_holds_one_episode_at_a_time(tmp_path):
    text, num = "word " * 20_000, 60
    with RunWriter.open(tmp_path, {}) as writer:
        for number in range(num):
            writer.append(episode(f"{number}/0", text, (f"needle {number}", 1.0, {})))
    found = 0
    tracemalloc.start()
    for _ in select(tmp_path, Selection(grep=re.compile("needle"), where=parse_filter("reward=1"))):
        found += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == num
    assert peak < num * len(text) / 4
