"""The tutorial's reward function; rows 19 to 23 of the RM-Gallery table."""

import pytest

from agentenv.errors import ConfigError, ContractError, DataError
from agentenv.rewards.groups.batch import grade_groups
from agentenv.rewards.groups.function import FunctionGroupReward
from agentenv.rewards.groups.rm_gallery import (
    create_rm_gallery_reward_function,
    group_rm_gallery_grader,
    rm_gallery_grader,
)
from agentenv.rewards.types import Response
from tests.rewards.judges.rule_judges import Down, RuleJudge, ScriptedJudge, longer

SEED_KEYS = [
    "reward_principle", "reward_format", "reward_ngram", "thought_lengths", "scores_thought_length",
    "scores_total_lengths",
]  # fmt: skip
OURS = ["comparison_score", "reward_valid"]
STATISTICS = ["reward_mean", "reward_std", "reward_min", "reward_max"]
GOOD = "<think>I add them up.</think><answer>It is four.</answer>"


def principled(*scores):
    """A grader of fixed scores."""

    def grader(prompt, responses, extras=None, **kwargs):
        return list(scores), [{"prompt": prompt, "kwargs": kwargs}] * len(scores)

    return grader


def test_the_sum_is_the_tutorials__row_19():
    reward_func = create_rm_gallery_reward_function(grader=principled(0.5, -1.0), return_statistics=False)
    scores, info = reward_func("q", [GOOD, "a b c " * 4])
    assert list(info) == SEED_KEYS + OURS
    assert info["reward_principle"] == info["comparison_score"] == [0.5, -1.0]
    assert info["reward_format"] == [1.0, 0.0]
    assert info["reward_ngram"] == [0.0, pytest.approx(-0.5833, abs=1e-4)]
    assert info["thought_lengths"] == [len("I add them up."), 0.0]
    assert info["reward_valid"] == [1.0, 1.0]
    lengths, ngrams = info["scores_total_lengths"], info["reward_ngram"]
    assert scores == pytest.approx([0.95 * 0.5 + 0.05 + lengths[0] + ngrams[0], -0.95 + lengths[1] + ngrams[1]])


def test_the_length_of_thoughts_is_only_logged__row_19():
    reward_func = create_rm_gallery_reward_function(grader=principled(0.0, 0.0))
    (first, second), info = reward_func(
        "q", ["<think></think>twenty characters ..", "twenty characters ..<think></think>"]
    )
    assert info["scores_thought_length"][0] < 0.0
    assert first == second


def test_lists_are_made_where_there_are_none__row_19():
    reward_func = create_rm_gallery_reward_function(
        grader=principled(1.0), return_details=True, return_statistics=False
    )
    scores, info, details = reward_func("q", GOOD, temperature=1)
    assert (len(scores), info["reward_principle"]) == (1, [1.0])
    assert details == [{"prompt": "q", "kwargs": {"temperature": 1}}]


@pytest.mark.parametrize("invalid", [-999.0, None, float("nan"), float("inf")])
def test_an_invalid_principle_score_is_the_whole_score__row_20(invalid):
    reward_func = create_rm_gallery_reward_function(grader=principled(1.0, invalid))
    scores, info = reward_func("q", [GOOD, GOOD])
    assert scores[1] == -999.0
    assert (info["reward_principle"][1], info["comparison_score"][1]) == (-999.0, -999.0)
    assert info["reward_valid"] == [1.0, 0.0]
    assert info["reward_format"] == [1.0, 1.0]
    assert info["reward_mean"] == [scores[0]] * 2


def test_statistics_are_those_of_the_group_for_each_response__row_12_and_21():
    reward_func = create_rm_gallery_reward_function(grader=principled(1.0, 0.0, -999.0))
    scores, info = reward_func("q", ["ten letters", "ten letters", "z"])
    assert list(info) == SEED_KEYS + OURS + STATISTICS
    assert scores == [0.95, 0.0, -999.0]
    assert [info[name] for name in STATISTICS] == [[0.475] * 3, [0.475] * 3, [0.0] * 3, [0.95] * 3]
    scores, info = create_rm_gallery_reward_function(grader=principled(-999.0))("q", ["x"])
    assert [info[name] for name in STATISTICS] == [[-999.0]] * 4


