"""verify: any verifiable reward as an environment of one turn."""

import asyncio
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.core.types import Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.runner import EpisodeRunner, ErrorPolicy, plan
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.registry import reward_names
from agentenv.rewards.types import RewardResult
from agentenv.sandbox.types import Isolation
from agentenv.testing.tokenizers import CharTokenizer
from agentenv_envs.verify import Verify
from agentenv_envs.verify.env import DOMAINS
from tests.envs.scripted import scripted

ROOT = Path(__file__).parents[2]
DATA = Verify.datasets["verify_mixed"]
LEVELS = {level.value for level in Isolation}
ROWS = [json.loads(line) for line in DATA.read_text("utf-8").splitlines()]


def states(action, label="42", *, finish_reason="stop", prompt="", **columns):
    return {"action_text": action, "label": label, "metadata": columns, "observation_text": prompt,
            "finish_reason": finish_reason}  # fmt: skip


async def judged(action, label="42", *, reward=None, key="domain", **more):
    return await Verify(reward, key=key).step(states(action, label, **more))


def columns(row):
    return {name: value for name, value in row.items() if name != "label"}


# --- the rows that ship ---------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_every_shipped_row_rewards_the_right_response_fully_and_the_wrong_one_less():
    async def both(row):
        """What the row's two responses are worth."""
        return [await judged(row[name], row["label"], **columns(row)) for name in ("reference", "wrong")]

    for row, (right, wrong) in zip(ROWS, await asyncio.gather(*map(both, ROWS)), strict=True):
        assert (right.reward, right.score, right.info["correct"]) == (1.0, 1.0, 1.0), row["id"]
        assert wrong.reward < 1.0, row["id"]
        assert (wrong.score < 1.0, wrong.info["correct"]) == (True, 0.0), row["id"]
        assert right.terminated
        assert not right.truncated


@pytest.mark.long
@pytest.mark.parametrize("reward", ["code", {"sum": {"tests": {"reward": "code"}, "short": {"reward": "length"}}}])
async def test_the_level_of_the_sandbox_is_in_the_info_of_a_program(reward):
    label = {"entry_point": "add", "hidden": [{"args": [1, 2], "expected": 3}]}
    for text, levels in (("```python\ndef add(a, b):\n    return a + b\n```", LEVELS), ("Hm.", {None})):
        assert (await judged(text, label, reward=reward)).info.get("isolation") in levels


def test_every_reward_that_needs_no_more_than_a_row_is_a_domain():
    others = {"judge", "judge_score", "rubric", "model", "normalized", "overlong"}
    assert set(DOMAINS) == set(reward_names()) - others


# --- what an answer is worth ----------------------------------------------------------------------------------------


async def test_info_has_the_components_the_status_and_the_answer_that_was_judged():
    result = await judged("The answer is 41.", domain="math")
    assert result.info == {
        "correct": 0.0, "math/correct": 0.0, "math/has_answer": 1.0, "status": "ok", "extracted": "41",
        "math/no_answer": 0.0, "math/parse_error": 0.0, "math/timeout": 0.0,
    }  # fmt: skip
    of_all = await judged("The answer is 42.", reward="math")
    shares = {"no_answer": 0.0, "parse_error": 0.0, "timeout": 0.0}
    assert of_all.info == {"correct": 1.0, "has_answer": 1.0, **shares, "status": "ok", "extracted": "42"}
    assert (result.reward, result.score, result.observation) == (0.0, 0.0, "")
    none = (await judged("Hm.", domain="math")).info
    assert (none["status"], none["math/no_answer"]) == ("no_answer", 1.0)


@pytest.mark.parametrize("label", [{"domain": "choice", "label": "B"}, '{"domain": "choice", "label": "B"}'])
async def test_a_label_may_hold_the_whole_row_as_openrlhf_has_no_other_column(label):
    assert (await judged(r"\boxed{B}", label)).reward == 1.0
    options = {"domain": "choice", "label": "B", "options": ["yes", "no"]}
    assert (await judged(r"\boxed{no}", options)).reward == 1.0


async def test_the_reward_gets_the_messages_and_not_what_the_chat_template_made_of_them():
    class Seeing:
        bounds = (0.0, 1.0)

        async def grade(self, response):
            return RewardResult(float(response.prompt == messages))

    messages, env = [{"role": "user", "content": "6*7?"}], Verify(Seeing())
    await env.reset({"observation": messages, "label": "42", "metadata": {}})
    assert (await env.step(states("42", prompt="<|im_start|>user\n6*7?<|im_end|>\n"))).reward == 1.0


async def test_an_answer_that_was_cut_is_truncated_and_judged_all_the_same():
    result = await judged("The answer is 42. And", finish_reason="length", domain="math")
    assert (result.reward, result.terminated, result.truncated) == (1.0, False, True)


async def test_a_thought_that_the_template_began_and_a_limit_cut_is_not_an_answer():
    cut = await judged("So the answer is 42.", prompt="Q<think>\n", domain="math")
    assert (cut.reward, cut.info["status"]) == (0.0, "no_answer")
    assert (await judged("Six sevens.</think>The answer is 42.", prompt="Q<think>\n", domain="math")).reward == 1.0


