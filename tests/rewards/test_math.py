"""What MathGrader says about answers: outcomes, math-verify's known traps, hostile answers, GSM8K."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import DataError
from agentenv.rewards.math import Grade, MathGrader, Outcome, default_grader

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k_test.jsonl"
CORRECT, WRONG, PARSE_ERROR = Outcome.CORRECT, Outcome.WRONG, Outcome.PARSE_ERROR


@pytest.fixture(scope="module")
def shared():
    """One grader for all tests of the module, though each test has its own event loop."""
    grader = MathGrader()
    yield grader
    grader.close_now()


async def graded(grader: MathGrader, answer: str, label: object) -> Grade:
    return await grader.grade(f"\\boxed{{{answer}}}", label)


@pytest.mark.parametrize(
    ("answer", "label", "outcome"),
    [
        ("5", 5, CORRECT),
        ("6", 5, WRONG),
        ("6", [5, 6], CORRECT),
        ("7", [5, 6], WRONG),
        (r"\frac{2}{4}", "0.5", CORRECT),
        ("9 + 9", 18, CORRECT),
        (r"2 \times 9", 18, CORRECT),
        ("2·9", 18, CORRECT),
        (r"\sqrt{324}", 18, CORRECT),
        ("sqrt(324)", 18, CORRECT),
        ("3**2", 9, CORRECT),
        ("x = 5", 5, CORRECT),
        ("x = 6", 5, WRONG),
        ("x_1=5", 5, CORRECT),
        ("x = 1/3", "1/3", CORRECT),
        ("5", "x=5", CORRECT),
        (r"\arcsin(0)", 0, CORRECT),
        ("2+3=5", 5, CORRECT),
        (r"\{2, 1\}", r"\{1, 2\}", CORRECT),
        ("(1, 2)", "(1, 2)", CORRECT),
        ("(2, 1)", "(1, 2)", WRONG),
        (r"\log_2 8", 3, CORRECT),
        ("(x+1)^2", "x^2+2x+1", CORRECT),
        ("(x+1)^2", "x^2+2x+2", WRONG),
        (r"3\pi", "3π", CORRECT),
        (r"\sqrt{2}", r"\sqrt{2}", CORRECT),
        (r"\frac{\sqrt{8}}{2}", r"\sqrt{2}", CORRECT),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", CORRECT),
        ("4 or 3", "3 or 4", CORRECT),
        (r"\text{Monday}", "Monday", CORRECT),
        ("monday.", "Monday", CORRECT),
        ("Tuesday", "Monday", WRONG),
        ("(B)", "B", CORRECT),
        ("C", "B", WRONG),
        # percentages: number to number with a sign on either side, or by value
        (r"50\%", "50%", CORRECT),
        (r"50\%", 50, CORRECT),
        ("50", "50%", CORRECT),
        (r"50\%", 0.5, CORRECT),
        ("0.5", "50%", CORRECT),
        (r"\frac{1}{2}", "50%", CORRECT),
        ("0.5", 50, WRONG),
        (r"12.5\%", 12.5, CORRECT),
        # rounding
        ("0.333333", "1/3", CORRECT),
        ("0.333", "1/3", WRONG),
        ("1/3", "0.333", CORRECT),
    ],
)
async def test_grades_answers(shared, answer, label, outcome):
    assert (await graded(shared, answer, label)).outcome is outcome


@pytest.mark.parametrize(
    ("answer", "label", "outcome"),
    [
        (r"1/2006!", r"1/2004!", WRONG),
        (r"10^{-10}+10^{-20}", r"3 \cdot 10^{-10}", WRONG),
        (r"4\sqrt(2)", "4", WRONG),
        (r"4\sqrt(2)", r"4\sqrt{2}", CORRECT),
        ("3*x-1*y+13=0", "3x+4y+14=0", WRONG),
        ("1.414214", r"\sqrt{2}", WRONG),
        ("3.141593", r"\pi", WRONG),
        (r"\sqrt{2}", "1.414214", CORRECT),
        ("dayMon", "Monday", WRONG),
        ("0.0000001", "0", WRONG),
        (r"\frac{0}{0}", "0", WRONG),
        # one of these numbers is the gold, or their sum, product or concatenation is
        ("1 2 3 4 5", 5, PARSE_ERROR),
        ("1 2 3 4 5", 15, PARSE_ERROR),
        ("1 2 3 4 5", 12345, PARSE_ERROR),
        ("5 6", 11, PARSE_ERROR),
        (r"5 \quad 6", 11, PARSE_ERROR),
        ("3 or 4", 3, WRONG),
        ("3 or 4", 4, WRONG),
        ("5, 6", 5, WRONG),
        ("5, 6", 6, WRONG),
        ("5; 6", 5, WRONG),
        (r"5 \text{ and } 6", 5, WRONG),
        (r"5 \_ 6", 5, PARSE_ERROR),
        ("5_6", 5, PARSE_ERROR),
        (r"5 \approx 6", 5, PARSE_ERROR),
        (r"5 \to 6", 6, PARSE_ERROR),
        (r"5 \neq 6", 6, PARSE_ERROR),
        ("5 # 6", 5, PARSE_ERROR),
        ("not 5", 5, WRONG),
        ("I do not know", 5, PARSE_ERROR),
        ("about 5", 5, PARSE_ERROR),
        ("5 = 6 = x", 5, WRONG),
        ("你好", 5, PARSE_ERROR),
        ("5^", 5, PARSE_ERROR),
        (r"\frac{1}{", "1", PARSE_ERROR),
        ("((5)", 5, PARSE_ERROR),
    ],
)
async def test_known_traps(shared, answer, label, outcome):
    text = f"#### {answer}"  # not a box, so that braces need not balance
    grade = await shared.grade(text, label)
    assert grade.outcome is outcome, grade


async def test_an_enumeration_without_a_box_is_no_answer(shared):
    assert (await shared.grade("1 2 3 4 5 6 7", "7")).outcome is Outcome.NO_ANSWER


async def test_a_very_long_answer_is_not_graded(shared):
    grade = await graded(shared, "1+" * 4000 + "1", 4001)
    assert grade.outcome is PARSE_ERROR
    assert "4096" in grade.detail


@pytest.mark.parametrize("label", [r"\frac{1}{", "5^", [r"\frac{1}{", 6]])
async def test_a_label_that_math_verify_cannot_read_is_the_datas_error(shared, label):
    with pytest.raises(
        DataError, match=r"^label: expected an answer that math-verify can read, got '.*'\. Correct it\.$"
    ):
        await graded(shared, "5", label)
    with pytest.raises(DataError):
        await graded(shared, "I do not know", label)
    grades = await asyncio.gather(*(graded(shared, "5", label) for _ in range(3)), return_exceptions=True)
    assert {type(grade) for grade in grades} == {DataError}


async def test_an_unreadable_label_still_matches_itself_and_spares_the_other_golds(shared):
    assert (await graded(shared, "6", [r"\frac{1}{", 6])).outcome is CORRECT
    assert (await graded(shared, "5+1", [r"\frac{1}{", 6])).outcome is CORRECT
    assert (await shared.grade(r"#### \frac{1}{", r"\frac{1}{")).outcome is CORRECT


async def test_a_label_that_takes_too_long_is_the_datas_error_and_not_the_answers_timeout():
    async with MathGrader(num_workers=1, timeout_s=0.3) as grader:
        with pytest.raises(
            DataError, match=r"^label: expected an answer that can be compared in 0\.3 s of CPU time, got '.*'"
        ):
            await graded(grader, "5", "9^{9^{9^9}}")
        assert (await graded(grader, "5+1", ["9^{9^{9^9}}", 6])).outcome is CORRECT


@pytest.mark.parametrize("label", ["你好", "Monday", "e.g."])
async def test_a_label_of_words_compares_as_a_string(shared, label):
    assert (await graded(shared, label, label)).outcome is CORRECT
    assert (await graded(shared, "5", label)).outcome is WRONG


async def test_an_answer_that_cannot_be_compared_is_the_answers_fault(shared):
    grade = await graded(shared, "1<x<2<3", "1<x<2")
    assert grade.outcome is PARSE_ERROR
    assert "compared" in grade.detail


async def test_a_bad_label_raises(shared):
    with pytest.raises(DataError):
        await shared.grade(r"\boxed{5}", None)


async def test_hostile_answers_time_out_while_the_loop_ticks_and_others_are_graded():
    lags, others, stop = [], [], asyncio.Event()

    async def tick() -> None:
        while not stop.is_set():
            started = time.perf_counter()
            await asyncio.sleep(0.01)
            lags.append(time.perf_counter() - started - 0.01)

    async def grade_others() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            others.append((await graded(grader, f"{number}+1", number + 1)).outcome)

    async with MathGrader(num_workers=3, timeout_s=1.0) as grader:
        await asyncio.gather(*(graded(grader, f"{n}+1", n + 1) for n in range(3)))  # starts the workers
        tasks = [asyncio.create_task(tick()), asyncio.create_task(grade_others())]
        started = time.perf_counter()
        grades = await asyncio.gather(graded(grader, "9^{9^{9^9}}", 5), graded(grader, "(10^9)!", 5))
        elapsed_s = time.perf_counter() - started
        stop.set()
        await asyncio.gather(*tasks)
    assert [grade.outcome for grade in grades] == [Outcome.TIMEOUT] * 2
    assert elapsed_s < 10.0  # 1 s of computing each, on whatever share of a processor they get
    assert max(lags) < 0.25
    assert len(others) > 10
    assert set(others) == {CORRECT}


HOSTILE = [
    "9^{9^{9^9}}",
    "(10^9)!",
    "9!" + "!" * 50,
    "2^{1000000000}",
    r"\sqrt{2^{100000001}}",
    r"\binom{1000000000}{500000000}",
    r"\sum_{n=1}^{1000000000} n^2/(n+1)",
    "(1+x)^{100000}",
    "{" * 2000 + "5" + "}" * 2000,
    "(" * 2000 + "5" + ")" * 2000,
    r"\sqrt{" * 400 + "5" + "}" * 400,
]


async def test_every_known_hostile_answer_times_out_by_its_computing():
    async with MathGrader(timeout_s=0.3) as grader:
        grades = await asyncio.wait_for(asyncio.gather(*(graded(grader, answer, 5) for answer in HOSTILE)), 60)
    assert {answer[:40]: grade.outcome for answer, grade in zip(HOSTILE, grades, strict=True)} == dict.fromkeys(
        [answer[:40] for answer in HOSTILE], Outcome.TIMEOUT
    )
    assert {grade.detail for grade in grades} == {"the check took more than 0.3 s of CPU time"}


async def test_equal_checks_at_the_same_time_are_done_once_and_remembered(monkeypatch):
    async with MathGrader() as grader:
        checks = []

        async def counted(answer, golds):
            checks.append(answer)
            return await MathGrader.check(grader, answer, golds)

        monkeypatch.setattr(grader, "check", counted)
        grades = await asyncio.gather(*(graded(grader, r"\sqrt{16}", 4) for _ in range(50)))
        assert {grade.outcome for grade in grades} == {CORRECT}
        assert (await graded(grader, r"\sqrt{16}", 4)).outcome is CORRECT
        assert checks == [r"\sqrt{16}"]


async def test_only_the_newest_results_and_no_failures_are_remembered(monkeypatch):
    grader = MathGrader(cache_size=2)
    checks = []

    async def check(answer, golds):
        checks.append(answer)
        return Grade({"t": Outcome.TIMEOUT, "i": Outcome.INFRA}.get(answer, WRONG), answer)

    monkeypatch.setattr(grader, "check", check)
    for answer in ("a", "b", "a", "c", "a", "b", "t", "t", "i", "i"):
        await graded(grader, answer, 5)
    assert checks == ["a", "b", "c", "b", "t", "i", "i"]


async def test_when_the_caller_who_checks_is_cancelled_another_takes_over():
    async with MathGrader() as grader:
        first = asyncio.create_task(graded(grader, r"\sqrt{16}", 4))
        second = asyncio.create_task(graded(grader, r"\sqrt{16}", 4))
        await asyncio.sleep(0.05)
        first.cancel()
        assert (await second).outcome is CORRECT
        with pytest.raises(asyncio.CancelledError):
            await first


PIECES = st.sampled_from(
    [*"0123456789+-*/^_=(){}[]<>!,.;:$%\\ xyzλé∞≤", "\\frac", "\\sqrt", "\\text{", "\\boxed{", "or", "\ud800"]
)


@settings(deadline=None, max_examples=120)
@given(
    text=st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=12).map("".join)),
    label=st.sampled_from([5, "x+1", "Monday", "50%"]),
)
def test_grading_never_raises_whatever_the_text(text, label):
    async def grade_all() -> None:
        for written in (text, f"\\boxed{{{text}}}", f"#### {text}"):
            grade = await default_grader().grade(written, label)
            assert grade.outcome is not Outcome.INFRA, grade

    asyncio.run(grade_all())


@pytest.mark.skipif(not GSM8K.exists(), reason=f"the GSM8K test set is not at {GSM8K.parent.name}/{GSM8K.name}")
async def test_gsm8k_gold_solutions_are_correct_and_perturbed_ones_wrong(shared):
    rows = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]
    grades = [await shared.grade(row, row) for row in rows]
    assert {grade.outcome for grade in grades} == {CORRECT}
    perturbed = [
        f"#### {float(grade.extracted) + 1:g}" if "." in grade.extracted else f"#### {int(grade.extracted) + 1}"
        for grade in grades
    ]
    wrong = await asyncio.gather(*(shared.grade(text, row) for text, row in zip(perturbed, rows, strict=True)))
    assert {grade.outcome for grade in wrong} == {WRONG}
    assert len(wrong) == 1319
