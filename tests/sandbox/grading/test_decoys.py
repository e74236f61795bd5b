"""Decoys: whatever an honest test passes, its twin fails."""

import ast
import random

import numpy as np
import pytest

from agentenv.sandbox.grading.decoys import disguise, other_than

ASSERTIONS = [
    "3 == 3", "'a' == 'a'", "b'a' == b'a'", "True == True", "1.5 == 1.5", "-1 == -1", "0 == -0", "None == None",
    "[] == []",
    "[1, 2] == [1, 2]", "(1, 2) == (1, 2)", "{} == {}", "{'a': 1} == {'a': 1}", "{1} == {1}", "3 == 1 + 2",
    "1e308 == 1e308",
    "True is True", "None is None", "not False", "1 < 2", "1 in [1]", "1 != 2", "len is not None", "1 < 2 < 3",
    "all([1])",
    "len('abc') == 3 and True", "np.float64(2.0) == 1.0 + 1", "np.array([2]) == len('ab')",
]  # fmt: skip


def functions(source):
    """What a module defines."""
    names = {"np": np}
    exec(compile(source, "test.py", "exec"), names)
    return names


@pytest.mark.parametrize("assertion", ASSERTIONS)
def test_a_decoy_of_an_assertion_that_holds_does_not_hold(assertion):
    made = disguise(f"def test_it():\n    assert {assertion}, 'why'\n".encode(), ["test_it"])
    names = functions(made.source)
    names[made.names["test_it"]]()
    with pytest.raises((AssertionError, ValueError)):
        names[made.decoys["test_it"]]()


@pytest.mark.parametrize(
    "call", ["assertEqual(1, 1)", "assertEqual([1], [1])", "assertTrue(1)", "assertFalse(0)", "assertIsNone(None)",
             "assertIn(1, [1])", "assertNotIn(1, [])", "assertNotEqual(1, 2)", "assertIs(1, 1)",
             "assertAlmostEqual(0.1 + 0.2, 0.3)"],
)  # fmt: skip
def test_a_decoy_of_unittests_assertions_does_not_hold(call):
    source = f"import unittest\nclass Old(unittest.TestCase):\n    def test_it(self):\n        self.{call}\n"
    made = disguise(source.encode(), ["Old::test_it"])
    old = functions(made.source)["Old"]
    getattr(old(), made.names["Old::test_it"].split("::")[1])()
    with pytest.raises(AssertionError):
        getattr(old(), made.decoys["Old::test_it"].split("::")[1])()


class Always:
    def __eq__(self, other):
        return True

    __hash__ = None


@pytest.mark.parametrize("expected", ["3", "'a'", "[1]", "{1: 2}", "three()", "[]", "None", "-1"])
def test_a_value_that_equals_everything_passes_the_decoy_of_an_equality(expected):
    decoy = ast.Expression(ast.fix_missing_locations(other_than(ast.parse(expected, mode="eval").body)))
    value = eval(compile(ast.fix_missing_locations(decoy), "decoy", "eval"), {"three": lambda: 3})
    assert Always() == value


@pytest.mark.parametrize("right", [0, 1, 2])
def test_a_solution_that_is_right_in_one_assertion_alone_passes_some_decoys(right):
    source = (
        b"def test_it():\n    assert value(0) == 0\n    for one in values():\n        assert one == 1\n"
        b"    assert value(1) == 1\n    assert value(2) == 2\n"
    )
    passed = {True: 0, False: 0}
    for seed in range(30):
        made = disguise(source, ["test_it"], generator=random.Random(seed))
        for honest in passed:
            names = functions(made.source)
            names["value"] = lambda place, honest=honest: place if honest or place == right else Always()
            names["values"] = lambda honest=honest: [1 if honest else Always()]
            names[made.names["test_it"]]()
            try:
                names[made.decoys["test_it"]]()
                passed[honest] += 1
            except AssertionError:
                pass
    assert passed[True] == 0 < passed[False]


