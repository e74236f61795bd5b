"""verl 0.9.1's own agent loop workers, v0 and v1, over our episodes: its tensors are our trajectories, bit by bit."""

import math
import statistics

import pytest
import yaml

from tests.peers.where import ROOT, answer, folder_of, needs, page_block, python, versions

pytestmark = [
    pytest.mark.slow,
    needs("verl"),
    pytest.mark.skipif(
        not (folder_of("verl") / "transfer_queue").is_dir(),
        reason="TransferQueue is not beside verl: make test-slow installs it",
    ),
    pytest.mark.timeout(900),
]

ENVIRONMENTS = ["math_retry", "tool_use", "guess_number"]
GROUP, NUM_TASKS, MAX_RESPONSE = 4, 2, 96


@pytest.fixture(scope="module", params=["v0", "v1"])
def ran(request, tmp_path_factory):
    """What became of our episodes, in verl's v0 trainer and in its v1 trainer."""
    path = tmp_path_factory.mktemp(request.param)
    return request.param, answer("verl", ROOT / "tests/peers/verl_rollout.py", request.param, cwd=path)


@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_tokens_masks_log_probabilities_and_rewards_equal_our_trajectories(ran, env, cell):
    trainer, rows = ran[0], ran[1][env]["rows"]
    assert len(rows) == GROUP * NUM_TASKS
    assert ran[1][env]["left"] == 0
    for row in rows:
        assert row["equal"] == dict.fromkeys(row["equal"], True)
        assert len(row["equal"]) == 5
    equal = {f"equal_{key}": sum(row["equal"][key] for row in rows) for key in rows[0]["equal"]}
    used = versions("verl", "verl", "TransferQueue", "ray")
    cell(env, "verl", f"agent loop workers of the {trainer} trainer", used, episodes=len(rows), **equal)


@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_the_reward_is_the_sum_of_the_turns_and_each_is_kept(ran, env):
    for row in ran[1][env]["rows"]:
        assert len(row["extra"]["turn_scores"]) == row["num_turns"]
        assert math.isclose(math.fsum(row["extra"]["turn_scores"]), row["reward"])


def test_some_episodes_succeed_have_several_turns_and_meet_verls_budget(ran):
    rows = [row for env in ENVIRONMENTS for row in ran[1][env]["rows"]]
    assert {row["reward"] for row in rows} >= {0.0, 1.0}
    assert max(row["num_turns"] for row in rows) > 1
    assert max(row["num_response"] for row in rows) == MAX_RESPONSE
    # verl's server says "completed" for an action that was cut, too.
    assert {row["finish_reasons"][-1] for row in rows} == {"stop", "length"}


def test_the_steps_of_the_weights_are_verls(ran):
    for env in ENVIRONMENTS:
        assert all(row["extra"]["steps"] == [7, 7] for row in ran[1][env]["rows"])


def test_a_failed_episode_is_never_a_reward(ran):
    version, answers = ran
    failed = answers["broken"]
    if version == "v0":
        assert "EnvAgentLoop: expected an episode to train on" in failed["error"]
        assert "one of four" in failed["error"]
        return
    assert failed["statuses"] == ["failure"] * NUM_TASKS
    assert len(failed["rows"]) == (GROUP - 1) * NUM_TASKS  # the siblings, from which verl has their own baseline
    assert failed["left"] == NUM_TASKS
    assert all(all(row["equal"].values()) for row in failed["rows"])


def test_advantages_of_v1_are_those_worked_out_by_hand_without_the_failed_episode(ran):
    version, answers = ran
    if version == "v0":
        pytest.skip("its step has ended")
    rows = answers["broken"]["rows"]
    for uid in {row["uid"] for row in rows}:
        group = [row for row in rows if row["uid"] == uid]
        rewards = [row["reward"] for row in group]
        assert len(set(rewards)) == GROUP - 1
        mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
        for row in group:
            assert math.isclose(row["advantage"], (row["reward"] - mean) / (deviation + 1e-6), abs_tol=1e-5)


def test_right_siblings_of_a_failed_episode_have_no_advantage(ran, lost):
    version, answers = ran
    if version == "v0":
        assert "one of four" in answers["right"]["error"]
        return
    rows, instead = answers["right"]["rows"], answers["right"]["instead"]
    assert answers["right"]["left"] == NUM_TASKS
    assert [row["reward"] for row in rows] == [1.0] * (GROUP - 1) * NUM_TASKS
    first = [at for at, row in enumerate(rows) if row["uid"] == rows[0]["uid"]]
    lost(
        "verl", "compute_advantage_for_multi_trajectories", versions("verl"),
        gets="v1: no row; in validation 0 in `acc`, none in `acc_success_only`. v0: an error, which ends the training",
        again="once, after an infrastructure error", counted="an error in its log; the group has the status `failure`",
        advantages={"grpo": [[rows[at]["advantage"] for at in first], [instead[at] for at in first]]},
    )  # fmt: skip


@pytest.mark.parametrize("appended", [None, "n_gpus_per_node=8"])
def test_verls_trainer_reads_every_setting_of_the_scripts_of_the_page(tmp_path, appended):
    block = page_block("verl-agent-loop.md", "main_ppo").replace(
        "Qwen/Qwen2.5-0.5B-Instruct", str(ROOT / "agentenv/_assets/tiny-math")
    )
    more = f" \\\n{page_block('verl-agent-loop.md', appended).rstrip()}" if appended else ""
    script = tmp_path / "train.sh"
    script.write_text(f"set -e\n{block.rstrip()}{more} --cfg job\n")  # hydra then prints what it read, and stops
    code = (
        "import os, sys; os.environ['PATH'] = f'{sys.prefix}/bin:' + os.environ['PATH']\n"
        "os.execvp('bash', ['bash', sys.argv[1]])"
    )
    read = yaml.safe_load(python("verl", "-c", code, script, cwd=tmp_path))
    rollout, trainer = read["actor_rollout_ref"]["rollout"], read["trainer"]
    assert (rollout["n"], rollout["agent"]["default_agent_loop"]) == (8, "agentenv")
    assert rollout["agent"]["agent_loop_config_path"] == "runs/verl/agent_loops.yaml"
    assert trainer["use_v1"] is True
    assert (trainer["n_gpus_per_node"], trainer["save_freq"]) == ((8, 20) if appended else (1, -1))
    sizes = (rollout[f"{kind}_parallel_size"] for kind in ("tensor_model", "data", "pipeline_model"))
    assert trainer["n_gpus_per_node"] * trainer["nnodes"] % math.prod(sizes) == 0  # else verl's workers do not start
    assert all((tmp_path / read["data"][f"{kind}_files"]).is_file() for kind in ("train", "val"))
