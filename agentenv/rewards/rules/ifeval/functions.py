"""The 25 constraints of open-instruct's verifier functions, by their names, read as their prompts say.

They are the rows of allenai/RLVR-IFeval, of which ROLL's IFEval worker has a copy. Words count as whole words, markdown
as markdown, and what is empty never counts; quantifiers are open-instruct's: "around" is within a tenth, and within one
for sentences. Case matters for letters and a repeated prompt, not for words and phrases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from agentenv.rewards.rules.ifeval import official, rules
from agentenv.rewards.rules.ifeval.rules import (
    COUNT,
    LANGUAGE,
    LETTER,
    OPTIONS,
    PLACE,
    RELATION,
    RELATIONS,
    TEXT,
    TEXTS,
    Rule,
    has_words,
)
from agentenv.rewards.rules.text import is_blank

_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")
_PARAGRAPH_DIVIDER = re.compile(r"^[ \t]*+(?:\*[ \t]?){3,}+$|\* \* \*", re.MULTILINE)
_RULE_LINE = re.compile(r"[ \t]*+(?:(?:\*[ \t]*+){3,}+|(?:-[ \t]*+){3,}+)$")
_BULLET = re.compile(r"[ \t]*+[*+-][ \t]+(?=\S)")
_HIGHLIGHT = re.compile(r"(?<!\*)\*{1,3}(?![\s*])[^*\n]*(?<!\s)\*{1,3}")
_MARKUP = r"^[ \t>*_#]*+"


def keywords(text: str, *, keyword_list: list[str]) -> bool:
    """Return True if every keyword occurs as a whole word, in any case."""
    return all(rules.num_of_word(text, word) for word in keyword_list)


def keyword_frequency(text: str, *, word: str, N: int, quantifier: str = "exactly") -> bool:
    """Return True if the word occurs that often as a whole word, in any case."""
    return RELATIONS[quantifier](rules.num_of_word(text, word), N)


def letter_frequency(text: str, *, letter: str, N: int, quantifier: str = "exactly") -> bool:
    """Return True if the character occurs that often, in this case."""
    return RELATIONS[quantifier](text.count(letter), N)


def paragraph_count(text: str, *, N: int) -> bool:
    """Return True if dividers `* * *`, or a line of three stars or more, make that many paragraphs of it."""
    return sum(map(has_words, _PARAGRAPH_DIVIDER.split(text))) == N


def word_constraint(text: str, *, N: int, quantifier: str) -> bool:
    """Return True if it has that many words between white space."""
    return RELATIONS[quantifier](rules.num_spaced_words(text), N)


def sentence_constraint(text: str, *, N: int, quantifier: str) -> bool:
    """Return True if it has that many sentences; "around" is at most one more or less."""
    count = rules.num_sentences(text, list_numbers=False)
    return abs(count - N) <= 1 if quantifier == "around" else RELATIONS[quantifier](count, N)


def paragraphs(text: str, *, N: int, first_word: str, i: int) -> bool:
    """Return True if blank lines make that many paragraphs of it, and the i-th begins with the word, in any case."""
    pieces = [piece for piece in _BLANK_LINES.split(text) if not is_blank(piece)]
    if len(pieces) != N or i > N:
        return False
    start = re.compile(rf"[\s\"'“‘*_#>(]*+{re.escape(first_word.strip())}(?!\w)", re.IGNORECASE)
    return start.match(pieces[i - 1]) is not None


def postscript(text: str, *, postscript_marker: str) -> bool:
    """Return True if a line begins with the marker, in any case, and more than the marker follows."""
    marker = re.compile(_MARKUP + re.escape(postscript_marker.strip()), re.IGNORECASE | re.MULTILINE)
    found = marker.search(text)
    return found is not None and has_words(text[found.end() :])


def bullet_points(text: str, *, N: int) -> bool:
    """Return True if exactly that many lines are markdown bullets: a star, dash or plus, white space, and text."""
    lines = (line.rstrip() for line in text.split("\n") if not _RULE_LINE.match(line.rstrip()))
    return sum((found := _BULLET.match(line)) is not None and not is_blank(line[found.end() :]) for line in lines) == N


def choice(text: str, *, options: list[str]) -> bool:
    """Return True if exactly one of the options occurs, as whole words; one within a longer one is not chosen with it.

    Only where none occurs as it is written does case not matter: the article "a" does not choose A.
    """
    by_length = sorted({option.strip().rstrip(".!") or option for option in options}, key=len, reverse=True)
    pattern = rf"(?<!\w)(?:{'|'.join(map(re.escape, by_length))})(?!\w)"
    chosen = re.findall(pattern, text) or re.findall(pattern, text, re.IGNORECASE)
    return len({option.casefold() for option in chosen}) == 1


def highlighted_sections(text: str, *, N: int) -> bool:
    """Return True if at least that many parts are emphasized with stars; `**bold**` is one, a bullet's star none."""
    return sum(not is_blank(found.strip("*")) for found in _HIGHLIGHT.findall(text)) >= N


