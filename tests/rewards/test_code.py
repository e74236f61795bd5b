"""CodeReward: ROLL's rows, the scales, how grading ends, and the programs that other graders pay for."""

import asyncio
import copy
import json

import pytest
import pytest_asyncio

from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.code import CodeReward, code_task
from agentenv.rewards.code.assert_rows import split_tests
from agentenv.rewards.types import Response, Status
from agentenv.sandbox.grading import AssertSuite, PytestSuite
from agentenv.sandbox.local import LocalSandbox
from agentenv.sandbox.types import ExecResult, Isolation
from agentenv.sandbox.types import Status as Ended

one_loop = pytest.mark.asyncio(loop_scope="module")
"""Of all tests that share the sandbox."""


class Counted(LocalSandbox):
    """Knows how many programs it has run."""

    num_runs = 0

    async def run(self, program, **how):
        self.num_runs += 1
        return await super().run(program, **how)


class BrokenSandbox:
    """Fails, as one on a host that is out of memory does."""

    isolation, backend = Isolation.NONE, "broken"

    async def run(self, program, **_):
        return ExecResult(Ended.INFRA, detail="no memory for another process")

    async def start(self, program, **_):
        raise InfraError("sandbox: expected a process, got none. Retry.")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox():
    async with Counted(preimport=("pytest",)) as sandbox:
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
async def test_rows_of_text_are_of_what_is_said_after_the_reasoning(sandbox):
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


def test_each_function_or_assert_of_a_source_is_a_test_of_its_own():
    by_function = split_tests("x = 1\n\ndef test_a():\n    assert f(x)\n\ndef test_b():\n    assert g(x)")
    assert [("test_a" in one, "test_b" in one, "x = 1" in one) for one in by_function] == [
        (True, False, True),
        (False, True, True),
    ]
    by_assert = split_tests("x = f(1)\nassert x\nfor i in range(2):\n    assert f(i)")
    assert by_assert == ["x = f(1)\nassert x", "x = f(1)\nfor i in range(2):\n    assert f(i)"]


def test_the_tests_of_a_label_go_before_those_of_its_row():
    assert code_task(ADD, {**SUM, "test_list": ["assert f(1)"]}).form == "plain"
    assert code_task(json.loads(CHECK["test_cases"]), {"case_type": "check_based"}).form == "roll"


# --- programs that others pay for -----------------------------------------------------------------------------------

LEAVES = "import os\nos._exit(0)"
LEAVES_LATER = "def add(a, b):\n    import os\n    os._exit(0)"
EXITS = "def add(a, b):\n    return 0\nexit(0)"


@pytest.mark.parametrize("code", [LEAVES, LEAVES_LATER, EXITS, "import sys\nsys.exit(0)"])
@pytest.mark.parametrize("row", [CHECK, ASSERTS, PYTEST, SUM], ids=["check_based", "assert", "pytest", "input"])
@one_loop
async def test_leaving_before_the_asserts_passes_nothing(sandbox, row, code):
    result = await grade(sandbox, code, row)
    assert (result.reward, result.components["passed"]) == (0.0, 0.0), result.detail


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
async def test_the_word_user_in_the_output_does_not_make_candidates_pass(sandbox):
    assert (await grade(sandbox, "print('User', *range(100))", SUM)).reward == 0.0


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


@one_loop
async def test_each_test_runs_once(sandbox):
    before = sandbox.num_runs
    await grade(sandbox, "import random\nprint(random.choice((3, 10)))", SUM)
    assert sandbox.num_runs - before == 2


@one_loop
async def test_an_endless_loop_costs_its_own_test_only(sandbox):
    code = "n = sum(map(int, input().split()))\nwhile n == 10:\n    pass\nprint(n)"
    result = await grade(sandbox, code, SUM, limits={"cpu_s": 0.5})
    assert (result.status, result.reward, result.components["passed"]) == (Status.TIMEOUT, 0.5, 1.0)


@pytest.mark.parametrize("row", [SUM, ASSERTS, PYTEST, CHECK], ids=["input", "assert", "pytest", "check_based"])
@one_loop
async def test_the_same_block_is_the_program_whatever_the_tests_are(sandbox, row):
    right = READS if row is SUM else RIGHT
    wrong = "print()" if row is SUM else "def add(a, b):\n    return None"
    last = await grade(sandbox, f"{block(wrong)}\nBetter:\n{block(right)}", row)
    first = await grade(sandbox, f"{block(right)}\nBetter:\n{block(wrong)}", row)
    assert (last.reward, first.reward) == (1.0, 0.0)


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


@one_loop
async def test_imports_classes_constants_and_example_usage_stay_in_a_program(sandbox):
    code = (
        "import math\nONE = 1\nclass Adder:\n    def add(self, a, b):\n        return a + b * ONE\n# Example usage\n"
        "def add(a, b):\n    return Adder().add(a, b)\nif __name__ == '__main__':\n    print(add(1, 2))"
    )
    prompted = Response(block(code), None, "```python\ndef add(a, b):\n```", CHECK)
    assert (await CodeReward(sandbox=sandbox).grade(prompted)).reward == 1.0


@one_loop
async def test_a_float_that_is_nearly_right_is_wrong_where_no_tolerance_is_named(sandbox):
    row = roll("input", {"stdin": "", "expected_stdout": "1.0"})
    assert (await grade(sandbox, "print(1.00001)", row)).reward == 0.0
    plain = {"tests": [{"stdin": "", "stdout": "1.0"}], "text_mode": "floats", "comparison": {"rel_tol": 1e-3}}
    assert (await grade(sandbox, "print(1.00001)", plain)).reward == 1.0


