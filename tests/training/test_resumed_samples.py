"""The run directory of a training that is resumed."""

import contextlib
from dataclasses import replace

import pytest

from agentenv.errors import ConfigError
from agentenv.runs.metrics import summarize
from agentenv.runs.records.directory import read_trajectories
from agentenv.runs.records.index import read_index
from agentenv.runs.records.steps import StepGroup, append_step, train_row
from agentenv.training.config import TrainConfig
from agentenv.training.logs.records import open_records
from tests.training.test_checkpoint import episode


@contextlib.contextmanager
def opened(folder, *, resume):
    config = TrainConfig.from_flags(env="math_retry", progress="none", resume=resume)
    with open_records(config, folder, {}, lambda text: None) as records:
        yield records


def learn(records, step, *ids, kept=True, has_line=True):
    """What the loop writes at a train step, in its order."""
    episodes = [episode(each) for each in ids]
    if kept:
        for each in episodes:
            records.samples.append(each)
    if has_line:
        groups = [StepGroup(each.group_id, (summarize(each),)) for each in episodes]
        row = train_row(step, groups, {}, kept=ids if kept else (), estimator="reinforce", credit="turn")
        append_step(records.folder, row)
        records.journal.log(step, {})


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "not kept"])
def test_a_resume_removes_the_episodes_of_the_steps_that_it_does_again(tmp_path, is_kept):
    with opened(tmp_path, resume=False) as records:
        learn(records, 1, "a/0", "b/0")
        learn(records, 2, "c/0", kept=is_kept)
        records.checkpoints.save(2, {}, [])
        learn(records, 3, "d/0")
        learn(records, 4, "e/0", has_line=False)
    early = ["a/0", "b/0", *(["c/0"] if is_kept else [])]
    with opened(tmp_path, resume=True) as records:
        assert [each.episode_id for each in read_trajectories(tmp_path)] == early
        again = episode("d/0")
        again.turns[0].result = replace(again.turns[0].result, reward=0.7)
        records.samples.append(again)
    assert [each.episode_id for each in read_trajectories(tmp_path)] == [*early, "d/0"]
    assert [(row[2], row[5]) for row in read_index(tmp_path)][-1] == ("d/0", 0.7)


def test_a_resume_keeps_the_episodes_of_a_training_that_wrote_no_lines_of_its_steps(tmp_path):
    with opened(tmp_path, resume=False) as records:
        records.samples.append(episode("a/0"))
        records.journal.log(1, {})
        records.checkpoints.save(1, {}, [])
    with opened(tmp_path, resume=True):
        assert [each.episode_id for each in read_trajectories(tmp_path)] == ["a/0"]


def test_a_training_that_ended_before_its_first_step_starts_again_without_resume(tmp_path):
    with opened(tmp_path, resume=False):
        pass
    with opened(tmp_path, resume=False) as records:
        learn(records, 1, "a/0", kept=False)
    with pytest.raises(ConfigError, match="expected no training there"), opened(tmp_path, resume=False):
        pass
