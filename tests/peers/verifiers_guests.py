"""Tasksets in verifiers' own rollout, played by our loop; prints what came of them, as JSON."""

import asyncio
import json
import logging

from agentenv import load_env
from agentenv.errors import AgentEnvError
from agentenv.interop.verifiers_guest import names
from tests.peers.played import said


async def played(spec, seed, actions, **kwargs):
    env = load_env(spec)(**kwargs)
    begun = await env.reset({"seed": seed, "observation": "x"})
    texts = [begun["observation"]]
    try:
        for action in actions:
            result = await env.step({"action_text": action})
            texts.append([result.observation, result.reward, result.score, result.terminated, dict(result.info)])
            if result.done:
                break
    finally:
        await env.close()
    return texts


async def message_of(spec, actions=()):
    try:
        await played(spec, 0, actions)
    except AgentEnvError as error:
        return said(error)
    return ""


async def main():
    root = logging.getLogger()
    before = list(root.handlers), root.level
    right = ["<out>STONE</out>"]
    num_tasks = len(asyncio.all_tasks())
    facts = {
        "shout": await played("verifiers:shout", 0, right),
        "other_task": await played("verifiers:shout", 4, right),
        "configured": await played("verifiers:shout", 0, right, words=["tin"]),
        "together": await asyncio.gather(*(played("verifiers:shout", seed, right) for seed in range(4))),
        "three_turns": await played("verifiers:three-turns", 0, ["0", "x", "2"]),
        "left_early": await played("verifiers:three-turns", 0, ["0"]),
        "broken": await message_of("verifiers:three-turns", ["break"]),
        "two_seats": await message_of("verifiers:two-seats"),
        "commands": await message_of("verifiers:runs-commands"),
        "unknown": await message_of("verifiers:no-such-taskset"),
        "logger_undisturbed": (list(root.handlers), root.level) == before,
        "names": sorted(names()),
    }
    facts["tasks_left"] = len(asyncio.all_tasks()) - num_tasks
    print(json.dumps(facts))


asyncio.run(main())
