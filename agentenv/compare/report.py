"""A RunComparison as text for a terminal, or as Markdown: what is not comparable, then the verdict, then all else."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence

from agentenv._util.plurals import counted, decimal
from agentenv._util.terminal import safe
from agentenv.compare.comparison import RunComparison, SideFacts
from agentenv.compare.intervals import MeanDifference
from agentenv.compare.pairing import Change
from agentenv.compare.significance import FALSE_SHARE

MAX_TASKS = 10
"""Tasks that a report lists."""
_READ_BOTH = (
    "To read episodes of these tasks, run both models on this data and compare these runs: agentenv run --model "
    "TRAINING/model, with the training's --eval_temperature as --temperature, its --top_p and its --max_tokens."
)
"""How to read the episodes behind a difference of evaluations; the page of `view` says the same."""
_NAME_WIDTH = 17
_MAX_CHANGES = 6

VERDICTS = {
    "better": "B is better",
    "worse": "B is worse",
    "maybe_worse": "B is worse",
    "no_worse": "B is no worse",
    "no_difference": "no difference is shown",
    "unknown": "unknown: one task says nothing about others",
}
"""Each verdict in words."""


def sections_of(c: RunComparison) -> dict[str, list[tuple[str, str]]]:
    """Return the rows of the report, a name and a text each, by their title; those without a name are sentences."""
    found = {
        "Runs": [("A", _side(c.a)), ("B", _side(c.b))],
        "Not comparable": [("", each.text) for each in c.caveats if each.refuses],
        "Note": [("", each.text) for each in c.caveats if not each.refuses],
        "Flags that differ": [(f"--{name}", f"{old} → {new}") for name, (old, new) in c.changed.items()],
        headline(c): list(_headline_rows(c)),
        f"Environments, mean {c.by}": list(_changes(c.environments)),
        "Checks": list(_check_rows(c)),
        "Passed": list(_passed_rows(c)),
        "Sampled tokens per episode, B / A": list(_lengths(c)),
        "Dollars per episode": list(_changes([] if c.cost is None else [c.cost])),
        "Stop reasons, share of episodes": list(_changes(_changed(c.stop_reasons))),
        "info": list(_changes(_changed(c.info), c.difference.num_tasks)),
        f"Tasks (★: q ≤ {FALSE_SHARE:.2f})" if c.episodes is None else "Tasks": list(_task_rows(c)),
        _episode_title(c): list(_episode_rows(c)),
    }
    return {title: rows for title, rows in found.items() if rows}


def as_text(comparison: RunComparison, width: int = 80) -> str:
    """Return the report in lines of at most `width` columns."""
    lines: list[str] = []
    for title, rows in sections_of(comparison).items():
        lines += ["", *textwrap.wrap(safe(title), width)]
        for name, text in rows:
            name = safe(name)
            label = f"  {name:{_NAME_WIDTH}} " if name else "  "
            indent = " " * (_NAME_WIDTH + 3) if name else "  "
            if len(label) > _NAME_WIDTH + 3:
                lines.append(label.rstrip()[:width])
                label = indent
            lines += textwrap.wrap(safe(text), width, initial_indent=label, subsequent_indent=indent)
    return "\n".join(lines[1:]) + "\n"


def as_markdown(comparison: RunComparison) -> str:
    """Return the report as GitHub's Markdown; texts of runs are in code spans, so that they cannot be markup."""
    lines: list[str] = []
    for title, rows in sections_of(comparison).items():
        lines += [f"### {title}", ""]
        if any(name for name, _ in rows):
            lines += ["| | |", "|---|---|", *(f"| {_code(name)} | {_code(text)} |" for name, text in rows), ""]
        else:
            lines += [*(f"- {_code(text)}" for _, text in rows), ""]
    return "\n".join(lines)


