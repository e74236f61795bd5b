"""An engine in a gymnasium.vector loop: token ids in, completions out, and the records that a trainer needs.

python examples/gym_vector.py
expected last line: 64 episodes: return 1.00, 3.2 guesses, 502 tokens to train on
"""

import asyncio
import re

import gymnasium
import numpy as np

from agentenv import SamplingParams
from agentenv.engines.models import load_tokenizer, resolve_model
from agentenv.engines.scripted import ScriptedEngine

NUM_ENVS, NUM_EPISODES = 16, 64


def halve(request):
    """A policy that halves the remaining numbers; it stands for a model."""
    low, high = 1, 15
    for guess, hint in re.findall(r"(\d+)\D+It is (larger|smaller)", request.prompt):
        low, high = (max(low, int(guess) + 1), high) if hint == "larger" else (low, min(high, int(guess) - 1))
    return str((low + high) // 2)


async def main():
    game = "agentenv.gym:agentenv/GuessNumber-v0"
    envs = gymnasium.make_vec(game, num_envs=NUM_ENVS, obs_mode="tokens", model="tiny-math")
    engine = ScriptedEngine(halve, load_tokenizer(resolve_model("tiny-math")))  # any other engine fits here
    sampling, records = SamplingParams(max_tokens=16), []
    observations, _ = await envs.areset(seed=0)
    while len(records) < NUM_EPISODES:
        asked = (engine.generate(ids, sampling, request_id=str(index)) for index, ids in enumerate(observations))
        completions = await asyncio.gather(*asked)  # concurrently, so that the engine can batch
        observations, _, terminations, truncations, _ = await envs.astep(completions)
        ended = np.flatnonzero(terminations | truncations)  # the next episodes started in the same step
        records += [envs.records[index] for index in ended]
    await envs.aclose()
    records = records[:NUM_EPISODES]
    print(f"one of them: {[turn.action for turn in records[0].turns]}, {records[0].stop_reason}")
    num_tokens = sum(turn.end - turn.start for record in records for turn in record.turns)
    print(
        f"{len(records)} episodes: return {np.mean([record.reward for record in records]):.2f}, "
        f"{np.mean([len(record.turns) for record in records]):.1f} guesses, {num_tokens} tokens to train on"
    )


if __name__ == "__main__":
    asyncio.run(main())
