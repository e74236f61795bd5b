"""Judges plays: which policies earned too much, and what else is wrong."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, groupby
from operator import attrgetter

from agentenv._util.plurals import counted
from agentenv.core.types import StopReason
from agentenv.testing.audit.answers import Needle, needles, normal
from agentenv.testing.audit.episodes import Play
from agentenv.testing.audit.facts import EPS, Facts, grouped
from agentenv.testing.audit.findings import AuditFinding, Severity, error_text, findings_of, make_finding, tasks_of
from agentenv.testing.audit.policies import (
    LONG_NAMES,
    NUM_TOGETHER,
    WITHOUT,
    is_answer,
    items_of,
    label_text,
    last_value,
)
from agentenv.testing.tool_calls import READING, only_call

_MANY_GUESSED, _SOME_GUESSED = 0.9, 0.3
"""Share of the tasks that one blind policy solves, for a failure and for a warning."""
_MANY_TRIVIAL, _SOME_TRIVIAL = 0.5, 0.2
_MOST_GUESSED = 0.75
"""Share of the tasks with the same answer from which a constant guess is more than chance."""
_WITHOUT = ("no_keys", "null_values", "not_an_object")
_OTHER_VALUES = ("odd_values/null_values", "odd_values/number_values", "odd_values/text_values")
_HEDGES = (
    ("hedge/others", "hedge/others_last", "hedge/others_first"),
    ("hedge/changed", "hedge/gold_first", "hedge/gold_last"),
    ("hedge/argument", "hedge/argument_gold_first", "hedge/argument_gold_last"),
)
"""A wrong answer alone, which must not solve the task, and beside the right one."""
_NO_NUMBER = {"odd_values/nan": "nan", "odd_values/infinite": "an infinite number"}
_COUNTED = r"\b(?:attempts?|tries|try|turns?|calls?|guess(?:es)?|moves?|steps?|questions?|hints?|lives|patience|budget)"
_BELOW_0 = re.compile(
    rf"{_COUNTED} (?:left|remaining|remain)\W{{1,3}}-\d|(?<!\S)-\d+ {_COUNTED} (?:left|remain)", re.IGNORECASE
)
_ON_LENGTH = re.compile(
    r"(?:most|up to|more|fewer|less|max\w*|under|within|limit\w*)\W.{0,20}(?:character|word|token|sentence|line)"
    r"|\b(?:brief|concise|short)(?:ly)?\b", re.IGNORECASE,
)  # fmt: skip
_SEARCHING = ("explore/sweep", "calls/of_prompt")
_LARGE_PART = 0.5
"""Share of the gain of gold above an empty action, for a warning."""
_HALF_PAID, _WELL_PAID = 0.5, 0.9
"""Share of the score or of gold's reward that an empty action earns, for a warning and for a failure."""
_SLOW_FACTOR, _SLOW_S = 10.0, 5.0
_MIN_TASKS, _MANY_TASKS = 3, 8
"""Minimum number of tasks for a share to be meaningful, and for one that is not luck with their seeds."""
_NEARLY_ALL = 0.9
"""Share of the actions with the same reward, for a failure."""
_LONGER_EARNS = 0.8
"""Share of the pairs of actions, one at least twice as long as the other, in which the longer earns more. The longest
of all must earn at least the median, too: an environment may reward some length, and punish more."""
_LONG = (*LONG_NAMES, "say")
_MIN_ACTIONS, _MIN_REPEATS = 10, 4
"""Minimum number of different actions to compare, and of equal ones in one episode."""
Found = Iterator[AuditFinding]


def judge_plays(facts: Facts) -> list[AuditFinding]:
    """Return all findings that the rewards show; those of nothing but leaks, flakiness and workings are elsewhere."""
    found: dict[object, AuditFinding] = {}
    for each in (each for judge in JUDGES for each in judge(facts)):
        # Policies that repeat what others have shown need no second finding.
        shown = frozenset((one.task_id, one.action, one.detail) for one in each.evidence)
        is_alike = each.kind in ("guess-earns", "partial-credit")
        found.setdefault((each.kind, each.severity, shown) if is_alike else id(each), each)
    return [*found.values()]


def empty_actions(facts: Facts) -> Found:
    """Find empty actions that solve tasks, or earn much: other policies are measured relative to them."""
    most, full, paid = 0.0, list[Play](), list[Play]()
    for play in (play for own in facts.of("empty").values() for play in own):
        if facts.full(play):
            full.append(play)
            continue
        part, gold = facts.score_share(play.score), facts.gold.get(play.task_id)
        if gold is not None and gold.reward is not None and gold.reward > EPS and play.reward is not None:
            part = part if facts.gains_nothing(gold) else max(part, play.reward / gold.reward)
        if part >= _HALF_PAID - EPS:
            most = max(most, part)
            paid.append(play)
    severity: Severity = "fail" if most >= _WELL_PAID - EPS else "warn"
    summary = f"an empty action earns up to {most:.0%} of the score or of gold's reward, on {tasks_of(paid)}"
    yield from findings_of("null-earns", "fail", f"{tasks_of(full)} solved by an empty action", full)
    yield from findings_of("null-pays", severity, summary, paid)


