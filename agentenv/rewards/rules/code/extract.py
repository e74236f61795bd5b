"""Find the program in a model's answer: its last block of Python, in any prose."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from agentenv.rewards.rules.text import without_special_tokens

MAX_CODE_CHARS = 100_000
"""Longer programs are ignored; no task needs one."""

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
class _CodeBlock:
    tag: str
    indent: int
    lines: list[str] = field(default_factory=list)

    @property
    def code(self) -> str:
        """Lines without the indent of the fence, as in a list."""
        return "\n".join(line[min(self.indent, len(line) - len(line.lstrip())) :] for line in self.lines)


def extract_code(text: str, defines: str = "") -> str | None:
    r"""Return the program that an answer commits to, or None.

    Reasoning (`<think>…</think>`, also without its opening or closing tag) is removed first. Then the program is the
    last fenced block that is tagged as Python; else the last one without a tag; else, if nothing is fenced and a line
    begins like a statement, all of the text. If blocks define the name `defines` it is the last of those, not one that
    shows how to use the solution. The last block may lack its closing fence, if a limit or a stop string cut it, or
    have it behind its last line. Blocks in other languages and empty ones do not count.

    Example: `extract_code("Like so:\n```python\nprint(1)\n```")` is `"print(1)\n"`.
    """
    # Only the text outside of reasoning; a tag without a partner extends to the start or end of the text.
    text = without_special_tokens(text.replace("\r\n", "\n"))
    parts: list[str] = []
    depth = at = 0
    for tag in _REASONING.finditer(text):
        if tag[0][1] == "/":
            if depth == 0:
                parts.clear()
            depth = max(0, depth - 1)
        else:
            if depth == 0:
                parts.append(text[at : tag.start()])
            depth += 1
        at = tag.end()
    answer = "".join(parts) + (text[at:] if depth == 0 else "")
    blocks = _blocks(answer.split("\n"))
    if not blocks:
        code = answer if _STATEMENT.match(answer.lstrip("\n")) or _BEGINS.search(answer) else ""
    else:
        code = _last(blocks, _PYTHON, defines) or _last(blocks, {""}, defines)
    code = code.strip("\n").rstrip()
    return code + "\n" if code.strip() and len(code) < MAX_CODE_CHARS else None


def _last(blocks: list[_CodeBlock], tags: Iterable[str], defines: str) -> str:
    found = [block.code for block in blocks if block.tag in tags and block.code.strip()]
    name = re.escape(defines)
    defining = re.compile(rf"^(?:(?:async )?def|class) +{name}\b|^{name} *(?::[^=\n]*)?=(?!=)", re.MULTILINE)
    named = [code for code in found if defines and defining.search(code)]
    return (named or found or [""])[-1]


def _blocks(lines: list[str]) -> list[_CodeBlock]:
    """Return all fenced blocks, including a last one that is not closed."""
    blocks: list[_CodeBlock] = []
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
            blocks.append(_CodeBlock(_tag(opened[2]), len(line) - len(line.lstrip())))
        elif (tag := _opened_late(line)) is not None:
            fence = "```"
            blocks.append(_CodeBlock(_tag(tag), 0))
    if fence and blocks[-1].lines:
        blocks[-1].lines[-1] = blocks[-1].lines[-1].rstrip().removesuffix(fence)
    return blocks


def _opened_late(line: str) -> str | None:
    """Return the tag of a fence that opens at the end of a line of prose."""
    prose, fence, tag = line.rpartition("```")
    return tag if fence and "`" not in prose and _TAG.fullmatch(tag.strip()) else None


def _tag(info: str) -> str:
    """Return the language that a fence names, in lower case."""
    words = info.strip().strip("{}").split()
    return words[0].strip(".{}").split(":")[0].lower() if words else ""
