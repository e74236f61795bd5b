"""Faults that show only after valid actions, at a limit, or when time passes; `found` is the property to name them."""

import asyncio
import datetime
import random
import tempfile
import time
from pathlib import Path
from time import perf_counter

import numpy as np

from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult
from agentenv.tools import ToolError, answer_calls  # not schema_of: each process of a check would import torch

HERE = Path(__file__).parent
LEFT_CACHE = []
TOLD = "The doors are red, green or blue. Each turn, write 'knock <door>' or 'open <door>', and then TAKE. Eight turns."


class Doors(AgentInstance):
    """Open the right door, then take what is behind it. Half of the reward for each."""

    datasets = {"doors": HERE / "doors.jsonl"}  # noqa: RUF012
    max_turns = 8

    def __init__(self):
        self.is_open = False
        self.num_turns = 0

    async def reset(self, states):
        self.draws = random.Random(states["seed"])
        return {"observation": [{"role": "user", "content": f"{states['observation'][-1]['content']} {TOLD}"}]}

    async def step(self, states):
        self.num_turns += 1
        verb, _, door = states["action_text"].strip().partition(" ")
        if verb == "TAKE" and self.is_open:
            return StepResult(reward=self.worth(), score=1.0, terminated=True)
        if verb == "knock" and door in ("red", "green", "blue"):
            return self.say(await self.heard(door, states))
        if verb == "open" and door == states["label"] and not self.is_open:
            self.is_open = True
            return self.say("It is open.", reward=0.5)
        return self.say("Nothing happens.")

    def say(self, text, reward=0.0):
        return StepResult([{"role": "user", "content": text}], reward=reward, score=0.5 * self.is_open)

    def worth(self):
        return 0.5

    async def heard(self, door, states):
        return self.draws.choice(["A hollow sound.", "A dull sound."])

    async def gold(self, states):
        return "TAKE" if self.is_open else f"open {states['label']}"


class DrawsAtTheOpenDoor(Doors):
    found = "determinism"

    async def heard(self, door, states):
        if self.is_open:
            return "Somebody answers." if random.random() < 0.5 else "Silence."
        return await super().heard(door, states)


class WaitsForTheEcho(Doors):
    found = "cancel"

    async def heard(self, door, states):
        try:
            await asyncio.sleep(0.01)
        except BaseException:
            return "The echo was cut off."
        return await super().heard(door, states)


class WritesDownTheSound(Doors):
    found = "cancel"

    async def heard(self, door, states):
        LEFT_CACHE.append(tempfile.mkstemp(prefix="knock-"))
        return await super().heard(door, states)


class RingsForHours(Doors):
    found = "blocking"

    async def heard(self, door, states):
        if door != states["label"]:
            time.sleep(7_200)
        return await super().heard(door, states)


class PaysTheHasty(Doors):
    found = "determinism"

    async def reset(self, states):
        self.since = perf_counter()
        return await super().reset(states)

    def worth(self):
        return 0.5 if perf_counter() - self.since < 45 else 0.4


class PaysUntilTheMinuteIsOver(Doors):
    found = "determinism"

    async def reset(self, states):
        self.until = datetime.datetime.now() + datetime.timedelta(minutes=1)
        return await super().reset(states)

    def worth(self):
        return 0.5 if datetime.datetime.now() < self.until else 0.1


class PaysAtTheLimitToo(Doors):
    found = "truncation"

    async def on_truncate(self, states):
        return StepResult(reward=1.0 * self.is_open, score=0.5 * self.is_open)


class ForgetsAtTheLimit(Doors):
    found = "truncation"

    def say(self, text, reward=0.0):
        return StepResult([{"role": "user", "content": text}], reward=reward, score=float(self.is_open))

    async def on_truncate(self, states):
        return StepResult(score=0.0)


class FailsAtTheLimit(Doors):
    found = "truncation"
    also = {"rewards"}  # noqa: RUF012 - an episode of valid actions may reach the limit

    async def on_truncate(self, states):
        return StepResult(reward=1.0 / (1 - self.is_open) - 1.0, score=0.0)


class DiceAtTheLimit(Doors):
    found = "determinism"

    async def on_truncate(self, states):
        return StepResult(reward=0.1 * random.random() if self.is_open else 0.0)


SHELVES = {"type": "function", "function": {"name": "shelves", "description": "Name the shelves.", "parameters": {
    "type": "object", "properties": {}}}}  # fmt: skip
SEARCH = {"type": "function", "function": {"name": "search", "description": "Search a shelf.", "parameters": {
    "type": "object", "properties": {"shelf": {"type": "string"}}, "required": ["shelf"]}}}  # fmt: skip


class Store(Doors):
    """Doors with tools: the list names shelves, and a shelf can be searched."""

    async def reset(self, states):
        given = await super().reset(states)
        return {**given, "tools": [SHELVES, SEARCH]}

    def shelves(self) -> str:
        """Name the shelves."""
        return "Shelves: K-77 and K-91."

    async def search(self, shelf: str) -> str:
        """Search a shelf.

        Args:
            shelf: Its name.
        """
        if shelf not in ("K-77", "K-91"):
            raise ToolError("no such shelf.")
        return self.found_on(shelf)

    def found_on(self, shelf):
        return self.draws.choice(["Dust.", "Nails."])

    async def step(self, states):
        if states["tool_calls"].items:
            tools = {"shelves": self.shelves, "search": self.search}
            return StepResult(await answer_calls(states["tool_calls"], tools), score=0.5 * self.is_open)
        return await super().step(states)


class DrawsFromTheShelf(Store):
    found = "determinism"

    def found_on(self, shelf):
        return ["Dust.", "Nails."][np.random.randint(2)]


class HasItsOwnDeadlines(Doors):
    """A wait with a deadline, and an episode of at most an hour, which ends as cut off."""

    async def reset(self, states):
        self.since = time.monotonic()
        return await super().reset(states)

    async def step(self, states):
        if time.monotonic() - self.since > 3600:
            return StepResult(score=0.5 * self.is_open, truncated=True)
        return await super().step(states)

    async def heard(self, door, states):
        until, num = time.monotonic() + 30, 0
        while time.monotonic() < until and num < 3:
            await asyncio.sleep(0)
            num += 1
        return f"{num} knocks."


class PaysTheRestAtTheLimit(Doors):
    """What is open counts for a little more, as its score says."""

    async def on_truncate(self, states):
        return StepResult(reward=0.25 * self.is_open, score=0.6 * self.is_open)


class CostsEachTurn(Doors):
    """A cost of each turn, and more at the limit."""

    def say(self, text, reward=0.0):
        return StepResult([{"role": "user", "content": text}], reward=reward - 0.1, score=0.0)

    async def on_truncate(self, states):
        return StepResult(reward=-1.0)


PLANTED = (
    DrawsAtTheOpenDoor, WaitsForTheEcho, WritesDownTheSound, RingsForHours, PaysTheHasty, PaysUntilTheMinuteIsOver,
    PaysAtTheLimitToo, ForgetsAtTheLimit, FailsAtTheLimit, DiceAtTheLimit, DrawsFromTheShelf,
)  # fmt: skip
SOUND = (Doors, Store, HasItsOwnDeadlines, PaysTheRestAtTheLimit, CostsEachTurn)
