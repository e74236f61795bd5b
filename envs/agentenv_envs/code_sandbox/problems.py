"""The shipped tasks with a solution and wrong programs for each: test material for graders and environments.

No shipped model was trained on them. `data/code_sandbox.jsonl` is the task set; the solutions are in a separate file,
so that no training reads them by accident.
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
    """A task, a program that passes it, and programs that fail."""

    id: str
    prompt: str
    label: Mapping[str, Any]
    """The plain form of `agentenv.rewards.rules.code.forms`."""
    reference: str
    """Passes all tests."""
    mutants: tuple[str, ...]
    """Each fails at least one hidden test; the last one only hard-codes the visible tests."""


@cache
def load_problems() -> tuple[Problem, ...]:
    """Return all shipped tasks, in the order of the file."""
    solutions = {row["id"]: row for row in _rows(SOLUTIONS)}
    rows = [{**row, **solutions[row["id"]]} for row in _rows(TASK_SET)]
    return tuple(Problem(**{**row, "mutants": tuple(row["mutants"])}) for row in rows)


def reference_policy(request: Request) -> str:
    """Solve every shipped task, identified by the episode's id; a script for `ScriptedEngine`.

    Example: `--engine scripted --engine_args '{"script": "agentenv_envs.code_sandbox.problems:reference_policy"}'`.
    """
    name = request.episode_id.rpartition("/")[0]
    problem = next((problem for problem in load_problems() if problem.id == name), None)
    if problem is None:
        raise ConfigError(f"reference_policy: expected an episode of a shipped task, got {name!r}. Remove --data.")
    return answer(problem.reference)


def answer(code: str) -> str:
    """Return a program as a policy writes it."""
    return f"This is my program.\n\n```python\n{code}```"


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
