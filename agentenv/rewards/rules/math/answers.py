r"""Read answers and labels from text: linear in the text's length, without computer algebra.

A percentage equals the same number, with or without the sign, and its value: `50%` equals `50%`, `50` and `0.5`, as in
math-verify. Units are dropped and never compared: `42 apples` equals `42 km`. A base is part of a number: `2516_8` is
`(2516)_{\text{eight}}`, and neither `2516` nor `1358`.
"""

from __future__ import annotations

import functools
import numbers
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from agentenv._util.brief import brief
from agentenv.errors import DataError
from agentenv.rewards.rules.math.latex import kind, one_spelling, parts, readable, with_bases, without_loose_spaces
from agentenv.rewards.rules.text import (
    FONTS,
    INK,
    boxes,
    final_text,
    is_taken_back,
    last_boxed,
    standing_box,
    without_special_tokens,
)

MAX_ANSWER_CHARS = 4096
"""Longer answers are not graded."""
_MAX_SEARCHED_CHARS = 32_768
"""Characters at the end of the text that are searched for an answer, which takes about 10 ms at most."""
_MAX_MARKED_CHARS = 16_384

_BARE_BOX = re.compile(r"\\(?:boxed|fbox) ?(-?[0-9]+(?:\.[0-9]+)?|[A-Z])(?![A-Za-z0-9])")
_BETWEEN_BOXES = re.compile(
    r"(?:[\s,;$&}]|\\[,;:!() \[\]\\]|\\q?quad(?![A-Za-z])|\\text ?\{|(?<![A-Za-z])(?:and|or)(?![A-Za-z])"
    r"|[A-Za-z](?:_\{?[0-9A-Za-z]\}?)? ?=)*"
)
_MAX_BETWEEN_BOXES, _MAX_BOXES = 60, 100
_MARKER = re.compile(
    r"\banswer\b(?: (?:to|for) [^.:\n]{1,40}?)?[*_]{0,3}(?:\s{1,4}is\b\s{0,4}:?|\s{0,4}[:=])(?:[*_]{1,3}(?=\s|$))?",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)(?! [Oo]r [$\\0-9-])|,?\s(?:because|since|which|so|as)\s")

_CHARS = (
    {full: full - 0xFEE0 for full in range(0xFF01, 0xFF5E)}  # full-width letters, digits and signs
    | str.maketrans({"\u2212": "-", "\u2013": "-", "\ufe63": "-", "~": " ", "\u200b": "", "\ufeff": "", "\u2044": "/"})
    | str.maketrans(
        {sign: " " + unicodedata.normalize("NFKC", sign).replace("\u2044", "/") for sign in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
    )
    | str.maketrans(dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000\t\r\n", " "))
)
_SMALL = re.compile("([⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)|([₀-₉]+)")
_SMALL_DIGITS = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉", "+-01234567890123456789")
_FONT_GROUP = re.compile(rf"(?<![\^_}}A-Za-z])\{{ ?\\{FONTS} ?([^{{}}]*)\}}")
_ENDLESS = re.compile(r"(?<=,) ?\.{3,}")
_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|mathit|boldsymbol|bm|underline)\s*\{([^{}]*)\}"
)
_INVISIBLE = re.compile(r"\\[hv]?phantom ?\{(?:[^{}]++|\{[^{}]*+\})*+\}")
_GROUPS = re.compile(r"(?<=[0-9],) ?(?:\\! ?)+(?=[0-9]{3}(?![0-9]))")
_ONE_LETTER_TEXT = re.compile(
    r"(?<=[0-9})πi])[\\,;~ ]*\\(?:text|textrm|mbox|mathrm) ?\{ ?[mghsLl] ?\}(?: ?\^ ?\{?[23]\}?)?[\s$.]*$"
)
"""A unit behind an expression, since without its `\text` it reads as a variable."""
_SPACING = re.compile(r"(?<!\\)\\(?:[,;: ]|qquad\b|quad\b)")
_NOISE = re.compile(rf"(?<!\\)\\(?:[!()\[\]]|{FONTS})|\\?\$")
_BOLD = re.compile(r"^\*\*([^*]+)\*\*")
_EDGES = '*_`".,;:? '
_LEADING = re.compile(r"^(?:(?:\\approx|≈|=)\s*|(-?)\s*(?:[€£¥₹₩]|(?:US|USD|EUR|GBP|INR|Rs\.?)(?=\s?[0-9]))\s*)")

_DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?P<decimal>(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?)"
_RATIO = (
    rf"(?:(?P<whole>[0-9]+)(?: |(?=\\)))?"
    rf"(?:(?P<over>{_DIGITS}) ?/ ?(?P<under>{_DIGITS})"
    rf"|\\[dt]?frac ?\{{ ?(?P<sign2>-?) ?(?P<over2>{_DIGITS}) ?\}} ?\{{ ?(?P<under2>{_DIGITS}) ?\}}"
    rf"|\\[dt]?frac ?(?P<over3>[0-9]) ?(?P<under3>[0-9]))"
)
_NUMBER = re.compile(rf"(?P<sign>[-+]?) ?(?:{_RATIO}|{_DECIMAL})")

_POWER_OF_TEN = re.compile(r"(?<=[0-9]) ?(?:\\times|\\cdot|[×·*]) ?10 ?\^ ?\{?([-+]?[0-9]{1,3})\}?$")
_HALF_DAY = re.compile(r"(?<=:[0-9]{2}) ?([ap])\.? ?m\b\.?", re.IGNORECASE)
_POINT_BEFORE_SLASH = re.compile(r"(?<=[0-9])\. ?(?=/)")
_TEN_TO = re.compile(r"([-+]?) ?10 ?\^ ?(?:\{ ?([-+]?[0-9]{1,3}) ?\}|([-+]?[0-9]{1,3}))")
_REPEATING = re.compile(r"(-?)([0-9]{1,40})\.([0-9]{0,40})\\overline ?\{([0-9]{1,40})\}")

_PERCENT = re.compile(r"\s?(?:\\?%|per ?cent\b|pct\b)", re.IGNORECASE)
_SCALE = re.compile(r" ?(hundred|thousand|million|billion|trillion)s?(?![\w-])", re.IGNORECASE)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_POWER = r"(?:\s?\^?\{?[23]\}?|[²³])?"
_UNIT_WORD = rf"[A-Za-zµ][A-Za-z.'-]{{0,24}}{_POWER}"
_ATTACHED_UNIT = re.compile(
    rf"(?:st|nd|rd|th|km|cm|mm|kg|mg|ml|mL|mph|kph|hrs?|mins?|secs?|ft|lbs?|oz|GB|MB|kB|kWh|km/h| ?[ap]\.?m){_POWER}\.?"
    r"| ?\^ ?\{? ?(?:st|nd|rd|th) ?\}?|\s?(?:°|\^\{?(?:\\circ|°)\}?|\\degree)\s?[CF]?|¢| ?/ ?(?:kg|lb|[A-Za-z]{3,12})"
)
_SPACED_UNIT = re.compile(rf" {_UNIT_WORD}(?: ?/ ?{_UNIT_WORD}| {_UNIT_WORD}){{0,5}}")
_NOT_UNITS = re.compile(
    r"or|and|to|plus|minus|times|over|of|by|but|not?|mod|pi|sqrt|sin|cos|tan|cot|log|ln|exp|if|then|is|are|equals"
    r"|versus|vs|than|thousand|million|billion|trillion|root|choose|factorial|halved|doubled|tripled|zero"
    r"|halves|thirds|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|million|billion)ths",
    re.IGNORECASE,
)
_NO_UNIT = re.compile(
    r" (?:wrong|incorrect|false|invalid|maybe|perhaps|at (?:most|least))$|^ (?:squar|cub)ed$", re.IGNORECASE
)
_OF_THINGS = re.compile(r" of (?:the |an? |his |her |their )?[A-Za-z]{3,24}")
_UNIT_OF_EXPRESSION = re.compile(
    r"(?<=[0-9})πi]) (?:(?:square|cubic|sq\.?|cu\.?) )?(?:units?|[ckm]m|inch(?:es)?|ft|foot|feet|yards?|miles?"
    r"|dollars?|cents?|euros?|pounds?|hours?|minutes?|seconds?|days?|weeks?|months?|years?|[km]?g|(?:kilo)?grams?"
    r"|lit(?:er|re)s?|[ckm]?m ?/ ?s|km ?/ ?h|mph|people|ways|times"
    rf"|(?:centi|kilo|milli)?met(?:er|re)s?|degrees?|radians?){_POWER}$"
)
_ONE_LETTER_UNITS = frozenset("mghsLl")
MATH_WORDS = re.compile(r"pi|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|exp|sqrt|gcd|lcm|max|min|det|mod|infty")
_TEXT = re.compile(r"[^\W\d_]+(?:(?: |(?<=[^\W\d_]{3})-(?=[^\W\d_]{3}))[^\W\d_]+)*[.!]?")
_SYMBOL = re.compile(r"[A-Za-z](?:_[0-9A-Za-z]|_\{[0-9A-Za-z]{1,9}\})?")
_CHOICE = re.compile(r"\(?([A-Za-z])\)[.:]?|(?:[Oo]ption|[Cc]hoice) \(?([A-Z])\)?")
_CHOICE_AND_TEXT = re.compile(r"\(?([A-J])[).:] ?[^()]{1,200}")


