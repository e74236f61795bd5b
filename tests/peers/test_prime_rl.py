"""Our environments in verifiers' own rollouts, and prime-rl's training samples of them, token by token."""

import pytest

from tests.peers.where import ROOT, answer, folder_of, needs, versions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENVIRONMENTS = ["math_retry", "tool_use", "guess_number"]
GROUP, NUM_TASKS = 4, 2
NAMES = ("tokens", "mask", "logprobs")
SCRIPT = ROOT / "tests/peers/prime_rollout.py"
HAS_PRIME_RL = (folder_of("prime_rl") / "prime_rl/orchestrator/trajectories.py").is_file()
in_verifiers = needs("verifiers", "prime_sandboxes")
in_prime_rl = pytest.mark.skipif(not HAS_PRIME_RL, reason=f"prime-rl is not in {folder_of('prime_rl')}: make prime-rl")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Answers under verifiers 0.4.0."""
    return answer("verifiers", SCRIPT, cwd=tmp_path_factory.mktemp("verifiers"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Answers under the verifiers that prime-rl pins, and prime-rl's own."""
    return answer("prime_rl", SCRIPT, cwd=tmp_path_factory.mktemp("prime_rl"))


def check_rows(rows):
    """Each trace is our trajectory; some succeed at once, some later, some never."""
    assert len(rows) == GROUP * NUM_TASKS
    for row in rows:
        assert row["ok"]
        assert row["equal"] == dict.fromkeys((*NAMES, "reward", "turn_rewards"), True)
        assert row["num_branches"] == row["num_segments"] == 1
        assert row["num_turns"] == row["num_asked"]
    assert len({row["reward"] for row in rows}) > 1
    assert max(row["num_turns"] for row in rows) > 1


@in_verifiers
@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_traces_of_verifiers_own_rollouts_equal_our_trajectories(ran, env, cell):
    rows = ran[env]
    check_rows(rows)
    equal = {f"equal_{name}": sum(row["equal"][name] for row in rows) for name in (*NAMES, "reward")}
    cell(env, "verifiers", "Env.run_episode, TrainClient", versions("verifiers"), episodes=len(rows), **equal)


@in_verifiers
def test_calls_of_tools_reach_the_environment_and_their_results_the_policy(ran):
    called = [row for row in ran["tool_use"] if row["num_turns"] == 2]
    assert [row["roles"] for row in called] == [["user", "assistant", "tool", "assistant"]] * NUM_TASKS
    assert all(row["reward"] == 1.0 for row in called)


@in_verifiers
def test_a_failed_episode_has_an_error_and_no_reward_and_its_siblings_keep_theirs(ran):
    found = ran["failures"]["pays"]
    assert sorted(found["ok"]) == [False, True, True, True]
    for ok, rewards, errors in zip(found["ok"], found["rewards"], found["errors"], strict=True):
        if ok:
            assert errors == []
            assert rewards["reward"] in (1.5, 2.5, 4.5)
        else:
            assert rewards == {}
            assert "one of four" in errors[0]


@in_verifiers
def test_the_environment_has_its_last_word_where_a_limit_of_verifiers_ends_the_rollout(ran):
    found = ran["failures"]["cut"]
    assert found["ok"] == [True] * GROUP
    assert found["rewards"] == [{"reward": 1.75}] * GROUP
    assert found["info"]["agentenv"]["turn_rewards"] == [0.5, 0.5, 0.75]
    assert found["info"]["agentenv"]["truncated"]
    assert found["metrics"] == {"num": 1.0}


@in_verifiers
def test_a_prompt_that_is_too_long_is_no_reward(ran):
    found = ran["failures"]["long"]
    assert found["ok"] == [False] * GROUP
    assert found["rewards"] == [{}] * GROUP


@in_verifiers
def test_vf_eval_plays_the_package_unmodified(ran):
    assert [made[:2] for made in ran["evaluated"]] == [[True, 1]] * 2
    assert all(num_turns > 1 for _, _, num_turns in ran["evaluated"])


@in_prime_rl
@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_training_samples_of_prime_rl_equal_our_trajectories(trained, env, cell):
    check_rows(trained[env])
    rows = trained["prime"][env]
    assert len(rows) == GROUP * NUM_TASKS
    for row in rows:
        assert row["equal"] == dict.fromkeys(NAMES, True)
        assert row["num_after"] == 0
    assert any(row["advantage"] for row in rows)
    gap = max(row["advantage_gap"] for row in rows)
    assert gap < 1e-6
    equal = {f"equal_{name}": sum(row["equal"][name] for row in rows) for name in NAMES}
    used = {"prime-rl": "559b447", **versions("prime_rl", "verifiers")}
    code = "GRPOAlgorithm, trace_to_samples, prepare_batch; no training"
    cell(env, "prime-rl", code, used, episodes=len(rows), **equal, largest_advantage_difference=gap)


@in_prime_rl
def test_prime_rl_leaves_a_failed_episode_out_of_the_mean_and_of_the_samples(trained):
    found = trained["failures"]["pays"]
    assert sorted(found["ok"]) == [False, True, True, True]
    assert sorted(found["advantages"]) == pytest.approx([1.5 - 8.5 / 3, 2.5 - 8.5 / 3, 4.5 - 8.5 / 3], abs=1e-6)


@in_prime_rl
def test_right_siblings_of_a_failed_episode_have_no_advantage(trained, lost):
    found = trained["failures"]["right"]
    assert sorted(found["ok"]) == [False, True, True, True]
    used = {"prime-rl": "559b447", **versions("prime_rl", "verifiers")}
    lost(
        "prime-rl", "GRPOAlgorithm.score_group, trace_to_samples", used,
        gets="no sample: the trace has an error and no reward",
        again="once by `retries` of the page's `rl.toml`; by default never",
        counted="`has_error/mean` in its log; read in its source",
        advantages={"grpo": [found["advantages"], found["zero"][:3]]},
    )  # fmt: skip


@in_prime_rl
def test_prime_rl_reads_the_configuration_of_the_page(trained):
    assert trained["config"] == ["agentenv-math-retry", "subprocess", 1, 8, "auto"]
