"""Arguments of tools: the schemas of type hints, what wrong arguments are answered, and what a function gets."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType, NotRequired, TypedDict

import pytest
from pydantic import BaseModel, model_validator

from agentenv.core import tool_schemas
from agentenv.errors import ConfigError, InfraError
from agentenv.tools import ParsedAction, Toolset, answer_calls, schema_of
from agentenv.tools.calling import ToolCall, run_calls
from agentenv.tools.toolset import Tool


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Version(StrEnum):
    OLD = "3.9"
    NEW = "3.10"


class Odd(Enum):
    PAIR = (1, 2)


@dataclass
class Point:
    x: int
    day: date
    colors: list[Color] = field(default_factory=list)


@dataclass
class Tree:
    children: list[Tree]


class Order(BaseModel):
    version: Version
    count: int = 1


class Node(BaseModel):
    next: Node | None = None


class Pairs(BaseModel):
    at: Callable[[], int]


class Row(TypedDict):
    name: str
    level: NotRequired[Level]


class Pair(NamedTuple):
    a: int


User = NewType("User", str)
RED = {"type": "string", "enum": ["red", "blue"]}
TODAY = date(2026, 11, 28)
DAY = {"type": "string", "format": "date"}
COUNTS = {"type": "object", "additionalProperties": {"type": "integer"}}
NAMED, DATED = {"type": "object", "propertyNames": RED}, {"type": "object", "propertyNames": DAY}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "day": DAY, "colors": {"type": "array", "items": RED}},
    "required": ["x", "day"],
}
ROW = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "level": {"type": "integer", "enum": [1, 2]}},
    "required": ["name"],
}


def tool(hint):
    def f(x):
        """Do it.

        Args:
            x: The value.
        """
        return repr(x)

    f.__annotations__ = {"x": hint, "return": str}
    return f


def answer(function, **arguments):
    (message,) = asyncio.run(answer_calls(ParsedAction("", (ToolCall("f", arguments, "1", ""),)), {"f": function}))
    return message["content"]


HINTS = [
    (Color, RED, "red", Color.RED, "green"),
    (Level, {"type": "integer", "enum": [1, 2]}, 2, Level.HIGH, 3),
    (Version, {"type": "string", "enum": ["3.9", "3.10"]}, "3.10", Version.NEW, 3.1),
    (Color | None, {**RED, "nullable": True}, None, None, "green"),
    (list[Color], {"type": "array", "items": RED}, ["red"], [Color.RED], ["green"]),
    (Annotated[Color, "odd"], RED, "red", Color.RED, None),
    (Color | int, {"anyOf": [RED, {"type": "integer"}]}, 3, 3, "green"),
    (date, DAY, "2026-11-28", TODAY, "tomorrow"),
    (datetime, {**DAY, "format": "date-time"}, "2026-11-28T20:00:00", datetime(2026, 11, 28, 20), 5),
    (time, {**DAY, "format": "time"}, "20:00", time(20), "8 pm"),
    (dict[str, date], {"type": "object", "additionalProperties": DAY}, {"a": "2026-11-28"}, {"a": TODAY}, {"a": 1}),
    (dict[Color, Any], {**NAMED, "additionalProperties": {}}, {"red": 1}, {Color.RED: 1}, {"green": 1}),
    (dict[date, int], {**DATED, **COUNTS}, {"2026-11-28": 1}, {TODAY: 1}, {"a": 1}),
    (Sequence[str], {"type": "array", "items": {"type": "string"}}, ["a"], ["a"], [1]),
    (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}, [1, 2], (1, 2), ["1"]),
    (tuple[int, Color], {"type": "array", "prefixItems": [{"type": "integer"}, RED]}, [1, "red"], (1, Color.RED), [1]),
    (set[int], {"type": "array", "items": {"type": "integer"}}, [1, 1], {1}, 1),
    (Mapping[str, int], COUNTS, {"a": 1}, {"a": 1}, []),
    (User, {"type": "string"}, "u", "u", 1),
    (Point, POINT, {"x": 1, "day": "2026-11-28", "colors": ["red"]}, Point(1, TODAY, [Color.RED]), {"x": 1}),
    (Point, POINT, {"x": 1, "day": "2026-11-28"}, Point(1, TODAY), {"x": "1", "day": "2026-11-28"}),
    (Row, ROW, {"name": "a", "level": 2}, {"name": "a", "level": Level.HIGH}, {"name": "a", "odd": 1}),
    (list[Literal["a", "b"]], {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}}, ["a"], ["a"], "a"),
    (tuple, {"type": "array"}, [1], (1,), "a"),
    (list | dict[str, int], {"anyOf": [{"type": "array"}, COUNTS]}, {"a": 1.0}, {"a": 1}, {"a": "b"}),
    (Literal[1, "a"], {"type": ["integer", "string"], "enum": [1, "a"]}, 1, 1, True),
    (Any, {}, {"a": None}, {"a": None}, ...),
    (int | None, {"type": "integer", "nullable": True}, 3.0, 3, 3.5),
    (int | str, {"type": ["integer", "string"]}, 3.0, 3, 3.5),
    (list[int], {"type": "array", "items": {"type": "integer"}}, [1.0, 2], [1, 2], [1.5]),
    (Point, POINT, {"x": 1.0, "day": "2026-11-28"}, Point(1, TODAY), {"x": 1.5, "day": "2026-11-28"}),
    (Level, {"type": "integer", "enum": [1, 2]}, 2.0, Level.HIGH, True),
]  # fmt: skip


@pytest.mark.parametrize(("hint", "schema", "given", "value", "wrong"), HINTS, ids=lambda each: None)
def test_a_hint_becomes_a_schema_and_a_call_the_value_of_the_hint(hint, schema, given, value, wrong):
    function = tool(hint)
    parameters = schema_of(function)["function"]["parameters"]
    properties = {"x": {**schema, "description": "The value."}}
    assert parameters == {"type": "object", "properties": properties, "required": ["x"]}
    assert answer(function, x=given) == repr(value)
    assert wrong is ... or answer(function, x=wrong).startswith("Error: wrong arguments for f: x")


@pytest.mark.parametrize(
    ("hint", "given", "problem"),
    [
        (Point, {"x": 1, "z": 2}, "x: expected the fields x, day, colors (optional), got x, z"),
        (Row, {}, "x: expected the fields name, level (optional), got none"),
        (list[Point], [{}], "x: item 0: expected the fields x, day, colors (optional), got none"),
        (tuple[int, int], [1], "x: expected 2 items, got 1"),
        (tuple[int, int, int] | str, [1, 2], "x: expected 3 items, got 2 or it must be of type string, got [1, 2]"),
        (dict[str, list[int]], {"a": [1, "b"]}, "x: a: item 1 must be of type integer, got 'b'"),
        (dict[Color, int], {"green": 1}, "x: a key must be one of 'red', 'blue', got 'green'"),
        (date, "tomorrow", "x: Invalid isoformat string: 'tomorrow'"),
    ],
)
def test_what_is_wrong_within_an_argument_is_named(hint, given, problem):
    assert answer(tool(hint), x=given) == f"Error: wrong arguments for f: {problem}."


class Refused(Exception):
    def __str__(self):
        raise KeyError("no text")


RAISED = [
    AssertionError(), KeyError("k"), ZeroDivisionError("by 0"), AttributeError("a"), OSError(2, "gone"), Refused(),
]  # fmt: skip


@dataclass
class Strict:
    error: int

    def __post_init__(self):
        if self.error >= 0:
            raise RAISED[self.error]


class Lenient(Enum):
    ONE = 1

    @classmethod
    def _missing_(cls, value):
        raise RAISED[0]


class Sum(BaseModel):
    a: int

    @model_validator(mode="after")
    def check(self):
        assert self.a > 0, "a is too small"
        raise RAISED[2]


@pytest.mark.parametrize(
    ("hint", "given", "problem"),
    [
        (Strict, {"error": 0}, "x: AssertionError"),
        (Strict, {"error": 1}, "x: KeyError: 'k'"),
        (list[Strict], [{"error": 2}], "x: item 0: ZeroDivisionError: by 0"),
        (dict[str, Strict], {"a": {"error": 3}}, "x: a: AttributeError: a"),
        (Strict | int, {"error": 4}, "x: FileNotFoundError: [Errno 2] gone or it must be of type integer, got {'e"),
        (Lenient, 2, "x must be one of 1, got 2"),
        (Sum, {"a": -1}, "x: Assertion failed, a is too small"),
        (Sum, {"a": 1}, "x: ZeroDivisionError: by 0"),
    ],
)
def test_whatever_a_class_of_a_hint_raises_is_an_answer(hint, given, problem):
    assert answer(tool(hint), x=given).startswith(f"Error: wrong arguments for f: {problem}")


def test_an_error_without_a_text_is_an_answer_too():
    def broken():
        raise Refused

    assert answer(tool(Strict), x={"error": 5}).startswith("Error: ")
    assert answer(broken).startswith("Error: ")


RELEASED = threading.Event()


@dataclass
class Slow:
    how: Literal["waits", "infra"]

    def __post_init__(self):
        if self.how == "infra":
            raise InfraError("db: expected an answer, got none. Try again.")
        RELEASED.wait(60)


async def test_classes_of_hints_run_beside_the_loop_within_the_limit_of_a_call():
    tools = {"f": tool(Slow)}
    RELEASED.clear()
    work = asyncio.ensure_future(run_calls([ToolCall("f", {"x": {"how": "waits"}}, "1", "")], tools, timeout_s=0.01))
    await asyncio.sleep(0.05)
    RELEASED.set()
    assert (await work)[0].problem == "timeout"
    with pytest.raises(InfraError, match="db: "):
        await answer_calls(ParsedAction("", (ToolCall("f", {"x": {"how": "infra"}}, "1", ""),)), tools)


@pytest.mark.parametrize(
    ("hint", "num_chars", "beside"), [(list, 50_000, True), (list, 10, False), (list[int], 10, True)]
)
async def test_long_arguments_are_copied_and_read_beside_the_loop(hint, num_chars, beside):
    class Noted(list):
        def __deepcopy__(self, memo):
            threads.append(threading.current_thread())
            return list(self)

    async def count(x):
        return len(x)

    count.__annotations__, threads = {"x": hint}, []
    call = ToolCall("f", {"x": Noted([1, 2])}, "1", "x" * num_chars)
    assert (await answer_calls(ParsedAction("", (call,)), {"f": count}))[0]["content"] == "2"
    assert [each is not threading.main_thread() for each in threads] == [beside]


@pytest.mark.parametrize("hint", [list[int | None], dict[str, int], list[Color | None], list[list[int]]])
def test_the_schema_of_a_hint_is_read_once_however_long_the_argument_is(hint, monkeypatch):
    read = []
    monkeypatch.setattr(tool_schemas, "_Reading", lambda root, make=tool_schemas._Reading: read.append(1) or make(root))
    value = dict.fromkeys("ab", 1) if hint == dict[str, int] else [[1]] if hint == list[list[int]] else [None]
    many = {str(i): 1 for i in range(500)} if isinstance(value, dict) else value * 500
    function = tool(hint)
    answer(function, x=value)
    read.clear()
    answer(function, x=value)
    once = len(read)
    answer(function, x=many)
    assert len(read) == 2 * once


@pytest.mark.parametrize("hint", [dict[str, int], list[str], Color, int, Point])
async def test_a_tool_that_checks_its_arguments_itself_gets_them_as_they_are(hint):
    schema = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    tools = await Toolset(Tool("f", schema, tool(hint), checks_types=False)).begin()
    answers = await tools.answer([ToolCall("f", {"x": "ab"}, "1", ""), ToolCall("f", {"x": 3.0}, "2", "")])
    await tools.aclose()
    assert [message["content"] for message in answers.messages] == ["'ab'", "3.0"]


async def test_a_tool_with_its_own_schema_gets_values_of_its_hints_only_for_what_fits_them():
    parameters = {"type": "object", "properties": {"x": {}}}
    schema = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    tools = await Toolset(Tool("f", schema, tool(list[Color]))).begin()
    answers = await tools.answer([ToolCall("f", {"x": given}, "1", "") for given in (["red"], "ab", None)])
    await tools.aclose()
    wrong = "Error: wrong arguments for f: x must be of type array, got 'ab'."
    assert [message["content"] for message in answers.messages] == [repr([Color.RED]), wrong, "None"]


def test_arguments_of_other_names_have_the_hint_of_the_rest():
    def f(*more: str, b, **others: int):
        return f"{b!r} {others}"

    assert answer(f, b="b", c=3.0, more=4) == "'b' {'c': 3, 'more': 4}"
    assert answer(f, b="b", more="3").endswith("more must be of type integer, got '3'.")


def test_models_of_pydantic_have_their_own_schema_and_definitions():
    parameters = schema_of(tool(list[Order]))["function"]["parameters"]
    assert parameters["properties"]["x"]["items"]["properties"]["version"] == {"$ref": "#/$defs/Version"}
    assert parameters["$defs"]["Version"]["enum"] == ["3.9", "3.10"]
    assert answer(tool(Order), x={"version": "3.10"}) == repr(Order(version=Version.NEW))
    assert answer(tool(Order), x={"version": 3.1}) == (
        "Error: wrong arguments for f: x: version: Input should be '3.9' or '3.10'."
    )
    assert schema_of(tool(Node))["function"]["parameters"]["$defs"]["Node"]["type"] == "object"


@pytest.mark.parametrize(
    "hint",
    [
        Odd, Tree, Pair, Path, Decimal, bytes, object, complex, list[Path], Path | None, type, Pairs,
        dict[int, str], dict[Level, str], dict[tuple[int, int], str], dict[str | None, str], dict[Point, str],
    ],
)  # fmt: skip
def test_a_hint_that_no_schema_says_is_refused_by_the_name_of_its_parameter(hint):
    with pytest.raises(ConfigError, match=r"schema_of: expected hints of JSON types, .* for 'x' of tool"):
        schema_of(tool(hint))


async def test_parameters_that_a_call_cannot_name_are_refused_and_others_may_be_named_freely():
    def starred(*numbers: int) -> int:
        """Add.

        Args:
            numbers: The numbers.
        """
        return sum(numbers)

    def bare(a: int, /) -> int:
        """Return it.

        Args:
            a: The number.
        """
        return a

    def free(a: int, **more: Color) -> str:
        """Say them.

        Args:
            a: The number.
        """
        return f"{a} {more}"

    for function in (starred, bare):
        with pytest.raises(ConfigError, match=r"expected parameters that a call can name, got (\*numbers|a): "):
            schema_of(function)
    parameters = schema_of(free)["function"]["parameters"]
    assert (list(parameters["properties"]), parameters["required"]) == (["a"], ["a"])
    assert parameters["additionalProperties"] == RED
    tools = await Toolset(free).begin()
    answers = await tools.answer([ToolCall("free", {"a": 1, "b": color}, "1", "") for color in ("red", "green")])
    await tools.aclose()
    wrong = "Error: wrong arguments for free: b must be one of 'red', 'blue', got 'green'."
    assert [message["content"] for message in answers.messages] == [f"1 {{'b': {Color.RED!r}}}", wrong]


def add(a: int, b: int = 0) -> int:
    """Add.

    Args:
        a: One.
        b: Another.
    """
    return a + b


async def echo(text, times: NoSuchName = 1) -> str:  # noqa: F821
    return text * times


CALLS = ParsedAction("", (ToolCall("add", {"a": 3, "b": 4}, "1", ""), ToolCall("echo", {"text": "x"}, "2", "")))


@pytest.mark.parametrize("tools", [[add, echo], (add, echo), {"add": add, "echo": echo}])
async def test_tools_are_functions_by_name_or_a_list_of_them(tools):
    assert [message["content"] for message in await answer_calls(CALLS, tools)] == ["7", "x"]


@pytest.mark.parametrize("tools", [[add, add], add, None, "add", [3], {"add": 3}, [lambda a: a, lambda b: b]])
async def test_other_tools_are_refused(tools):
    with pytest.raises(ConfigError, match="answer_calls: expected functions by name, or a list of functions"):
        await answer_calls(CALLS, tools)


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        ({"a": "3", "b": "4"}, "a must be of type integer, got '3'; b must be of type integer, got '4'."),
        ({"a": 3.5}, "a must be of type integer, got 3.5."),
        ({"a": True}, "a must be of type integer, got True."),
        ({"a": None}, "a must be of type integer, got None."),
        ({"a": 3.0}, None),
    ],
)
async def test_arguments_are_checked_as_a_toolset_does(arguments, content):
    call = ToolCall("add", arguments, "1", "")
    tools = await Toolset(add).begin()
    answers = [*(await answer_calls(ParsedAction("", (call,)), [add])), *(await tools.answer([call])).messages]
    await tools.aclose()
    expected = "3" if content is None else f"Error: wrong arguments for add: {content}"
    assert [answer["content"] for answer in answers] == [expected, expected]


class Adder:
    __slots__ = ()

    def __call__(self, a: int, b: int = 0) -> int:
        return a + b

    def add(self, a: int, b: int = 0) -> int:
        return a + b

    @classmethod
    def add_all(cls, a: int, b: int = 0) -> int:
        return a + b


class Late(Adder):
    async def __call__(self, a: int, b: int = 0) -> int:
        return a + b


class Decorator:
    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        return self.__wrapped__(*args, **kwargs)


class Total(int):
    def __new__(cls, a: int, b: int = 0):
        return int.__new__(cls, a + b)

    def __init__(self, a: int, b: int = 0):
        pass


@functools.wraps(add)
def wrapped(*args, **kwargs):
    return add(*args, **kwargs)


CALLABLES = [
    functools.partial(add, b=1), functools.partial(functools.partial(add), b=1), functools.partial(Adder(), b=1),
    functools.partial(Adder().add, b=1), Adder(), Late(), Adder().add, Adder.add_all, Decorator(add), wrapped,
    functools.cache(add), functools.partial(wrapped, b=1), Total,
]  # fmt: skip


@pytest.mark.parametrize("function", CALLABLES, ids=range(len(CALLABLES)))
def test_whatever_can_be_called_has_the_hints_of_what_it_calls(function):
    assert answer(function, a="3") == "Error: wrong arguments for f: a must be of type integer, got '3'."
    assert answer(function, a=3.0) in ("3", "4")