def _code(text: str) -> str:
    # A fence longer than any run of backticks in it; GitHub reads \| in a table's cell as | also in code.
    text = safe(text).replace("\n", " ").replace("|", "\\|")
    if not text:
        return ""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def headline(c: RunComparison) -> str:
    """Return the verdict and the number that it is about, on one line."""
    if c.are_identical:
        return f"{c.by}: no difference is shown, the runs agree on every task"
    by_margin = {
        "better": f" than A by more than {c.margin:g}",
        "worse": f" than A by more than {c.margin:g}",
        "maybe_worse": f" than A, but not surely by more than {c.margin:g}",
        "no_worse": f" than A by {c.margin:g}",
    }
    return f"{c.by}: {VERDICTS[c.verdict]}{by_margin.get(c.verdict, '') if c.margin else ''}"


def _side(side: SideFacts) -> str:
    step = "" if side.step is None else f" at step {side.step}"
    return f"{side.name}{step}: {counted(side.num_episodes, 'episode')} of {counted(side.num_tasks, 'task')}"


def _headline_rows(c: RunComparison) -> Iterator[tuple[str, str]]:
    d = c.difference
    units = counted(d.num_tasks, "task")
    if d.num_clusters is not None and c.cluster is not None:
        units += f" in {counted(d.num_clusters, 'cluster')}"
    yield "B - A", f"{_difference(d)} over {units} (A {c.a.mean:.3f}, B {c.b.mean:.3f})"
    if c.share_bound is not None and c.are_identical:
        yield "", f"With 95 % confidence at most {c.share_bound:.1%} of such tasks differ (rule of three)."
    elif c.share_bound is not None:
        same = "All tasks differ by the same amount, so no interval can be estimated. With 95 % confidence at most "
        yield "", f"{same}{c.share_bound:.1%} of such tasks differ by another (rule of three)."
    if c.cluster is not None and d.num_units < 20:
        yield "", f"{d.num_units} clusters are few: intervals of fewer than 20 are often too narrow."
    if c.smallest_effect is not None:
        yield "smallest effect", f"{c.smallest_effect:.3f} would be seen in 80 of 100 such comparisons"
    if c.precision is not None:
        p, more = c.precision, "tasks" if c.cluster is None else "clusters"
        what = "episodes per task" if p.advice == "episodes" else more
        yield (
            "more of what?",
            f"{what}: {p.share_within:.0%} of the variance is within tasks. ±{p.half:.3f} would be "
            f"±{p.half_more_episodes:.3f} with 4 times the episodes per task (at best ±{p.half_at_best:.3f}), "
            f"±{p.half_more_tasks:.3f} with 4 times the {more}",
        )
    if c.has_common_seed and not c.are_identical and c.episodes is None:
        yield "seed", "the same in both runs: equal draws make the interval narrower, and rightly so"


def _check_rows(c: RunComparison) -> Iterator[tuple[str, str]]:
    flips = c.sign_flips
    how = "exact" if flips.is_exact else f"{flips.num:,} draws"
    yield "sign flips", f"p = {_p(flips.p)} ({how}); a check: the interval decides"
    if c.pairing is not None and c.difference.se:
        related = "" if c.pairing.correlation is None else f"; correlation of the tasks {c.pairing.correlation:.2f}"
        yield "pairing", f"standard error {c.difference.se:.4f}, unpaired {c.pairing.se_unpaired:.4f}{related}"
    yield c.share_above.name, f"{c.share_above.b:.3f}{_interval(c.share_above.difference, 0.5)}"


def _changed(changes: Sequence[Change]) -> list[Change]:
    """Return those that changed, the least likely by chance first."""
    changed = [each for each in changes if each.difference.mean or each.difference.se]
    return sorted(changed, key=lambda each: each.q or 0.0)[:_MAX_CHANGES]


def _passed_rows(c: RunComparison) -> Iterator[tuple[str, str]]:
    first, flips = list(c.passes[:1]), c.flips  # pass@1, and below it the others with the largest k
    last = {each.name.partition(mark)[0] + mark: each for each in c.passes for mark in "@^" if mark in each.name}
    yield from _changes(first + [each for each in last.values() if each not in first])
    if flips is not None and flips.p is not None:
        gained = counted(flips.gained_once, "task")
        yield "flips", f"{gained} gained, {flips.lost_once} lost (McNemar's p = {_p(flips.p)})"
    elif flips is not None:
        yield "at least once", f"{counted(flips.gained_once, 'task')} gained, {flips.lost_once} lost"
        yield "every time", f"{counted(flips.gained_always, 'task')} gained, {flips.lost_always} lost"


