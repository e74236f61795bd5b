"""MathReward: what each outcome is worth, who else is held up by a check, and hostile text."""

import asyncio
import math
import random
import signal
import threading

import pytest

from agentenv.errors import DataError
from agentenv.rewards.grading import grade, grade_all
from agentenv.rewards.rules.math.reward import MathGrader, MathReward, default_grader
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.rewards.workers.pool import shared_pool

ENDLESS = "9^{9^{9^9}}"
WORTH = {"correct": 2.0, "wrong": -0.1, "no_answer": -0.2, "parse_error": -0.3, "timeout": -0.4}


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(timeout_s=1.5)  # a right answer computes 0.3 s at first
    yield grader
    grader.close_now()


async def judged(text: str, label: object, grader: MathGrader) -> RewardResult:
    return await MathReward(grader=grader, **WORTH).grade(Response(text, label))


# --- what a reward says ---------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "outcome", "status", "extracted"),
    [
        (r"\boxed{7}", "correct", Status.OK, "7"),
        (r"\boxed{8}", "wrong", Status.OK, "8"),
        ("seven", "no_answer", Status.NO_ANSWER, None),
        (r"\boxed{1 2 3}", "parse_error", Status.PARSE_ERROR, "1 2 3"),
        (rf"\boxed{{{ENDLESS}}}", "timeout", Status.TIMEOUT, ENDLESS),
    ],
)
async def test_every_outcome_has_its_reward_its_status_and_the_same_components(
    text, outcome, status, extracted, grader
):
    result = await judged(text, 7, grader)
    correct = float(outcome == "correct")
    assert (result.reward, result.score, result.status, result.extracted) == (
        WORTH[outcome], correct, status, extracted
    )  # fmt: skip
    assert result.components == {"correct": correct, "has_answer": float(extracted is not None)}
    assert result.feedback
    assert "7" not in result.feedback


@pytest.mark.parametrize("label", [None, "", [], True, math.nan, {"a": 1}, object()])
async def test_a_row_without_an_answer_in_its_label_is_the_rows_fault(label):
    with pytest.raises(DataError, match=r"^label: expected "):
        await MathReward().grade(Response(r"\boxed{7}", label))
    assert (await grade(MathReward(), Response(r"\boxed{7}", label))).status is Status.LABEL


async def test_a_failed_grader_is_not_a_wrong_answer(monkeypatch):
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    result = await MathReward(grader=MathGrader(num_workers=1)).grade(Response(r"\boxed{\sqrt{49}}", 7))
    assert (result.reward, result.score, result.status) == (None, None, Status.INFRA)
    assert "cannot start" in result.detail


@pytest.mark.long
async def test_the_default_grader_works_in_the_shared_pool_and_never_closes_it():
    await default_grader().grade(r"\boxed{\sqrt{4}}", 2)
    idle = [worker.process.pid for worker in shared_pool()._idle]
    assert idle
    await default_grader().close()
    default_grader().close_now()
    assert [worker.process.pid for worker in shared_pool()._idle if worker.process.poll() is None] == idle


async def test_an_alarm_of_the_caller_survives_a_check(grader):
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    signal.setitimer(signal.ITIMER_REAL, 600)
    try:
        assert (await judged(r"\boxed{\sqrt{49}}", 7, grader)).score == 1.0
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.long
def test_checks_in_threads_with_their_own_loops_work(grader):
    scores = []

    def work(number: int) -> None:
        scores.append(asyncio.run(judged(rf"\boxed{{|{{-{number + 1}}}|}}", number + 1, grader)).score)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20, 24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == [1.0] * 4


@pytest.mark.long
async def test_an_answer_that_would_freeze_the_interpreter_costs_the_batch_its_own_place_only():
    num_ticks = 0

    async def tick() -> None:
        nonlocal num_ticks
        while True:
            await asyncio.sleep(0.01)
            num_ticks += 1

    async with MathGrader(num_workers=2, timeout_s=1.5) as grader:
        await judged(r"\boxed{\sqrt{4}}", 2, grader)
        ticking = asyncio.create_task(tick())
        texts = [rf"\boxed{{{ENDLESS}}}", *(rf"\boxed{{|{{-{number}}}|}}" for number in range(4, 34))]
        labels = [5, *(number + 4 for number in range(30))]
        batch = [Response(text, label) for text, label in zip(texts, labels, strict=True)]
        results = await grade_all(MathReward(grader=grader), batch)
        ticking.cancel()
    assert [result.status for result in results] == [Status.TIMEOUT, *[Status.OK] * 30]
    assert {result.score for result in results[1:]} == {1.0}
    assert num_ticks >= 5, "a frozen interpreter ticks once"


# --- fuzz -----------------------------------------------------------------------------------------------------------

PIECES = (
    *"0123456789+-*/^_=(){}[]<>!,.;:$%\\ xyzλé∞≤√½°\"'\t\n\r\0\x1b\u200b\u202e\ufeff\ud800{}}}!",
    r"\frac", r"\sqrt", r"\text{", r"\boxed{", r"\left(", r"\right)", r"\begin{pmatrix}", r"\\", r"\end{pmatrix}",
    r"\overline{", "10^{", r"\times", r"\cdot", r"\binom", r"\int", r"\sum_{", "^{99999999999}", "1e999", "####",
    "<answer>", "</answer>", "<think>", "</think>", "<|im_end|>", "1,234", "0.5", "million", r"50\%", r"\pm",
    r"\infty", "NaN", "inf", "-0", "1/0", "__import__('os')", "lambda:0", "١٢٣", "１２",
    "99999999999999999999999999999", "The answer is ", " or ", " and ", r"\boxed{",
)  # fmt: skip
LABELS = (5, "x+1", "Monday", "50%", r"\frac{1}{2}", [1, 2], "(1,2)", "B")


def fuzzed(rng: random.Random) -> str:
    inside = "".join(rng.choices(PIECES, k=rng.randrange(0, 14)))
    return rng.choice(("{}", "\\boxed{{{}}}", "\\boxed{{{}}}", "#### {}", "Answer: {}", "<answer>{}</answer>")).format(
        inside
    )


@pytest.mark.long
async def test_a_thousand_fuzzed_texts_neither_crash_nor_hang_nor_give_a_wrong_type(grader):
    rng = random.Random(0)
    batch = [Response(fuzzed(rng), rng.choice(LABELS)) for _ in range(1000)]
    results = await grade_all(MathReward(grader=grader, **WORTH), batch, limit_s=120.0, max_concurrent=64)
    for response, result in zip(batch, results, strict=True):
        assert result.status in (Status.OK, Status.NO_ANSWER, Status.PARSE_ERROR, Status.TIMEOUT), (response, result)
        assert result.reward in WORTH.values(), (response, result)
        assert type(result.score) is float, (response, result)
        assert result.extracted is None or isinstance(result.extracted, str), (response, result)
    assert len({result.status for result in results}) >= 3