@one_loop
async def test_a_function_that_the_prelude_has_is_not_the_solutions(sandbox):
    row = roll("input", {"stdin": "4\n6", "expected_stdout": "2"}, function="gcd")
    assert (await grade(sandbox, "def other():\n    return isqrt(4)", row)).reward == 0.0
    assert (await grade(sandbox, "def gcd(a, b):\n    return math.gcd(a, b)", row)).reward == 1.0
    asserts = roll("assert", {"assert_code": "assert gcd(4, 6) == 2"})
    assert (await grade(sandbox, "x = 1", asserts)).reward == 0.0


# --- what it is worth, and how it ended -----------------------------------------------------------------------------

PROGRAMS = {
    "right": (RIGHT, Status.OK, 1.0),
    "half": ("def add(a, b):\n    return max(a, 0) + b", Status.OK, 1 / 2),
    "by heart": ("def add(a, b):\n    return {(1, 2): 3}[a, b]", Status.OK, 0.0),
    "wrong": ("def add(a, b):\n    return 'x'", Status.OK, 0.0),
    "endless": ("def add(a, b):\n    while True:\n        pass", Status.TIMEOUT, 0.0),
    "endless at once": ("while True:\n    pass", Status.TIMEOUT, 0.0),
    "does not load": ("def add(a, b)", Status.PARSE_ERROR, 0.0),
    "none": ("```\n```", Status.NO_ANSWER, 0.0),
}
REWARDS = {
    "fraction": [1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    "binary": [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    "guide": [1.0, 0.3, 0.3, 0.0, -0.5, -0.5, -1.0, -1.0],
    "roll": [1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0],
}


@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=PROGRAMS)
@one_loop
async def test_rewards_by_scale_and_status(sandbox, number):
    code, status, score = list(PROGRAMS.values())[number]
    results = await asyncio.gather(
        *(grade(sandbox, code, ADD, scale=scale, limits={"cpu_s": 0.3}) for scale in REWARDS)
    )
    assert [result.reward for result in results] == [rewards[number] for rewards in REWARDS.values()]
    for result, scale in zip(results, REWARDS, strict=True):
        assert (result.status, result.score) == (status, pytest.approx(score))
        assert result.components.keys() == {"passed_share", "passed", "num_tests", "all_passed"}
        assert (result.components["num_tests"], result.components["passed_share"]) == (3.0, pytest.approx(score))
        low, high = CodeReward(scale=scale).bounds
        assert low <= result.reward <= high
    assert (results[0].extracted is None) is (status is Status.NO_ANSWER)


@one_loop
async def test_a_script_that_does_not_compile_does_not_load(sandbox):
    result = await grade(sandbox, "print('", SUM, scale="guide")
    assert (result.status, result.reward) == (Status.PARSE_ERROR, -1.0)


async def test_a_failed_sandbox_gives_no_number():
    for row in (SUM, ADD, ASSERTS):
        result = await grade(BrokenSandbox(), RIGHT, row)
        assert (result.reward, result.status) == (None, Status.INFRA)
        assert "no memory" in result.detail or "expected a process" in result.detail


@one_loop
async def test_the_feedback_tells_nothing_of_hidden_tests(sandbox):
    for code in ("def add(a, b):\n    raise ValueError(a, b)", PROGRAMS["by heart"][0], PROGRAMS["half"][0]):
        said = (await grade(sandbox, code, ADD)).feedback
        assert said
        assert "-1" not in said
        assert "2, 2" not in said
        assert "hidden" not in said


@pytest.mark.parametrize(
    ("label", "row"),
    [
        (None, {}), ("", {}), (7, {}), ("42", {}), ([], {}), ({}, {}), ({1: 2, "a": 3}, {}), (float("nan"), {}),
        ("[" * 10_000, {}), ({"tests": [1]}, {}), ({"tests": 3}, {}), ({"test_cases": "no JSON"}, {}),
        (None, {"test_cases": [{}]}), (None, roll("guess", {"stdin": ""})), (None, roll("assert", {"stdin": ""})),
        (None, roll("assert", {"assert_code": "assert f("})), (None, roll("assert", {"assert_code": "f(1)"})),
        (None, roll("assert", {"assert_code": "assert 1 == 1"})), (None, roll("text", {"assert_code": "assert 1"})),
        (None, roll("assert", {"assert_code": 3})), (None, roll("input", "assert f(1)")),
        (None, roll("input", {"stdin": "x", "expected_stdout": "1"}, function="f")),
        (None, roll("check_based", {"assert_code": "def check(c):\n    assert c(1)"})),
        (None, roll("check_based", {"assert_code": "def check(c):\n    pass", "entry_point": "f"})),
        (None, roll("pytest", {"assert_code": "import pytest\n@pytest.mark.parametrize('x', [1])\ndef test_f(x):\n"
                               "    assert f(x)"})),
    ],
)  # fmt: skip
async def test_a_row_that_cannot_be_used_is_the_datas_error(label, row):
    with pytest.raises(DataError, match="code_task"):
        await CodeReward().grade(Response(block("pass"), label, metadata=row))


@pytest.mark.parametrize(
    "options",
    [{"scale": "half"}, {"limits": {"seconds": 1}}, {"limits": 3}, {"sandbox": {"colour": "red"}},
     {"sandbox": {"backend": "dokcer"}}],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused_at_once(options):
    with pytest.raises(ConfigError, match=r"(CodeReward\.(scale|limits)|sandbox): expected"):
        CodeReward(**options)


async def test_a_text_that_is_too_long_has_no_program():
    for row in (ADD, TEXT):
        result = await CodeReward(sandbox=BrokenSandbox()).grade(Response("x = 1\n" * 200_000, None, metadata=row))
        assert (result.status, result.reward) == (Status.NO_ANSWER, 0.0)
