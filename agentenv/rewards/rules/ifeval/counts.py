"""Count words, sentences, capital words and paragraphs of a text, in linear time."""

from __future__ import annotations

import operator
import re
import unicodedata
from collections.abc import Callable, Mapping

_FILLERS = "\u115f\u1160\u3164\uffa0"
"""Blanks of Hangul, which Python takes for letters."""
_WORD = re.compile(rf"[^\W{_FILLERS}]+")
_JOINERS = "\u200c\u200d"
_ALNUM = re.compile(rf"[^\W_{_FILLERS}]")
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
"""Words that, with a capital, distinguish a new sentence from a name."""

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
"""Return True if a count stands in a relation to its target; "around" is within a tenth, and within one."""


def has_words(text: str) -> bool:
    """Return True if there is a letter or a digit."""
    return _ALNUM.search(text) is not None


def num_word_runs(text: str) -> int:
    """Return the number of runs of letters, digits and underscores, IFEval's words: "don't" has two.

    Marks belong to their letters, as the vowel signs of Indic scripts do; so it is with IFEval on NLTK 3.10.4, which
    earlier releases of NLTK cut there.
    """
    if not text.isascii():
        text = "".join(c for c in text if c not in _JOINERS and not unicodedata.category(c).startswith("M"))
    return sum(1 for _ in _WORD.finditer(text))


def num_spaced_words(text: str) -> int:
    """Return the number of words between white space that have a letter or a digit: "don't" counts, a dash does not."""
    return sum(map(has_words, text.split()))


def num_sentences(text: str, *, list_numbers: bool) -> int:
    """Return the number of sentences; abbreviations, initials, decimals and line ends do not end one.

    `list_numbers`: True if a number with a full stop before a capital, as at the start of a list item, ends one, as it
    does for the Punkt tokenizer, on which the published figures are based.
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
    name = before.casefold()
    if name in _NEVER_LAST:
        return name == "no" and not after[0].isdigit()
    if name in _MAYBE_LAST or _INITIALS.fullmatch(before):
        return after[0].isupper() and after.casefold() in _STARTERS
    return True


def num_capital_tokens(text: str) -> int:
    """Return the number of capital words as in IFEval: contractions are split ("IT'S" has two), hyphens kept."""
    count = 0
    for token in _TOKEN.findall(text):
        clitic = _CLITIC.search(token, max(0, len(token) - 3))
        body = token[: clitic.start()] if clitic else token
        count += body.isupper() + (clitic is not None and clitic[0].isupper())
    return count


def num_capital_words(text: str) -> int:
    """Return the number of words of only capital letters: "IT'S" is one, "READ-ONLY" is two."""
    return sum(map(str.isupper, _LETTERS.findall(text)))


def num_of_word(text: str, word: str) -> int:
    """Return how often the word or phrase occurs, in any case and not within a longer word."""
    return len(re.findall(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, re.IGNORECASE))
