"""What an audit can find: kinds with a stable id, how severe each is, why it matters; and what was allowed."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from agentenv.audit.plays import Play, shown

Severity = Literal["fail", "warn", "note"]
SEVERITIES: tuple[Severity, ...] = ("fail", "warn", "note")
MAX_EVIDENCE = 8
"""Plays that a finding shows."""

WHY: Mapping[str, str] = {
    "null-earns": "An empty action has the full score, so a policy learns to say nothing.",
    "null-pays": "An empty action earns half of the score or of what gold earns, or more: silence is paid for.",
    "prefix-earns": "The beginning of the answer has the full score: a policy learns to say less than the answer.",
    "hack-earns": "An action that solves nothing has the full score: training finds it and learns it.",
    "guess-earns": "An action that looks at nothing, or copies, has the full score: on few tasks that is chance, on "
    "many the guess is what is learned. Have more possible answers, or pay for more than the answer.",
    "trivial-tasks": "Almost any text has the full score on these tasks: they teach nothing. Drop or mend the rows.",
    "reward-exceeds-gold": "A policy that solves nothing earns more than gold does: training goes there.",
    "partial-credit": "A policy that solves nothing earns a large part of what gold earns.",
    "hedging": "An action with a right and a wrong answer has the full score in either order: saying everything pays.",
    "gold-fails": "What the environment calls gold has no full score: the label, the grader or gold is wrong.",
    "gold-partly": "Gold is known for some tasks only: for the others nothing says that they can be solved.",
    "no-ceiling": "No gold, no score and no --pass_reward: nothing says what full marks are, so only errors, leaks and "
    "flakiness were looked for. Write `gold`, give a score in [0, 1], or say --pass_reward.",
    "no-gold": "The environment has no gold: nothing says that its tasks can be solved. Write `gold`.",
    "no-signal": "Gold earns no more than an empty action: there is nothing to learn from.",
    "answer-in-feedback": "What the environment says after a wrong action has the answer in it: a policy waits for it.",
    "answer-in-prompt": "The prompt has the answer in it. Meant so where the task is to find or copy it.",
    "case-fails": "Actions whose worth the author knows were paid something else.",
    "flaky-reward": "The same actions on the same task and seed earned something else the second time.",
    "flaky-observation": "The same actions on the same task and seed were answered with another text.",
    "hostile-error": "An action made the environment raise: a policy that samples it costs its whole group.",
    "data-error": "The row cannot be played.",
    "infra-error": "Something outside failed, so nobody knows what these actions are worth.",
    "step-timeout": "An action made a step run out of its time.",
    "score-range": "A score outside [0, 1].",
    "reward-range": "A reward outside of the range that was declared.",
    "slow-steps": "Actions of this policy make steps much slower than others: they hold up training.",
    "forged-tokens": "Text that a policy wrote came back as special tokens: a policy can write turns of others.",
}  # fmt: skip
"""Every kind of finding."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One play that shows it."""

    policy: str
    task_id: str
    action: str
    reward: float | None
    score: float | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with an environment, or worth knowing."""

    id: str
    """Stable: the kind, and the policy where one does it, as in `hack-earns:enumeration`."""
    severity: Severity
    summary: str
    evidence: tuple[Evidence, ...] = ()
    num_plays: int = 0
    """Plays that show it; `evidence` has the first of them."""
    reproduce: str = ""
    """A command that plays it again."""
    allowed: str = ""
    """Why it is allowed; empty where it is not."""

    @property
    def kind(self) -> str:
        """The id without the policy."""
        return self.id.partition(":")[0]

    @property
    def why(self) -> str:
        """What is wrong with it."""
        return WHY[self.kind]

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, and `why`."""
        return {**asdict(self), "why": self.why}


def finding(
    kind: str,
    severity: Severity,
    summary: str,
    plays: Sequence[Play] = (),
    *,
    policy: str = "",
    detail: str | Callable[[Play], str] = "",
) -> Finding:
    """A finding with the plays that show it, spread over tasks; `detail` says what they show, or what each does."""
    say = detail if callable(detail) else lambda play: detail or told(play)
    seen: dict[str, int] = {}
    ranked = []
    for play in plays:
        seen[play.task_id] = seen.get(play.task_id, 0) + 1
        ranked.append((seen[play.task_id], play))
    first = [play for _, play in sorted(ranked, key=lambda pair: pair[0])][:MAX_EVIDENCE]
    evidence = tuple(Evidence(p.key, p.task_id, shown(p.action), p.reward, p.score, say(p)) for p in first)
    return Finding(f"{kind}:{policy}" if policy else kind, severity, summary, evidence, len(plays))


def told(play: Play) -> str:
    """What went wrong in a play, in a line; empty where nothing did."""
    error = play.error
    return "" if error is None else shown(f"{error.where}: {error.type}: {error.message} {error.place}".strip())


def tasks_of(plays: Sequence[Play]) -> str:
    """How many tasks plays are of, in words."""
    num = len({play.task_id for play in plays})
    return f"{num} task" if num == 1 else f"{num} tasks"


def allowing(findings: Sequence[Finding], allowed: Mapping[str, str]) -> tuple[list[Finding], list[str]]:
    """The findings with the reasons of those that are allowed, and the patterns that allow nothing.

    Args:
        findings: all of them.
        allowed: reason by id; an id may have wildcards, and a kind stands for all of its policies.
    """
    used: set[str] = set()
    marked = []
    for each in findings:
        pattern = next((one for one in allowed if one == each.kind or fnmatch.fnmatchcase(each.id, one)), None)
        if pattern is not None:
            used.add(pattern)
        marked.append(each if pattern is None else replace(each, allowed=allowed[pattern]))
    return marked, [pattern for pattern in allowed if pattern not in used]
