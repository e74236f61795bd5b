"""What judges are asked, how votes and orders are put together; the defects are ROLL's, RM-Gallery's and NeMo's."""

import asyncio
import json
from dataclasses import replace

import pytest

from agentenv import AgentInstance, ScriptedEngine, StepResult
from agentenv.core.types import SamplingParams
from agentenv.errors import AgentEnvError, ConfigError, InfraError
from agentenv.rewards import grading
from agentenv.rewards.grading import grade, grade_all
from agentenv.rewards.groups.batch import Each
from agentenv.rewards.judges.asking import JudgeRetry, Voting, ask
from agentenv.rewards.judges.pointwise import Criterion, JudgeReward, PointwiseReward, RubricReward, read_shares
from agentenv.rewards.judges.protocol import (
    JudgeRefused,
    JudgeTimeout,
    JudgeUnavailable,
    JudgeUnclear,
    JudgeUsage,
    ReplyIndex,
)
from agentenv.rewards.judges.templates import read_yes_or_no
from agentenv.rewards.registry import reward_from
from agentenv.rewards.routing import Router
from agentenv.rewards.rules.format import ThinkFormatReward
from agentenv.rewards.types import Response, Status
from agentenv.rewards.weighted_sum import Term, WeightedSum
from agentenv.runs.rollout import arollout
from agentenv_envs.verify import Verify
from tests.rewards.judges.rule_judges import Down, ScriptedJudge, between
from tests.rewards.judges.servers import chat_server
from tests.rewards.models.rm_servers import Status as Answered

QUICK = JudgeRetry(backoff_s=0.0)
ONCE = JudgeRetry(attempts=1)
ROW = Response("The answer is 4.", label="4", prompt="2 + 2?")


# --- one response ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "reward"), [("Score: 10/10", 1.0), ("Score: 1", 0.0), ("Score: 5.5/10", 0.5), ("Score: 11", None)]
)
async def test_scores_become_zero_to_one(reply, reward):
    result = await grade(PointwiseReward(ScriptedJudge(reply), retry=QUICK), ROW)
    assert result.reward == (None if reward is None else pytest.approx(reward))


async def test_reference_and_answer_are_shown_and_a_row_without_one_is_judged_by_its_question():
    judge = ScriptedJudge("Score: 5")
    await PointwiseReward(judge).grade(Response("four", label={"a": "é"}, prompt=[{"role": "user", "content": "q"}]))
    shown = judge.asked[0][1]["content"]
    names = ("question", "reference", "response")
    assert [between(shown, name) for name in names] == ["[user]\nq", '{"a": "é"}', "four"]
    await PointwiseReward(judge).grade(Response("four", prompt="q"))
    assert between(judge.asked[1][1]["content"], "reference") is None


@pytest.mark.parametrize(
    "text", ["", "  ", "<think>never ends", "<think>x</think><|im_end|>", "<think>x</think>\u200b\u2060 \u2800\u3164"]
)
@pytest.mark.parametrize(
    "make",
    [JudgeReward, PointwiseReward, lambda judge: RubricReward(judge, criteria=["It is kind.", "It is short."])],
)
async def test_no_answer_is_not_judged(text, make):
    judge = ScriptedJudge("Score: 5")
    result = await (reward := make(judge)).grade(Response(text, label="4"))
    assert (result.reward, result.status, judge.asked) == (0.0, Status.NO_ANSWER, [])
    assert tuple(result.components) == reward.component_names


# --- votes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replies", "voting", "reward"),
    [
        (["yes", "no", "yes"], Voting(3), 1.0),
        (["yes", "no", "no"], Voting(3), 0.0),
        (["yes", "hm", "hm"], Voting(3, min_votes=1), 1.0),
        (["yes", "hm", "yes"], Voting(3, min_votes=3), None),
        (["yes", "no"], Voting(2), None),
        (["hm"], Voting(1), None),
    ],
)
async def test_the_majority_counts_if_enough_votes_have_a_verdict(replies, voting, reward):
    judge = ScriptedJudge(*replies, "no more")
    result = await grade(JudgeReward(judge, voting=voting, retry=ONCE), ROW)
    assert result.reward == reward
    assert result.status is (Status.INFRA if reward is None else Status.OK)
    assert len(judge.asked) == len(replies)


