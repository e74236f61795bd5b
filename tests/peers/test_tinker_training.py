"""tinker-cookbook 0.5.0 trains on our episodes against SkyRL 0.3.0's server, with JAX on the CPU: three whole steps."""

import json

import pytest

from tests.peers.where import ROOT, needs, python, versions

pytestmark = [pytest.mark.slow, needs("tinker_skyrl", "skyrl"), pytest.mark.timeout(2000)]

STEPS = 3


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    script = ROOT / "tests/peers/tinker_training.py"
    printed = python("tinker_skyrl", script, STEPS, cwd=tmp_path_factory.mktemp("training"), timeout=1900)
    return json.loads(printed.splitlines()[-1])


def test_what_the_trainer_computes_of_sampled_tokens_is_what_the_server_sampled_with(metrics, cell):
    assert len(metrics) == STEPS
    estimates = [step[f"optim/kl_sample_train_v{i}"] for step in metrics for i in (1, 2)]
    assert max(map(abs, estimates)) < 1e-6
    assert any(estimates)
    named = versions("tinker_skyrl", "tinker-cookbook", "tinker", "skyrl", "jax")
    code = "rl.train.main, SkyRL's server; vowels pay"
    num = sum(step["env/all/total_episodes"] for step in metrics)
    gap = max(map(abs, estimates))
    cell("math_retry", "tinker-cookbook", code, named, train_steps=STEPS, episodes=num, largest_kl_sample_train=gap)


def test_later_steps_sample_with_other_weights_because_siblings_earned_different_rewards(metrics):
    assert metrics[0]["env/all/by_group/frac_mixed"] == 1.0
    assert all(0 < step["env/all/reward/total"] < 2 for step in metrics)
    assert all(step["env/all/turns_per_episode"] == 2.0 for step in metrics)
    assert all(step["env/all/stop/completed"] == 1.0 for step in metrics)
