"""Environments that the tests of the vector environment are about, named to it as `module:Class`."""

import asyncio
import json
import os
from random import Random
from typing import ClassVar

from agentenv import AgentInstance, StepResult

HERE = "tests.gymnasium_env.vector_worlds"


def task_file(tmp_path, rows):
    """A file of these tasks; a text is the prompt of a row."""
    path = tmp_path / "tasks.jsonl"
    rows = [{"prompt": row} if isinstance(row, str) else row for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class Wandering(AgentInstance):
    """Ends by its seed, after one to four turns; its rewards, texts and infos come from seed, turn and action."""

    needs_label = False

    async def step(self, states):
        turn, seed = states["turn_index"], states["seed"]
        rng = Random(f"{seed}/{turn}/{states['action_text']}")
        last = turn >= Random(seed).randrange(4)
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)  # so that environments overtake each other
        text = f"日本 {turn} {rng.random()} \x1b" + "é" * rng.randrange(20)
        info = {"draw": rng.random(), **({"often": "ja"} if rng.random() < 0.5 else {})}
        cut = last and rng.random() < 0.5
        return StepResult(
            "" if last else text, reward=rng.random(), terminated=last and not cut, truncated=cut, info=info,
            score=float(last),
        )  # fmt: skip


class Computing(AgentInstance):
    """Says that it computes; its reward is the id of its process."""

    needs_label = False
    cpu_bound = True
    score_range = None

    def __init__(self, given=None):
        self.given = given

    def step(self, states):
        return StepResult("More.", reward=float(os.getpid()), terminated=states["turn_index"] == 9)


class OneTurn(AgentInstance):
    """Answers every action with the reward 1 and the end; counts what it was asked."""

    needs_label = False
    num_steps = 0

    async def step(self, states):
        OneTurn.num_steps += 1
        return StepResult(reward=1.0, terminated=True)


class Together(AgentInstance):
    """Whoever calls `reset`, and `step`, waits until all the others do: one after the other nobody ever returns."""

    needs_label = False
    num_inside: ClassVar[dict[str, int]] = {}
    full: ClassVar[dict[str, asyncio.Event]] = {}

    def __init__(self, num):
        self.num = num

    async def meet(self, place):
        inside = self.num_inside[place] = self.num_inside.get(place, 0) + 1
        event = self.full.setdefault(f"{place}/{(inside - 1) // self.num}", asyncio.Event())
        if inside % self.num == 0:
            event.set()
        await event.wait()

    async def reset(self, states):
        await self.meet("reset")
        return states

    async def step(self, states):
        await self.meet("step")
        return StepResult(reward=1.0, terminated=True)


class Fragile(AgentInstance):
    """Does what the action says (raise, hang, stay, end, one of `stops`); its reset fails where the label says so."""

    open: ClassVar[set[int]] = set()
    num_closed: ClassVar[int] = 0
    num_hanging: ClassVar[int] = 0
    broken: ClassVar[bool] = False
    stops: ClassVar = {each.__name__: each for each in (KeyboardInterrupt, SystemExit, GeneratorExit)}

    def __init__(self):
        self.open.add(id(self))

    async def reset(self, states):
        if states["label"] == "bad" or self.broken:
            raise ValueError("no such world")
        return states

    async def step(self, states):
        action = states["action_text"]
        if action == "raise":
            raise ValueError("the world ended")
        if action in self.stops:
            raise self.stops[action]
        if action == "hang":
            Fragile.num_hanging += 1
            await asyncio.Event().wait()
        info = {"error": "a fact of this world"} if action == "err" else {}
        return StepResult(f"turn {states['turn_index']}", reward=0.5, terminated=action == "end", info=info)

    async def close(self):
        self.open.discard(id(self))
        Fragile.num_closed += 1