@dataclass(frozen=True, slots=True)
class Number:
    """An exactly read number; `places` counts written decimals and is None for integers and fractions."""

    value: Fraction
    places: int | None = None
    percent: bool = False


def extract_answer(text: str) -> str | None:
    r"""Return the final answer that the text commits to, cleaned, or None: never a number picked out of prose.

    It is the last balanced `\boxed{...}` after the thinking, else the last `<answer>...</answer>`, else the last
    `#### ...` line, else the text after the last "the answer is" or "answer:". A `####` line that begins with a letter
    and is followed by text is a heading. What the words next to it take back is not an answer: `\boxed{42}` is wrong.
    """
    final = final_text(text)
    if final is None:
        return None
    final = final[-_MAX_SEARCHED_CHARS:]
    region = standing_box(final)
    if region is None:
        region = _bare_box(final)
    if region is None:
        final = final[-_MAX_MARKED_CHARS:]
        region = _last_tagged(final) or _last_hashes(final) or _after_marker(final)
        region = region and region.rstrip("! ")
    answer = clean(region) if region else ""
    if marker := _after_marker(answer):
        answer = clean(marker)
    return answer or None


def extract_boxes(text: str) -> str | None:
    r"""Return the last boxes of a text as one list, or None if fewer than two stand together.

    They stand together with no more than commas, `and`, `or` and names between them: `x=\boxed{1}, y=\boxed{2}`.
    """
    if text.count("\\boxed") < 2:
        return None
    final = (final_text(text) or "")[-_MAX_SEARCHED_CHARS:]
    together: list[str] = []
    following = None
    found = boxes(final)[-_MAX_BOXES:]
    for box in reversed(found):
        if following is not None:
            between = final[box.end + 1 : following]
            if box.end >= following or len(between) > _MAX_BETWEEN_BOXES or not _BETWEEN_BOXES.fullmatch(between):
                break
        together.append(clean(final[box.content : box.end]))
        following = box.start
    if not 2 <= len(together) < _MAX_BOXES or is_taken_back(final, found[-1].start, found[-1].end + 1):
        return None
    if any(len(parts(answer)) != 1 for answer in together):
        return None
    if len(set(together)) == 1 and kind(readable(one_spelling(together[0]))):  # the whole list, written again
        return None
    return ", ".join(reversed(together))


