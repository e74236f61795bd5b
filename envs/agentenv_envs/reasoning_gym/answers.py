r"""The answer that a response commits to: the content of its last `<answer>…</answer>`, or in its last `\boxed{…}`."""

from __future__ import annotations

import re
from typing import Literal

from agentenv.rewards.rules.retraction import is_taken_back, standing_box
from agentenv.rewards.rules.text import final_text

AnswerForm = Literal["auto", "tag", "boxed"]
"""tag, boxed: that form only; auto: the tag, or where there is none, the box."""
FORMS = ("auto", "tag", "boxed")
INSTRUCTIONS = {
    "auto": "Give the final answer, and nothing else, between <answer> and </answer>.",  # english: off
    "tag": "Give the final answer, and nothing else, between <answer> and </answer>.",  # english: off
    "boxed": r"Give the final answer, and nothing else, in \boxed{}.",  # english: off
}
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_FENCE = re.compile(r"```[A-Za-z]{0,16}\n(.*)```", re.DOTALL)


def extract(text: str, form: str = "auto") -> str | None:
    """Return the answer without white space or a code fence around it; None if the response has none.

    Text in a thought, including one that never ends, does not count. Takes linear time.
    """
    final = final_text(text)
    if final is None:
        return None
    # The text between the last closed `<answer>` that is not taken back and its end.
    opened, start, answer = -1, -1, None
    for tag in _TAG.finditer(final) if form != "boxed" else ():
        if not tag[1]:
            opened, start = tag.span()
        elif start >= 0:
            answer = answer if is_taken_back(final, opened, tag.end()) else final[start : tag.start()]
            start = -1
    if answer is None and form != "tag":
        answer = standing_box(final)
    if not answer:
        return None
    answer = answer.strip("\r\n").rstrip()
    if fenced := _FENCE.fullmatch(answer.strip()):
        return fenced[1].rstrip() or None
    # White space at the start of the first line of a board may matter.
    return (answer if "\n" in answer else answer.strip()) or None


def wrapped(answer: str, form: str = "auto") -> str:
    """Return a response with this answer."""
    return rf"\boxed{{{answer}}}" if form == "boxed" else f"<answer>{answer}</answer>"
