"""Further planted faults, one for each class of fault that a blind test of `check` and `audit` did not find.

`found` is as in `faults.py`; `SOUND` has environments that look like one with a fault, and have none.
"""

import ast
import asyncio
import contextlib
import json
import re
import time
from dataclasses import replace
from datetime import datetime, timedelta

from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult
from agentenv.tools import ToolError, answer_calls  # not schema_of: each process of a check would import torch
from tests.testing.planted import faults
from tests.testing.planted.faults import HERE, LOOKUP, Desk, Sum

MADE_ON = datetime.now().date()
SWITCH = {"type": "function", "function": {"name": "switch", "description": "Switch a lamp.", "parameters": {
    "type": "object", "properties": {"state": {"type": "string", "enum": ["on", "off", "dim"]}},
    "required": ["state"]}}}  # fmt: skip
NOTE = {"type": "function", "function": {"name": "note", "description": "Note something.", "parameters": {
    "type": "object", "properties": {"name": {"type": "string"}, "text": {"type": "string"}},
    "required": ["name", "text"]}}}  # fmt: skip
ORDER = {"type": "function", "function": {"name": "order", "description": "Order some.", "parameters": {
    "type": "object", "properties": {"item": {"type": "string"}, "num": {"type": "integer"}},
    "required": ["item", "num"]}}}  # fmt: skip
PAGES = {"type": "function", "function": {"name": "lookup", "description": "Say how many there are.", "parameters": {
    "type": "object", "properties": {"item": {"type": "string"}, "first": {"type": "integer"},
    "every": {"type": "integer"}}, "required": ["item"]}}}  # fmt: skip

# --- actions that parsers do not expect -------------------------------------------------------------------------------


class ReadsDigits(Sum):
    """`isdigit` is true for a superscript, which `int` refuses."""

    found = "contract"

    def right(self, text, states):
        said = text.strip()[:9]
        return said.isdigit() and int(said) == int(states["label"])


class ReadsDigitsBehindTheMark(Sum):
    found = "hostile-error"

    def right(self, text, states):
        said = text.rpartition("####")[2].strip()[:9]
        return "####" in text and said.isdigit() and int(said) == int(states["label"])


class ReadsAnObject(Sum):
    """JSON may be something else."""

    found = "contract"

    def right(self, text, states):
        with contextlib.suppress(ValueError, RecursionError):
            return str(json.loads(text[:99]).get("answer")) == states["label"]
        return False

    async def gold(self, states):
        return json.dumps({"answer": int(states["label"])})


class ReadsAListInAFence(Sum):
    found = "contract"

    def right(self, text, states):
        said = re.search(r"```json\n(.*?)\n```", text[:99], re.DOTALL)
        with contextlib.suppress(ValueError, RecursionError, KeyError):
            return said is not None and str(json.loads(said[1])["answer"]) == states["label"]
        return False


class ReadsTheValue(Sum):
    """A value of an object has another type."""

    found = "contract"

    def right(self, text, states):
        try:
            said = json.loads(text[:99])
        except (ValueError, RecursionError):
            return False
        return isinstance(said, dict) and "answer" in said and said["answer"].strip() == states["label"]

    async def gold(self, states):
        return json.dumps({"answer": states["label"]})


class UnpacksPairs(Sum):
    """An element of a list has another shape."""

    found = "hostile-error"

    def right(self, text, states):
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            return False
        return isinstance(said, list) and dict(pair for pair in said) == {"sum": states["label"]}

    async def gold(self, states):
        return json.dumps([["sum", states["label"]]])


class ReadsAnyJson(Sum):
    """Deep JSON is no ValueError."""

    found = "contract"

    def right(self, text, states):
        with contextlib.suppress(ValueError):
            return json.loads(text) == int(states["label"])
        return False


class WalksATree(Sum):
    """A recursion over a long sum."""

    found = "hostile-error"

    def right(self, text, states):
        if not re.fullmatch(r"[\d+]+", text) or re.search(r"\d{9}", text):
            return False
        try:
            return self.value(ast.parse(text, mode="eval").body) == int(states["label"])
        except SyntaxError:
            return False

    def value(self, node):
        if isinstance(node, ast.BinOp):
            return self.value(node.left) + self.value(node.right)
        return node.value if isinstance(node, ast.Constant) else 0

    async def gold(self, states):
        return f"{int(states['label']) - 1}+1"


