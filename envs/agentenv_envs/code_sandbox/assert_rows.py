"""HumanEval and MBPP: tests that are Python source. Each assert becomes a test of its own, run where no solution is."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.sandbox.grading import AssertSuite, AssertTest, PytestSuite, TestSuite

_TEST_FILE = "test_row.py"


def human_eval_suite(row: Mapping[str, Any]) -> AssertSuite:
    """The tests in the `check` of a HumanEval row.

    What the prompt has before the function that is asked for, imports and helpers, is there before the solution.

    Raises:
        KeyError, ValueError: a column lacks, or the source has no `check` with asserts.
    """
    entry, prompt = str(row["entry_point"]), str(row.get("prompt") or "")
    before = prompt.partition(f"def {entry}(")[0] if f"def {entry}(" in prompt else ""
    if not _compiles(before):
        before = ""
    sources = split_check(str(row["test"]))
    helpers = [name for name in defined(before) if any(name in called(source) for source in sources)]
    return AssertSuite(
        (entry, *(name for name in helpers if name != entry)),
        hidden=tuple(AssertTest(source) for source in sources),
        solution_prelude=before,
    )


def split_check(source: str) -> list[str]:
    """A program per statement of `check` that asserts: with all else of the source, and what stands before it there.

    Raises:
        ValueError: there is no `check` with asserts.
    """
    module = ast.parse(source)
    checks = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if len(checks) != 1:
        raise ValueError(f"{len(checks)} functions `check` where one is needed")
    check = checks[0]
    around = [node for node in module.body if node is not check]
    setup: list[ast.stmt] = []
    sources = []
    for statement in check.body:
        if not any(isinstance(node, ast.Assert) for node in ast.walk(statement)):
            setup.append(statement)
            continue
        one = ast.FunctionDef("check", check.args, [*setup, statement], [], None, None)
        program = ast.Module([*around, one, ast.parse("check(candidate)").body[0]], [])
        sources.append(ast.unparse(ast.fix_missing_locations(program)))
    if not sources:
        raise ValueError("a `check` without asserts")
    return sources


def mbpp_suite(row: Mapping[str, Any], visible: Sequence[str], hidden: Sequence[str]) -> TestSuite:
    """The asserts of an MBPP row; by pytest where they need classes of the solution's, which is weaker evidence.

    Raises:
        ValueError: the asserts are no Python, or call nothing of the solution's.
    """
    imports = row.get("test_imports") or []
    prelude = "\n".join([*imports, str(row.get("test_setup_code") or "")]).strip()
    reference = str(row.get("code") or "")
    known = {*dir(builtins), *_bound(prelude)}
    named = [name for test in (*visible, *hidden) for name in called(test) if name not in known]
    names = tuple(dict.fromkeys(name for name in named if not reference or name in defined(reference)))
    if not names:
        raise ValueError(f"asserts that call none of {defined(reference)}" if reference else "asserts without a call")
    if any(isinstance(node, ast.ClassDef) and node.name in names for node in _body(reference)):
        return _by_pytest([*visible, *hidden], len(visible), prelude)
    return AssertSuite(
        names,
        tuple(map(AssertTest, visible)),
        tuple(map(AssertTest, hidden)),
        prelude=prelude,
        solution_prelude=prelude,
    )


def _by_pytest(tests: Sequence[str], num_visible: int, prelude: str) -> PytestSuite:
    bodies = ["\n".join(f"    {line}" for line in test.splitlines()) for test in tests]
    functions = [f"def test_{index}():\n{body}\n" for index, body in enumerate(bodies)]
    source = "\n\n".join([f"from solution import *\n{prelude}\n", *functions])
    nodes = tuple(f"{_TEST_FILE}::test_{index}" for index in range(len(tests)))
    return PytestSuite({_TEST_FILE: source.encode()}, nodes[:num_visible], nodes[num_visible:])


def called(source: str) -> list[str]:
    """Names that are called in a source, in its order, each once.

    Raises:
        ValueError: it is no Python.
    """
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    plain = [node for node in calls if isinstance(node, ast.Name)]
    return list(dict.fromkeys(node.id for node in sorted(plain, key=lambda node: (node.lineno, node.col_offset))))


def defined(source: str) -> list[str]:
    """Functions and classes that a source defines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in _body(source) if isinstance(node, kinds)]


def _bound(source: str) -> list[str]:
    imports = [node for node in _body(source) if isinstance(node, ast.Import | ast.ImportFrom)]
    return [*defined(source), *(name.asname or name.name for node in imports for name in node.names)]


def _body(source: str) -> list[ast.stmt]:
    return ast.parse(source).body if _compiles(source) else []


def _compiles(source: str) -> bool:
    try:
        ast.parse(source)
    except ValueError:
        return False
    except SyntaxError:
        return False
    return True
