r"""Find answers that the words next to them take back: `\boxed{42}` is wrong, it is not `\boxed{42}`."""

from __future__ import annotations

import re

from agentenv.rewards.rules.text import boxes

_MAX_BEFORE, _MAX_BEHIND = 48, 160
"""How many characters of the words next to an answer may take it back."""
_MAX_BETWEEN, _MAX_BOXES = 80, 16
_HINT = re.compile(r"n[o'’e]|w[ri]|than|fal|in[cvs]|un|mis|an[y]|≠|err|scr|ign|dis|for|str|bac|ret|doub|错|不")
"""A part of each word that takes an answer back: most texts need no more than this look."""
_WRONG = r"(?:wrong|incorrect|false|invalid|untrue|mistaken|inaccurate|nonsense|mistake|error)\b(?! \w{3,}[^s]s\b)"
_RIGHT = (
    r"(?:right|correct|true|valid|accurate|acceptable|answer|solution|result|option|choice|it|work|hold|fit|satisfy)\b"
)
_LONG_FORMS = (("’", "'"), ("can't ", "can not "), ("n't ", " not "), ("cannot ", "can not "), ("'s ", " is "))
_BEHIND = re.compile(
    r"(?:[^\w(]|\b(?:oh|oops|wait|no|hmm+|sorry|well|actually|but|however|and|yet|hold on)\b)*+\(?"
    r"(?:(?!if|for|when|where|unless|some|one|many)[\w' ]{1,40}, )?"
    r"(?:i (?:think|believe|realize|see|know)(?: now| that)* )?"
    r"(?:(?:(?:the|my|this|that) (?:above |boxed |final )*(?:answer|box|result|value)|that|this|it|which) )?"
    r"(?:(?:is|was|are|were|be|seems|looks|can|could|must|would|will|might|may|should|does|did|do|has|have|to) )*"
    r"(?:(?:also|just|still|simply|clearly|obviously|definitely|probably|certainly|actually|completely|totally) )*"
    rf"(?:(?:the |an? )?{_WRONG}|(?:not|never) (?:be )?(?:(?:even|actually|quite|really|the|an?|my|final) )*{_RIGHT}"
    r"|(?:please )?(?:scratch|ignore|disregard|forget|strike|discard) (?:that|this|it|the (?:above|box|answer))\b"
    r"|i (?:(?:take|took) (?:that|this|it) back|retract|withdraw|made an? (?:mistake|error)|was wrong)\b"
    r"|(?:这|那)?(?:个?答案)?是?(?:错|不对|不正确))"
)
_BEFORE = re.compile(
    r"(?:(?:\b(?:not|never|neither|nor) (?:be |equal |to |simply |just )*(?:the (?:answer|value|option) )?"
    r"|\b(?:rather than|instead of|other than|anything but) |\\neq?|≠"
    r"|\b(?:wrong|incorrect|false) (?:answer|result|value|option|choice|solution|one) (?:is|was|would be)[ :]"
    r"|\b(?:wrong|incorrect|false|a mistake) to (?:say|answer|claim|write|conclude|choose) "
    r"|(?:\bi (?:\w+ )?doubt|\b(?:doubtful|unclear|unsure|unlikely|not (?:sure|certain|clear|think|believe|say)))"
    r"(?: (?:that|if|whether))?(?: (?:the|my|this))?(?: (?:final|correct|right|best))?"
    r"(?: (?:answer|result|value|solution|option|choice|it))?(?: (?:is|be|was|equals|would be|could be))?(?: option)?"
    r")(?:[^\w.,;!?]|\\[(\[])*)$"
)
_OR = re.compile(
    r"\b(?:or|otherwise|else|alternatively|maybe|perhaps|possibly)\b\W*"
    r"(?:(?:the|my|final|correct|right|best|answer|option|it|is|could be|might be)\b\W*)*(?:\w{1,3} ?=\W*)?$"
)


def is_taken_back(text: str, start: int, end: int) -> bool:
    """Return True if the words before or behind `text[start:end]` say that it is wrong, or not the answer."""
    first = max(0, start - _MAX_BEFORE)
    if not _HINT.search(text[first : end + _MAX_BEHIND].lower()):
        return False
    before, behind = text[first:start].lower(), text[end : end + _MAX_BEHIND].lower()
    for short, long in _LONG_FORMS:
        before, behind = before.replace(short, long), behind.replace(short, long)
    return _BEFORE.search(before) is not None or _BEHIND.match(behind) is not None


def is_alternative(text: str, end: int, start: int) -> bool:
    """Return True if an "or" leads from an answer that ends at `end` to the next, which starts soon, at `start`."""
    return 0 < start - end <= _MAX_BETWEEN and _OR.search(text[end:start].lower()) is not None


def standing_box(text: str) -> str | None:
    r"""Return the last nonempty `\boxed{…}` that is not taken back; empty if the last 16 are, None if there is none.

    What a later box takes back is taken back. It is "A or B" for `\boxed{A}, or \boxed{B}`.
    """
    found, wrong = boxes(text), set[str]()
    for at in range(len(found) - 1, max(len(found) - 1 - _MAX_BOXES, -1), -1):
        box = found[at]
        content = text[box.content : box.end]
        if is_taken_back(text, box.start, box.end + 1):
            wrong.add(content.strip())
        elif content.strip() not in wrong:
            before = found[at - 1] if at else box
            is_hedge = is_alternative(text, before.end + 1, box.start)
            return f"{text[before.content : before.end]} or {content}" if is_hedge else content
    return "" if found else None
