"""Questions that are hard without tools, generated from a seed: the rows of tool_use.

    python examples/make/tool_tasks.py OUT.jsonl

Each row has a prompt, the label, and in the column `gold` a call that computes the answer.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

SEED, NUM_EACH = 0, 5
_Row = tuple[str, int, str, dict[str, str]]  # question, answer, tool, arguments


def rows(seed: int = SEED, num_each: int = NUM_EACH) -> Iterator[dict[str, Any]]:
    """Yield `num_each` rows of each kind, all different; equal arguments produce equal rows."""
    rng = Random(seed)
    seen: set[str] = set()
    for make in KINDS:
        count = 0
        while count < num_each:
            question, answer, tool, arguments = make(rng)
            if question in seen:
                continue
            seen.add(question)
            count += 1
            yield {"prompt": question, "label": str(answer), "gold": {"name": tool, "arguments": arguments}}


def _sum_of_products(rng: Random) -> _Row:
    a, b, c, d = (rng.randint(1000, 99999) for _ in range(4))
    return f"What is {a} * {b} + {c} * {d}?", a * b + c * d, *_expression(f"{a} * {b} + {c} * {d}")


def _remainder(rng: Random) -> _Row:
    base, exponent, modulus = rng.randint(100, 999), rng.randint(20, 60), rng.randint(1000, 9999)
    question = f"What is the remainder when {base} to the power of {exponent} is divided by {modulus}?"
    return question, base**exponent % modulus, *_expression(f"{base} ** {exponent} % {modulus}")


def _power(rng: Random) -> _Row:
    base, exponent = rng.randint(11, 99), rng.randint(6, 9)
    return f"What is {base} to the power of {exponent}?", base**exponent, *_expression(f"{base} ** {exponent}")


def _square_root(rng: Random) -> _Row:
    root = rng.randint(10000, 99999)
    return f"What is the square root of {root * root}?", root, *_expression(f"sqrt({root * root})")


def _divisor(rng: Random) -> _Row:
    common = rng.randint(100, 999)
    a, b = (common * rng.randint(100, 999) for _ in range(2))
    question = f"What is the greatest common divisor of {a} and {b}?"
    return question, math.gcd(a, b), *_expression(f"gcd({a}, {b})")


def _shipment(rng: Random) -> _Row:
    boxes, each, broken, price = rng.randint(113, 989), rng.randint(113, 989), rng.randint(13, 99), rng.randint(13, 89)
    question = (
        f"A ship carries {boxes} boxes of {each} lamps. {broken} lamps break, and the others are sold for {price} "
        "coins each. How many coins is that?"
    )
    return question, (boxes * each - broken) * price, *_expression(f"({boxes} * {each} - {broken}) * {price}")


def _savings(rng: Random) -> _Row:
    weekly, weeks, spent = rng.randint(1013, 9989), rng.randint(113, 489), rng.randint(10013, 99989)
    question = (
        f"Rosa puts {weekly} coins aside every week for {weeks} weeks and then spends {spent}. How many has she left?"
    )
    return question, weekly * weeks - spent, *_expression(f"{weekly} * {weeks} - {spent}")


def _digit_sum(rng: Random) -> _Row:
    base, exponent = rng.randint(11, 99), rng.randint(20, 60)
    question = f"What is the sum of the decimal digits of {base} to the power of {exponent}?"
    return question, sum(map(int, str(base**exponent))), *_code(f"sum(map(int, str({base} ** {exponent})))")


def _primes(rng: Random) -> _Row:
    limit = rng.randint(1000, 9999)
    answer = sum(all(n % d for d in range(2, math.isqrt(n) + 1)) for n in range(2, limit))
    code = f"sum(all(n % d for d in range(2, int(n ** 0.5) + 1)) for n in range(2, {limit}))"
    return f"How many prime numbers are smaller than {limit}?", answer, *_code(code)


def _multiples(rng: Random) -> _Row:
    a, b, limit = rng.randint(3, 9), rng.randint(11, 19), rng.randint(1000, 9999)
    question = f"What is the sum of all positive whole numbers below {limit} that {a} or {b} divides?"
    answer = sum(n for n in range(limit) if n % a == 0 or n % b == 0)
    return question, answer, *_code(f"sum(n for n in range({limit}) if n % {a} == 0 or n % {b} == 0)")


def _collatz(rng: Random) -> _Row:
    start = rng.randint(1000, 99999)
    question = (
        f"Begin with {start}. Halve an even number; of an odd one take three times the number plus one. After how many "
        "steps is it 1 for the first time?"
    )
    n, steps = start, 0
    while n != 1:
        n, steps = n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1
    code = f"n, steps = {start}, 0\nwhile n != 1:\n    n, steps = n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1\nsteps"
    return question, steps, *_code(code)


def _letters(rng: Random) -> _Row:
    word = "".join(rng.choice("abcde") for _ in range(60))
    letter = rng.choice("abcde")
    return f"How often is the letter {letter} in {word}?", word.count(letter), *_code(f"{word!r}.count({letter!r})")


KINDS: tuple[Callable[[Random], _Row], ...] = (
    _sum_of_products, _remainder, _power, _square_root, _divisor, _shipment, _savings, _digit_sum, _primes, _multiples,
    _collatz, _letters,
)  # fmt: skip


def _expression(text: str) -> tuple[str, dict[str, str]]:
    return "calculator", {"expression": text}


def _code(text: str) -> tuple[str, dict[str, str]]:
    return "python", {"code": text}


def main() -> None:
    """Write the rows to the file that the command line names."""
    text = "".join(json.dumps(row) + "\n" for row in rows())
    Path(sys.argv[1]).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
