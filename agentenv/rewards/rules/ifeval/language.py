"""Detect the language of a text: by its script if only one language uses it, else by `langdetect`."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from typing import Any

from agentenv.errors import MissingDependency

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

_SCRIPTS = {
    "latin": (r"A-Za-z\u00aa\u00ba\u00c0-\u024f\u1e00-\u1eff", ""),
    "cyrillic": (r"\u0400-\u052f", "bg mk ru uk"),
    "arabic": (r"\u0600-\u06ff\u0750-\u077f\ufb50-\ufdff\ufe70-\ufeff", "ar fa ur"),
    "devanagari": (r"\u0900-\u097f", "hi mr ne"),
    "han": (r"\u3400-\u4dbf\u4e00-\u9fff", "ja zh zh-cn zh-tw"),
    "kana": (r"\u3040-\u30ff", "ja"),
    "hangul": (r"\u1100-\u11ff\u3130-\u318f\uac00-\ud7af", "ko"),
    "greek": (r"\u0370-\u03ff\u1f00-\u1fff", "el"),
    "hebrew": (r"\u0590-\u05ff", "he"),
    "bengali": (r"\u0980-\u09ff", "bn"),
    "gurmukhi": (r"\u0a00-\u0a7f", "pa"),
    "gujarati": (r"\u0a80-\u0aff", "gu"),
    "tamil": (r"\u0b80-\u0bff", "ta"),
    "telugu": (r"\u0c00-\u0c7f", "te"),
    "kannada": (r"\u0c80-\u0cff", "kn"),
    "malayalam": (r"\u0d00-\u0d7f", "ml"),
    "thai": (r"\u0e00-\u0e7f", "th"),
}
"""Name: the characters of a script, and the languages among `CODES` that use it; Latin has all others."""
_LANGUAGES = {name: frozenset(codes.split()) for name, (_, codes) in _SCRIPTS.items()}
_LANGUAGES["latin"] = frozenset(CODES).difference(*_LANGUAGES.values())
_RUN = re.compile(
    "|".join(f"(?P<{name}>[{chars}]+)" for name, (chars, _) in _SCRIPTS.items()) + r"|(?P<other>[^\W\d_]+)"
)
_SURE = 0.9
"""Share of a text's letters that must be of one script for the script to decide."""
_KANA_SHARE = 0.1
_MAX_READ_CHARS = 20_000
_loaded: list[Any] = []  # the langdetect module, once it is set up


def code_of(value: object) -> str | None:
    """Return the code of a language, from its code or English name; None if it is neither."""
    if not isinstance(value, str):
        return None
    name = value.strip().casefold()
    return name if name in CODES else _CODE_OF_NAME.get(name)


def is_in(text: str, code: str) -> bool:
    """Return True if the text is in the language, by its first 20,000 characters; False if it has no letters.

    Raises:
        MissingDependency: the text's script does not decide, and langdetect is not installed.
    """
    text = text[:_MAX_READ_CHARS]
    languages: frozenset[str] | None = frozenset()  # that the text can be in; None for letters of several scripts
    counts: Counter[str] = Counter()
    for run in _RUN.finditer(text):
        counts[run.lastgroup or ""] += len(run[0])
    if counts:
        if counts["kana"] >= _KANA_SHARE * (counts["kana"] + counts["han"]):
            counts["kana"] += counts.pop("han", 0)
        script, count = counts.most_common(1)[0]
        languages = _LANGUAGES.get(script, frozenset()) if count >= _SURE * counts.total() else None
    if languages is not None and code not in languages:
        return False
    if languages is not None and len(languages) == 1:
        return True
    langdetect = load()
    try:
        detected = str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return False
    return detected == code or (code == "zh" and detected.startswith("zh"))


def load() -> Any:
    """Return the langdetect module, with its language profiles loaded (about a second) and its seed fixed.

    Raises:
        MissingDependency: it is not installed.
    """
    if not _loaded:
        try:
            langdetect = importlib.import_module("langdetect")
        except ImportError as error:
            raise MissingDependency(
                "ifeval: expected the package langdetect to tell this text's language, got none. "
                "Run: pip install 'agentenv-rl[ifeval]'"
            ) from error
        langdetect.DetectorFactory.seed = 0
        langdetect.detect("Loads the profiles.")
        _loaded.append(langdetect)
    return _loaded[0]
