"""Which line of a chat template wrote which part of a rendering, and for which message.

The template is parsed in the environment in which transformers compiles it. A private-use character that encodes a line
number is inserted before everything the template writes, and one that encodes a message's index wherever a loop takes
the next message. Without these characters, the rendering must equal the normal one; otherwise the result is None.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.core.engine import Tokenizer
from agentenv.core.types import Message

_LINES, _MESSAGES, _SIZE = 0xF0000, 0x100000, 0xFFFD
"""The two private-use planes: a line is a character of the first, a message's index + 1 one of the second."""
_BEGIN, _END = chr(_MESSAGES + _SIZE - 1), chr(_MESSAGES + _SIZE)
"""Marks around the output of a macro or a block, after which the surrounding line continues."""
_MARKS = re.compile(f"[{chr(_LINES)}-{chr(_MESSAGES + _SIZE)}]")
_NEWLINE = re.compile(r"\r\n|\r|\n")
_TAKEN = "agentenv_taken"
"""The name by which an instrumented template calls the function that looks up messages."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """A part of a rendering, `text[start:end]`, written by one line of the template."""

    start: int
    end: int
    line: int
    """Line number from 1; if a macro's or a block's text was changed afterwards, the line that output it."""
    message: int | None
    """Index of the template loop's current message; None outside of a loop over messages."""


def template_lines(
    tokenizer: Tokenizer, messages: Sequence[Message], *, tools: Any = None, **kwargs: Any
) -> list[Emitted] | None:
    """Return the parts that cover the rendering of the messages without gap or overlap, in order; none is empty.

    Return None if the lines are unknown: the tokenizer's template is not Jinja, or the marks change its rendering.
    `kwargs` are those of `apply_chat_template`, including `add_generation_prompt`; its exceptions propagate.
    """
    source = template_source(tokenizer, tools)
    if source is None:
        return None
    text = str(tokenizer.apply_chat_template(list(messages), tokenize=False, tools=tools, **kwargs))
    if _MARKS.search(text) or max(len(messages), source.count("\n")) >= _SIZE - 2:
        return None
    values = {"add_generation_prompt": False, **getattr(tokenizer, "special_tokens_map", {}), **kwargs}
    values |= {
        "messages": [dict(message) for message in messages],
        "tools": tools,
        "documents": kwargs.get("documents"),
    }
    for inside in (True, False):
        emitted = _emitted(_render(source, values, inside=inside), text)
        if emitted is not None:
            return emitted
    return None


def template_source(tokenizer: Tokenizer, tools: Any = None) -> str | None:
    """Return the Jinja text that renders messages with these tools; None if the tokenizer has none."""
    choose = getattr(tokenizer, "get_chat_template", None)
    return str(choose(tools=tools)) if choose is not None and tokenizer.chat_template else None


def source_line(tokenizer: Tokenizer, line: int | None, tools: Any = None) -> str:
    """Return the text of a line of the template, stripped; empty if the line is unknown."""
    source = template_source(tokenizer, tools)
    lines = _NEWLINE.split(source) if source is not None else []
    return lines[line - 1].strip() if line is not None and 0 < line <= len(lines) else ""


def _emitted(marked: str | None, text: str) -> list[Emitted] | None:
    """Return the parts of a marked rendering; None if it differs from `text` or does not begin with a mark."""
    if marked is None or _MARKS.sub("", marked) != text:
        return None
    found: list[Emitted] = []
    line, message, at = 0, None, 0
    around: list[int] = []
    for piece in re.split(f"({_MARKS.pattern})", marked):
        code = ord(piece) if len(piece) == 1 else 0
        if piece == _BEGIN:
            around.append(line)
        elif piece == _END:
            line = around.pop() if around else line
        elif code >= _MESSAGES:
            message = code - _MESSAGES - 1 if code > _MESSAGES else None
        elif code >= _LINES:
            line = code - _LINES
        elif piece:
            if not line:
                return None
            if found and (found[-1].line, found[-1].message) == (line, message):
                found[-1] = Emitted(found[-1].start, at + len(piece), line, message)
            else:
                found.append(Emitted(at, at + len(piece), line, message))
            at += len(piece)
    return found


def _render(source: str, values: Mapping[str, Any], *, inside: bool) -> str | None:
    """Return the rendering of the marked template; None if the marks make it fail."""
    from jinja2.exceptions import TemplateError

    numbers = {id(message): index for index, message in enumerate(values["messages"])}

    def taken(item: Any) -> str:
        return chr(_MESSAGES + 1 + numbers[id(item)]) if id(item) in numbers else ""

    try:
        return str(_marked(source, inside).render({**values, _TAKEN: taken}))
    except (LookupError, TemplateError, TypeError, ValueError):
        return None


@functools.lru_cache(maxsize=32)
def _marked(source: str, inside: bool) -> Any:
    """Return the template with marks; `inside` also marks macros and blocks, whose text may be changed later."""
    import jinja2
    from transformers.utils import chat_template_utils

    compiled: Any = chat_template_utils._compile_jinja_template
    environment = compiled(source).environment
    tree = environment.parse(source)
    _mark(tree, inside=inside, looped=False)
    tree.set_environment(environment)
    return jinja2.Template.from_code(environment, environment.compile(tree), environment.make_globals(None))


def _mark(node: Any, *, inside: bool, looped: bool) -> None:
    """Insert the marks into a tree, in place."""
    from jinja2 import nodes

    if isinstance(node, nodes.Output):
        marked: list[Any] = []
        for part in node.nodes:  # each with the mark of its line before it
            if not isinstance(part, nodes.TemplateData):
                marked += [nodes.TemplateData(chr(_LINES + part.lineno)), part]
                continue
            for row, text in enumerate(re.findall(r"[^\n]*\n|[^\n]+", part.data)):
                marked.append(nodes.TemplateData(chr(_LINES + part.lineno + row) + text))
        node.nodes = marked
        return
    is_block = isinstance(node, (nodes.Macro, nodes.AssignBlock, nodes.FilterBlock, nodes.CallBlock))
    # A tag of an extension keeps its text, such as transformers' `generation`.
    is_tag = isinstance(node, nodes.CallBlock) and isinstance(node.call.node, nodes.ExtensionAttribute)
    if is_block and not inside and not is_tag:
        return
    is_loop, looped = isinstance(node, nodes.For), looped or is_block
    for child in list(node.iter_child_nodes()):
        _mark(child, inside=inside, looped=looped or is_loop)
    for name, value in node.iter_fields():
        if isinstance(value, list):
            parts = [_around(item, ends=not (looped or is_loop)) for item in value]
            setattr(node, name, [part for some in parts for part in some])
    if is_block:
        node.body = [_data(_BEGIN), *node.body, _data(_END)]
    if isinstance(node, nodes.For) and isinstance(node.target, nodes.Name):
        taken = nodes.Call(nodes.Name(_TAKEN, "load"), [nodes.Name(node.target.name, "load")], [], None, None)
        node.body.insert(0, nodes.Output([taken]).set_lineno(node.lineno))


def _around(node: Any, *, ends: bool) -> list[Any]:
    """Return a statement with marks: a line before one that writes itself, the end of messages after a loop."""
    from jinja2 import nodes

    if isinstance(node, (nodes.FilterBlock, nodes.CallBlock)):
        return [_data(chr(_LINES + node.lineno)), node]
    return [node, _data(chr(_MESSAGES))] if ends and isinstance(node, nodes.For) else [node]


def _data(text: str) -> Any:
    from jinja2 import nodes

    return nodes.Output([nodes.TemplateData(text)]).set_lineno(1)
