"""Damage: a right value in JSON, such as a row or a message, with a few of its parts changed into something else.

`damaged(right)` draws such values. Text that holds JSON is damaged inside, too, and stays text.
"""

from __future__ import annotations

import copy
import json
import math
from functools import reduce
from typing import Any

from hypothesis import strategies as st

BROKEN_PYTHON = (
    "assert f(", "assert f(1) = 2", "def check(candidate):", "def check(candidate):\n    assert candidate", "\tx\n  y",
    "assert True", "def check(c, c):\n    assert c(1)", "class f: pass", "return f(1)", "assert f(1) == '\\d'",
    "f(1)\x00", "from solution import *", "assert f(1) == '\ud800'", "global f\nassert f(1)", "nonlocal f\nassert f(1)",
    "assert (f := 1)", "import f.g\nassert f(1)", "async def test_f(): assert f(1)", "assert f(1); 1" + "+1" * 3000,
    "(" * 300, "-" * 3000 + "f()", "assert " + "f(" * 90 + ")" * 90, "del f\nassert f(1)", "def test_f(x): assert x",
    "import pytest\n@pytest.mark.parametrize('x', [1])\ndef test_f(x): assert f(x)", "assert f" + ".f" * 3000,
)  # fmt: skip
ODD_TEXTS = (
    "", " ", "\n", "\x00", "\ud800", "\udfff\ud800", "\u2028", "\x85", "ﬁ", "٣", "x" * 3000, "None", "null", "NaN",
    "-1", "9" * 5000, "[", "{", "[]", "{}", "[[]]", '""', '"\\ud800"', '{"a": 1, "a": 2}', "[" * 3000, "class", "f.g",
    "Solution.", ".", "assert", "1e999", "[1e999]", "Infinity", "eJw=", "🙂", "{response}", "a\nb", "True", "$int",
)  # fmt: skip
SCALARS = (None, True, False, 0, 1, -1, 1 << 70, -(10**4000), 0.0, 1e308, math.nan, math.inf, -math.inf)


def nested(depth: int, wrap: Any = lambda value: [value]) -> Any:
    """Return 1 within so many lists, or other values that hold one."""
    return reduce(lambda inner, _: wrap(inner), range(depth), 1)


CONTAINERS = (
    [], {}, [[]], [{}], [None], {"": None}, {"a": {}}, [1, "a", None], ["assert f(1)"], {"args": [1]}, [math.nan],
    {"$int": "1"}, nested(70), nested(5000), nested(5000, lambda value: {"a": value}), {1: 2},
    list(range(300)),
)  # fmt: skip
odd = st.sampled_from([*SCALARS, *ODD_TEXTS, *BROKEN_PYTHON, *CONTAINERS])
"""Values that are rarely right anywhere. They are shared: `damaged` copies what it changes, not these."""


def dump(value: Any) -> str:
    """Return a value as JSON; what has none is cut JSON."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return "{"


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _key(draw, others):
    return draw(st.sampled_from(sorted({key for each in others for key in each})))


def _place(draw, value):
    return draw(st.integers(0, len(value) - 1))


def _without(draw, value):
    at = _place(draw, value)
    return [item for place, item in enumerate(value) if place != at]


def _renamed(draw, value, others):
    at = _place(draw, value)
    return {_key(draw, others) if place == at else name: item for place, (name, item) in enumerate(value.items())}


def _inserted(draw, value):
    at = _place(draw, value)
    return value[:at] + draw(st.sampled_from(ODD_TEXTS)) + value[at:]


ANY_WAYS = (
    lambda draw, value, others: draw(odd),
    lambda draw, value, others: draw(odd),
    lambda draw, value, others: [value],
    lambda draw, value, others: {_key(draw, others): value},
    lambda draw, value, others: dump(value),
)
WAYS = {
    dict: (
        lambda draw, value, others: dict(_without(draw, value.items())),
        lambda draw, value, others: _renamed(draw, value, others),
        lambda draw, value, others: {**value, **draw(st.sampled_from(others))},
        lambda draw, value, others: f"{dump(value)[:-1]},{dump(value)[1:]}",  # each key twice
    ),
    list: (
        lambda draw, value, others: _without(draw, value),
        lambda draw, value, others: [*value, *value],
        lambda draw, value, others: {str(place): item for place, item in enumerate(value)},
    ),
    str: (
        lambda draw, value, others: value[: _place(draw, value)],
        lambda draw, value, others: _inserted(draw, value),
        lambda draw, value, others: list(value[:200]),
    ),
}
"""What may become of a value that is not empty, by its type."""


def check_message(message, max_chars=2000):
    """Check that a person can read an error: one line of bounded length, which any terminal or log can take."""
    assert 0 < len(message) <= max_chars
    assert len(message.splitlines()) == 1
    message.encode()


@st.composite
def damaged(draw, right, *, others=(), max_changes=3):
    """Draw a changed copy of `right`; its objects may get keys, or all members, of the objects in `others`."""
    value = right
    for _ in range(draw(st.integers(1, max_changes))):
        value = _changed(draw, value, others or [{"a": 1}])
    return value


def _changed(draw, value, others):
    """Return the value with a change at one place, which the draws lead to."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 7)):
        value = copy.copy(value)
        at = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(min(len(value), 50))))
        value[at] = _changed(draw, value[at], others)
        return value
    if isinstance(value, str) and isinstance(inside := _load(value), dict | list) and draw(st.booleans()):
        return dump(_changed(draw, inside, others))
    way = draw(st.sampled_from([*ANY_WAYS, *(WAYS.get(type(value), ()) if value else ())]))
    return way(draw, value, others)


@st.composite
def damaged_bytes(draw, right):
    """Draw a message's bytes with one or more changed, removed, repeated or added."""
    data = right
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 40)))
        texts = st.sampled_from(ODD_TEXTS).map(lambda text: text.encode("utf-8", "surrogatepass"))
        middle = draw(st.sampled_from([b"", data[start:end] * 2]) | st.binary(max_size=8) | texts)
        data = data[:start] + middle + data[end:]
    return data
