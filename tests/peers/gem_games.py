"""Five games of GEM, played in its own code by our loop; prints what came of them, as JSON."""

import asyncio
import json
import logging
import random

from agentenv import load_env
from agentenv.errors import AgentEnvError
from agentenv.interop.gem import names

GAMES = (
    "GuessTheNumber-v0-easy",
    "Mastermind-v0-easy",
    "Minesweeper-v0-easy",
    "Sudoku-v0-easy",
    "TowerofHanoi-v0-easy",
)
ACTIONS = (r"\boxed{2}", r"\boxed{1 2}", r"\boxed{reveal 1 1}", r"\boxed{1 1 1}", r"\boxed{A B}", "not a move")


def played(game, seed, actions):
    env = load_env(f"gem:game:{game}")()
    texts = [env.reset({"seed": seed, "observation": "x"})["observation"][0]["content"]]
    for action in actions:
        result = env.step({"action_text": action})
        texts.append([result.observation, result.reward, result.score, result.terminated, dict(result.info)])
        if result.done:
            break
    return texts


async def together(game, action):
    return await asyncio.gather(*(asyncio.to_thread(played, game, seed, (action, "no")) for seed in range(4)))


def message_of(spec):
    try:
        load_env(spec)().reset({"seed": 0, "observation": "x"})
    except AgentEnvError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main():
    root = logging.getLogger()
    before = list(root.handlers), root.level
    games = {}
    for game, action in zip(GAMES, ACTIONS, strict=False):
        random.seed(1)
        numbers = random.getstate()
        alone = [played(game, seed, (action, "no")) for seed in range(4)]
        games[game] = {
            "same": asyncio.run(together(game, action)) == alone,
            "process_undisturbed": random.getstate() == numbers,
            "num_different": len({json.dumps(one) for one in alone}),
            "first": alone[0],
        }
    solved = [rf"\boxed{{{move}}}" for move in ("A C", "A B", "C B", "A C", "B A", "B C", "A C")]
    print(
        json.dumps(
            {
                "games": games,
                "solved": played("TowerofHanoi-v0-easy", 2**40, solved)[-1],
                "guesses": played("GuessTheNumber-v0-easy", 2, (r"\boxed{10}",) * 4),
                "logger_undisturbed": (list(root.handlers), root.level) == before,
                "refused": {name: message_of(f"gem:{name}") for name in ("code:Taco8k", "math:GSM8K", "rg:chain_sum")},
                "offline": message_of("gem:logic:RuleTaker-d1"),
                "unknown": message_of("gem:game:Sudoku-v0-eas"),
                "names": sorted(names()),
            }
        )
    )


main()
