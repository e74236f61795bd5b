"""What a judge is shown and what is read from its reply: no text of a policy can pass for either."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentenv.errors import DataError
from agentenv.rewards.text import final_text
from agentenv.types import Message

MAX_CHARS = 20_000
"""Most characters of one text that a judge is shown."""
_MAX_LINE, _MAX_JSON = 200, 10_000
_TAG = re.compile(r"<(?=\s{0,8}/?\s{0,8}(?:question|reference|response|answer))", re.IGNORECASE)
_CONTROL = r"s|eos|bos|pad|unk|(?:start|end|begin)_of_[a-z]{1,12}|<SYS>"
_SPECIAL = re.compile(
    rf"<(?=[|｜]|/?(?:{_CONTROL})>|</SYS>)|(?<=[|｜])>|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_[A-Z]{{1,12}})\])",
    re.IGNORECASE,
)
_ENTITIES = {"<": "&lt;", ">": "&gt;", "[": "&#91;"}
_WORDS = r"(?:(?:final|my|the|overall) ){0,2}(?:verdict|judge?ment|decision|rating|score|ranking|violations?|winner)"
_ENDS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"
_MARKUP = rf"(?:[^\w{_ENDS}]|_)*+"
"""Whatever is no word, up to the end of the line; all of it, so that no text is gone through twice."""
_VERDICT_LINE = re.compile(
    rf"(?:\A|(?<=[{_ENDS}]))(?={_MARKUP}(?:\d{{1,3}}[.)] )?{_MARKUP}"
    rf"(?:{_WORDS}(?![a-z0-9])|boxed\b|(?:yes|no|tie|a|b){_MARKUP}(?:[{_ENDS}]|\Z)))",
    re.IGNORECASE,
)
_HEAD = rf"(?:{_WORDS} ?(?:is ?)?[:=]? ?)?"
_NUMBER = r"(-?\d{1,9}(?:\.\d{1,9})?)"
_MARKS = str.maketrans("", "", "*_`#\"'[](){}$")
_FIRST_WORD = re.compile(r"[\s*_`#\"'(\[]{0,16}(yes|no)[*_`\"')\]]{0,6}(?:[.,;:!\n]|$)", re.IGNORECASE)


def quoted(name: str, text: str, max_chars: int = MAX_CHARS) -> str:
    """A text between `<name>` and `</name>`, that cannot end it, forge a chat turn, or pass for a verdict.

    The middle of a longer one is cut out, which is said; lines that look like verdicts are marked as quoted.
    """
    if len(text) > max_chars:
        half = max_chars // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[len(text) - half :]}"
    text = _SPECIAL.sub(lambda match: _ENTITIES[match[0]], _TAG.sub("&lt;", text))
    return f"<{name}>\n{_VERDICT_LINE.sub('[quoted] ', text)}\n</{name}>"


def prompt_text(prompt: str | Sequence[Message]) -> str:
    """A prompt as one text; of messages the role stands before each.

    Raises:
        DataError: it is neither text nor messages.
    """
    if isinstance(prompt, str):
        return prompt
    messages: list[Any] = list(prompt) if isinstance(prompt, Iterable) else [None]
    if not all(isinstance(message, Mapping) for message in messages):
        raise DataError(f"prompt: expected text or messages, got {prompt!r:.200}. Correct the row.")
    return "\n\n".join(f"[{message.get('role', '')}]\n{_content(message.get('content'))}" for message in messages)


def choice(reply: str, choices: Sequence[str]) -> str | None:
    r"""The one of `choices` (lower case) that the last line of a reply commits to; None where it commits to none.

    As "Verdict: yes", "**No.**", "[[A]]", `\boxed{tie}` or JSON with one value. "I cannot say yes" is no yes.
    """
    found = re.fullmatch(rf"{_HEAD}({'|'.join(map(re.escape, choices))})", _committed(reply))
    return found[1] if found else None


def yes_or_no(reply: str) -> bool | None:
    """The verdict that a reply ends or begins with ("No, yesterday …"); None where it has none, or both.

    One that ends with a verdict of its own making ("Yes … Verdict: unclear") has none.
    """
    last = choice(reply, ("yes", "no"))
    if last is None and re.match(rf"{_WORDS}\b", _committed(reply)):
        return None
    first = _FIRST_WORD.match(final_text(reply) or "")
    found = {word for word in (last, first[1].lower() if first else None) if word}
    return found == {"yes"} if len(found) == 1 else None


def scored(reply: str, low: float, high: float) -> float | None:
    r"""The number from `low` to `high` that a reply commits to: "Score: 7/10", "[[7]]", `\boxed{7}`; else None."""
    found = re.fullmatch(rf"{_HEAD}{_NUMBER}(?: ?(?:/|out of) ?{_NUMBER})?", _committed(reply))
    if found is None or (found[2] is not None and float(found[2]) != high):
        return None
    return float(found[1]) if low <= float(found[1]) <= high else None


def numbers(reply: str, separator: str) -> list[int] | None:
    """The whole numbers that a reply's last line lists ("Ranking: [2] > [1]"); None where it is no list.

    "none" is an empty list.
    """
    line = re.sub(rf"^{_HEAD}", "", _committed(reply))
    if line == "none":
        return []
    parts = [part.strip() for part in line.split(separator)]
    return [int(part) for part in parts] if all(re.fullmatch(r"[0-9]{1,4}", part) for part in parts) else None


def _committed(reply: str) -> str:
    """What a reply commits to: its last line, or the value of its JSON; lower case, without markup."""
    text = (final_text(reply) or "").strip()
    unfenced = text.removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    line = _json_value(unfenced) if unfenced.startswith("{") else text.rpartition("\n")[2]
    if len(line) > _MAX_LINE:
        return ""
    line = line.replace("\\boxed", "").replace("\\text", "").translate(_MARKS)
    return " ".join(line.lower().split()).strip(" .!")


def _json_value(text: str) -> str:
    """The verdict of a JSON object that names one; empty for any other text."""
    try:
        found = json.loads(text) if len(text) <= _MAX_JSON else {}
    except (ValueError, RecursionError):
        return ""
    given = [found[name] for name in ("verdict", "winner", "score", "rating") if name in found]
    return str(given[0]) if len(given) == 1 and isinstance(given[0], str | int | float) else ""


def _content(content: Any) -> str:
    """A message's text; of a list of parts those that are text."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
