"""Finds answers that the environment reveals in its prompt or in its feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentenv.core.types import Task
from agentenv.testing.audit.answers import Needle, needles, normal
from agentenv.testing.audit.episodes import Play
from agentenv.testing.audit.findings import AuditFinding, Severity, make_finding

_MIN_TASKS, _MIN_SHARE = 3, 0.5
"""With weak needles, at least this many tasks, and this share of all, must have their own answer in the text."""
_CONTROL = 0.5
"""Answers of other rows may occur at most this often, relative to the row's own answer."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A text of the environment on one task, and all text of the episode before it."""

    play: Play
    text: str
    known: str


def find_leaks(
    plays: Sequence[Play], tasks: Mapping[str, Task], golds: Mapping[str, str | None], shows_gold: frozenset[str]
) -> list[AuditFinding]:
    """Return findings about answers in feedback and prompts.

    Args:
        plays: all plays.
        tasks: by id.
        golds: first gold action by task.
        shows_gold: policies that see gold, whose actions are not evidence.
    """
    answers = {task_id: needles(task.label, golds.get(task_id)) for task_id, task in tasks.items()}
    for play in plays:
        if play.key == "gold" and len(play.steps) > 1 and isinstance(tasks[play.task_id].label, list | tuple):
            answers[play.task_id] = []  # a list of moves, not of right answers
    feedback = []
    for play in plays:
        if play.policy in shows_gold:
            continue
        known = normal(play.prompt)
        for step in play.steps:
            known += f" {normal(step.action)}"
            if step.observation:
                text = normal(step.observation)
                feedback.append(_Text(play, text, known))
                known += f" {text}"
    first = list({play.task_id: _Text(play, normal(play.prompt), "") for play in reversed(plays)}.values())
    found = []
    leaking = _leaking(feedback, answers)
    if leaking:
        found.append(_leak_finding("answer-in-feedback", "fail", "in the feedback", leaking))
    prompted = _leaking(first, answers)
    if prompted:
        share = len({text.play.task_id for text in prompted}) / len(first)
        severity: Severity = "warn" if share >= _MIN_SHARE else "note"
        found.append(_leak_finding("answer-in-prompt", severity, "in the prompt", prompted))
    return found


def _leak_finding(kind: str, severity: Severity, where: str, texts: Sequence[_Text]) -> AuditFinding:
    num = len({text.play.task_id for text in texts})
    summary = f"{num} {'task has its' if num == 1 else 'tasks have their'} answer {where}"
    detail = texts[0].text if len(texts[0].text) <= 200 else f"{texts[0].text[:200]}…"
    return make_finding(kind, severity, summary, [text.play for text in texts], detail=detail)


def _leaking(texts: Sequence[_Text], answers: Mapping[str, list[Needle]]) -> list[_Text]:
    """Return the texts that contain their task's answer, if that is not by chance."""
    strong, common = [], _common(texts, answers)
    for text in texts:
        own = [needle for needle in answers[text.play.task_id] if needle.text not in common]
        if _has(text, own, strong=True):
            # A text that also occurs on a task with another answer reveals nothing.
            same = [other.play.task_id for other in texts if other.text == text.text]
            if all(_texts(own) & _texts(answers[task_id]) for task_id in same):
                strong.append(text)
    many = _more_than_chance(texts, answers)
    return list({id(text): text for text in [*strong, *many]}.values())


def _common(texts: Sequence[_Text], answers: Mapping[str, list[Needle]]) -> set[str]:
    """Return the strong answers that texts on tasks with other answers contain, too."""
    strong = {needle.text: needle for own in answers.values() for needle in own if needle.strong}
    of_task = {task_id: _texts(own) for task_id, own in answers.items()}
    different = {(text.play.task_id, text.text): text for text in texts}
    return {
        each
        for each, needle in strong.items()
        if any(each not in of_task[task_id] and _has(text, [needle]) for (task_id, _), text in different.items())
    }


def _has(text: _Text, own: Sequence[Needle], *, strong: bool = False) -> bool:
    """Return True if the text contains an answer (with `strong`, a strong one) that was not in the text before it."""
    return any(needle.strong >= strong and needle.within(text.text) and not needle.within(text.known) for needle in own)


def _more_than_chance(texts: Sequence[_Text], answers: Mapping[str, list[Needle]]) -> list[_Text]:
    """Return the texts with their own answer, if most tasks have such texts and answers of others are rarer."""
    by_task: dict[str, list[_Text]] = {}
    for text in texts:
        by_task.setdefault(text.play.task_id, []).append(text)
    by_task = {task_id: own for task_id, own in by_task.items() if answers[task_id]}
    if len(by_task) < _MIN_TASKS:
        return []
    hits = {task_id: [t for t in own if _has(t, answers[task_id])] for task_id, own in by_task.items()}
    num = sum(bool(own) for own in hits.values())
    distinct = {needle.text for task_id, own in hits.items() if own for needle in answers[task_id]}
    if num < max(_MIN_TASKS, _MIN_SHARE * len(by_task)) or len(distinct) < 2:
        return []
    # How often do the texts of a task contain the answer of another task?
    ids, num_others, found = list(by_task), 0, 0
    for index, task_id in enumerate(ids):
        for step in (1, 2, 3):
            other = ids[(index + step) % len(ids)]
            if not _texts(answers[task_id]) & _texts(answers[other]):
                num_others += 1
                found += any(_has(text, answers[other]) for text in by_task[task_id])
    if num_others and found / num_others > _CONTROL * num / len(by_task):
        return []
    return [text for own in hits.values() for text in own]


def _texts(own: Sequence[Needle]) -> set[str]:
    return {needle.text for needle in own}