def is_list(gold: str) -> bool:
    r"""Return True if the gold has several values, in any order: `1, 2`, `\{1, 2\}`, `\pm 2`."""
    return kind(readable(one_spelling(gold))) in ("list", "set")


def _last_tagged(text: str) -> str | None:
    # The closing tag is missing if generation stops at it.
    before, opened, rest = text.rpartition("<answer>")
    answer = rest.partition("</answer>")[0]
    end = len(text) - len(rest) + len(answer) + len("</answer>")
    return answer.strip() if opened and not is_taken_back(text, len(before), end) else None


def _bare_box(text: str) -> str | None:
    bare = list(_BARE_BOX.finditer(text))
    return bare[-1][1] if bare and not is_taken_back(text, *bare[-1].span()) else None


def _last_hashes(text: str) -> str | None:
    followed = False
    for line in reversed(text.split("\n")):
        _, hashes, answer = line.rstrip(" #\r\t").rpartition("####")
        answer = answer.strip(" #\t")
        if hashes and answer and not (answer.lstrip("*_ ")[:1].isalpha() and followed):
            return answer
        followed = followed or bool(line.strip())
    return None


def _after_marker(text: str) -> str | None:
    markers = list(_MARKER.finditer(text))
    if not markers:
        return None
    start = markers[-1].end()
    following = text[start : start + MAX_ANSWER_CHARS * 2]
    line = following.lstrip(": \t\r\n").partition("\n")[0]
    stop = next((m.start() for m in _SENTENCE_END.finditer(line) if m.start() > 0), len(line))
    end = start + len(following) - len(following.lstrip(": \t\r\n")) + stop
    return None if is_taken_back(text, start, end) else line[:stop]


def clean(answer: str) -> str:
    """Return the answer without markup, delimiters, currency, units and thousands separators; may be empty."""
    if len(answer) > MAX_ANSWER_CHARS or (answer.isdecimal() and answer.isascii()):  # the latter is most of GSM8K
        return answer.strip()
    text = _SMALL.sub(_full_size, without_special_tokens(answer.replace("</answer>", ""))).translate(_CHARS)
    text = _ENDLESS.sub(r"\\ldots", text)
    if "\\" in text:
        text = _FONT_GROUP.sub(r" \1", INK.sub("", text))
        text = _ONE_LETTER_TEXT.sub("", _INVISIBLE.sub(" ", text))
        text = _GROUPS.sub("", _TEXT_COMMAND.sub(r" \1", text).replace("{,}", ",").replace("\\%", "%"))
        text = _SPACING.sub(" ", text)
    text = with_bases(" ".join(_NOISE.sub("", text.replace("{,}", ",")).split()))
    if "/" in text:
        text = _POINT_BEFORE_SLASH.sub("", text)
    if ":" in text:
        text = _HALF_DAY.sub(lambda half: f" {half[1].lower()}m", text)
    while True:
        bare = _BOLD.sub(r"\1", text, count=1).rstrip(_EDGES + "\\")
        stripped = bare.lstrip("*_`\"': ")
        is_quoted = bool({"'", "`"} & set(bare[: len(bare) - len(stripped)]))
        if stripped.endswith("'") and (is_quoted or not stripped.rstrip("'").isalpha()):  # f' is not f
            stripped = stripped.rstrip("'")
        stripped = _LEADING.sub(r"\1", stripped, count=1)
        if stripped == text:
            break
        text = stripped
    if choice := _CHOICE.fullmatch(text):
        return choice[1] or choice[2]
    return _without_unit(_UNIT_OF_EXPRESSION.sub("", text))


