"""The grader's worker processes as tests see them in /proc, and workers that misbehave."""

import contextlib
import os
from pathlib import Path

import agentenv.rewards.workers.pool as pool
from agentenv.rewards.rules.math.reward import MathGrader


def workers(parent: int | None = None, module: str = "agentenv.rewards.workers.main") -> set[int]:
    """The pids of the parent's living workers."""
    pids = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            state, ppid = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_text()
            if int(ppid) == (parent or os.getpid()) and state != "Z" and module in command:
                pids.add(int(folder.name))
    return pids


READY = r"""
import json, os, struct, sys, time
def send(message):
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    os.write(1, struct.pack(">I", len(body)) + body)
def receive():
    return json.loads(os.read(0, struct.unpack(">I", os.read(0, 4))[0]))
def result(**fields):
    send({"id": request["id"], "status": "ok", "result": fields})
send({"ready": True})
request = receive()
result()  # loaded
request = receive()
"""


async def grade_with_fake(behavior: str, tmp_path, monkeypatch):
    (tmp_path / "fake_worker.py").write_text(behavior)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(pool, "_WORKER_MODULE", "fake_worker")
    async with MathGrader(num_workers=1, timeout_s=0.2) as grader:
        return await grader.grade(r"\boxed{\sqrt{4}}", 3)
