"""Environments of other libraries: their random numbers, their failures from outside, and their names."""

import asyncio
import functools
import logging
import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv import StepResult
from agentenv.cli.list import guest_catalog
from agentenv.episode import registry
from agentenv.episode.registry import load_env
from agentenv.errors import ConfigError, ContractError, InfraError, MissingDependency
from agentenv.interop.gem import GemEnv
from agentenv.interop.guest import Guest, OwnRandom, guest_class, import_library


def draws():
    return random.random(), float(np.random.random())


class Dice(Guest):
    """Draws global random numbers, as foreign code does."""

    spec = "dice:d"

    def begin(self, seed):
        return str(draws())

    def act(self, action):
        match action:
            case "network":
                raise ConnectionError("no route")
            case "package":
                raise ImportError("No module named 'nltk'")
            case "data":
                raise LookupError("Resource 'words' not found. For more information see: …")
            case "mistake":
                raise KeyError("x")
            case "sentence":
                return StepResult(reward=self.number("Out of range."))
        return StepResult(str(draws()))


def played(seed, actions=("a", "b")):
    dice = Dice()
    first = dice.reset({"seed": seed, "observation": "x"})["observation"][0]["content"]
    return [first, *(dice.step({"action_text": action}).observation for action in actions)]


@given(st.integers(0, 2**63), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_an_episode_draws_its_own_numbers_and_leaves_those_of_the_process(seed, outer):
    random.seed(outer)
    np.random.seed(outer)
    expected = [draws(), draws()]
    random.seed(outer)
    np.random.seed(outer)
    got = [draws()]
    first = played(seed)
    got.append(draws())
    assert got == expected
    assert played(seed) == first
    assert len(set(first)) == 3


def test_concurrent_episodes_draw_what_each_draws_alone():
    async def together():
        return await asyncio.gather(*(asyncio.to_thread(played, seed, ["a"] * 20) for seed in range(8)))

    assert asyncio.run(together()) == [played(seed, ["a"] * 20) for seed in range(8)]


def test_numbers_of_the_process_come_back_after_an_exception():
    random.seed(5)
    expected = random.Random(5).random()

    def fails():
        with OwnRandom(1).active():
            raise KeyError(random.random())

    with pytest.raises(KeyError):
        fails()
    assert random.random() == expected


OUTSIDE = [("network", "ConnectionError: no route"), ("data", "Resource 'words'"), ("package", "named 'nltk'")]


@pytest.mark.parametrize(("action", "error"), OUTSIDE)
def test_what_is_missing_outside_is_an_infrastructure_error(action, error):
    dice = Dice()
    dice.reset({"seed": 1, "observation": "x"})
    with pytest.raises(InfraError, match=f"dice:d: step: expected its data and services, got .*{error}"):
        dice.step({"action_text": action})


def test_an_error_of_the_library_keeps_its_type():
    with pytest.raises(KeyError):
        Dice().step({"action_text": "mistake"})


def test_a_reward_that_is_a_sentence_is_refused():
    with pytest.raises(ContractError, match=r"reward: expected one finite number, got 'Out of range\.'"):
        Dice().step({"action_text": "sentence"})


@pytest.mark.parametrize("flag", ["False", None, 0.5])
def test_a_flag_of_a_library_that_is_neither_true_nor_false_is_refused(flag):
    game = type("Game", (GemEnv,), {"spec": "gem:game"})()
    game.env, game.total = SimpleNamespace(step=lambda _: ("", 0.0, flag, False, {})), 0.0
    with pytest.raises(ContractError, match="gem:game: terminated: expected True or False, got"):
        game.step({"action_text": "move"})


@pytest.mark.parametrize("thought", ["<think>mistake</think>sentence", "mistake</think> sentence"])
def test_what_is_thought_is_no_action_of_a_library(thought):
    with pytest.raises(ContractError, match="Out of range"):
        Dice().step({"action_text": thought})
    Dice().step({"action_text": "<think>mistake"})
    Dice().step({"action_text": "mistake", "observation_text": "<|im_start|>assistant\n<think>\n"})


class DiceLibrary:
    """Stands for a module of `GUESTS`."""

    @staticmethod
    @functools.cache
    def env_class(name):
        return guest_class(Dice, f"dice:{name}", "Dice.", 7)

    @staticmethod
    def names():
        return {"six": "Six sides."}


@pytest.fixture
def dice(monkeypatch):
    monkeypatch.setattr(registry, "GUESTS", {"dice": "dice_library"})
    monkeypatch.setattr("agentenv.cli.list.GUESTS", {"dice": "dice_library"})
    monkeypatch.setitem(registry.sys.modules, "dice_library", DiceLibrary)


def test_kind_and_name_load_a_class_that_is_pickled_by_name(dice):
    cls = load_env("dice:six:sides")
    assert (cls.spec, cls.max_turns, cls.needs_label) == ("dice:six:sides", 7, False)
    assert pickle.loads(pickle.dumps(cls)) is cls
    assert pickle.loads(pickle.dumps(Guest)) is Guest


def test_list_names_the_environments_of_a_library(dice):
    assert guest_catalog("dice") == [{"kind": "env", "name": "dice:six", "summary": "Six sides.", "origin": "dice"}]
    with pytest.raises(ConfigError, match="--from: expected one of dice, got 'cards'"):
        guest_catalog("cards")


def test_importing_a_library_leaves_the_numbers_and_the_root_logger_of_the_process(tmp_path, monkeypatch):
    code = "import logging, random\nrandom.seed(0)\nroot = logging.getLogger()\n"
    code += "root.addHandler(logging.StreamHandler())\nroot.setLevel(logging.INFO)\n"
    (tmp_path / "library_that_seeds.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    root = logging.getLogger()
    before = random.getstate(), list(root.handlers), root.level
    assert import_library("library_that_seeds", "dice").__name__ == "library_that_seeds"
    assert (random.getstate(), list(root.handlers), root.level) == before
    with pytest.raises(MissingDependency, match=r"pip install 'agentenv-rl\[dice\]'"):
        import_library("no_such_library", "dice")
    with pytest.raises(MissingDependency, match=r"pip install --no-deps dice==1"):
        import_library("no_such_library", "dice", "--no-deps dice==1")
