"""EnvText without SkyRL-gym, whose base class is a stand-in; tests/peers has SkyRL's own generator."""

import sys
from importlib import import_module

import pytest

from agentenv.core.agent import AgentInstance
from agentenv.core.types import SamplingParams, StepResult
from agentenv.errors import ConfigError, EpisodeFailed
from tests.interop.protos import stand_in
from tests.interop.test_trl_rollout import Guess

ROW = {"max_turns": 2, "reward_spec": {"ground_truth": "1"}}
PROMPT = [{"role": "user", "content": "one"}]


class Scored(Guess):
    """Guess with a score."""

    async def step(self, states):
        return StepResult(reward=0.5, score=0.75, terminated=True)


class Short(Guess):
    """Needs one turn."""

    max_turns = 1


class Asks(AgentInstance):
    """Asks for a stop string after the first action."""

    async def reset(self, states):
        return states

    async def step(self, states):
        return StepResult("more", sampling=SamplingParams(stop=("x",)))


class OwnLoop:
    """An agent with a loop of calls."""

    async def run(self, context):
        return 0.0


@pytest.fixture
def make(monkeypatch):
    """Makes an EnvText of an environment of this file."""
    base = {"BaseTextEnv": type("BaseTextEnv", (), {})}
    stand_in(monkeypatch, {"skyrl_gym": {}, "skyrl_gym.envs": {}, "skyrl_gym.envs.base_text_env": base})
    monkeypatch.delitem(sys.modules, "agentenv.interop.skyrl.text_env", raising=False)
    module = import_module("agentenv.interop.skyrl.text_env")
    return lambda name: module.EnvText(f"{__file__}:{name}", ends=["<end>"], env_config={}, extras=dict(ROW))


def test_an_episode_in_text_has_each_turns_reward_and_ends_without_an_observation(make):
    env = make("Guess")
    assert env.init(PROMPT) == (PROMPT, {})
    first, last = env.step("half<end>"), env.step("1<end>")
    assert first == {
        "observations": [{"role": "user", "content": "more"}], "reward": 0.25, "done": False, "metadata": {}
    }  # fmt: skip
    assert last == {"observations": [], "reward": 1.0, "done": True, "metadata": {}}
    assert env.get_metrics() == {"truncated": 0.0}
    env.close()


def test_skyrls_number_of_turns_truncates_it_and_nothing_is_said_after_that(make):
    env = make("Guess")
    env.init(PROMPT)
    steps = [env.step("half") for _ in range(2)]
    assert [(len(step["observations"]), step["done"]) for step in steps] == [(1, False), (0, True)]
    assert env.get_metrics() == {"truncated": 1.0}
    short = make("Short")
    short.init(PROMPT)
    assert short.step("half")["done"]


def test_the_score_is_a_metric_and_a_closed_episode_is_over(make):
    env = make("Scored")
    env.init(PROMPT)
    env.step("x")
    assert env.get_metrics() == {"truncated": 0.0, "score": 0.75}
    other = make("Guess")
    other.init(PROMPT)
    other.close()
    assert other._episode.over


def test_a_failed_episode_raises(make):
    env = make("Guess")
    env.init(PROMPT)
    with pytest.raises(EpisodeFailed, match="bang"):
        env.step("bang")


def test_what_skyrls_generator_does_not_read_is_refused(make):
    env = make("Asks")
    env.init(PROMPT)
    with pytest.raises(ConfigError, match=r"EnvText: expected an environment without tools, stops and grammars"):
        env.step("x")
    with pytest.raises(ConfigError, match=r"EnvText.env: expected an environment with `step`"):
        make("OwnLoop")
