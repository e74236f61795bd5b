"""The 25 instructions of IFEval by their ids, checked as for its published figures (Zhou et al., arXiv:2311.07911).

Behavior of the original that is kept: keywords count inside longer words, forbidden words do not; a line that begins
with a dash is a bullet, even a divider; a postscript's marker may stand anywhere; JSON is any JSON value; empty pieces
between dividers of paragraphs are wrong, except before the first; words are runs of letters and digits; a list number
with a full stop is a sentence.

Differences:
- Empty parts never count, or a policy would learn to write them: `[]`, `""`, a section or a sentence without a letter
  or digit, a text without letters as one in the required language. Characters that show nothing, as U+200B, U+2800 and
  U+3164, are empty.
- `constrained_response`: naming several of the three answers is not an answer.
- `letter_frequency`: a character that is not a Latin letter is counted; the original draws a letter at random for it.
- `english_capital`: the language is detected in lower case. langdetect takes a fifth of short English texts in capitals
  for German, and none in lower case.
- Keywords and markers are texts; the original reads them as regular expressions.
- Sentences and capital words are counted by our own code, not NLTK's; counts differ for rare abbreviations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from agentenv.rewards.rules.ifeval import rules
from agentenv.rewards.rules.ifeval.rules import (
    COUNT,
    LANGUAGE,
    LETTER,
    PLACE,
    RELATION,
    RELATIONS,
    TEXT,
    TEXTS,
    Rule,
    has_words,
    is_in,
)
from agentenv.rewards.rules.text import is_blank

ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_PLACEHOLDER = re.compile(r"\[([^\[\]\n]*)\]")
_BULLET = re.compile(r"^[^\S\n]*+(?:\*[^*\n]|-)", re.MULTILINE)
_STARRED = re.compile(r"\*([^\n*]*)\*")
_DOUBLE_STARRED = re.compile(r"\*\*([^\n*]*)\*\*")
_DIVIDER = re.compile(r"\s?\*\*\*\s?")
_FENCE = re.compile(r"```(?:json)?", re.IGNORECASE)
_PUNCTUATION = re.compile(r"[.,?!'\"]")


def existence(text: str, *, keywords: list[str]) -> bool:
    """Return True if every keyword occurs, in any case, maybe within a longer word."""
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """Return True if the keyword occurs that often, in any case, maybe within longer words."""
    return RELATIONS[relation](len(re.findall(re.escape(keyword), text, re.IGNORECASE)), frequency)


def forbidden(text: str, *, forbidden_words: list[str]) -> bool:
    """Return True if none of the words occurs as a whole word, in any case."""
    return not any(rules.num_of_word(text, word) for word in forbidden_words)


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Return True if the character occurs that often, in any case."""
    return RELATIONS[let_relation](text.lower().count(letter.lower()), let_frequency)


def number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    """Return True if it has that many sentences."""
    return RELATIONS[relation](rules.num_sentences(text, list_numbers=True), num_sentences)


