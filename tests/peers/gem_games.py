"""Five games of GEM, played in its own code by our loop; prints what came of them, as JSON."""

import json
import logging
from functools import partial

from agentenv import load_env
from agentenv.interop.gem import names
from tests.peers.played import compared, refusal

ACTIONS = {
    "GuessTheNumber-v0-easy": r"\boxed{2}", "Mastermind-v0-easy": r"\boxed{1 2}",
    "Minesweeper-v0-easy": r"\boxed{reveal 1 1}", "Sudoku-v0-easy": r"\boxed{1 1 1}",
    "TowerofHanoi-v0-easy": r"\boxed{A B}",
}  # fmt: skip
"""A first action in each game."""


def played(game, actions, seed):
    env = load_env(f"gem:game:{game}")()
    texts = [env.reset({"seed": seed, "observation": "x"})["observation"][0]["content"]]
    for action in actions:
        result = env.step({"action_text": action})
        texts.append([result.observation, result.reward, result.score, result.terminated, dict(result.info)])
        if result.done:
            break
    return texts


def main():
    root = logging.getLogger()
    before = list(root.handlers), root.level
    solved = [rf"\boxed{{{move}}}" for move in ("A C", "A B", "C B", "A C", "B A", "B C", "A C")]
    print(
        json.dumps(
            {
                "games": {game: compared(partial(played, game, (action, "no"))) for game, action in ACTIONS.items()},
                "solved": played("TowerofHanoi-v0-easy", solved, 2**40)[-1],
                "guesses": played("GuessTheNumber-v0-easy", (r"\boxed{10}",) * 4, 2),
                "logger_undisturbed": (list(root.handlers), root.level) == before,
                "refused": {name: refusal(f"gem:{name}") for name in ("code:Taco8k", "math:GSM8K", "rg:chain_sum")},
                "offline": refusal("gem:logic:RuleTaker-d1"),
                "unknown": refusal("gem:game:Sudoku-v0-eas"),
                "names": sorted(names()),
            }
        )
    )


main()
