r"""Reads which options an answer names: `B`, `(b)`, `\text{B}`, `B. Paris`, "The correct one is B", an option's text.

Several are a hedge, which the rewards refuse, and a letter in the middle of prose is none: `vitamin C` names nothing.
"""

from __future__ import annotations

import numbers
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentenv.rewards._arguments import label_error
from agentenv.rewards.text import last_boxed

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_ANSWER_CHARS = 1024
_MAX_SEARCHED_CHARS = 32_768
_MAX_MARKERS = 16
_MAX_BARE_CHARS = 200

_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|textnormal|mbox|mathrm|mathbf|mathsf|mathit|boxed|fbox|emph|bf|rm)"
    r"\s*\{([^{}]*)\}"
)
_NOISE = re.compile(r"\\(?:left|right|displaystyle)\b|\\[()\[\],;!: ]|\\?\$|[*`]|\\(?=[{}])")
_EDGES = " _\"'“”‘’«»{}"
_ARTICLE = r"(?![AI] (?!(?:is|or|and|because|since|as|but|was|which|seems)\b)[a-z])"
_ONE = r"[(\[]?(?<![\w'])([A-Za-z])(?![\w'’])[)\]]?"
_GAP = r"(?:[ ,;/&|+、]|\bor\b|\band\b|或|和)+"
_SINGLE = re.compile(rf"{_ONE} ?[.:,;!]*")
_LIST = re.compile(rf"{_ONE}[.:]?(?:{_GAP}{_ONE}[.:]?)+")
_PREFIX = re.compile(
    r"(?:[(\[]([A-Za-z])[)\]]|([A-Za-z])[)\]]) ?[.:]? ?(?P<behind>.+)"
    r"|(?:([A-Za-z])[.:]|([A-Za-z]) [-–—]) (?P<spaced>.+)|([A-Z])[.:](?![A-Za-z]\b)(?P<close>.+)"
    r"|([A-Z]) \((?P<bracketed>.+)\)\.?"
)
_ALSO = re.compile(
    r"(?:\bor\b|/|或) ?[(\[]?([A-Z])(?= ?(?:$|[,.;:)\]]))|(?<![\w(])[(\[]?([A-Z])[)\]]|(?<=[ ,;])([A-Z])[.:] (?=\w)"
)
_LETTERS = rf"(?:(?:{_GAP})?[(\[]?(?<![A-Za-z0-9_'’]){_ARTICLE}(?:[A-Z]|[a-z](?=[)\].,]|$))(?![\w'’])[)\]]?){{1,12}}"
_MARKED = re.compile(
    r"(?i:\b(?:is|are|be|options?|choices?|answers?|letters?|alternative|select|choose|chose|pick|either)\b|[:=]|选项?|答案|是|为)"
    rf" ?(?i:the )?(?i:option |choice |letter |answer )?(?P<letters>{_LETTERS})"
)
_VERDICT = re.compile(
    rf"(?P<letters>{_LETTERS}) (?:is|are|was|seems|must be|would be) (?:the |both )?(?:most |best )?"
    r"(?:correct|right|answer|best|true|appropriate|likely)\b"
)
_NEGATION = re.compile(r"\b(?:not|neither|nor|except|incorrect|wrong|false|cannot)\b|n['’]t\b|不|错", re.IGNORECASE)
_LETTER = re.compile(r"(?<![\w'])[A-Za-z](?![\w'’])")

_MARKER = re.compile(
    r"\b(?:answer(?: (?:to|for) [^.:\n]{1,40}?)?|(?:correct|right|best) (?:option|choice|alternative))\b[*_\"')\s]{0,4}"
    r"(?:is\b|are\b|was\b|would be\b|should be\b|must be\b|[:：=])"
    r"|^[#*_ ]{0,8}(?:(?:final|correct) )?answer[*_ ]{0,4}$"
    r"|(?:答案|正确选项)\s?(?:应该?)?[是为：:】]|(?:答案|[故应该题此以])选(?:择|项)?[是为：:]?",
    re.IGNORECASE | re.MULTILINE,
)
_ANSWER_TAG = re.compile(r"<answer>([^<]*)(?:</answer>|$)")
_CONTRAST = re.compile(
    r"(?:, (?:and )?not|,? and not| rather than| instead of) (?:option |choice )?[(\[]?[A-Za-z][)\]]?\.?$"
)
_CLAUSE_END = re.compile(r"[.!?](?=\s|$)|[。！？]|,?\s(?:because|since|which|so|as)\s")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a question: their letters in order, and their texts where the row has them."""

    letters: str
    texts: Mapping[str, str] = field(default_factory=dict)
    """Letter to text, as `folded` gives it."""

    def with_text(self, answer: str) -> frozenset[str]:
        """The options that have this very text."""
        answer = folded(answer)
        return frozenset(letter for letter, text in self.texts.items() if answer and text == answer)


def read_options(value: Any, default_letters: str) -> Options:
    """The options of a row: a list of texts, a dict from letter to text, `{"label": [...], "text": [...]}`, or None.

    Raises:
        DataError: it is none of these.
    """
    if value is None:
        return Options(default_letters)
    if isinstance(value, Mapping) and {"label", "text"} <= value.keys():
        labels, texts = (_listed(value[name]) for name in ("label", "text"))
        labels = list(ALPHABET[: len(texts)]) if all(str(label).isdigit() for label in labels) else labels
    elif isinstance(value, Mapping):
        labels, texts = list(value), list(value.values())
    else:
        texts = _listed(value)
        labels = list(ALPHABET[: len(texts)])
    letters = [label.strip().upper() if isinstance(label, str) else "" for label in labels]
    sound = all(len(letter) == 1 and letter in ALPHABET for letter in letters) and len(set(letters)) == len(texts)
    if not texts or not sound or not all(isinstance(text, str) for text in texts):
        raise label_error("a list of option texts, or a dict from letter to text", value, where="options")
    return Options("".join(letters), dict(zip(letters, map(folded, texts), strict=True)))


def _listed(value: Any) -> list[Any]:
    """The members of a list or an array, as rows of Parquet files have it; none of anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, list | tuple) else []


