"""tinker-cookbook 0.6.1's own rollouts and data processing: its Datums are the segments of our episodes, bit by bit."""

import math

import pytest

from tests.drivers import write_rows
from tests.peers.where import ROOT, answer, needs, page_block, python, versions

pytestmark = [pytest.mark.slow, needs("tinker_cookbook"), pytest.mark.timeout(900)]

ENVIRONMENTS = ["math_retry", "tool_use", "guess_number"]
GROUP, NUM_TASKS, MAX_TOKENS = 4, 2, 48
EVERYWHERE = dict.fromkeys(("inputs", "targets", "mask", "logprobs"), True)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return answer("tinker_cookbook", ROOT / "tests/peers/tinker_rollout.py", cwd=tmp_path_factory.mktemp("tinker"))


@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_datums_equal_our_trajectories_token_by_token(ran, env, cell):
    rows = ran[env]
    assert len(rows) == GROUP * NUM_TASKS
    for row in rows:
        assert row["equal"] == EVERYWHERE
        assert row["num_data"] == row["num_segments"] == 1
        assert row["their_rewards"] == row["turn_rewards"]
    gap = max(row["advantage_gap"] for row in rows)
    assert gap < 1e-6
    equal = {f"equal_{name}": sum(row["equal"][name] for row in rows) for name in EVERYWHERE}
    code, named = "do_group_rollout, assemble_training_data", versions("tinker_cookbook", "tinker-cookbook", "tinker")
    cell(env, "tinker-cookbook", code, named, episodes=len(rows), **equal, largest_advantage_difference=gap)


def test_some_episodes_succeed_have_several_turns_and_meet_each_limit(ran):
    rows = [row for env in ENVIRONMENTS for row in ran[env]]
    assert {row["reward"] for row in rows} >= {0.0, 1.0}
    assert max(len(row["action_sizes"]) for row in rows) > 2
    # tinker's max_tokens, and our room where less than that is left.
    assert any(row["action_sizes"][-1] == MAX_TOKENS for row in rows)
    assert any(row["num_tokens"] == 160 and row["finish_reasons"][-1] == "length" for row in ran["guess_number"])
    assert {row["their_stop_reason"] for row in rows} >= {"completed", "max_turns", "max_tokens", "truncated_by_env"}


def test_the_last_transition_tells_how_the_episode_ended(ran):
    for row in ran["failing"]["rows"]:
        assert row["last_metrics"] == {"stop/completed": 1.0, "truncated": 0.0, "score": 0.25}
        assert row["logs"] == [{"why": "no"}, {}]
    for row in ran["math_retry"]:
        assert row["last_metrics"]["truncated"] == float(row["stop_reason"] != "terminated")


def test_advantages_are_those_worked_out_by_hand_without_the_failed_episode(ran):
    rows, errors = ran["failing"]["rows"], ran["failing"]["errors"]
    assert [["one of four" in each for each in group] for group in errors] == [[True]] * NUM_TASKS
    assert len(rows) == (GROUP - 1) * NUM_TASKS
    for group in range(NUM_TASKS):
        rewards = [row["reward"] for row in rows if row["group"] == group]
        assert sorted(rewards) == [1.5, 2.5, 4.5]
        for row in rows:
            if row["group"] == group:
                assert math.isclose(row["advantage"], row["reward"] - 8.5 / 3, abs_tol=1e-6)
                assert (row["equal"], row["turn_rewards"][0]) == (EVERYWHERE, 0.5)


def test_right_siblings_of_a_failed_episode_have_no_advantage(ran, lost):
    assert ran["right"]["rewards"] == [1.0] * 3
    assert ran["right"]["metrics"]["rollout_errors/total"] == 1.0
    lost(
        "tinker-cookbook", "do_group_rollout, compute_advantages", versions("tinker_cookbook", "tinker-cookbook"),
        gets="with `MinViableGroup()` no row, else an error, which drops the group or ends the training",
        again="by `MinViableGroup()`, if fewer than three in four are left", counted="`rollout_errors/total`",
        advantages={"group mean": ran["right"]["advantages"]},
    )  # fmt: skip


def test_a_failed_episode_raises_and_without_tolerance_drops_its_group_or_ends_the_run(ran):
    assert ran["dropped"] == [True] * NUM_TASKS  # RetryOnFailure
    assert ran["fail_fast"].startswith("EpisodeFailed: step: RuntimeError: one of four")


def test_each_segment_of_an_episode_is_a_datum(ran):
    rows = ran["rerender"]
    assert max(row["num_segments"] for row in rows) == 2
    for row in rows:
        assert (row["num_data"], row["equal"]) == (row["num_segments"], EVERYWHERE)
        assert row["advantage_gap"] < 1e-6


def test_tinker_takes_the_configuration_of_the_page(tmp_path):
    write_rows(tmp_path / "tasks.jsonl", [{"prompt": f"What is {n} + 1?", "label": str(n + 1)} for n in range(24)])
    script = page_block("tinker.md", "train.main(config)")
    (tmp_path / "train.py").write_text(script.replace("Qwen/Qwen3-8B", str(ROOT / "agentenv/_assets/tiny-math")))
    code = """
import runpy, sys
from tinker_cookbook.rl import train
from tinker_cookbook.utils.ml_log import dump_config

async def main(config):
    dataset, _ = await config.dataset_builder()
    envs = await dataset.get_batch(1)[0].make_envs()
    builder = dump_config(config)["dataset_builder"]
    strategy = type(config.effective_rollout_strategy()).__name__
    print(len(dataset), len(envs), config.max_steps, config.log_path, strategy, builder["env"])

train.main = main
runpy.run_path(sys.argv[1])
"""
    printed = python("tinker_cookbook", "-c", code, tmp_path / "train.py", cwd=tmp_path).split()
    assert printed == ["3", "8", "100", "runs/tinker", "MinViableGroup", "math_retry"]
