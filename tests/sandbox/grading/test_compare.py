"""When two values or texts are the same: types count, tolerances are asked for, white space is ASCII's."""

from decimal import Decimal

import pytest
from hypothesis import given, settings

from agentenv.errors import ConfigError
from agentenv.sandbox.grading import Comparison, compare, same_value
from agentenv.sandbox.grading.codec import decode, encode
from agentenv.sandbox.grading.compare import same_text
from tests.sandbox.grading.test_codec import VALUES

NAN, INF = float("nan"), float("inf")
SAME = [
    (1, 1), (0, 0), (-1, -1), (1.5, 1.5), (True, True), (None, None), ("", ""), ("a", "a"), (b"a", b"a"),
    (10**400, 10**400), (INF, INF), (-INF, -INF), (0.0, -0.0), (NAN, NAN), ([], []), ([1, [2]], [1, [2]]),
    ((1, 2), (1, 2)), ({1, 2}, {2, 1}), (frozenset({1}), frozenset({1})), ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({1: "x", (2, 3): None}, {(2, 3): None, 1: "x"}), (1 + 2j, 1 + 2j), (bytearray(b"a"), bytearray(b"a")),
    ([NAN], [NAN]), ({NAN}, {float("nan")}), ({"a": NAN}, {"a": NAN}), ({0.0}, {-0.0}),
    (complex(NAN, 1), complex(NAN, 1)),
    ("\ud800", "\ud800"),
]  # fmt: skip
OTHER = [
    (1, 1.0), (1.0, 1), (1, True), (True, 1), (0, False), (False, 0), (0, None), (None, 0), (1.0, True), ("1", 1),
    (1, "1"), ("a", b"a"), (b"a", bytearray(b"a")), ([1], (1,)), ((1,), [1]), ([1], [1, 2]), ([1, 2], [2, 1]), ([], ()),
    ([], {}), ([], None), ({1}, frozenset({1})), ({1}, {1.0}), ({1}, {True}), ({1: 1}, {True: 1}), ({1: 1}, {1.0: 1}),
    ({"a": 1}, {"a": 1.0}), ({"a": 1}, {"a": 1, "b": 2}), ({"a": 1}, {}), ([1, 2.0], [1, 2]), (1 + 0j, 1), (1, 1 + 0j),
    (NAN, 0.0), (0.0, NAN), (NAN, None), (INF, -INF), (INF, 10**400), (10**400, INF), (1, 2), (0.1 + 0.2, 0.3),
    ("a", "a "), ("a", "A"), ("a", "а"), ("a", "a\u200b"), ("é", "e\u0301"), ({(1,)}, {(True,)}), ({1, 2}, {1}),
    (frozenset({frozenset({1})}), frozenset({frozenset({1.0})})),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "got"), SAME, ids=repr)
def test_equal_values_of_one_type_are_the_same(expected, got):
    assert same_value(expected, got) is True


@pytest.mark.parametrize(("expected", "got"), OTHER, ids=repr)
def test_other_values_and_other_types_are_not_the_same(expected, got):
    assert same_value(expected, got) is False


@pytest.mark.parametrize(
    ("expected", "got", "how", "same"),
    [
        (0.3, 0.1 + 0.2, Comparison(rel_tol=1e-9), True),
        (0.0, 1e-12, Comparison(rel_tol=1e-9), False),
        (0.0, 1e-12, Comparison(abs_tol=1e-9), True),
        (1, 1.0, Comparison(abs_tol=1e-9), True),
        (1, True, Comparison(abs_tol=0.5), False),
        (1, "1", Comparison(abs_tol=0.5), False),
        (1, NAN, Comparison(rel_tol=0.5, abs_tol=1e300), False),
        (1.0, INF, Comparison(rel_tol=0.9), False),
        (10**400, 1.0, Comparison(rel_tol=0.9), False),
        ([1.0, (2.0,)], [1.0 + 1e-12, (2.0 - 1e-12,)], Comparison(rel_tol=1e-9), True),
        ({1.0}, {1.0 + 1e-12}, Comparison(rel_tol=1e-9), False),
        (1 + 1j, complex(1, 1 + 1e-12), Comparison(rel_tol=1e-9), True),
        (1, 1.0, Comparison(int_as_float=True), True),
        (1, True, Comparison(int_as_float=True), False),
        (2**53 + 1, float(2**53), Comparison(int_as_float=True), False),
        ({1}, {1.0}, Comparison(int_as_float=True), True),
        ({1}, {True}, Comparison(int_as_float=True), False),
        ([1, [2]], (1, (2,)), Comparison(tuple_as_list=True), True),
        ([1], {1}, Comparison(tuple_as_list=True), False),
    ],
    ids=repr,
)  # fmt: skip
def test_options_loosen_or_tighten_what_they_name(expected, got, how, same):
    assert same_value(expected, got, how) is same


