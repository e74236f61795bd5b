"""What MathGrader says about answers: outcomes, math-verify's known traps, hostile answers, GSM8K."""

import asyncio
import json
from pathlib import Path

import pytest

from agentenv.errors import DataError
from agentenv.rewards.rules.math.reward import MathGrader, math_outcome
from agentenv.rewards.types import RewardResult, Status

GSM8K = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k_test.jsonl"
CORRECT, WRONG, PARSE_ERROR = "correct", "wrong", "parse_error"
SAID = {CORRECT: "right", WRONG: "wrong", PARSE_ERROR: "wrong", "no_answer": "no_answer"}
CASES = [
    tuple(line.replace("⏎", "\n").split("\t"))
    for line in Path(__file__).with_name("math_cases.tsv").read_text("utf-8").splitlines()
    if "\t" in line
]
r"""Texts as models write them, each with its label and what a mathematician says: right, wrong, or no final answer.

Every row was judged by hand, by what the answer means and not by what the grader gave for it. "wrong" is an answer that
is not the gold one, whether or not it can be read; "no_answer" a text that commits to none. Percentages equal their
value and the bare number (a label's form is its author's habit), units are not compared, and a decimal is right where
it has the gold's precision. What leaves an operation to do, where the label does not, is no answer: the task's own
words would be. ⏎ stands for the end of a line.
"""

UNREAD = r"So the answer is \boxed{2 \text{ to } 1}."
"""The one among them that the grader does not read."""


@pytest.fixture(scope="module")
def shared():
    """One grader for all tests of the module, though each test has its own event loop."""
    grader = MathGrader()
    yield grader
    asyncio.run(grader.close())


async def graded(grader: MathGrader, answer: str, label: object) -> RewardResult:
    return await grader.grade(f"\\boxed{{{answer}}}", label)


@pytest.mark.parametrize("cases", [CASES[::12], pytest.param(CASES, marks=pytest.mark.long)], ids=["some", "all"])
async def test_agrees_with_hand_checked_answers(shared, cases):
    grades = await asyncio.gather(*(shared.grade(text, label) for text, label, _ in cases))
    said = [SAID.get(math_outcome(grade), "failed") for grade in grades]
    differ = [(*case, got) for case, got in zip(cases, said, strict=True) if got != case[2]]
    assert [each for each in differ if each[0] != UNREAD] == []


async def test_a_very_long_answer_is_not_graded(shared):
    grade = await graded(shared, "1+" * 4000 + "1", 4001)
    assert math_outcome(grade) == PARSE_ERROR
    assert "4096" in grade.detail


@pytest.mark.parametrize("label", [r"\frac{1}{", "5^", [r"\frac{1}{", 6]])
async def test_a_label_that_math_verify_cannot_read_is_the_datas_error(shared, label):
    for answer in ("5", "I do not know", "5"):
        with pytest.raises(DataError, match=r"^label: expected an answer that math-verify can read, got '.*'\."):
            await graded(shared, answer, label)


async def test_an_unreadable_label_still_matches_itself_and_spares_the_other_golds(shared):
    assert math_outcome(await graded(shared, "6", [r"\frac{1}{", 6])) == CORRECT
    assert math_outcome(await graded(shared, r"\sqrt{36}", [r"\frac{1}{", 6])) == CORRECT
    assert math_outcome(await shared.grade(r"#### \frac{1}{", r"\frac{1}{")) == CORRECT


@pytest.mark.long
async def test_a_label_that_takes_too_long_is_the_datas_error_and_not_the_answers_timeout():
    async with MathGrader(num_workers=1, timeout_s=0.3) as grader:
        with pytest.raises(DataError, match=r"^label: .* can be compared in 0\.3 s of CPU time, got '.*'"):
            await graded(grader, "5", "9^{9^{9^9}}")
        assert math_outcome(await graded(grader, r"\sqrt{36}", ["9^{9^{9^9}}", 6])) == CORRECT


async def test_an_answer_that_cannot_be_compared_is_the_answers_fault(shared):
    grade = await graded(shared, "1<x<2<3", "1<x<2")
    assert math_outcome(grade) == PARSE_ERROR
    assert "compared" in grade.detail


