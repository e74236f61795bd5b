"""SkyRL 0.3.0's own training loop over our episodes: its batch holds the segments of our trajectories, bit by bit."""

import json
import math
import statistics

import pytest

from tests.peers.where import ROOT, answer, needs, page_block, python, versions

pytestmark = [pytest.mark.slow, needs("skyrl"), pytest.mark.timeout(900)]

ENVIRONMENTS = ["math_retry", "tool_use", "guess_number"]
GROUP, NUM_TASKS = 4, 2
EVERYWHERE = dict.fromkeys(("tokens", "responses", "masks", "logprobs", "rewards"), True)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return answer("skyrl", ROOT / "tests/peers/skyrl_rollout.py", cwd=tmp_path_factory.mktemp("skyrl"))


def check_advantages(rows):
    """GRPO's of one result for each episode, worked out by hand."""
    results = {(row["uid"], row["episode"]): row["reward"] for row in rows}
    for row in rows:
        group = [reward for (uid, _), reward in results.items() if uid == row["uid"]]
        by_hand = (row["reward"] - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)
        assert math.isclose(row["advantage"], by_hand, abs_tol=1e-4)


@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_tokens_masks_log_probabilities_and_rewards_equal_our_trajectories(ran, env, cell):
    rows = ran[env]["rows"]
    assert len(rows) == GROUP * NUM_TASKS
    for row in rows:
        assert row["equal"] == EVERYWHERE
    check_advantages(rows)
    equal = {f"equal_{key}": sum(row["equal"][key] for row in rows) for key in EVERYWHERE}
    code, named = "RayPPOTrainer.train without models, RemoteInferenceClient", versions("skyrl", "skyrl", "ray")
    cell(env, "SkyRL", code, named, episodes=len(rows), **equal)


def test_some_episodes_succeed_have_several_turns_and_meet_each_limit(ran):
    rows = [row for env in (*ENVIRONMENTS, "tight") for row in ran[env]["rows"]]
    assert {row["reward"] for row in rows} >= {0.0, 1.0}
    assert max(row["num_turns"] for row in rows) == 3
    assert {row["stop_reason"] for row in rows} >= {"terminated", "max_turns", "max_length"}
    # max_input_length and max_generate_length together.
    assert max(row["num_tokens"] for row in ran["tight"]["rows"]) == 128 + 48
    assert all(row["equal"] == EVERYWHERE for row in ran["tight"]["rows"])


def test_sessions_end_once_and_the_caches_are_salted_with_the_weights(ran):
    for env in ENVIRONMENTS:
        assert ran[env]["finished"] == ran[env]["sessions"]
        assert len(ran[env]["sessions"]) == GROUP * NUM_TASKS
        assert ran[env]["salts"] == ["tiny-math@1"]
        assert {version for row in ran[env]["rows"] for version in row["versions"]} == {-1, 1}


def test_each_turns_reward_is_at_the_end_of_its_action_and_scores_are_logged(ran):
    rows = ran["paying"]["rows"]
    assert {tuple(row["turn_rewards"]) for row in rows} == {(0.5, 1.0), (0.5, 2.0), (0.5, 4.0)}
    assert ran["paying"]["log"]["environment/avg_score"] == 0.25
    assert ran["paying"]["log"]["reward/avg_raw_reward"] == pytest.approx(statistics.mean([1.5, 2.5, 4.5]))


def test_skyrls_evaluation_leaves_failed_episodes_out(ran):
    paying, plain = (metrics["eval/all/avg_score"] for metrics in ran["evaluated"])
    assert paying == pytest.approx(statistics.mean([1.5, 2.5, 4.5]))
    assert plain == 1.0  # it samples greedily


def test_a_failed_episode_has_no_row_and_the_baseline_is_that_of_its_siblings(ran):
    rows = ran["paying"]["rows"]
    assert ran["paying"]["num_failed"] == NUM_TASKS
    assert sorted(row["reward"] for row in rows) == [1.5, 1.5, 2.5, 2.5, 4.5, 4.5]
    assert all(row["equal"] == EVERYWHERE for row in rows)
    check_advantages(rows)


def test_right_siblings_of_a_failed_episode_have_no_advantage(ran, lost):
    rows = ran["right"]["rows"]
    assert [row["reward"] for row in rows] == [1.0] * (GROUP - 1) * NUM_TASKS
    assert ran["right"]["log"]["environment/avg_failed"] == 1 / GROUP
    lost(
        "SkyRL", "RayPPOTrainer, compute_grpo_outcome_advantage", versions("skyrl"),
        gets="with `step_wise_trajectories` no row, else an error, which ends the step",
        again="once, after an infrastructure error (`max_retries`)", counted="`environment/avg_failed`",
        advantages={"grpo": [[row["advantage"] for row in rows[:3]], ran["zero"]]},
    )  # fmt: skip


