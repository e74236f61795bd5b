"""CodeReward: ROLL's rows, the scales, how grading ends, and the programs that other graders pay for."""

import asyncio
import copy
import json

import numpy as np
import pytest
import pytest_asyncio

from agentenv.errors import DataError
from agentenv.rewards.grading import grade as grade_in_time
from agentenv.rewards.rules.code.assert_rows import split_tests
from agentenv.rewards.rules.code.forms import code_task
from agentenv.rewards.rules.code.reward import CodeReward, guide_reward, status_of
from agentenv.rewards.types import Response, Status
from agentenv.sandbox.grading import AssertSuite, GradeResult, Integrity, PytestSuite, TestResult, Verdict
from agentenv.sandbox.local.sandbox import LocalSandbox
from tests.rewards.rules.broken_sandbox import BrokenSandbox

one_loop = pytest.mark.asyncio(loop_scope="module")
"""Of all tests that share the sandbox."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox():
    async with LocalSandbox(preimport=("pytest",), run_slots=2) as sandbox:
        yield sandbox


def block(code):
    return f"Here it is.\n```python\n{code}\n```"


def roll(case_type, *cases, function="None"):
    return {"case_type": case_type, "test_cases": json.dumps(cases), "test_case_function": function}


async def grade(sandbox, code, row, **options):
    """The grade of a program, or of a whole text, on a row whose tests are among its columns."""
    text = code if "```" in code else block(code)
    return await CodeReward(sandbox=sandbox, **options).grade(Response(text, None, metadata=row))


ADD = {
    "entry_point": "add",
    "visible": [{"args": [1, 2], "expected": 3}],
    "hidden": [{"args": [2, 2], "expected": 4}, {"args": [-1, 1], "expected": 0}],
}
RIGHT = "def add(a, b):\n    return a + b"
SUM = roll("input", {"stdin": "1 2\n", "expected_stdout": "3\n"}, {"stdin": "5 5\n", "expected_stdout": "10"})
ASSERTS = roll(
    "assert", {"assert_code": "assert add(1, 2) == 3\nassert add(0, 0) == 0"}, {"assert_code": "assert add(2, 2) == 4"}
)
PYTEST = roll("pytest", {"assert_code": "from solution import add\n\ndef test_small():\n    assert add(1, 2) == 3\n\n"
                         "def test_zero():\n    assert add(0, 0) == 0\n"})  # fmt: skip
CHECK = roll("check_based", {"entry_point": "add", "import_prefix": "import math\n", "assert_code":
             "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == 0\n"})  # fmt: skip
TEXT = roll(
    "text", {"assert_code": "assert len({response}.split()) == 3"}, {"assert_code": "assert 'cat' in {response}"}
)
POINT = "class Point:\n    def __init__(self, x):\n        self.x = x"
READS = "print(sum(map(int, input().split())))"


# --- the rows that ROLL has -----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("row", "right", "wrong", "share"),
    [
        (SUM, READS, "print(3)", 1 / 2),
        (roll("input", {"stdin": "[1, 2]\n3", "expected_stdout": "[1, 2, 3]"}, function="push"),
         "class Solution:\n    def push(self, items: List[int], item):\n        return items + [item]",
         "def push(items, item):\n    return item", 0.0),
        (ASSERTS, RIGHT, "def add(a, b):\n    return 2 * b if a else 0", 2 / 3),
        (PYTEST, RIGHT, "def add(a, b):\n    return 3", 1 / 2),
        (roll("pytest", {"assert_code": "import pytest\n\ndef test_it():\n    with pytest.raises(ValueError):\n"
                         "        add('', 1)\n    assert add(1, 1) == 2"}),
         "def add(a, b):\n    if a == '':\n        raise ValueError\n    return a + b", RIGHT, 0.0),
        (roll("assert", {"assert_code": "p = Point(2)\nassert p.x == 2\nassert p.double() == 4"}),
         f"{POINT}\n    def double(self):\n        return 2 * self.x", POINT, 1 / 2),
        (CHECK, "def add(a, b):\n    return int(math.fsum((a, b)))", "def add(a, b):\n    return 0", 1 / 2),
    ],
    ids=["input", "input call", "assert", "pytest", "pytest itself", "assert class", "check_based"],
)  # fmt: skip
@one_loop
async def test_rolls_rows_are_graded(sandbox, row, right, wrong, share):
    before = copy.deepcopy(row)
    good, bad = await asyncio.gather(grade(sandbox, right, row), grade(sandbox, wrong, row))
    assert (good.reward, good.status, good.components["all_passed"]) == (1.0, Status.OK, 1.0), good.detail
    assert (bad.reward, bad.score) == (pytest.approx(share), pytest.approx(share)), bad.detail
    assert row == before


@one_loop
async def test_rows_of_text_grade_the_text_after_the_reasoning(sandbox):
    reward = CodeReward(sandbox=sandbox)
    right = await reward.grade(Response("<think>A dog?</think>The cat sleeps.<|im_end|>", "", metadata=TEXT))
    wrong = await reward.grade(Response("The cat sleeps all day.", "", metadata=TEXT))
    assert (right.reward, wrong.reward) == (1.0, 0.5)
    assert (await reward.grade(Response("<think>The cat sleeps.", "", metadata=TEXT))).status is Status.NO_ANSWER


def test_the_strongest_judge_that_can_run_a_rows_tests_is_taken():
    assert isinstance(code_task(None, ASSERTS).suite, AssertSuite)
    assert isinstance(code_task(None, PYTEST).suite, AssertSuite)
    fixture = roll("pytest", {"assert_code": "def test_it(tmp_path):\n    assert add(1, 1) == 2"})
    assert isinstance(code_task(None, fixture).suite, PytestSuite)
    in_class = roll("pytest", {"assert_code": "class TestIt:\n    def test_it(self):\n        assert add(1, 1) == 2"})
    assert code_task(None, in_class).suite.hidden == ("test_row_0.py::TestIt::test_it",)


def test_each_function_or_assert_of_a_source_is_a_separate_test():
    by_function = split_tests("x = 1\n\ndef test_a():\n    assert f(x)\n\ndef test_b():\n    assert g(x)", "fg")
    parts = [("test_a" in one, "test_b" in one, "x = 1" in one) for one in by_function]
    assert parts == [(True, False, True), (False, True, True)]
    by_assert = split_tests("sum = f(1)\nassert sum == 3\nfor i in range(2):\n    assert f(i)", "f")
    assert by_assert == ["sum = f(1)\nassert sum == 3", "sum = f(1)\nfor i in range(2):\n    assert f(i)"]
    assert len(split_tests("max(f(1), 2)\nassert max(1, 2) == 2\nassert f(2)", "f")) == 1


def as_arrays(value):
    """The value as pandas reads it from Parquet: each list is an array."""
    if isinstance(value, dict):
        return {key: as_arrays(each) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    array = np.empty(len(value), dtype=object)
    array[:] = [as_arrays(each) for each in value]
    return array


@pytest.mark.parametrize(
    "row",
    [
        ADD | {"hidden": []},
        {"test_list": ["assert add(1, 2) == 3"], "test_imports": [], "challenge_test_list": []},
        {"test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"], "test_imports": ["import re", "import os"]},
        {"inputs": [[1, 2], [2, 2]], "outputs": [3, 4], "fn_name": "add"},
        {"input_output": {"inputs": ["1 2"], "outputs": ["3"]}},
        {"public_test_cases": [], "private_test_cases": [{"input": "1 2", "output": "3", "testtype": "stdin"}]},
        roll("assert") | {"test_cases": [{"assert_code": "assert add(1, 2) == 3"}]},
    ],
    ids=["plain", "mbpp empty", "mbpp", "apps call", "apps", "livecodebench", "roll"],
)
def test_a_row_may_hold_arrays_where_it_holds_lists(row):
    assert code_task(None, as_arrays(row)) == code_task(None, row)


def test_the_tests_of_a_label_go_before_those_of_its_row():
    assert code_task(ADD, {**SUM, "test_list": ["assert f(1)"]}).form == "plain"
    assert code_task(json.loads(CHECK["test_cases"]), {"case_type": "check_based"}).form == "roll"


# --- programs that others pay for -----------------------------------------------------------------------------------

LEAVES = "import os\nos._exit(0)"
LEAVES_LATER = "def add(a, b):\n    import os\n    os._exit(0)"
EXITS = "def add(a, b):\n    return 0\nexit(0)"


@pytest.mark.parametrize(
    ("row", "code"),
    [(CHECK, LEAVES), (CHECK, LEAVES_LATER), (CHECK, EXITS), (CHECK, "import sys\nsys.exit(0)"), (ASSERTS, EXITS),
     (PYTEST, LEAVES_LATER), (SUM, LEAVES)],
)  # fmt: skip
@one_loop
async def test_leaving_before_the_asserts_passes_nothing(sandbox, row, code):
    result = await grade(sandbox, code, row)
    assert (result.reward, result.components["passed"]) == (0.0, 0.0), result.detail


HELPED = {
    "entry_point": "root",
    "prompt": "import math\n\n\ndef value(xs: list, x: float):\n    return sum(c * math.pow(x, i) for i, c in"
    ' enumerate(xs))\n\n\ndef root(xs: list):\n    """Return a zero of a line."""\n',
    "test": "def check(candidate):\n    for slope in (1, 2, 5):\n"
    "        assert math.fabs(value([3, slope], candidate([3, slope]))) < 1e-4\n    assert root([0, 1]) == 0\n",
}
"""A row of HumanEval whose tests call a helper of the prompt, and the required function by its own name."""
PREFIXED = roll("check_based", {
    "entry_point": "root", "import_prefix": HELPED["prompt"].partition("def root")[0], "assert_code": HELPED["test"],
})  # fmt: skip


@pytest.mark.parametrize("row", [HELPED, PREFIXED], ids=["humaneval", "check_based"])
@one_loop
async def test_a_helper_that_the_tests_call_is_the_rows_and_never_the_solutions(sandbox, row):
    right = "def root(xs):\n    return -xs[0] / xs[1]"
    assert (await grade(sandbox, right, row)).reward == 1.0
    helpers = ("", "def value(xs, x):\n    return 0.0\n", "class value(float): pass\n")
    for helper in helpers:
        result = await grade(sandbox, f"{helper}def root(xs):\n    return 1.0", row)
        assert (result.reward, result.components["passed"]) == (0.0, 0.0), result.detail


@one_loop
@pytest.mark.parametrize("role", ["assistant", "tool", "environment"])
async def test_a_helper_that_the_user_does_not_write_is_not_the_rows(sandbox, role):
    row = {key: value for key, value in HELPED.items() if key != "prompt"}
    said = "import math\ndef value(xs, x):\n    return 0.0\n\n\ndef root(xs):"
    prompt = [{"role": "user", "content": HELPED["prompt"]}, {"role": role, "content": said}]
    response = Response(block("def root(xs):\n    return 1.0"), None, prompt, row)
    assert (await CodeReward(sandbox=sandbox).grade(response)).reward == 0.0


FILLED = {
    "entry_point": "tops",
    "prompt": "def root(n):\n    return int(n ** 0.5)\n\n\ndef tops(n):\n",
    "test": "def check(candidate):\n    assert True, 'fine'\n    assert 1 == 1\n    assert ('a tuple', 'is true')\n"
    "    base = 9\n    assert base == 9\n    assert root(16) == 4\n    found = []\n    found.append(candidate(base))\n"
    "    assert found == [3]\n    assert candidate(4) == 2\n    assert True\n    return\n    assert candidate(1)\n",
}
"""A row of HumanEval in which two asserts test the solution."""


@one_loop
async def test_an_assert_that_no_program_can_fail_pays_nothing(sandbox):
    assert len(code_task(None, FILLED).suite.hidden) == 2
    for code, share in (("return root(n)", 1.0), ("return 3", 0.5), ("raise ValueError", 0.0)):
        result = await grade(sandbox, f"def tops(n):\n    {code}", FILLED)
        assert (result.reward, result.components["num_tests"]) == (share, 2.0), result.detail


def test_a_function_with_asserts_is_a_test_where_it_is_called():
    source = "def check(f):\n    def one(x):\n        assert f(x) == x\n    one(1)\n    one(2)\n"
    sources = [test.source for test in code_task({"entry_point": "same", "test": source}).suite.hidden]
    assert ["one(1)" in each for each in sources] == [True, False]
    assert ["one(2)" in each for each in sources] == [False, True]


NEVER_CALLS = (
    {"entry_point": "add", "test": "def check(candidate):\n    for _ in []:\n        assert candidate(1, 2) == 3\n"},
    roll("assert", {"assert_code": "if False:\n    assert add(1, 2) == 3"}),
    {"entry_point": "add", "tests": ["assert callable(add)", "assert add is not None"]},
    {"entry_point": "add", "hidden": ["assert callable(add)", "assert add(1, 2) == 3"]},
)


@pytest.mark.parametrize("row", NEVER_CALLS, ids=["humaneval", "assert", "plain", "one of two"])
@one_loop
async def test_a_row_with_a_test_that_never_calls_the_solution_is_the_datas_error(sandbox, row):
    for code in (RIGHT, "def add(a, b):\n    return 0"):
        with pytest.raises(DataError, match="call"):
            await grade(sandbox, code, row)


@one_loop
async def test_no_program_makes_a_row_look_as_if_it_tested_nothing(sandbox):
    text = "it passed without a call of the solution"
    row = {"entry_point": "add", "hidden": ["assert add(1, 2) == 3"]}
    for code in (f"raise ValueError('{text}')", f"def add(a, b):\n    raise ValueError('{text}')", LEAVES_LATER):
        assert (await grade(sandbox, code, row)).reward == 0.0


@one_loop
async def test_quotation_marks_in_a_text_run_nothing(sandbox, tmp_path):
    target = tmp_path / "ran"
    text = f"The cat'''; open({str(target)!r}, 'w'); assert_ = '''sleeps.\\"
    result = await CodeReward(sandbox=sandbox).grade(Response(text, None, metadata=TEXT))
    assert not target.exists()
    assert result.components["passed"] == 1.0, "it has a cat, and more than three words"
    ends = "cat''' or exit(0) or '''"
    assert (await CodeReward(sandbox=sandbox).grade(Response(ends, None, metadata=TEXT))).reward == 0.5


@one_loop
async def test_an_expected_output_of_nothing_is_not_passed_by_any_output(sandbox):
    row = roll("input", {"stdin": "", "expected_stdout": ""})
    assert (await grade(sandbox, "print('x')", row)).reward == 0.0
    assert (await grade(sandbox, "pass", row)).reward == 1.0


@pytest.mark.parametrize("case_type", ["input", "assert", "pytest", "check_based", "text", None])
async def test_an_empty_list_of_tests_is_refused_and_not_passed(case_type):
    for cases in ("[]", [], "null"):
        row = {"case_type": case_type, "test_cases": cases, "test_case_function": "None"}
        with pytest.raises(DataError, match="code_task: expected a row of the form roll"):
            await CodeReward().grade(Response(block("pass"), None, metadata=row))


ANSWER = "```python\ndef add(a, b):\n    return a + b\n```"
WRONG_ANSWER = "```python\ndef add(a, b):\n    return a - b\n```"
USAGE = "```python\nprint(add(1, 2))  # 3\n```"


@one_loop
@pytest.mark.parametrize(
    ("text", "right"),
    [
        (f"{ANSWER}\nUse it so:\n{USAGE}", 1.0),
        (f"{WRONG_ANSWER}\nBetter:\n{ANSWER}\n{USAGE}", 1.0),
        (f"{ANSWER}\nNo, so:\n{WRONG_ANSWER}\n{USAGE}", 0.0),
        ("```python\nadd = lambda a, b: a + b\n```\n" + USAGE, 1.0),
        (f"{ANSWER}\n```python\nassert add(1, 2) == 3\ndef address(): ...\n```", 1.0),
        (USAGE, 0.0),
    ],
)
async def test_a_block_that_shows_how_to_use_the_solution_is_not_taken_for_it(sandbox, text, right):
    label = {"entry_point": "add", "hidden": [{"args": [1, 2], "expected": 3}]}
    assert (await CodeReward(sandbox=sandbox).grade(Response(text, label))).reward == right


STARS = "from math import *\n"
GCD = "assert gcd(4, 6) == 2"
FROM_STARS = {
    "humaneval": {"entry_point": "gcd", "prompt": f"{STARS}def gcd(a, b):\n",
                  "test": f"def check(candidate):\n    {GCD}\n"},
    "check_based": roll("check_based", {"entry_point": "gcd", "import_prefix": STARS,
                                        "assert_code": f"def check(candidate):\n    {GCD}\n"}),
    "mbpp": {"code": "def gcd(a, b): pass", "test_imports": [STARS.strip()], "test_list": [GCD]},
    "mbpp without a reference": {"test_imports": [STARS.strip()], "test_list": [GCD]},
    "mbpp with classes": {"code": "class Two: pass\ndef gcd(a, b): pass", "test_imports": [STARS.strip()],
                          "test_setup_code": "one = 1", "test_list": ["assert gcd(4, 6) == 2 * one or Two()"]},
    "input call": roll("input", {"stdin": "4\n6", "expected_stdout": "2"}, function="gcd"),
    "assert": roll("assert", {"assert_code": GCD}),
    "plain": {"entry_point": "gcd", "prelude": STARS, "hidden": [{"args": [4, 6], "expected": 2}]},
    "pytest": roll("pytest", {"assert_code": f"{STARS}from solution import *\ndef test_it(tmp_path):\n    {GCD}"}),
    "plain, a method": {"entry_point": "Solution.gcd", "hidden": [{"args": [4, 6], "expected": 2}],
                        "prelude": "class Solution:\n    def gcd(self, *args): return 2\n"},
}  # fmt: skip
"""Rows whose imports define what is asked for."""


@pytest.mark.parametrize("row", FROM_STARS.values(), ids=FROM_STARS)
@one_loop
async def test_what_the_imports_of_a_row_define_is_not_the_solutions(sandbox, row):
    assert (await grade(sandbox, "x = 1", row)).reward == 0.0
    right = "def gcd(*_):\n    return 2\nclass Solution:\n    gcd = gcd\nclass Two: pass\n"
    assert (await grade(sandbox, right, row)).reward == 1.0


def test_asserts_of_which_imports_may_define_a_function_need_a_reference():
    row = {"test_imports": [STARS.strip()], "test_list": ["assert floor(half(3)) == 1"]}
    with pytest.raises(DataError, match="'code'"):
        code_task(None, row)
    suite = code_task(None, {**row, "code": "def half(n): return n / 2"}).suite
    assert suite.names == ("half",)


@pytest.mark.parametrize(
    "code",
    [
        "def pair(): return ''\ndef len(_): return 2",
        "pytest_plugins = ['solution']\ndef pytest_pyfunc_call(pyfuncitem):\n"
        "    assert 3 not in pyfuncitem.obj.__code__.co_consts\n    return True",
    ],
    ids=["len", "pytest_plugins"],
)
@one_loop
async def test_tests_beside_the_solution_take_nothing_from_it_but_the_names_that_they_use(sandbox, code):
    row = roll("pytest", {"assert_code": "from solution import *\ndef test_it(tmp_path):\n    assert len(pair()) == 2"})
    assert (await grade(sandbox, "def pair(): return 'ab'", row)).reward == 1.0
    assert (await grade(sandbox, code, row)).reward == 0.0


@one_loop
async def test_tests_beside_the_solution_may_call_its_functions_by_other_names(sandbox):
    source = "from solution import add as plus\ndef test_it():\n    assert plus(1, 1) == 2"
    row = roll("pytest", {"assert_code": source})
    for code, reward in ((RIGHT, 1.0), ("def add(a, b): return 3", 0.0)):
        assert (await grade(sandbox, code, row)).reward == reward


TWO = "def two():\n    return 2"
SCOPES = {
    "local": "def test_a(tmp_path):\n    assert two() == 2\ndef test_b(tmp_path):\n    two = [1]\n    assert two",
    "parameter": "class TestIt:\n    def test_a(self):\n        assert (lambda two: two)(2) == two()",
    "comprehension": "def test_a(tmp_path):\n    assert [two for two in (2,)] == [two()]",
    "pattern": "def test_a():\n    match two():\n        case [one]: pass\n        case one: assert one == 2",
    "global": "def test_a():\n    global one\n    one = two()\n    assert one == 2",
    "import in a function": "def test_a(tmp_path):\n    from operator import add\n    assert add(two(), 0) == 2",
}
"""Tests whose local names are not asked of the solution, or do not hide that they are."""


@pytest.mark.parametrize("source", SCOPES.values(), ids=SCOPES)
@one_loop
async def test_tests_take_from_the_solution_what_they_use_outside_the_scopes_that_define_it(sandbox, source):
    row = roll("pytest", {"assert_code": f"from solution import *\n{source}"})
    assert (await grade(sandbox, TWO, row)).reward == 1.0
    assert (await grade(sandbox, "x = 1", row)).reward < 1.0


# --- how the rows of a benchmark are compared -----------------------------------------------------------------------


def apps(out, given="", **row):
    return {"input_output": json.dumps({"inputs": [given], "outputs": [out], **row})}


def live_code_bench(out, given="", kind="stdin"):
    tests = [{"input": given, "output": out, "testtype": kind}]
    return {"public_test_cases": [], "private_test_cases": tests, "metadata": {"func_name": "f"}}


def apps_call(out, *given):
    return apps(out, given, fn_name="f")


def live_code_bench_call(out, given="1"):
    return live_code_bench(json.dumps(out), given, "functional")


def returns(text):
    return f"def f(*args):\n    return {text}"


THIRD = "print(1 / 3)"
COMPARED = {
    # (row, program, as its own evaluator, strictly)
    "apps: floats in a line": (apps("0.25 0.333333333"), "print(0.25, 1 / 3)", True, False),
    "apps: lines in another order": (apps("1\n2\n"), "print(2)\nprint(1)", True, False),
    "apps: a line for a row": (apps("1 2\n"), "print(1)\nprint(2)", False, True),
    "apps: spaces and blank lines": (apps("1 2\n3\n"), "print(' 1  2 ')\nprint()\nprint(3)", True, True),
    "apps: an exit code": (apps("3"), "print(3)\nraise SystemExit(1)", True, False),
    "apps: true for 1": (apps_call([1], 1), returns("True"), True, False),
    "apps: a float for an integer": (apps_call([2], 1), returns("2.0"), True, False),
    "apps: the first of several": (apps_call([1, 2], 1), returns("1"), False, False),
    "apps: keys are integers": (apps_call([{"1": 2}], 1), returns("{1: 2}"), True, False),
    "apps: keys as text": (apps_call([{"1": 2}], 1), returns("{'1': 2}"), False, True),
    "livecodebench: a space before": (live_code_bench("5\n"), "print(' 5')", True, False),
    "livecodebench: a blank line between": (live_code_bench("5\n6\n"), "print(5)\nprint()\nprint(6)", False, False),
    "livecodebench: a float of more digits": (live_code_bench("0.333333333\n"), THIRD, False, False),
    "livecodebench: nothing and no program": (live_code_bench(""), "1 +", False, False),
    "livecodebench: a float for an integer": (live_code_bench_call(2), returns("2.0"), True, False),
    "livecodebench: a tuple": (live_code_bench_call([1, 2]), returns("(1, 2)"), True, True),
    "livecodebench: keys as text": (live_code_bench_call({"1": 2}), returns("{'1': 2}"), True, True),
    "livecodebench: keys are integers": (live_code_bench_call({"1": 2}), returns("{1: 2}"), False, False),
    "mbpp: as Python compares": ({"test_list": ["assert f(1) == 1"]}, returns("True"), True, True),
    "mbpp: a reference that is assigned": (
        {"test_list": ["assert f(1) == 2"], "code": "f = lambda n: 2 * n"}, returns("2"), True, True
    ),
    "humaneval: as Python compares": (
        {"entry_point": "f", "test": "def check(c):\n    assert c(1) == 2"}, returns("2.0"), True, True
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPARED)
@one_loop
async def test_a_row_is_compared_as_its_own_evaluator_does_or_strictly_on_request(sandbox, case):
    row, code, official, strict = COMPARED[case]
    assert (await grade(sandbox, code, row, official=True)).reward == official
    assert (await grade(sandbox, code, row, strict=True)).reward == strict


@pytest.mark.parametrize(
    ("given", "out", "code", "right", "official"),
    [
        ("3 1 2\n", "1 2 3\n", "print(input())", False, True),  # sort the numbers
        ("3 1 2\n", "1 2 3\n", "print(*sorted(map(int, input().split())))", True, True),
        ("3 1 2\n", "1 2 3\n", "for each in sorted(input().split()):\n    print(f'{each} ')", True, False),
        ("b\na\n", "a\nb\n", "print(input())\nprint(input())", False, True),
        ("", "0.0004\n", "print(0)", False, True),
        ("", "0.3333333\n", "print(f'{1 / 3:.9f}')\nraise SystemExit(1)", True, True),
    ],
)
@one_loop
async def test_the_leniency_of_an_evaluator_earns_no_reward(sandbox, given, out, code, right, official):
    assert (await grade(sandbox, code, apps(out, given))).reward == right
    assert (await grade(sandbox, code, apps(out, given), official=True)).reward == official


CATCHES = """
def check(candidate):
    try:
        assert candidate(1, 2) == 3
    except Exception:
        pass
    for each in candidate([], []):
        assert each > 0
    assert all(each > 0 for each in candidate([], []))
