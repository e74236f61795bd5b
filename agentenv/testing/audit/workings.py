"""Finds faults in how an environment works, whatever it pays: run code, dead tools, growth, and what varies."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

from agentenv._util.plurals import counted
from agentenv.core.types import StopReason
from agentenv.testing.audit.episodes import Budget, Play, SlowStep, shorten
from agentenv.testing.audit.findings import AuditFinding, Evidence, Severity, findings_of, make_finding, tasks_of
from agentenv.testing.audit.policies import LARGE, LONG_REPLY
from agentenv.testing.diffs import same_number
from agentenv.testing.odd_actions import marked, names_in
from agentenv.testing.tool_calls import late_tool, only_call

_ERROR = re.compile(r"\W*(?:[\w ]{0,20}: ?)?(?:error|exception|traceback|failed)\b", re.IGNORECASE)
_RAISED = re.compile(r"\W*Error: (?:\w+\.)*(\w*(?:Error|Exception))\b")
"""An exception that is not a ToolError, as `agentenv.tools.answer_calls` writes it."""
_RIGHT_CALLS = ("calls/each_tool", "calls/each_choice", "calls/of_prompt", "gold")
_WITHOUT_CODE = ("gold", "calls", "explore", "odd_calls", "odd_values")
_MIN_CALLS = 3
_MIN_SLOW, _OFTEN_SLOW = 3, 10
"""Minimum number of slow steps with the same tool or action for a finding, if episodes were left out, and if not."""
MIN_SIZES = 5
"""Observations of equal actions in an episode, or sizes of its state, from which growth is judged."""
_GROWN, _GROWN_CHARS = 2.0, 100
"""Growth of an observation from the first to the last, as a factor and in characters."""
_LONG_FACTOR = 10
"""Length of a reply to a call with a large number, as a multiple of those to other calls."""
_STATE_BYTES, _STATE_FACTOR = 4_096, 10
"""Growth of the state in bytes, also as a multiple of the characters of the conversation."""


def find_run_code(plays: Sequence[Play], names: set[str]) -> list[AuditFinding]:
    """Return the finding about code of actions that ran in this process; `names` are those of its marks."""
    found = [play for play in plays if any(names_in(step.action, names) for step in play.steps)]
    ran = [marked(name) for play in found[:1] for step in play.steps for name in names_in(step.action, names)]
    summary = f"an action with the expression {''.join(ran[:1])} ran as code on {tasks_of(found)}"
    return findings_of("runs-code", "fail", summary, found)


def find_dead_tools(plays: Sequence[Play]) -> list[AuditFinding]:
    """Return the findings about tools that answer every call whose arguments fit the schema with an error.

    Without a call of gold, an error must be an exception of the tool, which arguments alone do not explain.
    """
    answers: dict[str, list[tuple[Play, str, str]]] = defaultdict(list)
    for play in plays:
        for step in play.steps if play.key in _RIGHT_CALLS else ():
            name, arguments = only_call(step.action)
            if name and step.observation:
                answers[name].append((play, json.dumps(arguments), step.observation))
    found = []
    for name, calls in answers.items():
        if len(calls) < _MIN_CALLS or not all(_ERROR.match(text) for _, _, text in calls):
            continue
        raised = {kind[1] if (kind := _RAISED.match(text)) else "" for _, _, text in calls}
        of_gold = [play for play, _, _ in calls if play.key == "gold"]
        if not of_gold and (len(raised) > 1 or "" in raised or len({arguments for _, arguments, _ in calls}) < 2):
            continue
        severity: Severity = "fail" if of_gold else "warn"
        own = of_gold or [play for play, _, _ in calls]
        summary = f"all {len(calls)} calls of {name} end with an error"
        found.append(make_finding("tool-fails", severity, summary, own, policy=name, detail=calls[0][2][:200]))
    return found


def find_slow_calls(budget: Budget) -> list[AuditFinding]:
    """Return the finding about the tool or action that is slow most often: a warning if it left others no time."""
    groups: dict[str, list[SlowStep]] = defaultdict(list)
    for step in budget.slow:
        name, _ = only_call(step.action)
        groups[f"calls of {name}" if name else f"steps with {shorten(step.action, 60)!r}"].append(step)
    name, steps = max(groups.items(), key=lambda each: len(each[1]), default=("", []))
    if len(steps) < (_MIN_SLOW if budget.num_left_out else _OFTEN_SLOW):
        return []
    # Where a call blocks the event loop, others seem slow: those that recur are the cause.
    often = Counter(step.action for step in steps)
    steps = sorted(steps, key=lambda step: (-often[step.action], -step.step_s))
    evidence = tuple(
        Evidence(step.policy, step.task_id, shorten(step.action), None, None, f"{step.step_s:.1f} s")
        for step in steps[:_MIN_SLOW]
    )
    summary = f"{len(steps)} {name} took {min(s.step_s for s in steps):.1f} to {max(s.step_s for s in steps):.1f} s"
    severity: Severity = "warn" if budget.num_left_out else "note"
    num_plays = len({(step.policy, step.task_id) for step in steps})
    return [AuditFinding("slow-call", severity, summary, evidence, num_plays)]


def find_late_tools(plays: Sequence[Play]) -> list[AuditFinding]:
    """Return the findings about tools that have no result within their limit, for calls without code."""
    late: dict[str, list[Play]] = defaultdict(list)
    for play in plays:
        for step in play.steps if play.policy in _WITHOUT_CODE else ():
            if name := late_tool(step.observation):
                late[name].append(play)
    found = []
    for name, own in late.items():
        summary = f"calls of {name} have no result within its limit on {tasks_of(own)}"
        found.append(make_finding("tool-hangs", "warn", summary, own, policy=name))
    return found


def find_growth(plays: Sequence[Play]) -> list[AuditFinding]:
    """Return the findings about observations of equal actions, and states, that grow with each turn of an episode."""
    longer, larger = [], []
    for play in plays:
        of_action: dict[str, list[int]] = defaultdict(list)
        for step in play.steps:
            if step.observation:
                of_action[step.action].append(len(step.observation))
        sizes = max(of_action.values(), key=len, default=[])
        if _grows(sizes) and sizes[-1] >= max(_GROWN * sizes[0], sizes[0] + _GROWN_CHARS):
            longer.append((sizes, play))
        said = sum(len(step.action) + len(step.observation) for step in play.steps)
        state = play.state_bytes
        if _grows(state) and state[-1] - state[0] >= max(_STATE_BYTES, _STATE_FACTOR * said):
            larger.append((list(state), play))
    found = []
    for kind, what, unit, grown in (
        ("observation-grows", "observations of the same action", "characters", longer),
        ("state-grows", "the state", "bytes", larger),
    ):
        if grown:
            sizes, _ = max(grown, key=lambda each: each[0][-1])
            plays = [play for _, play in sorted(grown, key=lambda each: -each[0][-1])]
            summary = f"{what} grow from {sizes[0]} to {sizes[-1]} {unit} in {len(sizes)} turns, on {tasks_of(plays)}"
            found.append(make_finding(kind, "warn", summary.replace("state grow", "state grows"), plays))
    return found


def find_reply_sizes(plays: Sequence[Play]) -> list[AuditFinding]:
    """Return the finding about tools whose replies are as long as a number in the call says."""
    usual, long = defaultdict[str, int](int), defaultdict[str, list[tuple[int, Play]]](list)
    for play in plays:
        for step in play.steps:
            name, arguments = only_call(step.action)
            is_large = any(isinstance(each, int | float) and each >= LARGE for each in arguments.values())
            if is_large and play.policy == "odd_calls":
                # No observation follows the reply that leaves no room.
                is_last = step is play.steps[-1] and play.stop_reason == StopReason.MAX_LENGTH
                long[name].append((LONG_REPLY if is_last else len(step.observation), play))
            else:
                usual[name] = max(usual[name], len(step.observation))
    found = []
    for name, sizes in long.items():
        own = [(size, play) for size, play in sizes if size >= max(LONG_REPLY, _LONG_FACTOR * usual[name])]
        size = min((size for size, _ in own), default=0)
        summary = f"calls of {name} with large numbers have replies of at least {size} characters, others of at most "
        summary += f"{usual[name]}"
        found += findings_of("reply-size", "warn", summary, [play for _, play in own], policy=name)
    return found


def _grows(sizes: Sequence[int]) -> bool:
    """Return True if each size is larger than the one before, and the steps do not fade out."""
    steps = [other - one for one, other in pairwise(sizes)]
    half = len(steps) // 2
    return len(sizes) >= MIN_SIZES and min(steps) > 0 and 2 * sum(steps[half:]) >= sum(steps[: len(steps) - half])


def find_flaky(pairs: Sequence[tuple[Play, Play]]) -> list[AuditFinding]:
    """Return the findings about plays whose repetition differs; one that failed is another finding.

    Args:
        pairs: the first play and its repetition.
    """
    rewards, texts, detail = _differing([(first, second) for first, second in pairs if second.error is None])
    in_rewards = f"a different reward the second time on {tasks_of(rewards)}"
    in_texts = f"a different observation the second time on {tasks_of(texts)}"
    return [
        *findings_of("flaky-reward", "fail", in_rewards, rewards, detail=detail),
        *findings_of("flaky-observation", "warn", in_texts, texts),
    ]


def find_clock(pairs: Sequence[tuple[Play, Play]], when: str = "at another time of day") -> list[AuditFinding]:
    """Return the finding about plays whose repetition at another time differs, but for failures outside.

    Args:
        pairs: the first play and its repetition.
        when: what was different.
    """
    rewards, texts, detail = _differing([(first, second) for first, second in pairs if not second.failed_outside])
    severity: Severity = "fail" if rewards else "warn"
    what = "reward" if rewards else "observation"
    summary = f"a different {what} {when} on {tasks_of(rewards or texts)}"
    return findings_of("clock", severity, summary, rewards or texts, detail=detail)


def _differing(pairs: Sequence[tuple[Play, Play]]) -> tuple[list[Play], list[Play], Callable[[Play], str]]:
    """Return the repetitions whose reward or end differs, those whose texts differ, and what describes one of them."""
    rewards, texts = [], []
    for first, second in pairs:
        if _difference(first, second):
            rewards.append(second)
        elif _texts(first) != _texts(second):
            texts.append(second)
    first_of = {id(second): first for first, second in pairs}
    return rewards, texts, lambda play: _difference(first_of[id(play)], play)


def _texts(play: Play) -> tuple[str, list[str]]:
    return play.prompt, [step.observation for step in play.steps]


def _difference(first: Play, second: Play) -> str:
    """Return the first difference in rewards, scores or the end; empty if there is none."""
    for index, (was, now) in enumerate(zip(first.steps, second.steps, strict=False)):
        for name, one, other in (("reward", was.reward, now.reward), ("score", was.score, now.score)):
            if not same_number(one, other):
                return f"turn {index + 1}: {name} {one!r} the first time, {other!r} the second time"
    if len(first.steps) != len(second.steps):
        return f"{counted(len(first.steps), 'turn')} the first time, {len(second.steps)} the second time"
    if first.stop_reason != second.stop_reason:
        return f"stop reason {first.stop_reason!r} the first time, {second.stop_reason!r} the second time"
    return ""
