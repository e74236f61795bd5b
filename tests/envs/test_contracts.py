"""Every environment that comes with agentenv keeps the whole contract; slow are those that start processes for it."""

import importlib.util
from pathlib import Path

import pytest

from agentenv.core.types import StopReason, Task
from agentenv.episode.registry import installed_envs, load_env
from agentenv.episode.source import EnvSource
from agentenv.interop.agent_files import load_agent_func
from agentenv.testing import EnvContract
from tests.envs.scripted import play

ROOT = Path(__file__).parents[2]


class TestMathRetry(EnvContract):
    env = "math_retry"


class TestGuessNumber(EnvContract):
    env = "guess_number"


@pytest.mark.long
class TestVerify(EnvContract):
    env = "verify"


@pytest.mark.long
class TestRMChat(EnvContract):
    env = "rm_chat"


@pytest.mark.long
class TestGymnasiumText(EnvContract):
    env = "gymnasium_text"


@pytest.mark.long
class TestToolUse(EnvContract):
    env = "tool_use"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
class TestReasoningGym(EnvContract):
    env = "reasoning_gym"


@pytest.mark.slow
@pytest.mark.long
class TestCodeSandbox(EnvContract):
    env = "code_sandbox"


def test_every_environment_of_this_project_is_held_to_its_contract():
    held = {cls.env for cls in EnvContract.__subclasses__() if cls.__module__ == __name__}
    ours = {name for name, entry in installed_envs().items() if entry.value.startswith("agentenv_envs.")}
    assert held == ours


@pytest.mark.parametrize(
    ("name", "label", "actions"),
    [
        ("math_retry", "#### 7", ["no idea", "#### 7"]),
        ("guess_number", "11", ["8", "12", "10", "11"]),
        ("verify", {"domain": "math", "label": "42"}, ["The answer is 42."]),
        pytest.param(
            "code_sandbox", {"test_list": ["assert two() == 2"]}, ["Hm.", "```python\ndef two(): return 2\n```"],
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
async def test_the_shipped_agent_func_runs_the_episode_of_the_environment(name, label, actions):
    func, task = load_agent_func(ROOT / f"agent_funcs/{name}.py"), Task([{"role": "user", "content": "Q"}], label)
    by_file, by_class = [await play(source, task, actions) for source in (func, EnvSource(load_env(name), {}))]
    assert (by_file.error, by_file.reward, by_file.score) == (None, 1.0, 1.0)
    assert (by_file.stop_reason, [turn.action for turn in by_file.turns]) == (StopReason.TERMINATED, actions)
    assert [turn.result.info for turn in by_file.turns] == [turn.result.info for turn in by_class.turns]
