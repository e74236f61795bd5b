"""Infos in a batch stay what each environment said, in the form that gymnasium's wrappers read."""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Text
from gymnasium.vector import AsyncVectorEnv, VectorEnv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.gym.batching import batch_infos
from agentenv.gym.env import AgentEnv
from agentenv.gym.vector import AgentVectorEnv
from tests.gymnasium_env.vector_worlds import HERE, task_file

forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def gymnasiums(infos):
    """The same infos as gymnasium batches them."""
    vector, batch = VectorEnv(), {}
    vector.num_envs = len(infos)
    for index, info in enumerate(infos):
        batch = vector._add_info(batch, info, index)
    return batch


def test_a_score_of_0_does_not_make_the_next_ones_integers():
    infos = [{"score": 0}, {"score": 0.75}]
    assert gymnasiums(infos)["score"].tolist() == [0, 0]  # what this guards from
    assert batch_infos(infos)["score"].tolist() == [0.0, 0.75]
    assert batch_infos(infos)["score"].dtype == np.float64


def test_token_ids_of_any_length_are_kept():
    infos = [{"token_ids": np.array([1, 2])}, {"token_ids": np.array([3])}, {"token_ids": [4, 5, 6]}]
    with pytest.raises(ValueError, match="could not broadcast"):
        gymnasiums(infos)
    assert [list(ids) for ids in batch_infos(infos)["token_ids"]] == [[1, 2], [3], [4, 5, 6]]


def test_a_missing_number_is_nan_and_no_other_number():
    batch = batch_infos([{}, {"score": 1.0}, None])
    assert np.isnan(batch["score"][[0, 2]]).all()
    assert batch["_score"].tolist() == [False, True, False]
    assert batch["_by_env"].tolist() == [True, True, False]


def test_an_integer_that_no_float_holds_stays_what_it_is():
    assert batch_infos([{"seed": 2**63 - 1}, {"seed": 5}])["seed"].tolist() == [2**63 - 1, 5]


def test_lists_of_one_length_do_not_become_a_matrix():
    column = batch_infos([{"ids": [1, 2]}, {"ids": [3, 4]}])["ids"]
    assert column.shape == (2,)
    assert column.tolist() == [[1, 2], [3, 4]]


SCALARS = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.sampled_from(["", "é"]), st.none())
VALUES = st.one_of(SCALARS, st.lists(st.integers(), max_size=3), st.dictionaries(st.sampled_from("xy"), SCALARS))
INFOS = st.lists(st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(INFOS)
def test_any_text_of_environments_comes_back_from_the_batch(infos):
    batch = batch_infos(infos)
    assert batch["by_env"].tolist() == infos
    for key in {key for info in infos for key in info}:
        assert batch[f"_{key}"].tolist() == [key in info for info in infos]
        if not isinstance(batch[key], dict):
            for index in np.flatnonzero(batch[f"_{key}"]):
                assert batch[key][index] == infos[index][key]


def test_the_last_info_of_an_episode_and_the_first_of_the_next_are_both_there(tmp_path):
    envs = AgentVectorEnv(f"{HERE}:Scored", num_envs=2, data=task_file(tmp_path, ["a"]))
    envs.reset()
    envs.step(["0", "0"])
    observations, _, terminations, _, infos = envs.step(["0", "0.75"])
    assert terminations.all()
    assert observations == ("a", "a")
    assert infos["final_obs"].tolist() == ["Again.", "Again."]
    assert infos["final_info"]["score"].tolist() == [0.0, 0.75]
    assert infos["final_info"]["by_env"][1] == {"score": 0.75, "stop_reason": "terminated"}
    assert infos["by_env"][1] == {"task_id": "000000"}
    assert "score" not in infos
    envs.close()


# --- gymnasium's Text in shared memory --------------------------------------------------------------------------------


class Talking(gymnasium.Env):
    """Says one word, through gymnasium's own space."""

    observation_space = Text(10)
    action_space = Text(10)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "hello", {}

    def step(self, action):
        return "world", 0.0, False, False, {}


@pytest.mark.long
@forks
def test_gymnasiums_text_is_garbage_in_its_processes_and_ours_is_refused_there_or_right(tmp_path):
    theirs = AsyncVectorEnv([Talking] * 2, context="fork")
    try:
        seen, _ = theirs.reset()
        assert tuple(seen) != ("hello", "hello")  # what this guards from: no error, another text
        assert seen in theirs.observation_space
    finally:
        theirs.close()
    settings = {"data": task_file(tmp_path, ["hello é 日本"])}
    makers = [lambda: AgentEnv(f"{HERE}:OneTurn", **settings)] * 2
    with pytest.raises(ValueError, match="shared_memory=False"):
        AsyncVectorEnv(makers, context="fork")
    for envs in (
        AsyncVectorEnv(makers, shared_memory=False, context="fork"),
        AgentVectorEnv(f"{HERE}:OneTurn", num_envs=2, **settings),
    ):
        try:
            assert envs.reset()[0] == ("hello é 日本",) * 2
        finally:
            envs.close()
