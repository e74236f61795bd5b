"""math_retry: what an attempt is worth, what is said after it, and what is never said or scored."""

import asyncio
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core.types import StopReason, Task
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.interop.agent_files import load_agent_func
from agentenv.rewards.rules.math.reward import MathGrader, math_outcome
from agentenv.rewards.types import RewardResult, Status
from agentenv.testing.tokenizers import CharTokenizer
from agentenv_envs.math_retry import MathRetry
from agentenv_envs.math_retry.texts import INSTRUCTION
from tests.envs.scripted import play

ROOT = Path(__file__).parents[2]
GRADES = {
    "right": RewardResult(1.0, 1.0, extracted="7"),
    "wrong": RewardResult(0.0, 0.0, extracted="6"),
    "none": RewardResult(0.0, 0.0, Status.NO_ANSWER),
    "garbled": RewardResult(0.0, 0.0, Status.PARSE_ERROR, extracted="@@"),
    "slow": RewardResult(0.0, 0.0, Status.TIMEOUT, extracted="9^9^9"),
    "broken": RewardResult(None, status=Status.INFRA, extracted="6", detail="the worker died"),
}


class FakeGrader:
    """Gives the grade that the action names."""

    async def grade(self, text, label):
        return GRADES[text]

    async def check_label(self, label):
        pass


def step_states(action, label="7"):
    return {"action_text": action, "label": label}


async def attempts(*actions, **options):
    """The results of one instance's attempts."""
    env = MathRetry(**{"grader": FakeGrader()} | options)
    return [await env.step(step_states(action)) for action in actions]


QUESTION = Task([{"role": "user", "content": "What is 3 + 4?"}], "#### 7")


async def played(*actions, **options):
    """A whole episode with the real grader, or with the one in `options`."""
    return await play(EnvSource(MathRetry, options), QUESTION, actions)


async def test_an_answer_in_a_thought_that_the_prompt_opened_and_a_limit_cut_is_no_answer():
    env, opened = MathRetry(), {"observation_text": "3 + 4?<|im_end|>\n<|im_start|>assistant\n<think>\n", "label": "7"}
    result = await env.step({"action_text": r"Perhaps \boxed{7}. But let me", **opened})
    assert (result.score, result.info["outcome"]) == (0.0, "no_answer")
    assert (await env.step({"action_text": "3 + 4</think>#### 7", **opened})).score == 1.0


@pytest.fixture(scope="module")
def grader():
    """The real one; its workers outlive the event loops of single tests."""
    grader = MathGrader(num_workers=1)
    yield grader
    grader.close_now()


# --- rewards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actions", "rewards", "score"),
    [
        (["right"], [1.0], 1.0),
        (["wrong", "right"], [0.0, 1.0], 1.0),
        (["none", "garbled", "right"], [0.0, 0.0, 1.0], 1.0),
        (["wrong", "wrong", "wrong"], [0.0, 0.0, -0.3], 0.0),
        (["wrong", "wrong", "none"], [0.0, 0.0, -0.5], 0.0),
        (["wrong", "slow", "garbled"], [0.0, 0.0, -0.5], 0.0),
        (["slow", "slow", "right"], [0.0, 0.0, 1.0], 1.0),
    ],
)  # fmt: skip
async def test_the_default_rewards_of_three_attempts(actions, rewards, score):
    results = await attempts(*actions)
    assert [result.reward for result in results] == rewards
    assert [result.terminated for result in results] == [False] * (len(actions) - 1) + [True]
    assert results[-1].score == score
    assert all(result.score == 0.0 for result in results[:-1])


async def test_every_number_of_the_rewards_can_be_set():
    options = {
        "max_attempts": 4, "correct_reward": 2.0, "wrong_reward": -0.1,
        "final_wrong_penalty": -3.0, "no_answer_penalty": -4.0, "retry_discount": 0.5,
    }  # fmt: skip
    for number in range(1, 5):
        results = await attempts(*["wrong"] * (number - 1), "right", **options)
        assert [r.reward for r in results] == [-0.1] * (number - 1) + [2.0 * 0.5 ** (number - 1)]
    assert (await attempts(*["none"] * 3, "wrong", **options))[-1].reward == -3.0
    assert (await attempts(*["wrong"] * 3, "none", **options))[-1].reward == -4.0
    assert (await attempts(*["wrong"] * 3, "garbled", **options))[-1].reward == -4.0


@pytest.mark.parametrize("number", [0, -1, 1.5, "3", None])
def test_a_number_of_attempts_that_makes_no_sense_is_refused(number):
    with pytest.raises(ConfigError, match=r"MathRetry\.max_attempts: expected an integer >= 1"):
        MathRetry(number)


# --- what is never scored -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [[], ["wrong"], ["wrong", "none"]])
async def test_a_grader_that_fails_is_an_infrastructure_error_and_never_a_wrong_answer(before):
    env = MathRetry(grader=FakeGrader())
    for action in before:
        await env.step(step_states(action))
    with pytest.raises(InfraError, match="the worker died"):
        await env.step(step_states("broken"))


async def test_an_answer_that_takes_too_long_to_check_is_worth_what_no_readable_answer_is():
    assert [result.reward for result in await attempts("slow", "slow", "slow")] == [0.0, 0.0, -0.5]
    (only,) = await attempts("slow", max_attempts=1)
    assert (only.reward, only.score, only.terminated, only.observation) == (-0.5, 0.0, True, "")
    assert only.info["outcome"] == "timeout"
    trajectory = await played("slow", "wrong", "slow", grader=FakeGrader())
    assert (trajectory.stop_reason, trajectory.reward, trajectory.error) == (StopReason.TERMINATED, -0.5, None)


