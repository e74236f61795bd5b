"""Read tests that are Python source, as in HumanEval and MBPP. Each assert becomes a test, run without the solution."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agentenv._util.syntax import parse_source, truth_of
from agentenv.rewards.rules.code.task import SOLUTION_PRELUDE, TEST_PRELUDE, as_items, as_text, parse_column
from agentenv.sandbox.grading import AssertSuite, AssertTest, PytestSuite, TestSuite

_TEST_FILE = "test_row.py"
_BUILTINS = frozenset(dir(builtins))


def human_eval_suite(row: Mapping[str, Any]) -> AssertSuite:
    """Return the tests in the `check` of a HumanEval row.

    The part of the prompt before the required function, imports and helpers, precedes the solution. It precedes the
    tests too: a helper that they call is the prompt's own, never the solution's.

    Raises:
        KeyError, ValueError: a column is missing, or the source has no `check` with asserts.
    """
    entry, prompt = str(row["entry_point"]), str(row.get("prompt") or "")
    before = prompt.partition(f"def {entry}(")[0] if f"def {entry}(" in prompt else ""
    before = before if _body(before) else ""
    sources = split_check(str(row["test"]), entry)
    return AssertSuite((entry,), hidden=tuple(map(AssertTest, sources)), prelude=before, solution_prelude=before)


def split_check(source: str, entry: str) -> list[str]:
    """Return a program per asserting statement of `check`, with the rest of the source and the statements before it.

    Raises:
        ValueError: there is no `check` with asserts on the function `entry`.
    """
    module = parse_source(source)
    checks = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if len(checks) != 1:
        raise ValueError(f"{len(checks)} functions `check` where one is needed")
    check = checks[0]
    around = [node for node in module.body if node is not check]
    sources = []
    for statements in _split_body(check.body, (entry, *(each.arg for each in check.args.args)), around):
        one = ast.FunctionDef("check", check.args, statements, [], None, None)
        sources.append(_source([*around, one, parse_source("check(candidate)").body[0]]))
    if not sources:
        raise ValueError("a `check` without asserts on the solution")
    return sources


def _split_body(
    body: Sequence[ast.stmt], names: Iterable[str], around: Sequence[ast.stmt] = ()
) -> Iterator[list[ast.stmt]]:
    """Yield the statements of each test: those before an asserting statement, and that statement.

    A statement whose asserts cannot depend on these names passes for every program and tests nothing.

    Args:
        body: the statements to split.
        names: the functions of the solution.
        around: statements before them, such as functions that assert.
    """
    depend, asserting = set(names), set[str]()
    setup: list[ast.stmt] = []
    for statement in (*around, *body):
        own = statement not in around
        if own and isinstance(statement, ast.Return | ast.Raise):
            return
        names_used = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        used = {node.id for node in names_used}
        defines = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        depends = bool(used & depend)
        asserts = bool(used & asserting) or any(map(_can_fail, ast.walk(statement)))
        if defines:
            depend |= {statement.name} if depends else set()  # type: ignore[attr-defined]
            asserting |= {statement.name} if asserts else set()  # type: ignore[attr-defined]
        elif own and asserts and depends:
            yield [*setup, statement]
        elif depends:  # it may store or change any value that it names
            depend |= {n.id for n in names_used if isinstance(n.ctx, ast.Store) or n.id not in _BUILTINS}
        if own and (defines or not asserts):
            setup.append(statement)


def _can_fail(node: ast.AST) -> bool:
    """Return True for an assert of names that may be false, and for one that is always false."""
    if not isinstance(node, ast.Assert):
        return False
    if (truth := truth_of(node.test)) is not None:
        return not truth
    return any(isinstance(each, ast.Name) for each in ast.walk(node.test))


def mbpp_suite(row: Mapping[str, Any], visible: Sequence[str], hidden: Sequence[str]) -> TestSuite:
    """Return the asserts of an MBPP row; as pytest tests, which is weaker evidence, if they need classes.

    Raises:
        ValueError: the asserts are not Python, or call nothing of the solution.
    """
    imports = as_items(parse_column("test_imports", row.get("test_imports") or []))
    prelude = "\n".join([*map(as_text, imports), as_text(row.get("test_setup_code") or "")]).strip()
    reference = str(row.get("code") or "")
    known = {*_BUILTINS, *_bound(prelude)}
    named = [name for test in (*visible, *hidden) for name in called(test) if name not in known]
    names = tuple(dict.fromkeys(name for name in named if not reference or name in defined(reference)))
    if not names:
        raise ValueError(f"asserts that call none of {defined(reference)}" if reference else "asserts without a call")
    if not reference and len(names) > 1 and "*" in known:
        raise ValueError(
            f"{prelude!r:.80}, which may define one of {names}: name the imports, or add the column 'code'"
        )
    visible, hidden = (with_asserts(tests, names, prelude) for tests in (visible, hidden))
    if not visible and not hidden:
        raise ValueError("tests without asserts on the solution")
    if any(isinstance(node, ast.ClassDef) and node.name in names for node in _body(reference)):
        bodies = ["\n".join(f"    {line}" for line in test.splitlines()) for test in (*visible, *hidden)]
        functions = [f"def test_{index}():\n{body}\n" for index, body in enumerate(bodies)]
        source = "\n".join([_with_names(parse_source(prelude).body, defined(reference)), *functions])
        nodes = tuple(f"{_TEST_FILE}::test_{index}" for index in range(len(functions)))
        return PytestSuite({_TEST_FILE: source.encode()}, nodes[: len(visible)], nodes[len(visible) :])
    return AssertSuite(
        names,
        tuple(map(AssertTest, visible)),
        tuple(map(AssertTest, hidden)),
        prelude=prelude,
        solution_prelude=prelude,
    )


def _with_names(body: Sequence[ast.stmt], names: Iterable[str]) -> str:
    """Return the source of these statements, which take the names from the solution after their other imports.

    `from solution import *` would also take `pytest_plugins`, fixtures and replacements of built-in functions from it,
    and leave a name that it lacks to an import before.
    """
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom) and not _imports_solution(node)]
    others = [node for node in body if node not in imports]  # these may use what the solution defines
    taking = (
        f"import solution as _solution\nfor _name in {sorted(set(names))!r}:\n    globals().pop(_name, None)\n"
        "    if hasattr(_solution, _name):\n        globals()[_name] = getattr(_solution, _name)\n"
    )
    return "\n".join([_source(imports), taking, _source(others), ""])


def strongest_suite(sources: Sequence[str]) -> TestSuite:
    """Return the tests in sources that use the solution's names, run without the solution if possible.

    Tests that need pytest, a module `solution` or classes of the solution run in its process, which is weaker evidence.

    Raises:
        ValueError: the sources are not Python, test nothing, or are parametrized.
    """
    trees = [parse_source(source) for source in sources]
    names = list(dict.fromkeys(name for tree in trees for name in _free(tree)))
    if any(map(_needs_pytest, trees)) or any(name[:1].isupper() for name in names):
        return _pytest_suite(trees)
    if not names:
        raise ValueError("asserts that use nothing of the solution's")
    tests = [test for source in sources for test in split_tests(source, names)]
    return AssertSuite(
        tuple(names),
        hidden=tuple(map(AssertTest, tests)),
        prelude=TEST_PRELUDE,
        solution_prelude=SOLUTION_PRELUDE,
    )


def split_tests(source: str, names: Iterable[str]) -> list[str]:
    """Return a program per function `test_…`, or per asserting statement without one, each with the rest of the source.

    Raises:
        ValueError: it is not Python, or has no asserts on the functions `names` of the solution.
    """
    body = [node for node in parse_source(source).body if not _imports_solution(node)]
    tests = [node for node in body if _is_test(node)]
    if tests:
        return [_source([node for node in body if node is test or node not in tests]) for test in tests]
    programs = [_source(statements) for statements in _split_body(body, names)]
    if not programs:
        raise ValueError(f"no asserts on {', '.join(names)} in {source!r:.80}")
    return programs


def with_asserts(sources: Iterable[str], names: Iterable[str], prelude: str) -> list[str]:
    """Return the sources that assert something of the functions `names`, by themselves or by functions of the prelude.

    Raises:
        SyntaxError: one is not Python.
    """
    trees = {source: parse_source(source).body for source in sources}
    around = _body(prelude)
    return [
        source
        for source, body in trees.items()
        if any(map(_is_test, body)) or any(_split_body(body, ("candidate", *names), around))
    ]


def _source(body: Sequence[ast.stmt]) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Module(list(body), [])))


def _is_test(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test_")


def _imports_solution(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "solution"


def _names_solution(node: ast.AST) -> bool:
    """Return True for an import of the solution, and for its name in a string, which may be imported or opened."""
    match node:
        case ast.ImportFrom(module="solution") | ast.alias(name="solution"):
            return True
        case ast.Constant(value="solution" | "solution.py"):
            return True
    return False


def _free(tree: ast.Module) -> list[str]:
    """Return the names that a source uses and does not define, which the solution must define."""
    scopes = [symtable.symtable(ast.unparse(tree), _TEST_FILE, "exec")]
    for scope in scopes:  # the list grows
        scopes += scope.get_children()
    used, known = set[str](), {*_BUILTINS, *_bound(TEST_PRELUDE)}
    for scope in scopes:
        for symbol in scope.get_symbols():
            name, at_top = symbol.get_name(), scope is scopes[0]
            if at_top or symbol.is_global():
                used.add(name)
            if (at_top or symbol.is_declared_global()) and (symbol.is_assigned() or symbol.is_imported()):
                known.add(name)
    imports = [node for node in ast.walk(tree) if _imports_solution(node)]
    asked = {alias.asname or alias.name for node in imports for alias in node.names}  # type: ignore[attr-defined]
    free = used - known | asked
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return [node.id for node in sorted(names, key=lambda node: (node.lineno, node.col_offset)) if node.id in free]


def _needs_pytest(tree: ast.Module) -> bool:
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    fixtures = any(isinstance(node, ast.FunctionDef) and _is_test(node) and node.args.args for node in tree.body)
    renamed = any(_imports_solution(node) and any(a.asname for a in node.names) for node in tree.body)  # type: ignore[attr-defined]
    return bool(imported & {"pytest", "unittest", "solution"}) or fixtures or renamed or any(_methods(tree))


def _methods(tree: ast.Module) -> list[str]:
    """Return the tests in classes, as in pytest's node ids."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [f"{each.name}::{test.name}" for each in classes for test in each.body if _is_test(test)]  # type: ignore[attr-defined]


