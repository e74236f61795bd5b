"""Five games of TextArena, played in its own code by our loop; prints what came of them, as JSON."""

import asyncio
import json
import random

from agentenv import load_env
from agentenv.errors import AgentEnvError
from agentenv.interop.textarena import names

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


async def together(game):
    return await asyncio.gather(*(asyncio.to_thread(played, game, seed) for seed in range(4)))


def message_of(spec):
    try:
        load_env(spec)().reset({"seed": 0, "observation": "x"})
    except AgentEnvError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main():
    games = {}
    for game in GAMES:
        random.seed(1)
        before = random.getstate()
        alone = [played(game, seed) for seed in range(4)]
        games[game] = {
            "same": asyncio.run(together(game)) == alone,
            "process_undisturbed": random.getstate() == before,
            "num_different": len({json.dumps(one) for one in alone}),
            "first": alone[0],
        }
    env = load_env("textarena:GuessTheNumber-v0")()
    env.reset({"seed": 3, "observation": "x"})
    countdown = load_env("textarena:Countdown-v0")()
    countdown.reset({"seed": 3, "observation": "x"})
    countdown.step({"action_text": "no move"})
    try:
        countdown.step({"action_text": "no move"})
        sentence = ""
    except AgentEnvError as error:
        sentence = f"{type(error).__name__}: {error}"
    print(
        json.dumps(
            {
                "games": games,
                "reply": env.step({"action_text": "My number is [5]."}).observation,
                "sentence": sentence,
                "two_players": message_of("textarena:TicTacToe-v0"),
                "unknown": message_of("textarena:Wordl-v0"),
                "names": sorted(names()),
            }
        )
    )


main()