@pytest.mark.parametrize(
    ("combine", "scores", "reward"),
    [("mean", [0, 1, 8], 0.3), ("median", [0, 1, 8], 0.1), ("majority", [2, 9, 2], 0.2), ("majority", [1, 2, 3], None)],
)
async def test_scores_are_combined(combine, scores, reward):
    judge = ScriptedJudge(*(f"Score: {score}" for score in scores))
    voting = Voting(3, combine=combine)
    result = await grade(PointwiseReward(judge, scale=(0, 10), voting=voting, retry=ONCE), Response("4"))
    assert result.reward == (None if reward is None else pytest.approx(reward))
    if reward is not None:
        expected = {"judge": sum(scores) / 30, "num_votes": 3.0, "agreement": scores.count(reward * 10) / 3}
        assert dict(result.components) == pytest.approx(expected)


async def test_a_vote_draws_again_after_each_attempt_but_not_after_a_refusal():
    class Refusing:
        """A judge that remembers its draws."""

        def __init__(self):
            self.draws = []

        async def complete(self, messages):
            return await self.reply_at(messages, ReplyIndex())

        async def reply_at(self, messages, draw):
            self.draws.append(draw)
            if len(self.draws) == 2:
                raise JudgeRefused("too long")
            raise InfraError("down")

    judge = Refusing()
    with pytest.raises(JudgeRefused):
        await ask(judge, [], read_yes_or_no, QUICK, expected="yes or no", vote=4)
    assert judge.draws == [(4, 0), (4, 1)]


# --- a judge that answers no one ---------------------------------------------------------------------------------


class AsksItself(AgentInstance):
    """An environment that calls its judge itself."""

    def __init__(self, reward):
        self.reward = reward_from(reward)

    async def step(self, states):
        result = await self.reward.grade(Response(states["action_text"], label=states["label"]))
        return StepResult(reward=result.reward, terminated=True)


@pytest.mark.parametrize("way", ["itself", "alone", "in a sum", "in a group", "in pairs"])
async def test_a_wrong_key_of_a_judge_ends_the_run_and_no_episode_runs_again(way):
    """Three attempts of each episode would be paid for."""
    async with chat_server(Answered(401, "no")) as server:
        judge = {"judge": {"base_url": server.url, "model": "m"}}
        reward = {"sum": {"form": "format", "verdict": {"judge": judge}}} if way == "in a sum" else {"judge": judge}
        flags = {"env_kwargs": {"reward": reward}}
        if way in ("in a group", "in pairs"):
            group = reward if way == "in a group" else {"pairwise": judge}
            flags = {"env_kwargs": {"reward": "length"}, "group_reward": group}
        rows = [{"prompt": f"{i}?", "label": "4"} for i in range(3)]
        env, engine = AsksItself if way == "itself" else Verify, ScriptedEngine(lambda request: f"{request.call_index}")
        with pytest.raises(AgentEnvError, match="got 401") as raised:
            await arollout(env, rows, engine=engine, n=2, concurrency=1, **flags)
        assert raised.value.exit_code == 2
        assert len(server.bodies) == (2 if way in ("in a group", "in pairs") else 1)


@pytest.mark.parametrize("env", [Verify, AsksItself])
async def test_what_a_judge_costs_is_in_the_record_and_the_metrics_of_every_environment(env):
    async with chat_server(Answered(503), "Verdict: YES") as server:
        price = {"prompt": 1000, "completion": 10000}
        options = {"first_pause_s": 0.0}
        judge = {"base_url": server.url, "model": "m", "price": price, "request_options": options}
        rows, engine = [{"prompt": "?", "label": "4"}] * 2, ScriptedEngine(["4"])
        flags = {"env_kwargs": {"reward": {"judge": {"judge": judge}}}, "concurrency": 1}
        done = await arollout(env, rows, engine=engine, **flags)
    assert done[0].turns[0].result.info["judge/cost"] == pytest.approx((10 * 1000 + 5 * 10000) / 1e6)
    means = {name: values["sum"] for name, values in done.metrics.info.items()}
    assert (means["judge/cost"], done.metrics.judge_cost) == (pytest.approx(0.06), pytest.approx(0.12))
    assert [means[f"judge/{name}"] for name in ("requests", "retries", "failures")] == [1.5, 0.5, 0.0], (
        "over episodes without a retry, too"
    )


