"""Answers with tool calls, right and wrong ones, made from the schemas of the tools that an environment offers.

Their arguments are of the world of the task, which is read out of texts: names, keys, files, options, commands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

_MAX_TOOLS = 8
"""Maximum number of tools that get a call; the wrong calls are of the first."""
_MAX_CHOICES = 6
"""Maximum number of values of an argument that get a call."""
_MAX_DEPTH = 6
"""Depth at which the example of a schema that contains itself ends."""
_ENDING = re.compile(
    r"\b(?:finish|submit|done|end|stop|complete|answer|close|commit|checkout|confirm|guess|quit)", re.I
)
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_LATE = re.compile(r"\bError: (\S+) returned no result within [\d.]+ s\.")
"""As `agentenv.tools.answer_calls` writes it."""
READING = re.compile(
    r"(?:get|list|find|search|read|show|look|check|view|fetch|query|describe|inspect|open|print)", re.I
)
_MAX_IDS = 100
_OF_FORMAT: Mapping[str, str] = {
    "date": "2026-01-31", "date-time": "2026-01-31T09:00:00", "time": "09:00:00", "duration": "P1D",
    "uuid": "123e4567-e89b-12d3-a456-426614174000", "email": "someone@example.com", "uri": "https://example.com/",
}  # fmt: skip
"""An example of each format of texts that `schema_of` and pydantic name."""
_OTHER: Mapping[str, Any] = {"string": [1, {"a": None}], "boolean": "maybe"}
"""Values of a wrong type, by the right one; those of the others are text."""


def right_calls(tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return an answer with one call of each tool, whose arguments fit its schema, by the tool's name."""
    return {name: call_text(name, right) for name, right, _, _ in _functions(tools)}