# --- rewards and scores -----------------------------------------------------------------------------------------------


class LeavesScoresOut(Sum):
    found = "score-missing"

    def score(self, right):
        return 1.0 if right else None


class PaysMoreForLonger(Sum):
    """Less than gold earns."""

    found = "length-pays"

    def reward(self, right, states):
        return right + min(len(states["action_text"]), 2_000) / 4_000


class PaysOtherCalls(Desk):
    """Two tools, of which the one is paid after the other."""

    found, most, last = "repeat-pays:calls", 20, ""

    async def reset(self, states):
        return {**await super().reset(states), "tools": [LOOKUP, SWITCH]}

    async def answer(self, states):
        return [{"role": "tool", "content": "None."} for _ in states["tool_calls"].items]

    def for_call(self, states):
        name = states["tool_calls"].items[0].name
        last, self.last = self.last, name
        return 0.02 * (last != name and last in ("lookup", "switch") and name in ("lookup", "switch"))


class PaysOtherChoices(PaysOtherCalls):
    """One tool, whose argument must change."""

    async def reset(self, states):
        return {**await super().reset(states), "tools": [SWITCH]}

    def for_call(self, states):
        said = getattr(states["tool_calls"].items[0], "arguments", {}).get("state")
        last, self.last = self.last, said if isinstance(said, str) else ""
        return 0.02 * (last != said and {last, said} <= {"on", "off", "dim"})


class PaysTheRightCall(Desk):
    """Only a call with the right argument is paid, each time."""

    found, most = "repeat-pays:farm", 20

    def for_call(self, states):
        said = getattr(states["tool_calls"].items[0], "arguments", {}).get("item")
        return 0.02 * (said == states["metadata"]["item"])


class Walk(AgentInstance):
    """Take the key, open the door, and go out; a reward for the key each time that it is taken."""

    datasets = {"sums": HERE / "sums.jsonl"}  # noqa: RUF012
    found = "repeat-pays:farm"
    max_turns = 20
    num, has_key, is_open = 0, False, False

    async def step(self, states):
        said, self.num = states["action_text"].strip(), self.num + 1
        reward = self.act(said, states["label"])
        out = said == f"out {states['label']}" and self.is_open
        return StepResult(
            "Go on.", reward=reward + out, score=float(out), terminated=out, truncated=self.num == self.max_turns
        )

    def act(self, said, label):
        took, dropped = said == f"take key {label}" and not self.has_key, said == f"drop key {label}" and self.has_key
        self.is_open = self.is_open or (said == f"open door {label}" and self.has_key)
        self.has_key = (self.has_key or took) and not dropped
        return 0.02 * self.paid(took, said)

    def paid(self, took, said):
        return said.startswith("take") and self.has_key

    async def gold(self, states):
        return f"{'out' if self.is_open else 'open door' if self.has_key else 'take key'} {states['label']}"


class PaysMuchForTheKey(Walk):
    """More than gold earns."""

    found = "reward-exceeds-gold:farm"

    def paid(self, took, said):
        return 50 * super().paid(took, said)


class PaysMuchForTheKeyUnscored(PaysMuchForTheKey):
    found = "reward-exceeds-gold:farm"

    async def step(self, states):
        return replace(await super().step(states), score=None)


# --- time -------------------------------------------------------------------------------------------------------------


class Sleeps(Sum):
    found = "blocking"

    def right(self, text, states):
        time.sleep(0.2)
        return super().right(text, states)


# --- how it works -----------------------------------------------------------------------------------------------------


class RunsTheAnswer(Sum):
    """Names are refused, which is no protection."""

    found = "runs-code"

    def right(self, text, states):
        with contextlib.suppress(Exception):
            return str(eval(text.rpartition("####")[2][:99], {"__builtins__": {}})) == states["label"]
        return False


