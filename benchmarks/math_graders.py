r"""False positives and false negatives of `MathGrader` beside other graders of mathematical answers.

    python benchmarks/math_graders.py
    python benchmarks/math_graders.py --gsm8k gsm8k_test.jsonl --labels math500.jsonl --peers PEERS

The script makes its own cases, so that their truth is known: solutions, a number written in other ways, transforms of
labels, and forms as the tests of the graders have them. `--gsm8k` and `--labels` add the labels of JSON-lines files
(`answer`). math-verify comes with agentenv. The rest are graded if they can be imported: PEERS may be a folder with
`verl/utils/reward_score` of verl and `grading` of PRM800K. Graders get the answer in the form that each of them reads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import logging
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from common import machine

from agentenv.errors import DataError
from agentenv.rewards.rules.math.reward import MathGrader

COLUMNS = ("solutions", "rewrites", "transforms", "forms", "percent")


class Case(NamedTuple):
    """An answer to a gold one, and if it is right; the text is what a model would write around it."""

    column: str
    gold: str
    answer: str
    right: bool
    text: str


Grade = Callable[[Case], bool]
RIGHT_NUMBERS = (
    "{n}", "{n:,}", "{n}.0", r"\${n}", r"{n}\text{{ apples}}", r"\frac{{{double}}}{{2}}", "x = {n}",
    r"\sqrt{{{square}}}", r"\text{{{n}}}", "{n}.", r"\mathbf{{{n}}}", r"\frac{{{double}}}{{2}} = {n}",
    r"\dfrac{{{n}}}{{1}}",
)  # fmt: skip
WRONG_NUMBERS = (
    "{more}", "-{n}", "{n}.5", r"\frac{{{n}}}{{2}}", r"{n} \text{{ or }} {more}", "{n}, {more}", "{more} = {n}",
    r"\phantom{{{n}}}", "{n}x", r"{n} \neq {more}", "{n}m", "0.{n}", "{n}{n}", "{n} {n}",
)  # fmt: skip
LABELS = (
    r"\frac{3}{4}", r"-\frac{7}{12}", r"\frac{\sqrt{3}}{2}", r"2\sqrt{5}", r"\frac{1+\sqrt{5}}{2}", r"3-2i",
    r"\frac{\pi}{6}", r"12\pi", r"x^2+3x-4", r"(x-2)(x+3)", r"\frac{x+1}{x-1}", r"2x+3", r"y=2x+3", r"x=5", r"e^{2x}",
    r"\ln 3", r"\log_2 5", r"\left(3,\frac{\pi}{2}\right)", r"(1,-2)", r"(2,3,6)", r"[0,1)", r"(-\infty,3]",
    r"(-\infty,-3)\cup(3,\infty)", r"\{1,2,3\}", r"1,2", r"-2,\frac{1}{3}", r"\pm 4", r"\frac{5\pm\sqrt{41}}{4}",
    r"1\pm\sqrt{19}", r"x\leq 2", r"-1<x<4", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
    r"\begin{pmatrix}-1\\\frac{1}{2}\end{pmatrix}", r"\binom{7}{3}", r"2^{10}", r"\sqrt[3]{4}", r"\frac{n(n+1)}{2}",
    r"\frac{\sqrt{a^2+b^2}}{c}", r"10^{-9}", r"3\cdot 10^{8}", r"\sin x", r"|x-1|", r"\log_{3}(27)=3", r"x^2+y^2=25",
    r"d=\frac{\sqrt{37}}{2}, M=\left(\frac56, \frac74\right)", r"11,\! 111,\! 111,\! 100",
)  # fmt: skip
FORMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    r"\log_{3}(27)=3": (("3", r"3=\log_3(27)"), ("1=2", "7=9", r"\log_3(27)=4", "x+1=x", "1=1")),
    "2+2=4": (("4",), ("2+2=5", "5", "1=1")),
    "N=n": ((), ("1=1", "2=3")),
    "x^2+1=0": (("x^2=-1", "2x^2+2=0"), ("1=1", "y^2+1=0")),
    "7": (
        ("3+4=7", "x=7", r"\frac{14}{2}", "7.00", "７", r"\phantom{1}7"),
        ("8=7", "x=8=7", r"\phantom{7}", "7 or 8", "7s"),
    ),
    "x=3": (("3", "3=x"), ("2x+1=7", "2x=6", "x=-3")),
    "12": ((r"12^{\mathrm{th}}", "12th", r"12\text{ cm}", "12.0"), ("12x", "1,2", "12h", "1 2", r"3\times4")),
    r"\frac{5\pm\sqrt{241}}{12}": (
        (r"\dfrac{5\pm\sqrt{241}}{12}", r"\frac{5+\sqrt{241}}{12},\frac{5-\sqrt{241}}{12}"),
        (r"\frac{5+\sqrt{241}}{12}", r"\frac{5\pm\sqrt{242}}{12}", r"\frac{5-\sqrt{241}}{12},\frac{5-\sqrt{241}}{12}"),
    ),
    "(-∞, -3) ∪ (3, +∞)": ((r"(-\infty,-3)\cup(3,\infty)",), (r"(-\infty,-3)\cup(4,\infty)", r"[-\infty,-3]")),
    r"\{x|-1 < x < 1\}": (("(-1,1)", "-1<x<1"), ("(-1,2)", "[-1,1]", "x^2<1")),
    r"\frac{1+a}c": ((r"\frac{1+a}{c}", "(1+a)/c", r"\frac{a+1}{c}"), (r"\frac{1+b}{c}", r"1+\frac{a}{c}")),
    "m_{\\max }=n^2-n-1": ((r"m_{\max}=n^2-n-1", "n^2-n-1"), ("n^2-n+1",)),
    "-3./2": (("-1.5", r"-\frac{3}{2}"), ("1.5", "-2/3")),
    "a ≠ 2": ((r"a \neq 2", r"a\ne 2"), (r"a \neq 3", "2")),
    "10^{-9}": (("1e-9", "0.000000001", r"1\times10^{-9}"), ("1e-8", "0", "10^{9}")),
    r"\frac\pi6": ((r"\frac{\pi}{6}", r"\pi/6"), (r"\frac{\pi}{3}", "0.52")),
    r"\sqrt2": (("2^{0.5}", "2^{1/2}", r"\frac{2}{\sqrt{2}}"), ("1.41", r"\sqrt{3}", "2^{0.4}")),
    "i": ((r"\sqrt{-1}",), ("-i", "1")),
    "1<x<2": (("2>x>1", "(1,2)", r"x\in(1,2)"), ("1<x<3", r"1\leq x<2", "[1,2]")),
    "3,4": (("4,3", r"\{3,4\}", r"x=3 \text{ or } x=4", "3 and 4"), ("3", "3,4,5", "3,4,4", "(4,3)")),
    "(1,2)": (("(1, 2)", r"\left(1,2\right)", "(1.0,2.0)", "x=1, y=2"), ("(2,1)", r"\{1,2\}", "(1,2,3)", "[1,2]")),
    r"\{1,2\}": ((r"\{2,1\}", "1,2", r"\left\{1,2\right\}"), ("(1,2)", r"\{1,3\}", r"\{1,2,3\}")),
    r"\frac{1}{2}": (
        (r"\sin 30^\circ", "0.5", r"\frac{2}{4}", "1/2", r"2^{-1}", r"\frac12"),
        (r"\cos 30^\circ", "0.51", "2"),
    ),
    "30^\\circ": (("30", "30°", "30 degrees"), (r"31^\circ", r"\frac{\pi}{3}")),
    "x^2-1": (("(x-1)(x+1)", "-1+x^2"), ("x^2+1", "(x-1)^2", "1-x^2")),
    r"2\pi": ((r"2 \pi", r"\pi\cdot2"), (r"2\pi h", "6.28", r"\pi^2")),
    r"\frac{1}{3}": (("0.333333", r"\frac{2}{6}", r"0.\overline{3}"), ("0.33", "0.3", "3")),
    r"\begin{pmatrix}1\\2\end{pmatrix}": (
        (r"\begin{bmatrix}1\\2\end{bmatrix}", r"\left[\begin{array}{c}1\\2\end{array}\right]"),
        (r"\begin{pmatrix}2\\1\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    ),
    "1,234": (("1234", r"1{,}234", r"1\,234", "1,234.0"), ("1.234", "1,2,3,4", "1235")),
    "18": ((r"\$18.00", "18 dollars", r"\boxed{18}", "18.", "= 18"), ("180", "1.8", "eighteen or so")),
    "B": (("(B)", r"\text{B}", r"\textbf{(B)}", "B."), ("A", "AB", "C")),
    r"\text{Monday}": (("Monday", "monday", r"\text{Monday}"), ("Tuesday", "dayMon")),
    "1/2006!": (("1/2006!",), ("1/2004!", "0")),
}  # fmt: skip
DISPLAY = {
    r"\dfrac": lambda label: label.replace(r"\frac", r"\dfrac"),
    "brackets": lambda label: label.replace(r"\left", "").replace(r"\right", ""),
    "spaces": lambda label: label.replace("=", " = ").replace("+", " + "),
    "display": lambda label: rf"\displaystyle {label}",
    "dollars": lambda label: f"${label}$",
    "point": lambda label: f"{label}.",
}


def boxed(answer: str) -> str:
    return rf"So the answer is $\boxed{{{answer}}}$."


def solutions(numbers: list[int], rng: random.Random) -> Iterator[Case]:
    for number in numbers:
        for answer in (number, number + rng.choice([1, -1, 10, number])):
            steps = f"There are {number - 1} + 1 = {number} and {rng.randint(2, 99)} others. "
            yield Case("solutions", str(number), str(answer), answer == number, steps + boxed(str(answer)))


def rewrites(numbers: list[int]) -> Iterator[Case]:
    for n in numbers:
        values = {"n": n, "double": 2 * n, "less": n - 1, "more": n + 1, "square": n * n}
        for forms, right in ((RIGHT_NUMBERS, True), (WRONG_NUMBERS, False)):
            for form in forms:
                answer = form.format(**values)
                yield Case("rewrites", str(n), answer, right, boxed(answer))
        yield Case("percent", str(n), rf"{n}\%", False, boxed(rf"{n}\%"))


def transforms(labels: list[str], rng: random.Random) -> Iterator[Case]:
    for label in labels:
        for answer in dict.fromkeys(change(label) for change in DISPLAY.values()):
            yield Case("transforms", label, answer, True, boxed(answer))
        other = rng.choice([each for each in LABELS if each != label])
        for answer in (other, "1=1", "2=3", rf"\phantom{{{label}}}"):
            yield Case("transforms", label, answer, False, boxed(answer))


def forms() -> Iterator[Case]:
    for gold, answers in FORMS.items():
        for right, listed in zip((True, False), answers, strict=True):
            for answer in listed:
                yield Case("forms", gold, answer, right, boxed(answer))


def peers() -> Iterator[tuple[str, Grade]]:
    """Yield the graders that can be imported, in the way that each is called by its own project."""
    from math_verify import parse, verify

    yield "math-verify (response)", lambda case: verify(parse(f"${case.gold}$"), parse(case.text))
    yield "math-verify (answer)", lambda case: verify(parse(f"${case.gold}$"), parse(f"${case.answer}$"))
    verl = "verl.utils.reward_score"
    calls = {
        "verl math_dapo": (f"{verl}.math_dapo", lambda m, c: m.compute_score(f"Answer: {c.answer}", c.gold)["acc"]),
        "verl math_reward": (f"{verl}.math_reward", lambda m, c: m.compute_score(c.text, c.gold) == 1.0),
        "verl prime_math": (f"{verl}.prime_math", lambda m, c: m.compute_score(c.text, c.gold)[0]),
        "PRM800K": ("grading.grader", lambda m, c: m.grade_answer(c.answer, c.gold)),
    }
    for name, (module, call) in calls.items():
        try:
            grader = importlib.import_module(module)
        except ImportError as error:
            print(f"{name}: left out ({error})")
            continue
        yield name, lambda case, grader=grader, call=call: call(grader, case)


async def ours(cases: list[Case]) -> list[bool | None]:
    """Return the verdicts of agentenv; None for a label that it refuses."""
    verdicts: list[bool | None] = []
    async with MathGrader(num_workers=1, timeout_s=10.0, cache_size=0) as grader:
        await grader.check("x", ("1",))  # starts the worker
        for case in cases:
            try:
                verdicts.append((await grader.grade(case.text, case.gold)).score == 1.0)
            except DataError:
                verdicts.append(None)
    return verdicts


def theirs(cases: list[Case], grade: Grade) -> list[bool | None]:
    verdicts: list[bool | None] = []
    for case in cases:
        try:
            with contextlib.redirect_stdout(Path(os.devnull).open("w")):
                verdicts.append(bool(grade(case)))
        except Exception:  # noqa: BLE001 - a crash gives none
            verdicts.append(None)
    return verdicts


def row(name: str, cases: list[Case], verdicts: list[bool | None], seconds: float) -> str:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for case, verdict in zip(cases, verdicts, strict=True):
        counts[case.column][0] += bool(verdict) and not case.right
        counts[case.column][1] += case.right and not verdict
    cells = [f"{counts[column][0]} / {counts[column][1]}" for column in COLUMNS[:-1]] + [str(counts["percent"][0])]
    return f"| {name} | {' | '.join(cells)} | {verdicts.count(None)} | {seconds / len(cases) * 1e3:.1f} |"


def read(path: Path | None) -> list[str]:
    rows = path.read_text().splitlines() if path else []
    return [str(json.loads(line)["answer"]).rpartition("####")[2].strip() for line in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=20, help="how many numbers are rewritten")
    parser.add_argument("--limit", type=int, default=100, help="how many rows of each file are used")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gsm8k", type=Path, help="a JSON-lines file with GSM8K's `answer` column")
    parser.add_argument("--labels", type=Path, help="a JSON-lines file with an `answer` column, as MATH-500 has")
    parser.add_argument("--peers", type=Path, help="a folder with the sources of other graders")
    args = parser.parse_args()
    if args.peers:
        sys.path.insert(0, str(args.peers))
    logging.disable(logging.WARNING)
    rng = random.Random(args.seed)
    made = [rng.randint(2, 4000) for _ in range(args.numbers)]
    read_numbers = [text.replace(",", "") for text in read(args.gsm8k)]
    golds = [int(text) for text in read_numbers if text.isdecimal() and int(text) > 1][: args.limit]
    labels = [*LABELS, *rng.sample(found := read(args.labels), min(len(found), args.limit))]
    cases = [*solutions([*made, *golds], rng), *rewrites(made), *transforms(labels, rng), *forms()]
    print(f"{machine()}, math-verify {metadata.version('math-verify')}\n")
    total = {column: sum(case.column == column for case in cases) for column in COLUMNS}
    print(
        f"| false positives / negatives | {' | '.join(f'{n} ({total[n]})' for n in COLUMNS)} | no verdict | mean ms |"
    )
    print(f"|---|{'---|' * len(COLUMNS)}---:|---:|")
    started = time.perf_counter()
    verdicts = asyncio.run(ours(cases))
    print(row("**agentenv**", cases, verdicts, time.perf_counter() - started), flush=True)
    for name, grade in peers():
        started = time.perf_counter()
        found_verdicts = theirs(cases, grade)
        print(row(name, cases, found_verdicts, time.perf_counter() - started), flush=True)
    print("\nagentenv's false verdicts:")
    for case, verdict in zip(cases, verdicts, strict=True):
        if bool(verdict) is not case.right and case.column != "percent":
            print(f"- {case.column}: gold `{case.gold}`, answer `{case.answer}`: {verdict}, {case.right} is true")


if __name__ == "__main__":
    main()
