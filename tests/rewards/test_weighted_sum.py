"""Sums of rewards: weights, breakdown, and terms that failed. The defects are RM-Gallery's and OpenJudge's."""

import asyncio

import pytest

from agentenv.errors import ConfigError, ContractError, DataError, InfraError
from agentenv.rewards.grading import grade
from agentenv.rewards.groups.batch import Each
from agentenv.rewards.judges.asking import JudgeRetry
from agentenv.rewards.judges.pointwise import JudgeReward
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.rewards.weighted_sum import FAILED_TERMS, Term, WeightedSum
from tests.rewards.judges.rule_judges import Down, Rewarding

ANY = Response("any", label="4")


def fixed(value, bounds=(-10.0, 10.0), **more):
    result = value if isinstance(value, Exception) else RewardResult(value, **more)
    return Rewarding(result, bounds)


async def test_a_sum_is_weighted_and_its_parts_are_raw():
    terms = {"answer": Term(fixed(1.0), 0.9), "length": Term(fixed(-2.0), 0.1), "off": Term(fixed(5.0), 0.0)}
    reward = WeightedSum(terms)
    result = await reward.grade(ANY)
    assert result.reward == pytest.approx(0.7)
    assert dict(result.components) == {"answer": 1.0, "length": -2.0, "off": 5.0, FAILED_TERMS: 0.0}
    assert tuple(result.components) == reward.component_names


async def test_the_isolation_of_a_sum_is_the_weakest_of_its_terms():
    levels = {"remote": "remote", "uid": "uid", "none": "", "namespaces": "namespaces"}
    terms = {name: Term(fixed(1.0, isolation=level)) for name, level in levels.items()}
    assert (await WeightedSum(terms).grade(ANY)).isolation == "uid"


async def test_a_dead_judge_never_leaves_the_format_term_the_whole_reward():
    """Elsewhere {judge: .95, fmt: .05} with a judge that is down composes to 1.0: the mean over what is there."""
    judge = JudgeReward(Down(), retry=JudgeRetry(backoff_s=0.0))
    terms = {"judge": Term(judge, 0.95), "fmt": Term(fixed(1.0, score=1.0), 0.05)}
    result = await WeightedSum(terms).grade(ANY)
    assert (result.reward, result.score, result.status) == (None, None, Status.INFRA)
    assert (result.components["fmt"], result.components["judge"]) == (1.0, None)
    assert result.detail.startswith("judge: InfraError: judge: expected a reply in 3 attempts")
    optional = WeightedSum(terms | {"judge": Term(judge, 0.95, required=False)})
    result = await optional.grade(ANY)
    assert (result.reward, result.score) == (0.05, None)


@pytest.mark.parametrize(
    ("failures", "status"),
    [
        ([InfraError("down")], Status.INFRA),
        ([ValueError("bug")], Status.ERROR),
        ([DataError("no label")], Status.LABEL),
        ([InfraError("down"), DataError("no label")], Status.LABEL),
        ([InfraError("down"), ContractError("wrong code")], Status.ERROR),
        ([ContractError("wrong code"), DataError("no label")], Status.LABEL),
    ],
)
async def test_a_required_term_that_failed_is_the_whole_results_failure(failures, status):
    terms = {f"term{index}": Term(fixed(failure)) for index, failure in enumerate(failures)}
    result = await WeightedSum({"fine": Term(fixed(1.0))} | terms).grade(ANY)
    assert (result.reward, result.status) == (None, status)
    assert dict(result.components) == {"fine": 1.0} | dict.fromkeys(terms) | {FAILED_TERMS: float(len(failures))}


async def test_an_optional_term_that_failed_adds_nothing_and_is_counted():
    terms = {"main": Term(fixed(1.0), 2.0), "extra": Term(fixed(InfraError("down")), required=False)}
    result = await WeightedSum(terms).grade(ANY)
    assert (result.reward, result.status, result.detail) == (2.0, Status.OK, "extra: InfraError: down")
    assert dict(result.components) == {"main": 1.0, "extra": None, FAILED_TERMS: 1.0}


def test_a_term_that_hangs_fails_at_its_deadline(virtual_clock):
    class Hangs:
        bounds = (0.0, 1.0)

        async def grade(self, response):
            await asyncio.Event().wait()

    terms = {"main": Term(fixed(1.0)), "slow": Term(Hangs(), required=False)}
    assert virtual_clock.run(WeightedSum(terms, limit_s=60.0).grade(ANY)).reward == 1.0