"""


@pytest.mark.parametrize(
    ("code", "reward"),
    [("return a + b or [1]", 1.0), ("return []", 0.0), ("raise ValueError", 0.0), ("return [b, 0]", 0.0)],
)
@one_loop
async def test_an_assert_that_a_row_catches_or_loops_over_nothing_pays_nothing(sandbox, code, reward):
    row = {"entry_point": "add", "test": CATCHES}
    assert (await grade(sandbox, f"def add(a, b):\n    {code}", row)).reward == reward


@pytest.mark.parametrize(
    "test",
    [
        "assert add(1, 2) == 3 or True",
        "assert not (add(1, 2) == 4 and False)",
        "assert (add(1, 2) == 3, 'wrong')",
        "assert add(1, 2) == add(1, 2)",
        "assert [add(1, 2) == 3]",
        "assert lambda: add(1, 2) == 3",
        "assert (add(1, n) == 3 for n in [2])",
    ],
)
def test_an_assert_that_is_always_true_is_not_a_test(test):
    can_fail = ["assert add(1, 2) == 3 and True", "assert add(1, 2) or []", "assert add([], []) is add([], [])"]
    row = {"entry_point": "add", "hidden": [test, *can_fail]}
    assert len(code_task(None, row).suite.hidden) == 3
    with pytest.raises(DataError, match=r"no asserts|without asserts"):
        code_task({"entry_point": "add", "test": f"def check(add):\n    {test}"})


# --- what it is worth, and how it ended -----------------------------------------------------------------------------

PROGRAMS = {
    "right": (RIGHT, Status.OK, 1.0),
    "half": ("def add(a, b):\n    return max(a, 0) + b", Status.OK, 1 / 2),
    "wrong": ("def add(a, b):\n    return 'x'", Status.OK, 0.0),
    "endless": ("def add(a, b):\n    while True:\n        pass", Status.TIMEOUT, 0.0),
    "endless at once": ("while True:\n    pass", Status.TIMEOUT, 0.0),
    "does not load": ("def add(a, b)", Status.PARSE_ERROR, 0.0),
    "none": ("```\n```", Status.NO_ANSWER, 0.0),
}
REWARDS = {
    "fraction": [1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0],
    "binary": [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    "guide": [1.0, 0.3, 0.0, -0.5, -0.5, -1.0, -1.0],
    "roll": [1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0],
}


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=PROGRAMS)
@one_loop
async def test_rewards_by_scale_and_status(sandbox, number):
    code, status, score = list(PROGRAMS.values())[number]
    results = await asyncio.gather(
        *(grade(sandbox, code, ADD, scale=scale, limits={"cpu_s": 0.5, "wall_s": 200}) for scale in REWARDS)
    )
    assert [result.reward for result in results] == [rewards[number] for rewards in REWARDS.values()]
    for result, scale in zip(results, REWARDS, strict=True):
        assert (result.status, result.score) == (status, pytest.approx(score))
        assert result.components.keys() == {"passed_share", "passed", "num_tests", "all_passed"}
        assert (result.components["num_tests"], result.components["passed_share"]) == (3.0, pytest.approx(score))
        low, high = CodeReward(scale=scale).bounds
        assert low <= result.reward <= high
    assert (results[0].extracted is None) is (status is Status.NO_ANSWER)


@pytest.mark.parametrize(
    ("verdicts", "reward"),
    [("pp", 1.0), ("pf", 0.3), ("pt", 0.3), ("ff", 0.0), ("tt", -0.5), ("ft", -0.5), ("mm", 0.0), ("", -1.0)],
)
def test_the_guides_rewards_by_verdicts(verdicts, reward):
    named = {"p": Verdict.PASSED, "f": Verdict.FAILED, "t": Verdict.TIMEOUT, "m": Verdict.MISSING}
    tests = tuple(TestResult(f"hidden[{i}]", False, named[each]) for i, each in enumerate(verdicts))
    result = GradeResult(tests, Integrity.OUTSIDE) if tests else None
    assert guide_reward(result, status_of(result)) == reward


@one_loop
async def test_a_script_that_does_not_compile_does_not_load(sandbox):
    result = await grade(sandbox, "print('", SUM, scale="guide")
    assert (result.status, result.reward) == (Status.PARSE_ERROR, -1.0)


async def test_a_failed_sandbox_returns_no_number():
    for row in (SUM, ADD, ASSERTS):
        result = await grade(BrokenSandbox(), RIGHT, row)
        assert (result.reward, result.status) == (None, Status.INFRA)
        assert "no memory" in result.detail or "expected a process" in result.detail


@pytest.mark.parametrize(
    ("label", "row"),
    [
        (None, {}), ("", {}), (7, {}), ("42", {}), ([], {}), ({}, {}), ({1: 2, "a": 3}, {}), (float("nan"), {}),
        ("[" * 10_000, {}), ({"tests": [1]}, {}), ({"tests": 3}, {}), ({"test_cases": "no JSON"}, {}),
        (None, {"test_cases": [{}]}), (None, roll("guess", {"stdin": ""})), (None, roll("assert", {"stdin": ""})),
        (None, roll("assert", {"assert_code": "assert f("})), (None, roll("assert", {"assert_code": "f(1)"})),
        (None, roll("assert", {"assert_code": "x = f(1)\nassert True"})),
        ({"test_list": ["f(1)"]}, {}), ({"test_list": ["f(1)\nassert True"]}, {}),
        ({"test_list": ["assert (f(1) == 2, 'why')"]}, {}),
        ({"entry_point": "f", "test": "def check(c):\n    assert True, 'fine'"}, {}),
        ({"entry_point": "f", "test": "def check(c):\n    c(1)\n    assert True, 'fine'"}, {}),
        ({"entry_point": "f", "test": "def check(c):\n    return\n    assert c(1) == 1"}, {}),
        ({"entry_point": "f", "tests": ["print(f(1))", "assert True"]}, {}),
        (None, roll("assert", {"assert_code": "assert 1 == 1"})), (None, roll("text", {"assert_code": "assert 1"})),
        (None, roll("assert", {"assert_code": 3})), (None, roll("input", "assert f(1)")),
        (None, roll("input", {"stdin": "x", "expected_stdout": "1"}, function="f")),
        (None, roll("check_based", {"assert_code": "def check(c):\n    assert c(1)"})),
        (None, roll("check_based", {"assert_code": "def check(c):\n    pass", "entry_point": "f"})),
        (None, roll("pytest", {"assert_code": "import pytest\n@pytest.mark.parametrize('x', [1])\ndef test_f(x):\n"
                               "    assert f(x)"})),
        (None, roll("pytest", {"assert_code": "from solution import *\ndef test_f(tmp_path):\n    assert max(1, 2)"})),
    ],
)  # fmt: skip
async def test_a_row_that_cannot_be_used_is_the_datas_error(label, row):
    with pytest.raises(DataError, match="code_task"):
        await CodeReward().grade(Response(block("pass"), label, metadata=row))


SLOW = """
import time
def add(a, b):
    time.sleep(0.8)
    return a + b
"""


@pytest.mark.long
@one_loop
async def test_a_program_that_is_slow_within_every_limit_does_not_outlast_its_grade(sandbox):
    row = {"entry_point": "add", "hidden": [{"args": [n, 1], "expected": n + 1} for n in range(20)]}
    reward = CodeReward(sandbox=sandbox, limits={"wall_s": 10.0})
    result = await grade_in_time(reward, Response(block(SLOW), None, "", row), limit_s=6.0)
    assert (result.status, result.components["all_passed"]) == (Status.TIMEOUT, 0.0), result.detail
