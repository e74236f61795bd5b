"""The property `data`: every row can be read, and `reset` takes it."""

from __future__ import annotations

import re

from agentenv.conformance.problems import Problem, problem_at, short, unique
from agentenv.conformance.scene import NotApplicable, Scene
from agentenv.errors import AgentEnvError, EpisodeFailed
from agentenv.types import Task


def data(scene: Scene) -> list[Problem]:
    """Every row of its data can be read, and `reset` takes those that are tried, spread over all of them."""
    found = scene.rows()
    if not found:
        raise NotApplicable("it comes with no data; name some with --data")
    problems: list[Problem] = []
    for name, tasks in found.items():
        if isinstance(tasks, AgentEnvError):
            problems.append(_unreadable(scene, name, str(tasks)))
        elif not scene.own_loop:
            problems += scene.run(_tried(scene, name, tasks))
    return unique(problems)


async def _tried(scene: Scene, name: str, tasks: list[Task]) -> list[Problem]:
    step = max(1, len(tasks) // scene.options.num_rows)
    for number in range(0, len(tasks), step):
        async with scene.stepped(tasks[number], seed=number) as episode:
            try:
                await episode.begin()
            except (EpisodeFailed, AgentEnvError) as error:
                expected = f"`reset` to take every row of {name!r}"
                got = f"an error at row {number + 1} ({tasks[number].task_id!r}): {error}"
                return [_problem(scene, expected, got, "Mend the row, or let `reset` take it.")]
    return []


def _unreadable(scene: Scene, name: str, error: str) -> Problem:
    """Of the class, whose data it is; of data that a person names in the file, at the row where that is said."""
    expected, mend = f"data {name!r} that can be read", "Mend the file."
    if name != scene.options.data:
        return _problem(scene, expected, error, mend)
    line = re.search(r", (?:line|item|row) (\d+)\b", error.partition(": expected ")[0])
    return Problem(short(name), int(line[1]) if line else 0, "data", expected, error, mend)


def _problem(scene: Scene, expected: str, got: str, mend: str) -> Problem:
    return problem_at(scene.agent_cls, "reset", expected, got, mend)
