"""The program in a model's answer: its last block of Python, whatever is said around it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from agentenv.rewards.text import without_special_tokens

MAX_CODE_CHARS = 100_000
"""Longer programs are none: no task needs one."""

_PYTHON = frozenset({"python", "python3", "py", "py3", "python-3", "ipython", "pycon3"})
_REASONING = re.compile(r"</?(?:think|thinking|thought)>", re.IGNORECASE)
_FENCE = re.compile(r"\s*(`{3,}|~{3,})([^`]*)")
_TAG = re.compile(r"[\w+.{}-]{1,20}")
_BEGINS = re.compile(r"^(?:def|import|from|class) \w", re.MULTILINE)
_STATEMENT = re.compile(
    r"(?:def \w|class \w|async def \w|import \w|from [\w.]+ import |@\w|(?:for|while|if|with|try)\b.*:\s*$|print\(|"
    r"\w+(?:, *\w+)* *=[^=])",
    re.MULTILINE,
)


@dataclass(slots=True)
class _Block:
    tag: str
    indent: int
    lines: list[str] = field(default_factory=list)

    @property
    def code(self) -> str:
        """Its lines without the indent of the fence, as in a list."""
        return "\n".join(line[min(self.indent, len(line) - len(line.lstrip())) :] for line in self.lines)


def extract_code(text: str, defines: str = "") -> str | None:
    r"""The program that an answer commits to; None where there is none.

    Reasoning (`<think>…</think>`, also without its beginning or its end) is left out first. Then it is the last fenced
    block that is tagged as Python; else the last one without a tag; else, where nothing is fenced and a line begins as
    a statement does, all of the text. Where blocks define the name `defines` it is the last of those: one that shows
    how to use a solution is none. A last block may lack its end, as where a limit or a stop string cut it, or have it
    behind its last line. Blocks in other languages are no answer, and neither are empty ones.

    Example: `extract_code("Like so:\n```python\nprint(1)\n```")` is `"print(1)\n"`.
    """
    said = _without_reasoning(without_special_tokens(text.replace("\r\n", "\n")))
    blocks = _blocks(said.split("\n"))
    if not blocks:
        code = said if _STATEMENT.match(said.lstrip("\n")) or _BEGINS.search(said) else ""
    else:
        code = _last(blocks, _PYTHON, defines) or _last(blocks, {""}, defines)
    code = code.strip("\n").rstrip()
    return code + "\n" if code.strip() and len(code) < MAX_CODE_CHARS else None


def _last(blocks: list[_Block], tags: Iterable[str], defines: str) -> str:
    found = [block.code for block in blocks if block.tag in tags and block.code.strip()]
    name = re.escape(defines)
    defining = re.compile(rf"^(?:(?:async )?def|class) +{name}\b|^{name} *(?::[^=\n]*)?=(?!=)", re.MULTILINE)
    named = [code for code in found if defines and defining.search(code)]
    return (named or found or [""])[-1]


def _without_reasoning(text: str) -> str:
    """What is said outside of reasoning: tags that lack their partner reach to the text's beginning or end."""
    said: list[str] = []
    depth = at = 0
    for tag in _REASONING.finditer(text):
        if tag[0][1] == "/":
            if depth == 0:
                said.clear()
            depth = max(0, depth - 1)
        else:
            if depth == 0:
                said.append(text[at : tag.start()])
            depth += 1
        at = tag.end()
    return "".join(said) + (text[at:] if depth == 0 else "")


def _blocks(lines: list[str]) -> list[_Block]:
    """All fenced blocks, the last one also where it is not closed."""
    blocks: list[_Block] = []
    fence = ""
    for line in lines:
        if fence:
            ends = line.strip()
            if len(ends) >= len(fence) and set(ends) == {fence[0]}:
                fence = ""
            else:
                blocks[-1].lines.append(line)
        elif (opened := _FENCE.fullmatch(line)) is not None:
            fence = opened[1]
            blocks.append(_Block(_tag(opened[2]), len(line) - len(line.lstrip())))
        elif (tag := _opened_late(line)) is not None:
            fence = "```"
            blocks.append(_Block(_tag(tag), 0))
    if fence and blocks[-1].lines:
        blocks[-1].lines[-1] = blocks[-1].lines[-1].rstrip().removesuffix(fence)
    return blocks


def _opened_late(line: str) -> str | None:
    """The tag of a fence that opens at the end of a line of prose."""
    prose, fence, tag = line.rpartition("```")
    return tag if fence and "`" not in prose and _TAG.fullmatch(tag.strip()) else None


def _tag(info: str) -> str:
    """The language that a fence names, in lower case."""
    words = info.strip().strip("{}").split()
    return words[0].strip(".{}").split(":")[0].lower() if words else ""