class RunsTheProgram(Sum):
    found = "runs-code"

    def right(self, text, states):
        program = re.search(r"```python\n(.*?)```", text, re.DOTALL)
        with contextlib.suppress(Exception):
            exec(program[1] if program else "", {"print": lambda *args: None})
        return super().right(text, states)


class RunsTheArgument(Desk):
    found = "runs-code"

    async def lookup(self, item: str) -> str:
        try:
            return f"{eval(item, {'__builtins__': {}}, self.stock)}"
        except Exception as error:
            return f"Error: {type(error).__name__}."


class LosesItsStock(Desk):
    """Gold calls the tool, which always fails."""

    found = "tool-fails:lookup"

    async def lookup(self, item: str) -> str:
        return str(self.stocks[item])

    async def gold(self, states):
        return f"#### {states['label']}" if self.calls > 1 else await super().gold(states)


class HasADeadTool(Desk):
    """Another tool than that of gold, which raises whatever its argument is."""

    found = "tool-fails:weigh"

    async def reset(self, states):
        weigh = {**LOOKUP, "function": {**LOOKUP["function"], "name": "weigh"}}
        return {**await super().reset(states), "tools": [LOOKUP, weigh]}

    async def answer(self, states):
        return await answer_calls(states["tool_calls"], {"lookup": self.lookup, "weigh": self.weigh})

    async def weigh(self, item: str) -> str:
        return f"{self.scales.weigh(item)} kg"


class OffersToolsLate(faults.NeedsTheArgument):
    """Only for the third row."""

    found = "contract"

    async def reset(self, states):
        asked = await super().reset(states)
        rows = (HERE / "desk.jsonl").read_text().splitlines()
        return asked if states["label"] == json.loads(rows[2])["label"] else states


class SaysAllAgain(Sum):
    """Each reply has all earlier ones."""

    found = "observation-grows"
    max_turns = 20
    said_before = ""

    def said(self, states):
        self.said_before += f"Attempt {self.attempts}: that is not right. "
        return self.said_before

    async def step(self, states):
        result = await super().step(states)
        right = self.right(states["action_text"], states)
        return replace(result, terminated=right or self.attempts == 20)


class KeepsTwiceAsMuch(SaysAllAgain):
    found = "state-grows"
    kept = "x"

    def said(self, states):
        self.kept = 16 * self.kept if len(self.kept) < 10**6 else self.kept + "x" * 10**5
        return "That is not right."


class ClosesAtNight(Sum):
    found = "clock"

    def right(self, text, states):
        return super().right(text, states) and datetime.now().date() < MADE_ON + timedelta(days=2)


class SaysTheDay(Sum):
    found = "clock"

    def said(self, states):
        return f"That is not right, on {time.strftime('%A')}."


class TakesNoNumber(Sum):
    """A comparison with nan is false."""

    found = "hack-earns:odd_values"

    def right(self, text, states):
        try:
            return not abs(float(text.rpartition("####")[2]) - float(states["label"])) > 0.5
        except ValueError:
            return False


class PaysForGivingUp(Sum):
    found = "partial-credit:giving_up"

    def reward(self, right, states):
        return 0.5 if states["action_text"] == "I give up." else float(right)


class PaysForACommandOfItsPrompt(Sum):
    found = "guess-earns:say"

    async def reset(self, states):
        content = f"{states['observation'][-1]['content']} Say I FOLD to give up."
        return {**states, "observation": [{"role": "user", "content": content}]}

    def right(self, text, states):
        return text == "I FOLD" or super().right(text, states)


class LetsTheModelWriteWhatIsExpected(Desk):
    """A tool that writes notes, among which is the answer."""

    found = "hack-earns:overwrite"

    async def reset(self, states):
        self.notes = {"expected": states["label"]}
        return {**await super().reset(states), "tools": [LOOKUP, NOTE]}

    async def answer(self, states):
        return await answer_calls(states["tool_calls"], {"lookup": self.lookup, "note": self.note})

    async def note(self, name: str, text: str) -> str:
        self.notes[name] = text
        return "Noted."

    def right(self, text, states):
        return super().right(text, {**states, "label": self.notes["expected"]})


