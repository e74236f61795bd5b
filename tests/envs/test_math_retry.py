"""math_retry: what an attempt is worth, what is said after it, and what is never said or scored."""

import asyncio
from pathlib import Path

import pytest

from agentenv.core.types import StopReason, Task
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError, DataError
from agentenv.rewards.rules.math.reward import MathGrader
from agentenv.rewards.types import RewardResult, Status
from agentenv.testing.tokenizers import CharTokenizer
from agentenv_envs.math_retry import MathRetry
from agentenv_envs.math_retry.env import INSTRUCTION
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
    asyncio.run(grader.close())


# --- rewards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actions", "rewards", "score"),
    [
        (["wrong", "right"], [0.0, 1.0], 1.0),
        (["wrong", "wrong", "wrong"], [0.0, 0.0, -0.3], 0.0),
        (["wrong", "wrong", "none"], [0.0, 0.0, -0.5], 0.0),
        (["slow", "slow", "slow"], [0.0, 0.0, -0.5], 0.0),
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


@pytest.mark.parametrize("actions", [["broken"], ["wrong", "slow", "broken"]])
async def test_an_episode_whose_grader_failed_has_no_reward_and_may_be_tried_again(actions):
    trajectory = await played(*actions, grader=FakeGrader())
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ERROR, None)
    assert (trajectory.error.kind, trajectory.error.where) == ("infra", "step")
    assert "the worker died" in trajectory.error.message


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
        ("garbled", "Your answer @@ could not be read. Write one number or expression after ####. 2 attempts left."),
        ("slow", "Your answer 9^9^9 took too long to check. Write it in a simpler form after ####. 2 attempts left."),
    ],
)
async def test_the_feedback_for_each_failed_attempt_says_what_was_wrong(action, said):
    (result,) = await attempts(action)
    assert result.observation == [{"role": "user", "content": said}]


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