async def test_terms_run_side_by_side():
    meeting = asyncio.Barrier(3)

    class Meets:
        bounds = (0.0, 1.0)

        async def grade(self, response):
            await asyncio.wait_for(meeting.wait(), 60)
            return RewardResult(1.0)

    assert (await WeightedSum({name: Term(Meets()) for name in "abc"}).grade(ANY)).reward == 3.0


async def test_status_answer_and_score_come_from_the_named_term():
    main = Rewarding(RewardResult(0.0, 0.25, Status.NO_ANSWER, extracted="4?", feedback="No answer."))
    terms = {"format": Term(fixed(1.0, score=1.0, feedback="Good form.")), "answer": Term(main)}
    result = await WeightedSum(terms, score_from="answer").grade(ANY)
    assert (result.score, result.status, result.extracted) == (0.25, Status.NO_ANSWER, "4?")
    assert result.feedback == "Good form.\nNo answer."


async def test_without_a_named_term_the_score_is_that_of_the_one_with_the_greatest_weight():
    terms = {
        "style": Term(fixed(1.0, score=1.0), 0.1),
        "answer": Term(fixed(0.0, score=0.5, status=Status.NO_ANSWER), 0.9, required=False),
        "penalty": Term(fixed(1.0, score=1.0), -5.0),
    }
    result = await WeightedSum(terms).grade(ANY)
    assert (result.score, result.status) == (0.5, Status.NO_ANSWER)
    for unknown in (fixed(0.0), fixed(InfraError("down"))):
        result = await WeightedSum(terms | {"answer": Term(unknown, 0.9, required=False)}).grade(ANY)
        assert (result.score, result.status) == (None, Status.OK)


async def test_a_sum_is_a_term_of_another():
    inner = WeightedSum({"x": Term(fixed(1.0)), "y": Term(fixed(InfraError("down")), required=False)})
    outer = WeightedSum({"inner": Term(inner, 2.0), "z": Term(fixed(3.0))})
    result = await outer.grade(ANY)
    assert result.reward == 5.0
    assert dict(result.components) == {
        "inner": 1.0, "inner/x": 1.0, "inner/y": None, f"inner/{FAILED_TERMS}": 1.0, "z": 3.0, FAILED_TERMS: 0.0,
    }  # fmt: skip
    assert tuple(result.components) == outer.component_names


async def test_components_are_the_same_no_matter_what_fails():
    inner = WeightedSum({"x": Term(Rewarding({"good": 1.0, "bad": InfraError("down"), "odd": DataError("label")}))})
    outer = WeightedSum({"inner": Term(inner), "z": Term(fixed(3.0))})
    keys = {tuple((await grade(outer, Response(text))).components) for text in ("good", "bad", "odd")}
    assert keys == {outer.component_names}


def test_bounds_are_declared_by_the_terms():
    terms = {"a": Term(fixed(0.0, (0.0, 1.0)), 0.95), "b": Term(fixed(0.0, (-1.0, 3.0)), -2.0)}
    assert WeightedSum(terms).bounds == pytest.approx((-6.0, 2.95))
    optional = terms | {"c": Term(fixed(0.0, (1.0, 2.0)), 1.0, required=False)}
    assert WeightedSum(optional).bounds == pytest.approx((-6.0, 4.95))
    endless = fixed(0.0, (-float("inf"), 0.0))
    assert WeightedSum({"a": Term(endless, -1.0), "b": Term(endless, 0.0)}).bounds == (0.0, float("inf"))


async def test_a_sum_that_no_float32_holds_is_not_a_reward():
    terms = {name: Term(fixed(3e38, (-1e39, 1e39)), 1.0) for name in "ab"}
    result = await WeightedSum(terms).grade(ANY)
    assert (result.reward, result.status, result.components["a"]) == (None, Status.INFRA, 3e38)


@pytest.mark.parametrize(
    ("terms", "options"),
    [
        ({}, {}),
        ({"a": fixed(1.0)}, {}),
        ({"a/b": Term(fixed(1.0))}, {}),
        ({FAILED_TERMS: Term(fixed(1.0))}, {}),
        ({"a": Term(fixed(1.0), required=False)}, {}),
        ({"a": Term(Each(fixed(1.0)))}, {}),
        ({"a": Term(fixed(1.0, None))}, {}),
        ({"a": Term(fixed(1.0), required="no")}, {}),
        ({"a": Term(fixed(1.0))}, {"score_from": "b"}),
        ({"a": Term(fixed(1.0))}, {"limit_s": 0}),
    ],
)
def test_wrong_terms_are_refused(terms, options):
    with pytest.raises(ConfigError):
        WeightedSum(terms, **options)