def number_words(text: str, *, num_words: int, relation: str) -> bool:
    """Return True if it has that many words, which are runs of letters and digits."""
    return RELATIONS[relation](rules.num_word_runs(text), num_words)


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Return True if dividers `***` make that many paragraphs of it; nothing between two dividers is wrong."""
    pieces = [not is_blank(piece) for piece in _DIVIDER.split(text)]
    return all(pieces[1:-1]) and sum(pieces) == num_paragraphs


def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Return True if blank lines make that many paragraphs of it, and the n-th begins with the word, in any case."""
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
    if sum(not is_blank(each) for each in paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    words = paragraphs[nth_paragraph - 1].split(maxsplit=1)
    word = words[0].lstrip("'").lstrip('"') if words else ""
    return _PUNCTUATION.split(word, maxsplit=1)[0].lower() == first_word.strip().lower()


def postscript(text: str, *, postscript_marker: str) -> bool:
    """Return True if the marker occurs, in any case; within P.S. and P.P.S may be spaces."""
    marker = postscript_marker.strip()
    spaced = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(marker)
    return re.search(spaced or re.escape(marker), text, re.IGNORECASE) is not None


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    """Return True if at least that many pairs of square brackets have something in them."""
    return sum(not is_blank(content) for content in _PLACEHOLDER.findall(text)) >= num_placeholders


def number_bullets(text: str, *, num_bullets: int) -> bool:
    """Return True if exactly that many lines begin with a star, not two, or with a dash."""
    return len(_BULLET.findall(text)) == num_bullets


def number_highlights(text: str, *, num_highlights: int) -> bool:
    """Return True if at least that many parts are between stars or double stars."""
    parts = _STARRED.findall(text) + _DOUBLE_STARRED.findall(text)
    return sum(not is_blank(part) for part in parts) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """Return True if at least that many sections follow upon a marker: the splitter and a number."""
    sections = re.split(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text)[1:]
    return sum(map(has_words, sections)) >= num_sections


def title(text: str) -> bool:
    """Return True if a line has a title in `<<` and `>>`."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and not is_blank(line[start:end].strip("<>")):
            return True
    return False


def constrained_response(text: str) -> bool:
    """Return True if it holds exactly one of the three answers."""
    return sum(answer in text for answer in ANSWERS) == 1


def json_format(text: str) -> bool:
    """Return True if all of it is a JSON value, in a fence or not."""
    body = text.strip()
    if fence := _FENCE.match(body):
        body = body[fence.end() :]
    try:
        json.loads(body.removesuffix("```").strip(), parse_int=len, parse_float=len)  # no arithmetic on long numbers
    except (ValueError, RecursionError):
        return False
    return True


def two_responses(text: str) -> bool:
    """Return True if it is two different texts with six stars between; stars before and after are allowed."""
    pieces = ["".join(char for char in piece if not is_blank(char)) for piece in text.split("******")]
    filled = [piece for piece in pieces if piece]
    return all(pieces[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """Return True if it begins with the prompt, in any case."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, *, end_phrase: str) -> bool:
    """Return True if it ends with the phrase, in any case; quotation marks around all of the text do not matter."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    """Return True if all of it stands between double quotation marks."""
    body = text.strip()
    return body.startswith('"') and body.endswith('"') and not is_blank(body.strip('"'))


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """Return True if that many words are all capitals."""
    return RELATIONS[capital_relation](rules.num_capital_tokens(text), capital_frequency)


def english_capital(text: str) -> bool:
    """Return True if it is English, with letters, none of them small."""
    return text.isupper() and is_in(text.lower(), language="en")


def english_lowercase(text: str) -> bool:
    """Return True if it is English, with letters, none of them capital."""
    return text.islower() and is_in(text, language="en")


def no_comma(text: str) -> bool:
    """Return True if it has no comma."""
    return "," not in text


_RULES = (
    Rule("keywords:existence", existence, {"keywords": TEXTS}),
    Rule("keywords:frequency", frequency, {"keyword": TEXT, "frequency": COUNT, "relation": RELATION}),
    Rule("keywords:forbidden_words", forbidden, {"forbidden_words": TEXTS}),
    Rule(
        "keywords:letter_frequency",
        letter_frequency,
        {"letter": LETTER, "let_frequency": COUNT, "let_relation": RELATION},
    ),
    Rule("language:response_language", is_in, {"language": LANGUAGE}, detects=True),
    Rule("length_constraints:number_sentences", number_sentences, {"num_sentences": COUNT, "relation": RELATION}),
    Rule("length_constraints:number_paragraphs", number_paragraphs, {"num_paragraphs": COUNT}),
    Rule("length_constraints:number_words", number_words, {"num_words": COUNT, "relation": RELATION}),
    Rule(
        "length_constraints:nth_paragraph_first_word",
        nth_paragraph_first_word,
        {"num_paragraphs": COUNT, "nth_paragraph": PLACE, "first_word": TEXT},
    ),
    Rule("detectable_content:number_placeholders", number_placeholders, {"num_placeholders": COUNT}),
    Rule("detectable_content:postscript", postscript, {"postscript_marker": TEXT}),
    Rule("detectable_format:number_bullet_lists", number_bullets, {"num_bullets": COUNT}),
    Rule("detectable_format:constrained_response", constrained_response),
    Rule("detectable_format:number_highlighted_sections", number_highlights, {"num_highlights": COUNT}),
    Rule("detectable_format:multiple_sections", multiple_sections, {"section_spliter": TEXT, "num_sections": COUNT}),
    Rule("detectable_format:json_format", json_format),
    Rule("detectable_format:title", title),
    Rule("combination:two_responses", two_responses),
    Rule("combination:repeat_prompt", repeat_prompt, {"prompt_to_repeat": TEXT}),
    Rule("startend:end_checker", end_checker, {"end_phrase": TEXT}),
    Rule(
        "change_case:capital_word_frequency",
        capital_word_frequency,
        {"capital_frequency": COUNT, "capital_relation": RELATION},
    ),
    Rule("change_case:english_capital", english_capital, detects=True),
    Rule("change_case:english_lowercase", english_lowercase, detects=True),
    Rule("punctuation:no_comma", no_comma),
    Rule("startend:quotation", quotation),
)
RULES: Mapping[str, Rule] = {rule.type: rule for rule in _RULES}
"""Instruction id: rule."""