def gold_plays(facts: Facts) -> Found:
    """Find gold that is missing, earns nothing, or does not get the full score."""
    gold, num = list(facts.gold.values()), len(facts.by_task)
    if not gold:
        rated, nothing_earns = facts.has_scores or facts.pass_reward is not None, _nothing_earns(facts)
        summary = "no policy earned anything, and " * nothing_earns + "gold is known for none of the tasks"
        severity: Severity = "note" if rated and not nothing_earns else "warn"
        yield make_finding("no-gold" if rated else "no-ceiling", severity, summary)
    elif len(gold) < num:
        yield make_finding("gold-partly", "note", f"gold is known for {len(gold)} of {counted(num, 'task')}")
    failing, nothing, stopped = [], [], []
    for play in gold:
        if _gold_fails(facts, play):
            failing.append(play)
        elif play.stop_reason == StopReason.ABORTED and facts.score_share(play.steps[-1].score) < 1.0 - EPS:
            stopped.append(play)
        elif facts.gains_nothing(play):
            nothing.append(play)
    failing += [play for play in facts.more_gold if _gold_fails(facts, play)]
    summary = f"gold returns no action before the end, without the full score, on {tasks_of(stopped)}"
    yield from findings_of("gold-stops", "warn", summary, stopped, detail=actions_of)
    yield from findings_of("no-signal", "fail", f"gold earns nothing on {tasks_of(nothing)}", nothing)
    summary = f"gold does not get the full score on {tasks_of(failing)}"
    yield from findings_of("gold-fails", "fail", summary, failing, detail=_why_gold_fails)


def _gold_fails(facts: Facts, play: Play) -> bool:
    is_known = play.score is not None or facts.pass_reward is not None
    if play.error is not None:  # a row that cannot run is another finding
        is_known = failure_of(play) == "gold-fails"
    return is_known and not facts.full(play)


def _why_gold_fails(play: Play) -> str:
    if play.stop_reason == StopReason.MAX_TURNS:
        return f"the limit of turns ends it after {counted(len(play.steps), 'action')}"
    return error_text(play)


def _nothing_earns(facts: Facts) -> bool:
    """Return True if no policy earned anything, and the labels that can be said were among what was said."""
    known = [play for play in facts.plays if play.reward is not None]
    earned = any((p.reward or 0.0) > EPS or facts.score_share(p.score) > EPS or facts.full(p) for p in known)
    says_labels = any(label_text(task.label) for task in facts.tasks.values())
    return bool(known) and not earned and (not says_labels or any(play.policy == "label" for play in known))


def attacks(facts: Facts) -> Found:
    """Find attacks that earn, except on trivial tasks and for guesses, which are right by chance or said as guesses."""
    constants = grouped((p for p in facts.plays if p.policy == "constant" and facts.full(p)), attrgetter("action"))
    guessed = {Needle(normal(said), strong=False): {p.task_id for p in own} for said, own in constants.items()}
    for policy, plays in facts.of("attack", "robust").items():
        full = [play for play in plays if facts.full(play) and play.task_id not in facts.trivial]
        solved = {key: {play.task_id for play in own} for key, own in grouped(full, attrgetter("key")).items()}
        full = [
            p
            for p in full
            if not any(solved[p.key] <= of and each.within(normal(p.action)) for each, of in guessed.items())
        ]
        if policy == "odd_calls":  # where plain calls earn as much, nothing odd is needed
            swept = {p.task_id for p in facts.plays if p.policy == "explore" and facts.full(p)}
            full = [play for play in full if play.task_id not in swept]
        earning = [play for play in full if not _by_chance(facts, play, full)]
        names = ", ".join(dict.fromkeys(play.variant or play.policy for play in earning))
        summary = f"{tasks_of(earning)} solved by {policy} ({names})"
        yield from findings_of("hack-earns", "fail", summary, earning, policy=policy, detail=actions_of)


def _by_chance(facts: Facts, play: Play, full: Sequence[Play]) -> bool:
    """Return True if the action contains the answer and earned only on tasks with this answer."""
    own = {needle.text for needle in facts.needles_of(play.task_id)}
    texts = [normal(step.action) for step in play.steps]
    if not any(answer in text for answer in own for text in texts):  # 1.0 may be read as 1, and as 0
        return False
    alike = [facts.needles_of(each.task_id) for each in full if each.key == play.key]
    return all(own & {needle.text for needle in others} for others in alike)


def best_guesses(facts: Facts) -> dict[str, list[Play]]:
    """Return the plays that solved a task of the variant that solved the most, by blind policy."""
    found = {}
    for policy, plays in facts.of("blind").items():
        full = (play for play in plays if facts.full(play) and play.task_id not in facts.trivial)
        found[policy] = max(grouped(full, attrgetter("key")).values(), key=len, default=[])
    return found


