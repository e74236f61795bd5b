r"""Read the verdict of a judge's reply, strictly: its last line, such as "Verdict: YES", or the value of its JSON.

"NO. I cannot say yes" is a no; "I cannot say yes" is not a verdict. Thinking does not count. Markup, `[[A]]`,
`\boxed{7}` and the usual words before a verdict are understood.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

from agentenv.rewards.rules.text import final_text

_MAX_LINE, _MAX_JSON = 200, 20_000
_WORDS = r"(?:(?:final|my|the|overall) ){0,2}(?:verdict|judge?ment|decision|rating|score|ranking|violations?|winner)"
_ENDS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"
_MARKUP = rf"(?:[^\w{_ENDS}]|_)*+"
"""Everything but words, up to the end of the line; possessive, so that no text is scanned twice."""
_SHORT = rf"(?:yes|no|tie|a|b|c){_MARKUP}(?:[{_ENDS}]|\Z)"
_LINE_END = re.compile(rf"[{_ENDS}]+")
_VERDICT_LINE = re.compile(
    rf"{_MARKUP}(?:(?:criterion )?\d{{1,3}}[.):]{{1,2}} )?{_MARKUP}(?:{_WORDS}(?![a-z0-9])|boxed\b|{_SHORT})",
    re.IGNORECASE,
)
_SAYS = rf"(?:{_WORDS}|(?:(?:final|my|the|overall) ){{0,2}}(?:answer|conclusion|preference|choice))"
_HEAD = rf"(?:{_SAYS} ?(?:is ?)?(?:[:=：]|[–—-](?= ))? ?)?"
_OPTION = r"(?:(?:response|answer|assistant|option) )?(a|b)"
_NUMBER = r"(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)"
_JSON_VERDICT = re.compile(r'\s*+(?:```(?:json)?\s*+)?\{.*"(?:verdict|winner|score|rating|ranking|[0-9]{1,3})"')
_BARE_VERDICT = re.compile(rf"{_WORDS}(?![a-z0-9]).*|{_HEAD}(?:yes|no|tie|c|{_OPTION})")
"""What the readers take for a verdict at the end of a reply, in the form of `_bare`; but for numbers, which answers
consist of."""
_BULLET = re.compile(r"\A(?:[->•–—] ){1,4}")
_MARKS = str.maketrans("", "", "*_`#\"'[](){}$")
_FIRST_WORD = re.compile(r"[\s*_`#\"'(\[]{0,16}(yes|no)[*_`\"')\]]{0,6}(?:[.,;:!\n]|$)", re.IGNORECASE)
_TIE_IN_BRACKETS = re.compile(r"\[\[[Cc]\]\][\s*_`.!]*\Z")
_LAST_WORD = re.compile(r"[.,;:!?\u2026-] ?(yes|no)\Z")
"""A verdict at the end of the last line, as a sentence or half of one; it retracts another one before it."""
_THOUGHT = re.compile(r"\s{0,16}(?:<(?:thinking|thought|reasoning|analysis|reflection|scratchpad)>|\[think\])", re.I)
_LISTED = re.compile(r"(?:[-*•] )?\**(?:criterion )?\(?([0-9]{1,3})\**[.):]{1,2}\**\s{1,4}(\S.{0,100})", re.IGNORECASE)


def mark_verdicts(text: str) -> str:
    """Return the text with lines that look like verdicts marked as quoted."""
    parts, start = [], 0
    begins = [0, *(end.end() for end in _LINE_END.finditer(text))]
    for begin, end in pairwise([*begins, len(text)]):
        is_read = end - begin <= _MAX_LINE and _BARE_VERDICT.fullmatch(_bare(text[begin:end]))
        if is_read or _VERDICT_LINE.match(text, begin) or _JSON_VERDICT.match(text, begin, end):
            parts += [text[start:begin], "[quoted] "]
            start = begin
    return "".join([*parts, text[start:]])


def read_yes_or_no(reply: str) -> bool | None:
    """Return the verdict at the end or start of a reply ("No, yesterday …"); None if it has none, or both.

    A reply that ends with another verdict ("Yes … Verdict: unclear") has none.
    """
    conclusion = _conclusion(reply)
    last = re.fullmatch(rf"{_HEAD}(yes|no)", conclusion)
    if last is None and re.match(rf"{_WORDS}\b", conclusion):
        return None
    first = _FIRST_WORD.match(_without_thinking(reply))
    back = _LAST_WORD.search(conclusion) if first else None
    found = {each[1].lower() for each in (last, first, back) if each}
    return found == {"yes"} if len(found) == 1 else None


def read_preference(reply: str) -> float | None:
    """Return the points of the first of two responses: 1.0 for "A", 0.0 for "B", 0.5 for "TIE" or "[[C]]"; else None.

    "[[C]]" is MT-bench's form of a tie, and needs its brackets.
    """
    conclusion = _conclusion(reply)
    if re.fullmatch(rf"{_HEAD}c", conclusion) and _TIE_IN_BRACKETS.search(_without_thinking(reply)):
        return 0.5
    found = re.fullmatch(rf"{_HEAD}(?:{_OPTION}|tie)", conclusion)
    return None if found is None else {"a": 1.0, "b": 0.0, None: 0.5}[found[1]]


def read_score(reply: str, low: float, high: float) -> float | None:
    r"""Return a reply's number from `low` to `high`: "Score: 7/10", "[[7]]", `\boxed{7}`; else None."""
    found = re.fullmatch(rf"{_HEAD}{_NUMBER}(?: ?(?:/|out of) ?{_NUMBER})?", _conclusion(reply))
    if found is None or (found[2] is not None and float(found[2]) != high):
        return None
    return float(found[1]) if low <= float(found[1]) <= high else None