@pytest.mark.parametrize("actions", [["broken"], ["wrong", "broken"], ["wrong", "slow", "broken"]])
async def test_an_episode_whose_grader_failed_has_no_reward_and_may_be_tried_again(actions):
    trajectory = await played(*actions, grader=FakeGrader())
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ERROR, None)
    assert (trajectory.error.kind, trajectory.error.where) == ("infra", "step")


@pytest.mark.parametrize("label", ["", None, [], {"answer": 4}, float("nan")])
async def test_a_label_that_is_not_an_answer_is_found_before_the_first_action(label):
    with pytest.raises(DataError, match="label: expected"):
        await MathRetry().reset({"observation": "2+2?", "label": label})


# --- info ---------------------------------------------------------------------------------------------------------


async def test_info_says_what_became_of_each_attempt():
    first, second, third = [result.info for result in await attempts("wrong", "none", "right")]
    assert first == {
        "correct": 0.0, "attempts": 1.0, "has_answer": 1.0, "extracted": "6", "outcome": "wrong", "first_correct": 0.0,
    }  # fmt: skip
    assert second == {"correct": 0.0, "attempts": 2.0, "has_answer": 0.0, "extracted": "", "outcome": "no_answer"}
    assert third == {"correct": 1.0, "attempts": 3.0, "has_answer": 1.0, "extracted": "7", "outcome": "correct"}


# --- what is said -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("wrong", "Your answer 6 is not correct. Check each step and try again. 2 attempts left."),
        ("none", "No final answer was found. Solve it step by step and end with #### and the answer. 2 attempts left."),
        (
            "garbled",
            "Your answer @@ could not be read. Write one number or expression after ####. 2 attempts left.",
        ),
        (
            "slow",
            "Your answer 9^9^9 took too long to check. Write it in a simpler form after ####. 2 attempts left.",
        ),
    ],
)
async def test_the_feedback_for_each_failed_attempt_says_what_was_wrong(action, said):
    (result,) = await attempts(action)
    assert result.observation == [{"role": "user", "content": said}]


def numbers_in(text):
    return {Fraction(number) for number in re.findall(r"\d+", text)}


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(gold=st.integers(100, 10**6), given_=st.integers(100, 10**6), form=st.sampled_from(["####", "box", "none"]))
def test_feedback_never_contains_the_right_answer(grader, gold, given_, form):
    action = {"####": f"So it is\n#### {given_}", "box": rf"\boxed{{{given_}}}", "none": f"maybe {given_}, who knows"}

    async def two():
        env = MathRetry(grader=grader)
        label = f"Some working with {gold} in it.\n#### {gold}"
        first = await env.step(step_states(action[form], label))
        return first if first.terminated else (first, await env.step(step_states("no idea", label)))

    results = asyncio.run(two())
    if not isinstance(results, tuple):
        assert (given_, results.observation) == (gold, "")
        return
    for result in results:
        said = result.observation[0]["content"]
        if given_ != gold:
            assert str(gold) not in said.replace(str(given_), "…")
        assert numbers_in(said) <= {Fraction(given_), Fraction(1), Fraction(2)}


# --- the prompt ---------------------------------------------------------------------------------------------------


async def test_the_instruction_goes_under_the_last_user_message_and_the_task_is_not_changed():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    states = await MathRetry(grader=FakeGrader()).reset({"observation": messages, "label": "4"})
    assert states["observation"] == [messages[0], {"role": "user", "content": f"2 + 2?\n{INSTRUCTION}"}]
    assert states["label"] == "4"
    assert messages[1]["content"] == "2 + 2?"


@pytest.mark.parametrize(
    "observation",
    [
        "<|im_start|>user\n2 + 2?",
        [],
        [{"role": "assistant", "content": "Hm."}],
        [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}],
    ],
)
async def test_a_prompt_that_is_rendered_already_or_does_not_end_with_a_users_text_is_left_alone(observation):
    states = await MathRetry(grader=FakeGrader()).reset({"observation": observation})
    assert states["observation"] == observation


# --- whole episodes with the real grader ---------------------------------------------------------------------------


async def test_an_episode_of_three_attempts_with_the_real_grader(grader):
    trajectory = await played("It is 12.", "#### 8", r"No: \boxed{7}", grader=grader)
    assert trajectory.stop_reason is StopReason.TERMINATED
    assert (trajectory.reward, trajectory.score) == (1.0, 1.0)
    assert [turn.result.info["outcome"] for turn in trajectory.turns] == ["no_answer", "wrong", "correct"]
    text = CharTokenizer().decode(trajectory.token_ids)
    assert f"What is 3 + 4?\n{INSTRUCTION}<|im_end|>" in text
    assert "Your answer 8 is not correct." in text


def test_the_shipped_tasks_have_labels_that_the_grader_reads(grader):
    async def grade_all():
        for line in MathRetry.datasets["word_problems"].read_text().splitlines():
            row = json.loads(line)
            assert math_outcome(await grader.grade(row["label"], row["label"])) == "correct"

    asyncio.run(grade_all())


# --- as an agent_func ---------------------------------------------------------------------------------------------


async def test_the_shipped_agent_func_runs_the_episode_of_the_environment():
    func = load_agent_func(ROOT / "agent_funcs/math_retry.py")
    actions = ["no idea", "#### 7"]  # neither needs a worker
    by_file, by_class = await play(func, QUESTION, actions), await played(*actions)
    assert by_file.error is None
    assert (by_file.reward, by_file.score, by_file.stop_reason) == (1.0, 1.0, StopReason.TERMINATED)
    assert [turn.action for turn in by_file.turns] == [turn.action for turn in by_class.turns] == actions
    assert [turn.result.info for turn in by_file.turns] == [turn.result.info for turn in by_class.turns]
