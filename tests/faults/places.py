"""A working directory with an environment and tasks, and the flags of a run in it."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tests.drivers import write_rows
from tests.models import make_tiny_tokenizer

ENV = '''
import asyncio
from pathlib import Path
from agentenv import AgentInstance, StepResult


class Env(AgentInstance):
    """One turn; the label says how it ends."""

    def __init__(self, wait_s: float = 0.0):
        self.wait_s = wait_s

    async def step(self, states):
        with Path("started").open("a") as file:
            file.write("x")
        await asyncio.sleep(3600 if states["label"] == "hang" else self.wait_s)
        return StepResult(reward=1.0, terminated=True)
'''


@cache
def tokenizer_folder():
    """One for the whole session."""
    path = Path(mkdtemp(prefix="agentenv-tokenizer-"))
    make_tiny_tokenizer(path)
    return path


FLAGS = [
    "run", "--env", "env.py:Env", "--data", "tasks.jsonl", "--model", tokenizer_folder(),
    "--engine", "scripted", "--out", "out",
]  # fmt: skip
RESUME = ["run", "--resume", "--out", "out"]


def rows(place, labels):
    write_rows(place / "tasks.jsonl", [{"prompt": f"Question {i}?", "label": label} for i, label in enumerate(labels)])


def make_place(path, monkeypatch, num=10):
    monkeypatch.chdir(path)
    (path / "env.py").write_text(ENV)
    rows(path, ["ok"] * num)
    return path
