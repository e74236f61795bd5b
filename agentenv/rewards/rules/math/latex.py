r"""Write LaTeX that means the same in one way, which math-verify can read: `\dfrac`, `≠`, `\frac\pi6`."""

from __future__ import annotations

import re
from fractions import Fraction

_UNICODE = str.maketrans(
    {"∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}"}
    | {"≠": r"\neq ", "≤": r"\leq ", "≥": r"\geq ", "±": r"\pm ", "∓": r"\mp ", "·": r"\cdot ", "×": r"\times "}
    | {"÷": r"\div ", "²": "^{2}", "³": "^{3}"}
)
_ARGUMENT = r" ?(\{(?:[^{}]++|\{[^{}]*+\})*+\}|\\[A-Za-z]++|[0-9A-Za-z])"
_RULES = tuple(
    (re.compile(pattern), written)
    for pattern, written in (
        (r"\\(?:left|right)\.|\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])", ""),
        (r"\^ ?\{ ?° ?\}|\^? ?°", r"^{\\circ}"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:mathbf|mathrm|mathit|boldsymbol|bm) ([A-Za-z])(?![A-Za-z])", r"\1"),
        (r"\\ne(?![A-Za-z])", r"\\neq"),
        (r"\\(?:le|leqslant)(?![A-Za-z])", r"\\leq"),
        (r"\\(?:ge|geqslant)(?![A-Za-z])", r"\\geq"),
        (r"<=", r"\\leq "),
        (r">=", r"\\geq "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"[\[(] ?\\begin\{(?:matrix|array)\}(?:\{[clr| ]*\})?", r"\\begin{bmatrix}"),
        (r"\\end\{(?:matrix|array)\} ?[\])]", r"\\end{bmatrix}"),
        (r"\\(?:lor|vee)(?![A-Za-z])", " or "),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\([lr])brace(?![A-Za-z])", lambda found: "\\{" if found[1] == "l" else "\\}"),
        (r"(?<![A-Za-z\\])(ln|log)(?![A-Za-z])", r"\\\1"),
        (r"\\lg(?![A-Za-z])", r"\\log"),
        (r"\\log ?_ ?(?:e|\{ ?e ?\})", r"\\ln "),
        (r"(?:√|\\sqrt) ?\(", "sqrt("),
        (r"√ ?(?:\{([^{}]*)\}|([0-9.]+|[A-Za-z]))", r"\\sqrt{\1\2}"),
        (r"_ ?(?:\{ ?\\(max|min) ?\}|\\(max|min)(?![A-Za-z]))", r"_{\1\2}"),
        (r"(?<!\\)\{ +", "{"),
        (r"(?<!\\) +\}", "}"),
        (r"\\sqrt ?([0-9A-Za-z])", r"\\sqrt{\1}"),
        (rf"\\frac(?![A-Za-z]){_ARGUMENT}{_ARGUMENT}", lambda found: rf"\frac{_braced(found[1])}{_braced(found[2])}"),
    )
)
_BASES = {
    name: base
    for base, name in enumerate(
        ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
         "fourteen", "fifteen", "sixteen"),
        start=2,
    )
} | {"bin": 2, "binary": 2, "oct": 8, "octal": 8, "dec": 10, "decimal": 10, "hex": 16, "hexadecimal": 16}  # fmt: skip
_IN_BASE = re.compile(
    r"(?<![\w\\^_.}])(?P<open>(?:\\left ?)?[(\[{] ?|\\overline ?\{ ?)?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,4}(?: [0-9]{3,4})+"
    r"|(?:[0-9]|[A-J](?=[0-9A-J])|[a-f](?=[0-9a-f]))[0-9A-Ja-f]*(?:\.[0-9A-J]+)?)"
    r"(?(open) ?(?:\\right ?)?[)\]}])"
    r"(?: ?_ ?(?:(?P<bare>[0-9]{1,2}(?![0-9])|[A-Za-z]+)|[{(] ?(?:base ?)?\(?(?P<braced>[0-9]{1,2}|[A-Za-z]+)\)? ?[})])"
    r"| (?:in )?(?P<bracket>\()?base[ -]?(?P<named>[0-9]{1,2}|[a-z]+)(?(bracket)\)))"
)
_ONE_BASE = re.compile(r"(?<![\w\\^_.])([0-9A-J.]+)_\{([0-9]{1,2}|[A-Za-z])\}")
_LOOSE_SPACE = re.compile(r" (?![0-9.A-Za-z])|(?<![0-9.A-Za-z]) |(?<=[0-9.]) (?=[A-Za-z])|(?<=[A-Za-z]) (?=[0-9.])")

_ALL_NUMBERS = re.compile(r"- ?\\infty ?< ?[A-Za-z] ?< ?\+?\\infty")
_DECIMAL_POWER = re.compile(r"\^ ?(?:\{ ?(-?[0-9]{0,9}\.[0-9]{1,9}) ?\}|([0-9]{0,9}\.[0-9]{1,9}))")
_TRIGONOMETRIC = r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])(?: ?\^ ?(?:[0-9]|\{[0-9]\}))? ?"
_ANGLE = r"([0-9]+(?:\.[0-9]+)?) ?(?:\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z]))"
_DEGREES = re.compile(rf"({_TRIGONOMETRIC}[({{]? ?){_ANGLE}")
_ANY_DEGREES = re.compile(_ANGLE)
_BARE_ANGLE = re.compile(
    rf"({_TRIGONOMETRIC})(?:\( ?([0-9]+(?:\.[0-9]+)?) ?\)|\{{ ?([0-9]+(?:\.[0-9]+)?) ?\}}"
    r"|([0-9]+(?:\.[0-9]+)?)(?= ?(?:[=+\-)}]|$)))"
)
_SET_OF = re.compile(
    r"\\?\{ ?([A-Za-z]) ?(?:\\in ?(?:\\mathbb ?\{R\}|R) ?)?(?:\||:|\\mid(?![A-Za-z])) ?"
    r"((?=[^|:,{}]*(?:[<>]|\\[lg]eq))[^|:,{}]*+)\}"
)
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_TOKEN = re.compile(r"[()\[\]{}]|, ?(?:and|or)(?![A-Za-z])|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|[,;]")
_LEADING_PLUS = re.compile(r"(^|[=({,] ?)\+")


