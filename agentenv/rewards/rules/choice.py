r"""Reward multiple choice: exactly one option that the response commits to, never the first capital letter in prose.

Example:
    >>> await ChoiceReward().grade(Response(r"So \boxed{The correct one is B}.", label="B"))
    RewardResult(reward=1.0, score=1.0, …, components={'correct': 1.0, 'boxed': 1.0}, extracted='B', …)

The label is a letter, an index or an option's text. If the row has the options, in metadata["options"], an answer may
be an option's text too. See `letters_of` for what counts as naming an option: `B`, `(b)`, `\text{B}`, `B. Paris`, "The
correct one is B". Several options are a hedge, which is rejected: `A or B`, `A (90%), B (10%)`, and, if the row has the
options, `A. Paris / Rome`. A letter in prose names none: `vitamin C`.
"""

from __future__ import annotations

import numbers
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentenv.core.arguments import label_error, number, one_of, shown, whole_number
from agentenv.errors import ConfigError
from agentenv.rewards.rules.length import Count, LengthReward
from agentenv.rewards.rules.repetition import RepetitionReward
from agentenv.rewards.rules.text import (
    FONTS,
    INK,
    boxes,
    final_text,
    is_alternative,
    is_taken_back,
    last_boxed,
    standing_box,
)
from agentenv.rewards.types import Response, RewardResult, Status

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_ANSWER_CHARS = 1024
_MAX_SEARCHED_CHARS = 32_768
_MAX_MARKERS = 16
_MAX_BARE_CHARS = 200
_MAX_LINES = 16

_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|textnormal|mbox|mathrm|mathbf|mathsf|mathit|boxed|fbox|emph|bf|rm)"
    r"\s*\{([^{}]*)\}"
)
_NOISE = re.compile(rf"\\(?:left|right)\b|\\{FONTS}|\\[()\[\],;!: ]|\\?\$|[*`]|\\(?=[{{}}])")
_EDGES = " _\"'“”‘’«»{}"
_ARTICLE = r"(?![AI] (?!(?:is|or|and|because|since|as|but|was|which|seems)\b)[a-z])"
_ONE = r"[(\[]?(?<![\w'])([A-Za-z])(?![\w'’])[)\]]?"
_GAP = r"(?:[ ,;/&|+、]|\bor\b|\band\b|或|和)+"
_SINGLE = re.compile(rf"{_ONE} ?[.:,;!]*")
_RANGE = r" ?(?:\.{2,}|[-–—~]|\bto\b|\bthrough\b) ?"
_LIST = re.compile(rf"{_ONE}(?:[.:]?{_GAP}{_ONE}|{_RANGE}{_ONE})+[.:]?")
_PREFIX = re.compile(
    r"(?:[(\[]([A-Za-z])[)\]]|([A-Za-z])[)\]]) ?[.:]? ?(?P<behind>.+)"
    r"|(?:([A-Za-z])[.:]|([A-Za-z]) [-–—]) (?P<spaced>.+)|([A-Z])[.:](?![A-Za-z]\b)(?P<close>.+)"
    r"|([A-Z]) \((?P<bracketed>(?:[^()]|\([^()]*\))+)\)\.?"
)
_WITH_TEXT = re.compile(r"(?P<before>.+) [(\[](?P<last>[A-Z])[)\]]\.?|(?P<first>[A-Za-z]), (?P<behind>.+)")
_ALSO = re.compile(
    r"(?:\bor\b|/|或) ?[(\[]?([A-Z])(?= ?(?:$|[,.;:)\]]))|(?<![\w(])[(\[]?([A-Z])[)\]]"
    r"|(?<=[ ,;])([A-Z])(?:[.:] (?=\w)| ?[-–—(:=] ?[0-9])"
)
_BETWEEN_TEXTS = re.compile(r"(?: *(?:[,;/&|()]|\b(?:and|or|maybe|perhaps|possibly)\b))+ *")
_LETTERS = rf"(?:(?:{_GAP})?[(\[]?(?<![A-Za-z0-9_'’]){_ARTICLE}(?:[A-Z]|[a-z](?=[)\].,]|$))(?![\w'’])[)\]]?){{1,12}}"
_MARKED = re.compile(
    r"(?i:\b(?:(?:it|that|this|answer)['’]s|is|are|be|options?|choices?|answers?|letters?|alternative|select|choose|chose|pick|either)\b|[:=]|选项?|答案|是|为)"
    rf" ?(?i:the )?(?i:option |choice |letter |answer )?(?P<letters>{_LETTERS})"
)
_COMMITMENT = re.compile(
    r"(?i:(?:(?:^|[.,;:!] |\b(?:so|thus|hence|therefore|then|that),? )(?:it|that|this)(?:['’]s| is| must be)"
    r"|\b(?:let['’]s|I(?:['’](?:d|ll|m))?(?: \w+){0,2}?) (?:choose|chose|select|pick|picked|go with|going with|say)"
    r"|\b(?:my|our|final|right|best) (?:choice|pick|selection|guess)(?: is|:)"
    r"|(?:^|[.;:!] )(?:so|thus|hence|therefore),?)"
    rf" (?:the )?(?:option |choice |letter )?)[\"“'‘]?(?P<letters>{_LETTERS})(?=[.,;:!)\"”'’]*(?: |$))"
)
_OTHER = re.compile(
    r"[.,;!)]*(?:\s+(?P<or>or|alternatively|maybe|perhaps|possibly)[,:]?)? (?P<other>[^.\n]{1,80})", re.IGNORECASE
)
_LEAD = re.compile(rf"{_ARTICLE}[(\[]?([A-Z])[)\]]?(?=[ ,;])")
_ALONE = re.compile(rf"(?:[Oo]ption |[Cc]hoice )?{_SINGLE.pattern}")
_VERDICT = re.compile(
    rf"(?P<letters>{_LETTERS}) (?:is|are|was|seems|must be|would be) (?:the |both )?(?:most |best )?"
    r"(?:correct|right|answer|best|true|appropriate|likely)\b"
)
_NEGATION = re.compile(
    r"\b(?:not|never|neither|nor|except|incorrect|wrong|false|cannot)\b|n['’]t\b|不|错", re.IGNORECASE
)
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
class ChoiceOptions:
    """The options of a question: their letters in order, and their texts if the row has them."""

    letters: str
    texts: Mapping[str, str] = field(default_factory=dict)
    """Letter to text, as `fold` returns it."""

    def with_text(self, answer: str) -> frozenset[str]:
        """Return the options with this text."""
        answer = fold(answer)
        return frozenset(letter for letter, text in self.texts.items() if answer and text == answer)


