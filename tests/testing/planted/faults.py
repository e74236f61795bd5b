"""Two sound environments, `Sum` and `Desk`, and forty with one planted fault each; the second twenty have tools.

`found` of a class is the property of `agentenv check`, or the finding of `agentenv audit`, that must name the fault;
"nothing" if neither does, and the docstring says why.
"""

import asyncio
import json
import math
import os
import random
import re
import tempfile
import threading
import time
from pathlib import Path

from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult
from agentenv.tools import answer_calls

HERE = Path(__file__).parent
OPEN_CACHE, LAST, GO = [], {}, threading.Event()
LOOKUP = {"type": "function", "function": {"name": "lookup", "description": "Say how many there are.", "parameters": {
    "type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}}}  # fmt: skip


class Sum(AgentInstance):
    """A sum; two attempts; the number behind the last #### counts."""

    datasets = {"sums": HERE / "sums.jsonl"}  # noqa: RUF012
    attempts = 0

    async def step(self, states):
        self.attempts += 1
        right = self.right(states["action_text"], states)
        done = right or self.attempts == 2
        return StepResult(
            self.said(states), reward=self.reward(right, states), score=self.score(right), terminated=done
        )

    def right(self, text, states):
        return re.findall(r"#### (-?\d+)\s*$", text)[-1:] == [states["label"]]

    def reward(self, right, states):
        return float(right)

    def score(self, right):
        return float(right)

    def said(self, states):
        return "That is not right. Try again."

    async def gold(self, states):
        return f"#### {states['label']}"


class Desk(Sum):
    """A number that a tool knows; at most six calls, and two answers."""

    datasets = {"desk": HERE / "desk.jsonl"}  # noqa: RUF012
    calls = 0
    most = 6

    async def reset(self, states):
        self.stock = dict(states["metadata"]["stock"])
        return {**states, "tools": [LOOKUP]}

    async def step(self, states):
        if not states["tool_calls"].items:
            return await super().step(states)
        self.calls += 1
        return StepResult(
            await self.answer(states), reward=self.for_call(states), score=0.0, truncated=self.calls == self.most
        )

    async def answer(self, states):
        return await answer_calls(states["tool_calls"], {"lookup": self.lookup})

    async def lookup(self, item: str) -> str:
        return str(self.stock[item]) if item in self.stock else "There is no such item."

    def for_call(self, states):
        return 0.0

    async def gold(self, states):
        call = json.dumps({"name": "lookup", "arguments": {"item": states["metadata"]["item"]}})
        return f"#### {states['label']}" if self.calls else f"<tool_call>\n{call}\n</tool_call>"


def messages(states, say):
    """What `say` returns for each call of an action, as messages."""
    return [{"role": "tool", "content": say(call)} for call in states["tool_calls"].items]


# --- without tools ----------------------------------------------------------------------------------------------------


class TellsTheAnswer(Sum):
    found = "answer-in-feedback"

    def said(self, states):
        return f"No, it is {states['label']}."


class AsksWithTheAnswer(Sum):
    found = "answer-in-prompt"

    async def reset(self, states):
        return {"observation": [{"role": "user", "content": f"What is {states['label']} + 0?"}]}


class PaysSilence(Sum):
    found = "null-earns"

    def right(self, text, states):
        return not text.strip() or super().right(text, states)


class TakesTheLabelAnywhere(Sum):
    found = "hack-earns:enumeration"

    def right(self, text, states):
        return states["label"] in text


class TakesTheBeginning(Sum):
    found = "prefix-earns"

    def right(self, text, states):
        said = re.findall(r"#### (\d+)\s*$", text)
        return bool(said) and states["label"].startswith(said[-1])


class TakesOneOfTwo(Sum):
    found = "hedging"

    def right(self, text, states):
        return states["label"] in re.findall(r"#### (\d+)", text)


class ObeysThePolicy(Sum):
    found = "hack-earns:injection"

    def right(self, text, states):
        return "full score" in text.lower() or super().right(text, states)


class PaysForLength(Sum):
    found = "reward-exceeds-gold:length_bomb"

    def reward(self, right, states):
        return right + len(states["action_text"]) / 1000


class PaysForAnything(Sum):
    """Without a score and gold."""

    found = "reward-constant"
    gold = AgentInstance.gold

    def right(self, text, states):
        return True

    def score(self, right):
        return None


class RemembersAnswers(Sum):
    found = "isolation"
    said_before = []  # noqa: RUF012

    def said(self, states):
        self.said_before.append(states["action_text"])
        return f"That is wrong, as {len(self.said_before) % 5} others were."


class AsksTheLastOne(Sum):
    found = "isolation"

    async def step(self, states):
        LAST["label"] = states["label"]
        await asyncio.sleep(0)
        return await super().step(states)

    def right(self, text, states):
        return super().right(text, LAST)


class DrawsHints(Sum):
    found = "determinism"

    def said(self, states):
        return random.choice(["Larger.", "Smaller.", "Other."])


class ListsASet(Sum):
    found = "portability"

    def said(self, states):
        return f"Not right. Use {', '.join({'plus', 'minus', 'times', 'carry', 'digits'})}."


class ReadsAnyNumber(Sum):
    """`int` refuses more than 4,300 digits."""

    found = "contract"

    def right(self, text, states):
        found = re.findall(r"\d+", text)
        return bool(found) and int(found[-1]) == int(states["label"])


class ReadsThePattern(Sum):
    """An action is no regular expression."""

    found = "contract"

    def right(self, text, states):
        return re.fullmatch(f".*{text}", f"#### {states['label']}") is not None


class BacktracksForLong(Sum):
    """A pattern that takes exponential time."""

    found = "blocking"

    def right(self, text, states):
        re.match(r"([a-zA-Z ]+)*$", (text[:24] if len(text) > 1_000 else "") + "1")
        return super().right(text, states)


class DividesByWords(Sum):
    """Reward is NaN for an action without words."""

    found = "contract"

    def reward(self, right, states):
        num = len(states["action_text"].split())
        return float(right) / num if num else math.nan


class CutsLongAnswers(Sum):
    """What is longer than four characters is cut off, and gold is."""

    found = "gold-fails"

    async def step(self, states):
        if len(states["action_text"]) > 4:
            return StepResult(score=0.0, truncated=True)
        return await super().step(states)


class MarksItsRow(Sum):
    found = "mutation"

    async def reset(self, states):
        states["metadata"]["level"].append("seen")
        return states


class LeavesATask(Sum):
    found = "cancel"

    async def reset(self, states):
        self.clock = asyncio.ensure_future(asyncio.sleep(3600))
        await asyncio.sleep(0)
        return states


# --- with tools -------------------------------------------------------------------------------------------------------


class ListsTheStock(Desk):
    found = "answer-in-feedback"

    async def lookup(self, item: str) -> str:
        return str(self.stock.get(item) or f"Unknown. There are {self.stock}.")


class PaysForCalls(Desk):
    """A little for each; sixteen turns."""

    found, most = "repeat-pays:calls", 20

    def for_call(self, states):
        return 0.02


class PaysMuchForCalls(Desk):
    found, most = "reward-exceeds-gold:calls", 20

    def for_call(self, states):
        return 0.1


class PaysForCallsUnrated(Desk):
    """Without a score and gold."""

    found, gold = "repeat-pays:calls", AgentInstance.gold

    async def step(self, states):
        result = await super().step(states)
        num = len(states["tool_calls"].items) / 10
        return StepResult(
            result.observation, reward=result.reward + num, terminated=result.terminated, truncated=result.truncated
        )


class TakesACallForTheAnswer(Desk):
    found = "guess-earns:calls"

    async def step(self, states):
        result = await super().step(states)
        if states["tool_calls"].items and self.calls == 3:
            return StepResult(reward=1.0, score=1.0, terminated=True)
        return result


class NeedsTheArgument(Desk):
    found = "contract"

    async def answer(self, states):
        return messages(states, lambda call: str(getattr(call, "arguments", {"item": ""})["item"]))


class NeedsText(Desk):
    found = "contract"

    async def answer(self, states):
        return messages(states, lambda call: f"None of {getattr(call, 'arguments', {}).get('item', '').strip()}.")


class NeedsAKnownTool(Desk):
    found = "contract"

    async def answer(self, states):
        tools = {"lookup": lambda arguments: "None.", "": lambda arguments: "Unreadable."}
        return messages(states, lambda call: tools[call.name](getattr(call, "arguments", None)))


class NeedsAReadableCall(Desk):
    found = "contract"

    async def answer(self, states):
        return messages(states, lambda call: f"{call.name}: {call.arguments}"[:100])


class EvaluatesTheArgument(Desk):
    found = "contract"

    async def answer(self, states):
        return messages(states, lambda call: str(eval(str(getattr(call, "arguments", {}).get("item", 0)), {})))


class AddsUpCalls(Desk):
    """Of all episodes."""

    found = "isolation"
    num_calls = []  # noqa: RUF012

    async def lookup(self, item: str) -> str:
        self.num_calls.append(item)
        return f"Call {len(self.num_calls)}."


class DrawsItsResults(Desk):
    found = "determinism"

    async def lookup(self, item: str) -> str:
        return f"About {random.randint(1, 10**6)}."


class TimesItsResults(Desk):
    found = "determinism"

    async def lookup(self, item: str) -> str:
        return f"None, after {time.perf_counter_ns()} ns."


class HashesItsArgument(Desk):
    found = "portability"

    async def lookup(self, item: str) -> str:
        return f"Row {hash(item)}."


class BlocksInItsTool(Desk):
    found = "blocking"

    async def lookup(self, item: str) -> str:
        time.sleep(0.07)
        return "None."


class LeavesAThread(Desk):
    found = "cancel"

    async def lookup(self, item: str) -> str:
        threading.Thread(target=GO.wait, args=(300,), daemon=True).start()
        return "None."


class LeavesAFile(Desk):
    found = "cancel"

    async def lookup(self, item: str) -> str:
        file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115
        OPEN_CACHE.append(file)
        return os.path.basename(file.name)[:0] + "None."


class SaysNothing(Desk):
    found = "feedback"

    async def lookup(self, item: str) -> str:
        return ""


class CallsForever(Desk):
    """The limit of a run ends these episodes, as those of the calculator in docs/how-to/tools-and-mcp.md."""

    found, most = "nothing", None


class TakesFromTheRow(Desk):
    found = "mutation"

    async def step(self, states):
        if states["tool_calls"].items:
            states["metadata"]["stock"].clear()
        return await super().step(states)


PLANTED = [cls for cls in vars().copy().values() if isinstance(cls, type) and "found" in vars(cls)]
