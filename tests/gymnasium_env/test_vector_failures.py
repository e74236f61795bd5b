"""One environment's failure is its own; what opens closes, whatever process, thread or loop asks."""

import asyncio
import math
import pickle
import threading

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from agentenv._util.loop_thread import run_sync, submit
from agentenv.errors import ContractError, EpisodeFailed
from agentenv.gym.vector import AgentVectorEnv, BatchFailed
from tests.gymnasium_env.vector_worlds import HERE, Fragile, task_file
from tests.waits import until

MODES = list(AutoresetMode)
ROWS = [{"prompt": "good", "label": "good"}, {"prompt": "bad", "label": "bad"}]


@pytest.fixture
def make(tmp_path):
    """Makes vectors of Fragile; all its environments have to be closed at the end."""
    Fragile.open.clear()
    Fragile.num_closed, Fragile.num_hanging, Fragile.broken = 0, 0, False
    made, data = [], task_file(tmp_path, ROWS)

    def of(num=3, **settings):
        made.append(AgentVectorEnv(f"{HERE}:Fragile", num_envs=num, data=data, **settings))
        return made[-1]

    yield of
    for envs in made:
        envs.close()
    assert not Fragile.open


def reset_all(envs, task=0):
    return envs.reset(seed=0, options={"task": task})


# --- a failing step ---------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("action", ["raise", "hang"])
def test_a_failed_step_has_no_reward_and_the_others_lose_nothing(make, mode, action):
    Fragile.broken = False
    envs = make(autoreset_mode=mode, on_error="truncate", step_timeout_s=2.0 if action == "hang" else 60.0)
    reset_all(envs)
    _, rewards, terminations, truncations, infos = envs.step(["stay", action, "end"])
    assert rewards[[0, 2]].tolist() == [0.5, 0.5]
    assert math.isnan(rewards[1])
    assert terminations.tolist() == [False, False, True]
    assert truncations.tolist() == [False, True, False]
    said = infos["final_info"] if mode is AutoresetMode.SAME_STEP else infos
    assert ("the world ended" if action == "raise" else "step_timeout_s") in said["error"][1]
    assert said["_error"].tolist() == [False, True, False]
    assert envs.records[1].reward is None


@pytest.mark.parametrize("mode", MODES)
def test_by_default_a_failure_raises_with_what_the_others_gave_and_the_vector_continues(make, mode):
    envs = make(autoreset_mode=mode)
    reset_all(envs)
    with pytest.raises(BatchFailed, match=r"none from \[1\]: environment 1: step: ValueError: the world") as failed:
        envs.step(["stay", "raise", "end"])
    assert isinstance(failed.value, EpisodeFailed)
    assert list(failed.value.errors) == [1]
    _, rewards, terminations, truncations, _ = failed.value.outcome
    np.testing.assert_array_equal(rewards, [0.5, np.nan, 0.5])
    assert (terminations | truncations).tolist() == [False, True, True]
    assert pickle.loads(pickle.dumps(failed.value)).errors == failed.value.errors
    envs.reset(options={"task": 0, "reset_mask": np.array([False, True, True])})
    observations, rewards, *_ = envs.step(["stay"] * 3)
    assert observations == ("turn 1", "turn 0", "turn 0")
    assert rewards.tolist() == [0.5] * 3


def test_a_fact_that_is_called_error_is_not_a_failure(make):
    envs = make()
    reset_all(envs)
    _, rewards, _, _, infos = envs.step(["stay", "err", "stay"])
    assert rewards.tolist() == [0.5] * 3
    assert infos["error"].tolist() == [None, "a fact of this world", None]


# --- a failing reset --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_an_environment_that_cannot_be_reset_shows_nothing_and_earns_nan(make, mode):
    envs = make(autoreset_mode=mode, on_error="truncate")
    observations, infos = reset_all(envs, [0, 1, 0])
    assert observations == ("good", "", "good")
    assert observations in envs.observation_space
    assert "no such world" in infos["error"][1]
    Fragile.broken = True
    _, rewards, _, truncations, _ = envs.step(["stay"] * 3)
    np.testing.assert_array_equal(rewards, [0.5, np.nan, 0.5])
    assert truncations.tolist() == [False, True, False]


def test_a_reset_that_fails_after_the_end_keeps_the_reward_that_was_earned(make):
    envs = make()
    reset_all(envs)
    Fragile.broken = True
    with pytest.raises(BatchFailed, match="no such world") as failed:
        envs.step(["end", "stay", "stay"])
    observations, rewards, terminations, truncations, infos = failed.value.outcome
    assert rewards.tolist() == [0.5] * 3
    assert (terminations.tolist(), truncations.any()) == ([True, False, False], False)
    assert observations == ("", "turn 0", "turn 0")
    assert "no such world" in infos["error"][0]
    assert infos["final_info"]["stop_reason"][0] == "terminated"


# --- closing ----------------------------------------------------------------------------------------------------------


def test_close_ends_all_episodes_once_and_then_nothing_goes(make):
    envs = make()
    reset_all(envs)
    reset_all(envs)
    assert (len(Fragile.open), Fragile.num_closed) == (3, 3)
    envs.step(["stay"] * 3)
    envs.close()
    envs.close()
    assert not Fragile.open
    assert Fragile.num_closed == 6
    with pytest.raises(ContractError, match="a closed one"):
        envs.reset()
    with pytest.raises(ContractError, match="a closed one"):
        envs.step(["stay"] * 3)


# --- who calls --------------------------------------------------------------------------------------------------------


def test_a_close_ends_the_call_that_runs_and_the_one_that_waits_for_it(make):
    envs, failures = make(), []
    reset_all(envs)

    def call(method, *args):
        try:
            method(*args)
        except ContractError as error:
            failures.append(str(error))

    calls = [(envs.step, ["hang"] * 3), (envs.reset,)]
    threads = [threading.Thread(target=call, args=each) for each in calls]
    threads[0].start()
    run_sync(until(lambda: Fragile.num_hanging == 3))
    threads[1].start()
    envs.close()
    for thread in threads:
        thread.join(30)
    assert ["expected an open one, got a closed one" in text for text in failures] == [True, True]


async def test_a_step_that_is_given_up_ends_all_episodes_and_a_reset_continues(make):
    envs = make()
    await envs.areset(seed=0, options={"task": 0})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(envs.astep(["stay", "hang", "stay"]), 0.05)
    await until(lambda: not Fragile.open)
    with pytest.raises(ContractError, match="Call reset"):
        await envs.astep(["stay"] * 3)
    await envs.areset(options={"task": 0})
    assert (await envs.astep(["stay"] * 3))[1].tolist() == [0.5] * 3


def test_a_task_that_lets_an_interrupt_out_fails_alone_and_others_of_the_loop_continue():
    async def interrupts():
        await asyncio.sleep(0)
        raise KeyboardInterrupt

    waiting = submit(asyncio.sleep(0.2, "other"))
    with pytest.raises(KeyboardInterrupt):
        run_sync(interrupts())
    assert waiting.result(60) == "other"
