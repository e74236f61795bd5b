"""ModelReward: what the model is asked about, and what becomes of its number."""

import asyncio
import math

import pytest

from agentenv.errors import DataError, InfraError
from agentenv.rewards.grading import DEADLINE_S, grade, patience_s
from agentenv.rewards.models.get_reward import GetRewardScorer
from agentenv.rewards.models.hf import HFScorer
from agentenv.rewards.models.ray_replicas import RayScorer
from agentenv.rewards.models.reward import ModelReward, Normalized
from agentenv.rewards.models.types import Scored
from agentenv.rewards.types import Response, Status
from tests.rewards.models.tiny import said, tiny_rm

PROMPT = said("")[:-1]


class Saying:
    """A reward model that says this of everything, and remembers what it was asked."""

    def __init__(self, value=0.0, truncated=False):
        self.value, self.truncated, self.asked = value, truncated, []

    async def score(self, conversation):
        self.asked.append(conversation)
        if isinstance(self.value, Exception):
            raise self.value
        return Scored(self.value, 7, self.truncated)

    async def close(self):
        pass


def grade_with(scorer, text="42", prompt=PROMPT, **options):
    return asyncio.run(ModelReward(scorer, **options).grade(Response(text, prompt=prompt)))


# --- what is asked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "part", "answer"),
    [
        ("42", "final", "42"),
        ("<think>6 x 7</think>\n\n42<|im_end|>\n", "final", "42"),
        ("6 x 7</think>42</s>", "final", "42"),
        ("<think>6 x 7</think>42<|im_end|>", "all", "<think>6 x 7</think>42"),
        ("<think>6 x", "all", "<think>6 x"),
    ],
)
def test_the_model_gets_raw_messages_and_the_answer_once_closed_by_its_own_template(text, part, answer):
    scorer = Saying()
    assert grade_with(scorer, text, part=part).extracted == answer
    assert scorer.asked == [[*PROMPT, {"role": "assistant", "content": answer}]]


def test_the_policys_template_is_never_inside_of_the_reward_models():
    """NeMo RL's training feeds the policy's rendering into the reward model's template; its validation does not."""

    async def both():
        scorer = HFScorer(tiny_rm())
        result = await ModelReward(scorer).grade(Response("It is 42.<|im_end|>\n", prompt=PROMPT))
        direct = await scorer.score(said("It is 42."))
        await scorer.close()
        return result, direct

    result, direct = asyncio.run(both())
    assert result.reward == direct.value


def test_a_prompt_that_is_text_is_taken_as_it_is_or_as_what_a_user_said():
    raw, user = Saying(), Saying()
    grade_with(raw, "42", "6 x 7 = ")
    grade_with(user, "42", "6 x 7 = ", text_prompt="user")
    assert raw.asked == ["6 x 7 = 42"]
    assert user.asked == [[{"role": "user", "content": "6 x 7 = "}, {"role": "assistant", "content": "42"}]]


@pytest.mark.parametrize("text", ["", "  <|im_end|>", "<think>never ends"])
def test_no_answer_is_the_models_number_of_an_empty_one_or_what_is_declared(text):
    asked, declared = Saying(-3.0), Saying(-3.0)
    result = grade_with(asked, text)
    assert (result.reward, result.status) == (-3.0, Status.NO_ANSWER)
    assert asked.asked == [[*PROMPT, {"role": "assistant", "content": ""}]]
    result = grade_with(declared, text, no_answer=-1.0)
    assert (result.reward, result.status, declared.asked) == (-1.0, Status.NO_ANSWER, [])


# --- what becomes of the number -------------------------------------------------------------------------------------


def test_the_reward_is_the_models_number_unless_something_is_declared():
    result = grade_with(Saying(7.908))
    assert (result.reward, result.score, result.status) == (7.908, None, Status.OK)
    assert result.components == {"value": 7.908, "truncated": 0.0, "clipped": 0.0}


def test_shift_comes_before_scale_and_clipping_last():
    """`shift=-mean, scale=1 / std` is OpenRLHF's normalization."""
    assert grade_with(Saying(5.0), shift=-1.0, scale=0.5).reward == 2.0
    assert grade_with(Saying(5.0), shift=-1.0, scale=0.5, clip=(-1.0, 1.5)).reward == 1.5
    result = grade_with(Saying(5.0), shift=-1.0, scale=-0.5, clip=(-1.0, 1.5))
    assert (result.reward, result.components["value"], result.components["clipped"]) == (-1.0, 5.0, 1.0)
    assert ModelReward(Saying(), clip=(-1.0, 1.5)).bounds == (-1.0, 1.5)


def test_the_score_is_a_declared_sigmoid_of_the_raw_number():
    assert grade_with(Saying(1.5), shift=100.0, score=(1.5, 2.0)).score == 0.5
    assert grade_with(Saying(3.5), score=(1.5, 2.0)).score == pytest.approx(1.0 / (1.0 + math.exp(-1.0)))
    assert grade_with(Saying(-3e38), score=(0.0, 1e-3)).score == 0.0
    assert grade_with(Saying(1.0), score=(0.0, -1.0)).score == pytest.approx(1.0 / (1.0 + math.e))


def test_a_reward_that_no_float32_holds_is_none():
    with pytest.raises(InfraError, match="expected a finite reward"):
        grade_with(Saying(3e38), scale=10.0)


@pytest.mark.parametrize(("error", "status"), [(DataError("x"), Status.LABEL), (InfraError("x"), Status.INFRA)])
def test_a_model_that_fails_returns_no_reward(error, status):
    result = asyncio.run(grade(ModelReward(Saying(error)), Response("42", prompt=PROMPT)))
    assert (result.reward, result.status) == (None, status)


def test_a_reward_has_the_patience_of_its_scorer_regardless_of_what_is_around_it():
    patient = GetRewardScorer("http://h:1/get_reward", timeout_s=300.0)
    assert patience_s(ModelReward(Saying())) == DEADLINE_S
    assert patience_s(ModelReward(patient)) > 300.0
    assert patience_s(Normalized(ModelReward(patient))) > 300.0
    assert patience_s(ModelReward(RayScorer("rm", timeout_s=300.0))) == 300.0
