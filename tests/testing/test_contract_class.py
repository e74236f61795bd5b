"""EnvContract: two lines give a test for each property; what is wrong is read in the failure."""

import numpy  # noqa: F401 - pytester forgets what a project was the first to import; this cannot be imported twice
import pytest

from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult
from agentenv.errors import ConfigError
from agentenv.testing import EnvContract, check_env
from agentenv.testing.conformance.suite import PROPERTIES

pytest_plugins = ["pytester"]

ENV = """
from agentenv import AgentInstance, StepResult
class Yes(AgentInstance):
    def __init__(self, word="yes", score=1.0):
        self.word, self.score = word, score
    async def step(self, states):
        right = states["action_text"] == self.word
        if right or states["turn_index"] == 3:
            return StepResult(reward=float(right), score=self.score * right, terminated=True)
        return StepResult("Say yes.")
"""


def run(pytester, tests, env=ENV):
    """The outcomes of a project that has an environment and these tests, and what pytest printed."""
    pytester.makepyfile(yes_env=env)
    pytester.makepyfile(test_yes=tests)
    pytester.syspathinsert()
    result = pytester.runpytest_inprocess("-q", "-rs", "-p", "no:asyncio", "-p", "no:xdist", "-p", "no:cacheprovider")
    return result.parseoutcomes(), result.stdout.str()


TWO_LINES = """
from agentenv.testing import EnvContract
class TestYes(EnvContract):
    env = "yes_env:Yes"
"""


@pytest.mark.long
def test_two_lines_of_a_third_party_give_a_test_for_each_property(pytester):
    outcomes, said = run(pytester, TWO_LINES)
    assert outcomes == {"passed": len(PROPERTIES) - 1, "skipped": 1}, said
    assert "it has no data; pass `data = …`" in said
    assert "--data" not in said


@pytest.mark.long
def test_a_failure_shows_the_problem_with_its_line_and_no_frames_of_ours(pytester):
    outcomes, said = run(pytester, TWO_LINES + '    env_kwargs = {"score": 7.0}\n    policy = ["yes"]\n')
    assert outcomes["failed"] >= 1
    assert "yes_env.py:5: Yes.step: expected a score in [0, 1], got 7.0. Score quality" in said
    assert "rewards: Every policy gets finite rewards" in said
    assert "agentenv/testing/contract.py" not in said


@pytest.mark.long
def test_a_property_is_left_out_with_its_reason(pytester):
    outcomes, said = run(pytester, TWO_LINES + '    skip = {"cancel": "it keeps a pool, see #7"}\n')
    assert outcomes["skipped"] == 2
    assert "it keeps a pool, see #7" in said


@pytest.mark.long
def test_data_of_the_tests_own_is_what_it_is_tried_on(pytester):
    pytester.makefile(".jsonl", rows='{"prompt": "Say it.", "label": "yes"}\n{"prompt": "", "label": "yes"}\n')
    outcomes, said = run(pytester, TWO_LINES + '    data = "rows.jsonl"\n')
    assert outcomes["failed"] == 1
    assert "data 'rows.jsonl' that can be read" in said


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        ({"cancle": "x"}, "expected one of .*got 'cancle'. Did you mean 'cancel'"),
        ({"cancel": " "}, r"skip\['cancel'\]: expected a reason, got ' '"),
    ],
)
def test_leaving_out_needs_a_known_name_and_a_reason(skip, message):
    with pytest.raises(ConfigError, match=message):
        type("TestMine", (EnvContract,), {"env": "guess_number", "skip": skip})


def test_neither_the_class_nor_a_base_without_an_environment_is_collected():
    assert EnvContract.__test__ is False
    base = type("TestBase", (EnvContract,), {"num_rows": 3, "__test__": False})
    assert base.__test__ is False
    assert type("TestMine", (base,), {"env": "guess_number"}).__test__ is True


class Forgets(AgentInstance):
    """Raises where it is told the label."""

    async def step(self, states):
        if states["action_text"] == "boo":
            raise LookupError("boo")
        return StepResult(terminated=True)


@pytest.mark.long
def test_a_call_returns_the_problems_of_a_class_with_the_property_that_each_breaks():
    assert check_env("guess_number") == []
    problems = check_env(Forgets, policy=["boo"])
    assert {problem.property for problem in problems} == {"rewards"}
    assert problems[0].got == "LookupError: boo"
    assert problems[0].where == "Forgets.step"


@pytest.mark.long
def test_if_the_contract_is_broken_the_others_are_skipped(pytester):
    outcomes, said = run(pytester, TWO_LINES, ENV.replace('"Say yes."', "reward=None"))
    assert outcomes == {"failed": 1, "skipped": len(PROPERTIES) - 1}, said
    assert "fix `contract` first" in said


def test_a_class_without_an_environment_is_refused():
    with pytest.raises(ConfigError, match=r"TestMine.env: expected an environment, got ''. .*__test__ = False"):
        type("TestMine", (EnvContract,), {})


@pytest.mark.long
def test_columns_of_data_are_named_in_the_class(pytester):
    pytester.makefile(".jsonl", rows='{"question": "Say it.", "answer": "yes"}\n')
    lines = '    data = "rows.jsonl"\n    prompt_key = "question"\n    label_key = "answer"\n'
    outcomes, said = run(pytester, TWO_LINES + lines)
    assert outcomes == {"passed": len(PROPERTIES)}, said
