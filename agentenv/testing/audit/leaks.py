"""Finds answers that the environment reveals in its prompt or in its feedback."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentenv.testing.audit.answers import Needle, normal
from agentenv.testing.audit.episodes import Play
from agentenv.testing.audit.facts import Facts
from agentenv.testing.audit.findings import AuditFinding, Severity, make_finding
from agentenv.testing.audit.policies import is_answer

_MIN_TASKS, _MIN_SHARE = 3, 0.5
"""With weak needles, at least this many tasks, and this share of all, must have their own answer in the text."""
_TOOL_NAME = re.compile(r'<tool_call>\s*\{"name": "([^"]*)"')
_ATTEMPT = re.compile(r"\b(?:submit|answer|guess|check|verify|validate|grade|test|try|attempt|propose|solve)")
"""Names of tools that judge an attempt."""
_VERDICT = re.compile(r"wrong|expected|correct|right|should|unknown|invalid|instead|hint|solution|the answer|error")
"""Words before an answer that make it a verdict on the call."""
_NEAR = 80
_COPIED = 0.8
"""Share of the tasks on which the word that stands before the answer must be the same."""
_MARKS = ".,;:!?\"'()[]"
_BEFORE_ANSWER, _SHORTEST_QUESTION = " =:->", 8
_SHORTEST_WORD = 4
"""Minimum number of letters of an answer that one text may reveal."""
_CONTROL = 0.5
"""Answers of other rows may occur at most this often, relative to the row's own answer."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A text of the environment on one task, and all text of the episode before it."""

    play: Play
    text: str
    known: str
    action: str = ""
    """The action that the text answers; empty for a prompt."""


def find_leaks(facts: Facts) -> list[AuditFinding]:
    """Return findings about answers in feedback and prompts."""
    plays, answers = facts.plays, dict[str, list[Needle]]()
    for task_id, task in facts.tasks.items():
        gold = facts.gold.get(task_id)
        # A list of moves is not one of right answers.
        is_moves = gold is not None and len(gold.steps) > 1 and isinstance(task.label, list | tuple)
        answers[task_id] = [] if is_moves else facts.needles_of(task_id)
    feedback = []
    for play in plays:
        if facts.kinds[play.key] in ("gold", "wrong"):
            continue
        known = normal(play.prompt)
        for step in play.steps:
            known += f" {normal(step.action)}"
            if step.observation:
                text = normal(step.observation)
                feedback.append(_Text(play, text, known, step.action))
                known += f" {text}"
    first = list({play.task_id: _Text(play, normal(play.prompt), "") for play in reversed(plays)}.values())
    found, leaking = list[AuditFinding](), _leaking(feedback, answers)
    told = [text for text in leaking if _is_told(text, answers[text.play.task_id])]
    if told:
        found.append(_leak_finding("answer-in-feedback", "fail", "in the feedback", told))
    elif leaking:
        found.append(_leak_finding("answer-in-feedback", "note", "in what a tool looks up", leaking))
    elif hinted := [text for text in _hinted(feedback, answers) if _is_told(text, answers[text.play.task_id])]:
        found.append(_leak_finding("answer-in-feedback", "warn", "in the feedback", hinted))
    if solved := _solved(first, answers):
        found.append(_leak_finding("answer-in-prompt", "warn", "in a solved example of the same question", solved))
    copied = _copied(first, answers)
    prompted = [text for text in copied or _leaking(first, answers) if text not in solved]
    if prompted:
        share = len({text.play.task_id for text in prompted}) / len(first)
        is_fixed = _earning(facts, prompted) and (bool(copied) or _is_at_one_place(prompted, answers))
        severity: Severity = "warn" if share >= _MIN_SHARE and is_fixed else "note"
        found.append(_leak_finding("answer-in-prompt", severity, "in the prompt", prompted))
    return found


def _solved(texts: Sequence[_Text], answers: Mapping[str, list[Needle]]) -> list[_Text]:
    """Return the prompts in which the last question, which other tasks do not ask, is also that of a solved example."""
    by_text = [(text, [normal(line).strip(_MARKS) for line in text.play.prompt.splitlines()]) for text in texts]
    by_text = [(text, [line for line in lines if line]) for text, lines in by_text]
    last = Counter(lines[-1] for _, lines in by_text if lines)
    found = []
    for text, lines in by_text:
        asked = lines[-1] if lines and last[lines[-1]] == 1 else "".join(lines[-2:-1])  # "A:", below the question
        own = {needle.text for needle in answers[text.play.task_id] if len(needle.text) >= _SHORTEST_WORD}
        for place, line in enumerate(lines[:-2] if lines and asked != lines[-1] else lines[:-1]):
            said = line.removeprefix(asked) if line != asked else lines[place + 1].partition(":")[2]
            if (
                len(asked) >= _SHORTEST_QUESTION
                and line.startswith(asked)
                and said.strip(_BEFORE_ANSWER + _MARKS) in own
            ):
                found.append(text)
                break
    return found


