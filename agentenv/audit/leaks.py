"""Answers that the environment gives away: in its prompt, or in what it says before the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentenv.audit.answers import Needle, needles, normal
from agentenv.audit.findings import Finding, Severity, finding
from agentenv.audit.plays import Play
from agentenv.types import Task

_MIN_TASKS, _MIN_SHARE = 3, 0.5
"""Where some needles are weak: so many tasks, and this share of all, must have their own answer in the text."""
_CONTROL = 0.5
"""Other rows' answers may stand in the text at most so often, as a share of its own."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A text of the environment on one task, and what a policy had read and said before it."""

    play: Play
    said: str
    known: str


def leaks(
    plays: Sequence[Play], tasks: Mapping[str, Task], golds: Mapping[str, str | None], shows_gold: frozenset[str]
) -> list[Finding]:
    """The answers that feedback and prompts have in them.

    Args:
        plays: all plays.
        tasks: by id.
        golds: gold's first action by task.
        shows_gold: policies that were shown gold, whose actions are no evidence.
    """
    answers = {task_id: needles(task.label, golds.get(task_id)) for task_id, task in tasks.items()}
    heard = [text for play in plays if play.policy not in shows_gold for text in _feedback(play)]
    first = list({play.task_id: _Text(play, normal(play.prompt), "") for play in reversed(plays)}.values())
    found = []
    told = _leaking(heard, answers)
    if told:
        found.append(_told("answer-in-feedback", "fail", "in what the environment said", told))
    prompted = _leaking(first, answers)
    if prompted:
        share = len({text.play.task_id for text in prompted}) / len(first)
        severity: Severity = "warn" if share >= _MIN_SHARE else "note"
        found.append(_told("answer-in-prompt", severity, "in the prompt", prompted))
    return found


def _told(kind: str, severity: Severity, where: str, texts: Sequence[_Text]) -> Finding:
    num = len({text.play.task_id for text in texts})
    summary = f"{num} {'task has its' if num == 1 else 'tasks have their'} answer {where}"
    return finding(kind, severity, summary, [text.play for text in texts], detail=_excerpt(texts[0]))


def _excerpt(text: _Text) -> str:
    return text.said if len(text.said) <= 200 else f"{text.said[:200]}…"


def _feedback(play: Play) -> list[_Text]:
    known, texts = normal(play.prompt), []
    for step in play.steps:
        known += f" {normal(step.action)}"
        if step.observation:
            said = normal(step.observation)
            texts.append(_Text(play, said, known))
            known += f" {said}"
    return texts


def _leaking(texts: Sequence[_Text], answers: Mapping[str, list[Needle]]) -> list[_Text]:
    """The texts that have their task's answer, where that is no chance."""
    strong = [text for text in texts if _has(text, answers[text.play.task_id], strong=True)]
    strong = [text for text in strong if not _of_all(text, texts, answers)]
    many = _more_than_chance(texts, answers)
    return list({id(text): text for text in [*strong, *many]}.values())


def _has(text: _Text, own: Sequence[Needle], *, strong: bool = False) -> bool:
    """Whether it has one of the answers, or with `strong` one of the strong ones, that was not known before."""
    return any(needle.strong >= strong and needle.within(text.said) and not needle.within(text.known) for needle in own)


def _of_all(text: _Text, texts: Sequence[_Text], answers: Mapping[str, list[Needle]]) -> bool:
    """Whether the same words are said on tasks with other answers: a fixed sentence that tells nothing."""
    own = _texts(answers[text.play.task_id])
    return any(other.said == text.said and not own & _texts(answers[other.play.task_id]) for other in texts)


def _more_than_chance(texts: Sequence[_Text], answers: Mapping[str, list[Needle]]) -> list[_Text]:
    """Texts with their own answer, where that is so on most tasks, and where others' answers stand less often."""
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
    if _share_of_others(by_task, answers) > _CONTROL * num / len(by_task):
        return []
    return [text for own in hits.values() for text in own]


def _share_of_others(by_task: Mapping[str, Sequence[_Text]], answers: Mapping[str, list[Needle]]) -> float:
    """How often a task's texts have another task's answer that is not its own."""
    ids, num, found = list(by_task), 0, 0
    for index, task_id in enumerate(ids):
        for step in (1, 2, 3):
            other = ids[(index + step) % len(ids)]
            if not _texts(answers[task_id]) & _texts(answers[other]):
                num += 1
                found += any(_has(text, answers[other]) for text in by_task[task_id])
    return found / num if num else 0.0


def _texts(own: Sequence[Needle]) -> set[str]:
    return {needle.text for needle in own}