def _pytest_suite(trees: Sequence[ast.Module]) -> PytestSuite:
    """Return a suite with a file per source; one without test functions gets a function per asserting statement."""
    files: dict[str, bytes] = {}
    nodes: list[str] = []
    for index, tree in enumerate(trees):
        if any(isinstance(node, ast.Attribute) and node.attr == "parametrize" for node in ast.walk(tree)):
            raise ValueError("parametrized tests, whose node ids are not in the row")
        free = _free(tree)
        if not (names := [*(node.name for node in tree.body if _is_test(node)), *_methods(tree)]):  # type: ignore[attr-defined]
            imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            others = _source([node for node in tree.body if node not in imports])
            bodies = [parse_source(program).body for program in split_tests(others, [*free, "solution"])]
            functions = [parse_source(f"def test_{number}(): pass").body[0] for number in range(len(bodies))]
            for function, body in zip(functions, bodies, strict=True):
                function.body = body
            tree, names = ast.Module([*imports, *functions], []), [f"test_{number}" for number in range(len(bodies))]
        file = f"test_row_{index}.py"
        body = [node for node in tree.body if not (_imports_solution(node) and node.names[0].name == "*")]  # type: ignore[attr-defined]
        if not free and not any(map(_names_solution, ast.walk(ast.Module(body, [])))):
            raise ValueError("tests that use nothing of the solution's: import the functions by name")
        files[file] = (TEST_PRELUDE + _with_names(body, free)).encode()
        nodes += [f"{file}::{name}" for name in names]
    return PytestSuite(files, hidden=tuple(nodes))


def called(source: str) -> list[str]:
    """Return the names that a source calls, in order, without duplicates.

    Raises:
        ValueError: it is not Python.
    """
    calls = [node.func for node in ast.walk(parse_source(source)) if isinstance(node, ast.Call)]
    plain = [node for node in calls if isinstance(node, ast.Name)]
    return list(dict.fromkeys(node.id for node in sorted(plain, key=lambda node: (node.lineno, node.col_offset))))


def defined(source: str) -> list[str]:
    """Return the functions and classes that a source defines, and the names that it assigns."""
    names: list[str] = []
    for node in _body(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return names


def _bound(source: str) -> list[str]:
    imports = [node for node in _body(source) if isinstance(node, ast.Import | ast.ImportFrom)]
    return [*defined(source), *(name.asname or name.name for node in imports for name in node.names)]


def _body(source: str) -> list[ast.stmt]:
    """Return the statements of a source; none if it is not Python."""
    try:
        tree: ast.Module = parse_source(source)
    except (ValueError, SyntaxError):
        return []
    return tree.body
