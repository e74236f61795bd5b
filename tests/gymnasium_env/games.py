"""Small environments with what real ones do: a user's file, of which a test names the class as `games.py:Class`."""

import asyncio
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult


class Echo(AgentInstance):
    """Says what it heard; over when that is the label, or after five actions."""

    datasets: ClassVar = {"games": Path(__file__).parent / "games.jsonl"}
    closed: ClassVar[list[str]] = []

    def __init__(self, *, name="", slow_s=0.0):
        self.name, self.slow_s, self.heard = name, slow_s, []

    async def reset(self, states):
        self.seed = states["seed"]
        return states

    async def step(self, states):
        await asyncio.sleep(self.slow_s)
        self.heard.append(states["action_text"])
        right = self.heard[-1] == states["label"]
        said = "" if right else f"I heard {self.heard[-1]!r} é😀 as {self.seed}."
        result = self.result(right=right)
        return StepResult(said, terminated=right or len(self.heard) == 5, info={"turn": len(self.heard)}, **result)

    def result(self, *, right):
        return {"reward": float(right), "score": 0.0 if not right else 0.75}

    async def close(self):
        self.closed.append(self.name)


class Breaks(Echo):
    """Raises at the action `break`."""

    async def step(self, states):
        if states["action_text"] == "break":
            raise RuntimeError("broken \ud800 é")
        return await super().step(states)


class BreaksAtReset(Echo):
    async def reset(self, states):
        raise RuntimeError("no world")


class Silent(Echo):
    """Answers nothing and goes on."""

    async def step(self, states):
        return StepResult()


class Hangs(Echo):
    begun: ClassVar = threading.Event()

    async def step(self, states):
        self.begun.set()
        await asyncio.sleep(3600)


class Unseeded(Echo):
    """Not what its seed says."""

    async def reset(self, states):
        return {**await super().reset(states), "observation": f"Guess {random.random()}."}


class LastWord(Echo):
    """Is told when a limit ends the episode."""

    async def on_truncate(self, states):
        return StepResult(reward=0.5, score=0.5, info={"late": "yes"})


class Tools(Echo):
    """Offers a tool and says which calls it read."""

    async def reset(self, states):
        tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
            "type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"],
        }}}  # fmt: skip
        return {**states, "tools": [tool]}

    async def step(self, states):
        calls = [(call.name, dict(call.arguments)) for call in states["tool_calls"].calls]
        return StepResult([{"role": "tool", "content": str(calls)}], reward=float(len(calls)))


class OwnLoop:
    """An agent with a loop of its own: no `step`."""

    async def run(self, context):
        return None


class Timed(Echo):
    """Tells the clock in its info."""

    async def step(self, states):
        result = await super().step(states)
        return replace(result, info={**result.info, "time": time.perf_counter()})