def read_ranking(reply: str, number: int) -> list[int] | None:
    """Return a reply's ranking, the best first: "Ranking: [2] > [1]"; None unless it names each of 1..`number` once."""
    parts = re.sub(rf"^{_HEAD}", "", _conclusion(reply, max_chars=_MAX_LINE + 8 * number)).split(">")
    found = [int(part) for part in parts if re.fullmatch(r" ?[0-9]{1,4} ?", part)]
    return found if len(found) == len(parts) and sorted(found) == list(range(1, number + 1)) else None


def read_list(reply: str, number: int) -> dict[int, str] | None:
    """Return a reply's verdict on each of 1..`number`; None unless it names each once.

    The verdicts are its last lines, one for each ("2: YES", "3. 4/5"), or one JSON object ({"1": "yes", "2": 4}).
    """
    text = _without_thinking(reply).strip()
    found = _json_of(text)
    if found is None:
        lines = [line.strip() for line in text.removesuffix("```").split("\n") if line.strip()][-number:]
        matches = [_LISTED.fullmatch(line) for line in lines]
        pairs = [(int(match[1]), match[2]) for match in matches if match]
    else:
        plain = [(key, value) for key, value in found if isinstance(value, str | int | float) and key.isdecimal()]
        pairs = [(int(key), str(value)) for key, value in plain if len(key) <= 3]
        if len(pairs) < len(found):
            return None
    verdicts = dict(pairs)
    return verdicts if len(pairs) == number and verdicts.keys() == set(range(1, number + 1)) else None


def _without_thinking(reply: str) -> str:
    """Return a reply without its thinking; empty if the thinking has no end."""
    text = final_text(reply) or ""
    opened = _THOUGHT.match(text)
    if opened is None:
        return text
    tag = opened[0].strip()
    _, closed, rest = text.rpartition(f"{tag[0]}/{tag[1:]}")
    return rest if closed else ""


def _conclusion(reply: str, *, max_chars: int = _MAX_LINE) -> str:
    """Return a reply's last line, or the value of its JSON, in lower case and without markup."""
    text = _without_thinking(reply).strip()
    found = _json_of(text)
    if found is None:
        line = text.rpartition("\n")[2]
    else:  # the verdict of an object that names exactly one
        given = [value for name, value in found if name in ("verdict", "winner", "score", "rating", "ranking")]
        line = str(given[0]) if len(given) == 1 and isinstance(given[0], str | int | float) else ""
    if len(line) > max_chars:
        return ""
    return _bare(line)


def _bare(line: str) -> str:
    """Return a line in lower case, without markup."""
    line = line.replace("\\boxed", "").replace("\\text", "").translate(_MARKS)
    return _BULLET.sub("", " ".join(line.lower().split())).strip(" .!。！")


def _json_of(text: str) -> list[tuple[str, Any]] | None:
    """Return the members of the JSON object that a text is, fenced or not; None if it is not an object.

    The list is empty if it cannot be read. Nested objects are lists of members too.
    """
    unfenced = text.removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    if not unfenced.startswith("{"):
        return None
    try:
        found = json.loads(unfenced, object_pairs_hook=list) if len(unfenced) <= _MAX_JSON else []
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []
