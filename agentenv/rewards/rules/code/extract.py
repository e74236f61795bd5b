"""Find the program in a model's answer: its last block of Python, in any prose."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Sequence

from agentenv._util.syntax import parse_source
from agentenv.core.types import Message
from agentenv.rewards.rules.text import Block, Reading, begun_turn, read, with_opened_thought, without_special_tokens

MAX_CODE_CHARS = 100_000
"""Longer programs are ignored; no task needs one."""

_PYTHON = re.compile(r"[\s{.]*(?:[ci]?python|py|pypy)[-_]?[\d.]*(?![\w+#-])", re.IGNORECASE)
"""How the language of a fence begins: any version and interpreter of Python, and possibly more behind it."""
_UNTAGGED = re.compile(r"\W*\Z")
_BEGINS = re.compile(r"^(?:def|import|from|class) \w", re.MULTILINE)
_STATEMENT = re.compile(
    r"(?:def \w|class \w|async def \w|import \w|from [\w.]+ import |@\w|(?:for|while|if|with|try)\b.*:\s*$|print\(|"
    r"\w+(?:, *\w+)* *=[^=])",
    re.MULTILINE,
)
_MAY_BEGIN = re.compile(rf"#|[\"']{{3}}|[\w.]+[(\[]|[\w.\[\], *]+ =[^=]|{_STATEMENT.pattern}", re.MULTILINE)
"""How a program may begin; parsing tells it from prose."""
_SPECIAL_TOKEN = re.compile(r"<[|｜][^<>]{1,40}[|｜]>|</?s>|\[/?INST\]|<(?:start|end)_of_turn>")
_LONG_FENCE = "`" * 80


def extract_code(text: str, defines: str = "", prompt: str | Sequence[Message] = "") -> str | None:
    r"""Return the program that an answer commits to, or None.

    Thoughts do not count, see `text.read`. The program is the last fenced block that is tagged as Python; else the last
    one without a tag; else, if nothing is fenced and it is Python or begins like a statement, all of the text. If
    blocks define the name `defines` it is the last of those, not one that shows how to use the solution. The last block
    may lack its closing fence, if a limit or a stop string cut it, or have it behind its last line or before other
    text. The first one may lack its opening fence, if the end of the `prompt` has it, or if what stands before the
    closing one is Python. Blocks in other languages and empty ones do not count.

    Example: `extract_code("Like so:\n```python\nprint(1)\n```")` is `"print(1)\n"`.
    """
    text = without_special_tokens(with_opened_thought(text.replace("\r\n", "\n"), prompt))
    turn = begun_turn(prompt)
    opened = ""  # of the block that the prompt's end has opened, with its fence
    if "```" in turn or "~~~" in turn:
        turn = _SPECIAL_TOKEN.split(turn)[-1]
        block = read(turn).block
        opened = turn[block.opened :] if block else ""
    reading = _with_opening(read(text), opened)
    code = "".join(reading.parts)
    if reading.blocks:
        code = _last(reading, _PYTHON, defines) or _last(reading, _UNTAGGED, defines)
    elif not (_STATEMENT.match(code.lstrip("\n")) or _BEGINS.search(code) or _is_python(code)):
        return None
    code = code.strip("\n").rstrip()
    return code + "\n" if code.strip() and len(code) < MAX_CODE_CHARS else None


def _with_opening(reading: Reading, opened: str) -> Reading:
    """Return the reading with the opening fence that the text lacks; `opened` is what its prompt has of the block."""
    text = reading.text
    if opened and _begins_with_program(fenced := read(opened + text)):
        return fenced
    if not (reading.thoughts or reading.blocks or "```" in text):
        return reading
    for start in (0, *reading.ends[:1]):
        program = text[start:].lstrip("\n")
        if _MAY_BEGIN.match(program) is None:
            continue
        if _is_python(program):  # whatever stands in its strings and comments
            return read(f"{_LONG_FENCE}\n{program}")
        is_odd = reading.block is not None or program.endswith("```")
        if is_odd and _begins_with_program(fenced := read(f"```python\n{program}")):
            return fenced
    return reading


def _begins_with_program(reading: Reading) -> bool:
    first = reading.blocks[0] if reading.blocks else None
    return first is not None and not first.has_fence and _is_python(_code(reading, first))


def _is_python(source: str) -> bool:
    """Return True if a text is Python and does more than to name something, as one word of prose does."""
    try:
        body = parse_source(source if len(source) < MAX_CODE_CHARS else "?").body
    except (SyntaxError, ValueError, RecursionError):
        return False
    return any(not isinstance(each, ast.Expr) or any(isinstance(n, ast.Call) for n in ast.walk(each)) for each in body)


def _code(reading: Reading, block: Block) -> str:
    """Return a block without the indent of its fence, as in a list, or of all its lines."""
    code = reading.text[block.start : block.end]
    if block.end is None:
        code = code.rstrip().removesuffix(block.fence)
    lines = code.split("\n")
    code = "\n".join(line[min(block.indent, len(line) - len(line.lstrip())) :] for line in lines)
    code = textwrap.dedent(code) if code.lstrip("\n")[:1].isspace() else code
    if block.has_fence and not _is_python(code):  # text behind a closing fence, or none before the next block
        parts = re.split(rf"^ {{0,3}}{block.fence}.*$", code, flags=re.MULTILINE)
        code = next(filter(_is_python, reversed(parts)), code)
    return code


def _last(reading: Reading, tag: re.Pattern[str], defines: str) -> str:
    found = [code for each in reading.blocks if tag.match(each.info) and (code := _code(reading, each)).strip()]
    name = re.escape(defines)
    defining = re.compile(rf"^(?:(?:async )?def|class) +{name}\b|^{name} *(?::[^=\n]*)?=(?!=)", re.MULTILINE)
    named = [code for code in found if defines and defining.search(code)]
    return (named or found or [""])[-1]