def _full_size(small: re.Match[str]) -> str:
    digits = small[0].translate(_SMALL_DIGITS)
    return f"^{{{digits}}}" if small[1] else f"_{digits}" if len(digits) == 1 else f"_{{{digits}}}"


def _without_unit(text: str) -> str:
    match = _NUMBER.match(text)
    if match is None:
        return text
    rest = text[match.end() :]
    number = match[0] if match["decimal"] is None else match[0].replace(",", "").replace(" ", "")
    if not rest:
        return number.removesuffix(".")
    if percent := _PERCENT.match(rest):
        after = rest[percent.end() :]
        return f"{number}%" if not after or _is_unit(after) else text
    if scale := _SCALE.match(rest):
        value, after = read_number(number), rest[scale.end() :]
        if value is None or (after and not _is_unit(after)):
            return text
        scaled = value.value * _SCALES[scale[1].lower()]
        return str(scaled.numerator) if scaled.denominator == 1 else f"{scaled.numerator}/{scaled.denominator}"
    return number if _is_unit(rest) else text


def _is_unit(rest: str) -> bool:
    if _NO_UNIT.search(rest):
        return False
    if _ATTACHED_UNIT.fullmatch(rest):
        return True
    if not _SPACED_UNIT.fullmatch(rest):
        return False
    words = re.findall(r"[A-Za-zµ]+", _OF_THINGS.sub("", rest))
    if not words:
        return True
    if len(words[0]) == 1 and words[0] not in _ONE_LETTER_UNITS:
        return False
    return not any(_NOT_UNITS.fullmatch(word) for word in words)


def read_number(text: str) -> Number | None:
    """Return the exact number that the whole text is, or None: integer, decimal, fraction, mixed number, percentage."""
    if len(text) > 400:
        return None
    percent = text.endswith("%")
    if repeating := _REPEATING.fullmatch(text):
        minus, whole, once, again = repeating.groups()
        fraction = (int(once or 0) + Fraction(int(again), int("9" * len(again)))) / Fraction(f"1e{len(once)}")
        return Number(-(int(whole) + fraction) if minus else int(whole) + fraction)
    if power := _TEN_TO.fullmatch(text):
        ten = Fraction(10) ** int(power[2] or power[3])
        return Number(-ten if power[1] == "-" else ten)
    match = _NUMBER.fullmatch(_POWER_OF_TEN.sub(r"e\1", text.removesuffix("%").rstrip()))
    if match is None:
        return None
    sign = -1 if match["sign"] == "-" else 1
    if (decimal := match["decimal"]) is not None:
        digits = decimal.replace(",", "").replace(" ", "")
        mantissa, _, exponent = digits.lower().partition("e")
        places = len(mantissa.partition(".")[2]) - int(exponent or 0) if "." in mantissa or exponent else None
        return Number(sign * Fraction(digits), places, percent)
    over = match["over"] or match["over2"] or match["over3"]
    under = match["under"] or match["under2"] or match["under3"]
    top, bottom = (int(part.replace(",", "").replace(" ", "")) for part in (over, under))
    if bottom == 0 or (match["whole"] and match["sign2"]):
        return None
    top = -top if match["sign2"] else top
    return Number(sign * (int(match["whole"] or 0) + Fraction(top, bottom)), None, percent)


def numbers_equal(gold: Number, answer: Number) -> bool:
    """Return True if the answer is the gold number, to the precision of the decimals on either side.

    Integers and fractions compare exactly. With a decimal on either side both are rounded to 6 places (as math-verify
    does), or to 4 significant digits below 0.001; zero is only zero. A gold decimal of at least 3 places also accepts
    the fraction that it is the rounding of: gold `0.333` accepts `1/3`, gold `1/3` does not accept `0.333`.
    """
    if _close(gold, answer, gold.value, answer.value):
        return True
    if gold.percent == answer.percent:
        return False
    if gold.percent:
        return _close(gold, answer, gold.value / 100, answer.value)
    return _close(gold, answer, gold.value, answer.value / 100)


