"""Whatever is reset when, and however episodes end: each environment of a vector is the single environment."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.gym.env import AgentEnv
from agentenv.gym.vector import AgentVectorEnv
from tests.gymnasium_env.vector_worlds import HERE, task_file

NUM, WORLD = 3, f"{HERE}:Wandering"
ACTIONS = st.lists(st.sampled_from(["", "a", "日本", "<|im_end|>", "x" * 30]), min_size=NUM, max_size=NUM)
MASKS = st.lists(st.booleans(), min_size=NUM, max_size=NUM)
PLANS = st.lists(st.tuples(ACTIONS, MASKS), min_size=1, max_size=8)
SEEDS = st.lists(st.integers(0, 2**31), min_size=NUM, max_size=NUM)
thorough = settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    return {"data": task_file(tmp_path_factory.mktemp("tasks"), [f"row {index}" for index in range(5)])}


def facts(record):
    """What two records of one episode have in common: all but their times."""
    turns = [(t.start, t.end, t.action, t.segment, t.result) for t in record.turns]
    return record.task, record.seed, record.token_ids, turns, record.stop_reason, record.reward, record.score


class Apart:
    """NUM single environments, reset as a vector in this mode would reset them."""

    def __init__(self, mode, arguments):
        self.mode, self.envs = mode, [AgentEnv(WORLD, **arguments) for _ in range(NUM)]
        self.records, self.over = [None] * NUM, [False] * NUM

    def begin(self, index, seed=None):
        self.over[index] = False
        return self.envs[index].reset(seed=seed)

    def step(self, index, action):
        """Observation, reward, terminated, truncated, info, and the last observation of what ended, or None."""
        env = self.envs[index]
        if self.over[index]:
            return *_shuffled(*self.begin(index)), None
        *told, info = env.step(action)
        self.over[index] = told[2] or told[3]
        if not self.over[index]:
            return *told, info, None
        self.records[index] = env.trajectory
        if self.mode is not AutoresetMode.SAME_STEP:
            return *told, info, None
        observation, first = self.begin(index)
        return observation, *told[1:], first, told[0]

    def close(self):
        for env in self.envs:
            env.close()


def _shuffled(observation, info):
    return observation, 0.0, False, False, info


def compare(together, apart, actions):
    observations, rewards, terminations, truncations, infos = together.step(actions)
    for index, action in enumerate(actions):
        observation, reward, terminated, truncated, info, final = apart.step(index, action)
        assert observations[index] == observation
        assert (rewards[index], terminations[index], truncations[index]) == (reward, terminated, truncated)
        assert infos["by_env"][index] == info
        assert (infos["final_obs"][index] if "final_obs" in infos else None) == final
        if apart.records[index] is not None:
            assert facts(together.records[index]) == facts(apart.records[index])
    return terminations | truncations


@pytest.mark.long
@pytest.mark.parametrize("mode", list(AutoresetMode))
@thorough
@given(seeds=SEEDS, plan=PLANS)
def test_each_environment_of_a_vector_is_the_single_one(arguments, mode, seeds, plan):
    together = AgentVectorEnv(WORLD, num_envs=NUM, autoreset_mode=mode, **arguments)
    apart = Apart(mode, arguments)
    try:
        observations, _ = together.reset(seed=seeds)
        assert observations == tuple(apart.begin(index, seed)[0] for index, seed in enumerate(seeds))
        for actions, wished in plan:
            ended = compare(together, apart, actions)
            mask = np.array(wished) | (ended & (mode is AutoresetMode.DISABLED))
            if mask.any():
                observations, infos = together.reset(options={"reset_mask": mask})
                for index in np.flatnonzero(mask):
                    assert (observations[index], infos["by_env"][index]) == apart.begin(int(index))
    finally:
        together.close()
        apart.close()
