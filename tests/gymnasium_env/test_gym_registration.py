"""Ids, specs and makers: gymnasium.make and make_vec, and ours for environments that have no id."""

import json
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

import agentenv.gym
from agentenv.episode.registry import EnvEntry
from agentenv.errors import ConfigError
from agentenv.gym import registration
from agentenv.gym.registration import id_of, register_all
from agentenv.testing.tokenizers import CharTokenizer

GAMES = f"{Path(__file__).parent / 'games.py'}"


@pytest.mark.parametrize(
    ("env", "env_id"),
    [
        ("math_retry", "agentenv/MathRetry-v0"),
        ("gsm8k-hard", "agentenv/Gsm8kHard-v0"),
        ("guess.py:Guess", "agentenv/Guess-v0"),
        ("some/folder/my_game.py", "agentenv/MyGame-v0"),
        ("package.module:CamelCase", "agentenv/CamelCase-v0"),
        ("odd name!", "agentenv/OddName-v0"),
    ],
)
def test_the_id_is_the_name_in_camel_case(env, env_id):
    assert id_of(env) == env_id
    assert EnvSpec(env_id).namespace == "agentenv"


def test_anything_that_cannot_be_made_does_not_affect_others(monkeypatch):
    entries = {
        name: EnvEntry(name, value, "somebody")
        for name, value in (
            ("broken", "no_such_module:Env"),
            ("guess_number", "agentenv_envs.guess_number:GuessNumber"),
            ("own_loop", f"{GAMES}:OwnLoop"),
        )
    }
    monkeypatch.setattr(registration, "installed_envs", lambda: entries)
    monkeypatch.setattr(registration, "load_env", lambda name: registered(entries[name].value))
    assert agentenv.gym.env_ids() == ["agentenv/GuessNumber-v0"]
    try:
        assert register_all() == ["agentenv/Broken-v0", "agentenv/GuessNumber-v0", "agentenv/OwnLoop-v0"]
        with pytest.raises(ConfigError, match="broken"):
            gymnasium.make("agentenv/Broken-v0")
        assert gymnasium.make("agentenv/GuessNumber-v0").reset(seed=0)
    finally:
        for name in ("agentenv/Broken-v0", "agentenv/OwnLoop-v0"):
            gymnasium.registry.pop(name, None)


def registered(value):
    from agentenv.episode.registry import load_env

    return load_env(value)


@pytest.mark.parametrize("name", ["agentenv/GuessNumber-v0", "agentenv.gym:agentenv/GuessNumber-v0", "guess_number"])
def test_ids_and_names_make_the_same_environment(name):
    env = agentenv.gym.make(name)
    assert env.reset(seed=3) == gymnasium.make("agentenv.gym:agentenv/GuessNumber-v0").reset(seed=3)
    assert env.spec.id == "agentenv/GuessNumber-v0"


def test_any_class_can_be_made_and_its_json_makes_it_again():
    env = agentenv.gym.make(f"{GAMES}:Echo", env_kwargs={"name": "x"}, max_episode_steps=2, render_mode="ansi")
    spec = EnvSpec.from_json(env.spec.to_json())
    assert json.loads(env.spec.to_json())["kwargs"]["env"] == f"{GAMES}:Echo"
    again = gymnasium.make(spec)
    assert again.reset(seed=1) == env.reset(seed=1)
    assert again.step("a") == env.step("a")
    assert again.step("b")[3] is True
    assert again.unwrapped.spec.kwargs == env.unwrapped.spec.kwargs
    assert again.render().startswith("[")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("agentenv/GuesNumber-v0", "Did you mean 'agentenv/GuessNumber-v0'"),
        ("guess_numbr", "Did you mean 'guess_number'"),
        ("nothing.py:Guess", "nothing.py"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, told):
    for make in (agentenv.gym.make, agentenv.gym.make_vec):
        with pytest.raises(ConfigError, match=told):
            make(name)


def test_sixteen_actions_are_the_default_limit_and_the_environment_is_notified():
    env = agentenv.gym.make(f"{GAMES}:LastWord", max_episode_steps=1)
    env.reset(seed=0)
    assert env.step("a")[1] == 0.5
    assert gymnasium.spec("agentenv/GuessNumber-v0").max_episode_steps == 16
    assert agentenv.gym.make("guess_number").unwrapped.spec.kwargs["max_episode_steps"] == 16
    env = agentenv.gym.make(f"{GAMES}:Tools")  # it never ends by itself
    env.reset(seed=0)
    assert [env.step("a")[3] for _ in range(16)] == [False] * 15 + [True]