def sections(text: str, *, N: int, section_splitter: str) -> bool:
    """Return True if it has exactly that many sections with text.

    A section follows a marker: the splitter at the beginning of a line, or else, wherever it stands, with a number.
    """
    splitter = re.escape(section_splitter.strip())
    heading = rf"{_MARKUP}{splitter}(?!\w)(?:[ \t]?(?:\d+|[A-Z]+(?!\w)))?|{_MARKUP}{splitter}\d+"
    numbered = rf"(?<!\w){splitter}[ \t]?\d+"
    splits = (re.split(marker, text, flags=re.MULTILINE) for marker in (heading, numbered))
    return any(sum(map(has_words, pieces[1:])) == N for pieces in splits)


def repeat_prompt(text: str, *, original_prompt: str) -> bool:
    """Return True if it begins with the prompt, as it was written."""
    return text.strip().startswith(original_prompt.strip())


def quotation(text: str) -> bool:
    """Return True if all of it stands between double quotation marks, straight or curly."""
    body = text.strip()
    pair = (body[:1], body[-1:])
    return pair in {('"', '"'), ("“", "”")} and has_words(body)


def placeholders(text: str, *, N: int) -> bool:
    """Return True if at least that many pairs of square brackets have something in them."""
    return official.number_placeholders(text, num_placeholders=N)


def frequency_capital_words(text: str, *, N: int, quantifier: str) -> bool:
    """Return True if that many words are all capitals."""
    return RELATIONS[quantifier](rules.num_capital_words(text), N)


_COUNT, _COMPARED = {"N": COUNT}, {"N": COUNT, "quantifier": RELATION}
_QUANTIFIED = {"quantifier": RELATION}
RULES: Mapping[str, Rule] = {
    "verify_keywords": Rule("keywords:existence", keywords, {"keyword_list": TEXTS}),
    "verify_keyword_frequency": Rule("keywords:frequency", keyword_frequency, {"word": TEXT, **_COUNT}, _QUANTIFIED),
    "validate_forbidden_words": Rule("keywords:forbidden_words", official.forbidden, {"forbidden_words": TEXTS}),
    "verify_letter_frequency": Rule(
        "keywords:letter_frequency", letter_frequency, {"letter": LETTER, **_COUNT}, _QUANTIFIED
    ),
    "validate_response_language": Rule("language:response_language", rules.is_in, {"language": LANGUAGE}, detects=True),
    "verify_paragraph_count": Rule("length_constraints:number_paragraphs", paragraph_count, _COUNT),
    "validate_word_constraint": Rule("length_constraints:number_words", word_constraint, _COMPARED),
    "verify_sentence_constraint": Rule("length_constraints:number_sentences", sentence_constraint, _COMPARED),
    "validate_paragraphs": Rule(
        "length_constraints:nth_paragraph_first_word", paragraphs, {"N": COUNT, "first_word": TEXT, "i": PLACE}
    ),
    "verify_postscript": Rule("detectable_content:postscript", postscript, {"postscript_marker": TEXT}),
    "validate_placeholders": Rule("detectable_content:number_placeholders", placeholders, _COUNT),
    "verify_bullet_points": Rule("detectable_format:number_bullet_lists", bullet_points, _COUNT),
    "validate_title": Rule("detectable_format:title", official.title),
    "validate_choice": Rule("detectable_format:constrained_response", choice, {"options": OPTIONS}),
    "validate_highlighted_sections": Rule(
        "detectable_format:number_highlighted_sections", highlighted_sections, _COUNT
    ),
    "validate_sections": Rule("detectable_format:multiple_sections", sections, {**_COUNT, "section_splitter": TEXT}),
    "validate_json_format": Rule("detectable_format:json_format", official.json_format),
    "validate_repeat_prompt": Rule("combination:repeat_prompt", repeat_prompt, {"original_prompt": TEXT}),
    "validate_two_responses": Rule("combination:two_responses", official.two_responses),
    "validate_uppercase": Rule("change_case:english_capital", str.isupper),
    "validate_lowercase": Rule("change_case:english_lowercase", str.islower),
    "validate_frequency_capital_words": Rule("change_case:capital_word_frequency", frequency_capital_words, _COMPARED),
    "validate_end": Rule("startend:end_checker", official.end_checker, {"end_phrase": TEXT}),
    "validate_quotation": Rule("startend:quotation", quotation),
    "validate_no_commas": Rule("punctuation:no_comma", official.no_comma),
}
"""Function name: rule; reported under the instruction id that asks for the same."""