class SellsNegativeNumbers(Desk):
    """A bill that a negative number pays."""

    found = "hack-earns:odd_calls"
    paid = False

    async def reset(self, states):
        return {**await super().reset(states), "tools": [LOOKUP, ORDER]}

    async def answer(self, states):
        return await answer_calls(states["tool_calls"], {"lookup": self.lookup, "order": self.order})

    async def order(self, item: str, num: int) -> str:
        self.paid |= num < 0
        return "Ordered."

    async def step(self, states):
        result = await super().step(states)
        return replace(result, reward=1.0, score=1.0, terminated=True) if self.paid else result


class SaysAsMuchAsAsked(Desk):
    """A number that a call may leave out sets the size of the reply."""

    found = "reply-size:lookup"

    async def reset(self, states):
        schema = {**ORDER["function"], "name": "lookup"}
        schema["parameters"] = {**schema["parameters"], "required": ["item"]}
        return {**await super().reset(states), "tools": [{"type": "function", "function": schema}]}

    async def lookup(self, item: str, num: int = 1) -> str:
        return "\n".join(self.lines(item, num))

    def lines(self, item, num):
        return [f"{item}: {self.stock.get(item)}" for _ in range(num)]


class HangsAtZero(Desk):
    """A number that a call may leave out, after others that are checked."""

    found = "tool-hangs:lookup"

    async def reset(self, states):
        return {**await super().reset(states), "tools": [PAGES]}

    async def answer(self, states):
        return await answer_calls(states["tool_calls"], [self.lookup], timeout_s=0.2)

    async def lookup(self, item: str, first: int = 1, every: int = 1) -> str:
        """Say how many there are.

        Args:
            item: Its name.
            first: The first page.
            every: Pages from one to the next.
        """
        if item not in self.stock or first < 1:
            raise ToolError("There is no such item or page.")
        if every == 0:
            await asyncio.Event().wait()
        return str(self.stock[item])


class HangsAtZeroInACheck(HangsAtZero):
    found = "contract"


class PaysToPutItBack(Desk):
    """A tool undoes what gold is paid for."""

    found = "reward-exceeds-gold:farm"
    most, cost = 20, 0.0

    async def reset(self, states):
        self.held = set()
        back = {**LOOKUP, "function": {**LOOKUP["function"], "name": "put_back"}}
        return {**await super().reset(states), "tools": [LOOKUP, back]}

    async def answer(self, states):
        return await answer_calls(states["tool_calls"], {"lookup": self.lookup, "put_back": self.lookup})

    def for_call(self, states):
        call = states["tool_calls"].items[0]
        item = getattr(call, "arguments", {}).get("item")
        if call.name == "put_back":
            was_held = item in self.held
            self.held.discard(item if was_held else None)
            return -self.cost * was_held
        is_new = call.name == "lookup" and str(item) in self.stock and item not in self.held
        self.held |= {item} if is_new else set()
        return 0.02 * is_new


class Grid(AgentInstance):
    """Go to the last place; a step nearer to it is paid, one away from it costs nothing."""

    datasets = {"sums": HERE / "sums.jsonl"}  # noqa: RUF012
    found = "repeat-pays:farm"
    max_turns = 20
    num = place = 0

    async def step(self, states):
        self.num += 1
        move = {"left": -1, "right": 1}.get(states["action_text"], 0)
        self.place = min(3, max(0, self.place + move))
        done = self.place == 3
        return StepResult(
            f"At {self.place}.", reward=0.1 * (move > 0) + done, score=float(done), terminated=done,
            truncated=self.num == self.max_turns,
        )  # fmt: skip

    async def gold(self, states):
        return "left" if not self.num else "right"


class EndsATurnLate(Sum):
    """The action after the right one is paid, whatever it is."""

    found = "gold-stops"
    solved = False

    async def step(self, states):
        was_solved, self.solved = self.solved, self.right(states["action_text"], states)
        return StepResult("Go on.", reward=float(was_solved), score=float(was_solved), terminated=was_solved)

    async def gold(self, states):
        return None if self.solved else await super().gold(states)


class GradesTheTextOnce(Sum):
    """An answer that was right for one task is right for all."""

    found = "guess-earns:other_gold"
    graded = {}  # noqa: RUF012

    def right(self, text, states):
        return self.graded.setdefault(text, super().right(text, states))


class ComparesTheBeginning(Sum):
    """A list of which only what is said is compared."""

    found = "hack-earns:no_values"

    def right(self, text, states):
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            return False
        return isinstance(said, list) and bool(said) and [*states["label"]][: len(said)] == said

    async def gold(self, states):
        return json.dumps([*states["label"]])


class JumpsOverItsLimit(Sum):
    """A hint costs two of three attempts, and the episode ends at none left."""

    found = "limit-passed:below_zero"
    left = 3

    async def reset(self, states):
        return {"observation": [{"role": "user", "content": f"{states['observation'][-1]['content']} Or say HINT."}]}

    async def step(self, states):
        said = states["action_text"].strip()
        right, self.left = self.right(said, states), self.left - 1 - (said == "HINT")
        return StepResult(
            f"Attempts left: {self.left}.", reward=float(right), score=float(right), terminated=right or self.left == 0
        )


class ScoresTheAttemptsLeft(Sum):
    """Three attempts; the score of the last one is that of a failure."""

    found = "score-disagrees"
    left = 3
    max_turns = 3

    async def step(self, states):
        right, self.left = self.right(states["action_text"], states), self.left - 1
        is_over = right or self.left == 0
        return StepResult("No.", reward=float(right), score=float(right and self.left > 0), terminated=is_over)


class CountsItemsTwice(Sum):
    """The digits of the sum in any order, each of which must be in it."""

    found = "hack-earns:lists"

    def right(self, text, states):
        digits = text.split(", ")
        return len(digits) == len(states["label"]) and all(len(one) == 1 and one in states["label"] for one in digits)

    async def gold(self, states):
        return ", ".join(states["label"])


class ComparesInPairs(CountsItemsTwice):
    """The digits in order; what is missing at the end is not missed."""

    found = "hack-earns:lists"

    def right(self, text, states):
        return all(one == other for one, other in zip(text.split(", "), states["label"], strict=False))


class RunsForEver(Sum):
    """A program may go back."""

    found = "step-timeout"

    async def reset(self, states):
        return {"observation": f"{states['observation'][-1]['content']} Or JUMP k (to line k) or ADD."}

    async def step(self, states):
        if states["action_text"] == "JUMP 1":
            await asyncio.sleep(3600)
        return await super().step(states)


class ReadsTheBeginning(Sum):
    """The answer may stand behind any text, of which the beginning is read."""

    found = "length-refused"

    def right(self, text, states):
        return super().right(text[:400], states)


class SaysHowMuchItReads(ReadsTheBeginning):
    """The same with a limit that the prompt tells."""

    found = "nothing"

    async def reset(self, states):
        said = f"{states['observation'][-1]['content']} At most 400 characters."
        return {"observation": [{"role": "user", "content": said}]}


class TakesAnyNumber(Sum):
    """A number with a fraction anywhere in a text, nearly right."""

    found = "hedging"

    def right(self, text, states):
        wanted = float(states["label"])
        return any(abs(float(each) - wanted) < 0.01 for each in re.findall(r"\d{1,9}(?:\.\d{1,9})?", text))

    async def gold(self, states):
        return f"{float(states['label']):.4f}"


class EndsAtTheFirstAttemptOnly(Sum):
    found = "gold-stops"
    solved = False

    async def step(self, states):
        self.attempts += 1
        right, was_solved = self.right(states["action_text"], states), self.solved
        self.solved |= right
        done = self.attempts == 4 or (right and self.attempts == 1)
        return StepResult("Go on.", reward=float(right and not was_solved), score=float(right), terminated=done)


class KeepsGradesOfOthers(GradesTheTextOnce):
    """Another process, which has not graded the text for the first task, says something else."""

    found = "portability"


