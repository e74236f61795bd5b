"""Cases: actions whose reward or score the author knows, kept beside an environment and played at every audit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.audit.findings import Finding, finding
from agentenv.audit.plays import Play, Table, play_all
from agentenv.audit.policies import Policy, View
from agentenv.errors import ConfigError
from agentenv.types import Task

_FORM = '{"task": ID, "actions": [TEXT, …], "score": NUMBER} with "reward" in place of, or beside, "score"'


@dataclass(frozen=True, slots=True)
class Case:
    """What some actions are worth on one task."""

    name: str
    task_id: str
    actions: tuple[str, ...]
    """One per turn; the last is said again where the episode goes on."""
    reward: float | None = None
    """Of the whole episode; None: not looked at."""
    score: float | None = None

    def policy(self) -> Policy:
        """Who says them."""

        def act(view: View) -> str:
            """The action of this turn."""
            return self.actions[min(view.turn_index, len(self.actions) - 1)]

        return Policy("case", self.name, "robust", act)


def read_cases(path: str | Path) -> list[Case]:
    """The cases of a JSONL file.

    Raises:
        ConfigError: there is no such file, or a line is no case.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--cases: expected a JSONL file, got {str(path)!r}: {error}. Check the path.") from error
    return [_case(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]


async def play_cases(table: Table, cases: Sequence[Case], *, concurrency: int) -> list[Finding]:
    """What says another than the cases do; none where all hold.

    Raises:
        ConfigError: a case is about a task that is not there.
    """
    by_id = {task.task_id: task for task in table.tasks}
    pairs: list[tuple[Policy, Task]] = []
    for case in cases:
        if case.task_id not in by_id:
            raise ConfigError(f"--cases: {case.name}: expected the id of a task, got {case.task_id!r}. Check --data.")
        pairs.append((case.policy(), by_id[case.task_id]))
    plays = await play_all(table, pairs, concurrency=concurrency, tell=lambda done: None)
    return [each for case, play in zip(cases, plays, strict=True) for each in _judged(case, play)]


def _judged(case: Case, play: Play) -> list[Finding]:
    wrong = [
        f"{name} {expected:g} expected, got {got}"
        for name, expected, got in (("reward", case.reward, play.reward), ("score", case.score, play.score))
        if expected is not None and (got is None or not math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-6))
    ]
    if not wrong:
        return []
    return [finding("case-fails", "fail", f"{case.name}: {'; '.join(wrong)}", [play], policy=case.name)]


def _case(where: str, line: str) -> Case:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    name = where.rpartition("/")[2]
    if isinstance(row, Mapping) and isinstance(row.get("task"), str):
        actions = row.get("actions", [row.get("action")])
        worth = {key: row[key] for key in ("reward", "score") if row.get(key) is not None}
        if _are_texts(actions) and worth and all(type(value) in (int, float) for value in worth.values()):
            return Case(str(row.get("name", name)), row["task"], tuple(actions), **worth)
    raise ConfigError(f"--cases: {where}: expected {_FORM}, got {line:.100}. Mend the line.")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)
