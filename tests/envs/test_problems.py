"""The word problems: deterministic, right, varied, and kept apart from training."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.make.word_problems import TASK_SET, TRAIN_SET, make_problems, read_questions

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


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "flags"),
    [
        (TASK_SET, ["--count", "200", "--seed", "0"]),
        (TRAIN_SET, ["--count", "1500", "--seed", "5", "--exclude", str(TASK_SET)]),
    ],
)
def test_the_shipped_sets_are_what_the_documented_commands_write(path: Path, flags: list[str], tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    subprocess.run([sys.executable, SCRIPT, str(out), *flags], check=True)
    assert out.read_bytes() == path.read_bytes()


def test_no_question_that_is_held_out_is_trained_on() -> None:
    def plain(path: Path) -> set[str]:
        return {" ".join(question.lower().split()) for question in read_questions(path)}

    assert len(plain(TRAIN_SET)) == 1500
    assert plain(TRAIN_SET).isdisjoint(plain(TASK_SET))
