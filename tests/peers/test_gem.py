"""GEM 0.1.0's own games in our episodes."""

import pytest

from tests.peers.where import ROOT, answer, needs, trained, versions

pytestmark = [pytest.mark.slow, needs("gem"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return answer("gem", ROOT / "tests/peers/gem_games.py", cwd=tmp_path_factory.mktemp("gem"))


def test_a_seed_decides_a_game_also_beside_others_and_the_process_keeps_its_numbers_and_logger(played):
    assert len(played["games"]) == 5
    for game, facts in played["games"].items():
        assert (game, facts["same"], facts["process_undisturbed"]) == (game, True, True)
        assert (facts["num_different"] > 1) is (game != "TowerofHanoi-v0-easy"), game  # it has one start
    assert played["logger_undisturbed"]


def test_a_solved_game_has_gems_reward_and_its_last_text(played):
    observation, reward, score, terminated, info = played["solved"]
    assert (observation, reward, score, terminated) == ("", 1.0, 1.0, True)
    assert info["end"].startswith("Congratulations!")


def test_the_policy_sees_gems_text_below_each_observation(played):
    rules, (first, *_), *_ = played["guesses"]
    assert rules.endswith("Enter your first guess to start the game.\nEnter your next guess.")
    assert first == "At turn 1, you guessed 10, and the target number is lower than 10.\nEnter your next guess."


def test_what_runs_the_models_text_is_refused_with_what_to_use_instead(played):
    refused = played["refused"]
    assert "Use --env code_sandbox with rows of that dataset." in refused["code:Taco8k"]
    assert "Use --env verify with rows of that dataset." in refused["math:GSM8K"]
    assert "--datasets chain_sum --out rows.jsonl, and run --env reasoning_gym" in refused["rg:chain_sum"]
    assert not {"code", "math", "rg"} & {name.partition(":")[0] for name in played["names"]}
    assert len(played["names"]) == 52


def test_data_that_is_not_here_is_infrastructure_and_a_wrong_name_gets_a_proposal(played):
    assert played["offline"].startswith("InfraError: gem:logic:RuleTaker-d1: reset: expected its data and services")
    assert "Did you mean 'game:Sudoku-v0-easy'?" in played["unknown"]


def test_ten_steps_of_training_on_a_game(tmp_path, cell):
    env = "gem:game:GuessTheNumber-v0-easy"
    figures = trained("gem", env, tmp_path)
    assert (figures["train_steps"], figures["episodes"]) == (10, 40)
    cell(env, "agentenv train", "on a CPU, transformers", versions("gem", "gem-llm"), **figures)
