"""Inventories of tasks, threads, open files, child processes and temporary files, to find what an episode leaves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.testing.conformance.system_calls import Event

_SETTLE_S = 2.0
"""Time for cancelled work to end: threads cannot be cancelled, and end when their call does."""
_MAX_SETTLE = 15
"""Maximum time for threads that still run, as a multiple of `_SETTLE_S`."""
_COLLECT_AFTER_S = 0.05
_NAMES = {
    "tasks": "a task", "threads": "a thread", "files": "an open file", "children": "a process",
    "temps": "a file on disk",
}  # fmt: skip


@dataclass(frozen=True)
class Inventory:
    """The resources in use by kind, each with a readable name."""

    things: Mapping[str, Mapping[Any, str]]

    def grown(self, before: Inventory) -> dict[str, list[str]]:
        """Return the kinds of which there are more than before, each with the names of the new resources."""
        return {
            kind: [name for thing, name in now.items() if thing not in before.things[kind]]
            for kind, now in self.things.items()
            if len(now) > len(before.things[kind])
        }


def describe_growth(grown: Mapping[str, Sequence[str]]) -> str:
    """Return a description of the leftovers."""
    return "; ".join(f"{_NAMES[kind]}: {', '.join(names[:2])}" for kind, names in grown.items())


def inventory(temps: Sequence[Event]) -> Inventory:
    """Return the resources in use now. Call it on an event loop; the current task is not counted."""
    tasks: dict[Any, str] = {}
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        if not task.done():
            stack = task.get_stack(limit=1)
            at = f" at {Path(stack[0].f_code.co_filename).name}:{stack[0].f_lineno}" if stack else ""
            tasks[task] = f"{getattr(task.get_coro(), '__qualname__', task.get_name())}{at}"
    files: dict[Any, str] = {}
    with contextlib.suppress(OSError):  # without /proc they cannot be counted
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{number}")
                files[number, target] = target
    children = {process.pid or 0: process.name for process in multiprocessing.active_children()}
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children.update({int(pid): f"process {pid}" for pid in path.read_text().split()})
    return Inventory(
        {
            "tasks": tasks,
            "threads": {thread: thread.name for thread in threading.enumerate()},
            "files": files,
            "children": children,
            "temps": {event.subject: event.subject for event in temps if Path(event.subject).exists()},
        }
    )


async def lasting_growth(before: Inventory, temps: Sequence[Event]) -> dict[str, list[str]]:
    """Return what has grown and stays; return an empty dict as soon as nothing has grown.

    On a busy machine, the call of a cancelled episode takes long to end in its thread. The time to settle starts again
    whenever a new thread has run, up to a limit.
    """
    loop = asyncio.get_running_loop()
    started, has_collected = loop.time(), False
    last_ran, run_times = started, set[str]()
    while grown := (now := inventory(temps)).grown(before):
        times = _run_times(now.things["threads"].keys() - before.things["threads"].keys())
        if times != run_times:
            last_ran, run_times = loop.time(), times
        seconds = loop.time() - started
        if loop.time() - last_ran > _SETTLE_S or seconds > _MAX_SETTLE * _SETTLE_S:
            return grown
        if seconds > _COLLECT_AFTER_S and not has_collected:
            has_collected = True
            gc.collect()  # the traceback of an error may hold the last reference
        await asyncio.sleep(0.005)
    return {}


def _run_times(threads: Iterable[threading.Thread]) -> set[str]:
    """Return how long threads have run, as the kernel writes it; without /proc, the set is empty."""
    times = set()
    for thread in threads:
        with contextlib.suppress(OSError):
            times.add(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text())
    return times
