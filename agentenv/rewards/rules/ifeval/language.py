"""Detect the language of a text, by `langdetect`, as IFEval does."""

from __future__ import annotations

import importlib
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
        MissingDependency: langdetect is not installed.
    """
    text = text[:_MAX_READ_CHARS]
    if not any(map(str.isalpha, text)):
        return False
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