def read_options(value: Any, default_letters: str) -> ChoiceOptions:
    """Read the options of a row: a list of texts, a dict of letter to text, `{"label": [...], "text": [...]}`, or None.

    Raises:
        DataError: it has another form.
    """
    if value is None:
        return ChoiceOptions(default_letters)
    if isinstance(value, Mapping) and {"label", "text"} <= value.keys():
        labels, texts = (_members(value[name]) for name in ("label", "text"))
        labels = list(ALPHABET[: len(texts)]) if all(str(label).isdigit() for label in labels) else labels
    elif isinstance(value, Mapping):
        labels, texts = list(value), list(value.values())
    else:
        texts = _members(value)
        labels = list(ALPHABET[: len(texts)])
    letters = [label.strip().upper() if isinstance(label, str) else "" for label in labels]
    valid = all(len(letter) == 1 and letter in ALPHABET for letter in letters) and len(set(letters)) == len(texts)
    if not texts or len(letters) != len(texts) or not valid or not all(isinstance(text, str) for text in texts):
        raise label_error("a list of option texts, or a dict from letter to text", value, where="options")
    return ChoiceOptions("".join(letters), dict(zip(letters, map(fold, texts), strict=True)))


def _members(value: Any) -> list[Any]:
    """Return the members of a list, or of an array, as in Parquet rows; [] for anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, list | tuple) else []


def clean(answer: str) -> str:
    """Return the answer in one line of plain characters, without markup; a very long one is cut."""
    text = unicodedata.normalize("NFKC", answer[:MAX_ANSWER_CHARS])
    text = INK.sub("", text)
    for _ in range(4):
        text = _TEXT_COMMAND.sub(r" \1", text)
    return " ".join(_NOISE.sub("", text).split()).strip(_EDGES)


def fold(text: str) -> str:
    """Return the form in which options' texts are compared."""
    return clean(text).casefold().rstrip(" .,;!。")


