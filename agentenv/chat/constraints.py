r"""Structural tags (`SamplingParams.structural_tag`) for answers: calls in the template's syntax, or JSON.

A tag consists of texts and holes, such as `<tool_call>\n{"name": "add", "arguments": ` and the arguments. Texts of
added tokens must be those tokens: a model cannot spell them. Reasoning may come first if the template has its marks.
Source: xgrammar 0.2.8, python/xgrammar/structural_tag.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentenv._util.brief import brief
from agentenv.chat.chat import Chat
from agentenv.chat.encoding import encoder_of
from agentenv.chat.tool_calls.parse import ToolFormat
from agentenv.chat.tool_calls.syntax import ANY_ID, ANY_NAME
from agentenv.core.tool_schemas import Parameter
from agentenv.errors import DataError

MAX_WHITESPACE = 20
"""Whitespace characters in a row in JSON: without a limit, a model can write nothing else."""

_Format = dict[str, Any]
_BREAK: _Format = {"type": "regex", "pattern": r"\n{0,2}"}
_HOLE = "\uf8fc"
"""It stands for the arguments, in the text of a call."""
_EXAMPLE_ID = "abcdef012"
_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "format", "deprecated", "$schema", "$id", "$defs", "definitions",
})  # fmt: skip
_ENFORCED = frozenset({
    "type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "enum",
    "const", "anyOf", "$ref", "minLength", "maxLength", "pattern", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum",
})  # fmt: skip
"""The keywords of JSON schema that xgrammar enforces, each alone."""

_BY_NAME, _IN_LISTS = ("properties", "$defs", "definitions"), ("anyOf", "oneOf", "allOf", "prefixItems")
"""The keywords that hold schemas by name, and those that hold a list of them."""
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(_BY_NAME, ((dict,), "an object")),
    **dict.fromkeys((*_IN_LISTS, "enum", "required"), ((list, tuple), "a list")),
    "type": ((str, list, tuple), "a type or a list of types"),
}
_UNREGULAR = re.compile(r"\(\?[^:]|\\[bB1-9]")
"""What a pattern may have that grammars do not: assertions and references to groups."""


def json_tag(chat: Chat, schema: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the structural tag of an answer in JSON; with tools, of one that calls some of them instead.

    Raises:
        DataError: the schema is malformed, has a keyword that the grammar would not enforce, or as `calls_tag`.
    """
    for each, where in _schemas_in(schema, "json_schema"):
        own = each.keys() - _ANNOTATIONS
        wrong = sorted(own - _ENFORCED)
        if not wrong and own & {"anyOf", "$ref"} and len(own) > 1:
            wrong = sorted(own)
        if not wrong and ("pattern" in each or "format" in each) and own & {"minLength", "maxLength"}:
            wrong = sorted(own & {"pattern", "minLength", "maxLength"})
        if not wrong and _UNREGULAR.search(str(each.get("pattern", ""))):
            wrong = ["pattern"]
        if wrong:
            raise DataError(
                f"{where}: expected keywords that a grammar enforces, alone or together, got {', '.join(wrong)}. Take "
                "them out of the schema, and check them in the answer."
            )
    answer = _json(schema)
    if tools:
        answer = {"type": "or", "elements": [_calls(chat, tools, several=True), answer]}
    return _tag(chat, answer)


def calls_tag(chat: Chat, tools: Sequence[Mapping[str, Any]], *, several: bool) -> str:
    """Return the structural tag of an answer that calls one of the tools; with `several`, one call or more.

    Arguments follow the tools' JSON schemas as far as the grammar can enforce them.

    Raises:
        DataError: calls in the template's syntax have no grammar, or parameters are not a JSON schema.
    """
    return _tag(chat, _calls(chat, tools, several=several))


def _tag(chat: Chat, answer: _Format) -> str:
    """Return the tag as JSON text, with reasoning before the answer where the template has it."""
    elements = [answer]
    template = chat.template if chat.has_template else None
    if template is not None and template.reasoning is not None:
        opens, closes, _ = template.reasoning
        prompt = template.generation_prompt
        if prompt.rfind(opens) > prompt.rfind(closes):
            elements = [_text_until(closes), _BREAK, answer]
        elif closes not in prompt:
            thought = {"type": "sequence", "elements": [*_exact(chat, opens), _text_until(closes), _BREAK]}
            elements = [{"type": "optional", "content": thought}, answer]
    return json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})