def test_names_reveal_nothing_and_cannot_be_predicted():
    source = b"def test_a():\n    assert 1 == 1\ndef test_b():\n    assert 2 == 2\n"
    first, second = (disguise(source, ["test_a", "test_b"]) for _ in range(2))
    assert not {*first.names.values(), *first.decoys.values()} & {*second.names.values(), *second.decoys.values()}
    orders = set()
    for seed in range(20):
        made = disguise(source, ["test_a"], generator=random.Random(seed))
        orders.add(made.source.index(made.names["test_a"].encode()) < made.source.index(made.decoys["test_a"].encode()))
    assert orders == {True, False}


def test_tests_without_assertions_and_those_that_are_not_asked_for_stay_as_they_are():
    source = (
        b"import pytest\ndef test_a():\n    with pytest.raises(OSError):\n        f()\ndef test_b():\n    assert 1\n"
    )
    made = disguise(source, ["test_a"])
    assert (made.source, made.names, made.decoys) == (source, {}, {})


CAUGHT = [
    "with pytest.raises(ZeroDivisionError):\n        {}", "with open(f) as g, raises(KeyError) as info:\n        {}",
    "with self.assertRaises(KeyError):\n        {}", "with self.assertRaisesRegex(KeyError, 'a'):\n        {}",
    "with contextlib.suppress(KeyError):\n        {}",
    "async with a:\n        with pytest.raises(KeyError):\n            {}",
    "try:\n        {}\n    except KeyError:\n        pass", "try:\n        {}\n    except* KeyError:\n        pass",
]  # fmt: skip


@pytest.mark.parametrize(
    "assertion", ["assert div(1, 0) == 0", "self.assertEqual(div(1, 0), 0)", "self.assertTrue(f())"]
)
@pytest.mark.parametrize("form", CAUGHT)
def test_an_assertion_whose_failure_may_be_caught_is_not_changed(form, assertion):
    source = f"async def test_a(self):\n    {form.format(assertion)}\n"
    made = disguise(source.encode(), ["test_a"])
    assert (made.source, made.names, made.decoys) == (source.encode(), {}, {})
    made = disguise(f"{source}    assert f() == 2\n".encode(), ["test_a"])
    assert made.source.count(assertion.encode()) == 2
    assert (made.source.count(b"f() == 2"), made.source.count(b"f() == 3")) == (1, 1)


@pytest.mark.parametrize(
    "source",
    [
        "with open(f):\n        assert g() == 2", "try:\n        assert g() == 2\n    finally:\n        pass",
        "try:\n        f()\n    except KeyError:\n        assert g() == 2",
        "try:\n        f()\n    except KeyError:\n        pass\n    else:\n        assert g() == 2",
        "try:\n        f()\n    except KeyError:\n        pass\n    finally:\n        assert g() == 2",
    ],
)  # fmt: skip
def test_an_assertion_whose_failure_ends_the_test_is_changed(source):
    made = disguise(f"def test_a():\n    {source}\n".encode(), ["test_a"])
    assert (made.source.count(b"g() == 2"), made.source.count(b"g() == 3")) == (1, 1)


def test_fixtures_parameters_and_nested_classes_are_kept():
    source = (
        b"import pytest\nclass TestA:\n    class TestB:\n        @pytest.mark.parametrize('x', [1])\n"
        b"        async def test_c(self, x, tmp_path):\n            assert x == 1\n"
    )
    made = disguise(source, ["TestA::TestB::test_c"])
    assert made.names["TestA::TestB::test_c"].startswith("TestA::TestB::test_")
    assert made.source.count(b"@pytest.mark.parametrize('x', [1])") == 2
    assert made.source.count(b"(self, x, tmp_path)") == 2


def test_tests_that_are_left_out_are_gone_and_no_class_is_left_empty():
    source = (
        b"def test_a():\n    assert 1\nclass Test:\n    def test_b(self):\n        assert 2\ndef test_c():\n    pass\n"
    )
    made = disguise(source, ["test_c"], without=["test_a", "Test::test_b"])
    assert made.source == b"class Test:\n    pass\n\ndef test_c():\n    pass"
