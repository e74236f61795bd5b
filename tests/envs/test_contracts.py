"""Every environment that comes with agentenv keeps the whole contract; slow are those that start processes for it."""

import importlib.util

import pytest

from agentenv.episode.registry import installed_envs
from agentenv.testing import EnvContract


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