def clean(answer: str) -> str:
    """The answer in one line of plain characters, without markup; cut where it is far too long."""
    text = unicodedata.normalize("NFKC", answer[:MAX_ANSWER_CHARS])
    for _ in range(4):
        text = _TEXT_COMMAND.sub(r" \1", text)
    return " ".join(_NOISE.sub("", text).split()).strip(_EDGES)


def folded(text: str) -> str:
    """What is compared of an option's text."""
    return clean(text).casefold().rstrip(" .,;!。")


def letters_of(answer: str, options: Options, *, prose: bool = True) -> frozenset[str]:
    """The letters of the options that an answer names; empty where it names none, or what it is not."""
    text = _CONTRAST.sub("", clean(answer))
    if (single := _SINGLE.fullmatch(text)) and single[1].upper() in options.letters:
        return frozenset(single[1].upper())
    if same := options.with_text(text):
        return same
    if _LIST.fullmatch(text):
        named = {letter.upper() for letter in _LETTER.findall(text)}
    elif prefix := _PREFIX.fullmatch(text):
        named = _prefixed(prefix, options)
    elif prose and not _NEGATION.search(text):
        found = [match["letters"] for pattern in (_MARKED, _VERDICT) for match in pattern.finditer(text)]
        named = {letter.upper() for letters in found for letter in _LETTER.findall(letters)}
    else:
        named = set()
    return frozenset(named) if named <= set(options.letters) else frozenset()


def _prefixed(prefix: re.Match[str], options: Options) -> set[str]:
    """The letter in front of a text, and others that the text brings in."""
    letter = next(filter(None, prefix.groups())).upper()
    rest = prefix["behind"] or prefix["spaced"] or prefix["close"] or prefix["bracketed"]
    if same := options.with_text(rest):
        return {letter} if letter in same else {letter, *same}
    return {letter, *(other for match in _ALSO.findall(rest) for other in match if other)}


def final_answer(final: str, options: Options, *, require_box: bool) -> tuple[str | None, bool]:
    r"""The part of the final text that answers, and whether it is boxed; None where there is none.

    It is the last `\boxed{…}`; unless a box is required also the last `<answer>…</answer>`, what follows the last "the
    answer is" that names an option, a last line such as "So B is correct", or all of a text that is but an option.
    """
    final = final[-_MAX_SEARCHED_CHARS:]
    if (boxed := last_boxed(final)) is not None:
        return boxed, True
    if require_box:
        return None, False
    if tagged := _ANSWER_TAG.findall(final):
        return tagged[-1], False
    clauses = [_clause(final[marker.end() :]) for marker in list(_MARKER.finditer(final))[-_MAX_MARKERS:]]
    if clauses:
        return next((clause for clause in reversed(clauses) if letters_of(clause, options)), clauses[-1]), False
    last = final.rstrip().rpartition("\n")[2]
    if len(last) <= _MAX_BARE_CHARS and _VERDICT.search(clean(last)):
        return last, False
    bare = final.strip()
    return (bare if len(bare) <= _MAX_BARE_CHARS and letters_of(bare, options, prose=False) else None), False


def _clause(behind: str) -> str:
    line = behind[:MAX_ANSWER_CHARS].lstrip(": \t\r\n*_：").partition("\n")[0]
    stop = next((end.start() for end in _CLAUSE_END.finditer(line) if end.start() > 0), len(line))
    return line[:stop]


def read_label(label: object, options: Options, index_base: int) -> str:
    """The letter of the right option: the label is a letter, an index from `index_base`, or the option's text.

    Raises:
        DataError: it is none of these, or it fits several options.
    """
    index = label
    if isinstance(label, str):
        text = last_boxed(label) or label
        named = letters_of(text, options, prose=False)
        if len(named) == 1:
            return next(iter(named))
        index = int(text) if not named and re.fullmatch(r"\s*[0-9]{1,2}\s*", text, re.ASCII) else None
    if isinstance(index, numbers.Integral) and not isinstance(index, bool):
        at = int(index) - index_base
        if 0 <= at < len(options.letters):
            return options.letters[at]
    expected = f"one option ({options.letters[0]}..{options.letters[-1]}, an index from {index_base}, or its text)"
    raise label_error(expected, label)
