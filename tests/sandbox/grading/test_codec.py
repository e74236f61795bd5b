"""Values cross as JSON without loss, and nothing else does."""

import enum
import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.sandbox.grading.codec import MAX_DEPTH, MAX_NODES, CodecError, decode, dump_line, encode, parse_line

TEXTS = st.text(st.characters(), max_size=8)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(1 << 200), max_value=1 << 200)
    | st.floats()
    | TEXTS
    | st.sampled_from(["$int", "$set", "\ud800", "\0", "\x1b[2J", "\u2028"])
    | st.binary(max_size=8)
    | st.complex_numbers()
)
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
VALUES = st.recursive(
    SCALARS | st.binary(max_size=8).map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.dictionaries(TEXTS, inner, max_size=3)
        | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=12,
)


def spelled(value):
    """A text that two values share only if they are equal, of the same types in all parts, NaN and -0.0 included."""
    if isinstance(value, dict):
        return f"dict({sorted((spelled(key), spelled(item)) for key, item in value.items())})"
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [spelled(item) for item in value]
        return f"{type(value).__name__}({parts if isinstance(value, (list, tuple)) else sorted(parts)})"
    return f"{type(value).__name__}({value!r})"


def crossed(value):
    """A value after its way over a channel."""
    return decode(parse_line(dump_line({"value": encode(value)}).rstrip(b"\n"))["value"])


@pytest.mark.long
@given(VALUES)
def test_values_cross_without_loss(value):
    assert spelled(crossed(value)) == spelled(value)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"[]", b"1", b"null", b'"x"', b"{", b'{"a":1}x', b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-Infinity}',
        b'{"a":1,"a":2}', b'{"a":{"b":1,"b":1}}', b'{"a":' + b"[" * 100_000, b"[" * 1_000_000, b'{"a":\xff}',
        b'{"a":' + b"9" * 5000 + b"}", b"{'a':1}", b'{"a":1,}', b"\xef\xbb\xbf{}",
    ],
    ids=lambda line: repr(line[:20]),
)  # fmt: skip
def test_a_line_that_is_not_plain_json_object_is_refused(line):
    with pytest.raises(CodecError):
        parse_line(line)


@pytest.mark.parametrize(
    "content",
    [
        {"$int": 3}, {"$int": "3"}, {"$int": "0x"}, {"$int": "0x_1"}, {"$int": " 0x1"}, {"$int": "0xg"},
        {"$int": None},
        {"$int": "--0x1"}, {"$int": "0x１"}, {"$float": "1.0"}, {"$float": 1.0}, {"$float": "NaN"},
        {"$complex": [1, 2]},
        {"$complex": [1.0]}, {"$complex": "1+2j"}, {"$bytes": "f"}, {"$bytes": "gg"}, {"$bytes": [1]},
        {"$set": {"a": 1}},
        {"$set": [1, 1]}, {"$set": [1, True]}, {"$set": [[1]]}, {"$set": "ab"}, {"$dict": [[1]]},
        {"$dict": [[1, 2, 3]]},
        {"$dict": [[1, 2], [1, 3]]}, {"$dict": [[[1], 2]]}, {"$dict": {"a": 1}}, {"$tuple": 1}, {"$pickle": "gASV"},
        {"$int": "0x1", "a": 1}, {"a": 1, "$int": "0x1"}, {"$": 1}, {1: 2}, float("nan"), float("inf"),
        pytest.param(object(), id="object"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_tag_that_encode_never_writes_is_refused(content):
    with pytest.raises((CodecError, AttributeError) if content == {1: 2} else CodecError):
        decode(content)


class Colour(enum.IntEnum):
    RED = 1


class Sly(int):
    def __eq__(self, other):
        return True

    def __index__(self):
        return 99

    __int__ = __index__
    __hash__ = None


@pytest.mark.parametrize(
    ("value", "as_json"),
    [
        (True, True), (1, 1), (1.0, 1.0), (-0.0, -0.0), (1 << 53, {"$int": "0x20000000000000"}), (Colour.RED, 1),
        (-(1 << 53), {"$int": "-0x20000000000000"}), (float("-inf"), {"$float": "-inf"}), ((), {"$tuple": []}),
        ({"$int": "0x3"}, {"$dict": [["$int", "0x3"]]}), ({1: 2}, {"$dict": [[1, 2]]}), ({"a": 1}, {"a": 1}),
        (b"\0", {"$bytes": "00"}), (Sly(7), 7), ({"": 1}, {"": 1}),
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_has_one_spelling(value, as_json):
    got = encode(value)
    assert json.dumps(got) == json.dumps(as_json)


class Liar:
    __class__ = property(lambda self: int)

    def __int__(self):
        return 3


@pytest.mark.parametrize(
    "value",
    [object(), int, len, (each for each in ()), range(3), Liar(), math, NotImplemented, ..., [object()], {1: object()}],
    ids=lambda value: type(value).__name__,
)
def test_input_that_is_not_a_plain_value_is_refused(value):
    with pytest.raises(CodecError, match="cannot leave the sandbox"):
        encode(value)


@pytest.mark.long
def test_values_that_are_too_deep_circular_or_large_are_refused():
    deep = circular = []
    for _ in range(MAX_DEPTH * 2):
        deep = [deep]
    circular.append(circular)
    for value in (deep, circular, [0] * (MAX_NODES + 1), [[0] * 1000] * (MAX_NODES // 1000)):
        with pytest.raises(CodecError, match="nested deeper"):
            encode(value)
    nested = 1
    for _ in range(MAX_DEPTH * 100):
        nested = [nested]
    with pytest.raises(CodecError, match="nested deeper"):
        decode(nested)


def test_an_integer_of_a_million_digits_crosses_in_no_time():
    value = 1 << 3_321_928
    assert crossed(value) == value


MODULUS = 2**61 - 1
"""Integers that differ by a multiple of it have the same hash, in every process."""


def colliding(count):
    """Integers of one hash, as JSON."""
    return [encode(1 + number * MODULUS) for number in range(count)]


@pytest.mark.parametrize(
    "content",
    [
        {"$set": colliding(5000)},
        {"$frozenset": colliding(5000)},
        {"$dict": [[number, 0] for number in colliding(5000)]},
        {"$set": [{"$tuple": [number, 1]} for number in colliding(5000)]},
        {"$set": [{"$complex": [1000003.0 * number, float(-number)]} for number in range(5000)]},
        [{"$set": colliding(500)}] * 100,
        {"$set": [{"$tuple": [*([0] * 500), number]} for number in colliding(200)]},
    ],
    ids=["set", "frozenset", "dict", "tuples", "complex", "many sets", "long tuples"],
)
def test_members_whose_hashes_collide_are_refused_before_they_cost_quadratic_time(content):
    with pytest.raises(CodecError, match="equal hashes"):
        decode(content)


@pytest.mark.parametrize(
    "value",
    [
        {1 << number for number in range(1500)},
        {-1: [0] * 50_000, -2: [0] * 50_000},
        set(itertools.product(range(-2, 3), repeat=5)),
        {(-1, *range(1000)), (-2, *range(1000))},
    ],
    ids=["powers of two", "minus one and two", "small tuples", "long tuples"],
)
def test_honest_members_whose_hashes_collide_cross(value):
    assert crossed(value) == value


def test_a_value_of_more_parts_than_encode_sends_is_refused():
    with pytest.raises(CodecError, match="parts"):
        decode([[0] * 1000] * (MAX_NODES // 1000))


def test_dicts_cross_as_deep_as_lists_do():
    value = {}
    for _ in range(MAX_DEPTH):
        value = {1: value}
    assert crossed(value) == value
