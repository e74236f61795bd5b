"""Every installed environment, as Gymnasium's checker, wrappers and vectors want it: `check_gym`, and what it finds."""

from pathlib import Path

import pytest

import agentenv.gym
from agentenv.gym.registration import installed_ids
from agentenv.testing import check_gym

GAMES = f"{Path(__file__).parent / 'games.py'}"
IDS = installed_ids()
NEEDS = {"reasoning_gym": "reasoning_gym"}
"""Packages that an environment needs, where agentenv does not."""
each_id = pytest.mark.parametrize("env_id", IDS)


def needed(env_id):
    if IDS[env_id] in NEEDS:
        pytest.importorskip(NEEDS[IDS[env_id]])


@pytest.mark.long
@each_id
def test_every_installed_environment_passes_all_checks(env_id):
    needed(env_id)
    assert env_id in agentenv.gym.env_ids()
    check_gym(env_id, num_episodes=3, processes=False)


@pytest.mark.long
def test_conversations_pass_all_checks():
    check_gym("math_retry", obs_mode="messages", num_episodes=3, processes=False)


@pytest.mark.long
def test_a_users_class_passes_all_checks_with_processes():
    check_gym(f"{GAMES}:Echo")


@pytest.mark.long
def test_tokens_pass_all_checks():
    check_gym("guess_number", obs_mode="tokens", model="tiny-math", num_episodes=3, processes=False)


@pytest.mark.parametrize(("name", "told"), [("Unseeded", "non-deterministic"), ("Timed", "info")])
def test_what_is_not_as_its_seed_says_is_found__trap_clock_in_info(name, told):
    with pytest.raises(AssertionError, match=told):
        check_gym(f"{GAMES}:{name}", processes=False)