async def test_what_the_judge_of_a_group_costs_is_shared_by_its_episodes_beside_what_their_own_cost():
    async with chat_server(*["Verdict: YES"] * 2, *["Verdict: A"] * 2) as server:
        judge = {"judge": {"base_url": server.url, "model": "m", "price": {"prompt": 1000, "completion": 10000}}}
        rows, engine = [{"prompt": "?", "label": "4"}], ScriptedEngine(lambda request: f"{request.call_index}")
        flags = {"env_kwargs": {"reward": {"judge": judge}}, "group_reward": {"pairwise": judge}}
        done = await arollout(Verify, rows, engine=engine, n=2, **flags)
    assert [each.turns[-1].result.info["judge/requests"] for each in done] == [2.0, 2.0]
    assert done.metrics.judge_cost == pytest.approx(4 * 0.06)


async def test_an_outage_of_a_judge_is_counted_by_its_class_and_the_status_of_the_server():
    async with chat_server(Answered(500)) as server:
        settings = {"base_url": server.url, "model": "m", "request_options": {"max_retries": 1, "first_pause_s": 0.0}}
        reward = {"judge": {"judge": settings, "retry": {"attempts": 1}}}
        rows, engine = [{"prompt": "?", "label": "4"}], ScriptedEngine(["4"])
        flags = {"env_kwargs": {"reward": reward}, "max_retries": 0, "max_error_share": 1.0}
        for env, name in ((Verify, "InfraError (JudgeUnavailable, 500)"), (AsksItself, "JudgeUnavailable (500)")):
            done = await arollout(env, rows, engine=engine, **flags)
            assert done.metrics.error_types == {f"infra:{name}": 1}


# --- criteria -------------------------------------------------------------------------------------------------------

THREE = (Criterion("It is kind."), Criterion("It is short.", points=4), Criterion("It lies.", weight=-1.0))


@pytest.mark.parametrize(
    ("reply", "values"),
    [
        ("1: YES\n2: 3/4\n3: NO", [1, 0.75, 0]),
        ("Well.\n\n1. yes\n2. 4\n3. no\n", [1, 1, 0]),
        ("1: NO\n2: 0\n3: YES\nOn reflection:\n1: YES\n2: 4\n3: NO", [1, 1, 0]),
        ('{"1": "yes", "2": 3, "3": "NO"}', [1, 0.75, 0]),
        ("<think>1: NO\n2: 0\n3: NO</think>1: YES\n2: 4\n3: NO", [1, 1, 0]),
        ("1: YES\n3: NO", None),
        ("1: YES\n2: 3/4\n3: NO\nSo it is good.", None),
        ("1: YES\n1: NO\n2: 3/4\n3: NO\n3: YES", None),
        ("1: YES\n2: 5/4\n3: NO", None),
        ('{"1": "yes", "2": 3, "3": "no", "4": "no"}', None),
        ('{"1": "yes", "1": "no", "2": 3, "3": "no"}', None),
        ('{"1": true, "2": 3, "3": "no"}', None),
        ('{"' + 5000 * "1" + '": "yes", "2": 3, "3": "no"}', None),
        ("", None),
    ],
)
def test_a_verdict_on_every_criterion_or_none(reply, values):
    assert read_shares(reply, THREE) == values


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("1: YES\n2: 4/4\n3: NO", 1.0),
        ("1: YES\n2: 2/4\n3: NO", 0.75),
        ("1: YES\n2: 4/4\n3: YES", 0.5),
        ("1: YES\n2: 4/4", None),
    ],
)
async def test_the_weighted_share_of_criteria__rm_gallery_row_23(reply, reward):
    """There a judge that left them out, or failed, is a score of 0.0."""
    result = await grade(RubricReward(ScriptedJudge(reply), criteria=THREE, retry=QUICK), ROW)
    assert result.reward == reward
    if reward is not None:
        assert tuple(result.components) == ("criterion_1", "criterion_2", "criterion_3", "num_votes")


