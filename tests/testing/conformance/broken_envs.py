"""Environments that each break one property of the conformance suite; `# HERE` stands in the line that it must name."""

HEAD = """\
import asyncio, contextlib, json, os, random, subprocess, sys, tempfile, threading, time
from agentenv import AgentInstance, StepResult
from agentenv.errors import DataError

class Two(AgentInstance):
    # Two turns, whatever is said.
    def __init__(self):
        self.turns = 0
    async def step(self, states):
        self.turns += 1
        if self.turns == 2:
            return StepResult(reward=1.0, score=1.0, terminated=True)
        return StepResult([{"role": "user", "content": "Again."}])

ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}

class WithTool(Two):
    # Answers every call.
    async def reset(self, states):
        return {**states, "tools": [ADD]}
    async def step(self, states):
        if states["tool_calls"].items:
            answers = [{"role": "tool", "content": self.answer(item)} for item in states["tool_calls"].items]
            return StepResult(answers)
        return await super().step(states)
    def answer(self, call):
        return "1"
"""

# Property, body, method or attribute, and what the problem says it expected.
BROKEN = {
    "a list by default": ("isolation", """
        class Agent(Two):
            async def step(self, states):  # HERE
                self.note(states["action_text"])
                return await super().step(states)
            def note(self, text, seen=[]):
                seen.append(text)
        """, "step", "`Agent.note, the default of `seen`` of the module unchanged by episodes"),
    "a variable of the process": ("isolation", """
        class Agent(Two):
            async def reset(self, states):
                os.environ["OUR_TEST_SEED"] = str(states["seed"])  # HERE
                return states
        """, "step", "a process that episodes do not change"),
    "a file of all episodes": ("isolation", """
        class Agent(Two):
            async def step(self, states):
                with open("notes.txt", "w") as file:  # HERE
                    file.write(states["action_text"].encode(errors="replace").decode())
                return await super().step(states)
        """, "step", "files that only one episode writes"),
    "a file that the first episodes use up": ("isolation", """
        import sqlite3
        class Agent(Two):
            async def step(self, states):
                with contextlib.closing(sqlite3.connect("stamps.db")) as db, db:  # HERE
                    db.execute("CREATE TABLE IF NOT EXISTS sold (n INTEGER)")
                    db.execute("INSERT INTO sold SELECT 1 WHERE (SELECT count(*) FROM sold) < 3")
                return await super().step(states)
        """, "step", "files that only one episode writes"),
    "a file that each reset makes anew": ("isolation", """
        import sqlite3
        class Agent(Two):
            async def reset(self, states):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink("shop.db")
                self.db = sqlite3.connect("shop.db", check_same_thread=False)  # HERE
                self.db.execute("CREATE TABLE sold (n INTEGER)")
                return states
            async def step(self, states):
                with self.db:
                    self.db.execute("INSERT INTO sold VALUES (1)")
                return await super().step(states)
            def close(self):
                if hasattr(self, "db"):
                    self.db.close()
        """, "step", "files that only one episode writes"),
    "random numbers of the process": ("determinism", """
        class Agent(Two):
            async def step(self, states):
                self.turns += 1
                if self.turns < 2:
                    return StepResult([{"role": "user", "content": random.choice(["a", "b", "c"])}])  # HERE
                return StepResult(terminated=True)
        """, "step", "no use of the global generator `random`"),
    "episodes before": ("determinism", """
        COUNT_CACHE = []
        class Agent(Two):
            async def step(self, states):  # HERE
                COUNT_CACHE.append(1)
                return StepResult(reward=1.0 / len(COUNT_CACHE), terminated=True)
        """, "step", "the same episode for the same task, seed and actions"),
    "a file in the working directory": ("portability", """
        from pathlib import Path
        class Agent(Two):
            async def reset(self, states):  # HERE
                text = Path("agent.py.jsonl").read_text()[:5]
                return {"observation": [{"role": "user", "content": text}]}
        """, "reset", "the same episode in another working directory"),
    "a greeting once in a process": ("portability", """
        GREETED_CACHE = []
        class Agent(Two):
            async def reset(self, states):  # HERE
                text = "Say it." if GREETED_CACHE else "Welcome. Say it."
                GREETED_CACHE.append(text)
                return {"observation": [{"role": "user", "content": text}]}
        """, "reset", "the same episode in another process"),
    "what gold takes once in a process": ("portability", """
        class Agent(Two):
            async def gold(self, states):
                return "take it"
            async def step(self, states):  # HERE
                if states["action_text"] == "take it":
                    return StepResult(reward=self.worth(), terminated=True)
                return await super().step(states)
            def worth(self, taken=[]):
                taken[:] = [*taken, "it"][-2:]
                return 0.5 if taken == ["it"] else 0.0
        """, "step", "the same episode in another process"),
    "what the first row leaves for the others": ("portability", """
        FIRST_CACHE = {}
        class Agent(Two):
            datasets = {"mine": f"{__file__}.jsonl"}
            async def step(self, states):  # HERE
                FIRST_CACHE.setdefault("label", states["label"])
                return StepResult(reward=float(FIRST_CACHE["label"] == states["label"]), terminated=True)
        """, "step", "the same episode in another process"),
    "what a later row leaves for the others": ("portability", """
        BAD_CACHE = []
        class Agent(Two):
            datasets = {"mine": f"{__file__}.jsonl"}
            async def step(self, states):  # HERE
                BAD_CACHE[:] = [*BAD_CACHE, states["label"] == "bad"]
                return StepResult(reward=float(not any(BAD_CACHE)), terminated=True)
        """, "step", "the same episode in another process"),
    "a relative path of its data": ("portability", """
        class Agent(Two):
            datasets = {"mine": "agent.py.jsonl"}
            async def reset(self, states):  # HERE
                return states
        """, "reset", "the same episode in another working directory"),
    "a variable read at the import": ("portability", """
        IS_HARD = os.environ.get("OUR_TEST_IS_HARD") == "1"  # HERE
        class Agent(Two):
            async def step(self, states):
                self.turns += 1
                return StepResult([{"role": "user", "content": f"{IS_HARD}"}], terminated=self.turns == 2)
        """, "step", "for any value of the environment variable OUR_TEST_IS_HARD"),
    "the day of the import": ("portability", """
        import datetime as dt
        TODAY = dt.date.today()  # HERE
        class Agent(Two):
            async def reset(self, states):
                return {"observation": [{"role": "user", "content": f"Today is {TODAY}."}]}
        """, "reset", "the same episode at another time"),
    "the hour of a time stamp": ("portability", """
        from datetime import datetime
        class Agent(Two):
            async def step(self, states):  # HERE
                self.turns += 1
                return StepResult(f"It was {datetime.fromtimestamp(1_000_000_000)}.", terminated=self.turns == 2)
        """, "step", "the same episode in another time zone"),
    "a tool that swallows its cancellation": ("cancel", """
        from agentenv.tools import answer_calls
        async def add(a: int) -> str:
            for _ in range(2):
                try:
                    await asyncio.wait_for(asyncio.sleep(0.001), timeout=20)  # HERE
                    return "1"
                except (TimeoutError, asyncio.CancelledError):
                    await asyncio.sleep(0.001)
            return "busy"
        class Agent(WithTool):
            async def step(self, states):
                if states["tool_calls"].items:
                    return StepResult(await answer_calls(states["tool_calls"], {"add": add}))
                return await super().step(states)
        """, "step", "CancelledError to pass"),
    "a hack that raises": ("contract", """
        class Agent(Two):
            hacks = {"divides": "1/0"}
            async def step(self, states):
                if states["action_text"] == "1/0":
                    raise ZeroDivisionError  # HERE
                return await super().step(states)
        """, "step", "no exception"),
    "a process": ("cancel", """
        PIDS_CACHE = []
        class Agent(Two):
            async def step(self, states):  # HERE
                child = await asyncio.create_subprocess_exec("sleep", "20")
                PIDS_CACHE.append(child.pid)
                await asyncio.sleep(0)
                child.kill()
                await child.wait()
                return await super().step(states)
        """, "step", "nothing left behind by an episode"),
    "a close that needs what reset made": ("close", """
        class Agent(Two):
            async def reset(self, states):
                self.file = tempfile.TemporaryFile()
                return states
            async def close(self):
                self.file.close()  # HERE
        """, "close", "no exception from `close` before any reset"),
    "a close that cannot be again": ("close", """
        class Agent(Two):
            def __init__(self):
                super().__init__()
                self.open = {"it": 1}
            async def close(self):
                del self.open["it"]  # HERE
        """, "close", "no exception from `close` again before any reset"),
    "a constructor that reads": ("constructor", """
        class Agent(Two):
            def __init__(self):
                super().__init__()
                with open(__file__) as file:  # HERE
                    self.text = file.read()
        """, "__init__", "no input or output in the constructor"),
    "a constructor that sleeps": ("constructor", """
        class Agent(Two):
            def __init__(self):  # HERE
                super().__init__()
                time.sleep(0.12)
        """, "__init__", "a constructor that takes less than 0.1 s"),
    "raises when it is solved": ("rewards", """
        class Agent(Two):
            async def gold(self, states):
                return "solved"
            async def step(self, states):
                if states["action_text"] == "solved":
                    return StepResult(reward=[][0])  # HERE
                return await super().step(states)
        """, "step", "no exception"),
    "never ends for one policy": ("ends", """
        class Agent(Two):
            async def step(self, states):  # HERE
                said = states["action_text"]
                if said == "" and not self.turns:
                    return StepResult("Say something.")
                return await super().step(states)
        """, "step", "an end within 12 turns"),
    "a last word that is no result": ("truncation", """
        class Agent(Two):
            async def on_truncate(self, states):  # HERE
                return 1.0
        """, "on_truncate", "a StepResult or OpenRLHF's dict"),
    "a role of its own": ("feedback", """
        class Agent(Two):
            async def step(self, states):  # HERE
                self.turns += 1
                return StepResult([{"role": "environment", "content": "No."}], terminated=self.turns == 2)
        """, "step", "roles among system, user, assistant, tool"),
    "two users": ("feedback", """
        class Agent(Two):
            async def step(self, states):  # HERE
                self.turns += 1
                return StepResult([{"role": "user", "content": text} for text in "ab"], terminated=self.turns == 2)
        """, "step", "messages whose roles alternate"),
    "speaks for the policy": ("contract", """
        class Agent(Two):
            async def step(self, states):  # HERE
                self.turns += 1
                said = [{"role": "user", "content": "No."}, {"role": "assistant", "content": "I see."}]
                return StepResult(said, terminated=self.turns == 2)
        """, "step", "an episode without an error"),
    "trusts what the policy said": ("feedback", """
        class Agent(Two):
            async def step(self, states):  # HERE
                self.turns += 1
                said = {"role": "user", "content": f"You said {states['action_text']!s}.", "trusted": True}
                return StepResult([said], terminated=self.turns == 2)
        """, "step", "text of a policy that stays text"),
    "half a character": ("feedback", """
        class Agent(Two):
            async def step(self, states):  # HERE
                self.turns += 1
                return StepResult([{"role": "user", "content": "No.\\ud83d"}], terminated=self.turns == 2)
        """, "step", "text that is valid Unicode"),
    "an info that cannot be pickled": ("pickling", """
        class Lazy(float):
            def __reduce__(self):
                raise TypeError("only here")
        class Agent(Two):
            async def step(self, states):  # HERE
                return StepResult(terminated=True, info={"n": Lazy(1)})
        """, "step", "a result that can be pickled"),
    "the whole conversation again": ("mutation", """
        class Agent(Two):
            async def reset(self, states):
                self.messages = list(states["observation"])
                return {"observation": list(self.messages)}
            async def step(self, states):  # HERE
                self.turns += 1
                self.messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "Again."}]
                return StepResult(list(self.messages), terminated=self.turns == 2)
        """, "step", "an observation with only new messages"),
    "goes on writing in what it gave": ("mutation", """
        class Agent(Two):
            async def reset(self, states):  # HERE
                self.messages = list(states["observation"])
                return {"observation": self.messages}
            async def step(self, states):
                self.messages.append({"role": "assistant", "content": states["action_text"]})
                return await super().step(states)
        """, "reset", "an observation that does not change after it is returned"),
    "blocks after an await": ("blocking", """
        class Agent(Two):
            async def reset(self, states):
                await asyncio.sleep(0)
                self.think()  # HERE-NOT
                return states
            def think(self):
                time.sleep(0.07)  # HERE
        """, "reset", "less than 50 ms between two awaits"),
    "a row that reset refuses": ("data", """
        class Agent(Two):
            datasets = {"mine": __file__ + ".jsonl"}
            async def reset(self, states):  # HERE
                if states["label"] == "bad":
                    raise DataError("label: expected a good one, got 'bad'. Fix the data.")
                return states
        """, "reset", "`reset` to accept every row of 'mine'"),
    "gold is no text": ("contract", """
        class Agent(Two):
            async def gold(self, states):  # HERE
                return [states["label"]]
        """, "gold", "text or None"),
    "hacks is no mapping": ("contract", """
        class Agent(Two):
            hacks = ["say it"]  # HERE
        """, "hacks", "a mapping of names to actions"),
}  # fmt: skip

ALSO = {"a close that needs what reset made": {"cancel"}}
"""Further properties that such an environment breaks, and must."""
SLOW = ("blocks after an await", "a constructor that sleeps")
"""They are looked at with few other properties: each episode takes long."""
