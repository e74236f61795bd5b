"""Five games of TextArena, played in its own code by our loop; prints what came of them, as JSON."""

import json
from functools import partial

from agentenv import load_env
from agentenv.interop.textarena import names
from tests.peers.played import compared, error_of, refusal

GAMES = ("GuessTheNumber-v0", "Mastermind-v0", "RushHour-v0", "Blackjack-v0", "Secretary-v0")
ACTIONS = ["[10]", "[1 2 3 4]", "[Stick]", "not a move"] * 8


def played(game, seed):
    env = load_env(f"textarena:{game}")()
    texts = [env.reset({"seed": seed, "observation": "x"})["observation"][0]["content"]]
    for action in ACTIONS:
        result = env.step({"action_text": action})
        texts.append(result.observation)
        if result.terminated:
            return [*texts, result.reward, result.info]
    return texts


def main():
    env = load_env("textarena:GuessTheNumber-v0")()
    env.reset({"seed": 3, "observation": "x"})
    countdown = load_env("textarena:Countdown-v0")()
    countdown.reset({"seed": 3, "observation": "x"})
    countdown.step({"action_text": "no move"})
    print(
        json.dumps(
            {
                "games": {game: compared(partial(played, game)) for game in GAMES},
                "reply": env.step({"action_text": "My number is [5]."}).observation,
                "sentence": error_of(lambda: countdown.step({"action_text": "no move"})),
                "two_players": refusal("textarena:TicTacToe-v0"),
                "unknown": refusal("textarena:Wordl-v0"),
                "names": sorted(names()),
            }
        )
    )


main()