def _text_until(end: str, *without: str) -> _Format:
    free = {"type": "any_text", "excludes": [text for text in without if text]}
    return {"type": "tag", "begin": "", "content": free, "end": end}


def _json(schema: Mapping[str, Any]) -> _Format:
    return {"type": "json_schema", "json_schema": _lengths_as_patterns(schema), "max_whitespace_cnt": MAX_WHITESPACE}


def _lengths_as_patterns(schema: Any) -> Any:
    """Return a schema with the lengths of texts as patterns: xgrammar's own rule for lengths admits control characters,
    which JSON does not allow.
    """
    if isinstance(schema, list):
        return [_lengths_as_patterns(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    bounds = {name: schema[name] for name in ("minLength", "maxLength") if isinstance(schema.get(name), int)}
    if bounds:
        rest = {key: each for key, each in schema.items() if key not in bounds}
        return {**rest, "pattern": f"^.{{{bounds.get('minLength', 0)},{bounds.get('maxLength', '')}}}$"}
    return {key: each if key in ("const", "enum") else _lengths_as_patterns(each) for key, each in schema.items()}


def _exact(chat: Chat, text: str) -> list[_Format]:
    """Return the formats of a text: added tokens, any ids at `ANY_ID`, and constant strings between them."""
    added = encoder_of(chat.tokenizer).added
    words = sorted([*added, ANY_ID], key=len, reverse=True)
    formats: list[_Format] = []
    for piece in re.split(f"({'|'.join(map(re.escape, words))})", text):
        if piece == ANY_ID:
            formats.append({"type": "regex", "pattern": "[a-zA-Z0-9]{9}"})
        elif piece in added:
            formats.append({"type": "token", "token": added[piece]})
        elif piece:
            formats.append({"type": "const_string", "value": piece})
    return formats


def _calls(chat: Chat, tools: Sequence[Mapping[str, Any]], *, several: bool) -> _Format:
    """Return the format of one call, or of several."""
    syntax, functions = chat.tool_format, [tool.get("function", tool) for tool in tools]
    if syntax.kind == "keywords":
        raise DataError(
            "tool_choice: expected a template that writes calls as JSON or as markup, got one that writes them "
            "like calls in Python, for which agentenv has no grammar. Use 'auto'."
        )
    for name in (function["name"] for function in functions):  # a call without arguments is read back as written
        opening = (syntax.section_open + syntax.call_open).lstrip("\n") + "[" * syntax.listed
        empty = _overlap(syntax.value_close, syntax.key_open) if syntax.kind == "markup" else "{}"
        text = _written(syntax, name, opening).replace(_HOLE, empty) + _ending(syntax)
        text = text.replace(ANY_ID, _EXAMPLE_ID).removeprefix(syntax.lead)
        found = syntax.parse(syntax.reasoning_close + text)
        if found.malformed or [(call.name, dict(call.arguments)) for call in found.calls] != [(name, {})]:
            raise DataError(
                f"tool_choice: expected a call that the template's syntax reads back, got {brief(text)} for the tool "
                f"{brief(name)}. Rename the tool, or use 'auto'."
            )
    opening = (syntax.section_open + syntax.call_open).removeprefix(syntax.lead).lstrip("\n")
    elements = [_any_of(chat, functions, opening + "[" * syntax.listed)]
    if several and syntax.parallel:
        comma = {"type": "const_string", "value": ", "}
        other = _any_of(chat, functions, "" if syntax.listed else syntax.call_open.lstrip("\n"))
        pair = {"type": "sequence", "elements": [comma if syntax.listed else _BREAK, other]}
        elements.append({"type": "star", "content": pair})
    return {"type": "sequence", "elements": [*elements, *_exact(chat, _ending(syntax))]}


def _any_of(chat: Chat, functions: Sequence[Mapping[str, Any]], opening: str) -> _Format:
    calls = []
    for function in functions:
        before, after = _written(chat.tool_format, function["name"], opening).split(_HOLE)
        given = function.get("parameters") or {}
        list(_schemas_in(given, f"tools.{function['name']}.parameters"))  # it raises
        schema = {"type": "object", "properties": {}, **given}
        arguments = [_json(schema)] if chat.tool_format.kind != "markup" else _parameters(chat, schema)
        parts = [*_exact(chat, before), *arguments, *_exact(chat, after)]
        calls.append({"type": "sequence", "elements": parts})
    return {"type": "or", "elements": calls} if len(calls) > 1 else calls[0]


def _parameters(chat: Chat, schema: Mapping[str, Any]) -> list[_Format]:
    """Return the formats of arguments in markup: one element for each parameter."""
    syntax, offered = chat.tool_format, Parameter(schema)
    parameters, shared = [], _overlap(syntax.value_close, syntax.key_open)
    for key, each in (schema.get("properties") or {}).items():
        elements = _parameter(chat, key, offered.beside(each if isinstance(each, Mapping) else {}))
        one = {"type": "sequence", "elements": elements}
        is_required = key in (schema.get("required") or ())
        parameters.append(one if is_required else {"type": "optional", "content": one})
    return [*parameters, *_exact(chat, shared)]


def _parameter(chat: Chat, key: str, parameter: Parameter) -> list[_Format]:
    """Return the formats of a parameter in markup: text up to the value's close, or JSON if it cannot be text."""
    syntax, kinds, choices = chat.tool_format, parameter.kinds, parameter.values
    close = syntax.value_close.removesuffix(_overlap(syntax.value_close, syntax.key_open))
    is_text = not kinds or "string" in kinds
    after_key = syntax.key_close if is_text or not syntax.literal_key_close else syntax.literal_key_close
    opening = _exact(chat, syntax.key_open + key + after_key)
    if is_text and choices and all(isinstance(choice, str) for choice in choices):
        choice = {"type": "or", "elements": [{"type": "const_string", "value": text} for text in choices]}
        return [*opening, choice, *_exact(chat, close)]
    if is_text:
        calls = (syntax.section_open.strip(), syntax.call_open.strip(), "<tool_call>")
        return [*opening, _text_until(close, *calls, "<![CDATA[" * syntax.cdata)]
    shared = {name: parameter.root[name] for name in ("$defs", "definitions") if name in parameter.root}
    return [*opening, _json({**shared, **parameter.schema}), *_exact(chat, close)]


def _written(syntax: ToolFormat, name: str, opening: str) -> str:
    """Return the text of a call with a hole for its arguments."""
    opening, after_name = opening.replace(ANY_NAME, name), syntax.after_name.replace(ANY_NAME, name)
    close = "" if syntax.listed else syntax.call_close
    if syntax.kind in ("json", "plain"):
        in_object = syntax.has_ids and ANY_ID not in opening + close
        more = f', "id": "{ANY_ID}"' if in_object else ""
        return f'{opening}{{"name": {json.dumps(name)}, "{syntax.arguments_key}": {_HOLE}{more}}}{close}'
    return f"{opening}{f'functions.{name}:0' if syntax.id_is_name else name}{after_name}{_HOLE}{close}"


def _ending(syntax: ToolFormat) -> str:
    return ("]" + syntax.call_close if syntax.listed else "") + syntax.section_close


def _overlap(left: str, right: str) -> str:
    """Return the longest end of one text that begins the other: the template writes it once between them."""
    return next((left[-num:] for num in range(min(len(left), len(right)), 0, -1) if right.startswith(left[-num:])), "")


def _schemas_in(schema: Any, where: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield a schema and those within it, each with its place.

    Raises:
        DataError: one is not a schema, or a keyword has a value of another kind.
    """
    if schema is None or isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise DataError(f"{where}: expected a JSON schema, got {brief(schema)}.")
    for name, (kind, expected) in _KINDS.items():
        if schema.get(name) is not None and not isinstance(schema[name], kind):
            raise DataError(f"{where}.{name}: expected {expected}, got {brief(schema[name])}.")
    yield schema, where
    for name in _BY_NAME:
        for key, value in (schema.get(name) or {}).items():
            yield from _schemas_in(value, f"{where}.{name}.{key}")
    for name in ("items", "additionalProperties"):
        yield from _schemas_in(schema.get(name), f"{where}.{name}")
    for name in _IN_LISTS:
        for index, value in enumerate(schema.get(name) or ()):
            yield from _schemas_in(value, f"{where}.{name}[{index}]")