def _braced(argument: str) -> str:
    return argument if argument[0] == "{" else f"{{{argument}}}"


def with_bases(text: str) -> str:
    r"""Return the text with one spelling for numbers in bases: `2516_{8}` for `(2516)_8` and `2516_{\text{eight}}`.

    The base is part of the number: `2516_{8}` equals neither `2516` nor `1358`, but base ten is not written.
    """
    return _IN_BASE.sub(_in_one_base, text) if "_" in text or "base" in text else text


def _in_one_base(found: re.Match[str]) -> str:
    name = found["bare"] or found["braced"] or found["named"]
    base = int(name) if name.isdecimal() else _BASES.get(name.lower())
    digits = re.sub("[ ,]", "", found["digits"])
    limit = 10 if base is None else base
    valid = 2 <= limit <= 36 and all(int(digit, 36) < limit for digit in digits.replace(".", ""))
    if not valid or (base is None and len(name) > 1) or (limit != 16 and digits != digits.upper()):
        return found[0]
    digits = digits.upper().lstrip("0")
    digits = digits if digits[:1] not in ("", ".") else f"0{digits}"
    return digits if base == 10 else f"{digits}_{{{base or name}}}"


def one_spelling(text: str) -> str:
    """Return the text with one spelling for each sign: it stays LaTeX, and means the same."""
    text = text.translate(_UNICODE)
    for pattern, written in _RULES:
        text = pattern.sub(written, text)
    return text


def without_loose_spaces(text: str) -> str:
    """Return the text without the spaces that separate neither two words nor two numbers."""
    return _LOOSE_SPACE.sub("", " ".join(text.split()))


def readable(text: str) -> str:
    r"""Return what math-verify reads for a text in one spelling, with the same value.

    Sets of solutions become their condition, `a \pm b` becomes `a+b, a-b`, decimal powers become fractions, and degrees
    in a trigonometric function become radians.
    """
    text = _ALL_NUMBERS.sub(r"(-\\infty,\\infty)", text.replace("**", "^").replace("%", "\\%"))
    if (found := _SET_OF.fullmatch(text)) and re.search(rf"(?<![A-Za-z\\]){found[1]}(?![A-Za-z])", found[2]):
        text = found[2].rstrip("\\ ")
    text = _ONE_BASE.sub(r"N_{\2x\1}", text)
    text = _DECIMAL_POWER.sub(lambda power: f"^{{{Fraction(power[1] or power[2])}}}", text)
    return _both_signs(_DEGREES.sub(r"\1(\\frac{\2\\pi}{180})", text))


def in_radians(text: str) -> str:
    """Return the text with its degrees, and bare numbers in trigonometric functions, as multiples of pi."""
    text = _ANY_DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    return _BARE_ANGLE.sub(lambda angle: rf"{angle[1]}(\frac{{{angle[2] or angle[3] or angle[4]}\pi}}{{180}})", text)


def _both_signs(text: str) -> str:
    if "\\pm" not in text:
        return text
    inside = _inside(text, "\\{")
    items = parts(text if inside is None else inside)
    if any(item.count("\\pm") > 1 for item in items):  # the signs may be the same, or any
        return text
    written = []
    for item in items:
        for plus, minus in (("+", "-"), ("-", "+")) if "\\pm" in item else (("", ""),):
            signed = item.replace("\\pm", plus).replace("\\mp", minus) if plus else item
            written.append(_LEADING_PLUS.sub(r"\1", signed.strip()))
    joined = ", ".join(written)
    return joined if inside is None else f"\\{{{joined}\\}}"


def parts(text: str) -> list[str]:
    """Return what stands between the commas, semicolons, `and` and `or` outside of all brackets."""
    found, start, depth = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in _BRACKETS:
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
        elif depth == 0:
            found.append(text[start : token.start()])
            start = token.end()
    return [part for part in [*found, text[start:]] if part.strip(" \\")]


def _inside(text: str, opening: str) -> str | None:
    """Return what the brackets around the whole text contain, or None."""
    closing = opening[:-1] + _BRACKETS[opening[-1]]
    if not (text.startswith(opening) and text.endswith(closing)):
        return None
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in _BRACKETS) - (token[0] in ")]}")
        if depth == 0 and token[0] in ")]}":
            return text[len(opening) : -len(closing)] if token.end() == len(text) else None
    return None


def kind(text: str) -> str:
    r"""Return how several values are written: "set" in `\{…\}`, "tuple" in `(…)`, "list" without brackets, else ""."""
    for opening, name in (("\\{", "set"), ("{", "list"), ("(", "tuple")):
        inside = _inside(text, opening)
        if inside is not None:
            return name if len(parts(inside)) > 1 else ""
    return "list" if len(parts(text)) > 1 else ""
