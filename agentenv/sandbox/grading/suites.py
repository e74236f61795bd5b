"""Test suites. Visible tests are those whose results a model may read; of hidden ones it learns at most a count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from agentenv.errors import ConfigError
from agentenv.sandbox.grading._codec import CodecError, encode
from agentenv.sandbox.grading.compare import EXACT, Checker, Comparison, TextMode


def _plain(where: str, value: Any) -> None:
    """Refuse what could not cross into the sandbox, or never equal what comes out of it."""
    try:
        encode(value)
    except CodecError as error:
        raise ConfigError(
            f"{where}: expected plain values, got {value!r:.200}: {error}. Use an AssertSuite for other objects."
        ) from error


def _some(suite: Any, kind: type[Any], visible: tuple[Any, ...], hidden: tuple[Any, ...]) -> None:
    name = type(suite).__name__
    for field_name, tests in (("visible", visible), ("hidden", hidden)):
        if not isinstance(tests, tuple):
            raise ConfigError(f"{name}.{field_name}: expected a tuple of tests, got {tests!r:.200}. Make it one.")
        for test in tests:
            if not isinstance(test, kind):
                told = f"{name}.{field_name}: expected {kind.__name__} each, got {test!r:.200}"
                raise ConfigError(f"{told}. Wrap it." if kind is not str else f"{told}. Name the node id.")
    if not visible and not hidden:
        raise ConfigError(f"{name}: expected at least one test, got none. A program that nothing checks has no score.")


@dataclass(frozen=True, slots=True)
class StdioTest:
    """What a program reads, and what it must print."""

    stdin: str
    expected: str
    """Line ends are newlines, as Python prints them."""


@dataclass(frozen=True, slots=True)
class StdioSuite:
    """A program that reads standard input and prints; one execution per test, side by side."""

    visible: tuple[StdioTest, ...] = ()
    hidden: tuple[StdioTest, ...] = ()
    mode: TextMode = "lines"
    comparison: Comparison = EXACT
    """Its tolerance is that of the mode `floats`."""
    checker: Checker | None = None
    """Judges instead of `mode`: (stdin, expected, printed) to a bool, here and not in the sandbox."""

    def __post_init__(self) -> None:
        _some(self, StdioTest, self.visible, self.hidden)
        if self.mode not in ("exact", "lines", "tokens", "floats"):
            raise ConfigError(
                f"StdioSuite.mode: expected exact, lines, tokens or floats, got {self.mode!r}. Choose one."
            )


@dataclass(frozen=True, slots=True)
class FunctionTest:
    """A call, and the value that it must return."""

    args: tuple[Any, ...]
    expected: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.args, tuple):
            raise ConfigError(f"FunctionTest.args: expected a tuple, got {self.args!r:.200}. Put it into one.")
        for name in ("args", "expected"):
            _plain(f"FunctionTest.{name}", getattr(self, name))
        _plain("FunctionTest.kwargs", dict(self.kwargs))


@dataclass(frozen=True, slots=True)
class FunctionSuite:
    """A function whose values are compared outside of the sandbox; a whole batch of calls in one execution."""

    entry_point: str
    """`solve`; or `Solution.solve`, which is called on a fresh instance each time."""
    visible: tuple[FunctionTest, ...] = ()
    hidden: tuple[FunctionTest, ...] = ()
    comparison: Comparison = EXACT
    checker: Checker | None = None
    """Judges instead of `comparison`: (arguments as a tuple, expected, got) to a bool, here and not in the sandbox."""
    prelude: str = ""
    """Python source that runs before the solution in its module, as imports that a dataset takes for granted."""
    batch: int = 32
    """Calls in one execution; what one call leaves behind the next one meets. 1 keeps them apart."""

    def __post_init__(self) -> None:
        _some(self, FunctionTest, self.visible, self.hidden)
        if self.batch < 1:
            raise ConfigError(f"FunctionSuite.batch: expected 1 or more, got {self.batch!r}. Raise it.")
        if not all(name.isidentifier() for name in self.entry_point.split(".")):
            raise ConfigError(
                f"FunctionSuite.entry_point: expected the name of a function, got {self.entry_point!r}. Correct it."
            )


@dataclass(frozen=True, slots=True)
class AssertTest:
    """Python source that calls the candidate and asserts; functions that it names `test_…` are called."""

    source: str


@dataclass(frozen=True, slots=True)
class AssertSuite:
    """Tests as asserts, run in a sandbox of their own; what they call is a proxy of the solution's function.

    Plain values cross, as do exceptions by their built-in class; functions, classes, generators and identity do not.
    """

    names: tuple[str, ...]
    """The solution's functions that tests call. The first is `candidate`, too."""
    visible: tuple[AssertTest, ...] = ()
    hidden: tuple[AssertTest, ...] = ()
    prelude: str = ""
    """Python source that runs before each test, and does not know the solution."""
    solution_prelude: str = ""
    """Python source that runs before the solution in its module."""
    in_place: bool = False
    """Whether changes of list, dict, set and bytearray arguments reach the test. An expectation that a test computes
    from an argument after the call is then the solution's to choose."""

    def __post_init__(self) -> None:
        _some(self, AssertTest, self.visible, self.hidden)
        if not isinstance(self.names, tuple) or not self.names or not all(name.isidentifier() for name in self.names):
            raise ConfigError(f"AssertSuite.names: expected a tuple of function names, got {self.names!r}. Correct it.")


@dataclass(frozen=True, slots=True)
class PytestSuite:
    """Test files that pytest runs in the interpreter that imports the solution: its verdicts are evidence, no proof.

    The sandbox must have pytest: `LocalSandbox(preimport=("pytest",))`. Grade the reference solution once before a
    training: it passes only if every node id is reported and every decoy fails.
    """

    files: Mapping[str, bytes]
    """Trusted test files by relative name, with what they import or read beside the solution. They replace files of the
    same name, and a configuration of pytest or of Python counts only if it is here."""
    visible: tuple[str, ...] = ()
    """Node ids, as `test_add.py::test_zero[1]`, fixed beforehand on a reference solution."""
    hidden: tuple[str, ...] = ()
    solution: str = "solution.py"
    """Where the program goes."""
    workspace: Mapping[str, bytes] = field(default_factory=dict)
    """Other files that the policy left: untrusted."""
    decoys: bool = True
    """Whether each test with asserts has a twin with another expectation, which must fail."""

    def __post_init__(self) -> None:
        _some(self, str, self.visible, self.hidden)
        both = (*self.visible, *self.hidden)
        if len(set(both)) != len(both):
            raise ConfigError(f"PytestSuite: expected each node id once, got {sorted(both)!r:.400}. Remove the others.")
        unknown = sorted({node.split("::")[0] for node in both} - set(self.files))
        if unknown:
            raise ConfigError(f"PytestSuite: expected node ids in its files, got {unknown!r:.400}. Add the files.")
        if self.solution in self.files:
            raise ConfigError(f"PytestSuite.solution: expected a name that no test file has, got {self.solution!r}.")
        for name in (self.solution, *self.files, *self.workspace):
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ConfigError(f"PytestSuite: expected relative file names, got {name!r}. Correct it.")


TestSuite = StdioSuite | FunctionSuite | AssertSuite | PytestSuite
"""Whatever `grade` takes."""
