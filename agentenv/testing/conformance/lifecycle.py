"""The properties `constructor` and `close`: the start and the end of an environment."""

from __future__ import annotations

import asyncio
import time
from copy import deepcopy
from dataclasses import replace
from typing import Any

from agentenv._util.calls import bounded, create, create_here
from agentenv.core.agent import AgentInstance
from agentenv.errors import InfraError
from agentenv.testing.conformance.context import ConformanceContext
from agentenv.testing.conformance.problems import Problem, exception_problem, place_of_method, problem_at, unique
from agentenv.testing.conformance.system_calls import IO_EVENTS, record_events

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
    problems = [
        replace(problem_at(cls, "__init__", expected, f"it {e.description}", _FIX), line=e.line) for e in own[:1]
    ]
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
        resets: dict[str, Any] = {
            "before any reset": None,
            "after `reset`": states,
            "after a `reset` that failed": {},
        }
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

    return unique(context.run(run()))
