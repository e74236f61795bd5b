"""Conversations for each family of templates, their renderings, and where the templates are from."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from jinja2.exceptions import TemplateError

from tests.chat.families import FAMILIES, TEMPLATES, Family, load

USER, ANSWER, NEXT, SYSTEM = "first question", "ANSWERTEXT", "second question", "SYSTEMTEXT"
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string", "description": "What."}}, "required": ["q"]}
FUNCTION = {"name": "lookup", "description": "Look something up.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
Message = dict[str, Any]


def says(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def result(number: int) -> Message:
    return {"role": "tool", "content": f"RESULT{number}", "tool_call_id": f"callid00{number}", "name": "lookup"}


def asks(count: int, *, as_json: bool, content: str | None) -> Message:
    """An assistant message with `count` calls; the answer's text is the argument of the last one."""
    calls = []
    for number in range(1, count + 1):
        arguments: Any = {"q": ANSWER if number == count else "x"}
        function = {"name": "lookup", "arguments": json.dumps(arguments) if as_json else arguments}
        calls.append({"id": f"callid00{number}", "type": "function", "function": function})
    return {"role": "assistant", "content": content, "tool_calls": calls}


def calling(count: int) -> list[Message]:
    return [asks(count, as_json=as_json, content=content) for as_json in (False, True) for content in (None, "")]


FOLLOW_UPS = {
    "user": [says("user", NEXT)],
    "tool": [result(1)],
    "tools": [result(1), result(2)],
    "tool+user": [result(1), says("user", NEXT)],
    "2xuser": [says("user", NEXT), says("user", "third question")],
    "system": [says("system", SYSTEM)],
}


def render(family: Family, messages: list[Message], *, gen: bool = True, tools: list[Any] | None = None) -> str:
    if family.parts:
        messages = [{**m, "content": [{"type": "text", "text": m["content"] or ""}]} for m in messages]
    tools = tools or (TOOLS if family.needs_tools else None)
    return str(load(family).apply_chat_template(messages, tokenize=False, add_generation_prompt=gen, tools=tools))


def try_render(family: Family, messages: list[Message], **options: Any) -> str | None:
    try:
        return render(family, messages, **options)
    except (TemplateError, TypeError):
        return None


def test_every_template_has_a_source_and_every_copy_is_unchanged() -> None:
    rows = re.findall(r"^\| `(\S+\.jinja)` \|.*\|$", (TEMPLATES / "SOURCES.md").read_text(encoding="utf-8"), re.M)
    files = {path.name for path in TEMPLATES.glob("*.jinja")}
    assert sorted(rows) == sorted(files) == sorted({family.template.name for family in FAMILIES})
    copies = re.findall(r"^\| `(\S+)` \|.*\| `([0-9a-f]{12})` \|$", (TEMPLATES / "SOURCES.md").read_text(), re.M)
    written = {name for name in files if name.endswith("_shape.jinja")}
    assert {name for name, _ in copies} == files - written
    for name, digest in copies:
        assert hashlib.sha256((TEMPLATES / name).read_bytes()).hexdigest()[:12] == digest


def test_the_licenses_of_the_copies_are_here() -> None:
    licenses = TEMPLATES / "LICENSES"
    for name in re.findall(r"LICENSES/(\S+\.txt)", (TEMPLATES / "SOURCES.md").read_text(encoding="utf-8")):
        assert (licenses / name).stat().st_size > 500
    assert len(list(licenses.iterdir())) == 3
