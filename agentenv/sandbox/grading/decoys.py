"""Decoys: twins of tests with another expectation, which no honest solution passes."""

from __future__ import annotations

import ast
import copy
import random
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

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
"""unittest's assertions that have one."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class Disguised:
    """A test file whose tests and decoys have names that tell nothing."""

    source: bytes
    names: dict[str, str] = field(default_factory=dict)
    """`test_add` or `Class::test_add` to its name there."""
    decoys: dict[str, str] = field(default_factory=dict)
    """The same to the name of its decoy, where it has one."""


def disguise(
    source: bytes, wanted: Iterable[str], *, without: Iterable[str] = (), generator: random.Random | None = None
) -> Disguised:
    """A test file with a decoy beside each wanted test that asserts something.

    Args:
        source: the file.
        wanted: its tests, as `test_add` or `Class::test_add`.
        without: tests that are taken out of it.
        generator: of the names and their order; unforeseeable by default.

    Raises:
        SyntaxError: it is no Python.
    """
    tree, made = ast.parse(source), Disguised(source)
    left_out = _leave_out(tree.body, "", set(without))
    _disguise_body(tree.body, "", made, set(wanted), generator or random.Random(secrets.randbits(64)))
    if made.names or left_out:
        made.source = ast.unparse(tree).encode()
    return made


def _leave_out(body: list[ast.stmt], prefix: str, without: set[str]) -> bool:
    """Take tests out of a body; whether there was one."""
    found = False
    for statement in list(body):
        if isinstance(statement, ast.ClassDef):
            found |= _leave_out(statement.body, f"{prefix}{statement.name}::", without)
        elif isinstance(statement, _Function) and prefix + statement.name in without:
            body.remove(statement)
            found = True
    if not body:
        body.append(ast.Pass())
    return found


def _disguise_body(
    body: list[ast.stmt], prefix: str, made: Disguised, wanted: set[str], generator: random.Random
) -> None:
    for statement in list(body):
        if isinstance(statement, ast.ClassDef):
            _disguise_body(statement.body, f"{prefix}{statement.name}::", made, wanted, generator)
        if not isinstance(statement, _Function) or (name := prefix + statement.name) not in wanted:
            continue
        decoy = copy.deepcopy(statement)
        perturb = _Perturb()
        decoy.body = [perturb.visit(each) for each in decoy.body]
        if not perturb.changes:
            continue
        ast.fix_missing_locations(decoy)
        statement.name, decoy.name = (f"test_{generator.randrange(1 << 32):08x}" for _ in range(2))
        made.names[name], made.decoys[name] = prefix + statement.name, prefix + decoy.name
        body.insert(body.index(statement) + generator.randrange(2), decoy)


class _Perturb(ast.NodeTransformer):
    """Gives every assertion of a test an expectation that is wrong."""

    def __init__(self) -> None:
        self.changes = 0

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        """Another value where one is expected, else the opposite."""
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

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """The opposite of an assertion of unittest's, or another value."""
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
    """An expression of another value that looks alike; no value equals a list of itself."""
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
    return ast.List([expected], ast.Load())
