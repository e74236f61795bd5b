"""Arithmetic word problems of one or two steps, made from a seed; the task set of math_retry and of its tiny policy.

In: a count and a seed. Out: `Problem`s with all questions different, or one JSON line per problem:

    python examples/make/word_problems.py OUT.jsonl --count 200 --seed 0

The two shipped sets are `word_problems`, made so, and `word_problems_train`, which shares no question with it:

    python examples/make/word_problems.py OUT.jsonl --count 1500 --seed 5 --exclude word_problems.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from random import Random

import agentenv_envs.math_retry

_DATA = Path(agentenv_envs.math_retry.__file__).parent / "data"
TASK_SET = _DATA / "word_problems.jsonl"
"""The shipped task set: 200 rows made with seed 0; nothing that ships here was trained on them."""
TRAIN_SET = _DATA / "word_problems_train.jsonl"
"""1,500 other rows, to train on: seed 5, without the questions of `TASK_SET`."""

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Hana", "Ivan", "Lena", "Noah", "Rosa", "Sam")
OBJECTS = ("apples", "balls", "books", "cakes", "coins", "eggs", "marbles", "pears", "pens", "shells", "stamps")
BOXES = ("bags", "boxes", "crates", "jars", "packs", "trays")

STARTS = ("{n} has {a} {o}.", "{n} counts {a} {o}.", "{n} starts with {a} {o}.", "There are {a} {o} on {n}'s table.")
PACKS = (
    "{n} has {b} {x} with {a} {o} in each.",
    "{n} buys {b} {x} of {a} {o}.",
    "{n} fills {b} {x}. Each holds {a} {o}.",
    "There are {a} {o} in each of {n}'s {b} {x}.",
)
EVENTS = {
    "+": ("{n} buys {b} more.", "{m} gives {n} {b} more.", "Then {n} finds {b} {o}.", "{n} gets {b} from {m}."),
    "-": ("{n} gives {b} to {m}.", "{n} sells {b} of them.", "Then {n} loses {b}.", "{m} takes {b} {o} away."),
}
ENDS = ("How many {o} does {n} have now?", "How many {o} does {n} have at the end?", "How many {o} are there for {n}?")
COMPARISONS = {
    "+": "{n} has {a} {o}. {m} has {b} more than {n}.",
    "-": "{n} has {a} {o}. {m} has {b} fewer than {n}.",
}
THEIRS = "How many {o} does {m} have?"
TOGETHER = "How many {o} do they have together?"
DAYS = "{n} sells {a} {o} in the morning and {b} in the evening. How many {o} does {n} sell in {c} such days?"
PLACES = ("ones", "tens", "hundreds")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its answer, and two texts that reach it: one in a leap per operation, one column by column."""

    question: str
    """The word problem, one paragraph of plain English."""
    answer: int
    """Between 1 and 999."""
    short_solution: str
    """An equation per operation and the answer: "27 + 15 = 42", "42 - 8 = 34", "#### 34"."""
    long_solution: str
    """A line per operation, worked from the ones to the hundreds, and the answer."""


def make_problems(count: int, seed: int, *, exclude: AbstractSet[str] = frozenset()) -> list[Problem]:
    """`count` problems with different questions, none of them in `exclude`; equal arguments give equal problems."""
    rng = Random(seed)
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = _make_problem(rng)
        if problem is not None and problem.question not in exclude:
            problems.setdefault(problem.question, problem)
    return list(problems.values())


def read_questions(path: Path = TASK_SET) -> frozenset[str]:
    """Return the questions of a task file, to be kept out of training."""
    return frozenset(json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines())


