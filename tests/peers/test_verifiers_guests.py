"""Tasksets of verifiers 0.4.0, in its own rollout, as our environments."""

import pytest

from tests.peers.where import ROOT, answer, needs, trained, versions

pytestmark = [pytest.mark.slow, needs("verifiers"), needs("verifiers", "prime_sandboxes"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def environment():
    """The tasksets of this folder on the path of what is started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests/peers/verifiers_tasksets"))
        yield


@pytest.fixture(scope="module")
def played(environment, tmp_path_factory):
    return answer("verifiers", ROOT / "tests/peers/verifiers_guests.py", cwd=tmp_path_factory.mktemp("verifiers"))


def test_the_policy_sees_the_prompt_of_the_task_and_its_answer_gets_the_rewards(played):
    prompt, (observation, reward, score, terminated, info) = played["shout"]
    assert prompt == [{"role": "system", "content": "Answer in <out>."}, {"role": "user", "content": "Say stone."}]
    assert (observation, reward, score, terminated) == ("", 1.0, 1.0, True)
    assert info == {"tagged": 1.0, "right": 1.0, "num_chars": 16.0, "stop_condition": "agent_completed"}
    assert [reward for _, (_, reward, *_) in played["together"]] == [1.0, 0.5, 0.5, 1.0]


def test_the_seed_chooses_the_task_and_env_kwargs_configure_the_taskset(played):
    assert played["other_task"][0][-1]["content"] == "Say river."
    assert played["configured"][0][-1]["content"] == "Say tin."


def test_an_environment_that_asks_again_sends_only_what_is_new(played):
    prompt, first, second, last = played["three_turns"]
    assert prompt == [{"role": "user", "content": "Number 0?"}]
    assert first[:4] == [[{"role": "user", "content": "Number 1?"}], 0.0, None, False]
    assert second[0] == [{"role": "user", "content": "Number 2?"}]
    assert last[1] == pytest.approx(2 / 3)
    assert len(played["left_early"]) == 2
    assert played["tasks_left"] == 0


def test_a_failure_of_the_environment_is_no_reward(played):
    assert played["broken"].startswith("ContractError: verifiers:three-turns: expected one rollout without errors, got")
    assert "the game broke" in played["broken"]
    assert played["logger_undisturbed"]


def test_several_agents_commands_and_unknown_tasksets_are_refused(played):
    assert "expected one agent, got left, right" in played["two_seats"]
    assert "got one that runs commands, in passed" in played["commands"]
    assert "expected an installed taskset, got none" in played["unknown"]
    assert {"textarena", "openenv", "harbor"} <= set(played["names"])


def test_ten_steps_of_training_on_a_taskset(environment, tmp_path, cell):
    env = "verifiers:shout"
    figures = trained("verifiers", env, tmp_path)
    assert (figures["train_steps"], figures["episodes"]) == (10, 40)
    cell(env, "agentenv train", "on a CPU, transformers", versions("verifiers"), **figures)