@pytest.mark.parametrize("value", [-1.0, NAN, INF, None, "1"])
@pytest.mark.parametrize("name", ["rel_tol", "abs_tol"])
def test_a_tolerance_that_is_not_a_finite_number_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"Comparison.{name}: expected a finite number"):
        Comparison(**{name: value})


@pytest.mark.long
@settings(max_examples=40)
@given(VALUES)
def test_every_value_is_the_same_as_itself_after_crossing(value):
    assert same_value(value, decode(encode(value)))


@pytest.mark.long
@settings(max_examples=40)
@given(VALUES, VALUES)
def test_the_same_is_symmetric(one, other):
    assert same_value(one, other) == same_value(other, one)


@pytest.mark.parametrize(
    ("mode", "expected", "got", "same"),
    [
        ("exact", "3\n", "3", False),
        ("lines", "3", "3\n\n\n", True),
        ("lines", "1 2\n3\n", "1 2  \n3\t\n", True),
        ("lines", "1 2\n", "1  2\n", False),
        ("lines", "1\n\n2\n", "1\n2\n", False),
        ("lines", "3\n", "\n3\n", False),
        ("lines", "3\n", " 3\n", False),
        ("lines", "3\n", "3\u200b\n", False),
        ("lines", "3\n", "3\u2028\n", False),
        ("lines", "", "x", False),
        ("tokens", "1 2\n3\n", "1\n2 3", True),
        ("tokens", "1 2", "1 2 3", False),
        ("tokens", "1.0", "1", False),
        ("tokens", "1", "1\x1c", False),
        ("floats", "0.5", "0.5000000001", True),
        ("floats", "1e3", "1000", True),
        ("floats", "nan", "nan", True),
        ("floats", "1.0", "nan", False),
        ("floats", "1.0", "inf", False),
        ("floats", "1.0", "1.0 1.0", False),
        ("floats", "yes 1", "no 1", False),
        ("floats", "10", "1_0", False),
        ("floats", "10", "１０", False),
    ],
)
def test_texts_are_compared_by_their_mode(mode, expected, got, same):
    assert same_text(expected, got, mode, Comparison(rel_tol=1e-6)) is same


def test_a_number_of_many_digits_is_cheap():
    assert not same_text("1", "9" * 100_000, "floats", Comparison(rel_tol=1e-6))


PYTHON = Comparison(tuple_as_list=True, int_as_float=True, bool_as_int=True)


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        (1, True, True), (True, 1, True), (False, 0.0, True), (0, False, True), ([1, [0]], (True, (False,)), True),
        ({1: 2}, {True: 2.0}, True), ({1}, {True}, True), ({(1,)}, {(True,)}, True), (2, True, False),
        (True, "True", False), (None, False, False), ("1", 1, False), (0.3, 0.1 + 0.2, False),
        ({"1": 2}, {1: 2}, False),
    ],
    ids=repr,
)  # fmt: skip
def test_numbers_of_every_type_are_compared_as_python_does_where_that_is_asked_for(expected, got, same):
    assert same_value(expected, got, PYTHON) is same