async def test_votes_on_criteria_are_combined_one_by_one():
    replies = ["1: YES\n2: 4\n3: NO", "1: NO\n2: 2\n3: NO", "1: YES\n2: 0\n3: NO"]
    reward = RubricReward(ScriptedJudge(*replies), criteria=THREE, voting=Voting(3), retry=ONCE)
    components = {"criterion_1": 2 / 3, "criterion_2": 0.5, "criterion_3": 0.0, "num_votes": 3.0}
    assert dict((await reward.grade(ROW)).components) == pytest.approx(components)
    voting = Voting(3, combine="majority")
    result = await grade(RubricReward(ScriptedJudge(*replies), criteria=THREE, voting=voting, retry=ONCE), ROW)
    assert (result.status, "criterion 2" in result.detail) == (Status.INFRA, True)


# --- yes or no, and scores ------------------------------------------------------------------------------------------


async def test_a_verdict_is_the_reward():
    for reply, reward in (("Verdict: YES", 1.0), ("Verdict: NO", 0.0)):
        result = await JudgeReward(ScriptedJudge(reply)).grade(ROW)
        assert (result.reward, result.score, result.status) == (reward, reward, Status.OK)
        assert (result.extracted, result.feedback) == ("The answer is 4.", "")
        assert dict(result.components) == {"judge": reward, "num_votes": 1.0, "agreement": 1.0}


@pytest.mark.parametrize(
    ("replies", "kind"),
    [
        (["Hm."], JudgeUnclear),
        ([InfraError("down"), "Hm."], JudgeUnclear),
        (["Hm.", InfraError("down")], InfraError),
        ([JudgeUnavailable("down")], JudgeUnavailable),
    ],
)
async def test_the_last_error_has_a_class(replies, kind):
    judge = ScriptedJudge(*replies)
    judge.usage = JudgeUsage()
    with pytest.raises(InfraError, match="in 3 attempts") as raised:
        await JudgeReward(judge, retry=QUICK).grade(ROW)
    assert type(raised.value) is kind
    assert judge.usage["unclear"] == (3 if replies == ["Hm."] else 2 if kind is JudgeUnclear else "Hm." in replies)


async def test_a_judge_that_is_asked_again_has_the_time_for_it(monkeypatch):
    """Elsewhere the deadline of one answer ends what tries again."""
    monkeypatch.setattr(grading, "DEADLINE_S", 0.01)
    judge = ScriptedJudge("Hm.", "Hm.", "Verdict: YES")
    reward = JudgeReward(judge, retry=JudgeRetry(backoff_s=0.05))
    assert (await grade(reward, ROW)).reward == 1.0
    judged = await grade_all(Router({"math": reward}), [replace(ROW, metadata={"tag": "math"})])
    assert judged[0].reward == 1.0
    late = await grade(JudgeReward(ScriptedJudge("Hm."), retry=JudgeRetry()), ROW, limit_s=0.01)
    assert late.status is Status.INFRA


def test_a_reward_sets_its_time_limit():
    retry = JudgeRetry(attempts=3, limit_s=100.0, backoff_s=8.0)
    assert 300.0 + 24.0 <= retry.patience_s < 340.0
    assert JudgeRetry(attempts=10_000, backoff_s=1.0).patience_s > 10_000 * 330
    judge = JudgeReward(Down(), retry=retry)
    assert grading.patience_s(judge) == retry.patience_s
    assert grading.patience_s(Router({"a": judge, "b": ThinkFormatReward()})) == retry.patience_s
    assert Each(judge).limit_s == retry.patience_s
    assert grading.patience_s(JudgeReward(Down(), retry=JudgeRetry(attempts=1, limit_s=1.0))) == grading.DEADLINE_S
    assert grading.patience_s(ThinkFormatReward()) == grading.DEADLINE_S
    terms = {"judge": Term(judge), "format": Term(ThinkFormatReward())}
    assert grading.patience_s(WeightedSum(terms)) == grading.DEADLINE_S
    assert grading.patience_s(WeightedSum(terms, limit_s=400.0)) > 400.0


