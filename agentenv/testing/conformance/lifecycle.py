"""The properties `constructor`, `data` and `close`: an environment starts, takes every row, and ends."""

from __future__ import annotations

import asyncio
import re
import time
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from agentenv._util.calls import bounded, create, create_here
from agentenv.core.agent import AgentInstance
from agentenv.core.types import Task
from agentenv.errors import AgentEnvError, InfraError
from agentenv.testing.conformance.context import ConformanceContext, NotApplicable, raise_outage
from agentenv.testing.conformance.probes import IO_EVENTS, record_events
from agentenv.testing.conformance.problems import Problem, exception_problem, place_of_method, problem_at, relative_path

QUICK_S = 0.1
"""Every episode pays for its constructor again, and makes an instance for each attempt."""
_NUM_TRIES = 5
_FIX = "Move slow work to `reset`, and cache what all episodes share."


def constructor(context: ConformanceContext) -> list[Problem]:
    """Check that the constructor is quick, and does no input or output after its first call."""
    context.require_steps()
    cls = context.agent_cls
    file = place_of_method(cls, "__init__")[0]
    seconds = []
    for _ in range(_NUM_TRIES):
        with record_events(IO_EVENTS, file, this_thread=True) as events:
            started = time.perf_counter()
            instance = context.run(context.retried(lambda: create_here(cls, context.kwargs)))
            seconds.append(time.perf_counter() - started)
        context.run(_closed(context, instance))
    own = [event for event in events if event.line]
    expected = "no input or output in the constructor"
    problems = [problem_at(cls, "__init__", expected, f"it {e.description}", _FIX, line=e.line) for e in own[:1]]
    if min(seconds) > QUICK_S and not problems:
        expected, got = f"a constructor that takes less than {QUICK_S:g} s", f"{min(seconds):.2f} s"
        problems.append(problem_at(cls, "__init__", expected, got, _FIX))
    return problems


async def _closed(context: ConformanceContext, instance: AgentInstance) -> list[Problem]:
    limit_s = context.limits.step_timeout_s
    task = asyncio.ensure_future(context.retried(lambda: bounded(instance.close, limit_s=limit_s)))
    await asyncio.wait({task})
    error = task.exception()
    if isinstance(error, InfraError):
        raise error
    return [] if error is None else [exception_problem(context.agent_cls, "close", error)]


def close(context: ConformanceContext) -> list[Problem]:
    """`close` works before `reset`, after a failed `reset`, and when repeated."""
    context.require_steps()

    async def run() -> list[Problem]:
        task = context.tasks[0]
        prompt, label, metadata = deepcopy((task.prompt, task.label, dict(task.metadata)))
        states = {"observation": prompt, "label": label, "metadata": metadata, "images": task.images, "seed": 0}
        resets: dict[str, Any] = {"before any reset": None, "after `reset`": states, "after a `reset` that failed": {}}
        for when, given in resets.items():
            instance = await context.retried(lambda: create(context.agent_cls, context.kwargs))
            if given is not None:
                reset = bounded(instance.reset, given, limit_s=context.limits.step_timeout_s)
                await asyncio.gather(reset, return_exceptions=True)  # its errors are those of other properties
            for again in ("", " again"):
                problems = await _closed(context, instance)
                if problems:
                    fix = "Release only what exists, and only once."
                    expected = f"no exception from `close`{again} {when}"
                    return [replace(problem, expected=expected, fix=fix) for problem in problems]
        return []

    return context.run(run())


def data(context: ConformanceContext) -> list[Problem]:
    """Every row of the data can be read, and `reset` accepts a sample of the rows, spread evenly."""
    found = context.rows()
    if not found:
        raise NotApplicable("it has no data; pass --data")
    problems: list[Problem] = []
    for name, tasks in found.items():
        if isinstance(tasks, AgentEnvError):
            expected, fix, error = f"data {name!r} that can be read", "Fix the file.", str(tasks)
            if name != context.options.data:  # the data of the class
                problems.append(problem_at(context.agent_cls, "reset", expected, error, fix))
                continue
            line = re.search(r", (?:line|item|row) (\d+)\b", error.partition(": expected ")[0])
            problems.append(Problem(relative_path(name), int(line[1]) if line else 0, "data", expected, error, fix))
        elif not context.own_loop:
            problems += context.run(_problems_of_rows(context, name, tasks))
    return problems


async def _problems_of_rows(context: ConformanceContext, name: str, tasks: list[Task]) -> list[Problem]:
    async def reset(task: Task, seed: int) -> AgentEnvError | None:
        async with context.stepped(task, seed) as episode:
            try:
                await episode.begin()
            except AgentEnvError as error:
                raise_outage(episode.trajectory)
                return error
        return None

    for number in range(0, len(tasks), max(1, len(tasks) // context.options.num_rows)):
        error = await context.retried(partial(reset, tasks[number], number))
        if error is not None:
            expected = f"`reset` to accept every row of {name!r}"
            got = f"an error at row {number + 1} ({tasks[number].task_id!r}): {error}"
            return [problem_at(context.agent_cls, "reset", expected, got, "Fix the row, or make `reset` accept it.")]
    return []
