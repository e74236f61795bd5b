"""verifiers 0.4.0's own Trace reads our records, and ours reads what it dumps."""

import pytest

from tests.peers.where import ROOT, answer, needs, versions

pytestmark = [pytest.mark.slow, needs("verifiers"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    return answer("verifiers", ROOT / "tests/peers/verifiers_traces.py", cwd=tmp_path_factory.mktemp("verifiers"))


def test_verifiers_reads_our_trace_with_the_tokens_masks_and_reward_of_the_trajectory(read):
    assert read["golden"] == [
        {
            "reward": 1.5,
            "ok": True,
            "num_turns": 2,
            "same_tokens": True,
            "same_mask": True,
            "same_logprobs": True,
            "same_reward": True,
            "roles": ["user", "assistant", "user", "assistant"],
            "read_back": True,
            "num": 8,
            "num_left": 1,
            "num_after": 1,
        }
    ]


@pytest.mark.parametrize("env", ["math_retry", "tool_use", "guess_number"])
def test_verifiers_reads_every_episode_of_an_environment_up_to_its_last_action(read, env, cell):
    rows = read[env]
    assert len(rows) == 8
    for row in rows:
        assert all(row[key] for key in row if key.startswith("same_"))
        assert row["ok"]
        assert row["read_back"]
        assert row["num_left"] == row["num_after"]
    equal = {
        f"equal_{key}": sum(row[f"same_{key}"] for row in rows) for key in ("tokens", "mask", "logprobs", "reward")
    }
    used = versions("verifiers")
    cell(env, "verifiers", "Trace, which prime-rl trains on; no training", used, episodes=len(rows), **equal)
