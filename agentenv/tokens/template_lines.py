"""Which line of a chat template wrote which part of a rendering, and for which message.

The template is parsed in the environment in which transformers compiles it, a private-use character that carries a line
number is put before everything that it writes, and one that carries a message's index where a loop takes the next
message. What is rendered then, without these characters, must be the normal rendering: else nothing is said.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.agent import Tokenizer
from agentenv.types import Message

_LINES, _MESSAGES, _SIZE = 0xF0000, 0x100000, 0xFFFD
"""The two private-use planes: a line is a character of the first, a message's index + 1 one of the second."""
_BEGIN, _END = chr(_MESSAGES + _SIZE - 1), chr(_MESSAGES + _SIZE)
"""Around what a macro or a block writes: after it goes on the line into whose text it was put."""
_MARKS = re.compile(f"[{chr(_LINES)}-{chr(_MESSAGES + _SIZE)}]")
_NEWLINE = re.compile(r"\r\n|\r|\n")
_TAKEN = "agentenv_taken"
"""The name by which an instrumented template calls the function that knows the messages."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """A part of a rendering, `text[start:end]`, that one line of the template wrote."""

    start: int
    end: int
    line: int
    """From 1; of a macro's or a block's text that was changed after it was written, the line that put it out."""
    message: int | None
    """Index of the message that the template's loop was at; None outside of a loop over messages."""


def template_lines(
    tokenizer: Tokenizer, messages: Sequence[Message], *, tools: Any = None, **kwargs: Any
) -> list[Emitted] | None:
    """Parts that cover the rendering of the messages without gap or overlap, in order; none is empty.

    None where the lines cannot be known: the tokenizer's template is not Jinja, or renders otherwise when it is marked.
    `kwargs` are `apply_chat_template`'s, `add_generation_prompt` among them; what it raises, this raises.
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
    """The Jinja text that renders messages with these tools; None where the tokenizer has none."""
    choose = getattr(tokenizer, "get_chat_template", None)
    return str(choose(tools=tools)) if choose is not None and tokenizer.chat_template else None


def source_line(tokenizer: Tokenizer, line: int | None, tools: Any = None) -> str:
    """The text of a line of the template, without the space around it; empty where it is not known."""
    source = template_source(tokenizer, tools)
    lines = _NEWLINE.split(source) if source is not None else []
    return lines[line - 1].strip() if line is not None and 0 < line <= len(lines) else ""


def _emitted(marked: str | None, text: str) -> list[Emitted] | None:
    """The parts of a rendering with marks; None where it is not `text`, but for the marks, or begins without one."""
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
    """What the marked template renders; None where the marks make it fail."""
    from jinja2.exceptions import TemplateError

    numbers = {id(message): index for index, message in enumerate(values["messages"])}

    def taken(item: Any) -> str:
        """The mark of a message; nothing for whatever else a loop takes."""
        return chr(_MESSAGES + 1 + numbers[id(item)]) if id(item) in numbers else ""

    try:
        return str(_marked(source, inside).render({**values, _TAKEN: taken}))
    except (LookupError, TemplateError, TypeError, ValueError):
        return None


@functools.lru_cache(maxsize=32)
def _marked(source: str, inside: bool) -> Any:
    """The template with marks; `inside` of macros and blocks too, whose text the template may still change."""
    import jinja2
    from transformers.utils import chat_template_utils

    compiled: Any = chat_template_utils._compile_jinja_template
    environment = compiled(source).environment
    tree = environment.parse(source)
    _mark(tree, inside=inside, looped=False)
    tree.set_environment(environment)
    return jinja2.Template.from_code(environment, environment.compile(tree), environment.make_globals(None))


def _mark(node: Any, *, inside: bool, looped: bool) -> None:
    """Put the marks into a tree, in place."""
    from jinja2 import nodes

    if isinstance(node, nodes.Output):
        node.nodes = [part for old in node.nodes for part in _with_line(old)]
        return
    is_block = isinstance(node, (nodes.Macro, nodes.AssignBlock, nodes.FilterBlock, nodes.CallBlock))
    if is_block and not inside and not _is_tag(node):
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


def _is_tag(node: Any) -> bool:
    """Whether a block is a tag of an extension, such as transformers' `generation`, which leaves its text as it is."""
    from jinja2 import nodes

    return isinstance(node, nodes.CallBlock) and isinstance(node.call.node, nodes.ExtensionAttribute)


def _around(node: Any, *, ends: bool) -> list[Any]:
    """A statement with what it needs beside it: a line where it writes itself, and the end of messages after a loop."""
    from jinja2 import nodes

    if isinstance(node, (nodes.FilterBlock, nodes.CallBlock)):
        return [_data(chr(_LINES + node.lineno)), node]
    return [node, _data(chr(_MESSAGES))] if ends and isinstance(node, nodes.For) else [node]


def _data(text: str) -> Any:
    from jinja2 import nodes

    return nodes.Output([nodes.TemplateData(text)]).set_lineno(1)


def _with_line(node: Any) -> list[Any]:
    """What an output writes, with the mark of its line before it; plain text line by line."""
    from jinja2 import nodes

    if not isinstance(node, nodes.TemplateData):
        return [nodes.TemplateData(chr(_LINES + node.lineno)), node]
    rows = re.findall(r"[^\n]*\n|[^\n]+", node.data)
    return [nodes.TemplateData(chr(_LINES + node.lineno + row) + text) for row, text in enumerate(rows)]
