"""What is there of tasks, threads, open files, child processes and temporary files, to see what something leaves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.conformance.system_calls import Event

_SETTLE_S = 2.0
"""What was cancelled may take so long to go: threads cannot be cancelled, and end when their call does."""
_COLLECT_AFTER_S = 0.05
_A = {
    "tasks": "a task", "threads": "a thread", "files": "an open file", "children": "a process",
    "temps": "a file on disk",
}  # fmt: skip


@dataclass(frozen=True)
class Inventory:
    """What is there, by kind, each thing with a name for a person."""

    things: Mapping[str, Mapping[Any, str]]

    def grown(self, before: Inventory) -> dict[str, list[str]]:
        """The kinds of which there is more than before, each with the names of what is new."""
        return {
            kind: [name for thing, name in now.items() if thing not in before.things[kind]]
            for kind, now in self.things.items()
            if len(now) > len(before.things[kind])
        }


def told(grown: Mapping[str, Sequence[str]]) -> str:
    """What is left, in words."""
    return "; ".join(f"{_A[kind]}: {', '.join(names[:2])}" for kind, names in grown.items())


def inventory(temps: Sequence[Event]) -> Inventory:
    """What is there now; on an event loop, whose tasks are counted without the one that asks."""
    tasks = {task: _task_name(task) for task in asyncio.all_tasks() - {asyncio.current_task()} if not task.done()}
    return Inventory(
        {
            "tasks": tasks,
            "threads": {thread: thread.name for thread in threading.enumerate()},
            "files": _open_files(),
            "children": _children(),
            "temps": {event.subject: event.subject for event in temps if Path(event.subject).exists()},
        }
    )


async def settled(before: Inventory, temps: Sequence[Event]) -> dict[str, list[str]]:
    """What has grown and does not go away; empty as soon as nothing has."""
    loop = asyncio.get_running_loop()
    started, has_collected = loop.time(), False
    while grown := inventory(temps).grown(before):
        seconds = loop.time() - started
        if seconds > _SETTLE_S:
            return grown
        if seconds > _COLLECT_AFTER_S and not has_collected:
            has_collected = True
            gc.collect()  # an error's traceback may hold what nobody else does
        await asyncio.sleep(0.005)
    return {}


def _task_name(task: asyncio.Task[Any]) -> str:
    stack = task.get_stack(limit=1)
    at = f" at {Path(stack[0].f_code.co_filename).name}:{stack[0].f_lineno}" if stack else ""
    name = getattr(task.get_coro(), "__qualname__", task.get_name())
    return f"{name}{at}"


def _open_files() -> dict[tuple[str, str], str]:
    found = {}
    with contextlib.suppress(OSError):  # a system without it has none that can be counted
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{number}")
                found[number, target] = target
    return found


def _children() -> dict[int, str]:
    found = {process.pid or 0: process.name for process in multiprocessing.active_children()}
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update({int(pid): f"process {pid}" for pid in path.read_text().split()})
    return found
