r"""What a judge's reply commits to: its last line, "Verdict: YES", or the value of its JSON. Strict: else nothing.

"NO. I cannot say yes" is a no, "I cannot say yes" no verdict. What was thought does not count. Markup, `[[A]]`,
`\boxed{7}` and the usual words before a verdict are understood.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from typing import Any

from agentenv.rewards.text import final_text

_MAX_LINE, _MAX_JSON = 200, 20_000
_WORDS = r"(?:(?:final|my|the|overall) ){0,2}(?:verdict|judge?ment|decision|rating|score|ranking|violations?|winner)"
_ENDS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"
_MARKUP = rf"(?:[^\w{_ENDS}]|_)*+"
"""Whatever is no word, up to the end of the line; all of it, so that no text is gone through twice."""
_SHORT = rf"(?:yes|no|tie|a|b|c){_MARKUP}(?:[{_ENDS}]|\Z)"
_LINE_END = re.compile(rf"[{_ENDS}]+")
_VERDICT_LINE = re.compile(
    rf"{_MARKUP}(?:(?:criterion )?\d{{1,3}}[.):]{{1,2}} )?{_MARKUP}(?:{_WORDS}(?![a-z0-9])|boxed\b|{_SHORT})",
    re.IGNORECASE,
)
_SAYS = rf"(?:{_WORDS}|(?:(?:final|my|the|overall) ){{0,2}}(?:answer|conclusion|preference|choice))"
_HEAD = rf"(?:{_SAYS} ?(?:is ?)?(?:[:=：]|[–—-](?= ))? ?)?"
_NUMBER = r"(-?\d{1,9}(?:\.\d{1,9})?)"
_BULLET = re.compile(r"\A(?:[->•–—] ){1,4}")
_MARKS = str.maketrans("", "", "*_`#\"'[](){}$")
_FIRST_WORD = re.compile(r"[\s*_`#\"'(\[]{0,16}(yes|no)[*_`\"')\]]{0,6}(?:[.,;:!\n]|$)", re.IGNORECASE)
_TIE_IN_BRACKETS = re.compile(r"\[\[[Cc]\]\][\s*_`.!]*\Z")
_LAST_WORD = re.compile(r"[.,;:!?\u2026-] ?(yes|no)\Z")
"""Of a committed line: a sentence or half of one that is a verdict, which takes back another one before it."""
_THOUGHT = re.compile(r"\s{0,16}(?:<(?:thinking|thought|reasoning|analysis|reflection|scratchpad)>|\[think\])", re.I)
_LISTED = re.compile(r"(?:[-*•] )?\**(?:criterion )?\(?([0-9]{1,3})\**[.):]{1,2}\**\s{1,4}(\S.{0,100})", re.IGNORECASE)


def marked(text: str) -> str:
    """The text, with lines that look like verdicts marked as quoted."""
    parts, start = [], 0
    for begin in chain((0,), (end.end() for end in _LINE_END.finditer(text))):
        if _VERDICT_LINE.match(text, begin):
            parts += [text[start:begin], "[quoted] "]
            start = begin
    return "".join([*parts, text[start:]])


def yes_or_no(reply: str) -> bool | None:
    """The verdict that a reply ends or begins with ("No, yesterday …"); None where it has none, or both ("No. Yes.").

    One that ends with a verdict of its own making ("Yes … Verdict: unclear") has none.
    """
    committed = _committed(reply)
    last = re.fullmatch(rf"{_HEAD}(yes|no)", committed)
    if last is None and re.match(rf"{_WORDS}\b", committed):
        return None
    first = _FIRST_WORD.match(_spoken(reply))
    back = _LAST_WORD.search(committed) if first else None
    found = {each[1].lower() for each in (last, first, back) if each}
    return found == {"yes"} if len(found) == 1 else None


def preferred(reply: str) -> float | None:
    """What the first of two responses gets: 1.0 for "A", 0.0 for "B", 0.5 for "TIE" or "[[C]]"; else None.

    "[[C]]" is MT-bench's for a tie, and stands for one with its brackets alone.
    """
    committed = _committed(reply)
    if re.fullmatch(rf"{_HEAD}c", committed) and _TIE_IN_BRACKETS.search(_spoken(reply)):
        return 0.5
    found = re.fullmatch(rf"{_HEAD}(?:(?:(?:response|answer|assistant|option) )?(a|b)|tie)", committed)
    return None if found is None else {"a": 1.0, "b": 0.0, None: 0.5}[found[1]]


def scored(reply: str, low: float, high: float) -> float | None:
    r"""The number from `low` to `high` that a reply commits to: "Score: 7/10", "[[7]]", `\boxed{7}`; else None."""
    found = re.fullmatch(rf"{_HEAD}{_NUMBER}(?: ?(?:/|out of) ?{_NUMBER})?", _committed(reply))
    if found is None or (found[2] is not None and float(found[2]) != high):
        return None
    return float(found[1]) if low <= float(found[1]) <= high else None


def ranking(reply: str, number: int) -> list[int] | None:
    """The ranking of a reply that names each of 1..`number` once, the best first: "Ranking: [2] > [1]"; else None."""
    parts = re.sub(rf"^{_HEAD}", "", _committed(reply, max_chars=_MAX_LINE + 8 * number)).split(">")
    found = [int(part) for part in parts if re.fullmatch(r" ?[0-9]{1,4} ?", part)]
    return found if len(found) == len(parts) and sorted(found) == list(range(1, number + 1)) else None


def listed(reply: str, number: int) -> dict[int, str] | None:
    """What a reply says of each of 1..`number`, where it names each once; else None.

    Its last lines do, one for each ("2: YES", "3. 4/5"), or it is one JSON object ({"1": "yes", "2": 4}).
    """
    text = _spoken(reply).strip()
    found = _json_of(text)
    pairs = _line_pairs(text.removesuffix("```"), number) if found is None else _json_pairs(found)
    said = dict(pairs)
    return said if len(pairs) == number and said.keys() == set(range(1, number + 1)) else None


def _spoken(reply: str) -> str:
    """A reply without what was thought; empty where the thought has no end."""
    text = final_text(reply) or ""
    opened = _THOUGHT.match(text)
    if opened is None:
        return text
    tag = opened[0].strip()
    _, closed, spoken = text.rpartition(f"{tag[0]}/{tag[1:]}")
    return spoken if closed else ""


def _committed(reply: str, *, max_chars: int = _MAX_LINE) -> str:
    """What a reply commits to: its last line, or the value of its JSON; lower case, without markup."""
    text = _spoken(reply).strip()
    found = _json_of(text)
    line = text.rpartition("\n")[2] if found is None else _json_value(found)
    if len(line) > max_chars:
        return ""
    line = line.replace("\\boxed", "").replace("\\text", "").translate(_MARKS)
    return _BULLET.sub("", " ".join(line.lower().split())).strip(" .!。！")


def _json_of(text: str) -> list[tuple[str, Any]] | None:
    """The members of the JSON object that a text is, fenced or not; none if it cannot be read, None if it is no such.

    Objects in it are lists of members too.
    """
    unfenced = text.removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    if not unfenced.startswith("{"):
        return None
    try:
        found = json.loads(unfenced, object_pairs_hook=list) if len(unfenced) <= _MAX_JSON else []
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def _json_value(found: list[tuple[str, Any]]) -> str:
    """The verdict of a JSON object that names one; empty for any other."""
    given = [value for name, value in found if name in ("verdict", "winner", "score", "rating", "ranking")]
    return str(given[0]) if len(given) == 1 and isinstance(given[0], str | int | float) else ""


def _json_pairs(found: list[tuple[str, Any]]) -> list[tuple[int, str]]:
    plain = [(key, value) for key, value in found if isinstance(value, str | int | float) and key.isdecimal()]
    named = [(int(key), str(value)) for key, value in plain if len(key) <= 3]
    return named if len(named) == len(found) else []


def _line_pairs(text: str, number: int) -> list[tuple[int, str]]:
    lines = [line.strip() for line in text.split("\n") if line.strip()][-number:]
    found = [_LISTED.fullmatch(line) for line in lines]
    return [(int(match[1]), match[2]) for match in found if match]