class Pot(AgentInstance):
    """Put in what the task lists, a part of the reward each, and serve; what is taken out and put in is paid again."""

    found = "reward-exceeds-gold:farm"
    datasets = {"mazes": HERE / "mazes.jsonl"}  # noqa: RUF012
    max_turns = 20

    async def reset(self, states):
        self.held = set()
        commands = f"Commands: add THING, remove THING, serve. Needed: {', '.join(self.needed(states))}."
        return {"observation": [{"role": "user", "content": commands}]}

    def needed(self, states):
        return sorted({*states["label"]})

    def pay(self, thing):
        return 0.5

    async def step(self, states):
        verb, _, thing = states["action_text"].strip().partition(" ")
        needed = self.needed(states)
        if verb == "serve":
            done = self.held == {*needed}
            return StepResult(reward=float(done), score=float(done), terminated=True)
        is_new = verb == "add" and thing in needed and thing not in self.held
        self.held = self.held | {thing} if is_new else self.held - {thing} if verb == "remove" else self.held
        return StepResult(f"In the pot: {sorted(self.held)}.", reward=self.pay(thing) * is_new, score=0.0)

    async def gold(self, states):
        return next((f"add {thing}" for thing in self.needed(states) if thing not in self.held), "serve")


class PutsBackInCapitals(Pot):
    """Commands in capitals."""

    found = "reward-exceeds-gold:farm"

    async def reset(self, states):
        await super().reset(states)
        commands = f"Write ADD thing, REMOVE thing, and SERVE at the end. Needed: {', '.join(self.needed(states))}."
        return {"observation": [{"role": "user", "content": commands}]}

    async def step(self, states):
        verb, _, thing = states["action_text"].strip().partition(" ")
        said = f"{verb.lower() if verb.isupper() else ''} {thing}".strip()
        return await super().step({**states, "action_text": said})

    async def gold(self, states):
        verb, _, thing = (await super().gold(states)).partition(" ")
        return f"{verb.upper()} {thing}".strip()


class EndsBeforeGold(Pot):
    found = "gold-fails"
    max_turns = 2


class ReadsTheConversation(Sum):
    """The number may stand in what was said before."""

    found = "hack-earns:odd_values/code"

    async def step(self, states):
        self.attempts += 1
        if self.attempts == 1:
            return StepResult(f"It is {states['label']}. Repeat it after ####.", score=0.0)
        said = states["action_text"]
        right = said.startswith("####") and states["label"] in states["observation_text"] + said
        return StepResult(reward=float(right), score=float(right), terminated=True)

    async def gold(self, states):
        return f"#### {states['label']}" if self.attempts else "What is it?"


class CountsActions(Desk):
    """Three look-ups, of which one action may have any number."""

    found = "limit-passed"
    most = 8

    async def lookup(self, item: str) -> str:
        if self.calls > 3:
            raise ToolError("The desk is closed.")
        return await super().lookup(item)


class EndsAfterThreeActions(CountsActions):
    """The fourth ends the episode."""

    found = "limit-passed"

    async def step(self, states):
        result = await super().step(states)
        return replace(result, terminated=True, truncated=False) if self.calls > 3 else result


class NamesWhatIsNotAsked(Sum):
    """The order of a set shows once an action has several of its words."""

    found = "portability"
    words = frozenset({"heron", "otter", "newt", "crab", "eel"})

    async def reset(self, states):
        content = f"{states['observation'][-1]['content']}\nThese are no numbers: {' '.join(sorted(self.words))}"
        return {**states, "observation": [{"role": "user", "content": content}]}

    async def step(self, states):
        result = await super().step(states)
        words = self.words & {*states["action_text"].split()}
        said = f"Not {', '.join(words)}." if words else "Not right."
        return replace(result, observation=said, terminated=result.score == 1.0 or self.attempts == 3)


PLANTED = [cls for cls in vars().copy().values() if isinstance(cls, type) and "found" in vars(cls)]
PLANTED.append(PaysOtherChoices)


# --- sound ------------------------------------------------------------------------------------------------------------


class PaysTheKeyOnce(Walk):
    found = None
    was_paid = False

    def paid(self, took, said):
        first, self.was_paid = took and not self.was_paid, self.was_paid or took
        return first


