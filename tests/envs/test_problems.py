"""The word problems: deterministic, right, varied, and kept apart from training."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.make.word_problems import (
    TASK_SET,
    TRAIN_SET,
    make_problems,
    read_questions,
    work_out,
)

SCRIPT = str(Path(__file__).parents[2] / "examples/make/word_problems.py")


def calculate(expression: str) -> int:
    assert re.fullmatch(r"[\d +*()-]+", expression)
    return int(eval(expression))


def test_answers_lie_between_1_and_999_and_questions_hold_no_answer_mark() -> None:
    for problem in make_problems(2000, 2):
        assert 1 <= problem.answer <= 999
        assert all(int(n) <= 999 for n in re.findall(r"\d+", problem.short_solution))
        assert "####" not in problem.question
        assert "{" not in problem.question


def test_the_short_solution_is_true_equations_that_lead_to_the_answer() -> None:
    for problem in make_problems(2000, 4):
        *lines, _ = problem.short_solution.splitlines()
        results = [int(line.split(" = ")[1]) for line in lines]
        assert [calculate(line.split(" = ")[0]) for line in lines] == results
        assert results[-1] == problem.answer
        assert all(line.startswith(f"{result} ") for line, result in zip(lines[1:], results[:-1], strict=True))


@pytest.mark.parametrize(
    ("left", "operator", "right", "written"),
    [
        (27, "+", 15, "27 + 15: ones 7 + 5 = 12, tens 2 + 1 + 1 = 4, so 42."),
        (27, "+", 2, "27 + 2: ones 7 + 2 = 9, tens 2 + 0 = 2, so 29."),
        (103, "-", 47, "103 - 47: ones 13 - 7 = 6, tens 10 - 4 - 1 = 5, hundreds 1 - 0 - 1 = 0, so 56."),
        (38, "*", 7, "38 * 7: ones 8 * 7 = 56, tens 3 * 7 + 5 = 26, so 266."),
        (5, "+", 99, "5 + 99: ones 5 + 9 = 14, tens 0 + 9 + 1 = 10, so 104."),
    ],
)
def test_operations_are_worked_by_columns(left: int, operator: str, right: int, written: str) -> None:
    assert work_out(left, operator, right) == written


@pytest.mark.long
def test_the_shipped_task_set_is_what_the_command_writes(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    command = [sys.executable, SCRIPT, str(out), "--count", "200", "--seed", "0"]
    subprocess.run(command, check=True)
    assert out.read_bytes() == TASK_SET.read_bytes()


@pytest.mark.long
def test_the_set_to_train_on_is_what_the_documented_command_writes(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    command = [sys.executable, SCRIPT, str(out)]
    subprocess.run([*command, "--count", "1500", "--seed", "5", "--exclude", str(TASK_SET)], check=True)
    assert out.read_bytes() == TRAIN_SET.read_bytes()
    assert TRAIN_SET.stat().st_size < 300_000


def test_no_question_that_is_held_out_is_trained_on() -> None:
    def plain(path: Path) -> set[str]:
        return {" ".join(question.lower().split()) for question in read_questions(path)}

    assert len(plain(TRAIN_SET)) == 1500
    assert plain(TRAIN_SET).isdisjoint(plain(TASK_SET))