# --- what goes wrong ------------------------------------------------------------------------------------------------


async def test_a_row_of_no_domain_is_refused_before_anything_is_generated():
    with pytest.raises(DataError, match="domain: expected one of"):
        await Verify().reset({"observation": "Q", "label": "42", "metadata": {"domain": "maths"}})
    for row in ({"label": "42", "metadata": {"domain": "math"}}, {"label": '{"domain": "math", "label": "42"}'}):
        given = {"observation": "Q", **row}
        assert await Verify().reset(given) == given
    assert await Verify("math").reset({"observation": "Q", "label": "42"})


@pytest.mark.parametrize(
    ("domain", "label"),
    [("math", ""), ("code", "none"), ("choice", "?"), ("regex", "("), ("ifeval", {}), ("similarity", 3)],
)
async def test_a_label_that_the_reward_cannot_use_is_a_fault_of_the_data(domain, label):
    with pytest.raises(DataError, match=r"Verify.step: no grade \(label\)"):
        await judged(r"\boxed{42}", label, domain=domain)


class Failing:
    """A reward that says when it has begun, and fails or not."""

    bounds = (0.0, 1.0)

    def __init__(self, fails=True):
        self.fails, self.begun = fails, asyncio.Event()

    async def grade(self, response):
        """1.0, or a failure."""
        self.begun.set()
        return RewardResult.failed("down") if self.fails else RewardResult(1.0, 1.0)


class SecondWaits(ScriptedEngine):
    """An engine whose second generation ends only when the first answer is being judged."""

    async def generate(self, prompt_token_ids, sampling, *, request_id):
        """As scripted."""
        if self.requests:
            await self.reward.begun.wait()
        return await super().generate(prompt_token_ids, sampling, request_id=request_id)


async def test_rewards_are_computed_while_other_answers_are_still_being_generated():
    """ROLL's acceptance check; where a batch were generated before any of it is judged, nothing would ever end."""
    reward, ended = Failing(fails=False), []
    engine = SecondWaits(["an answer"], CharTokenizer())
    engine.reward = reward
    setup = replace(scripted(["unused"], generate_timeout_s=30.0), engine=engine)
    source = EnvSource(Verify, {"reward": reward})
    runner = EpisodeRunner(source, setup, policy=ErrorPolicy(max_retries=0), concurrency=2)
    await runner.run(plan([Task("a", label="", task_id="a"), Task("b", label="", task_id="b")], 1), ended.append)
    assert [trajectory.reward for trajectory in ended] == [1.0, 1.0]


async def test_a_grader_that_fails_raises_and_is_never_a_wrong_answer():
    with pytest.raises(InfraError, match=r"Verify.step: no grade \(infra\): .*down") as raised:
        await judged("42", reward=Failing())
    assert raised.value.retry_step  # the answer is graded again, and the policy not paid again


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reward": "maths"}, "Did you mean 'math'"),
        ({"reward": {"math": {"wrng": 0}}}, "Did you mean 'wrong'"),
        ({"reward": 3}, "expected a name"),
        ({"key": ""}, "Verify.key"),
        ({"limit_s": 0}, "Verify.limit_s"),
    ],
)
def test_wrong_settings_are_refused_by_the_constructor(options, said):
    with pytest.raises(ConfigError, match=said):
        Verify(**options)


async def test_rows_and_settings_are_left_as_they_were_and_instances_can_be_pickled():
    spec = {"sum": {"a": {"reward": "choice", "weight": 2.0}}}
    row = {"domain": "choice", "label": "B", "options": ["yes", "no"]}
    env = pickle.loads(pickle.dumps(Verify(spec)))
    assert (await env.step(states(r"\boxed{B}", row))).reward == 2.0
    assert row == {"domain": "choice", "label": "B", "options": ["yes", "no"]}
    assert spec == {"sum": {"a": {"reward": "choice", "weight": 2.0}}}


# --- by the command line --------------------------------------------------------------------------------------------


async def test_a_reward_file_that_raises_is_its_authors_error_and_is_not_run_again(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def mine(response):\n    raise KeyError('gone')\n")
    runner, ended = EpisodeRunner(EnvSource(Verify, {"reward": f"{path}:mine"}), scripted(["four"])), []
    await runner.run(plan([Task("2+2?", label="4", task_id="t")], 1), ended.append)
    assert (runner.num_retries, ended[0].error.kind, ended[0].reward) == (0, "contract", None)
    assert f"KeyError: 'gone' at {path}:2" in ended[0].error.message


@pytest.mark.parametrize("label", [None, pytest.param(r"\frac{1}{2", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "reward",
    [None, {"sum": {"answer": "math", "form": "format"}}, {"route": {"math": "math"}, "key": "domain"}],
)
async def test_a_label_that_is_not_an_answer_is_found_before_the_first_action(reward, label):
    with pytest.raises(DataError, match="label: expected"):
        await Verify(reward).reset(states("", label=label, domain="math"))


async def test_the_label_of_a_term_that_may_fail_is_not_checked():
    terms = {"form": "format", "answer": {"reward": "math", "required": False}}
    await Verify({"sum": terms}).reset(states("", label=None))
