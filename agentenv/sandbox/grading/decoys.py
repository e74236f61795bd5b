"""Decoys: copies of tests with a wrong expectation, which no honest solution passes."""

from __future__ import annotations

import ast
import copy
import random
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from agentenv._util.syntax import parse_source, truth_of
from agentenv.sandbox.grading.guest.asserts import BROAD, judges

_OPPOSITE = {
    "assertEqual": "assertNotEqual",
    "assertNotEqual": "assertEqual",
    "assertTrue": "assertFalse",
    "assertFalse": "assertTrue",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
    "assertIn": "assertNotIn",
    "assertNotIn": "assertIn",
    "assertAlmostEqual": "assertNotAlmostEqual",
}
"""The unittest assertions that have an opposite."""
_CATCHERS = {"raises", "assertRaises", "assertRaisesRegex", "suppress"}
"""Functions whose contexts may catch what their body raises."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_MAY_RAISE = (ast.Assert, ast.Attribute, ast.Call, ast.Import, ast.ImportFrom, ast.Raise, ast.Subscript)


@dataclass(slots=True)
class DisguisedFile:
    """A test file in which tests and decoys have random names."""

    source: bytes
    names: dict[str, str] = field(default_factory=dict)
    """New names by old names, such as `test_add` or `Class::test_add`."""
    decoys: dict[str, str] = field(default_factory=dict)
    """Names of the decoys by the old names of their tests."""
    certain: set[str] = field(default_factory=set)
    """Old names of the tests that always reach an assertion, where they do not raise before it."""
    idle: list[str] = field(default_factory=list)
    """Old names of the tests that no program can fail."""


def disguise(
    source: bytes,
    wanted: Iterable[str],
    *,
    without: Iterable[str] = (),
    decoys: bool = True,
    generator: random.Random | None = None,
) -> DisguisedFile:
    """Return a test file with a decoy beside each wanted test that has an assertion.

    A decoy changes one random assertion of those that its test always reaches, so that a solution that is right in
    another one cannot count on it; without one of those, it changes all.

    Args:
        source: the test file.
        wanted: names of tests, such as `test_add` or `Class::test_add`.
        without: names of tests to remove.
        decoys: add decoys.
        generator: source of the names and their order; unpredictable by default.

    Raises:
        SyntaxError: the source is not Python.
    """
    tree, disguised = parse_source(source), DisguisedFile(source)
    removed = _remove_tests(tree.body, "", set(without))
    generator = generator or random.Random(secrets.randbits(64))
    _disguise_body(tree.body, "", disguised, set(wanted), generator if decoys else None)
    if disguised.names or removed:
        disguised.source = ast.unparse(tree).encode()
    return disguised


def _remove_tests(body: list[ast.stmt], prefix: str, without: set[str]) -> bool:
    """Remove tests from a body; return True if there was one."""
    removed = False
    for statement in list(body):
        if isinstance(statement, ast.ClassDef):
            removed |= _remove_tests(statement.body, f"{prefix}{statement.name}::", without)
        elif isinstance(statement, _Function) and prefix + statement.name in without:
            body.remove(statement)
            removed = True
    if not body:
        body.append(ast.Pass())
    return removed


def _disguise_body(
    body: list[ast.stmt], prefix: str, disguised: DisguisedFile, wanted: set[str], generator: random.Random | None
) -> None:
    for statement in list(body):
        if isinstance(statement, ast.ClassDef):
            _disguise_body(statement.body, f"{prefix}{statement.name}::", disguised, wanted, generator)
        if not isinstance(statement, _Function) or (name := prefix + statement.name) not in wanted:
            continue
        # Asserts that are always true, with nothing beside them that may raise, cannot fail.
        nodes = [node for each in statement.body for node in ast.walk(each)]
        true = [node for node in nodes if isinstance(node, ast.Assert) and truth_of(node.test)]
        inside = {part for node in true for part in ast.walk(node)}
        if true and not any(isinstance(node, _MAY_RAISE) for node in nodes if node not in inside):
            disguised.idle.append(name)
        if generator is None:
            continue
        decoy = copy.deepcopy(statement)
        perturb = _Perturb()
        if reached := _reached_assertions(decoy.body):
            disguised.certain.add(name)
            perturb.visit(generator.choice(reached))
        else:
            decoy.body = [perturb.visit(each) for each in decoy.body]
        if not perturb.changes:
            continue
        ast.fix_missing_locations(decoy)
        statement.name, decoy.name = (f"test_{generator.randrange(1 << 32):08x}" for _ in range(2))
        disguised.names[name] = prefix + statement.name
        disguised.decoys[name] = prefix + decoy.name
        body.insert(body.index(statement) + generator.randrange(2), decoy)


def _reached_assertions(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the assertions that every run of a body makes if it does not raise, as far as its statements show."""
    reached: list[ast.stmt] = []
    for statement in body:
        match statement:
            case ast.Assert(test=test) if not isinstance(test, ast.Constant):
                reached.append(statement)
            case ast.Expr(ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name))) if name in _OPPOSITE:
                reached.append(statement)
        if any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            break
    return reached


