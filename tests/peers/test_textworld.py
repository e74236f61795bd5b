"""TextWorld 1.7.0's own games in our episodes."""

import pytest

from tests.peers.where import ROOT, answer, needs

pytestmark = [pytest.mark.slow, needs("textworld"), pytest.mark.timeout(900)]
GAMES = ("tw-simple", "tw-coin_collector", "tw-treasure_hunter", "tw-cooking", "custom")


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return answer("textworld", ROOT / "tests/peers/textworld_games.py", cwd=tmp_path_factory.mktemp("textworld"))


@pytest.mark.parametrize("game", GAMES)
def test_a_seed_decides_a_game_also_beside_others_and_the_process_keeps_its_random_numbers(game, played):
    facts = played["games"][game]
    assert (facts["same"], facts["process_undisturbed"]) == (True, True)
    assert facts["alone"][0] != facts["alone"][1]


@pytest.mark.parametrize("game", GAMES)
def test_textworlds_own_commands_win_each_game_with_the_full_score(game, played):
    for (prompt,), *turns in played["games"][game]["alone"]:
        assert "$$" not in prompt
        assert prompt.endswith("The command help lists the commands.")
        *_, last = turns
        _, text, _, score, terminated, info = last
        assert (text, score, terminated, info["won"], info["lost"]) == ("", 1.0, True, 1.0, 0.0)
        assert sum(reward for _, _, reward, *_ in turns) >= 1.0
        assert "*** The End ***" in info["end"]


def test_text_that_is_no_command_earns_nothing_and_ends_nothing(played):
    hostile = played["hostile"]
    assert set(hostile["rewards"]) == {0.0}
    assert not any(hostile["ends"])
    assert hostile["last"].startswith("-= Bedroom =-")


def test_commands_that_write_files_are_refused(played):
    assert played["hostile"]["refused"] == [1.0] * 8
    assert played["hostile"]["files"] == []


def test_a_lost_game_ends_without_a_reward(played):
    _, reward, score, info = played["lost"]
    assert (reward, score, info["won"], info["lost"]) == (0.0, 0.0, 0.0, 1.0)


def test_settings_are_those_of_the_game_and_others_are_refused(played):
    assert played["level_1"] == ["take coin"]
    assert played["setting"].startswith("ConfigError: textworld:tw-cooking: env_kwargs: expected its settings")
    assert "Did you mean 'recipe'?" in played["setting"]
    assert "Did you mean 'tw-cooking'?" in played["unknown"]
    assert set(played["names"]) == set(GAMES)
