"""Cases: actions with a known reward or score, stored with an environment and checked at every audit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.core.types import Task
from agentenv.errors import ConfigError
from agentenv.testing.audit.episodes import PolicyRunner, play_all
from agentenv.testing.audit.findings import AuditFinding, make_finding
from agentenv.testing.audit.policies import AuditPolicy, View

_FORM = '{"task": ID, "actions": [TEXT, …], "score": NUMBER} with "reward" instead of or in addition to "score"'


@dataclass(frozen=True, slots=True)
class AuditCase:
    """The known reward or score of some actions on one task."""

    name: str
    task_id: str
    actions: tuple[str, ...]
    """One action per turn; the last is repeated if the episode continues."""
    reward: float | None = None
    """Reward of the whole episode; None: not checked."""
    score: float | None = None

    def policy(self) -> AuditPolicy:
        """Return a policy with these actions."""

        def act(view: View) -> str:
            return self.actions[min(view.turn_index, len(self.actions) - 1)]

        return AuditPolicy("case", self.name, "robust", act)


def read_cases(path: str | Path) -> list[AuditCase]:
    """Read the cases of a JSONL file.

    Raises:
        ConfigError: the file cannot be read, or a line is not a case.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--cases: expected a JSONL file, got {str(path)!r}: {error}. Check the path.") from error
    return [_case(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]


async def play_cases(runner: PolicyRunner, cases: Sequence[AuditCase], *, concurrency: int) -> list[AuditFinding]:
    """Run the cases and return findings for those that fail.

    Raises:
        ConfigError: the task of a case is unknown.
    """
    by_id = {task.task_id: task for task in runner.tasks}
    pairs: list[tuple[AuditPolicy, Task]] = []
    for case in cases:
        if case.task_id not in by_id:
            raise ConfigError(f"--cases: {case.name}: expected the id of a task, got {case.task_id!r}. Check --data.")
        pairs.append((case.policy(), by_id[case.task_id]))
    plays = await play_all(runner, pairs, concurrency=concurrency, notify=lambda done: None)
    found = []
    for case, play in zip(cases, plays, strict=True):
        if play is None:
            continue
        wrong = [
            f"{name} {expected:g} expected, got {got}"
            for name, expected, got in (("reward", case.reward, play.reward), ("score", case.score, play.score))
            if expected is not None and (got is None or not math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-6))
        ]
        if wrong:
            summary = f"{case.name}: {'; '.join(wrong)}"
            found.append(make_finding("case-fails", "fail", summary, [play], policy=case.name))
    return found


def _case(where: str, line: str) -> AuditCase:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    name = where.rpartition("/")[2]
    if isinstance(row, Mapping) and isinstance(row.get("task"), str):
        actions = row.get("actions", [row.get("action")])
        worth = {key: row[key] for key in ("reward", "score") if row.get(key) is not None}
        are_texts = isinstance(actions, list) and bool(actions) and all(isinstance(each, str) for each in actions)
        if are_texts and worth and all(type(value) in (int, float) for value in worth.values()):
            return AuditCase(str(row.get("name", name)), row["task"], tuple(actions), **worth)
    raise ConfigError(f"--cases: {where}: expected {_FORM}, got {line:.100}. Fix the line.")