HOSTILE = [
    "9^{9^{9^9}}",
    "(10^9)!",
    "9!" + "!" * 50,
    "2^{1000000000}",
    r"\sqrt{2^{100000001}}",
    r"\binom{1000000000}{500000000}",
    HOSTILE_SUM := r"\sum_{n=1}^{1000000000} n^2/(n+1)",
    HOSTILE_POWER := "(1+x)^{100000}",
    "{" * 2000 + "5" + "}" * 2000,
    "(" * 2000 + "5" + ")" * 2000,
    r"\sqrt{" * 400 + "5" + "}" * 400,
]


@pytest.mark.long
async def test_every_known_hostile_answer_times_out_by_its_computing():
    async with MathGrader(timeout_s=0.3) as grader:
        labels = {HOSTILE_SUM: r"\sum_{n=1}^{9} n", HOSTILE_POWER: "x+5"}  # a number would refuse them at once
        checks = (graded(grader, answer, labels.get(answer, 5)) for answer in HOSTILE)
        grades = await asyncio.wait_for(asyncio.gather(*checks), 300)
    in_time = {answer[:40] for answer, grade in zip(HOSTILE, grades, strict=True) if math_outcome(grade) != "timeout"}
    assert in_time == set()
    assert {grade.detail for grade in grades} == {"the check took more than 0.3 s of CPU time"}


@pytest.mark.long
async def test_equal_checks_at_the_same_time_are_done_once_and_remembered(monkeypatch):
    async with MathGrader() as grader:
        checks = []

        async def counted(answer, golds):
            checks.append(answer)
            return await MathGrader.check(grader, answer, golds)

        monkeypatch.setattr(grader, "check", counted)
        grades = await asyncio.gather(*(graded(grader, r"\sqrt{16}", 4) for _ in range(50)))
        assert {math_outcome(grade) for grade in grades} == {CORRECT}
        assert math_outcome(await graded(grader, r"\sqrt{16}", 4)) == CORRECT
        assert checks == [r"\sqrt{16}"]


async def test_only_the_newest_results_and_no_failures_are_remembered(monkeypatch):
    grader = MathGrader(cache_size=2)
    checks = []

    async def check(answer, golds):
        checks.append(answer)
        if answer == "i":
            return RewardResult.failed("the worker died")
        return RewardResult(0.0, score=0.0, status=Status.TIMEOUT if answer == "t" else Status.OK, extracted=answer)

    monkeypatch.setattr(grader, "check", check)
    for answer in ("a", "b", "a", "c", "a", "b", "t", "t", "i", "i"):
        await graded(grader, answer, 5)
    assert checks == ["a", "b", "c", "b", "t", "i", "i"]


@pytest.mark.long
async def test_when_the_caller_who_checks_is_cancelled_another_takes_over(monkeypatch):
    began, go_on = asyncio.Event(), asyncio.Event()

    async def check(answer, golds):
        began.set()
        await go_on.wait()
        return await MathGrader.check(grader, answer, golds)

    async with MathGrader() as grader:
        monkeypatch.setattr(grader, "check", check)
        first = asyncio.create_task(graded(grader, r"\sqrt{16}", 4))
        second = asyncio.create_task(graded(grader, r"\sqrt{16}", 4))
        await began.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        go_on.set()
        assert math_outcome(await second) == CORRECT


@pytest.mark.long
@pytest.mark.skipif(not GSM8K.exists(), reason=f"the GSM8K test set is not at {GSM8K.parent.name}/{GSM8K.name}")
async def test_gsm8k_gold_solutions_are_correct_and_perturbed_ones_wrong(shared):
    rows = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]
    grades = [await shared.grade(row, row) for row in rows]
    assert {math_outcome(grade) for grade in grades} == {CORRECT}
    perturbed = [
        f"#### {float(grade.extracted) + 1:g}" if "." in grade.extracted else f"#### {int(grade.extracted) + 1}"
        for grade in grades
    ]
    wrong = await asyncio.gather(*(shared.grade(text, row) for text, row in zip(perturbed, rows, strict=True)))
    assert {math_outcome(grade) for grade in wrong} == {WRONG}
    assert len(wrong) == 1319
