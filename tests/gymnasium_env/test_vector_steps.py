"""AgentVectorEnv gives what gymnasium's own vector environments give, and wastes nothing."""

import asyncio

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from agentenv.errors import ConfigError, ContractError
from agentenv.gym.env import AgentEnv
from agentenv.gym.vector import AgentVectorEnv
from tests.gymnasium_env.vector_worlds import HERE, OneTurn, Together, task_file

NUM = 3
MODES = list(AutoresetMode)


@pytest.fixture
def make(tmp_path):
    """Makes a vector of environments of vector_worlds, ours or gymnasium's; closes them all."""
    made = []
    data = task_file(tmp_path, [f"row {index}" for index in range(7)])

    def of(world, mode=AutoresetMode.SAME_STEP, kind=AgentVectorEnv, num=NUM, **settings):
        name, settings = f"{HERE}:{world}", {"data": data, **settings}
        if kind is AgentVectorEnv:
            envs = AgentVectorEnv(name, num_envs=num, autoreset_mode=mode, **settings)
        else:
            options = {"shared_memory": False, "context": "fork"} if kind is AsyncVectorEnv else {}
            envs = kind([lambda: AgentEnv(name, **settings)] * num, autoreset_mode=mode, **options)
        made.append(envs)
        return envs

    yield of
    for envs in made:
        envs.close()


def say(observations):
    """A policy: what it says depends on what it sees."""
    return tuple(f"{len(o)} {sum(map(ord, str(o))) % 5}" for o in observations)


def play(envs, *, policy=say, steps=12, seed=5):
    """All that a run gives; with DISABLED whatever ended is reset before the next step."""
    disabled = envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    given = [envs.reset(seed=seed)]
    for _ in range(steps):
        given.append(envs.step(policy(given[-1][0])))
        ended = given[-1][2] | given[-1][3]
        if disabled and ended.any():
            given.append(envs.reset(options={"reset_mask": ended}))
    return given


def of_each(infos):
    """Infos by environment, as far as masks say that they are there."""
    listed = [{} for _ in range(NUM)]
    for key, column in infos.items():
        if key.startswith("_"):
            continue
        values = of_each(column) if isinstance(column, dict) else column
        for index in np.flatnonzero(infos[f"_{key}"]):
            listed[index][key] = values[index]
    return listed


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for mine, yours in zip(ours, theirs, strict=True):
        assert len(mine) == len(yours)
        assert of_each(mine[-1]) == of_each(yours[-1])
        for one, other in zip(mine[:-1], yours[:-1], strict=True):
            np.testing.assert_array_equal(np.array(one), np.array(other))
            assert type(one) is type(other)
            assert isinstance(one, tuple) or one.dtype == other.dtype


# --- parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_the_same_seeds_and_policy_give_what_gymnasiums_serial_vector_gives(make, mode):
    theirs = play(make("Wandering", mode, SyncVectorEnv))
    assert any(step[2].any() for step in theirs if len(step) > 2)
    assert any(step[3].any() for step in theirs if len(step) > 2)
    same(play(make("Wandering", mode)), theirs)


@pytest.mark.parametrize("obs_mode", ["messages", "tokens"])
def test_conversations_and_token_ids_of_any_length_are_those_of_the_serial_vector(make, obs_mode):
    from agentenv.engines.scripted import PlainTextTokenizer

    settings = {"obs_mode": obs_mode, **({"tokenizer": PlainTextTokenizer()} if obs_mode == "tokens" else {})}
    policy = say if obs_mode == "messages" else lambda seen: [[65 + len(ids) % 7, 66, 0] for ids in seen]
    ours, theirs = (
        play(make("Wandering", kind=kind, **settings), policy=policy) for kind in (AgentVectorEnv, SyncVectorEnv)
    )
    for mine, yours in zip(ours, theirs, strict=True):
        assert [list(seen) for seen in mine[0]] == [list(seen) for seen in yours[0]]
        assert len(mine) == 2 or mine[1].tolist() == yours[1].tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [7, [3, 1, 2], (3, None, 2), None])