def letters_of(answer: str, options: ChoiceOptions, *, prose: bool = True) -> frozenset[str]:
    """Return the letters of the options that an answer names; empty if it names none, or excludes one."""
    text = _CONTRAST.sub("", clean(answer))
    if (single := _SINGLE.fullmatch(text)) and single[1].upper() in options.letters:
        return frozenset(single[1].upper())
    if same := options.with_text(text):
        return same
    if (both := _WITH_TEXT.fullmatch(text)) and (same := options.with_text(both["before"] or both["behind"])):
        named = {both["last"] or both["first"].upper(), *same}
    elif _LIST.fullmatch(text):
        named = {letter.upper() for letter in _LETTER.findall(text)}
    elif prefix := _PREFIX.fullmatch(text):
        letter = next(filter(None, prefix.groups())).upper()
        rest = prefix["behind"] or prefix["spaced"] or prefix["close"] or prefix["bracketed"]
        if also := options.with_text(rest):
            named = {letter} if letter in also else {letter, *also}
        else:
            named = {letter, *(other for match in _ALSO.findall(rest) for other in match if other)}
            others = fold(rest).removeprefix(options.texts.get(letter, ""))
            named.update(*map(options.with_text, _BETWEEN_TEXTS.split(others)))
    elif prose and not _NEGATION.search(text):
        found = [match["letters"] for pattern in (_MARKED, _VERDICT) for match in pattern.finditer(text)]
        if found and (lead := _LEAD.match(text)):
            found.append(lead[1])
        named = {letter.upper() for letters in found for letter in _LETTER.findall(letters)}
    else:
        named = set()
    return frozenset(named) if named <= set(options.letters) else frozenset()


def final_answer(final: str, options: ChoiceOptions, *, require_box: bool) -> tuple[str | None, bool]:
    r"""Return the part of the final text that answers, or None, and True if it is boxed.

    It is the last `\boxed{…}`; unless a box is required also the last `<answer>…</answer>`, the clause after the last
    "the answer is" that names an option, a last line such as "So B is correct", "I choose B" or "B", or a text that is
    only an option. Behind a box that names no option, these count too.
    """
    final = final[-_MAX_SEARCHED_CHARS:]
    boxed = standing_box(final)
    if require_box or boxed == "" or (boxed and letters_of(boxed, options)):
        return boxed or None, bool(boxed)
    if boxed:
        behind = _unboxed_answer(final[boxes(final)[-1].end + 1 :], options)
        return (boxed, True) if behind is None or not letters_of(behind, options) else (behind, False)
    return _unboxed_answer(final, options), False


def _unboxed_answer(final: str, options: ChoiceOptions) -> str | None:
    if tagged := _ANSWER_TAG.findall(final):
        return str(tagged[-1])
    if markers := list(_MARKER.finditer(final))[-_MAX_MARKERS:]:
        last, named, end = None, "", 0
        for marker in markers:
            if (clause := _clause(final, marker.end(), options)) is not None:
                last = clause
                if letters_of(clause, options):
                    also = named and is_alternative(final, end, marker.start())
                    named = f"{named} or {clause}" if also else clause
            end = marker.end()
        return named or last
    bare = final.strip()
    if len(bare) <= _MAX_BARE_CHARS and letters_of(bare, options, prose=False):
        return bare
    before, last = ["", "", *(clean(line) for line in bare.split("\n")[-_MAX_LINES:] if line.strip())][-2:]
    if len(last) > _MAX_BARE_CHARS:
        return None
    if _ALONE.fullmatch(last):  # not the last one of a list of letters
        return None if _ALONE.fullmatch(before) else last
    if commitments := list(_COMMITMENT.finditer(last)):
        clause = _clause(last, commitments[-1].start("letters"), options)
        sentence = last[: commitments[-1].end()].rpartition(", but ")[2]
        is_meant = clause and letters_of(clause, options) and not _NEGATION.search(sentence)
        return clause if is_meant else None
    return last if _VERDICT.search(last) else None


def _clause(final: str, start: int, options: ChoiceOptions) -> str | None:
    """Return the clause of a text from `start` on, with an option that the next one adds; None if it is taken back."""
    behind = final[start : start + MAX_ANSWER_CHARS]
    line = behind.lstrip(": \t\r\n*_：")
    start += len(behind) - len(line)
    line = line.partition("\n")[0]
    stop = next((end.start() for end in _CLAUSE_END.finditer(line) if end.start() > 0), len(line))
    if is_taken_back(final, start, start + stop):
        return None
    if (other := _OTHER.match(final, start + stop)) and (named := letters_of(line[:stop], options)):
        also = letters_of(other["other"], options, prose=False) if other["or"] else options.with_text(other["other"])
        return " or ".join(sorted(named | also)) if also else line[:stop]
    return line[:stop]


def read_label(label: object, options: ChoiceOptions, index_base: int) -> str:
    """Return the letter of the right option; the label is a letter, an index from `index_base`, or the option's text.

    Raises:
        DataError: it has another form, or it fits several options.
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


NUM_OPTIONS = 10
"""Default number of options of a question whose row does not list them: MMLU-Pro has ten."""
SCALES = {
    "exact": (1.0, 1.0, 0.0, 0.0),
    "loose": (1.0, 1.0, -1.0, -1.0),
    "soft": (1.0, 0.5, -0.5, -1.0),
    "strict": (1.0, -1.0, -1.0, -1.0),
}
"""Rewards of an answer that is right and boxed, right, boxed, and neither. Source: ROLL's three reward types."""


