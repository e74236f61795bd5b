"""An environment can be copied, pickled and forked in the middle of an episode; what it said before holds."""

import multiprocessing
import pickle
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest

from agentenv.episode.registry import load_env
from agentenv.errors import EpisodeFailed
from agentenv.gym import AgentEnv
from agentenv.testing.tokenizers import CharTokenizer

GAMES = f"{Path(__file__).parent / 'games.py'}"
WAYS = {"deepcopy": deepcopy, "pickle": lambda env: pickle.loads(pickle.dumps(env))}
copied_both_ways = pytest.mark.parametrize("copied", WAYS.values(), ids=WAYS)


def game(name="Echo", **kwargs):
    return AgentEnv(f"{GAMES}:{name}", **kwargs)


@copied_both_ways
@pytest.mark.parametrize("num", range(4))
def test_a_copy_continues_from_where_the_original_is_and_leaves_it_alone(copied, num):
    env = game()
    env.reset(seed=2, options={"task": "yes"})
    for turn in range(num):
        env.step(f"{turn}")
    copy = copied(env)
    assert copy.step("yes") == env.step("yes")
    assert copy.trajectory.token_ids == env.trajectory.token_ids
    assert copy.reset() == env.reset()
    assert copy.action_space.seed(1) == env.action_space.seed(1)
    assert copy.action_space.sample() == env.action_space.sample()


@copied_both_ways
def test_a_copy_of_an_unused_copy_is_one_of_the_original(copied):
    env = game()
    env.reset(seed=2, options={"task": "yes"})
    env.step("a")
    copy = copied(copied(env))
    assert copy.step("b")[0] == env.step("b")[0]
    assert copied(copy).step("c")[0] == env.step("c")[0]


@copied_both_ways
def test_a_copy_that_was_never_reset_can_be(copied):
    copy = copied(game())
    copy.close()
    assert copy.reset(seed=1) == game().reset(seed=1)


@copied_both_ways
def test_an_episode_that_is_over_is_carried_and_not_played_again(copied):
    cls = load_env(f"{GAMES}:Echo")
    env = game(env_kwargs={"name": "over"})
    env.reset(options={"task": "yes"})
    env.step("yes")
    cls.closed.clear()
    copy = copied(env)
    assert copy.trajectory.reward == 1.0
    assert copy.trajectory.token_ids == env.trajectory.token_ids
    assert cls.closed == []
    with pytest.raises(Exception, match="is over"):
        copy.step("yes")


@copied_both_ways
def test_a_copy_of_an_environment_that_is_not_what_its_seed_says_fails_instead_of_going_astray(copied):
    env = game("Unseeded")
    env.reset(options={"task": "yes"})
    copy = copied(env)
    with pytest.raises(EpisodeFailed, match="depends on more than its seed"):
        copy.step("a")
    env.step("a")


def test_tokens_and_render_modes_go_with_a_copy():
    env = game(obs_mode="tokens", tokenizer=CharTokenizer(), render_mode="ansi")
    env.reset(options={"task": "yes"})
    env.step([99, 0])
    copy = pickle.loads(pickle.dumps(env))
    assert copy.render() == env.render()
    assert copy.step([99, 0])[0].tolist() == env.step([99, 0])[0].tolist()


def play_on(env, over, pipe):
    pipe.send([env.step("b"), env.step("yes"), env.reset(seed=4), over.trajectory.prompt])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # from Python 3.12 on: of every fork
def test_a_forked_process_continues_with_its_own_loop__trap_fork():
    env = game()
    env.reset(seed=2, options={"task": "yes"})
    env.step("a")
    over = game("Unseeded")
    over.reset(options={"task": "yes"})
    over.step("yes")
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=play_on, args=(env, over, there), daemon=True)
    process.start()
    assert here.poll(60)
    said = here.recv()
    process.join(60)
    assert said == [env.step("b"), env.step("yes"), env.reset(seed=4), over.trajectory.prompt]
    assert process.exitcode == 0


FRESH = """
import atexit, pickle, sys
atexit.register(lambda: print(load_env(env.spec.kwargs["env"]).closed))
from agentenv.episode.registry import load_env
env = pickle.load(sys.stdin.buffer)
print(env.step("yes")[1:4], env.spec.id, "torch" in sys.modules)
env.reset()
"""


@pytest.mark.long
def test_a_pickle_continues_in_a_fresh_process_whose_end_closes_the_environment__trap_spawn():
    env = game()
    env.reset(seed=2, options={"task": "yes"})
    env.step("a")
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", FRESH],
        input=pickle.dumps(env),
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.decode().strip() == "(1.0, True, False) agentenv/Echo-v0 False\n['', '']"