def test_max_turns_of_the_class_is_the_limit_of_actions_unless_an_argument_overrides_it():
    env_id = "agentenv/GymnasiumText-v0"
    assert gymnasium.spec(env_id).max_episode_steps == 52
    assert agentenv.gym.make("gymnasium_text").unwrapped.spec.kwargs["max_episode_steps"] == 52
    assert agentenv.gym.make("gymnasium_text", max_episode_steps=5).unwrapped.spec.kwargs["max_episode_steps"] == 5
    assert agentenv.gym.make_vec("gymnasium_text", 2).maker.limits.max_turns == 52
    assert gymnasium.make_vec(env_id, 2).maker.limits.max_turns == 52
    assert gymnasium.make_vec(env_id, 2, max_episode_steps=5).maker.limits.max_turns == 5
    for limit, env in ((52, gymnasium.make(env_id)), (60, gymnasium.make(env_id, max_episode_steps=60))):
        assert env.get_wrapper_attr("_max_episode_steps") == limit
        assert env.unwrapped._maker.limits.max_turns > limit


def test_max_length_of_the_class_is_the_limit_of_tokens_unless_an_argument_overrides_it(monkeypatch):
    from agentenv_envs.guess_number import GuessNumber

    monkeypatch.setattr(GuessNumber, "max_length", 777)
    tokens = {"obs_mode": "tokens", "tokenizer": CharTokenizer()}
    for settings, limit in (({}, 1_000_000), (tokens, 777), ({**tokens, "max_length": 99}, 99)):
        assert agentenv.gym.AgentEnv("guess_number", **settings)._maker.limits.max_length == limit


def test_vectors_of_gymnasium_tell_the_shared_memory_and_ours_need_none__trap_async_garbage():
    with pytest.raises(ValueError, match="shared_memory=False"):
        gymnasium.make_vec("agentenv/GuessNumber-v0", 2, vectorization_mode="async")
    envs = agentenv.gym.make_vec("guess_number", 2, vectorization_mode="async")
    try:
        said, infos = envs.reset(seed=0)
        alone = [agentenv.gym.make("guess_number").reset(seed=seed) for seed in (0, 1)]
        assert list(said) == [observation for observation, _ in alone]
        assert infos["task_id"].tolist() == [info["task_id"] for _, info in alone]
    finally:
        envs.close()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("mode", ["vector_entry_point", "sync", "async"])
def test_every_kind_of_vector_passes_the_limit_to_its_environments_and_its_spec_makes_it_again(mode):
    envs = agentenv.gym.make_vec(f"{GAMES}:LastWord", 2, vectorization_mode=mode, max_episode_steps=1)
    try:
        envs.reset(seed=0)
        assert envs.step(("a", "b"))[1].tolist() == [0.5, 0.5]
    finally:
        envs.close()
    spec = EnvSpec.from_json(envs.spec.to_json())
    assert (spec.kwargs["num_envs"], spec.kwargs["vectorization_mode"]) == (2, mode)
    again = gymnasium.make_vec(spec)
    assert (type(again), again.num_envs) == (type(envs), 2)
    again.close()


def test_an_invalid_kind_of_vector_is_refused():
    with pytest.raises(ConfigError, match="expected vector_entry_point, sync or async, got 'asink'"):
        agentenv.gym.make_vec("guess_number", 2, vectorization_mode="asink")


IMPORTS = """
import sys, threading
import agentenv.gym, gymnasium
before = {name for name in sys.modules if name.startswith("agentenv_envs")}, threading.active_count()
assert before == (set(), 1), before
env = gymnasium.make("agentenv.gym:agentenv/GuessNumber-v0")
assert threading.active_count() == 1
env.reset(seed=0)
env.step("7")
heavy = sorted({"torch", "transformers", "vllm", "ray", "math_verify"} & set(sys.modules))
assert not heavy, heavy
"""


@pytest.mark.long
def test_importing_registers_and_imports_no_environment_and_text_needs_no_torch__trap_side_effects():
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORTS], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
