r"""The answer that a response commits to: what stands in its last `<answer>…</answer>`, or in its last `\boxed{…}`."""

from __future__ import annotations

import re
from typing import Literal

from agentenv.rewards.text import final_text, last_boxed

AnswerForm = Literal["auto", "tag", "boxed"]
"""tag, boxed: that form only; auto: the tag, or where there is none, the box."""
FORMS = ("auto", "tag", "boxed")
INSTRUCTIONS = {
    "auto": "Give the final answer, and nothing else, between <answer> and </answer>.",
    "tag": "Give the final answer, and nothing else, between <answer> and </answer>.",
    "boxed": r"Give the final answer, and nothing else, in \boxed{}.",
}
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_FENCE = re.compile(r"```[A-Za-z]{0,16}\n(.*)```", re.DOTALL)


def extract(text: str, form: str = "auto") -> str | None:
    """The answer, without white space or a code fence around it; None where the response commits to none.

    What stands in a thought, or in one that was never ended, does not count. Linear in the text.
    """
    final = final_text(text)
    if final is None:
        return None
    found = _last_tagged(final) if form != "boxed" else None
    if found is None and form != "tag":
        found = last_boxed(final)
    return _bare(found) or None if found is not None else None


def wrapped(answer: str, form: str = "auto") -> str:
    """A response that commits to this answer."""
    return rf"\boxed{{{answer}}}" if form == "boxed" else f"<answer>{answer}</answer>"


def _last_tagged(text: str) -> str | None:
    """From the last `<answer>` that is closed to its end."""
    start, found = -1, None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start >= 0:
            found, start = text[start : tag.start()], -1
    return found


def _bare(text: str) -> str:
    text = text.strip("\r\n").rstrip()
    fenced = _FENCE.fullmatch(text.strip())
    # Of boards the white space at the beginning of the first line may count.
    return fenced[1].rstrip() if fenced else text if "\n" in text else text.strip()
