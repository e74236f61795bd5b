"""TextArena 0.7.4's own games in our episodes."""

import pytest

from tests.peers.where import ROOT, answer, needs, python, trained, versions

pytestmark = [pytest.mark.slow, needs("textarena"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return answer("textarena", ROOT / "tests/peers/textarena_games.py", cwd=tmp_path_factory.mktemp("textarena"))


def test_a_seed_decides_a_game_also_beside_others_and_the_process_keeps_its_random_numbers(played):
    assert len(played["games"]) == 5
    for game, facts in played["games"].items():
        assert (game, facts["same"], facts["process_undisturbed"]) == (game, True, True)
        assert facts["num_different"] > 1, game


def test_the_policy_sees_what_is_new_without_its_own_action(played):
    assert played["reply"] in ("[GAME] The target number is higher.", "[GAME] The target number is lower.")


def test_a_game_ends_with_its_own_reward_and_reason(played):
    *_, reward, info = played["games"]["Mastermind-v0"]["first"]
    assert isinstance(reward, float)
    assert "Invalid Move" in info["reason"]
    assert info["invalid_move"] == 1.0


def test_a_sentence_as_a_reward_is_an_error_and_no_number(played):
    assert played["sentence"].startswith("ContractError: textarena:Countdown-v0: reward: expected one finite number")


def test_games_of_several_players_and_unknown_games_are_refused(played):
    assert "expected a game of one player, got one of several" in played["two_players"]
    assert "Did you mean 'Wordle-v0'?" in played["unknown"]
    assert "TicTacToe-v0" not in played["names"]
    assert len(played["names"]) > 200


def test_run_plays_a_game_in_processes_of_its_actors(tmp_path):
    words = ["--env", "textarena:GuessTheNumber-v0", "--limit", "2", "--max_turns", "2", "--max_tokens", "8"]
    printed = python("textarena", "-m", "agentenv.cli", "run", *words, "--env_actors", "1", cwd=tmp_path)
    assert "0 infrastructure, 0 environment" in printed


def test_list_shows_the_games(tmp_path):
    printed = python("textarena", "-m", "agentenv.cli", "list", "--from", "textarena", "--json", cwd=tmp_path)
    assert '"textarena:Wordle-v0"' in printed


def test_ten_steps_of_training_on_a_game(tmp_path, cell):
    env = "textarena:Mastermind-v0"
    figures = trained("textarena", env, tmp_path)
    assert (figures["train_steps"], figures["episodes"]) == (10, 40)
    cell(env, "agentenv train", "on a CPU, transformers", versions("textarena"), **figures)
