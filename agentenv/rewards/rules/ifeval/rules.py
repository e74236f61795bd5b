"""Define a rule: a check of a text, and the kinds of its parameters, which are validated here.

Languages are detected by `langdetect`, as IFEval does.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from agentenv._util.syntax import parse_source
from agentenv.errors import MissingDependency
from agentenv.rewards.rules.ifeval.counts import RELATIONS

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