def test_the_fully_asynchronous_trainer_gets_the_same_of_whole_groups(ran, cell):
    rows = ran["asynchronous"]["rows"]
    assert [row["uid"] for row in rows] in (["0"] * GROUP + ["1"] * GROUP, ["1"] * GROUP + ["0"] * GROUP)
    assert all(row["equal"] == EVERYWHERE for row in rows)
    check_advantages(rows)
    equal = {f"equal_{key}": sum(row["equal"][key] for row in rows) for key in EVERYWHERE}
    code, named = "FullyAsyncTrainerSim.train, RemoteInferenceClient", versions("skyrl", "skyrl", "ray")
    cell("math_retry", "SkyRL", code, named, episodes=len(rows), **equal)


def test_without_step_wise_trajectories_a_failed_episode_ends_the_training(ran):
    assert ran["one_row_each"]["error"].startswith("InfraError: EnvGenerator: expected an episode to train on")
    assert "one of four" in ran["one_row_each"]["error"]


def test_each_segment_is_a_row_and_the_advantage_is_that_of_the_whole_episode(ran):
    rows = ran["rerender"]["rows"]
    assert max(row["num_segments"] for row in rows) == 3
    assert len(rows) == sum({row["episode"]: row["num_segments"] for row in rows}.values()) > GROUP * NUM_TASKS
    assert all(row["equal"] == EVERYWHERE for row in rows)
    check_advantages(rows)


@pytest.mark.parametrize("env", ["math_retry", "guess_number"])
def test_skyrls_own_generator_over_text_has_the_tokens_of_our_loop_unless_an_action_was_cut(ran, env, cell):
    rows = ran[f"text_{env}"]["rows"]
    assert len(rows) == GROUP * NUM_TASKS
    whole = [row for row in rows if not row["was_cut"]]
    assert len(whole) >= GROUP
    assert all(row["equal"] == EVERYWHERE for row in whole)
    check_advantages(rows)
    equal = {f"equal_{key}": sum(row["equal"][key] for row in whole) for key in EVERYWHERE}
    code, named = "SkyRLGymGenerator, BaseTextEnv", versions("skyrl", "skyrl-gym", "skyrl")
    cell(env, "SkyRL", code, named, episodes=len(whole), **equal)


def test_in_text_tools_are_refused_and_a_failed_episode_ends_the_training(ran):
    assert ran["text_tool_use"]["error"].startswith("ConfigError: EnvText: expected an environment without tools")
    assert ran["text_failing"]["error"].startswith("EpisodeFailed: step: RuntimeError: one of four")


def test_skyrl_takes_every_setting_of_the_script_of_the_page(tmp_path):
    script = page_block("skyrl.md", "class Experiment")
    (tmp_path / "train.py").write_text(
        script.replace("Qwen/Qwen2.5-0.5B-Instruct", str(ROOT / "agentenv/_assets/tiny-math"))
    )
    code = """
import sys
sys.path[:0] = [sys.argv[1]]
import json
import typed_dict
import train
import skyrl.train.utils.utils as utils

class Kept:
    remote = staticmethod(lambda cfg: cfg)

def started(cfg):
    experiment = object.__new__(train.Experiment)
    generator = experiment.get_generator(cfg, None, None)
    print(json.dumps({
        "n": cfg.generator.n_samples_per_prompt, "turns": generator.config.max_turns, "env": generator.env,
        "wise": cfg.generator.step_wise_trajectories, "file": cfg.data.train_data[0], "seed": cfg.trainer.seed,
        "model": generator.model == cfg.trainer.policy.model.path,
    }))

train.train, train.initialize_ray, train.ray.get = Kept, started, lambda cfg: None
sys.argv[1:] = ["trainer.seed=9"]
train.main()
"""
    printed = python("skyrl", "-c", code, ROOT / "tests/peers", cwd=tmp_path)
    read = json.loads(printed.splitlines()[-1])
    file = read.pop("file")
    assert read == {"n": 8, "turns": 3, "env": "math_retry", "wise": True, "seed": 9, "model": True}
    assert file == str(tmp_path / "runs/skyrl/train.parquet")
    assert (tmp_path / "runs/skyrl/train.parquet").is_file()