class _Perturb(ast.NodeTransformer):
    """A transformer that gives a wrong expectation to every assertion, except where its failure may be caught.

    There a decoy would pass with its test: a right program may raise before the assertion is made.
    """

    def __init__(self) -> None:
        self.changes = 0

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        """Replace an expected value by another one, or negate the condition; `assert False` stays as it is."""
        if isinstance(node.test, ast.Constant):
            return node
        self.changes += 1
        match node.test:
            case (
                ast.Compare(ops=[ast.Eq()], comparators=[expected])
                | ast.Compare(ops=[ast.Is()], comparators=[ast.Constant(value=bool()) as expected])
            ) as compare:
                compare.comparators = [other_than(expected)]
            case test:
                node.test = ast.UnaryOp(ast.Not(), test)
        return node

    def visit_With(self, node: ast.With | ast.AsyncWith) -> ast.AST:
        """Leave the body as it is if what it raises may be caught."""
        for item in node.items:
            match item.context_expr:
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=caught) if name in _CATCHERS:
                    if name != "suppress" or not any(isinstance(e, ast.Name) and e.id in BROAD for e in caught):
                        return node
        return self.generic_visit(node)

    visit_AsyncWith = visit_With

    def visit_Try(self, node: ast.Try | ast.TryStar) -> ast.AST:
        """Leave the body as it is if there are handlers, other than those that take any error for right."""
        body, node.body = node.body, [] if any(map(judges, node.handlers)) else node.body
        self.generic_visit(node)
        node.body = body
        return node

    visit_TryStar = visit_Try

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace a unittest assertion by its opposite, or its expected value by another one."""
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr="assertEqual"), args=[_, expected, *_]):
                self.changes += 1
                node.args[1] = other_than(expected)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)) if name in _OPPOSITE:
                self.changes += 1
                node.func.attr = _OPPOSITE[name]  # type: ignore[attr-defined]
        return node


def other_than(expected: ast.expr) -> ast.expr:
    """Return an expression of a similar but different value; no value equals a list of itself and None."""
    match expected:
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            return ast.Constant(value + 1 if value + 1 != value else 0)
        case ast.Constant(value=str(value)):
            return ast.Constant(f"{value}a")
        case ast.Constant(value=bytes(value)):
            return ast.Constant(value + b"a")
        case ast.Constant(value=None):
            return ast.Constant(0)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) as operand):
            return operand if operand.value else ast.Constant(1)
        case ast.List(elts=[_, *_] as items):
            return ast.List([*items[:-1], other_than(items[-1])], ast.Load())
        case ast.Tuple(elts=[_, *_] as items):
            return ast.Tuple([*items[:-1], other_than(items[-1])], ast.Load())
    return ast.List([expected, ast.Constant(None)], ast.Load())