def calls_of_choices(tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return an answer with one call for each value that a schema lists, by the names of tool, argument and value."""
    calls = {}
    for name, right, properties, _ in _functions(tools):
        for key, schema in properties.items():
            values = [False, True] if schema.get("type") == "boolean" else schema.get("enum")
            for value in values[:_MAX_CHOICES] if isinstance(values, list) else ():
                calls[f"{name}.{key}={value}"] = call_text(name, {**right, key: value})
    return calls


def calls_with_number(action: str, tools: Sequence[Mapping[str, Any]], number: float) -> list[str]:
    """Return the only call of an action with a number as one argument each, also as one that it leaves out."""
    name, arguments = only_call(action)
    schemas = next((properties for own, _, properties, _ in _functions(tools) if own == name), {})
    return [call_text(name, {**arguments, key: number}) for key, schema in schemas.items() if _is_number(schema)]


def calls_of_siblings(action: str, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the only call of an action as one of each other tool that takes some of its arguments and needs no others.

    Those that take the most come first.
    """
    name, arguments = only_call(action)
    taken = {
        other: {key: value for key, value in arguments.items() if key in properties}
        for other, right, properties, _ in _functions(tools)
        if other != name and right.keys() <= arguments.keys()
    }
    return [
        call_text(other, taken[other]) for other in sorted(taken, key=lambda each: -len(taken[each])) if taken[other]
    ]


def with_every_id(action: str, seen: str) -> str:
    """Return an action whose calls are made for every id that results list, not only for the one that each names.

    Calls of tools that only read by their name are left as they are.
    """

    def every(found: re.Match[str]) -> str:
        name, arguments = only_call(found[0])
        listed = {key: _listed_like(value, key, seen) for key, value in arguments.items()}
        key = max(listed, key=lambda each: len(listed[each]), default="")
        if READING.match(name) or len(listed.get(key, ())) < 2:
            return found[0]
        return "\n".join(call_text(name, {**arguments, key: each}) for each in listed[key][:_MAX_IDS])

    return _CALL.sub(every, action)


def _listed_like(value: Any, key: str, seen: str) -> list[Any]:
    """Return the ids that a text has under the same key of JSON as a value, or a text's in the same form, with digits.

    There are none if the text does not have the value.
    """
    if not isinstance(value, str | int) or isinstance(value, bool):
        return []
    own, form = re.escape(json.dumps(value, ensure_ascii=False)), re.sub(r"\d+", r"\\d+", re.escape(str(value)))
    if keys := re.findall(rf'"(\w+)": ?{own}(?![\w.])', seen):
        kind = r"-?\d+" if isinstance(value, int) else r'"[^"\\\n]*"'
        told = re.findall(rf'"{key if key in keys else keys[-1]}": ?({kind})(?![\w.])', seen)
        found = [json.loads(each, strict=False) for each in told]  # texts without escapes: a result may be no JSON
    else:  # a number without a key may be anything
        found = re.findall(rf"(?<![\w.-]){form}(?![\w.-])", seen) if isinstance(value, str) else []
    return list(dict.fromkeys(found)) if value in found else []


def has_siblings(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a tool needs no other arguments than another one takes, and takes some of them."""
    functions = [(name, right.keys(), schemas.keys()) for name, right, schemas, _ in _functions(tools)]
    return any(
        other != name and needed <= own and not own.isdisjoint(theirs)
        for name, _, own in functions
        for other, needed, theirs in functions
    )


def late_tool(text: str) -> str:
    """Return the name of the tool whose call ended by its time limit, from the replies to an action; empty if none."""
    found = _LATE.search(text)
    return found[1] if found is not None else ""


def calls_with_texts(tools: Sequence[Mapping[str, Any]], text: Callable[[Mapping[str, Any]], str]) -> dict[str, str]:
    """Return an answer with one call of each tool that takes texts, all of which are `text(tool)`, by its name."""
    calls = {}
    for tool, (name, right, properties, _) in zip(tools, _functions(tools), strict=False):
        if names := [key for key, schema in properties.items() if _is_free_text(schema)]:
            calls[name] = call_text(name, {**right, **dict.fromkeys(names, text(tool))})
    return calls


def calls_with_world(
    tools: Sequence[Mapping[str, Any]],
    texts: Sequence[str],
    *,
    numbers: Sequence[float] = (1, 2, 3),
    each: int = 4,
    optional: bool = False,
) -> dict[str, str]:
    """Return an answer with one call for each choice of arguments, by the tool's name and the number of the choice.

    Args:
        tools: the tools that are offered.
        texts: texts with words that tools may know, the most likely first, such as a prompt and the last result.
        numbers: values of arguments that are numbers.
        each: maximum number of calls of one tool.
        optional: whether to say the numbers, too, that a call may leave out.
    """
    calls = {}
    words = [word for text in texts for word in words_of(text)]
    for name, right, properties, told in _functions(tools):
        more = [key for key in properties if optional and key not in right and _is_number(properties[key])]
        values = {key: _values(properties.get(key, {}), told, words, numbers) for key in (*right, *more)}
        longest = max((len(own) for own in values.values()), default=1)
        for index in range(min(each, longest)):
            made = {key: own[(index + place) % len(own)] for place, (key, own) in enumerate(values.items()) if own}
            calls[f"{name} {index + 1}"] = call_text(name, {**right, **made})
    return calls


def _values(schema: Mapping[str, Any], told: str, words: Sequence[str], numbers: Sequence[float]) -> list[Any]:
    """Return values of an argument of a tool that `told` describes, best first; none for one of another type."""
    if isinstance(schema.get("enum"), list):
        return [*schema["enum"]]
    if _is_free_text(schema):
        of_argument = str(schema.get("description", ""))
        named = [*options_of(of_argument), *options_of(told)] or words_of(of_argument)[-2:]
        return list(dict.fromkeys([*named, *words]))
    if text := _of_format(schema):
        alike = [word for word in words if re.sub(r"\d", "0", word) == re.sub(r"\d", "0", text)]
        return list(dict.fromkeys([*alike, text]))
    if _is_number(schema):
        return [*numbers]
    return [True, False] if "boolean" in _types_of(schema) else []


def writing_calls(tools: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[str, Any]]) -> list[str]:
    """Return calls that write a value to a key, for each pair: of the tools that take at least two arguments.

    A value that an argument cannot hold is left out.
    """
    calls = []
    for name, right, properties, _ in _functions(tools):
        names = [key for key in right if _is_free_text(properties.get(key, {}))]
        last = list(right)[-1] if right else ""
        if len(right) < 2 or not names or names[0] == last:
            continue
        schema = properties.get(last, {})
        for key, value in pairs:
            fits = value if _is_number(schema) and not isinstance(value, str) else str(value)
            if "string" in _types_of(schema) or not isinstance(fits, str):
                calls.append(call_text(name, {**right, names[0]: key, last: fits}))
    return calls


def ending_tools(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the tools whose name says that they end a task or take its answer, such as finish and submit."""
    named = [(tool, str(tool.get("function", tool).get("name"))) for tool in tools]
    return [tool for tool, name in named if _ENDING.search(name.replace("_", " "))]


def _is_free_text(schema: Mapping[str, Any]) -> bool:
    return "string" in _types_of(schema) and not schema.keys() & {"enum", "const"} and not _of_format(schema)


def _of_format(schema: Mapping[str, Any]) -> str:
    """Return a text of the format that a schema asks for; an empty one if it asks for none that is known."""
    formats = [_mapping(part).get("format") for part in (schema, *(schema.get("anyOf") or ()))]
    return next((_OF_FORMAT[each] for each in formats if isinstance(each, str) and each in _OF_FORMAT), "")


def _is_number(schema: Mapping[str, Any]) -> bool:
    return not {"integer", "number"}.isdisjoint(_types_of(schema))


def _types_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the types that a schema allows."""
    kinds = schema.get("type")
    parts = [_mapping(part).get("type") for part in schema.get("anyOf") or ()]
    return [*(kinds if isinstance(kinds, list) else (kinds,)), *parts]


def wrong_calls(tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return answers with calls that a policy may write and a tool must survive, by what is wrong with them."""
    if not tools:
        return {}
    name, right, properties, _ = next(_functions(tools))
    wrong = {key: _OTHER.get(str(schema.get("type")), "seven") for key, schema in properties.items()}
    nested: Any = "x"
    for _ in range(30):
        nested = [nested]
    call = call_text(name, right)
    return {
        "unknown_tool": call_text("no_such_tool", right),
        "no_arguments": call_text(name, {}),
        "unknown_argument": call_text(name, {**right, "no_such_argument": 1}),
        "null_arguments": call_text(name, dict.fromkeys(properties)),
        "wrong_types": call_text(name, wrong),
        "nested_arguments": call_text(name, dict.fromkeys(properties or ["x"], nested)),
        "huge_arguments": call_text(name, dict.fromkeys(properties or ["x"], "9" * 5_000)),
        "arguments_as_a_list": call_text(name, list(right.values())),
        "no_json": "<tool_call>\n{'name': " + name + "\n</tool_call>",
        "cut": call[: len(call) // 2],
        "many_at_once": "\n".join([call] * 20),
        "between_words": f"I call it now.\n{call}\nThat is all.",
    }


def call_text(name: str, arguments: Any) -> str:
    """Return a call in the form that every dialogue reads."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def only_call(action: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the arguments of the only call in an action; an empty name without one."""
    texts = _CALL.findall(action)
    try:
        call: Any = json.loads(texts[0]) if len(texts) == 1 else None
    except (ValueError, RecursionError):
        call = None
    return (str(call.get("name")), _mapping(call.get("arguments"))) if isinstance(call, dict) else ("", {})


def example(schema: Any, root: Any = None, depth: int = 0) -> Any:
    """Return a small value that fits a JSON schema: its example if it has one, required properties only."""
    schema = _mapping(schema)
    root = schema if root is None else root
    values = [schema[key] for key in ("const", "default") if key in schema]
    values += [schema[key][0] for key in ("enum", "examples") if schema.get(key) and isinstance(schema[key], list)]
    if values or depth > _MAX_DEPTH:
        return values[0] if values else None
    if schema.get("properties"):  # next to them, anyOf and the like only say which of them go together
        return _of_type(schema, root, depth)
    parts = [schema[key][0] for key in ("anyOf", "oneOf", "allOf") if schema.get(key)]
    if str(schema.get("$ref", "")).startswith("#/"):
        part: Any = root
        for key in schema["$ref"][2:].split("/"):
            part = part.get(key, {}) if isinstance(part, Mapping) else {}
        parts.append(part)
    return example(parts[0], root, depth + 1) if parts else _of_type(schema, root, depth)


def _of_type(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Any:
    kinds = schema.get("type", "object" if "properties" in schema else "string")
    kind = kinds if isinstance(kinds, str) else next((each for each in kinds if each != "null"), "null")
    match kind:
        case "object":
            properties = _properties(schema)
            return {key: example(properties.get(key), root, depth + 1) for key in schema.get("required") or []}
        case "array":
            items = schema.get("items")
            if isinstance(items, list):
                return [example(each, root, depth + 1) for each in items]
            return [example(items, root, depth + 1)] * max(1, schema.get("minItems") or 1)
        case "integer" | "number":
            low = schema.get("minimum") or schema.get("exclusiveMinimum") or 0
            high = schema.get("maximum")
            return low + 1 if high is None or high >= low + 1 else low
        case "boolean":
            return True
        case "null":
            return None
    if text := _of_format(schema):
        return text
    return "text".ljust(schema.get("minLength") or 0, "x")[: schema.get("maxLength")]


def _functions(
    tools: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, dict[str, Any], dict[str, Mapping[str, Any]], str]]:
    """Yield the name, right arguments, schemas of all arguments and description of each tool that gets a call."""
    for function in (tool.get("function", tool) for tool in tools[:_MAX_TOOLS]):
        schemas = {key: _mapping(part) for key, part in _properties(function.get("parameters")).items()}
        made = example({"type": "object", **_mapping(function.get("parameters"))})
        right = made if isinstance(made, dict) else {}
        yield str(function.get("name")), right, schemas, str(function.get("description", ""))


def _properties(schema: Any) -> Mapping[str, Any]:
    return _mapping(_mapping(schema).get("properties"))


def _mapping(part: Any) -> Mapping[str, Any]:
    """Return a part of a schema; an empty one if it is a bool, or something else that says nothing of values."""
    return part if isinstance(part, Mapping) else {}


# --- the world of a task ----------------------------------------------------------------------------------------------

ALL_FORMS = "The answer is {0}.\n\\boxed{{{0}}}\n<answer>{0}</answer>\n#### {0}"
"""The usual forms of an answer, for a text that asks for none."""
_QUOTED = re.compile(r"(?<!\w)[\"'`\u201c\u2018]([^\"'`\n\u201c\u201d\u2018\u2019]{1,40})[\"'`\u201d\u2019](?!\w)")
_FILE = re.compile(r"\b[\w-]+\.[a-z]{1,5}\b|(?<!\w)/[\w./-]+\w")
_CODE = re.compile(r"\b(?:[A-Za-z]+[_-]?\d[\w-]*|\w+_\w+)\b")
_LISTED = re.compile(r"(?:[\w'-]+(?: \([^)]*\))?, )+(?:(?:or|and) )?[\w'-]+(?: \([^)]*\))?(?: (?:or|and) [\w'-]+)?")
_TWO = re.compile(r"\b([\w'-]+) or ([\w'-]+)\b")
_NAME = re.compile(r"(?<![.!?] )(?<!^)\b[A-Z][\w'-]+", re.MULTILINE)
_WORD = re.compile(r"[^\W_][\w'-]*")
SHOUTED = re.compile(r"\b(?:[A-Z]+ ){0,2}[A-Z]{3,}(?: [A-Z]+){0,2}\b")
"""Words in capitals."""
_TOLD = re.compile(r"\b(?:say|type|write|reply|answer|call|enter|send|with)\s+(?:the word )?([a-z]{2,12})\b")
_VERB = re.compile(
    r"\b(?:[A-Za-z]+(?= (?:[A-Z][A-Z_]*\b|<\w+>|\[\w+\]|\{\w+\}))"
    r"|[A-Z]{2,}(?= (?!(?:and|at|for|if|in|is|or|to|when)\b)[a-z]+\b))"
)
_NUMBERED = re.compile(r"\b([A-Z]{2,}) [a-zN]\b(?! [a-z])")
_LABELED = re.compile(r"[\"'`\u2018\u201c]?\b([A-Z][A-Za-z]*(?: [A-Z][A-Za-z]*){0,3}:)(?=[\"'`\u2019\u201d\s<.]|$)")
_TAG = re.compile(r"<([a-z][\w-]{0,20})>")
_PLACE = re.compile(r": ?<([a-z][\w-]{0,20})>")
_STOP_WORDS = """
the and for with from that this you your are was were has have had not but its into one two what
which who how when where there then them they all any each use can may must their than only out per
new say answer call tool tools name number value text error question please give tell about does did
will would should could
"""
_STOP = frozenset(_STOP_WORDS.split())
_COMMAND_STOP = _STOP | frozenset(
    ["an", "in", "it", "of", "to", "is", "on", "at", "by", "be", "as", "my", "me", "yes", "no"]
)


def words_of(text: str, most: int = 40) -> list[str]:
    """Return the words of a text that a tool may know, best first: quoted, files, codes, listed, names, others."""
    found = [*_QUOTED.findall(text), *_FILE.findall(text), *_CODE.findall(text), *options_of(text)]
    found += [*_NAME.findall(text), *_WORD.findall(text)]
    kept = [word for word in found if word.strip() and word.lower() not in _STOP]
    return list(dict.fromkeys(kept))[:most]


def options_of(text: str) -> list[str]:
    """Return the members of the lists in a text, such as "salt, wool or iron"."""
    found = []
    for listed in _LISTED.findall(text):
        bare = re.sub(r" \([^)]*\)", "", listed)
        found += [part.strip() for part in re.split(r", (?:or |and )?| or | and ", bare)]
    found += [part for pair in _TWO.findall(text) for part in pair]
    return [part for part in dict.fromkeys(found) if part and part.lower() not in _STOP]


def keys_of(texts: Iterable[str], most: int = 8) -> list[str]:
    """Return the words that may be keys or files: quoted, files, codes, and listed."""
    found = [each for text in texts for each in (*_FILE.findall(text), *_CODE.findall(text), *options_of(text))]
    found += [each for text in texts for each in _QUOTED.findall(text)]
    return list(dict.fromkeys(found))[:most]


def verbs_of(text: str) -> list[str]:
    """Return the first words of the commands with an argument in a text, such as `take THING` and `TAKE thing`."""
    named = [each.split()[0] for each in _QUOTED.findall(text) if " " in each.strip()]
    return [verb for verb in dict.fromkeys([*_VERB.findall(text), *named]) if verb not in _STOP]


def commands_of(text: str) -> list[str]:
    """Return the actions that a text names: quoted ones, words in capitals, options, and what it says to write.

    `JUMP k` is `JUMP 1`.
    """
    numbered = [f"{verb} 1" for verb in _NUMBERED.findall(text)]
    found = [*numbered, *_QUOTED.findall(text), *SHOUTED.findall(text), *_TOLD.findall(text), *options_of(text)]
    return [each for each in dict.fromkeys(found) if each.lower() not in _COMMAND_STOP]


def form_of(text: str) -> str | None:
    """Return the form of an answer that a text asks for, with {} in place of the answer; None without one."""
    places = [tag for tag in _PLACE.findall(text) if f"</{tag}>" not in text]  # "Answer: <number>" asks for no tag
    tags = [tag for tag in _TAG.findall(text) if tag != "think" and tag not in places]
    labels = _LABELED.findall(text)
    if tags:
        return f"<{tags[-1]}>{{}}</{tags[-1]}>"
    return f"{labels[-1]} {{}}" if labels else None
