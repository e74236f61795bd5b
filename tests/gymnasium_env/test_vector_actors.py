"""A vector whose environments run in local processes: the same results, and nothing is left behind."""

import gc
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from agentenv.errors import ConfigError
from agentenv.gym.vector import AgentVectorEnv
from tests.gymnasium_env.vector_worlds import HERE, task_file
from tests.waits import wait_until

pytestmark = pytest.mark.long


def children():
    """The processes of local actors below this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z" and b"env_actors.process" in command:
            found.append(int(path.parent.name))
    return found


def vector(tmp_path, name="Wandering", **settings):
    return AgentVectorEnv(f"{HERE}:{name}", data=task_file(tmp_path, ["one", "two"]), **settings)


def played(envs, num_steps):
    """What a vector returns over some steps, as plain data."""
    seen = [envs.reset(seed=7)[0]]
    for step in range(num_steps):
        observations, rewards, terminations, truncations, _ = envs.step([f"say {step}"] * envs.num_envs)
        seen.append((observations, rewards.tolist(), terminations.tolist(), truncations.tolist()))
    envs.close()
    return seen


def test_results_are_those_of_this_process(tmp_path):
    here = played(vector(tmp_path, num_envs=5, env_actors=0), 6)
    assert played(vector(tmp_path, num_envs=5, env_actors=2), 6) == here


def test_a_class_that_computes_runs_in_processes_unless_told_otherwise(tmp_path):
    for env_actors, is_elsewhere in ((None, True), (0, False), (1, True)):
        envs = vector(tmp_path, "Computing", num_envs=2, env_actors=env_actors)
        envs.reset(seed=0)
        _, rewards, *_ = envs.step(["pid", "pid"])
        assert [pid != os.getpid() for pid in rewards.astype(int)] == [is_elsewhere] * 2
        envs.close()
    assert not children()


def test_no_process_starts_before_the_first_reset_and_none_outlives_the_vector(tmp_path):
    envs = vector(tmp_path, num_envs=4, env_actors=2)
    assert not children()
    envs.reset(seed=0)
    assert len(children()) == 2
    envs.close()
    assert not children()
    envs = vector(tmp_path, num_envs=4, env_actors=2)
    envs.reset(seed=0)
    assert len(children()) == 2
    del envs
    gc.collect()
    wait_until(lambda: not children())


def test_there_are_never_more_processes_than_environments(tmp_path):
    envs = vector(tmp_path, num_envs=1, env_actors=8)
    envs.reset(seed=0)
    assert len(children()) == 1
    envs.close()


def test_the_environments_of_a_killed_process_fail_and_the_vector_goes_on(tmp_path):
    envs = vector(tmp_path, "Computing", num_envs=4, env_actors=2, on_error="truncate")
    envs.reset(seed=0)
    _, pids, *_ = envs.step(["pid"] * 4)
    killed = int(pids[0])
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: killed not in children())
    _, rewards, terminations, truncations, infos = envs.step(["pid"] * 4)
    lost = pids == killed
    np.testing.assert_array_equal(np.isnan(rewards), lost)
    np.testing.assert_array_equal(truncations & lost, lost)
    assert not terminations[lost].any()
    assert all(
        "expected a living process of --env_actors" in str(infos["final_info"]["error"][i]) for i in lost.nonzero()[0]
    )
    envs.reset(seed=1)
    assert not any(map(math.isnan, envs.step(["pid"] * 4)[1]))
    envs.close()


@pytest.mark.parametrize("wrong", [-1, "2"])
def test_a_wrong_number_of_processes_is_refused(tmp_path, wrong):
    with pytest.raises(ConfigError, match=r"AgentVectorEnv\.env_actors: expected None or an integer >= 0"):
        vector(tmp_path, env_actors=wrong)


def test_arguments_that_no_process_can_receive_are_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"AgentEnv\.env_kwargs: given: expected a value that can be pickled"):
        vector(tmp_path, "Computing", env_actors=1, env_kwargs={"given": lambda: 1})
