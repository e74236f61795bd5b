r"""Verdicts on rows of APPS, LiveCodeBench and HumanEval, beside those of the benchmarks' own evaluators.

    git clone https://github.com/hendrycks/apps; git clone https://github.com/LiveCodeBench/LiveCodeBench
    git clone https://github.com/openai/human-eval
    python benchmarks/code_verdicts.py --apps apps --livecodebench LiveCodeBench --humaneval human-eval --mutants 10

Outputs and values are made from a few right ones: other white space, order, digits, types, and wrong ones. Programs of
HumanEval are the canonical solutions and mutants of them. An evaluator runs in a separate process, and so does
each program of HumanEval. Exit code 1 if a verdict differs, other than by a fault of an evaluator that `_fault` knows.
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
from collections import Counter
from pathlib import Path
from typing import Any

from common import machine

from agentenv.rewards.rules.code import CodeReward
from agentenv.rewards.types import Response
from agentenv.sandbox.local.sandbox import LocalSandbox

CONCURRENT = 4
_DRIVER = """
import importlib.util, json, sys, types
extension = types.ModuleType("pyext")  # no longer installable; its only use here is to run a text as a module
class RuntimeModule:
    @staticmethod
    def from_string(name, doc, source):
        module = types.ModuleType(name, doc)
        exec(source, module.__dict__)
        return module
extension.RuntimeModule = RuntimeModule
sys.modules["pyext"] = extension
spec = importlib.util.spec_from_file_location("evaluator", sys.argv[1])
evaluator = importlib.util.module_from_spec(spec)
spec.loader.exec_module(evaluator)
evaluator.reliability_guard = lambda *_: None  # it works once in a process, and the programs here are harmless
verdicts, told = [], sys.stdout
sys.stdout = sys.stderr
for row, code in json.load(sys.stdin):
    if sys.argv[2] == "apps":
        results = evaluator.run_test(problem={"input_output": row}, test=code)
    else:
        results, _ = evaluator.run_test({"input_output": json.dumps(row)}, test=code)
    verdicts.append(bool(results) and all(one is True for one in results))
told.write(json.dumps(verdicts))
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


def cases(count: int, generator: random.Random) -> list[tuple[str, dict[str, Any], str]]:
    """Return (form, row as the evaluators take it, program)."""
    made = []
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
    kind = "functional" if "fn_name" in row else "stdin"
    tests = [{"input": row["inputs"][0], "output": row["outputs"][0], "testtype": kind}]
    return {"public_test_cases": [], "private_test_cases": tests, "metadata": {"func_name": row.get("fn_name")}}


def _fault(form: str, row: dict[str, Any], code: str, official: bool) -> str:
    """Return the fault of an evaluator that explains its verdict, or an empty text."""
    right = row["outputs"][0]
    if "fn_name" in row:
        got = ast.literal_eval(code.partition("return ")[2])
        if form == "apps" and official and isinstance(right, list) and len(right) > 1 and got == right[0]:
            return "the first of several values"
        if not official and "(" in repr(got):
            return "a tuple inside of another value"
    elif form == "apps" and official:
        printed = ast.literal_eval(code.partition("write(")[2].splitlines()[0][:-1])
        words, spoken = right.split(), printed.split()
        if len(words) != len(spoken) or (set(words) == set(spoken) and Counter(words) != Counter(spoken)):
            return "repetitions that do not count"
        if all(word.lstrip("-").isdigit() for word in words + spoken):
            return "a tolerance for integers"
    return ""


def official_verdicts(evaluator: Path, form: str, made: list[Any]) -> list[bool]:
    """Return the verdicts of an evaluator."""
    command = [sys.executable, "-c", _DRIVER, str(evaluator), form]
    done = subprocess.run(
        command, input=json.dumps(made), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    return [bool(one) for one in json.loads(done.stdout)]


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


async def official_check(row: dict[str, Any], code: str) -> bool:
    """Return True if the row's own `check` passes in a process."""
    program = f"{row['prompt']}\n    pass\n{code}\n{row['test']}\ncheck({row['entry_point']})\nprint('the end')"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 20)
    except TimeoutError:
        process.kill()
        await process.wait()
        return False
    return process.returncode == 0 and out.endswith(b"the end\n")


async def run(options: argparse.Namespace) -> int:
    """Compare all verdicts; return the number of those that differ without a known fault."""
    generator, slots = random.Random(options.seed), asyncio.Semaphore(CONCURRENT)
    differ = 0
    print(machine())
    async with LocalSandbox(preimport=("pytest",)) as sandbox:
        reward = CodeReward(sandbox=sandbox, scale="binary")

        async def ours(row: dict[str, Any], code: str) -> bool:
            async with slots:
                prompt = row.pop("prompt", "")
                graded = await reward.grade(Response(f"```python\n{code}\n```", None, prompt, row))
                return graded.reward == 1.0

        async def both(row: dict[str, Any], code: str) -> tuple[bool, bool]:
            async with slots:
                official = await official_check(row, code)
            return official, await ours(dict(row), code)

        made = cases(options.cases, generator)
        evaluators = {
            "apps": (options.apps, "eval/testing_util.py"),
            "livecodebench": (options.livecodebench, "lcb_runner/evaluation/testing_util.py"),
        }
        for form, (folder, name) in evaluators.items():
            own = [(row, code) for kind, row, code in made if kind == form]
            if folder is None or not own:
                continue
            official = official_verdicts(folder / name, form, own)
            verdicts = await asyncio.gather(*(ours(our_row(form, row), code) for row, code in own))
            faults: Counter[str] = Counter()
            for (row, code), theirs, mine in zip(own, official, verdicts, strict=True):
                if theirs == mine:
                    continue
                if why := _fault(form, row, code, theirs):
                    faults[why] += 1
                    continue
                differ += 1
                print(f"{form}: it says {theirs}, agentenv {mine}: {row['outputs']!r}, {code!r}")
            known = "; ".join(f"{count} by {why}" for why, count in faults.items()) or "none"
            print(f"{form}: {len(own)} programs, {sum(official)} right; verdicts that differ by its faults: {known}")
        if options.humaneval is not None:
            with gzip.open(options.humaneval / "data/HumanEval.jsonl.gz", "rt") as file:
                rows = [json.loads(line) for line in file]
            pairs = [(row, code) for row in rows for code in programs_of(row, options.mutants, generator)]
            results = await asyncio.gather(*(both(row, code) for row, code in pairs))
            changed = 0
            for (row, code), (theirs, mine) in zip(pairs, results, strict=True):
                if theirs != mine and changes_helper(row, code):
                    changed += 1
                elif theirs != mine:
                    differ += 1
                    print(f"{row['task_id']}: its check says {theirs}, agentenv {mine}: {code!r}")
            right = sum(one for one, _ in results)
            print(f"humaneval: {len(pairs)} programs of {len(rows)} rows, {right} right; verdicts that differ because")
            print(f"the program changes a helper of the prompt: {changed}")
    print(f"verdicts that differ without a known fault: {differ}")
    return differ


def main() -> None:
    """Parse the command line and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name in ("apps", "livecodebench", "humaneval"):
        parser.add_argument(f"--{name}", type=Path, help="a checkout of its repository")
    parser.add_argument("--cases", type=int, default=1000, help="programs of APPS and LiveCodeBench")
    parser.add_argument("--mutants", type=int, default=3, help="mutants of each solution of HumanEval")
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(1 if asyncio.run(run(parser.parse_args())) else 0)


if __name__ == "__main__":
    main()