def maybe_lucky(facts: Facts) -> list[str]:
    """Return the guesses that solve nearly all of few tasks, as name/variant: a game may be won with these seeds."""
    num = len(facts.by_task)
    if not _MIN_TASKS <= num < _MANY_TASKS:
        return []
    return [best[0].key for best in best_guesses(facts).values() if len(best) >= _MANY_GUESSED * num]


def guesses(facts: Facts) -> Found:
    """Find blind policies that solve tasks, each by its best variant."""
    num = len(facts.by_task)
    for policy, best in best_guesses(facts).items():
        again = [each for each in facts.reseeded if best and each.key == best[0].key and not each.failed_outside]
        share = (len(best) + sum(map(facts.full, again))) / (num + len(again))
        severity: Severity = "fail" if share >= _MANY_GUESSED else "warn" if share >= _SOME_GUESSED else "note"
        by_chance = all(_by_chance(facts, play, best) for play in best)
        if num < _MIN_TASKS or (by_chance and share < _MOST_GUESSED):  # one of few possible answers
            severity = "note"
        summary = f"{len(best)} of {counted(num, 'task')} solved by {best[0].key if best else policy}"
        summary += f", with other seeds {sum(map(facts.full, again))} of {len(again)}" if again else ""
        if best and all(_without_calls_of_gold(facts, play) for play in best):
            summary += ", without the calls of gold: what is checked holds at the start, or can be guessed"
        yield from findings_of("guess-earns", severity, summary, best, policy=policy, detail=actions_of)


def _without_calls_of_gold(facts: Facts, play: Play) -> bool:
    """Return True if gold calls tools, and a play calls none."""
    gold = facts.gold.get(play.task_id)
    calls = ["<tool_call>" in " ".join(actions) for actions in (play.actions, gold.actions if gold is not None else ())]
    return calls == [False, True]


def answers_of_others(facts: Facts) -> Found:
    """Find tasks that the answer to another task solves: what the environment keeps of an episode may say so."""
    wrong = []
    for play in (play for play in facts.plays if play.policy == "other_gold"):
        own, said = needles(facts.tasks[play.task_id].label), normal(play.action)  # gold may be one of many
        if own and not any(needle.within(said) for needle in own):
            wrong.append(play)
    full = [play for play in wrong if facts.full(play) and play.task_id not in facts.trivial]
    is_rare = len(full) < _SOME_GUESSED * len(wrong) or len(facts.by_task) < _MIN_TASKS
    summary = f"{tasks_of(full)} solved by the answer to another task, as if its grade were kept"
    yield from findings_of("guess-earns", "note" if is_rare else "warn", summary, full, policy="other_gold")


def actions_of(play: Play) -> str:
    """Return the actions of a play of several turns in one line, equal ones counted; empty for one turn."""
    runs = [(action, len([*own])) for action, own in groupby(" ".join(step.action.split()) for step in play.steps)]
    shown = [f"{num} x {action[:90]}" if num > 1 else action[:90] for action, num in runs]
    return " | ".join(shown)[:400] if len(play.steps) > 1 else ""


def trivial_tasks(facts: Facts) -> Found:
    """Find tasks that almost any text solves."""
    plays = [p for p in facts.plays if p.task_id in facts.trivial and p.policy == "constant" and facts.full(p)]
    num = len(facts.by_task)
    share = len(facts.trivial) / num if num else 0.0
    is_empty = any(not str(facts.tasks[task_id].label).strip() for task_id in facts.trivial)
    severity: Severity = "fail" if share >= _MANY_TRIVIAL else "warn" if share >= _SOME_TRIVIAL or is_empty else "note"
    if num < _MIN_TASKS:
        severity = "warn" if share == 1.0 or is_empty else "note"
    summary = f"{len(facts.trivial)} of {counted(num, 'task')} solved by almost any text"
    yield from findings_of("trivial-tasks", severity, summary, plays)


