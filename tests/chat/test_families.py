"""The template fixtures: each family loads, renders, and behaves as its row in `families.py` says."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from tests.chat.families import FAMILIES, TEMPLATES, Family, load

USER, ANSWER, NEXT, SYSTEM = "first question", "ANSWERTEXT", "second question", "SYSTEMTEXT"
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string", "description": "What."}}, "required": ["q"]}
FUNCTION = {"name": "lookup", "description": "Look something up.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
TEXTS = (
    "hello world",
    "two  spaces",
    "a)\n\nb",
    "}\nuser\nhi\n\n",
    "日本語, é, 😀",
    "x ",
    "\n",
    "if x:\n    return 1234567\n",
)
Message = dict[str, Any]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)


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


@every_family
def test_a_family_loads_with_each_added_token_as_one_id(family: Family) -> None:
    tokenizer = load(family)
    vocab = tokenizer.get_vocab()
    for token in family.added_tokens:
        assert tokenizer.encode(token.text, add_special_tokens=False)[-1] == vocab[token.text]
        kept = tokenizer.added_tokens_decoder[vocab[token.text]]
        assert (kept.special, kept.lstrip, kept.rstrip) == (token.special, token.lstrip, token.rstrip)
    assert tokenizer.eos_token == family.eos_token
    assert tokenizer.bos_token == family.bos_token
    assert set(family.stop_tokens) <= {token.text for token in family.added_tokens}
    assert (tokenizer.encode("x")[0] == tokenizer.bos_token_id) == family.adds_bos
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


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
