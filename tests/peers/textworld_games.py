"""Five kinds of TextWorld's games, played in its own code by our loop; prints what came of them, as JSON."""

import asyncio
import json
import os
import random
from pathlib import Path

import numpy as np
import textworld

from agentenv import load_env
from agentenv.interop.textworld import names
from tests.peers.played import error_of

GAMES = ("tw-simple", "tw-coin_collector", "tw-treasure_hunter", "tw-cooking", "custom")
HOSTILE = (
    "", "a\0b", "\\x", "go \ud800", "é" * 300, "x" * 5_000, "look\nlook", 'say "<score>7</score>"', "*** The End ***",
    "quit", "yes", "restart", "y", "tw-extra-infos score", "look", "oops", "again", "{}%s%n", "look then inventory",
)  # fmt: skip
WRITING = ("save", "SAVE", "script", "look then script", "transcripts", "recording on", "Restore", "replay")


def states_of(text):
    return {"action_text": text}


def begun(game, seed, **kwargs):
    env = load_env(f"textworld:{game}")(**kwargs)
    return env, env.reset({"seed": seed, "observation": "x"})["observation"][0]["content"]


def played(game, seed):
    """The texts and rewards of the way that TextWorld knows to win."""
    env, text = begun(game, seed)
    turns = [[text]]
    for _ in range(30):
        command = env.gold({})
        if command is None:
            break
        result = env.step(states_of(command))
        turns.append([command, result.observation, result.reward, result.score, result.terminated, result.info])
        if result.terminated:
            break
    env.close()
    return turns


async def together(game):
    return await asyncio.gather(*(asyncio.to_thread(played, game, seed) for seed in (1, 2)))


def of_game(game):
    random.seed(1)
    np.random.seed(1)
    numbers = random.getstate(), np.random.get_state()[1].tolist(), textworld.g_rng.seed
    alone = [played(game, seed) for seed in (1, 2)]
    return {
        "alone": alone,
        "same": asyncio.run(together(game)) == alone,
        "process_undisturbed": (random.getstate(), np.random.get_state()[1].tolist(), textworld.g_rng.seed) == numbers,
    }


def hostile():
    """What the game answers to text that is no command, and to commands that write files; and what was written."""
    env, _ = begun("tw-simple", 1)
    results = [env.step(states_of(text)) for text in (*HOSTILE, *WRITING, "look")]
    env.close()
    return {
        "rewards": [result.reward for result in results],
        "ends": [result.terminated for result in results],
        "refused": [result.info.get("not_a_command", 0.0) for result in results[len(HOSTILE) : -1]],
        "last": results[-1].observation,
        "files": os.listdir(),
    }


def main():
    found = {"games": {game: of_game(game) for game in GAMES}, "hostile": hostile(), "names": names()}
    found["level_1"] = begun("tw-coin_collector", 1, level=1)[0].state.policy_commands
    found["setting"] = error_of(lambda: begun("tw-cooking", 1, recipes=2))
    found["unknown"] = error_of(lambda: load_env("textworld:tw-coking"))
    found["lost"] = lost()
    print(json.dumps(found))


def lost():
    """A game of cooking that is lost: what must be roasted is burnt."""
    env, _ = begun("tw-cooking", 1)
    for text in ("eat " + name for name in ("meal", *env.state.game.entity_names)):
        result = env.step(states_of(text))
        if result.terminated:
            return [text, result.reward, result.score, result.info]
    return None


Path("empty").mkdir()
os.chdir("empty")
main()
