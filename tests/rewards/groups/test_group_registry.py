"""Group rewards by name, as `--group_reward` and verl's reward manager take them."""

import json

import pytest

from agentenv.errors import ConfigError
from agentenv.interop.verl.judges import judge_of
from agentenv.interop.verl.reward_manager import GroupGatherer
from agentenv.rewards.groups.batch import grade_group
from agentenv.rewards.groups.registry import GROUP_REWARDS, group_reward_from, names_group
from agentenv.rewards.types import Response
from agentenv.runs.config import GroupOptions
from agentenv.runs.group_rewards import open_grader
from agentenv.testing.tokenizers import CharTokenizer
from tests.rewards.judges.rule_judges import RuleJudge, between, longer

TEXTS = ["one", "seven", "four"]


def longest_first(shown):
    """The verdict, or the ranking, of a judge that likes long answers."""
    if between(shown, "response_a"):
        return longer(shown)
    texts = {place: between(shown, f"response_{place}") or "" for place in range(1, 4)}
    order = sorted(texts, key=lambda place: -len(texts[place]))
    return "Ranking: " + " > ".join(f"[{place}]" for place in order)


@pytest.mark.parametrize("name", GROUP_REWARDS)
async def test_every_name_grades_a_group_by_its_judge(name):
    reward = group_reward_from({name: {"judge": RuleJudge(longest_first)}})
    graded = await grade_group(reward, [Response(text, prompt="Why?") for text in TEXTS])
    values = [result.reward for result in graded.results]
    assert graded.status == "ok"
    assert sorted(range(3), key=values.__getitem__) == [0, 2, 1]
    assert values[0] < 0 < values[1]


@pytest.mark.parametrize("name", GROUP_REWARDS)
async def test_the_same_setting_means_the_same_in_run_train_and_verl(name):
    spec = {name: {"judge": {"base_url": "http://127.0.0.1:9/v1", "model": "m"}}}
    grader = open_grader(GroupOptions(json.dumps(spec)), CharTokenizer(), concurrency=4)
    managed = judge_of(spec)
    assert type(grader.reward) is type(managed)
    assert GroupGatherer(managed, limit_s=1.0, wait_s=1.0)


def test_a_tournament_is_one_against_a_few():
    judge = RuleJudge(longest_first)
    assert group_reward_from({"tournament": {"judge": judge}}).opponents == 4
    assert group_reward_from({"pairwise": {"judge": judge}}).opponents is None
    assert group_reward_from({"bradley_terry": {"judge": judge}}).measure == "bradley_terry"


@pytest.mark.parametrize("spec", ["pairwise", {"pairwise": {}}, {"pairwise": {"judge": 7}}, {"pairwise": [1]}])
def test_wrong_options_are_an_error_that_names_the_reward(spec):
    with pytest.raises(ConfigError, match=r"pairwise|PairwiseJudge"):
        group_reward_from(spec)


@pytest.mark.parametrize("spec", ["math", {}, {"a": 1, "b": 2}, None, 7, "file.py:pairwise", {"sum": {}}])
def test_other_settings_name_no_group_reward(spec):
    assert not names_group(spec)


def test_a_reward_of_single_answers_grades_each():
    grader = open_grader(GroupOptions("length"), CharTokenizer(), concurrency=4)
    assert hasattr(grader.reward, "grade_group")
    assert open_grader(GroupOptions(), CharTokenizer(), concurrency=4) is None
