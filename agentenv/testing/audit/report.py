"""The report of an audit: as data, for a terminal, and as a Markdown card."""

from __future__ import annotations

import io
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from agentenv._util.estimates import Estimate, over_tasks
from agentenv._util.plurals import counted
from agentenv.testing.audit.episodes import Play
from agentenv.testing.audit.facts import Facts
from agentenv.testing.audit.findings import SEVERITIES, AuditFinding, Severity
from agentenv.testing.audit.judging import failure_of
from agentenv.testing.audit.policies import AuditPolicy

SCHEMA = 1
"""Version of the format of `Audit.to_dict`."""
LOST, NOT_JUDGED = 3, 4
"""Exit codes of an audit that lost gold or a policy to an outage, and of one that judged nothing or had no time."""
_STYLES: dict[Severity, str] = {"fail": "bold red", "warn": "yellow", "note": "dim"}
_INDENT = 8
"""Columns before the details of a finding."""
_MAX_LEFT_OUT = 0.1
"""Share of the episodes that may have no time in an audit that passes."""
_FEW_PLAYS = 4
"""Maximum number of plays of requested policies to show in full."""


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """Rewards of one policy, over all of its variants."""

    policy: str
    kind: str
    num_variants: int
    num_plays: int
    num_failed: int
    """Episodes in which the environment or a service failed."""
    failures: Mapping[str, int]
    """Number of these by the kind of their finding, such as infra-error."""
    num_full: int
    """Episodes with the full score."""
    reward: Estimate
    """Mean over tasks."""
    max_reward: float | None
    best: str
    """The variant with the largest reward."""
    score: Estimate


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit."""

    env: str
    seed: int
    task_ids: tuple[str, ...]
    """Ids of the tasks of the plays."""
    num_plays: int
    """Number of plays on these tasks."""
    findings: tuple[AuditFinding, ...]
    """The allowed ones last, and the others by severity."""
    policies: tuple[PolicyRow, ...]
    unused: tuple[str, ...]
    """Allowed ids without a finding."""
    times: Mapping[str, float | str | None]
    plays: tuple[Play, ...] = ()
    """Those of `task_ids`, and of gold on further tasks."""
    requested: tuple[str, ...] = ()
    """Requested policies; empty: all."""
    judged: bool = True
    """Whether the full score is known for any task."""
    not_played: tuple[str, ...] = ()
    """Policies that had no time on any task."""
    num_left_out: int = 0
    """Episodes that had no time."""
    lost: tuple[str, ...] = ()
    """Policies of which an outage took every episode."""
    not_examined: tuple[str, ...] = ()
    """What was left out, and why."""

    def unresolved(self, severity: Severity) -> list[AuditFinding]:
        """Return the findings of this severity that are not allowed."""
        return [each for each in self.findings if each.severity == severity and not each.allowed]

    @property
    def gap(self) -> dict[str, float | None]:
        """Mean reward of gold, of an empty action, and their difference: what can be learned."""
        means = {row.policy: row.reward.mean for row in self.policies}
        gold, null = means.get("gold"), means.get("null")
        return {"gold": gold, "null": null, "gap": None if gold is None or null is None else gold - null}

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 1 if a finding fails, or with `strict` if one warns; otherwise LOST, NOT_JUDGED or 0."""
        if self.unresolved("fail") or (strict and self.unresolved("warn")):
            return 1
        if self.lost and not self.allows("infra-error"):
            return LOST
        return 0 if self.has_time and (self.judged or self.allows("no-ceiling")) else NOT_JUDGED

    @property
    def has_time(self) -> bool:
        """Whether every policy had time on a task, and at most a tenth of the episodes had none."""
        return not self.not_played and self.num_left_out <= _MAX_LEFT_OUT * (self.num_plays + self.num_left_out)

    def allows(self, kind: str) -> bool:
        """Return True if a finding of this kind is allowed."""
        return any(each.kind == kind and each.allowed for each in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except the plays, as JSON values; only `times` differs between equal audits."""
        return {
            "schema": SCHEMA,
            "env": self.env,
            "seed": self.seed,
            "tasks": list(self.task_ids),
            "num_plays": self.num_plays,
            "ceiling": self.gap,
            "judged": self.judged,
            "counts": {severity: len(self.unresolved(severity)) for severity in SEVERITIES},
            "findings": [each.to_dict() for each in self.findings],
            "policies": [asdict(row) for row in self.policies],
            "not_examined": list(self.not_examined),
            "unused_allowances": list(self.unused),
            "times": dict(self.times),
        }


def policy_rows(facts: Facts, policies: Sequence[AuditPolicy]) -> Iterator[PolicyRow]:
    """Return one row per policy, in the order of the policies."""
    by_name: dict[str, list[Play]] = defaultdict(list)
    for play in facts.plays:
        by_name[play.policy].append(play)
    for name in dict.fromkeys(policy.name for policy in policies):
        own = by_name.get(name)
        if not own:
            continue
        variants = {play.key for play in own}
        failures = Counter(map(failure_of, own))
        del failures[""]
        earned = [(play.reward, play.key) for play in own if play.reward is not None]
        best = max(earned, key=lambda pair: pair[0], default=(None, ""))
        yield PolicyRow(
            name, next(p.kind for p in policies if p.name == name), len(variants), len(own), failures.total(),
            dict(failures), sum(map(facts.full, own)), _estimate(own, "reward"), best[0], best[1],
            _estimate(own, "score"),
        )  # fmt: skip


def _estimate(plays: Sequence[Play], what: str) -> Estimate:
    by_task: dict[str, list[float]] = defaultdict(list)
    for play in plays:
        value = getattr(play, what)
        if value is not None:
            by_task[play.task_id].append(value)
    every = list(chain.from_iterable(by_task.values()))
    means = map(statistics.fmean, by_task.values())
    return over_tasks(means, len(every), min(every, default=0.0), max(every, default=0.0))


# --- the screen -------------------------------------------------------------------------------------------------------


def screen(audit: Audit, *, strict: bool = False) -> Group:
    """Return the report for a terminal: the findings, the rewards of each policy, and the verdict."""
    parts = [part for each in audit.findings for part in _finding_parts(each)]
    asked = [play for play in audit.plays if play.task_id in audit.task_ids]
    named = [play for play in asked if play.policy in audit.requested or play.key in audit.requested]
    if len(named) <= _FEW_PLAYS:
        for play in named:
            text = Text(f"\ntask {play.task_id}, {play.key}, seed {play.seed}\n", style="bold", end="")
            for index, step in enumerate(play.to_dict()["steps"]):
                text.append(f"  {index}: {step['action']!r}\n     reward {step['reward']:g}, score {step['score']}\n")
                if step["observation"]:
                    text.append(f"     {step['observation']!r}\n")
            parts.append(text.append(f"  ended: {play.stop_reason}\n"))
    parts += _table_parts(audit)
    parts += [Text(f"allowed, but without a finding: {pattern}", style="dim") for pattern in audit.unused]
    parts += [Text(f"not examined: {line}", style="dim") for line in audit.not_examined]
    return Group(*parts, Text(verdict(audit, strict=strict)))


def _table_parts(audit: Audit) -> list[Any]:
    """Return the rewards of the policies: a table, and a line each for policies that earned nothing or did not end."""
    left = [row.policy for row in audit.policies if row.reward.mean is None and not row.num_failed]
    zero = [row.policy for row in audit.policies if row.reward.mean == row.max_reward == 0.0 and not row.num_failed]
    size = f"{counted(audit.num_plays, 'episode')} on {counted(len(audit.task_ids), 'task')}"
    table = RichTable(title=f"{audit.env}: {size}",
                      title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))  # fmt: skip
    table.add_column("policy/best variant", overflow="fold")
    for column in ("reward, mean [95 %]", "max", "score", "full", "failed"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in audit.policies:
        if row.policy not in [*zero, *left]:
            best = "" if row.max_reward is None else f"{row.max_reward:.3g}"
            table.add_row(
                Text(row.best or row.policy), _shown(row.reward), best, _shown(row.score, interval=False),
                str(row.num_full or ""), "\n".join(f"{num} {kind}" for kind, num in row.failures.items()),
            )  # fmt: skip
    parts: list[Any] = [table] if table.row_count else [Text(str(table.title))]
    for names, what in (
        (zero, "earned 0.000"),
        (left, "had actions for a part of each episode only, so no reward"),
    ):
        if names:
            parts.append(Text(f"{counted(len(names), 'policy', 'policies')} {what}: {', '.join(names)}"))
    return parts


def _finding_parts(each: AuditFinding) -> list[Any]:
    severity: Severity = "note" if each.allowed else each.severity
    head = Text(f"{'allowed' if each.allowed else each.severity:7} ", _STYLES[severity])
    parts: list[Any] = [head.append(f"{each.id}: {each.summary}", "not bold default")]
    body = [] if each.severity == "note" and not each.allowed else [Text(each.why, "dim")]
    if each.allowed:
        body.append(Text(f"allowed: {each.allowed}", "dim"))
    else:
        for evidence in each.evidence[:1]:
            earned = "no reward" if evidence.reward is None else f"reward {evidence.reward:g}"
            body.append(Text(f"task {evidence.task_id}, {evidence.policy}: {_one_line(evidence.action)!r}, {earned}"))
            body += [Text(_one_line(evidence.detail, 200))] if evidence.detail else []
    parts += [Padding(text, (0, 0, 0, _INDENT)) for text in body]
    if each.reproduce and not each.allowed:  # whole, so that it can be copied
        parts.append(Text(f"{' ' * _INDENT}reproduce: {each.reproduce}", no_wrap=True, overflow="ignore"))
    return parts


def _one_line(text: str, most: int = 80) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}…"


def _shown(estimate: Estimate, *, interval: bool = True) -> str:
    if estimate.mean is None:
        return ""
    if not interval or estimate.ci95_low is None or estimate.ci95_high is None:
        return f"{estimate.mean:.3f}"
    return f"{estimate.mean:.3f} [{estimate.ci95_low:.3f}, {estimate.ci95_high:.3f}]"


def verdict(audit: Audit, *, strict: bool = False) -> str:
    """Return the meaning of the exit code, and the number of findings."""
    counts = ", ".join(f"{len(audit.unresolved(severity))} {severity}" for severity in SEVERITIES)
    allowed = sum(bool(each.allowed) for each in audit.findings)
    counts += f", {allowed} allowed" if allowed else ""
    if audit.exit_code(strict=strict) == 1:
        return f"failed: {counts}"
    if audit.exit_code() == LOST:
        lost = counted(len(audit.lost), "policy", "policies")
        advice = "Run it again, or pass --allow infra-error=REASON"
        return f"too little could be judged: an outage took every episode of {lost}. {advice}. So far: {counts}"
    if not audit.has_time:
        without = f"{audit.num_left_out} of {counted(audit.num_plays + audit.num_left_out, 'episode')}"
        advice = "Raise --time_limit_s, or lower --tasks"
        return f"too little could be judged: time ran out for {without}. {advice}. So far: {counts}"
    if audit.judged:
        return f"passed: {counts}. That is not a proof: add tricks that these policies do not try as `hacks`"
    return (
        f"nothing could be judged{' (allowed)' if audit.allows('no-ceiling') else ''}: the full score is unknown. "
        f"Return `score`, implement `gold` or pass --pass_reward. Errors, leaks and flakiness: {counts}"
    )


def card(audit: Audit, *, strict: bool = False) -> str:
    """Return the report as text in Markdown, for an environment's page."""
    text = io.StringIO()
    Console(file=text, width=120, force_terminal=False, color_system=None).print(
        screen(audit, strict=strict), crop=False
    )
    return f"# Audit of {audit.env}\n\nSeed {audit.seed}.\n\n```text\n{text.getvalue().strip()}\n```\n"


def write(audit: Audit, folder: Path, *, strict: bool = False) -> None:
    """Write audit.json, plays.jsonl and audit.md to a folder, which is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "audit.json").write_text(json.dumps(audit.to_dict(), indent=2) + "\n", encoding="utf-8")
    plays = "".join(json.dumps(play.to_dict()) + "\n" for play in audit.plays)
    (folder / "plays.jsonl").write_text(plays, encoding="utf-8")
    (folder / "audit.md").write_text(card(audit, strict=strict), encoding="utf-8")
