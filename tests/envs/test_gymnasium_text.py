"""gymnasium_text: the games in words, what is best in them, how they are scored, and that the data can be won."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.core.dataset import read_tasks
from agentenv.core.types import Limits, StopReason, Task
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError, DataError
from agentenv.interop.agent_files import load_agent_func
from agentenv_envs.gymnasium_text import GymnasiumText
from agentenv_envs.gymnasium_text import env as games
from examples.make import game_tasks as tasks
from tests.envs.scripted import play

ROOT = Path(__file__).parents[2]
GAMES = list(games.GAMES)
PROMPT = [{"role": "user", "content": "Play."}]
LIMITS = Limits(max_length=50_000)
MAP = ["SFF", "HFF", "FFG"]


def rows(name="gymnasium_text"):
    read = read_tasks(str(GymnasiumText.datasets[name]))
    return [replace(task, prompt=[{"role": "user", "content": task.prompt}]) for task in read]


def begun(label, seed=3, **options):
    env = GymnasiumText(**options)
    states = env.reset({"observation": PROMPT, "label": label, "seed": seed, "metadata": {}})
    return env, states["observation"][-1]["content"]


def say(env, *actions):
    return [env.step({"action_text": action}) for action in actions][-1]


# --- the games --------------------------------------------------------------------------------------------------------


def test_a_lake_is_shown_with_the_player_on_its_map_and_won_at_the_goal():
    env, prompt = begun({"game": "frozen_lake", "map": MAP})
    assert prompt.startswith("Play.\nYou stand on a frozen lake")
    assert prompt.endswith("Actions: left, down, right, up. Say one of them; the last one you say counts.\n"
                           "You are at row 1, column 1.\n@ F F\nH F F\nF F G")  # fmt: skip
    result = say(env, "East, so right.")
    assert result.observation[0]["content"] == "You are at row 1, column 2.\nS @ F\nH F F\nF F G"
    won = say(env, "down", "down", "right")
    assert (won.terminated, won.reward, won.score, won.info["won"]) == (True, 1.0, 1.0, 1.0)


def test_a_cliff_throws_back_and_is_won_at_the_goal():
    env, prompt = begun({"game": "cliff_walking", "start": [2, 9]}, reward="game")
    assert ". . . . . . . . . @ . .\n. C C" in prompt
    fallen = say(env, "down")
    assert (fallen.reward, fallen.terminated) == (-100.0, False)
    assert "row 4, column 1" in fallen.observation[0]["content"]
    other, _ = begun({"game": "cliff_walking", "start": [2, 11]})
    assert (say(other, "down").score, other.moment.total) == (1.0, -1.0)


def test_a_taxi_delivers():
    env, prompt = begun({"game": "taxi", "state": 1})  # at R, the passenger too, to G
    assert "The passenger waits at R (row 1, column 1). The destination is G (row 1, column 5)." in prompt
    assert "|@: | : :G|" in prompt
    assert prompt.endswith("Possible now: south, east, pickup.")
    taken = say(env, "Pick up the passenger")
    assert "The passenger sits in the taxi." in taken.observation[0]["content"]
    while not (result := say(env, env.gold({}))).done:
        assert result.reward == 0.0
    assert (result.score, result.reward, env.moment.reward) == (1.0, 1.0, 20.0)


def test_blackjack_is_judged_by_its_choices_and_not_by_its_luck():
    scores = []
    for task in rows("blackjack")[:8]:
        env, prompt = begun(task.label, seed=task.seed)
        assert "Your cards count" in prompt
        while not (result := say(env, env.gold({}))).done:
            pass
        scores.append((result.score, result.reward, result.info["won"]))
    assert {score for score, _, _ in scores} == {reward for _, reward, _ in scores} == {1.0}
    assert {won for _, _, won in scores} == {0.0, 1.0}


def test_slippery_ice_is_scored_by_the_share_of_best_moves_and_gold_gives_up_after_a_mistake():
    task = rows("frozen_lake_slippery")[0]
    env, _ = begun(task.label, seed=task.seed)
    best = set(env._best().best(0))
    wrong = next(name for name, action in env.names.items() if action not in best)
    assert env.gold({}) in env.names
    first = say(env, wrong)
    assert (first.score, first.info["optimal"], env.gold({})) == (0.0, 0.0, None)
    right = next(name for name, action in env.names.items() if action in env._best().best(env.moment.observation))
    assert say(env, right).score == 0.5
    assert say(env, "nothing").score == pytest.approx(1 / 3)


async def test_a_limit_of_turns_still_pays_for_the_best_moves_of_a_game_of_luck():
    task = next(task for task in rows("frozen_lake_slippery"))
    episode = await play(EnvSource(GymnasiumText, {}), task, ["nothing"], seed=task.seed, max_turns=1)
    assert (episode.stop_reason, episode.reward) == (StopReason.MAX_TURNS, -0.1)
    env, _ = begun(task.label, seed=task.seed)
    say(env, env.gold({}))
    assert env.on_truncate({}).reward == 1.0


# --- best play --------------------------------------------------------------------------------------------------------


def test_blackjack_values_are_basic_strategy():
    best = {hand: games.best_actions(games.blackjack_values(*hand)) for hand in [
        (16, 10, False), (16, 6, False), (12, 4, False), (12, 2, False), (12, 3, False), (17, 1, False),
        (18, 9, True), (18, 8, True), (17, 6, True), (11, 10, False), (20, 1, False),
    ]}  # fmt: skip
    hits = {hand for hand, actions in best.items() if actions == [games.HIT]}
    assert hits == {(16, 10, False), (12, 2, False), (12, 3, False), (18, 9, True), (17, 6, True), (11, 10, False)}
    assert games.blackjack_values(20, 10, False)[0] == pytest.approx(0.4349578)  # the odds of an endless deck
    hard = [max(games.blackjack_values(11 + card, 5, False)) for card in range(1, 11)]
    assert games.blackjack_values(21, 5, True)[games.HIT] == pytest.approx((sum(hard) + 3 * hard[-1]) / 13)


# --- the data ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_gold_earns_the_full_score_and_reward_of_every_shipped_task_within_the_default_turns():
    for task in rows():
        env, _ = begun(task.label, seed=task.seed)
        results = []
        while not results or not (results[-1].done or len(results) == Limits().max_turns):
            results.append(say(env, env.gold({})))
        word = None if results[-1].done else env.on_truncate({})
        reward = sum(result.reward for result in results) + (word.reward if word else 0.0)
        assert (results[-1].score, reward) == (1.0, 1.0), task.task_id


@pytest.mark.long
@pytest.mark.parametrize("name", GAMES)
def test_the_shipped_rows_are_those_of_the_committed_function(name):
    shipped = [json.loads(line) for line in GymnasiumText.datasets[name].read_text().splitlines()]
    assert len(shipped) == 32
    assert shipped == tasks.make_rows(name, 32, 0)
    assert len({json.dumps(row["label"]) for row in shipped}) == 32


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "match"),
    [
        ({"game": "chess"}, "game: expected one of frozen_lake, .*, got 'chess'"),
        ({"game": "frozen_lake", "map": ["SF", "FF"]}, "map: expected rows of S, F, H and G"),
        ({"game": "frozen_lake", "map": "SG"}, "map: expected rows"),
        ({"game": "cliff_walking", "start": [3, 4]}, r"start: expected a \[row, column\] of safe ground"),
        ({"game": "taxi", "state": 500}, "state: expected one of the game's 500, got 500"),
        (None, "game: expected one of"),
    ],
)
def test_rows_that_cannot_be_played_are_refused(label, match):
    with pytest.raises(DataError, match=match):
        begun(label)


def test_a_row_of_another_game_than_was_asked_for_is_refused():
    with pytest.raises(DataError, match="game: expected taxi, got 'blackjack'"):
        begun({"game": "blackjack"}, game="taxi")
    assert "taxi" in begun(None, game="taxi")[1]
    for wrong in ({"game": "chess"}, {"reward": "both"}, {"max_invalid": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: expected"):
            GymnasiumText(**wrong)


# --- where it runs ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_the_agent_func_plays_rows_that_have_only_a_label():
    source = load_agent_func(ROOT / "agent_funcs/gymnasium_text.py")

    async def played(label, *actions, seed):
        return await play(source, Task(PROMPT, json.dumps(label), task_id="t"), actions, seed=seed)

    episode = await played({"game": "frozen_lake", "map": MAP}, "right", "down", "right", "down", seed=1)
    assert (episode.score, episode.reward, len(episode.turns)) == (1.0, 1.0, 4)
    # OpenRLHF has no seeds of tasks, and its samples of one prompt have different ones: they are to be dealt one hand
    task = rows("blackjack")[0]
    hands = [await played(task.label, "stick", seed=seed) for seed in range(6)]
    (prompt,) = {str(hand.prompt) for hand in hands}
    assert begun(task.label, seed=task.seed)[1].splitlines()[-1] in prompt
    assert len({begun(task.label, seed=seed)[1] for seed in range(6)}) > 1
