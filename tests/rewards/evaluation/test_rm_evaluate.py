"""Evaluation: the environment's way of asking, failures that are not wrong answers, a log that goes on."""

import asyncio
import json

import pytest

from agentenv.errors import ConfigError, ContractError, DataError, InfraError, RunStopped
from agentenv.rewards.evaluation.evaluate import EvaluationLog, ItemOutcome, RewardModel, evaluate
from agentenv.rewards.judges.asking import JudgeRetry
from agentenv.rewards.judges.pointwise import PointwiseReward
from tests.rewards.evaluation.scorers import Scripted, model, pair
from tests.rewards.judges.rule_judges import Comparing, RuleJudge
from tests.rewards.models.tiny import said

ITEMS = [pair("a longer one", "short", index=0), pair("no", "cut it here", index=1), pair("abc", "abd", index=2)]


async def test_every_item_has_its_scores_in_order_the_chosen_first():
    rm = model()
    outcomes = await evaluate(rm, ITEMS)
    assert said("a longer one", question="q") in rm.scorer.asked
    assert [outcome.scores for outcome in outcomes] == [(12.0, 5.0), (2.0, 11.0), (3.0, 3.0)]
    assert [outcome.tie for outcome in outcomes] == [False, False, True]
    assert outcomes[1].truncated == (False, True)


def failing(error):
    def value(text):
        if "bad" in text:
            raise error
        return len(text)

    return value


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (failing(DataError("too long")), "data: too long"),
        (failing(InfraError("status 500")), "infra: InfraError: status 500"),
        (failing(ContractError("a function raised")), "contract: a function raised"),
        (failing(RuntimeError("a bug")), "contract: ModelReward: expected a reward, got RuntimeError: a bug at "),
        (lambda text: float("nan") if "bad" in text else 1.0, "infra"),
        (lambda text: float("inf") if "bad" in text else 1.0, "infra"),
    ],
)
async def test_anything_that_cannot_be_scored_has_an_error_and_costs_no_other(value, kind):
    items = [pair("good", "bad", index=0), pair("good", "fine", index=1)]
    failed, fine = await evaluate(model(value), items)
    assert failed.scores[1] is None
    assert failed.scores[0] is not None
    assert failed.error.startswith(kind)
    assert (failed.known, failed.tie) == (None, False)
    assert fine.error == ""


async def test_a_scorer_that_hangs_is_an_error_after_its_time():
    class Hangs(Scripted):
        async def score(self, conversation):
            await asyncio.Event().wait()

    (outcome,) = await evaluate(RewardModel("hangs", scorer=Hangs()), ITEMS[:1], limit_s=0.05)
    assert outcome.scores == (None, None)
    assert outcome.error.startswith("infra: ")
    assert "0.05" in outcome.error


async def test_many_items_are_asked_about_at_once_but_no_more_than_said():
    rm = model()
    await evaluate(rm, [pair("a", "b", index=place) for place in range(40)], max_concurrent=4)
    assert 4 <= rm.scorer.most <= 8


# --- judges and rewards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compare", [lambda a, b: None, lambda a, b: float("nan")])
async def test_a_comparison_without_a_verdict_is_an_error(compare):
    (outcome,) = await evaluate(RewardModel("judge", comparer=Comparing(compare)), ITEMS[:1])
    assert outcome.scores == (None, None)
    assert outcome.error.startswith("infra: ")


async def test_a_judge_that_scores_is_asked_about_each_answer():
    judge = RuleJudge(lambda asked: f"Score: {9 if 'longer' in asked else 'x'}/10")
    reward = PointwiseReward(judge, retry=JudgeRetry(1))
    first, second, _ = await evaluate(RewardModel("judge", reward=reward), ITEMS)
    assert first.scores == (pytest.approx(8 / 9), None)
    assert first.error.startswith("infra: ")
    assert second.scores == (None, None)


async def test_a_judge_that_compares_takes_pairs_only():
    with pytest.raises(ConfigError, match="judge-score"):
        await evaluate(RewardModel("judge", comparer=Comparing(lambda a, b: 1.0)), [pair(["a"], ["b", "c", "d"])])


# --- the log ----------------------------------------------------------------------------------------------------------

CONFIG = {"rm": "a", "data_sha256": "1"}
DONE = ItemOutcome(0, "x", "s", (1.0, 0.5), 1, (False, True))
FAILED = ItemOutcome(1, "y", "s", (1.0, None), 1, (False, False), "infra: 500")


def written(folder, *outcomes, resume=False, config=CONFIG):
    log = EvaluationLog(folder, config, resume=resume)
    for outcome in outcomes:
        log.write(outcome)
    log.close()
    return log


def test_a_line_has_scores_tie_truncation_and_error(tmp_path):
    written(tmp_path / "o", DONE, FAILED)
    first, second = [json.loads(line) for line in (tmp_path / "o" / "items.jsonl").read_text().splitlines()]
    assert first == {
        "index": 0, "item_id": "x", "subset": "s", "scores": [1.0, 0.5], "num_chosen": 1,
        "truncated": [False, True], "error": "", "tie": False,
    }  # fmt: skip
    assert second["error"] == "infra: 500"
    assert ItemOutcome.from_dict(first) == DONE


def test_failed_and_torn_items_are_evaluated_again(tmp_path):
    written(tmp_path, DONE, FAILED)
    with (tmp_path / "items.jsonl").open("a") as file:
        file.write('{"index": 2, "sco')
    log = written(tmp_path, ItemOutcome(1, "y", "s", (1.0, 2.0), 1, (False, False)), resume=True)
    assert log.done == {0: DONE}
    assert [item.index for item in ITEMS if item.index not in log.done] == [1, 2]
    lines = [json.loads(line)["index"] for line in (tmp_path / "items.jsonl").read_text().splitlines()]
    assert lines == [0, 1, 1]
    assert written(tmp_path, resume=True).done.keys() == {0, 1}


def test_another_evaluation_is_not_mixed_into_one_that_is_there(tmp_path):
    written(tmp_path, DONE)
    with pytest.raises(ConfigError, match="Pass --resume"):
        written(tmp_path)
    with pytest.raises(ConfigError, match="expected its rm, which is 'a', got 'b'"):
        written(tmp_path, resume=True, config=CONFIG | {"rm": "b"})
    with pytest.raises(ConfigError, match="expected its dtype, which is None, got 'float16'"):
        written(tmp_path, resume=True, config=CONFIG | {"dtype": "float16"})


async def test_a_disk_that_is_full_ends_the_evaluation_and_says_so(tmp_path):
    log = EvaluationLog(tmp_path, CONFIG)
    log.close()
    log._file = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(RunStopped, match="Free disk space"):
        await evaluate(model(), ITEMS, on_outcome=log.write)
    log.close()


@pytest.mark.parametrize("text", ["[1]\n", "{}\n", "not json\n", '{"index": 0, "scores": 3}\n'])
def test_a_log_of_something_else_is_named_as_such(tmp_path, text):
    written(tmp_path)
    (tmp_path / "items.jsonl").write_text(text)
    with pytest.raises(DataError):
        written(tmp_path, resume=True)
