"""The properties `constructor` and `close`: how an agent instance begins and ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from copy import deepcopy
from dataclasses import replace
from typing import Any

from agentenv.agent import AgentInstance, create
from agentenv.conformance.problems import Problem, place_of_method, problem_at, raised, unique
from agentenv.conformance.scene import Scene
from agentenv.conformance.system_calls import IO_EVENTS, watching
from agentenv.deadlines import bounded

QUICK_S = 0.1
"""A constructor runs on the event loop, which it holds up for all episodes."""
_NUM_TRIES = 5
_MEND = "What takes time belongs in `reset`; what all episodes share is read once, and kept in a cache."


def constructor(scene: Scene) -> list[Problem]:
    """The constructor is quick, and reads, starts and calls nothing from its second call on."""
    scene.needs_steps()
    cls = scene.agent_cls
    file = place_of_method(cls, "__init__")[0]
    seconds = []
    for _ in range(_NUM_TRIES):
        with watching(IO_EVENTS, file, this_thread=True) as events:
            started = time.perf_counter()
            instance = scene.run(create(cls, scene.kwargs))
            seconds.append(time.perf_counter() - started)
        scene.run(_closed(scene, instance))
    own = [event for event in events if event.line]
    expected = "no input or output in the constructor"
    problems = [replace(problem_at(cls, "__init__", expected, f"it {e.told}", _MEND), line=e.line) for e in own[:1]]
    if min(seconds) > QUICK_S and not problems:
        expected, got = f"a constructor that takes less than {QUICK_S:g} s", f"{min(seconds):.2f} s"
        problems.append(problem_at(cls, "__init__", expected, got, _MEND))
    return problems


async def _closed(scene: Scene, instance: AgentInstance) -> list[Problem]:
    return await _tried(scene, "close", bounded(instance.close, limit_s=scene.limits.step_timeout_s))


def close(scene: Scene) -> list[Problem]:
    """`close` may come before `reset`, after one that failed, and again."""
    scene.needs_steps()

    async def run() -> list[Problem]:
        """Each end that an instance may come to, up to the first that fails."""
        problems: list[Problem] = []
        for begin in (_never_reset, _reset, _reset_fails):
            problems = problems or await begin(scene)
        return problems

    return unique(scene.run(run()))


async def _never_reset(scene: Scene) -> list[Problem]:
    return await _twice_closed(scene, await create(scene.agent_cls, scene.kwargs), "before any reset")


async def _reset(scene: Scene) -> list[Problem]:
    instance = await create(scene.agent_cls, scene.kwargs)
    await _tried(scene, "reset", bounded(instance.reset, _states(scene), limit_s=scene.limits.step_timeout_s))
    return await _twice_closed(scene, instance, "after `reset`")


async def _reset_fails(scene: Scene) -> list[Problem]:
    instance = await create(scene.agent_cls, scene.kwargs)
    await _tried(scene, "reset", bounded(instance.reset, {}, limit_s=scene.limits.step_timeout_s))
    return await _twice_closed(scene, instance, "after a `reset` that failed")


async def _twice_closed(scene: Scene, instance: AgentInstance, when: str) -> list[Problem]:
    for again in ("", " again"):
        problems = await _closed(scene, instance)
        if problems:
            mend = "Let go of what is there, once, and nothing else."
            expected = f"no exception when it is closed{again} {when}"
            return [replace(problem, expected=expected, mend=mend) for problem in problems]
    return []


def _states(scene: Scene) -> Any:
    task = scene.tasks[0]
    prompt, label, metadata = deepcopy((task.prompt, task.label, dict(task.metadata)))
    return {"observation": prompt, "label": label, "metadata": metadata, "images": task.images, "seed": 0}


async def _tried(scene: Scene, method: str, work: Coroutine[Any, Any, Any]) -> list[Problem]:
    """The problem of what a call raises."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task})
    error = task.exception()
    return [] if error is None else [raised(scene.agent_cls, method, error)]
