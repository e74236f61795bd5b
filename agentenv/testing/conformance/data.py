"""The property `data`: every row can be read, and `reset` accepts it."""

from __future__ import annotations

import re
from functools import partial

from agentenv.core.types import Task
from agentenv.errors import AgentEnvError
from agentenv.testing.conformance.context import ConformanceContext, NotApplicable, raise_outage
from agentenv.testing.conformance.problems import Problem, problem_at, relative_path, unique


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
                problems.append(_problem(context, expected, error, fix))
                continue
            line = re.search(r", (?:line|item|row) (\d+)\b", error.partition(": expected ")[0])
            problems.append(Problem(relative_path(name), int(line[1]) if line else 0, "data", expected, error, fix))
        elif not context.own_loop:
            problems += context.run(_problems_of_rows(context, name, tasks))
    return unique(problems)


async def _problems_of_rows(context: ConformanceContext, name: str, tasks: list[Task]) -> list[Problem]:
    step = max(1, len(tasks) // context.options.num_rows)
    for number in range(0, len(tasks), step):
        error = await context.retried(partial(_error_of_reset, context, tasks[number], number))
        if error is not None:
            expected = f"`reset` to accept every row of {name!r}"
            got = f"an error at row {number + 1} ({tasks[number].task_id!r}): {error}"
            return [_problem(context, expected, got, "Fix the row, or make `reset` accept it.")]
    return []


async def _error_of_reset(context: ConformanceContext, task: Task, seed: int) -> AgentEnvError | None:
    async with context.stepped(task, seed) as episode:
        try:
            await episode.begin()
        except AgentEnvError as error:
            raise_outage(episode.trajectory)
            return error
    return None


def _problem(context: ConformanceContext, expected: str, got: str, fix: str) -> Problem:
    return problem_at(context.agent_cls, "reset", expected, got, fix)