def test_seeds_are_taken_as_gymnasium_takes_them(make, mode, seed):
    ours, theirs = make("Wandering", mode), make("Wandering", mode, SyncVectorEnv)
    seen = [envs.reset(seed=seed)[0] for envs in (ours, theirs)]
    known = range(NUM) if isinstance(seed, int) else [i for i, one in enumerate(seed or []) if one is not None]
    assert [seen[0][i] for i in known] == [seen[1][i] for i in known]
    assert [ours.np_random_seed[i] for i in known] == [theirs.np_random_seed[i] for i in known]
    assert len(ours.np_random) == NUM


def test_seeds_tasks_and_an_absent_mask_may_be_numpys(make):
    envs = make("Wandering")
    expected = envs.reset(seed=[3, 1, 2], options={"task": [2, 0, 1]})
    options = {"task": np.array([2, 0, 1]), "reset_mask": None}
    assert repr(envs.reset(seed=np.array([3, 1, 2]), options=options)) == repr(expected)
    assert repr(envs.reset(seed=np.int64(7))) == repr(envs.reset(seed=7))


def test_gymnasiums_own_make_vec_takes_ours_by_default_and_its_spec_makes_it_again():
    envs = gymnasium.make_vec("agentenv/GuessNumber-v0", num_envs=2, autoreset_mode="Disabled", on_error="truncate")
    again = gymnasium.make_vec(type(envs.spec).from_json(envs.spec.to_json()))
    for made in (envs, again):
        assert isinstance(made, AgentVectorEnv)
        assert (made.num_envs, made.metadata["autoreset_mode"]) == (2, AutoresetMode.DISABLED)
        assert made.on_error == "truncate"
        made.close()


# --- waste ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_all_of_eight_steps_of_one_turn_episodes_earn_and_half_under_next_step(make, mode):
    OneTurn.num_steps = 0
    given = play(make("OneTurn", mode, num=1), policy=lambda _: ["x"], steps=8)
    earned = sum(float(step[1].sum()) for step in given if len(step) > 2)
    assert earned == OneTurn.num_steps == (4 if mode is AutoresetMode.NEXT_STEP else 8)


def test_the_step_that_only_resets_needs_no_action(make):
    envs = make("OneTurn", AutoresetMode.NEXT_STEP, num=2)
    envs.reset()
    envs.step(["x", "x"])
    observations, rewards, terminations, _, _ = envs.step([None, None])
    assert rewards.tolist() == [0.0, 0.0]
    assert not terminations.any()
    assert all(text.startswith("row") for text in observations)


@pytest.mark.timeout(60)
def test_64_environments_are_all_inside_step_and_reset_at_once(make):
    Together.num_inside, Together.full = {}, {}
    envs = make("Together", num=64, env_kwargs={"num": 64}, step_timeout_s=30.0)
    envs.reset(seed=0)
    for _ in range(2):
        assert envs.step(["x"] * 64)[1].tolist() == [1.0] * 64
    assert Together.num_inside == {"reset": 3 * 64, "step": 2 * 64}


# --- resets and options -----------------------------------------------------------------------------------------------