def write_tasks(path: Path, problems: list[Problem]) -> None:
    """Writes one task per line: the question under `prompt` and "#### N" under `label`."""
    rows = ({"prompt": problem.question, "label": f"#### {problem.answer}"} for problem in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def work_out(left: int, operator: str, right: int) -> str:
    """One operation by columns: "27 + 15: ones 7 + 5 = 12, tens 2 + 1 + 1 = 4, so 42."."""
    columns, carry = [], 0
    for place, name in enumerate(PLACES[: len(str(max(left, right)))]):
        top, bottom = left // 10**place % 10, right // 10**place % 10
        if operator == "*":
            written, value = f"{top} * {right} + {carry}", top * right + carry
            carry_out = value // 10
        elif operator == "+":
            written, value = f"{top} + {bottom} + {carry}", top + bottom + carry
            carry_out = value // 10
        else:
            carry_out = int(top < bottom + carry)
            top += 10 * carry_out
            written, value = f"{top} - {bottom} - {carry}", top - bottom - carry
        columns.append(f"{name} {written if carry else written[:-4]} = {value}")
        carry = carry_out
    return f"{left} {operator} {right}: {', '.join(columns)}, so {apply(left, operator, right)}."


def apply(left: int, operator: str, right: int) -> int:
    """Return the result of +, - or *."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def _make_problem(rng: Random) -> Problem | None:
    """Return a random problem; None if its numbers leave the range 1 to 999."""
    n, m = rng.sample(NAMES, 2)
    words = {"n": n, "m": m, "o": rng.choice(OBJECTS), "x": rng.choice(BOXES)}
    make = rng.choices((_story, _packs, _comparison, _days), weights=(5, 4, 2, 1))[0]
    question, start, steps = make(rng, words)
    value, short_lines, long_lines = start, [], []
    for operator, number in steps:
        result = apply(value, operator, number)
        if not 1 <= result <= 999:
            return None
        short_lines.append(f"{value} {operator} {number} = {result}")
        long_lines.append(work_out(value, operator, number))
        value = result
    ending = f"#### {value}"
    return Problem(question, value, "\n".join([*short_lines, ending]), "\n".join([*long_lines, ending]))


_Words = dict[str, str]
_Made = tuple[str, int, list[tuple[str, int]]]  # the question, the first number, and what is done to it in turn


def _story(rng: Random, words: _Words) -> _Made:
    """Return a start and one or two events."""
    start = rng.randint(10, 99)
    sentences, steps = _events(rng, words, rng.choice((1, 2)))
    return " ".join([rng.choice(STARTS).format(a=start, **words), *sentences]), start, steps


def _packs(rng: Random, words: _Words) -> _Made:
    """Return packs of equal size and at most one event."""
    each, packs = rng.randint(10, 60), rng.randint(2, 9)
    sentences, steps = _events(rng, words, rng.choice((0, 1)))
    return " ".join([rng.choice(PACKS).format(a=each, b=packs, **words), *sentences]), each, [("*", packs), *steps]


def _events(rng: Random, words: _Words, num_events: int) -> tuple[list[str], list[tuple[str, int]]]:
    """Return `num_events` purchases, gifts and losses, followed by the question."""
    steps = [(rng.choice("+-"), rng.randint(2, 60)) for _ in range(num_events)]
    sentences = [rng.choice(EVENTS[operator]).format(b=number, **words) for operator, number in steps]
    return [*sentences, rng.choice(ENDS).format(**words)], steps


def _comparison(rng: Random, words: _Words) -> _Made:
    """Return a comparison of two people; the question asks for the second, or for both together."""
    first, difference, operator = rng.randint(10, 99), rng.randint(2, 60), rng.choice("+-")
    opening = COMPARISONS[operator].format(a=first, b=difference, **words)
    if rng.random() < 0.5:
        return f"{opening} {THEIRS.format(**words)}", first, [(operator, difference)]
    return f"{opening} {TOGETHER.format(**words)}", first, [(operator, difference), ("+", first)]


def _days(rng: Random, words: _Words) -> _Made:
    """Return a daily sum, repeated over several days."""
    morning, evening, days = rng.randint(10, 60), rng.randint(10, 60), rng.randint(2, 9)
    return DAYS.format(a=morning, b=evening, c=days, **words), morning, [("+", evening), ("*", days)]


def main() -> None:
    """Writes the task file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="file to write, one JSON object per line")
    parser.add_argument("--count", type=int, default=200, help="number of tasks")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal files")
    parser.add_argument("--exclude", type=Path, help="task file whose questions are left out, to keep them held out")
    args = parser.parse_args()
    exclude = read_questions(args.exclude) if args.exclude else frozenset()
    write_tasks(args.out, make_problems(args.count, args.seed, exclude=exclude))


if __name__ == "__main__":
    main()