class ChoiceReward:
    r"""The right option and no other, on one of `SCALES`; the score is 1.0 if that is above 0, else 0.0.

    The defaults are ROLL's boxed multiple choice; the names `general_val` and `crossthink_qa` have those of its two
    other workers. The answer must be in a `\boxed{…}` unless `require_box` is False; then it is, in this order, the
    last box, the last `<answer>…</answer>`, the clause after the last "the answer is" that names an option, a short
    text that is only an option, or a last line such as "So B is correct", "I choose B" or "B". Behind a box that names
    no option, the others count too.

    Args:
        require_box: see above.
        scale: see `SCALES`.
        tags: a row that has a metadata["tag"] must have one of these; None accepts any.
        repetition_penalty: at most 0, of a text that only repeats itself (in 3-grams).
        length_coefficient: at least 0, factor of a penalty of *short* responses: -0.5 at 100 units and less, 0 from 400
            up, linear between, on the text without padding.
        count: the tokenizer's count of tokens, the unit of that penalty; words without it.
        num_options: for rows that do not list their options.
        index_base: 0 or 1, from which a label that is a number counts.

    Components are `correct` and `boxed`, and with a penalty also `choice`, `repetition` and `length`, all raw.
    """

    def __init__(
        self,
        *,
        require_box: bool = True,
        scale: str = "exact",
        tags: Sequence[str] | None = None,
        repetition_penalty: float = 0.0,
        length_coefficient: float = 0.0,
        count: Count | None = None,
        num_options: int = NUM_OPTIONS,
        index_base: int = 0,
    ) -> None:
        where = type(self).__name__
        if not isinstance(require_box, bool):
            raise ConfigError(f"{where}.require_box: expected a bool, got {require_box!r}.")
        if tags is not None and not (isinstance(tags, tuple | list) and all(isinstance(tag, str) for tag in tags)):
            raise ConfigError(f"{where}.tags: expected a tuple of strings or None, got {tags!r}.")
        self._require_box = require_box
        self._scale = SCALES[one_of(f"{where}.scale", scale, SCALES)]
        self._tags = None if tags is None else frozenset(tags)
        penalty = number(f"{where}.repetition_penalty", repetition_penalty, high=0.0)
        self._repetition = RepetitionReward(ngram_size=3, max_penalty=penalty)
        self._coefficient = number(f"{where}.length_coefficient", length_coefficient, low=0.0)
        unit = "words" if count is None else "tokens"
        self._length = LengthReward(min_length=400, max_length=None, rate=0.5 / 300, floor=-0.5, unit=unit, count=count)
        self._letters = ALPHABET[: whole_number(f"{where}.num_options", num_options, low=2, high=len(ALPHABET))]
        self._index_base = whole_number(f"{where}.index_base", index_base, high=1)
        self._penalizes = bool(penalty or self._coefficient)
        self.bounds = (min(self._scale) + penalty - 0.5 * self._coefficient, 1.0)

    async def grade(self, response: Response) -> RewardResult:
        """Return the result of a response.

        Raises:
            DataError: the label, metadata["options"] or metadata["tag"] is invalid.
            InfraError: `count`, or the worker for long texts, failed.
        """
        tag = response.metadata.get("tag")
        if tag is not None and self._tags is not None and (not isinstance(tag, str) or tag not in self._tags):
            raise label_error(f"one of {', '.join(sorted(self._tags))}", tag, where="metadata['tag']")
        options = read_options(response.metadata.get("options"), self._letters)
        gold = read_label(response.label, options, self._index_base)
        final = final_text(response.text, response.prompt)
        answer, boxed = final_answer(final or "", options, require_box=self._require_box)
        named = letters_of(answer or "", options)
        correct = named == {gold}
        extracted: str | None = None
        detail = "the thinking has no end" if final is None else ""
        if answer is None:
            status = Status.NO_ANSWER
        elif len(named) == 1:
            status, extracted = Status.OK, next(iter(named))
        else:
            status, extracted = Status.PARSE_ERROR, shown(clean(answer))
            detail = f"it names {', '.join(sorted(named))}" if named else "it names no option"
        reward = worth = self._scale[2 * (not correct) + (not boxed)]
        components: dict[str, float | None] = {"correct": float(correct), "boxed": float(boxed)}
        if self._penalizes:
            repetition = (await self._repetition.grade(response)).reward or 0.0
            length = (await self._length.grade(response)).reward or 0.0
            components |= {"choice": worth, "repetition": repetition, "length": length}
            reward = worth + repetition + self._coefficient * length
        return RewardResult(
            reward,
            score=float(worth > 0.0),
            status=status,
            components=components,
            extracted=extracted,
            detail=detail,
        )