def _lengths(c: RunComparison) -> Iterator[tuple[str, str]]:
    for name, ratio in (("all", c.lengths), ("passed in both", c.lengths_passed)):
        if ratio is not None:
            low, high = ratio.ci95_low, ratio.ci95_high
            interval = "" if low is None or high is None else f"  95% CI [{low:.3f}, {high:.3f}]"
            yield name, f"{ratio.ratio:.3f}{interval}  ({counted(ratio.num_tasks, 'task')})"


def _changes(changes: Sequence[Change], num_tasks: int = 0) -> Iterator[tuple[str, str]]:
    """Yield a row per number; one over fewer than `num_tasks` tasks says over how many."""
    for each in changes:
        num = each.difference.num_tasks
        few = f"  ({counted(num, 'task')})" if num < num_tasks else ""
        q = "" if each.q is None else f"  q {_p(each.q)}"
        verdict = "" if each.verdict is None else f"  {each.verdict.replace('_', ' ')}"
        yield each.name, f"{decimal(each.a)} → {decimal(each.b)}  {_difference(each.difference)}{q}{verdict}{few}"


def _difference(d: MeanDifference) -> str:
    return f"{decimal(d.mean, sign='+')}{_interval(d)}"


def _interval(d: MeanDifference, shift: float = 0.0) -> str:
    if d.ci95_low is None or d.ci95_high is None:
        return ""
    sign = "" if shift else "+"
    return f"  95% CI [{decimal(d.ci95_low + shift, sign=sign)}, {decimal(d.ci95_high + shift, sign=sign)}]"


def _task_rows(c: RunComparison) -> Iterator[tuple[str, str]]:
    changed = [each for each in c.tasks if each.difference or each.is_named]
    for each in changed[:MAX_TASKS]:
        means = f"{each.mean_a:.3f} → {each.mean_b:.3f}  {each.difference:+.3f}"
        chance = "" if each.p is None or each.q is None else f"  p {_p(each.p)}  q {_p(each.q)}"
        yield each.task_id, f"{means}{chance}" + "  ★" * each.is_named
    if others := changed[MAX_TASKS:]:
        named = sum(each.is_named for each in others)
        surely = f", {named} of them ★" if named else ""
        yield "", f"{counted(len(others), 'other task')} changed{surely}; {len(c.tasks) - len(changed)} did not."
    if changed and None not in (c.a.step, c.b.step):
        yield "", _READ_BOTH
    if c.num_needed is not None and not c.are_identical:
        few = f"With so few episodes, a task that changed alone cannot be told from chance among {len(c.tasks)}"
        yield "", f"{few}: that takes {c.num_needed} episodes of it in each run."


def _episode_title(c: RunComparison) -> str:
    changes = c.episodes or ()
    num_higher, num = sum(each.b > each.a for each in changes), sum(each.num_a for each in c.tasks)
    return f"Episodes that changed: {len(changes)} of {num}, {num_higher} higher and {len(changes) - num_higher} lower"


def _episode_rows(c: RunComparison) -> Iterator[tuple[str, str]]:
    changes = c.episodes or ()
    for each in changes[:MAX_TASKS]:
        yield each.episode_id, f"{each.a:.3f} → {each.b:.3f}  {each.b - each.a:+.3f}"
    if len(changes) > MAX_TASKS:
        yield "", f"{len(changes) - MAX_TASKS} others changed; --json lists them all."
    for name, side in (("in A", c.a), ("in B", c.b)):
        if changes:
            yield name, shlex.join(["agentenv", "show", side.name, "--episode", changes[0].episode_id])


def _p(p: float) -> str:
    return f"{p:.2g}" if p < 0.001 else f"{p:.3f}"