def test_the_group_grader_is_a_tournament__row_23():
    scores, details = group_rm_gallery_grader(["q"], ["one", "three", "three", "<think>"], judge=RuleJudge(longer))
    assert scores == pytest.approx([-1 / 3, 2 / 3, 2 / 3, -1.0])
    assert [each["n_valid"] for each in details] == [6.0] * 4


def test_the_single_grader_is_the_share_of_principles__row_23():
    judge = ScriptedJudge("1: NO\n2: YES\n3: YES", "1: YES\n2: YES\n3: YES")
    scores, details = rm_gallery_grader("q", ["one", "two"], [{}, {}], judge=judge)
    assert (scores, details[0]["criterion_1"]) == (pytest.approx([2 / 3, 1.0]), 0.0)


def test_single_responses_are_judged_by_principles_where_asked__row_19():
    judge = ScriptedJudge("1: NO\n2: NO\n3: YES")
    _, info = create_rm_gallery_reward_function(use_group_reward=False, judge=judge)("q", ["x"])
    assert info["reward_principle"] == info["comparison_score"] == pytest.approx([1 / 3])


@pytest.mark.parametrize("use_group_reward", [True, False])
def test_a_judge_that_is_down_leaves_no_score__row_20(use_group_reward):
    class Refuses:
        async def complete(self, messages):
            raise ConnectionError("HTTP 503")

    reward_func = create_rm_gallery_reward_function(use_group_reward, True, judge=Refuses())
    scores, info, details = reward_func("q", [GOOD, "other"])
    assert scores == [-999.0, -999.0]
    assert info["reward_valid"] == [0.0, 0.0]
    assert "HTTP 503" in details[0]["detail"]
    assert details[0]["status"] == "infra"


async def test_as_a_group_reward_with_a_reference__row_10_and_11():
    reward = FunctionGroupReward(create_rm_gallery_reward_function(judge=RuleJudge(longer)), kwargs={"max_workers": 8})
    responses = [Response(text, prompt="q") for text in ("one", "three", "seventeen")]
    found = await grade_groups(reward, responses, "kkk", references={"k": "three"})
    assert [result.components["comparison_score"] for result in found.results] == pytest.approx([-1.0, 0.0, 1.0])
    assert [result.components["win"] for result in found.results] == [0.0, 0.0, 1.0]
    assert [result.components["win_and"] for result in found.results] == [0.0, 1.0, 1.0]


def test_rules_only_need_no_judge__row_18():
    scores, info = create_rm_gallery_reward_function(rules_only=True)("q", [GOOD])
    assert scores == info["comparison_score"] == pytest.approx([0.05 + info["scores_total_lengths"][0]])
    assert info["reward_valid"] == [1.0]


@pytest.mark.parametrize(
    "arguments", [{}, {"judge": Down(), "rules_only": True}, {"judge": Down(), "grader": principled(1.0)}]
)
def test_exactly_one_source_of_scores_is_needed(arguments):
    with pytest.raises(ConfigError, match="one of judge, grader and rules_only"):
        create_rm_gallery_reward_function(**arguments)


@pytest.mark.parametrize("responses", [None, [None], ["x", 3], 5])
def test_a_response_that_is_not_text_is_not_judged_as_one(responses):
    with pytest.raises(DataError, match="responses: expected a text"):
        create_rm_gallery_reward_function(rules_only=True)("q", responses)


@pytest.mark.parametrize("answer", [0.5, ([0.5], []), (["0.5", 1.0], []), ("ab", []), None])
def test_a_grader_that_returns_no_score_for_each_is_refused(answer):
    reward_func = create_rm_gallery_reward_function(grader=lambda prompt, responses, extras=None, **kwargs: answer)
    with pytest.raises(ContractError, match="grader"):
        reward_func("q", ["x", "y"])
