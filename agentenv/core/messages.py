"""The one form of chat messages, whether they come from rows of data, environments or requests: `normalized`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from agentenv._util.brief import brief
from agentenv._util.http.json_bodies import parse_json
from agentenv.core.tool_schemas import Parameter
from agentenv.core.types import Message
from agentenv.errors import ConfigError, DataError

_NO_SCHEMAS: Mapping[str, Any] = MappingProxyType({})


def as_messages(observation: str | Sequence[Message]) -> list[dict[str, Any]]:
    """Return an observation as messages, a text as a user's; none if it is empty."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}] if observation else []
    return [dict(message) for message in observation]


def normalized(messages: Sequence[Message], tools: Any = None) -> list[Message]:
    """Return messages in the form that chat templates and servers take, as `normalized_message` returns each.

    Every tool result has the name of the call that it answers: OpenAI's results have only its id. Arguments that are
    None where the schemas of `tools` take no null are left out, at every level: Parquet gives each call and object the
    fields of all others.
    """
    offered = tools if isinstance(tools, list | tuple) else ()
    functions = [tool.get("function", tool) for tool in offered if isinstance(tool, Mapping)]
    schemas = {str(each.get("name")): each.get("parameters") for each in functions if isinstance(each, Mapping)}
    read = [normalized_message(message, schemas) for message in messages]
    if all(message.get("role") != "tool" for message in read):
        return read
    starts = [0, *(index + 1 for index, message in enumerate(read) if message.get("role") == "assistant")]
    named: list[Message] = []
    for start, end in pairwise([*starts, len(read)]):
        calls = read[start - 1].get("tool_calls", ()) if start else ()
        names = [(str(call.get("id") or ""), str(call["function"].get("name") or "")) for call in calls]
        named += named_results(read[start:end], names)
    return named


def normalized_message(message: Message, schemas: Mapping[str, Any] = _NO_SCHEMAS) -> Message:
    """Return a message without fields that are None, which Parquet and Arrow add where other rows have a value.

    Content is text ("" if it is missing), or parts if some are not text; `tool_calls` are not empty; their arguments
    are an object if they are one or JSON text of one; the role developer is system.

    Raises:
        DataError: `tool_calls` are not calls.
    """
    if len(message) == 2 and message.get("role") != "developer" and isinstance(message.get("content"), str):
        return message  # the usual case
    read = {key: value for key, value in message.items() if value is not None}
    content = read.setdefault("content", "")
    if isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content):
        parts = [{key: value for key, value in part.items() if value is not None} for part in content]
        texts = [part.get("text") if part.get("type") == "text" else None for part in parts]
        read["content"] = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else parts
    if read.get("role") == "developer":
        read["role"] = "system"
    calls = read.pop("tool_calls", ())
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f"tool_calls: expected a list of calls, got {brief(calls)}. Parse them.")
    return {**read, "tool_calls": [_call(call, schemas) for call in calls]} if calls else read


def check_open(messages: Sequence[Message]) -> None:
    """Check that an answer is due: templates would close a last assistant's message and open a second one behind it.

    Raises:
        ConfigError: the last message is an assistant's.
    """
    if messages and messages[-1].get("role") == "assistant":
        raise ConfigError(
            "messages: expected the last one to be from another role than assistant, got an assistant's: "
            f"{brief(messages[-1].get('content'), 60)}. Remove it; what grades the answer is the label."
        )


def named_results(messages: Sequence[Message], calls: Sequence[tuple[str, str]]) -> list[Message]:
    """Return the messages after calls, given as ids and names, with the name of its call in every tool result.

    A result without a name has that of the call with its id, or else of the call in its place.
    """
    names, places = dict(calls), iter([name for _, name in calls])
    named = []
    for message in messages:
        if message.get("role") == "tool":
            place = next(places, "")
            name = message.get("name") or names.get(str(message.get("tool_call_id") or "")) or place
            message = {**message, "name": name} if name else message
        named.append(message)
    return named


def without_nulls(schema: Any) -> Any:
    """Return the JSON schema of a tool without nulls, which mean nothing in a schema but as a default or a constant."""
    if isinstance(schema, list | tuple):
        return [without_nulls(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    may_be_null = schema.get("nullable") or not isinstance(schema.get("type"), str)
    kept = {"const", "default"} if may_be_null else set()
    return {key: without_nulls(value) for key, value in schema.items() if value is not None or key in kept}


def _call(call: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call in OpenAI's form, also if it is only a name and arguments."""
    call = {key: value for key, value in call.items() if value is not None}
    given = call.pop("function", None)
    if not isinstance(given, Mapping):
        given = {key: call.pop(key) for key in ("name", "arguments") if key in call}
    function = {key: value for key, value in given.items() if value is not None}
    name, arguments = function.get("name"), _arguments(function.get("arguments"))
    if isinstance(name, str) and name in schemas and isinstance(arguments, Mapping):
        closed = {"properties": {}, "allOf": [schemas[name]]}  # a tool without a schema has no parameters
        arguments = _without_padding(arguments, Parameter(closed, schemas[name]))
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _without_padding(value: Any, schema: Parameter) -> Any:
    """Return a list or an object without the nulls in objects that the schema does not take."""
    places = value.items() if isinstance(value, Mapping) else enumerate(value)
    read = {
        place: _without_padding(each, schema.at(place)) if isinstance(each, dict | list | tuple) else each
        for place, each in places
        if each is not None or isinstance(place, int) or schema.at(place).takes_null
    }
    return read if isinstance(value, Mapping) else [*read.values()]


def _arguments(arguments: Any) -> Any:
    """Return the object that arguments as JSON text mean; other text stays: it may quote a malformed call.

    Nothing, null and an empty list, as clients in PHP write it, are an object without arguments.
    """
    value = arguments
    while isinstance(value, str):
        try:
            value = parse_json(value.encode()) if value.strip() else None
        except ValueError:
            return arguments
    if isinstance(value, list | None) and not value:
        return {}
    return value if isinstance(value, dict) or not isinstance(arguments, str) else arguments