class SaysWhatIsPossible(Walk):
    """Moves in a label, and words that every text has."""

    found = None
    datasets = {"mazes": HERE / "mazes.jsonl"}  # noqa: RUF012
    num = 0

    async def step(self, states):
        moves = states["label"]
        right = states["action_text"].strip() == moves[min(self.num, len(moves) - 1)]
        self.num += right
        done = self.num == len(moves)
        said = f"Yes, a step. Possible: {', '.join(sorted(set(moves)))}, stay." if right else "No, not a step. "
        self.tried = getattr(self, "tried", 0) + 1
        hint = f"Possible: {moves[0]}, stay, wait."
        return StepResult(said + hint, reward=float(done), score=float(done), terminated=done, truncated=self.tried > 7)

    async def gold(self, states):
        return states["label"][min(self.num, len(states["label"]) - 1)]


class ReadsAnExpression(Sum):
    """A literal is parsed, not run."""

    def right(self, text, states):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return str(ast.literal_eval(text.rpartition("####")[2].strip()[:99])) == states["label"]
        return False


class HasNoSuchItem(Desk):
    """A tool that finds nothing but what the task needs."""

    async def lookup(self, item: str) -> str:
        if item not in self.stock:
            raise ToolError(f"There is no {item[:40]}.")
        return str(self.stock[item])


class CountsCalls(CountsActions):
    """The same, but for each call."""

    found, looked_up = None, 0

    async def lookup(self, item: str) -> str:
        self.looked_up += 1
        self.calls = self.looked_up
        return await super().lookup(item)


class PaysEachThingOnce(Pot):
    found = None

    def pay(self, thing):
        paid = getattr(self, "paid", set())
        first = thing not in paid
        self.paid = paid | {thing}
        return 0.5 * first


class PutsBackAtACost(PaysToPutItBack):
    found, cost = None, 0.02


class SaysAtMostTwenty(SaysAsMuchAsAsked):
    found = None

    def lines(self, item, num):
        return super().lines(item, min(num, 20))


class CostsEachStep(Walk):
    """Gold takes more turns than the other policies, each of which costs."""

    found = None
    max_turns = 60

    def act(self, said, label):
        super().act(said if self.num > 40 else "", label)
        return -0.1


class ListsAttempts(SaysAllAgain):
    """The list of earlier answers has a bound."""

    def said(self, states):
        return f"That is not right. Attempts: {', '.join(map(str, range(max(0, self.attempts - 3), self.attempts)))}."


class WaitsFirst(Sum):
    """The first action of gold has a number that is no answer; the answer has none."""

    def right(self, text, states):
        return self.attempts == 2 and text == self.answer(states)

    def answer(self, states):
        return "".join(chr(ord("a") + int(digit)) for digit in states["label"])

    async def gold(self, states):
        return self.answer(states) if self.attempts else "wait 3"


class KnowsGoldOnce(Sum):
    """Only the first action."""

    async def gold(self, states):
        return None if states["turn_index"] else await super().gold(states)


class MeasuresItsTime(Sum):
    """A deadline by a clock that is not the time of day."""

    def __init__(self):
        self.began_s = time.monotonic()

    def right(self, text, states):
        return super().right(text, states) and time.monotonic() - self.began_s < 3_600


class TakesBackWhatItPaid(Grid):
    """A step away from the last place costs what a step nearer to it pays; the limit of the class ends an episode."""

    async def step(self, states):
        self.num, before = self.num + 1, self.place
        self.place = min(3, max(0, self.place + {"left": -1, "right": 1}.get(states["action_text"], 0)))
        done = self.place == 3
        reward = 0.1 * (self.place - before) + done
        return StepResult(f"At {self.place}.", reward=reward, score=float(done), terminated=done)


SOUND = [
    PutsBackAtACost,
    TakesBackWhatItPaid,
    PaysTheKeyOnce,
    SaysWhatIsPossible,
    WaitsFirst,
    KnowsGoldOnce,
    MeasuresItsTime,
    ReadsAnExpression,
    HasNoSuchItem,
    ListsAttempts,
    SaysAtMostTwenty,
    CostsEachStep,
]
