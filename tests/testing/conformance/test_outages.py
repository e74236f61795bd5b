"""An InfraError is the outside's: `agentenv check` tries again as a run does, and never calls it a breach."""

import json
import re
import threading
from pathlib import Path

import pytest

from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult
from agentenv.errors import InfraError
from agentenv.testing import EnvContract, check_env
from agentenv.testing.conformance import context
from agentenv.testing.conformance.context import ConformanceOptions
from agentenv.testing.conformance.suite import PROPERTIES, check_property, make_context
from tests.drivers import command

SERVICE = """
from agentenv import AgentInstance, StepResult
from agentenv.errors import InfraError
class Service(AgentInstance):
    num_calls_cache = [0]
    async def {method}(self, states=None):
        self.num_calls_cache[0] += 1
        if self.num_calls_cache[0] % {one_in} == 0:
            raise InfraError("service: expected an answer, got a refused connection. Try again."{more})
        {result}
"""
RESULTS = {
    "reset": "return states\n    async def step(self, states):\n        return StepResult(terminated=True)",
    "step": "return StepResult('Go on.', terminated=states['turn_index'] == 1)",
    "close": "pass\n    async def step(self, states):\n        return StepResult(terminated=True)",
    "__init__": "pass\n    async def step(self, states):\n        return StepResult(terminated=True)",
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(context, "RETRY_WAIT_S", 0.0)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n' * 3)

    def write(method="step", one_in=5, more=""):
        text = SERVICE.format(method=method, one_in=one_in, more=more, result=RESULTS[method])
        (tmp_path / "service.py").write_text(text)
        return ["check", "service.py", "--data", "rows.jsonl"]

    return write


@pytest.mark.parametrize(
    ("method", "error"), [("__init__", 'ConfigError("no key")'), ("step", 'JudgeMisaddressed("no key")')]
)
def test_a_missing_key_of_a_constructor_or_a_wrong_one_of_a_judge_is_one_line_as_in_a_run(method, error, write, capsys):
    args = write(method, one_in=1)
    text = Path("service.py").read_text().replace("import InfraError", "import ConfigError")
    text = re.sub("InfraError.*", error, text).replace("async def __init__", "def __init__")
    Path("service.py").write_text(f"from agentenv.rewards.judges.protocol import JudgeMisaddressed\n{text}")
    assert command(args) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.splitlines()[-1:]) == ("", ["agentenv: error: no key"])


@pytest.mark.long
@pytest.mark.parametrize("method", RESULTS)
@pytest.mark.parametrize("one_in", [7, 40])
def test_a_service_that_fails_now_and_then_breaks_no_property(method, one_in, write, capsys):
    exit_code = command([*write(method, one_in), "--skip", "portability"])
    out = capsys.readouterr().out
    assert "no contract errors" in out, out
    assert exit_code == (0 if one_in == 40 else 3 * ("!" in out)), out


@pytest.mark.long
def test_a_service_that_refuses_what_actions_ask_for_is_said_to_be_no_outage(write, capsys):
    refusal = ") from type('StatusError', (Exception,), {'status_code': 404})("
    assert command([*write(one_in=1, more=refusal), "--only", "contract"]) == 3
    line, last = capsys.readouterr().out.splitlines()
    assert line.endswith(
        "If the action caused status 404, raise no InfraError: tell the policy, in a tool with ToolError."
    )
    assert last.endswith("the outside failed in 1 property: the lines above say what to do")


@pytest.mark.long
def test_a_service_that_is_down_is_named_as_such_and_every_property_is_tried(write, capsys):
    assert command(write(one_in=1)) == 3
    *lines, last = capsys.readouterr().out.splitlines()
    down = [line for line in lines if line.startswith("!")]
    assert down[0].startswith(
        "! contract     the outside failed in 3 attempts, step at service.py:9: InfraError: service"
    )
    assert {line.split()[1] for line in down} == set(PROPERTIES) - {"constructor", "close", "data"}
    assert [line.split()[1] for line in lines if line.startswith("✓")] == ["constructor", "close", "data"]
    assert last.endswith("the outside failed in 12 properties: run it again, or with a stable stand-in")
    assert last.startswith("service.py: no contract errors; ")
    assert command([*write(one_in=1), "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] == []
    assert {one["state"] for one in told["properties"]} == {"held", "outside"}
    assert command([*write(one_in=1), "--quick"]) == 3


@pytest.mark.long
def test_a_step_that_asks_for_it_is_tried_again_within_the_episode(write, capsys):
    assert command([*write(one_in=2, more=", retry_step=True"), "--skip", "portability", "isolation"]) == 0
    assert "!" not in capsys.readouterr().out


class Down(AgentInstance):
    async def step(self, states):
        raise InfraError("service: down")


class Wrong(AgentInstance):
    """Fails, and is wrong."""

    async def step(self, states):
        if "7 7 7" in states["action_text"]:
            raise InfraError("service: down")
        return 1.0


def test_a_breach_is_found_although_the_outside_failed(write):
    outcome = check_property(make_context(ConformanceOptions(Wrong)), "contract")
    assert outcome.state == "broken"
    assert [problem.where for problem in outcome.problems] == ["Wrong.step"]


class Blocks(AgentInstance):
    """Is down for one action, and blocks after another one, unless it is down at the first try of a call."""

    num_blocks_cache = 0

    async def step(self, states):
        if not states["action_text"]:
            Blocks.num_blocks_cache += 1
            if Blocks.num_blocks_cache in (1, 4):
                raise InfraError("service: down")
            threading.Event().wait(0.07)
        if "####" in states["action_text"]:
            raise InfraError("service: down")
        return StepResult(terminated=True)


class Huge(AgentInstance):
    """Is down for one action, and pays too much."""

    async def step(self, states):
        if "####" in states["action_text"]:
            raise InfraError("service: down")
        return StepResult(reward=1e300, terminated=True)


@pytest.mark.long
@pytest.mark.parametrize(("env", "name"), [(Blocks, "blocking"), (Huge, "rewards")])
def test_a_fault_of_an_episode_that_worked_stands_although_others_met_an_outage(write, env, name):
    context = make_context(ConformanceOptions(env))
    context.reached = []
    assert check_property(context, name).state == "broken"
    assert check_property(context, "pickling").state == "outside"


def test_check_env_and_the_test_class_say_that_the_outside_failed(write):
    with pytest.raises(InfraError, match=r"Down: the outside failed in 3 attempts, step at .*service: down"):
        check_env(Down)

    class TestDown(EnvContract):
        env = Down

    with pytest.raises(pytest.fail.Exception, match="the outside failed in 3 attempts"):
        TestDown().test_contract()
    with pytest.raises(pytest.fail.Exception, match="the outside failed in 3 attempts"):
        TestDown().test_rewards()
    TestDown.teardown_class()
