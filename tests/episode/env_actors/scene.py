"""An environment as a user writes one, loaded by path in actors; its label says what it does."""

import asyncio
import logging
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from agentenv import AgentInstance, StepResult
from agentenv.errors import InfraError


class OwnError(ValueError):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


@dataclass
class Own:
    number: int


class Scene(AgentInstance):
    """`label` is `what argument`; every result says which process it comes from."""

    def __init__(self, marks=None, fails=False):
        self.marks = Path(marks) if marks else None
        self.turns = 0
        if fails:
            raise KeyError("made wrongly")

    def mark(self, name):
        (self.marks / name).touch()

    async def step(self, states):
        self.turns += 1
        what, _, argument = states["label"].partition(" ")
        result = await getattr(self, f"do_{what}")(argument)
        return result or StepResult("more", reward=1.0, terminated=self.turns == 2, info={"pid": float(os.getpid())})

    async def on_truncate(self, states):
        return StepResult(reward=0.5, score=0.25)

    async def close(self):
        if self.marks:
            self.mark(f"closed-{id(self)}")

    async def do_play(self, argument):
        await asyncio.sleep(0)

    async def do_own_error(self, argument):
        raise OwnError("this", "that")

    async def do_infra(self, argument):
        raise InfraError("the sandbox is down")

    async def do_cancelled(self, argument):
        raise asyncio.CancelledError

    async def do_lock(self, argument):
        return {"rewards": 1.0, "scores": 1.0, "environment_feedback": "", "done": True, "lock": threading.Lock()}

    async def do_own(self, argument):
        return {"rewards": 1.0, "scores": 1.0, "environment_feedback": "", "done": True, "own": Own(7)}

    async def do_run(self, argument):
        return StepResult(terminated=True, info={"code": float(subprocess.run(argument, check=False).returncode)})

    async def do_wait(self, argument):
        self.mark("asked")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.mark("cancelled")
            raise

    async def do_block(self, argument):
        self.mark("blocked")
        time.sleep(float(argument))

    async def do_die(self, argument):
        if not (self.marks / "died").exists():
            self.mark("died")
            os.kill(os.getpid(), signal.SIGKILL)


class Plain(AgentInstance):
    """With methods that are not async."""

    def step(self, states):
        time.sleep(float(states["label"]))
        return StepResult(terminated=True, info={"pid": float(os.getpid())})


class Computes(AgentInstance):
    """Says that it computes."""

    cpu_bound = True
    running = 0

    def step(self, states):
        if states["label"] == "overlap":
            Computes.running += 1
            time.sleep(0.05)
            Computes.running -= 1
            return StepResult(reward=float(Computes.running), terminated=True)
        if states["label"].startswith("hang "):
            Path(states["label"].removeprefix("hang "), "hangs").touch()
            time.sleep(600)
        if states["label"] == "warn":
            logging.getLogger("scene").warning("seen from %s", states["label"])
            print("printed")
        return StepResult(reward=1.0, terminated=True, info={"pid": float(os.getpid())})