def _is_told(text: _Text, own: Sequence[Needle]) -> bool:
    """Return True if a reply tells the answer after plain text, from a tool that takes answers, or as a verdict.

    A tool may look something up, and what it finds may be the answer.
    """
    names = _TOOL_NAME.findall(text.action)
    if not names or any(_ATTEMPT.search(name.replace("_", " ")) for name in names):
        return True
    before = [text.text[: text.text.find(needle.text)] for needle in own if needle.within(text.text)]
    return any(_VERDICT.search(said[-_NEAR:]) for said in before)


def _earning(facts: Facts, texts: Sequence[_Text]) -> bool:
    """Return True if answers in prompts earn the full score on most tasks; a label may be only a key, or a size."""
    ids = {text.play.task_id for text in texts}
    earning = {play.task_id for play in facts.plays if play.policy == "label" and facts.full(play)} | {*facts.unrated}
    earning |= {
        task_id
        for task_id, gold in facts.gold.items()
        if len(gold.steps) == 1 and facts.full(gold) and is_answer(gold.action, facts.tasks[task_id].label)
    }
    return len(ids & earning) >= _MIN_SHARE * len(ids)


def _is_at_one_place(texts: Sequence[_Text], answers: Mapping[str, list[Needle]]) -> bool:
    """Return True if the same word stands before the answer on most tasks, so that no reading is needed to copy it."""
    words = []
    for text in texts:
        own = next((needle.text for needle in answers[text.play.task_id] if needle.within(text.text)), "")
        words.append((["", *text.text.partition(own)[0].split()])[-1])
    return max(Counter(words).values()) > _MIN_SHARE * len(texts)


def _copied(texts: Sequence[_Text], answers: Mapping[str, list[Needle]]) -> list[_Text]:
    """Return the prompts of most tasks in which the same word stands before the answer, where it occurs first."""
    found: dict[str, dict[str, _Text]] = {}
    for text in texts:
        words = text.text.split()
        for needle in answers[text.play.task_id]:
            size = len(needle.text.split())
            for place, word in enumerate(words[:-size]):
                said = " ".join(words[place + 1 : place + 1 + size]).strip(_MARKS)
                if said == needle.text and place == words.index(word):
                    found.setdefault(word, {})[text.play.task_id] = text
    for own in sorted(found.values(), key=len, reverse=True)[:1]:
        golds = {min(_texts(answers[task_id]), default="") for task_id in own}
        if len(own) >= max(_MIN_TASKS, _COPIED * len(texts)) and len(golds) > 1:
            return [*own.values()]
    return []


def _leak_finding(kind: str, severity: Severity, where: str, texts: Sequence[_Text]) -> AuditFinding:
    num = len({text.play.task_id for text in texts})
    summary = f"{num} {'task has its' if num == 1 else 'tasks have their'} answer {where}"
    detail = texts[0].text if len(texts[0].text) <= 200 else f"{texts[0].text[:200]}…"
    return make_finding(kind, severity, summary, [text.play for text in texts], detail=detail)


def _leaking(texts: Sequence[_Text], answers: Mapping[str, list[Needle]]) -> list[_Text]:
    """Return the texts that contain their task's answer, if that is not by chance."""
    known = {needle.text: needle for own in answers.values() for needle in own if needle.strong}
    of_task = {task_id: _texts(own) for task_id, own in answers.items()}
    different = {(text.play.task_id, text.text): text for text in texts}
    common = {  # in texts on tasks with other answers, too
        each
        for each, needle in known.items()
        if any(each not in of_task[task_id] and _has(text, [needle]) for (task_id, _), text in different.items())
    }
    tasks_of_text: dict[str, set[str]] = {}
    for task_id, said in different:
        tasks_of_text.setdefault(said, set()).add(task_id)
    strong = []
    for text in texts:
        own = [needle for needle in answers[text.play.task_id] if needle.text not in common]
        # A text that also occurs on a task with another answer reveals nothing.
        is_own = all(_texts(own) & of_task[task_id] for task_id in tasks_of_text[text.text])
        if is_own and _has(text, own, strong=True):
            strong.append(text)
    many = _more_than_chance(texts, answers)
    return list({id(text): text for text in [*strong, *many]}.values())


def _has(text: _Text, own: Sequence[Needle], *, strong: bool = False) -> bool:
    """Return True if the text contains an answer (with `strong`, a strong one) that was not in the text before it."""
    return any(needle.strong >= strong and needle.within(text.text) and not needle.within(text.known) for needle in own)


def _hinted(texts: Sequence[_Text], answers: Mapping[str, list[Needle]]) -> list[_Text]:
    """Return the texts with a short word that is the answer, in whose place other tasks have other words."""
    found = []
    for text in texts:
        for needle in answers[text.play.task_id]:
            is_word = needle.text.isalpha() and len(needle.text) >= _SHORTEST_WORD
            if not is_word or not _has(text, [needle]):
                continue
            before = text.text.partition(needle.text)[0]
            others = [each.text for each in texts if needle.text not in _texts(answers[each.play.task_id])]
            is_alike = before and any(other.startswith(before) for other in others)
            if is_alike and not any(needle.within(other) for other in others):
                found.append(text)
    return found


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
