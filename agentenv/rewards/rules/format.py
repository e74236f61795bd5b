"""Reward the required form of a response: a thought and an answer, or a thought and tool calls.

Example:
    >>> await ThinkFormatReward(mode="strict").grade(Response("<think>2 + 2</think><answer>4</answer>"))
    RewardResult(reward=1.0, score=1.0, …, components={'think': 1.0, 'answer': 1.0}, extracted='4', …)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from agentenv._util.lenient_json import LiteralError, read_json
from agentenv._util.off_loop import off_loop
from agentenv.core.arguments import one_of, shown
from agentenv.errors import ConfigError
from agentenv.rewards.rules.regex import MAX_CHARS, TOO_LONG, PassFail
from agentenv.rewards.rules.text import is_blank, without_special_tokens
from agentenv.rewards.types import Response, RewardResult

MODES = ("loose", "strict")
_MAX_TAGS = 512
_TAG = re.compile(r"</?(?:think|answer|tool_call)>")


class _TagBlock(NamedTuple):
    """A tag and the text behind it, up to the next tag."""

    tag: str
    content: str


class ThinkFormatReward(PassFail):
    """`passed` for a response that thinks and then answers, else `failed`; ROLL's scale is 0.0 and -1.0.

    `loose`: there is a `<think>…</think>` and an `<answer>…</answer>` somewhere (RM-Gallery's `reasoning_format`).
    `strict`: one of each, in this order, nothing around them and a nonempty answer; special tokens may follow. If
    `think_opened` is False the response itself must open its thought; else the prompt may have opened it, and a
    `<think>` that was put back before the response is accepted too. For another form, see `RegexReward`.
    """

    def __init__(
        self,
        *,
        mode: str = "loose",
        think_opened: bool | None = None,
        passed: float = 1.0,
        failed: float = 0.0,
    ) -> None:
        super().__init__(passed, failed)
        where = type(self).__name__
        self._mode = one_of(f"{where}.mode", mode, MODES)
        self._think_opened = _bool_or_none(f"{where}.think_opened", think_opened)

    async def grade(self, response: Response) -> RewardResult:
        """Return the result; its components `think` and `answer` say which parts exist."""
        text = without_special_tokens(response.text)
        think, answer = _has(text, "think"), _has(text, "answer")
        components = {"think": float(think), "answer": float(answer)}
        if self._mode == "loose":
            return self._result(think and answer, components)
        if len(text) > MAX_CHARS:
            return self._result(False, components, **TOO_LONG)
        rest = _behind_thought(text, self._think_opened)
        content = None
        if rest and [block.tag for block in rest] == ["<answer>", "</answer>"] and not rest[1].content.strip():
            content = None if is_blank(rest[0].content) else rest[0].content.strip()
        components = {"think": float("</think>" in text), "answer": float(answer)}
        return self._result(content is not None, components, extracted=content and shown(content))


def _bool_or_none(where: str, value: object) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise ConfigError(f"{where}: expected a bool or None, got {value!r}.")


def _has(text: str, tag: str) -> bool:
    """Return True if there is an opening tag with a closing one somewhere behind it."""
    start = text.find(f"<{tag}>")
    return start >= 0 and text.find(f"</{tag}>", start) >= 0


def _behind_thought(text: str, think_opened: bool | None) -> list[_TagBlock] | None:
    """Return the blocks after a thought at the start; None if there is none, or text right behind it."""
    tags = list(islice(_TAG.finditer(text), _MAX_TAGS + 1))
    if len(tags) > _MAX_TAGS:
        return None
    starts = [*(tag.start() for tag in tags), len(text)]
    behind = (_TagBlock(tag[0], text[tag.end() : end]) for tag, end in zip(tags, starts[1:], strict=True))
    blocks = [_TagBlock("", text[: starts[0]]), *behind]  # the text before the first tag has the tag ""
    opened_here = [block.tag for block in blocks[1:3]] == ["<think>", "</think>"] and not blocks[0].content.strip()
    opened_before = len(blocks) > 1 and blocks[1].tag == "</think>"
    if opened_here:
        rest = blocks[2:]
    elif opened_before and think_opened is not False:
        rest = blocks[1:]
    else:
        return None
    return None if rest[0].content.strip() else rest[1:]


class ToolCallFormatReward(PassFail):
    """`passed` for exactly one thought and then either one answer or tool calls, never both, else `failed`.

    A tool call is a JSON object with a `name` and an object `arguments`, in `<tool_call>…</tool_call>`. No other text
    is allowed. See `ThinkFormatReward` for `think_opened`.

    Source: RM-Gallery 0.1.7 `reasoning_tool_call_format`, which checks less.
    """

    def __init__(self, *, think_opened: bool | None = None, passed: float = 1.0, failed: float = 0.0) -> None:
        super().__init__(passed, failed)
        self._think_opened = _bool_or_none(f"{type(self).__name__}.think_opened", think_opened)

    async def grade(self, response: Response) -> RewardResult:
        """Return the result; its components are `think`, `answer` and the number of valid `tool_calls`."""
        text = without_special_tokens(response.text)
        components = {"think": float("</think>" in text), "answer": float(_has(text, "answer")), "tool_calls": 0.0}
        if len(text) > MAX_CHARS:
            return self._result(False, components, **TOO_LONG)
        num_valid, wrong = await off_loop(len(text), _tool_calls, text, self._think_opened)
        components["tool_calls"] = float(num_valid)
        return self._result(not wrong, components, feedback=wrong)


def _tool_calls(text: str, think_opened: bool | None) -> tuple[int, str]:
    """Return the number of valid tool calls, and what is wrong with the form (empty if nothing)."""
    rest = _behind_thought(text, think_opened)
    if rest is None:
        return 0, "expected one thought at the beginning, in <think>…</think>"
    if [block.tag for block in rest] == ["<answer>", "</answer>"]:
        valid = not is_blank(rest[0].content) and not rest[1].content.strip()
        return 0, "" if valid else "expected an answer, and nothing behind it"
    opened, closed = rest[::2], rest[1::2]
    pairs = all(block.tag == "<tool_call>" for block in opened) and all(block.tag == "</tool_call>" for block in closed)
    if not rest or len(opened) != len(closed) or not pairs or any(block.content.strip() for block in closed):
        return 0, "expected either one <answer> or <tool_call>s behind the thought"
    wrong = []
    for block in opened:
        try:
            call = read_json(block.content)
        except LiteralError as error:
            wrong.append(f"expected JSON in a tool call: {error}")
            continue
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or is_blank(call["name"]):
            wrong.append("expected a name in a tool call")
        elif not isinstance(call.get("arguments"), dict):
            wrong.append("expected arguments, an object, in a tool call")
    return len(opened) - len(wrong), wrong[0] if wrong else ""


def compute_format_reward(responses: Sequence[str]) -> list[float]:
    """Return 1.0 for each response with a thought and an answer somewhere, else 0.0: the seed's function."""
    texts = [without_special_tokens(response) for response in responses]
    return [float(_has(text, "think") and _has(text, "answer")) for text in texts]