async def test_a_judge_that_hangs_is_given_up():
    asked = []

    class Hangs:
        async def complete(self, messages):
            asked.append(messages)
            await asyncio.Event().wait()

    retry = JudgeRetry(attempts=2, limit_s=0.05, backoff_s=0.0)
    with pytest.raises(JudgeTimeout, match=r"within 0\.05 s"):
        await JudgeReward(Hangs(), retry=retry).grade(ROW)
    assert len(asked) == 2


@pytest.mark.parametrize("make", [JudgeReward, lambda judge: PointwiseReward(judge, needs_label=True)])
@pytest.mark.parametrize("label", [None, "", " \n", [], {}, {1, 2}, float("nan")])
async def test_a_row_without_a_reference_is_the_labels_fault(label, make):
    result = await grade(make(ScriptedJudge("Verdict: YES")), Response("4", label=label))
    assert result.status is Status.LABEL


@pytest.mark.parametrize("prompt", [None, 5, ["what?"], [{"role": "user"}, None]])
async def test_an_invalid_prompt_is_the_rows_fault(prompt):
    result = await grade(JudgeReward(ScriptedJudge("Verdict: YES")), Response("4", label="4", prompt=prompt))
    assert (result.status, "prompt: expected text or messages" in result.detail) == (Status.LABEL, True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PointwiseReward(Down(), scale=(10, 1)),
        lambda: Voting(3, min_votes=4),
        lambda: RubricReward(Down(), criteria=[]),
        lambda: RubricReward(Down(), criteria=[Criterion("x", weight=-1.0)]),
        lambda: JudgeReward("gpt-4"),
        lambda: JudgeReward(Down(), retry={"attempt": 2}),
        lambda: JudgeReward(Down(), retry=Voting(3)),
        lambda: RubricReward(Down(), criteria=[{"text": "be kind", "wieght": 2.0}]),
        lambda: JudgeRetry(attempts=0),
    ],
)
def test_wrong_arguments(make):
    with pytest.raises(ConfigError):
        make()


# --- settings -------------------------------------------------------------------------------------------------------

SETTINGS = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}


async def test_everything_can_be_said_in_json(tmp_path):
    async with chat_server("Score: 4") as server:
        judge = {
            "base_url": server.url, "model": "m", "sampling": {"temperature": 0.7, "stop": ["x"], "seed": 1},
            "request_options": {"max_retries": 1}, "price": {"prompt": 1e6}, "cache": str(tmp_path / "replies.db"),
        }  # fmt: skip
        voting = {"votes": 3, "combine": "median"}
        spec = {"judge": judge, "scale": [0, 5], "voting": voting, "retry": {"attempts": 2}, "criteria": "Be brief."}
        reward = reward_from({"judge_score": json.loads(json.dumps(spec))})
        assert [(await reward.grade(ROW)).reward for _ in range(2)] == [0.8, 0.8]
        assert "Be brief." in server.bodies[0]["messages"][0]["content"]
    assert reward.judge.judge.sampling == SamplingParams(temperature=0.7, max_tokens=2048, stop=("x",), seed=1)
    usage = reward.judge.usage
    assert (usage.cost, usage["cached"], reward.judge.judge.request_options.max_retries) == (30.0, 3, 1)
    assert (reward.voting, reward.retry) == (Voting(3, combine="median"), JudgeRetry(attempts=2))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "got no base_url and no model"),
        ({**SETTINGS, "modle": "m"}, "others among api_key_env, sampling, extra_body, request_options, price, cache"),
        ({**SETTINGS, "base_url": "h"}, "OpenAIJudge.base_url"),
        ({**SETTINGS, "sampling": {"temprature": 1}}, "judge.sampling: expected options among"),
        ({**SETTINGS, "request_options": {"max_retries": -1}}, "RequestOptions.max_retries"),
        ({**SETTINGS, "price": 3}, "judge.price: expected Price"),
    ],
)
def test_invalid_settings_of_a_judge_are_named(settings, said):
    with pytest.raises(ConfigError) as raised:
        reward_from({"judge": {"judge": settings}})
    assert said in str(raised.value)
