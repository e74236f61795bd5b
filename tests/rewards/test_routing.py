"""Which reward judges a row. The defects are ROLL's."""

import pytest

from agentenv.errors import ConfigError, DataError
from agentenv.rewards.grading import grade
from agentenv.rewards.routing import Router
from agentenv.rewards.types import Response, Status
from tests.rewards.judges.rule_judges import Rewarding

MATH, CODE = Rewarding(1.0, (0.0, 1.0)), Rewarding(-0.5, (-1.0, 0.5))
REWARDS = {"math": MATH, "code": CODE}


def row(tag, key="tag"):
    return Response("x", metadata={key: tag})


@pytest.mark.parametrize(
    "tags", [{"gsm8k": "math", "aime": "math", "mbpp": "code"}, {"math": ["gsm8k", "aime"], "code": ["mbpp"]}]
)
async def test_a_row_goes_to_the_reward_of_its_domain(tags):
    router = Router(REWARDS, tags)
    for tag, reward in {"gsm8k": 1.0, "aime": 1.0, "mbpp": -0.5, "math": 1.0, "code": -0.5}.items():
        assert (await router.grade(row(tag))).reward == reward
    assert router.bounds == (-1.0, 1.0)


@pytest.mark.parametrize("key", ["tag", "domain", "data_source"])
async def test_any_column_may_say_it(key):
    assert (await Router(REWARDS, key=key).grade(row("code", key))).reward == -0.5


@pytest.mark.parametrize("tag", ["ifeval", "", None, 3, ["math"], "Math"])
async def test_an_unknown_tag_is_an_error_that_names_those_that_are_known(tag):
    """ROLL judges it as mathematics."""
    with pytest.raises(DataError, match=r"tag: expected one of code, gsm8k, math, got"):
        await Router(REWARDS, {"gsm8k": "math"}).grade(row(tag))
    assert (await grade(Router(REWARDS), row(tag))).status is Status.LABEL


async def test_a_row_without_a_tag_is_an_error():
    with pytest.raises(DataError, match="got None"):
        await Router(REWARDS).grade(Response("x"))


@pytest.mark.parametrize(
    ("rewards", "tags"),
    [
        ({}, None),
        ({"math": None}, None),
        (REWARDS, {"math": None}),
        (REWARDS, {"gsm8k": "maths"}),
        (REWARDS, {"maths": ["gsm8k"]}),
        (REWARDS, {"math": ["x"], "code": ["x"]}),
        (REWARDS, {"code": "math"}),
    ],
)
def test_wrong_tables_are_refused(rewards, tags):
    with pytest.raises(ConfigError):
        Router(rewards, tags)
