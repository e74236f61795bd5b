"""What the scripts of several libraries of games share."""

import asyncio
import json
import random

from agentenv import load_env
from agentenv.errors import AgentEnvError


def said(error):
    return f"{type(error).__name__}: {error}"


def error_of(call):
    """What our error says that a call raises; nothing without one."""
    try:
        call()
    except AgentEnvError as error:
        return said(error)
    return ""


def refusal(spec):
    """What the error says of an environment that cannot be loaded or begun."""
    return error_of(lambda: load_env(spec)().reset({"seed": 0, "observation": "x"}))


def compared(played):
    """What four seeds give alone and side by side, by `played(seed)`, and whether random numbers stay the process's."""

    async def together():
        return await asyncio.gather(*(asyncio.to_thread(played, seed) for seed in range(4)))

    random.seed(1)
    before = random.getstate()
    alone = [played(seed) for seed in range(4)]
    return {
        "same": asyncio.run(together()) == alone,
        "process_undisturbed": random.getstate() == before,
        "num_different": len({json.dumps(one) for one in alone}),
        "first": alone[0],
    }