def test_a_mask_resets_those_it_names_and_shows_the_others_as_they_are(make):
    envs = make("Wandering", AutoresetMode.DISABLED)
    before, _ = envs.reset(seed=2, options={"task": [0, 1, 2]})
    options = {"reset_mask": np.array([False, True, False]), "task": 6}
    after, infos = envs.reset(options=options)
    assert after == (before[0], "row 6", before[2])
    assert infos["_task_id"].tolist() == [False, True, False]
    assert "reset_mask" in options  # gymnasium's own takes it out of the caller's dict, we do not


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"seed": [1, 2]}, ContractError, r"seed: expected one per environment \(3\), got \[1, 2\]"),
        ({"seed": "123"}, ContractError, "seed: expected one per environment"),
        ({"options": {"tusk": 1}}, ConfigError, r"got \['tusk'\]"),
        ({"options": {"task": [1, 2]}}, ContractError, r"one per environment \(3\), got \[1, 2\]"),
        ({"options": {"task": 99}}, ConfigError, "an index below 7"),
        ({"options": {"reset_mask": [True, False, False]}}, ContractError, r"expected a bool array of shape \(3,\)"),
        ({"options": {"reset_mask": np.array([True, False])}}, ContractError, r"a bool array of shape \(3,\)"),
        ({"options": {"reset_mask": np.zeros(3, bool)}}, ContractError, r"shape \(3,\) with a True"),
        ({"seed": [1, 2.5, 3]}, ContractError, r"seed: expected integers or None, got \[1, 2.5, 3\]"),
    ],
)
def test_a_reset_that_does_not_fit_is_refused_and_nothing_is_lost(make, asked, error, words):
    envs = make("Wandering", AutoresetMode.DISABLED)
    envs.reset(seed=0)
    with pytest.raises(error, match=words):
        envs.reset(**asked)
    envs.step(["x"] * NUM)


@pytest.mark.parametrize(
    "actions",
    ["abc", ["a", "b"], ["a", "b", 3], None],
)
def test_actions_that_do_not_fit_are_refused_before_anything_is_stepped(make, actions):
    OneTurn.num_steps = 0
    envs = make("OneTurn")
    envs.reset()
    with pytest.raises(ContractError):
        envs.step(actions)
    assert OneTurn.num_steps == 0
    assert envs.step(np.array(["a", "b", "c"]))[1].sum() == 3.0


@pytest.mark.parametrize("mode", MODES)
def test_a_step_before_any_reset_is_refused(make, mode):
    with pytest.raises(ContractError, match="Call reset"):
        make("OneTurn", mode).step(["x"] * NUM)


def test_a_step_of_what_ended_and_was_not_reset_is_refused(make):
    envs = make("Wandering", AutoresetMode.DISABLED)
    envs.reset(seed=5)
    ended = np.zeros(NUM, bool)
    while not ended.any():
        _, _, terminations, truncations, _ = envs.step(["x"] * NUM)
        ended = terminations | truncations
    with pytest.raises(ContractError, match="Call reset with options="):
        envs.step(["x"] * NUM)
    envs.reset(options={"reset_mask": ended})
    envs.step(["x"] * NUM)


@pytest.mark.parametrize("setting", [{"num_envs": 0}, {"on_error": "ignore"}, {"render_mode": "human"}, {"a": 1}])
def test_settings_that_mean_nothing_are_refused(setting):
    with pytest.raises(ConfigError):
        AgentVectorEnv("guess_number", **setting)


# --- what else gymnasium's have ---------------------------------------------------------------------------------------


def test_render_returns_the_text_of_every_episode(make):
    envs = make("Wandering", render_mode="ansi", mode=AutoresetMode.DISABLED)
    envs.reset(options={"task": [0, 1, 2]})
    envs.step(["x"] * NUM)
    assert all(f"row {index}" in text for index, text in enumerate(envs.render()))


def test_records_are_the_trajectories_that_ended_last(make):
    envs = make("Wandering")
    assert envs.records == (None,) * NUM
    given = play(envs)
    last = {i: step for step in given[1:] for i in np.flatnonzero(step[2] | step[3])}
    for index, record in enumerate(envs.records):
        assert record.turns[-1].result.reward == last[index][1][index]
        assert record.terminated == last[index][2][index]


async def test_a_caller_with_its_own_loop_awaits_the_same_and_does_other_work_meanwhile(make):
    plain, awaited = make("Wandering"), make("Wandering")
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    given = [await awaited.areset(seed=5)]
    for _ in range(12):
        given.append(await awaited.astep(say(given[-1][0])))
    await awaited.aclose()
    await awaited.aclose()
    ticking.cancel()
    same(given, play(plain))  # plain calls, inside a running loop
    assert ticks > 12
    assert awaited.closed