def _close(gold: Number, answer: Number, a: Fraction, b: Fraction) -> bool:
    if a == b:
        return True
    if (gold.places is None and answer.places is None) or a == 0 or b == 0:
        return False
    if (gold.places or 0) >= 3 and answer.places is None and pow(10, 400, b.denominator) and round(b, gold.places) == a:
        return True
    places = 6
    while places < 400 and abs(a) * 10 ** (places - 3) < 1:
        places += 1
    return round(a, places) == round(b, places)


def is_text(answer: str) -> bool:
    """Return True if the answer is words rather than mathematics, and is compared as a string."""
    if _TEXT.fullmatch(answer) is None or sum(map(str.isalpha, answer)) < 3:
        return False
    return not any(MATH_WORDS.fullmatch(word) for word in answer.split())


def same_text(gold: str, answer: str) -> bool:
    """Return True if both are the same string; words compare without case and spaces, and `(B) 12` is choice `B`."""
    if gold == answer:
        return True
    if len(gold) == 1 and (choice := _CHOICE_AND_TEXT.fullmatch(answer)):
        return choice[1] == gold.upper()
    folded = ["".join(text.casefold().split()).rstrip(".!") for text in (gold, answer)]
    return is_text(gold) and folded[0] == folded[1]


def plain_verdict(answer: str, gold: str) -> bool | None:
    """Return True if the answer equals the gold, as far as words and plain numbers tell; None if mathematics must."""
    if same_text(gold, answer):
        return True
    if is_text(gold):
        return False
    if (gold_number := read_number(gold)) is None:
        same = without_loose_spaces(one_spelling(gold)) == without_loose_spaces(one_spelling(answer))
        return True if same else None
    number = read_number(answer)
    name, equals, value = answer.partition("=")
    if equals and (_SYMBOL.fullmatch(name.strip()) or is_text(name.strip())):  # `x = 5` or `Area = 5 cm`
        number = read_number(_without_unit(value.strip()))
    return None if number is None else numbers_equal(gold_number, number)


def parse_label(label: object) -> tuple[str, ...]:
    r"""Return the gold answers of a label, cleaned; matching any one of them is correct.

    Accepts numbers, strings (plain, LaTeX, `\boxed{...}`, GSM8K's `... #### 42`) and lists of these.

    Raises:
        DataError: the label is empty, or contains something that is not an answer.
    """
    try:
        golds = tuple(dict.fromkeys(_golds(label)))
    except RecursionError as error:
        raise _label_error("a list of fewer levels", label) from error
    if not golds:
        raise _label_error("at least one answer", label)
    if sum(map(len, golds)) > 8 * MAX_ANSWER_CHARS:
        raise _label_error(f"answers of at most {8 * MAX_ANSWER_CHARS} characters in all", label)
    return golds


def _golds(label: object) -> Iterator[str]:
    if isinstance(label, list | tuple):
        for item in label:
            yield from _golds(item)
        return
    if isinstance(label, numbers.Number) and not isinstance(label, bool):
        label = f"{label}"
        if read_number(label) is None:
            raise _label_error("a finite number", label)
    if not isinstance(label, str):
        raise _label_error("a number, a string or a list of them", label)
    yield _gold_of(label)


@functools.lru_cache(maxsize=1024)  # an episode grades every turn with the same label
def _gold_of(label: str) -> str:
    gold = clean(
        label.rpartition("####")[2]
        if "####" in label
        else extract_boxes(label) or last_boxed(label) or _bare_box(label) or label
    )
    if not gold or len(gold) > MAX_ANSWER_CHARS:
        raise _label_error(f"an answer of 1 to {MAX_ANSWER_CHARS} characters", label)
    return gold


def _label_error(expected: str, label: object) -> DataError:
    return DataError(f"label: expected {expected}, got {brief(label)}. Write the gold answer in the row's label field.")
