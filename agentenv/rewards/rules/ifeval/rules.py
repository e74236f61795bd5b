"""Define a rule: a check of a text, and the kinds of its parameters, which are validated here.

Words, sentences, capital words and paragraphs of a text are counted in linear time. Languages are detected by
`langdetect`, as IFEval does.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import numbers
import operator
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from agentenv._util.syntax import parse_source
from agentenv.errors import MissingDependency

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


_MAX_COUNT = 1_000_000
_SEPARATORS = ("\n", "|", ";", ",", "/")
_LISTED = """
af Afrikaans  ar Arabic  bg Bulgarian  bn Bengali  ca Catalan  cs Czech  cy Welsh  da Danish  de German  el Greek
en English  es Spanish  et Estonian  fa Persian  fi Finnish  fr French  gu Gujarati  he Hebrew  hi Hindi  hr Croatian
hu Hungarian  id Indonesian  it Italian  ja Japanese  kn Kannada  ko Korean  lt Lithuanian  lv Latvian  mk Macedonian
ml Malayalam  mr Marathi  ne Nepali  nl Dutch  no Norwegian  pa Punjabi  pl Polish  pt Portuguese  ro Romanian
ru Russian  sk Slovak  sl Slovenian  so Somali  sq Albanian  sv Swedish  sw Swahili  ta Tamil  te Telugu  th Thai
tl Tagalog  tr Turkish  uk Ukrainian  ur Urdu  vi Vietnamese  zh Chinese  zh-cn -  zh-tw -
"""
_NAMES = _LISTED.split()
CODES = tuple(_NAMES[::2])
"""ISO 639-1 codes of the supported languages; `zh` is either Chinese."""
_CODE_OF_NAME = {name.casefold(): code for code, name in zip(CODES, _NAMES[1::2], strict=True) if name != "-"}

_MAX_READ_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of parameter: `read` returns its value as plain JSON, or None if it is not as `expected` says."""

    expected: str
    read: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of instruction: `check(text, **parameters)` returns True if a text follows it."""

    type: str
    """The instruction id under which it is reported, such as `keywords:existence`."""
    check: Callable[..., bool]
    params: Mapping[str, Kind] = field(default_factory=dict)
    optional: Mapping[str, Kind] = field(default_factory=dict)
    detects: bool = False
    """True if it may detect a language, which is slow and needs an optional package."""


def items_of(value: object) -> list[Any] | None:
    """Return the members of a list, tuple or array; None for anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value  # an array may have no dimension
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return list(value)
    return None


def _whole(low: int) -> Callable[[Any], int | None]:
    def read(value: Any) -> int | None:
        # Tables turn whole numbers beside missing ones into floats.
        whole = isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer())
        if not whole or isinstance(value, bool) or not low <= value <= _MAX_COUNT:
            return None
        return int(value)

    return read


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _letter(value: Any) -> str | None:
    text = (_text(value) or "").strip()
    return text if len(text) == 1 else None


def _texts(value: Any) -> list[str] | None:
    members = items_of(value)
    return members if members and all(_text(member) is not None for member in members) else None


def _options(value: Any) -> list[str] | None:
    """Return a list, from a list, its Python source, or a text with its members between separators."""
    if not isinstance(value, str):
        return _texts(value)
    if value.lstrip()[:1] in ("[", "("):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return _texts(ast.literal_eval(parse_source(value.strip(), "eval")))
    separator = next((separator for separator in _SEPARATORS if separator in value), "\n")
    return _texts([option.strip() for option in value.split(separator) if option.strip()])


def code_of(value: object) -> str | None:
    """Return the code of a language, from its code or English name; None if it is neither."""
    if not isinstance(value, str):
        return None
    name = value.strip().casefold()
    return name if name in CODES else _CODE_OF_NAME.get(name)


def is_in(text: str, *, language: str) -> bool:
    """Return True if the text is in the language, by its first 20,000 characters; False if it has no letters.

    Raises:
        MissingDependency: langdetect is not installed.
    """
    text = text[:_MAX_READ_CHARS]
    if not any(map(str.isalpha, text)):
        return False
    langdetect = load_langdetect()
    try:
        detected = str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return False
    return detected == language or (language == "zh" and detected.startswith("zh"))


@cache
def load_langdetect() -> Any:
    """Return the langdetect module, with its language profiles loaded (about a second) and its seed fixed.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        langdetect = importlib.import_module("langdetect")
    except ImportError as error:
        raise MissingDependency(
            "ifeval: expected the package langdetect to tell this text's language, got none. "
            "Run: pip install 'agentenv-rl[ifeval]'"
        ) from error
    langdetect.DetectorFactory.seed = 0
    langdetect.detect("Loads the profiles.")
    return langdetect


COUNT = Kind(f"a whole number of 0..{_MAX_COUNT}", _whole(0))
PLACE = Kind(f"a whole number of 1..{_MAX_COUNT}", _whole(1))
TEXT = Kind("a text that is not blank", _text)
LETTER = Kind("a single character", _letter)
TEXTS = Kind("a list of texts that are not blank, at least one", _texts)
OPTIONS = Kind("a list of texts, or a text that holds one", _options)
RELATION = Kind(
    f"one of {', '.join(RELATIONS)}", lambda value: value if isinstance(value, str) and value in RELATIONS else None
)
LANGUAGE = Kind(f"the code of a language ({', '.join(CODES)})", code_of)