OFFICIAL_TEXTS = [
    # (expected, printed, as LiveCodeBench, as APPS)
    ("5\n", "5\n", True, True), ("5", "5\n\n\n", True, True), ("5\n", " 5\n", True, True), ("5\n", "\n5\n", True, True),
    ("5\n", "5 \n", True, True), ("5\n", "\t5", True, True), ("5\n", "6\n", False, False), ("5\n", "", False, False),
    ("", "", True, True), ("", "x", False, False), ("a\n", "A\n", False, False),
    ("3 4", "3  4", True, True), ("a b", "a  b", False, True), ("a b", "ab", False, False),
    ("1 2\n", "1\n2\n", False, False), ("1\n2\n", "1 2\n", False, False),
    ("1\n2\n", "1\n\n2\n", False, True), ("1\n\n2\n", "1\n2\n", False, True),
    ("1\n2\n", "2\n1\n", False, True), ("1 2\n", "2 1\n", False, True), ("1 2\n", "1 2 2\n", False, False),
    ("YES\nNO\nYES\n", "YES\nNO\n", False, False), ("YES\nNO\nYES\n", "YES\nNO\nNO\n", False, False),
    ("0.5 1\n1 0.5\n", "1 0.5001\n", False, False), ("0.5 1\n2 0.5\n", "0.5001 2\n1 0.5\n", False, True),
    ("a\nb\n", "b\na\n", False, True), ("a\nb\n", "b\nc\n", False, False), ("1\n2\n3\n", "1\n2\n", False, False),
    ("0.5", "0.50", True, True), ("1e3", "1000", True, True), ("0.5", ".5", True, True),
    ("x 0.5", "x 0.50", False, False),
    ("0.333333333", "0.3333333333333333", False, True), ("0.3333", "0.3334", False, True),
    ("0.333", "0.334", False, False), ("9" * 320, "9" * 319 + ".5", False, False),
    ("0.25 0.333333333", "0.25 0.3333333333333333", False, True), ("0.25 0.3333", "0.25 0.3343", False, False),
    ("2.0\n0.333333333\n", "2.0\n0.3333333333333333\n", False, True),
    ("1.0", "1.000001", False, True), ("1.0", "1.0001", False, True), ("1.0", "1.001", False, False),
    ("100000", "100000.0", True, True), ("50000000000000000", "50000000000000001", False, False),
    ("100000\n", "100001\n", False, False), ("9007199254740992 1", "9007199254740993 1", False, False),
    ("nan", "nan", True, True), ("1", "nan", False, False), ("nan 1.0", "nan 1.00", False, False),
    ("YES", "yes", False, False), ("sNaN 1", "sNaN 2", False, False), ("1", "9" * 10_000, False, False),
    ("True", "1", False, False),
    ("1000000", "1000009.0", False, False), ("1000000", "1000000.0", True, True),
    ("1000000.0", "1000009", False, True),
    ("3", "3.0000000000000004", False, True), ("3 1", "1.0 3.0000000000000004", False, True),
    ("1", "1.0004", False, False),
    ("1 0.5", "1.0004 0.5", False, False), ("0.5 1", "0.5001 1.0000000000000002", False, True),
    ("50000000000000000", "50000000000000001.0", False, False), ("9007199254740993", "9007199254740993.0", True, True),
    ("1", "1e9999999", False, False), ("1", "inf", False, False),
    ("inf 0.33333", "inf 0.333331", False, True),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "got", "livecodebench", "apps"), OFFICIAL_TEXTS, ids=repr)
def test_outputs_of_a_benchmark_are_compared_as_its_own_evaluator_does(expected, got, livecodebench, apps):
    assert same_text(expected, got, "livecodebench") is livecodebench
    assert same_text(expected, got, "apps") is apps


def test_a_comparison_as_livecodebench_reads_no_number_after_the_first_difference(monkeypatch):
    read = []
    monkeypatch.setattr(compare, "Decimal", lambda word: read.append(word) or Decimal(word))
    assert not same_text("1\n2 3\n4", "1.0\n2.5 3.0\n4.0", "livecodebench")
    assert read == ["1", "1.0", "2", "2.5"]


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ("5\n", " 5 \n\n", True), ("1 2\n3\n", "1\n2 3", True), ("", "", True), ("YES", "yes", False),
        ("1 2 3", "3 1 2", False), ("a\nb", "b\na", False), ("1 2", "1 2 2", False), ("1 2", "1", False),
        ("3", "3.0", True), ("3", "3.0000000000000004", True), ("3", "2.9999", False), ("1000000", "1000001", False),
        ("9007199254740993", "9007199254740992", False), ("9" * 30, "9" * 29 + "8", False), ("-0", "0", True),
        ("0.333333333", "0.3333333", True), ("0.333333333", "0.3333", False), ("1e3", "1000.0", True),
        ("2.50", "2.5", True), ("0.0004", "0", False), ("0.0004", "0.0004000001", True), ("1e-12", "2e-12", False),
        ("0.0", "1e-16", True), ("0.0", "1e-8", False), ("100000.0", "100000.5", True), ("-1.5", "1.5", False),
        ("0011", "11", False), ("1_000", "1000", False), ("١", "1", False), ("nan", "nan", True), ("1", "nan", False),
        ("1e999", "2e999", False), ("inf", "inf", True), ("x0.5", "x0.50", False), ("0.1", "9" * 10_000, False),
    ],
)  # fmt: skip
def test_outputs_are_compared_as_by_a_checker_of_contests(expected, got, same):
    assert same_text(expected, got, "contest") is same


def test_each_nan_in_a_set_or_among_the_keys_of_a_dict_counts():
    one, two = float("nan"), float("nan")
    assert same_value({one: 1, two: 2}, {two: 1, one: 2})
    assert same_value({one, two, (one,)}, {two, one, (two,)})
    for expected, got in (({one: 1}, {one: 7, two: 1}), ({one: 1, two: 2}, {one: 7, two: 2}), ({one}, {one, two})):
        assert not same_value(expected, got)
        assert not same_value(got, expected)
    assert not same_value(frozenset({(one, 1)}), frozenset({(one, 1), (two, 1)}))
    assert not same_value({frozenset({one})}, {frozenset({one, two})})
