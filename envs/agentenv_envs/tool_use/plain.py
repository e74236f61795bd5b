"""The plain format: tools described in words, one line for a call, answers in a user message.

    CALL calculator {"expression": "17 * 23"}

A call is a line that starts with the word CALL, followed by a tool's name and a JSON object with its arguments, and
nothing else. Several lines are several calls. Everything else is text. Calls in a thought are ignored. Answers come in
the order of the calls:

    RESULT calculator: 391
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv._util.lenient_json import LiteralError, read_literal, skip_space
from agentenv.chat.tool_calls.messages import call_id
from agentenv.core.tool_calls import MalformedCall, ParsedAction, ToolCall
from agentenv.core.types import Message
from agentenv.rewards.rules.text import read
from agentenv.tools.toolset import Answers, EpisodeTools

_LINE = re.compile(r"^[ \t]*CALL(?:[ \t]+(?P<rest>.*))?$", re.MULTILINE)
_CALL = re.compile(r"(?P<name>[\w.:/-]{1,256})[ \t]*(?P<arguments>\{.*)?")
_HEAD = """You can use tools. To call one, write a separate line:
CALL name {"argument": value}
with the arguments as JSON on the same line. You may write several such lines. Then stop: the results come in the next \
message. When you need no more calls, answer without one.

Tools:"""


def description(tools: EpisodeTools) -> str:
    """Return the text that describes the tools and how to call them."""
    lines = [_HEAD]
    for tool in tools.tools.values():
        function = tool.schema["function"]
        parameters = function.get("parameters") or {}
        required: Sequence[str] = parameters.get("required") or ()
        lines.append(f"- {function['name']}: {function.get('description') or 'no description'}")
        for name, schema in (parameters.get("properties") or {}).items():
            facts = schema if isinstance(schema, Mapping) else {}
            optional = "" if name in required else ", optional"
            choices = f" One of {json.dumps(facts['enum'])}." if "enum" in facts else ""
            line = f"    {name} ({facts.get('type', 'any')}{optional}): {facts.get('description', '')}{choices}"
            lines.append(line.rstrip())
    return "\n".join(lines)


def parse(text: str, *, turn_index: int = 0) -> ParsedAction:
    """Return the calls in an action, and the text outside them with its reasoning; never fails."""
    reading = read(text)
    reply = "" if reading.is_thinking else reading.parts[-1]
    items: list[ToolCall | MalformedCall] = []
    for line in _LINE.finditer(reply):
        source, id_ = line[0].strip(), call_id(turn_index, len(items))
        match = _CALL.fullmatch((line["rest"] or "").strip())
        if not match:
            detail = 'a call is a line of the form CALL name {"argument": value}'
            items.append(MalformedCall(source, detail, id_))
            continue
        name, written = match["name"], match["arguments"] or "{}"
        try:
            arguments, end = read_literal(written, 0)
            if skip_space(written, end) < len(written):
                raise LiteralError("text after the value", end)
            items.append(ToolCall(name, arguments, id_, source))
        except LiteralError as error:
            detail = f"its arguments are not a JSON object on the same line: {error}"
            items.append(MalformedCall(source, detail, id_, name))
    content = (text.removesuffix(reply) + _LINE.sub("", reply)).strip()
    return ParsedAction(content if items else text, tuple(items))


def results(answers: Answers) -> list[Message]:
    """Return the answers as one user message."""
    lines = [f"RESULT {message['name']}: {message['content']}" for message in answers.messages]
    return [{"role": "user", "content": "\n".join(lines)}]


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as the model would write it; marks of reasoning in it are escaped, so that `parse` ignores them."""
    written = json.dumps(arguments, ensure_ascii=False).replace("<", "\\u003c").replace("THINK]", "THINK\\u005d")
    return f"CALL {name} {written}"
