"""Readers for the body of a call, one for each format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentenv._util.lenient_json import LiteralError, read_literal, skip_space
from agentenv.chat.tool_calls.syntax import NAME, Syntax, loose
from agentenv.core.tool_schemas import Parameter

ARGUMENT_KEYS = ("arguments", "parameters")
NAME_KEYS = ("name", "tool_name")
_ID_KEYS = ("id", "tool_call_id")
_BRACKETS = {"(": ")", "{": "}", "[": "]"}
_CDATA = re.compile(r"\s*+<!\[CDATA\[")
_NAME_IN_JSON = re.compile(rf'"name"\s*+:\s*+"({NAME})"')

_ANY, _TEXT = Parameter({}), Parameter({"type": "string"})


class Bad(Exception):
    """A malformed call: the problem, how far the text was read, and the tool's name if known.

    `parse` catches it and makes a MalformedCall.
    """

    def __init__(self, problem: str, at: int, name: str = "") -> None:
        super().__init__(problem)
        self.problem, self.at, self.name = problem, at, name


def mapping(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Return arguments in a JSON object, and where it ends."""
    value, end = read_literal(text, at)
    return _object(value, end), end


def markup(syntax: Syntax, text: str, at: int, schema: Parameter) -> tuple[dict[str, Any], int]:
    """Return arguments written as one element each, and where the last one ends.

    A value ends where its close is followed by the next element or the call's end; it never contains a call's start.
    """
    arguments: dict[str, Any] = {}
    while key := syntax.patterns.key.match(text, at):
        if syntax.cdata and (opened := _CDATA.match(text, key.end())):  # it may contain tags
            closed = syntax.patterns.cdata_end.search(text, opened.end())
            if not closed:
                close = f"]]>{syntax.value_close.strip()}"
                raise Bad(f"the value of {key['key']!r} is never closed with {close!r}", len(text))
            arguments[key["key"]], at = text[opened.end() : closed.start()], closed.end()
            continue
        end = syntax.patterns.value_end.search(text, key.end())
        if not end or end["ok"] is None:
            stop, close = end.start() if end else len(text), syntax.value_close.strip()
            raise Bad(f"the value of {key['key']!r} is never closed with {close!r}", stop)
        value = text[key.end() : end.start()]
        if syntax.adds_space:
            value = value.removeprefix(" ")
        if syntax.key_close.endswith("\n"):
            value = value.removeprefix("\n")
        if syntax.value_close.startswith("\n"):
            value = value.removesuffix("\n")
        parameter = schema.at(key["key"])
        if syntax.literal_key_close:
            parameter = _ANY if key["literal"] is not None else _TEXT
        arguments[key["key"]] = parameter.read(value)
        at = end.end()
    return arguments, at


def keywords(syntax: Syntax, text: str, at: int, schema: Parameter) -> tuple[dict[str, Any], int]:
    """Return arguments in Python call syntax, starting after the opening bracket, and where they end.

    Raises:
        LiteralError: they cannot be parsed.
    """
    arguments: dict[str, Any] = {}
    close = _BRACKETS.get(text[at - 1], ")")
    key_pattern = re.compile(rf"([\w.-]{{1,256}}+)\s*+{loose(syntax.key_close)}")
    at = skip_space(text, at)
    while text[at : at + 1] != close:
        if arguments:
            if text[at : at + 1] != ",":
                raise LiteralError(f"expected ',' or {close!r}, got {text[at : at + 12]!r}", at)
            at = skip_space(text, at + 1)
        key = key_pattern.match(text, at)
        if not key:
            raise LiteralError(f"expected NAME{syntax.key_close.strip()}VALUE or {close!r}", at)
        value, at = _value(syntax, text, key.end(), close)
        value = _without_space(value) if syntax.adds_space else value
        parameter = schema.at(key[1])
        is_known = isinstance(value, str) and parameter.schema is not None
        arguments[key[1]] = parameter.read(value) if is_known else value
        at = skip_space(text, at)
    return arguments, at + 1


def _without_space(value: Any) -> Any:
    """Return a value without the first space of every string in it."""
    if isinstance(value, str):
        return value.removeprefix(" ")
    if isinstance(value, list):
        return [_without_space(item) for item in value]
    if isinstance(value, dict):
        return {_without_space(key): _without_space(item) for key, item in value.items()}
    return value


def _value(syntax: Syntax, text: str, at: int, close: str) -> tuple[Any, int]:
    """Return a literal and its end; if the template does not escape strings, read to the first quote that fits."""
    try:
        value, end = read_literal(text, at, python=True, quote=syntax.quote)
        after = skip_space(text, end)
        if syntax.escapes or text[after : after + 1] in (",", close):
            return value, end
        failed = LiteralError("text behind a value", end)
    except LiteralError as error:
        failed = error
    start = skip_space(text, at) + 1
    quote = text[start - 1 : start]
    if syntax.escapes or quote not in ("'", '"'):
        raise failed
    ends = rf"(?P<ok>{quote}(?=\s*+(?:,\s*+[\w.-]++\s*+=|\{close})))|{syntax.patterns.call.pattern}"
    found = re.compile(ends).search(text, start)
    if not found or found["ok"] is None:
        raise failed
    return text[start : found.start()], found.end()


def name_in(text: str) -> str:
    """Return the name that malformed JSON appears to contain."""
    found = _NAME_IN_JSON.search(text)
    return found[1] if found else ""


def is_call(value: Any, keys: Sequence[str]) -> bool:
    """Return True if a standalone value is a call, with its arguments under one of these keys."""
    return isinstance(value, dict) and any(k in value for k in NAME_KEYS) and any(k in value for k in keys)


def call_in(value: Any, at: int, keys: Sequence[str]) -> tuple[str, dict[str, Any], str]:
    """Return the name, the arguments, which are under one of these keys, and the id in an object.

    Raises:
        Bad: it is not a call.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):  # OpenAI's form
        value = {**value["function"], **{key: value[key] for key in _ID_KEYS if key in value}}
    if not isinstance(value, dict):
        raise Bad(f"a call is an object with the keys name and arguments, got {_short(value)}", at)
    name = next((value[key] for key in NAME_KEYS if key in value), None)
    if not isinstance(name, str) or not name:
        raise Bad('it lacks the key "name" with the name of a tool', at)
    known = [key for key in keys if key in value]
    others = sorted(set(value) - {*NAME_KEYS, *_ID_KEYS, "type"})
    if others and not known:
        raise Bad(f'it lacks the key "arguments", got {others}', at, name)
    given = next((str(value[key]) for key in _ID_KEYS if key in value), "")
    try:
        return name, _object(value[known[0]] if known else {}, at), given
    except Bad as error:
        raise Bad(error.problem, at, name) from error


def _object(value: Any, at: int) -> dict[str, Any]:
    """Return arguments that are an object, or an object in a string."""
    if isinstance(value, str):
        try:
            value = read_literal(value, 0)[0]
        except LiteralError as error:
            raise Bad(f"its arguments cannot be read: {error}", at) from error
    if not isinstance(value, dict):
        raise Bad(f"its arguments are not an object with parameter names, got {_short(value)}", at)
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
