"""Tests that are Python source, as of HumanEval and MBPP. Each assert becomes a test, run where no solution is."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.rewards.code.task import TEST_PRELUDE, prelude_for
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


def strongest_suite(sources: Sequence[str]) -> TestSuite:
    """The tests in sources that know nothing but the solution's names; run where no solution is, if they can be.

    They can, unless they need pytest, a module `solution` or classes of the solution's: then they are run beside it,
    which is weaker evidence.

    Raises:
        ValueError: the sources are no Python, test nothing, or are parametrised.
    """
    trees = [ast.parse(source) for source in sources]
    names = list(dict.fromkeys(name for tree in trees for name in _free(tree)))
    if any(map(_needs_pytest, trees)) or any(name[:1].isupper() for name in names):
        return _pytest_suite(trees)
    if not names:
        raise ValueError("asserts that use nothing of the solution's")
    tests = [test for source in sources for test in split_tests(source)]
    return AssertSuite(
        tuple(names),
        hidden=tuple(map(AssertTest, tests)),
        prelude=TEST_PRELUDE,
        solution_prelude=prelude_for(*names),
    )


def split_tests(source: str) -> list[str]:
    """A program per function `test_…`, or without one per statement that asserts, each with all else that it needs.

    Raises:
        ValueError: it is no Python, or has neither.
    """
    body = [node for node in ast.parse(source).body if not _imports_solution(node)]
    tests = [node for node in body if _is_test(node)]
    if tests:
        return [_source([node for node in body if node is test or node not in tests]) for test in tests]
    setup: list[ast.stmt] = []
    programs = []
    for statement in body:
        if any(isinstance(node, ast.Assert) for node in ast.walk(statement)) and not _defines(statement):
            programs.append(_source([*setup, statement]))
        else:
            setup.append(statement)
    if not programs:
        raise ValueError(f"no asserts in {source!r:.80}")
    return programs


def _source(body: Sequence[ast.stmt]) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Module(list(body), [])))


def _is_test(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test_")


def _defines(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _imports_solution(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "solution"


def _free(tree: ast.Module) -> list[str]:
    """Names that a source uses and gets from nowhere, so from the solution."""
    known = {*dir(builtins), *_bound(TEST_PRELUDE)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                known.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                known.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names) if not _imports_solution(node):
                known.update((alias.asname or alias.name).partition(".")[0] for alias in names)
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return [node.id for node in sorted(used, key=lambda node: (node.lineno, node.col_offset)) if node.id not in known]


def _needs_pytest(tree: ast.Module) -> bool:
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    fixtures = any(isinstance(node, ast.FunctionDef) and _is_test(node) and node.args.args for node in tree.body)
    renamed = any(_imports_solution(node) and any(a.asname for a in node.names) for node in tree.body)  # type: ignore[attr-defined]
    return bool(imported & {"pytest", "unittest", "solution"}) or fixtures or renamed or any(_methods(tree))


def _methods(tree: ast.Module) -> list[str]:
    """Tests in classes, as in pytest's node ids."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [f"{each.name}::{test.name}" for each in classes for test in each.body if _is_test(test)]  # type: ignore[attr-defined]


def _pytest_suite(trees: Sequence[ast.Module]) -> PytestSuite:
    """Each source as a file; one without test functions has a function per statement that asserts."""
    files: dict[str, bytes] = {}
    nodes: list[str] = []
    for index, tree in enumerate(trees):
        if any(isinstance(node, ast.Attribute) and node.attr == "parametrize" for node in ast.walk(tree)):
            raise ValueError("parametrised tests, whose node ids a row does not tell")
        if not (names := [*(node.name for node in tree.body if _is_test(node)), *_methods(tree)]):  # type: ignore[attr-defined]
            bodies = [ast.parse(program).body for program in split_tests(ast.unparse(tree))]
            functions = [ast.parse(f"def test_{number}(): pass").body[0] for number in range(len(bodies))]
            for function, body in zip(functions, bodies, strict=True):
                function.body = body  # type: ignore[attr-defined]
            tree, names = ast.Module(functions, []), [f"test_{number}" for number in range(len(bodies))]
        file = f"test_row_{index}.py"
        files[file] = f"{TEST_PRELUDE}from solution import *\n{_source(tree.body)}\n".encode()
        nodes += [f"{file}::{name}" for name in names]
    return PytestSuite(files, hidden=tuple(nodes))


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