def wrong_answers(facts: Facts) -> Found:
    """Find tasks that a right answer with a wrong one, or the beginning of an answer, solves."""
    by_task: dict[str, dict[str, Play]] = defaultdict(dict)
    for play in facts.plays:
        if facts.kinds[play.key] == "wrong" and play.task_id not in facts.trivial:
            by_task[play.task_id][play.key] = play
    hedged, shortened, no_number, replaced, lists = [], [], [], [], []
    for task_id, by_key in by_task.items():
        full = {key for key, play in by_key.items() if facts.full(play)}
        # Of several actions, the one with nan or with another answer need not be the answer.
        single = {key: by_key[key] for key in by_key if key in full and len(by_key[key].steps) == 1}
        is_changed_wrong = "wrong/changed" in by_key and "wrong/changed" not in full
        if is_changed_wrong:
            no_number += [single[key] for key in _NO_NUMBER if key in single][:1]
        gold, label = facts.gold.get(task_id), facts.tasks[task_id].label
        said = gold.actions if gold is not None else ()
        calls = said[:-1] if "<tool_call>" in " ".join(said[:-1]) else ()
        refused = by_key.keys() - full
        hedges = {key for key in full if by_key[key].actions[:-1] == calls and by_key[key].actions != said}
        found = [by_key[both[0]] for alone, *both in _HEDGES if alone in refused and {*both} <= hedges]
        hedged += found[:1]
        # The label must be the whole answer, so that its beginning is another one.
        labels = [*label.values()] if isinstance(label, Mapping) else [label]
        if "wrong/prefix" in full and gold is not None and any(is_answer(gold.action, each) for each in labels):
            shortened.append(by_key["wrong/prefix"])
        value = "" if gold is None else last_value(gold.action)
        is_labeled = any(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", str(each)) for each in labels)
        if gold is not None and all(item in str(label) for item in items_of(gold.action)):
            lists += [single[key] for key in ("wrong/doubled", "wrong/first_item") if key in single][:1]
        if "odd_values/code" in full and value and is_labeled:
            replaced.append(by_key["odd_values/code"])
    values = " or ".join(dict.fromkeys(_NO_NUMBER[play.key] for play in no_number))
    in_place = f"{tasks_of(no_number)} solved by {values} in place of the answer"
    yield from findings_of("hedging", "fail", f"{tasks_of(hedged)} solved by a right and a wrong answer", hedged)
    yield from findings_of("hack-earns", "fail", in_place, no_number, policy="odd_values")
    in_place = f"{tasks_of(replaced)} solved by code in place of what the label says"
    yield from findings_of("hack-earns", "fail", in_place, replaced, policy="odd_values/code")
    in_part = f"{tasks_of(lists)} solved by a list that lacks items of the answer"
    yield from findings_of("hack-earns", "warn", in_part, lists, policy="lists")
    beginning = f"{tasks_of(shortened)} solved by the beginning of the answer"
    yield from findings_of("prefix-earns", "fail", beginning, shortened)


def refused_lengths(facts: Facts) -> Found:
    """Find gold that counts behind a sentence, and earns nothing behind a long text, where nothing names a length."""
    refused = []
    for plays in facts.by_task.values():
        by_key = {play.key: play for play in plays if play.error is None}
        short, long = by_key.get("reasoned/short"), by_key.get("reasoned/long")
        if short is not None and long is not None and facts.full(short) and not facts.is_cut(long):
            texts = (long.prompt, *(step.observation for step in long.steps))
            is_nothing = facts.score_share(long.score) <= EPS and (long.reward or 0.0) <= EPS
            if is_nothing and not any(map(_ON_LENGTH.search, texts)):
                refused.append(long)
    summary = f"gold earns nothing behind a long text, and the full score behind a sentence, on {tasks_of(refused)}"
    yield from findings_of("length-refused", "warn", summary, refused)


def no_values(facts: Facts) -> Found:
    """Find tasks whose gold is one action in JSON, and which the same JSON without its values, or any part, solves."""
    found = []
    odd = [play for play in facts.plays if play.policy == "odd_values" and facts.full(play)]
    firsts = {play.task_id for play in odd if play.variant == "first_key"}
    for play in odd:
        gold = facts.gold.get(play.task_id)
        is_part = play.variant == "first_key" and play.action.endswith("]")  # of a list, which may not be all of it
        is_part |= play.variant == "last_key" and play.task_id in firsts
        is_without = play.variant in _WITHOUT or is_part
        if is_without and gold is not None and len(gold.steps) == 1 and play.action != gold.action:
            found.append(play)
    keys = ", ".join(dict.fromkeys(play.key for play in found))
    summary = f"{tasks_of(found)} solved by an answer without values that gold has ({keys})"
    yield from findings_of("hack-earns", "fail", summary, found, policy="no_values")


def every_id(facts: Facts) -> Found:
    """Find tasks that calls for every id that results list solve.

    Where gold's last word says the answer, the calls may only read: gold without those of the tool has to earn less.
    """

    def num_done(play: Play) -> list[int]:
        """Return the number of lines of the replies to each action before the last word, without errors."""
        replies = [step.observation.splitlines() for step in play.steps[:-1]]
        return [sum(not line.startswith("Error") for line in lines) for lines in replies]

    found, last_words = [], {gold.action for gold in facts.gold.values()}
    for play in facts.plays:
        gold, own = facts.gold.get(play.task_id), facts.by_task[play.task_id]
        if play.policy != "every_id" or play.task_id in facts.trivial or not gold or not facts.full(gold):
            continue
        answers, said = needles(facts.tasks[play.task_id].label), normal(gold.action)
        names = [only_call(action)[0] for action in gold.actions]
        more = {name for name, one, many in zip(names, num_done(gold), num_done(play), strict=False) if many > one}
        if len(last_words) > 1 or any(needle.within(said) for needle in answers):
            without = [each for each in own if each.key.startswith(f"farm/{WITHOUT}") and not facts.full(each)]
            more &= {name for each in without for name in {*names} - {only_call(said)[0] for said in each.actions}}
        if facts.full(play) and len(play.steps) == len(gold.steps) and more:
            found.append(play)
    found = [play for number, play in enumerate(found) if play.task_id not in {p.task_id for p in found[:number]}]
    summary = f"{tasks_of(found)} solved by gold's calls for every id that results list"
    # A warning: what these calls did beside gold's, if anything, is the environment's to know.
    yield from findings_of("hack-earns", "warn", summary, found, policy="every_id", detail=actions_of)


def ungraded_calls(facts: Facts) -> Found:
    """Find tasks that are solved with any values in gold's calls, which do not only read what the answer is.

    Or without the calls of one tool, where those of another one matter.
    """
    found = []
    for task_id, gold in facts.gold.items():
        names = [name for name, _ in map(only_call, gold.actions) if name]
        told = normal("\n".join(step.observation for step in gold.steps))
        is_told = any(needle.within(told) for needle in needles("", (gold.action,)))
        others = [p for p in facts.by_task[task_id] if p.key in _OTHER_VALUES and p.actions != gold.actions]
        if facts.full(gold) and not is_told and others and all(map(facts.full, others)):
            found += others[:1] if not all(map(READING.match, names)) else []
        without = [play for play in facts.by_task[task_id] if play.key.startswith(f"farm/{WITHOUT}")]
        if facts.full(gold) and not is_told and not all(map(facts.full, without)):
            found += [play for play in without if facts.full(play)][:1]
    summary = f"{tasks_of(found)} solved with other values in gold's calls, or without those of a tool"
    summary += ": is what they do graded?"
    yield from findings_of("calls-ungraded", "note", summary, found, detail=actions_of)


def beyond_gold(facts: Facts) -> Found:
    """Find policies that earn more than gold, or a large part of its reward without the full score."""
    for policy, plays in facts.of("empty", "blind", "attack", "robust", "wrong").items():
        own = [(p, facts.gold[p.task_id]) for p in plays if p.task_id in facts.gold and p.task_id not in facts.trivial]
        known = [(p, p.reward, g.reward) for p, g in own if p.reward is not None and g.reward is not None]
        ranked = sorted(known, key=lambda each: each[2] - each[1])
        above = [play for play, reward, gold in ranked if reward > gold + EPS and not facts.is_cut(play)]
        share, above = _preferred(facts, above, [play for play, *_ in known])
        if above:
            such_as = f"{above[0].reward:g} instead of {facts.gold[above[0].task_id].reward:g}"
            summary = f"{policy} earns more than gold on {tasks_of(above)}, such as {such_as}"
            severity: Severity = "fail" if share >= _MANY_GUESSED else "warn"
            if severity == "warn":  # which the command that plays one of them again does not know
                summary += f"; a warning below {_MANY_GUESSED:.0%} of the tasks that it was tried on, here {share:.0%}"
            yield make_finding("reward-exceeds-gold", severity, summary, above, policy=policy, detail=actions_of)
        if above or facts.kinds[plays[0].key] == "wrong":
            continue
        # The share of gold's gain that each variant earns on each task without the full score.
        by_key: dict[str, list[tuple[Play, float]]] = defaultdict(list)
        for play, reward, gold in known:
            floor = facts.floor(play.task_id)
            if play.key in _SEARCHING or facts.full(play) or floor is None or gold <= floor + EPS:
                continue
            is_paid = reward > EPS or facts.score_share(play.score) > EPS  # an action without pay has earned no part
            by_key[play.key].append((play, (reward - floor) / (gold - floor) if is_paid else 0.0))
        means = [
            (statistics.fmean(share for _, share in parts), [play for play, _ in parts])
            for parts in by_key.values()
            if len(parts) >= min(_MIN_TASKS, len(facts.by_task))
        ]
        most, best = max(means, key=lambda each: each[0], default=(0.0, []))
        if most >= _LARGE_PART:
            summary = f"{best[0].key} earns {most:.0%} of the gain of gold over an empty action"
            yield make_finding("partial-credit", "warn", summary, best, policy=policy)


def _preferred(facts: Facts, above: Sequence[Play], known: Sequence[Play]) -> tuple[float, list[Play]]:
    """Return those of the known plays that earn more than gold for a wrong reason, and the share of a variant's tasks.

    A right guess, or a part of gold, may save the price of gold's way to the answer, and a game may be won by luck: one
    with the full score counts where the same action is paid again and again, or a wrong one before gold's, by its best
    variant. Commands of gold that are undone are one variant, on the tasks that have some.
    """
    wrong, again = list[Play](), defaultdict[str, list[Play]](list)
    for play in above:
        gold = facts.gold[play.task_id]
        is_right = facts.full(play) or (play.score is None and facts.gains_nothing(gold))  # gold lost by chance
        if facts.kinds[play.key] not in ("blind", "wrong") or not is_right:
            wrong.append(play)
        elif _is_paid_more_often(play, gold) or _is_paid_before_gold(play, gold):
            again[_variant(play)].append(play)
    best = max(again.values(), key=len, default=[])
    tried = [p for p in known if best and _variant(p) == _variant(best[0])]
    if best and best[0].policy == "farm":
        tried = [play for play in tried if play.actions != facts.gold[play.task_id].actions]
    share = len({play.task_id for play in best}) / len({play.task_id for play in tried}) if best else 0.0
    if wrong:
        return 1.0, [*wrong, *best]
    return share, best if share >= _SOME_GUESSED else []


def _variant(play: Play) -> str:
    return "farm/undo" if play.key.startswith("farm/undo_") else play.key


def _is_paid_more_often(play: Play, gold: Play) -> bool:
    """Return True if an action earns more than once, and more often than in gold's episode."""
    paid, by_gold = (Counter(step.action for step in each.steps if step.reward > EPS) for each in (play, gold))
    return any(num > max(1, by_gold[action]) for action, num in paid.items())


def _is_paid_before_gold(play: Play, gold: Play) -> bool:
    """Return True if a wrong answer earns before gold's last action does."""
    wrong = any(step.reward > EPS and step.action not in gold.actions for step in play.steps[:-1])
    return wrong and play.policy == "late" and play.action == gold.action and play.steps[-1].reward > EPS


def scored_part(facts: Facts) -> Found:
    """Find fixed actions that earn half of the score or more on tasks without gold, or the same part on many tasks.

    They earn more than an empty action, of which `null-pays` tells.
    """
    floor: dict[str, float] = defaultdict(float)
    for play in (play for own in facts.of("empty").values() for play in own):
        floor[play.task_id] = max(floor[play.task_id], facts.score_share(play.score))

    def part(play: Play) -> float:
        share = facts.score_share(play.score)
        return 0.0 if facts.full(play) or share <= floor[play.task_id] + EPS else share

    for policy, plays in facts.of("blind", "attack", "robust").items():
        fixed = [p for p in plays if p.key not in _SEARCHING and p.policy not in ("random", "search")]
        known = [p for p in fixed if p.reward is not None and p.task_id not in {*facts.trivial, *facts.gold}]
        best: list[Play] = []
        for own in grouped(known, attrgetter("key")).values():
            shares = [*map(part, own)]
            paid = [play for play, share in zip(own, shares, strict=True) if share >= _LARGE_PART]
            alike = max(Counter(round(share, 6) for share in shares if share >= _LARGE_PART).values(), default=0)
            is_paid = statistics.fmean(shares) >= _LARGE_PART or alike >= max(2, _SOME_GUESSED * len(own))
            if is_paid and len(own) >= min(_MIN_TASKS, len(facts.by_task)) and len(paid) > len(best):
                best = paid
        if best:
            most = max(facts.score_share(play.score) for play in best)
            summary = f"{best[0].key} earns up to {most:.0%} of the score on {tasks_of(best)} without solving any"
            yield make_finding("partial-credit", "warn", summary, best, policy=policy, detail=actions_of)


def contradicting(facts: Facts) -> Found:
    """Find tasks on which an action with no score is paid more than one with the full score."""
    found = []
    for task_id, plays in facts.by_task.items():
        scored = [(play, play.reward) for play in plays if play.reward is not None and play.score is not None]
        solved = [reward for play, reward in scored if facts.full(play)]
        for play, reward in scored if solved and task_id not in facts.gold else ():
            if facts.score_share(play.score) <= EPS and reward > max(solved) + EPS:
                found.append(play)
    summary = f"actions with no score earn more than those with the full score on {tasks_of(found)}"
    yield from findings_of("reward-contradicts-score", "fail", summary, found, detail=actions_of)


def disagreeing(facts: Facts) -> Found:
    """Find episodes that gold's one action ended with the score of a failure, or did not end, paid after others."""
    found, going_on = [], []
    for task_id, gold in facts.gold.items():
        ended = [p for p in facts.by_task[task_id] if p.stop_reason == StopReason.TERMINATED and p.score is not None]
        failed = [facts.score_share(play.score) for play in ended if not any(step.reward > EPS for step in play.steps)]
        for play in ended if failed and facts.full(gold) and len(gold.steps) == 1 else ():
            is_right = play.action == gold.action and len(play.steps) > 1 and play.steps[-1].reward > EPS
            if is_right and facts.score_share(play.score) <= min(failed) + EPS:
                found.append(play)
        if facts.full(gold) and len(gold.steps) == 1 and gold.stop_reason == StopReason.TERMINATED:
            late = [play for play in facts.by_task[task_id] if play.policy == "late"]
            going_on += [p for p in late if any(s.reward > EPS and s.action == gold.action for s in p.steps[1:-1])]
    summary = f"gold's action earns in a later turn, and the score is that of a failure on {tasks_of(found)}"
    yield from findings_of("score-disagrees", "warn", summary, found, detail=actions_of)
    summary = "gold's action earns in a later turn and does not end the episode as it does in the first, on "
    yield from findings_of("gold-stops", "warn", summary + tasks_of(going_on), going_on, detail=actions_of)


def errors(facts: Facts) -> Found:
    """Find episodes that failed, by what failed."""
    failed = grouped((play for play in (*facts.plays, *facts.repeated) if play.error is not None), failure_of)
    failed.pop("gold-fails", None)
    for kind, plays in failed.items():
        summary = f"{counted(len(plays), 'episode')} on {tasks_of(plays)} failed"
        yield make_finding(kind, "warn" if kind == "infra-error" else "fail", summary, plays)


def failure_of(play: Play) -> str:
    """Return the kind of the finding about a failed play; empty if it did not fail."""
    error = play.error
    if error is None:
        return ""
    if play.failed_outside:
        return "infra-error"
    if error.where == "gold":
        return "gold-fails"
    if play.stop_reason == "step_timeout":
        return "step-timeout"
    is_data = error.kind == "data" or error.where in ("create", "reset", "prompt")
    return "data-error" if is_data else "hostile-error"


def missing_scores(facts: Facts) -> Found:
    """Find episodes that the environment ended without a score, if it scored others."""
    ended = [play for play in facts.plays if play.stop_reason == StopReason.TERMINATED]
    missing = [play for play in ended if play.score is None]
    if len(missing) < len(ended):
        summary = f"{len(missing)} of {len(ended)} episodes that the environment ended have no score"
        yield from findings_of("score-missing", "warn", summary, missing)


def ranges(facts: Facts) -> Found:
    """Find scores and rewards outside of their range."""
    scored = [p for p in facts.plays if any(not -EPS <= facts.score_share(s.score) <= 1 + EPS for s in p.steps)]
    yield from findings_of("score-range", "warn", f"scores outside [0, 1] on {tasks_of(scored)}", scored)
    if facts.reward_range is not None:
        low, high = facts.reward_range
        beyond = [p for p in facts.plays if p.reward is not None and not low - EPS <= p.reward <= high + EPS]
        summary = f"rewards outside [{low:g}, {high:g}] on {tasks_of(beyond)}"
        yield from findings_of("reward-range", "fail", summary, beyond)


def slow_steps(facts: Facts) -> Found:
    """Find policies that make steps much slower than the median."""
    steps: dict[str, list[float]] = defaultdict(list)
    for play in facts.plays:
        steps[play.key] += play.step_s
    usual = statistics.median([s for own in steps.values() for s in own] or [0.0])
    found: dict[str, list[Play]] = defaultdict(list)
    for play in facts.plays:
        own = statistics.median(steps[play.key] or [0.0])
        if own > max(_SLOW_S, _SLOW_FACTOR * usual) and max(play.step_s, default=0.0) >= own:
            found[play.policy].append(play)
    for policy, plays in found.items():
        summary = f"{policy} makes steps more than {_SLOW_FACTOR:g} times slower"
        yield make_finding("slow-steps", "warn", summary, plays, policy=policy)


def forged_tokens(facts: Facts) -> Found:
    """Find replies with more special tokens than replies to other policies in the same turn."""
    usual: dict[tuple[str, int], int] = {}
    for play in facts.plays:
        for turn, step in enumerate(play.steps if play.policy != "special_tokens" else ()):
            usual[play.task_id, turn] = max(step.num_special, usual.get((play.task_id, turn), 0))
    plays = [
        play
        for play in facts.plays
        if play.policy == "special_tokens"
        if any(step.num_special > usual.get((play.task_id, turn), 10**9) for turn, step in enumerate(play.steps))
    ]
    yield from findings_of("forged-tokens", "fail", f"text became special tokens on {tasks_of(plays)}", plays)


# --- tasks whose full score is unknown, and rewards of a repeated action, which need no full score --------------------


def unrated(facts: Facts) -> Found:
    """Find rewards for anything, for silence and for length where no full score is known, or none would show them."""
    alike = [*constant_rewards(facts)]
    yield from alike or [*paid_silence(facts), *paid_length(facts, facts.unrated, "fail")]
    rated = [task_id for task_id in facts.by_task if task_id not in {*facts.unrated, *facts.trivial}]
    yield from paid_length(facts, rated, "warn")


def constant_rewards(facts: Facts) -> Found:
    """Find tasks on which nearly every action earns the same positive reward, and none earns more."""
    found = []
    for task_id in facts.unrated:
        rewarded = facts.for_nothing(task_id)
        top = max((reward for _, reward in rewarded), default=0.0)
        alike = [play for play, reward in rewarded if reward >= top - EPS]
        if top > EPS and len({p.action for p in alike}) >= _MIN_ACTIONS and len(alike) >= _NEARLY_ALL * len(rewarded):
            found.append(alike[0])
    summary = f"any action earns the same reward on {tasks_of(found)}"
    yield from findings_of("reward-constant", "fail", summary, found)


def paid_silence(facts: Facts) -> Found:
    """Find tasks on which an empty action earns more than most other actions."""
    found = []
    for task_id in facts.unrated:
        floor, others = facts.floor(task_id), [reward for _, reward in facts.for_nothing(task_id)]
        if floor is not None and len(others) >= _MIN_ACTIONS and floor > statistics.median(others) + EPS:
            found += [p for p in facts.by_task[task_id] if p.policy == "null" and p.reward == floor][:1]
    is_paid = any(play.reward is not None and play.reward > EPS for play in found)
    summary = f"an empty action earns more than most other actions on {tasks_of(found)}"
    yield from findings_of("silence-pays", "fail" if is_paid else "warn", summary, found)


def paid_length(facts: Facts, task_ids: Sequence[str], severity: Severity) -> Found:
    """Find tasks on which the longer of two actions that do not solve it earns more, whatever they say."""
    found = []
    for task_id in task_ids:
        sizes = [
            (sum(len(step.action) for step in play.steps), reward, play)
            for play, reward in facts.for_nothing(task_id)
            if not facts.full(play) and play.policy not in _LONG  # many turns, not long actions
        ]
        sizes.sort(key=lambda each: each[0])
        pairs = [(one, other) for one, other in combinations(sizes, 2) if other[0] >= 2 * one[0]]
        longer = sum(other[1] > one[1] + EPS for one, other in pairs)
        if len({size for size, *_ in sizes}) < _MIN_ACTIONS or longer < _LONGER_EARNS * len(pairs):
            continue
        if sizes[-1][1] >= statistics.median(reward for _, reward, _ in sizes):
            found.append(max(sizes, key=lambda each: each[1])[2])
    summary = f"the longer an action, the larger its reward on {tasks_of(found)}"
    yield from findings_of("length-pays", severity, summary, found)


def repeats(facts: Facts) -> Found:
    """Find actions that earn again and again in an episode, by policy: calls and parts of gold on any task."""
    found: dict[str, list[Play]] = defaultdict(list)
    for task_id in facts.by_task:
        gold = facts.gold.get(task_id)
        most = gold.reward if gold is not None and gold.reward is not None else float("inf")
        farming = [(p, p.reward) for p in facts.by_task[task_id] if p.policy == "farm" and p.reward is not None]
        for play, reward in (*facts.for_nothing(task_id), *farming):
            is_call = play.policy in ("calls", "farm", "explore") or (
                play.policy == "again" and "<tool_call>" in play.steps[0].action
            )
            is_judged = task_id not in facts.unrated and not is_call
            is_below = reward <= most + EPS  # another finding has those above
            if not is_judged and is_below and not facts.full(play) and _is_paid_again(play):
                found[play.policy].append(play)
    for policy, plays in found.items():
        best = max(plays, key=lambda play: play.reward or 0.0)
        fails = policy == "calls" and best.task_id in facts.unrated
        summary = f"the same actions earn a reward again and again: {best.reward:g} in {len(best.steps)} turns by "
        summary += f"{best.key}, on {tasks_of(plays)}"
        yield make_finding("repeat-pays", "fail" if fails else "warn", summary, [best, *plays], policy=policy)


def _is_paid_again(play: Play) -> bool:
    """Return True if an action is repeated in an episode and earns nearly each time, and others do not take it back."""
    rewards = [step.reward for step in play.steps]
    if sum(rewards) < sum(reward for reward in rewards if reward > 0) / 2:
        return False
    earned: dict[str, list[bool]] = defaultdict(list)
    for step in play.steps:
        earned[step.action].append(step.reward > EPS)
    return any(sum(paid) >= max(_MIN_REPEATS, _NEARLY_ALL * (len(paid) - 1)) for paid in earned.values())


def limits_passed(facts: Facts) -> Found:
    """Find tools that answer more calls in one action than in a turn each, and counts of what is left below 0."""
    passed = []
    below = [play for play in facts.plays if any(_BELOW_0.search(step.observation) for step in play.steps)]
    summary = f"an observation says that less than nothing is left, on {tasks_of(below)}"
    yield from findings_of("limit-passed", "warn", summary, below, policy="below_zero", detail=actions_of)
    for plays in facts.by_task.values():
        by_key = {play.key: play for play in plays if play.steps}
        if "farm/turn_1" in by_key and "farm/in_one_action" in by_key:
            one_by_one = by_key["farm/turn_1"]
            replies = [step.observation for step in one_by_one.steps]
            all_at_once = by_key["farm/in_one_action"].steps[0].observation
            # The last reply is the end, which is that to one too many only before the turns are over.
            if one_by_one.stop_reason != StopReason.TERMINATED or len(replies) >= facts.max_turns:
                replies.pop()
            is_limited = len(replies) > 2 and replies[0] == replies[1] and replies[0] not in replies[-1]
            if is_limited and all_at_once.count(replies[0]) >= NUM_TOGETHER:
                passed.append(by_key["farm/in_one_action"])
    summary = f"{NUM_TOGETHER} equal calls in one action have the reply that fewer have in a turn each, on "
    yield from findings_of("limit-passed", "warn", summary + tasks_of(passed), passed)


JUDGES: Sequence[Callable[[Facts], Found]] = (
    empty_actions, gold_plays, attacks, guesses, answers_of_others, trivial_tasks, wrong_answers, refused_lengths,
    no_values, every_id, ungraded_calls, beyond_gold, scored_part, contradicting, disagreeing, errors, missing_scores,
    ranges, slow_steps, forged_tokens, unrated, repeats, limits_passed,
)  # fmt: skip
"""In the order of their findings."""
