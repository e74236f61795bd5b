"""The shipped tasks with a solution of each and wrong ones: what graders and environments are tested on.

Nothing that ships was trained on them. `data/code_sandbox.jsonl` is the task set; the solutions lie beside it, in a
file of their own, so that no training reads them by accident.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from agentenv.engines.scripted import Request
from agentenv.errors import ConfigError

TASK_SET = Path(__file__).parent / "data" / "code_sandbox.jsonl"
SOLUTIONS = Path(__file__).parent / "data" / "solutions.jsonl"


@dataclass(frozen=True, slots=True)
class Problem:
    """A task, a program that passes it, and programs that do not."""

    id: str
    prompt: str
    label: Mapping[str, Any]
    """The plain form of `agentenv.rewards.code.plain`."""
    reference: str
    """Passes all tests."""
    mutants: tuple[str, ...]
    """Each fails at least one hidden test; the last one knows the visible tests by heart and nothing else."""


@cache
def load_problems() -> tuple[Problem, ...]:
    """All shipped tasks, in the order of the file."""
    solutions = {row["id"]: row for row in _rows(SOLUTIONS)}
    return tuple(
        Problem(
            row["id"],
            row["prompt"],
            row["label"],
            solutions[row["id"]]["reference"],
            tuple(solutions[row["id"]]["mutants"]),
        )
        for row in _rows(TASK_SET)
    )


def reference_policy(request: Request) -> str:
    """A script for `ScriptedEngine` that solves every shipped task, known by the id of the episode.

    Example: `--engine scripted --engine_args '{"script": "agentenv_envs.code_sandbox.problems:reference_policy"}'`.
    """
    return answer(_named(request).reference)


def answer(code: str) -> str:
    """A program as a policy says it."""
    return f"This is my program.\n\n```python\n{code}```"


def _named(request: Request) -> Problem:
    name = request.episode_id.rpartition("/")[0]
    found = next((problem for problem in load_problems() if problem.id == name), None)
    if found is None:
        raise ConfigError(f"reference_policy: expected an episode of a shipped task, got {name!r}. Leave --data out.")
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
