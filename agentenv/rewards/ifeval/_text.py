"""Counts in a text: words, sentences, capital words, paragraphs; every one in time linear in the text's length."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping

_WORD = re.compile(r"\w+")
_ALNUM = re.compile(r"[^\W_]")
_LETTERS = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*+")

_END = re.compile(r"(?:(?<![.!?…।؟])(?P<run>[.!?…।؟]++)[\"')\]}*_”’»]*+(?=\s|$)|[。！？]++[」』）”’]*+)")
_BEFORE = re.compile(r"(?:^|(?<=[\s\"'(\[{*_“‘#>/-]))[^\W_](?:\.?[^\W_])*+$")
_INITIALS = re.compile(r"[^\W\d_](?:\.[^\W\d_])+|[A-Z]")
_NEXT = re.compile(r"\s*+[\"'(\[{*_“‘«#<>-]*+\s*+(\w{0,24})")
_LIST_NUMBER = re.compile(r"(?:^|\n)[ \t>*_#(-]*\d{1,6}$")
_NEVER = (
    "mr mrs ms mx dr prof rev hon gen col capt lt sgt gov sen rep messrs mme vs e.g i.e viz cf fig figs eq eqs ch vol "
    "no nos pp ed eds approx"
)
_NEVER_LAST = frozenset(_NEVER.split())
"""Abbreviations that a word follows."""
_MAYBE = (
    "ph.d etc al inc ltd co corp llc jr sr bros dept st mt ave blvd jan feb mar apr jun jul aug sep sept oct nov dec"
)
_MAYBE_LAST = frozenset(_MAYBE.split())
"""Abbreviations that may end a sentence as well."""
_STARTING = (
    "a an the this that these those it its he she they we you i his her their our my your there here in on at by for "
    "from with to of and but or so yet if when while as after before since because although however then thus "
    "what who why how where which is are was were do does did can could will would should may might let not no yes "
    "one some many most all each every another such also finally first next"
)
_STARTERS = frozenset(_STARTING.split())
"""Words that, with a capital, tell a new sentence from a name."""

_TOKEN = re.compile(r"(?:[^\s,;:@#$%&?!()\[\]{}<>\"*“”‘’„«»`…-]|-(?!-))+")
_CLITIC = re.compile(r"(?:n't|'(?:s|m|d|ll|re|ve))$", re.IGNORECASE)

RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "at least": operator.ge,
    "less than": operator.lt,
    "at most": operator.le,
    "more than": operator.gt,
    "exactly": operator.eq,
    "around": lambda count, target: abs(count - target) <= max(round(target * 0.1), 1),
}
"""Whether a count stands in a relation to its target; "around" is within a tenth, and within one."""


def has_words(text: str) -> bool:
    """Whether there is a letter or a digit."""
    return _ALNUM.search(text) is not None


def num_word_runs(text: str) -> int:
    """Runs of letters, digits and underscores, which is how IFEval counts words: "don't" has two."""
    return sum(1 for _ in _WORD.finditer(text))


def num_spaced_words(text: str) -> int:
    """What stands between white space, if it has a letter or a digit: "don't" is one, a dash none."""
    return sum(map(has_words, text.split()))


def num_sentences(text: str, *, list_numbers: bool) -> int:
    """Sentences, with abbreviations, initials and decimals left whole; a line's end ends none.

    `list_numbers` says whether a number with a full stop before a capital, as at the head of a list's item, ends one:
    it does for the Punkt tokenizer, whose counts the published figures are.
    """
    start, count = 0, 0
    for end in _END.finditer(text):
        if _ends_sentence(text, end, list_numbers):
            count += has_words(text[start : end.end()])
            start = end.end()
    return count + has_words(text[start:])


def _ends_sentence(text: str, end: re.Match[str], list_numbers: bool) -> bool:
    following = _NEXT.match(text, end.end())
    after = following[1] if following else ""
    if end["run"] in ("...", "…"):
        return not after[:1].islower()
    if end["run"] != "." or not after:
        return True
    head = text[max(0, end.start() - 24) : end.start()]
    found = _BEFORE.search(head)
    before = found[0] if found else ""
    if before.isdecimal():
        return not after[0].islower() and (list_numbers or _LIST_NUMBER.search(head) is None)
    return not _is_abbreviation(before, after)


def _is_abbreviation(word: str, after: str) -> bool:
    """Whether the full stop behind the word is the word's own, and the sentence goes on with `after`."""
    name = word.casefold()
    if name in _NEVER_LAST:
        return name != "no" or after[0].isdigit()
    if name in _MAYBE_LAST or _INITIALS.fullmatch(word):
        return not (after[0].isupper() and after.casefold() in _STARTERS)
    return False


def num_capital_tokens(text: str) -> int:
    """Capital words as IFEval counts them: punctuation and contractions cut off ("IT'S" has two), hyphens kept."""
    count = 0
    for token in _TOKEN.findall(text):
        clitic = _CLITIC.search(token, max(0, len(token) - 3))
        body = token[: clitic.start()] if clitic else token
        count += body.isupper() + (clitic is not None and clitic[0].isupper())
    return count


def num_capital_words(text: str) -> int:
    """Words of capital letters alone: "IT'S" is one, as is either half of "READ-ONLY"."""
    return sum(map(str.isupper, _LETTERS.findall(text)))


def num_of_word(text: str, word: str) -> int:
    """How often the word or phrase stands there, in any case and not as a part of a longer word."""
    return len(_whole_word(word).findall(text))


def _whole_word(word: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(word.strip())}(?!\w)", re.IGNORECASE)
