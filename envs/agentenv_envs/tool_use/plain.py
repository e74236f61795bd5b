"""The plain format: tools described in words, called with a line each, answered in a user message.

    CALL calculator {"expression": "17 * 23"}

A call is a line that begins with the word CALL: then come the name of a tool and a JSON object with its arguments, and
nothing else. Several lines are several calls. Everything else is text. What stands before the last `</think>`, or
behind a `<think>` that is never closed, is reasoning, and is not looked at. Answers come in the order of the calls:

    RESULT calculator: 391
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.tool_formats.calls import MalformedCall, ParsedAction, ToolCall, call_id
from agentenv.tool_formats.literal import LiteralError, read, skip_space
from agentenv.toolsets import Answers, EpisodeTools
from agentenv.types import Message

_LINE = re.compile(r"^[ \t]*CALL(?:[ \t]+(?P<rest>.*))?$", re.MULTILINE)
_CALL = re.compile(r"(?P<name>[\w.:/-]{1,256})[ \t]*(?P<arguments>\{.*)?")
_HEAD = """You can use tools. To call one, write a line of its own:
CALL name {"argument": value}
with the arguments as JSON on the same line. You may write several such lines. Then stop: the results come in the next \
message. When you need no more calls, give the answer without one.

Tools:"""


def description(tools: EpisodeTools) -> str:
    """What the model is told about its tools, and how to call them."""
    return "\n".join([_HEAD, *(_described(tool.schema["function"]) for tool in tools.tools.values())])


def parse(text: str, *, turn_index: int = 0) -> ParsedAction:
    """The calls in an action, and the text outside of them with its reasoning; nothing makes it fail."""
    thought, close, said = text.rpartition("</think>")
    said, open_, unended = said.partition("<think>")
    items: list[ToolCall | MalformedCall] = []
    for found in _LINE.finditer(said):
        items.append(_item(found[0].strip(), found["rest"] or "", call_id(turn_index, len(items))))
    content = (thought + close + _LINE.sub("", said) + open_ + unended).strip()
    return ParsedAction(content if items else text, tuple(items))


def results(answers: Answers) -> list[Message]:
    """The answers, as one user message."""
    said = [f"RESULT {message['name']}: {message['content']}" for message in answers.messages]
    return [{"role": "user", "content": "\n".join(said)}]


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the model would write it; marks of reasoning in it are escaped, as `parse` would take them for such."""
    written = json.dumps(arguments, ensure_ascii=False)
    for mark in ("<think>", "</think>"):
        written = written.replace(mark, f"\\u003c{mark[1:]}")
    return f"CALL {name} {written}"


def _item(line: str, rest: str, made_id: str) -> ToolCall | MalformedCall:
    form = 'CALL name {"argument": value}'
    found = _CALL.fullmatch(rest.strip())
    if not found:
        return MalformedCall(line, f"a call is a line of the form {form}", made_id)
    name = found["name"]
    written = found["arguments"] or "{}"
    try:
        arguments, end = read(written, 0)
        if skip_space(written, end) < len(written):
            raise LiteralError("text after the value", end)
    except LiteralError as error:
        return MalformedCall(line, f"its arguments are no JSON object on the same line: {error}", made_id, name)
    return ToolCall(name, arguments, made_id, line)


def _described(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    required: Sequence[str] = parameters.get("required") or ()
    lines = [f"- {function['name']}: {function.get('description') or 'no description'}"]
    for name, schema in (parameters.get("properties") or {}).items():
        kind = schema.get("type", "any") if isinstance(schema, Mapping) else "any"
        said = schema.get("description", "") if isinstance(schema, Mapping) else ""
        optional = "" if name in required else ", optional"
        choices = f" One of {json.dumps(schema['enum'])}." if isinstance(schema, Mapping) and "enum" in schema else ""
        lines.append(f"    {name} ({kind}{optional}): {said}{choices}".rstrip())
    return "\n".join(lines)
