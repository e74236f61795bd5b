"""A copy, a pickle and a forked process have the settings and the stream of random numbers, and begin with a reset."""

import multiprocessing
import pickle
from copy import deepcopy
from pathlib import Path

import pytest

from agentenv.errors import ContractError
from agentenv.gym import AgentEnv

GAMES = f"{Path(__file__).parent / 'games.py'}"


def game():
    return AgentEnv(f"{GAMES}:Echo")


@pytest.mark.parametrize("copied", [deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["deepcopy", "pickle"])
def test_a_copy_begins_with_a_reset_and_leaves_the_original_alone(copied):
    env = game()
    env.reset(seed=2, options={"task": "yes"})
    env.step("a")
    copy = copied(env)
    with pytest.raises(ContractError, match="Call reset"):
        copy.step("yes")
    assert env.step("yes")[2]
    assert copy.reset() == env.reset()
    assert copy.action_space.seed(1) == env.action_space.seed(1)
    assert copy.action_space.sample() == env.action_space.sample()
    copy.close()
    assert copied(game()).reset(seed=1) == game().reset(seed=1)


def play_on(env, pipe):
    try:
        env.step("b")
    except ContractError as error:
        pipe.send([str(error), env.reset(seed=4)])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # from Python 3.12 on: of every fork
def test_a_forked_process_has_its_own_loop_and_begins_with_a_reset__trap_fork():
    env = game()
    env.reset(seed=2, options={"task": "yes"})
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=play_on, args=(env, there), daemon=True)
    process.start()
    assert here.poll(60)
    said = here.recv()
    process.join(60)
    assert process.exitcode == 0
    assert "Call reset" in said[0]
    assert env.step("yes")[2]
    assert said[1] == env.reset(seed=4)
