"""Further planted faults, one for each class of fault that a blind test of `check` and `audit` did not find.

`found` is as in `faults.py`; `SOUND` has environments that look like one with a fault, and have none.
"""

import contextlib
import json
import re
import time

from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult
from tests.testing.planted.faults import HERE, LOOKUP, Desk, Sum

SWITCH = {"type": "function", "function": {"name": "switch", "description": "Switch a lamp.", "parameters": {
    "type": "object", "properties": {"state": {"type": "string", "enum": ["on", "off", "dim"]}},
    "required": ["state"]}}}  # fmt: skip

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


# --- time -------------------------------------------------------------------------------------------------------------


class Sleeps(Sum):
    found = "blocking"

    def right(self, text, states):
        time.sleep(0.2)
        return super().right(text, states)


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


SOUND = [PaysTheKeyOnce, SaysWhatIsPossible]
