"""Test suites. A model may see the results of visible tests; of hidden tests it sees at most a count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any

from agentenv.errors import ConfigError
from agentenv.sandbox.grading.codec import CodecError, encode
from agentenv.sandbox.grading.compare import EXACT, TEXT_MODES, Checker, Comparison, TextMode
from agentenv.sandbox.guest.files import check_names


def _check_plain(where: str, value: Any) -> None:
    """Raise if a value cannot be encoded for the sandbox."""
    try:
        encode(value)
    except CodecError as error:
        raise ConfigError(
            f"{where}: expected plain values, got {value!r:.200}: {error}. Use an AssertSuite for other objects."
        ) from error


def _is_name(name: Any) -> bool:
    """Return True for what can name a function."""
    return isinstance(name, str) and name.isidentifier() and not iskeyword(name)


def _check_tests(suite: Any, kind: type[Any], visible: tuple[Any, ...], hidden: tuple[Any, ...]) -> None:
    name = type(suite).__name__
    for field_name, tests in (("visible", visible), ("hidden", hidden)):
        if not isinstance(tests, tuple):
            raise ConfigError(f"{name}.{field_name}: expected a tuple of tests, got {tests!r:.200}.")
        for test in tests:
            if not isinstance(test, kind):
                fix = "Use node ids." if kind is str else f"Wrap it in {kind.__name__}."
                raise ConfigError(
                    f"{name}.{field_name}: expected items of type {kind.__name__}, got {test!r:.200}. {fix}"
                )
    if not visible and not hidden:
        raise ConfigError(
            f"{name}: expected at least one test, got none. Add a test: a program without tests has no score."
        )


@dataclass(frozen=True, slots=True)
class StdioTest:
    """The input of a program and its expected output."""

    stdin: str
    expected: str
    """Lines end in a newline, as Python prints them."""

    def __post_init__(self) -> None:
        for name in ("stdin", "expected"):
            try:
                getattr(self, name).encode(errors="surrogateescape")
            except (AttributeError, UnicodeEncodeError) as error:
                raise ConfigError(
                    f"StdioTest.{name}: expected text that UTF-8 can encode, got {getattr(self, name)!r:.200}."
                ) from error


@dataclass(frozen=True, slots=True)
class StdioSuite:
    """Tests of a program that reads standard input and prints; one execution per test, concurrently."""

    visible: tuple[StdioTest, ...] = ()
    hidden: tuple[StdioTest, ...] = ()
    mode: TextMode = "lines"
    comparison: Comparison = EXACT
    """Tolerance of the mode `floats`."""
    checker: Checker | None = None
    """Replaces `mode`: (stdin, expected, printed) to a bool; runs outside the sandbox."""
    any_exit_code: bool = False
    """Accept the right output of a program that ends with another exit code than 0, but not by an exception."""

    def __post_init__(self) -> None:
        _check_tests(self, StdioTest, self.visible, self.hidden)
        if self.mode not in TEXT_MODES:
            raise ConfigError(
                f"StdioSuite.mode: expected one of {', '.join(TEXT_MODES)}, got {self.mode!r}. Choose one."
            )


@dataclass(frozen=True, slots=True)
class FunctionTest:
    """A call and its expected value."""

    args: tuple[Any, ...]
    expected: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.args, tuple):
            raise ConfigError(f"FunctionTest.args: expected a tuple, got {self.args!r:.200}. Wrap it in a tuple.")
        for name in ("args", "expected"):
            _check_plain(f"FunctionTest.{name}", getattr(self, name))
        _check_plain("FunctionTest.kwargs", dict(self.kwargs))
        if not all(isinstance(key, str) for key in self.kwargs):
            raise ConfigError(f"FunctionTest.kwargs: expected names as keys, got {dict(self.kwargs)!r:.200}.")


@dataclass(frozen=True, slots=True)
class FunctionSuite:
    """Tests of a function whose values are compared outside the sandbox; one execution per batch of calls."""

    entry_point: str
    """A function such as `solve`, or a method such as `Solution.solve`, which is called on a new instance each time."""
    visible: tuple[FunctionTest, ...] = ()
    hidden: tuple[FunctionTest, ...] = ()
    comparison: Comparison = EXACT
    checker: Checker | None = None
    """Replaces `comparison`: (argument tuple, expected, got) to a bool; runs outside the sandbox."""
    prelude: str = ""
    """Python source that runs before the solution in its module, such as imports that a dataset assumes. What it
    defines of `entry_point` is removed."""
    batch: int = 32
    """Calls in one execution, which share state; 1 isolates each call."""

    def __post_init__(self) -> None:
        _check_tests(self, FunctionTest, self.visible, self.hidden)
        if self.batch < 1:
            raise ConfigError(f"FunctionSuite.batch: expected 1 or more, got {self.batch!r}. Raise it.")
        if not all(map(_is_name, self.entry_point.split("."))):
            raise ConfigError(f"FunctionSuite.entry_point: expected the name of a function, got {self.entry_point!r}.")


@dataclass(frozen=True, slots=True)
class AssertTest:
    """Python source with asserts on the candidate; functions named `test_…` are called."""

    source: str


@dataclass(frozen=True, slots=True)
class AssertSuite:
    """Tests as asserts in a separate sandbox; the functions that they call are proxies of the solution's.

    Plain values are transferred, and exceptions as their nearest built-in class. Functions, classes, generators,
    object identity and changes of arguments are not.
    """

    names: tuple[str, ...]
    """The solution's functions that tests call. The first is also available as `candidate`."""
    visible: tuple[AssertTest, ...] = ()
    hidden: tuple[AssertTest, ...] = ()
    prelude: str = ""
    """Python source that runs before each test, without access to the solution."""
    solution_prelude: str = ""
    """Python source that runs before the solution in its module. What it defines of `names` is removed."""

    def __post_init__(self) -> None:
        _check_tests(self, AssertTest, self.visible, self.hidden)
        if not isinstance(self.names, tuple) or not self.names or not all(map(_is_name, self.names)):
            raise ConfigError(f"AssertSuite.names: expected a tuple of function names, got {self.names!r}.")


@dataclass(frozen=True, slots=True)
class PytestSuite:
    """Test files that pytest runs in the interpreter that imports the solution: verdicts are evidence, not proof.

    The sandbox must have pytest: `LocalSandbox(preimport=("pytest",))`. Grade the reference solution once before
    training: it passes only if every node id is reported and every decoy fails.
    """

    files: Mapping[str, bytes]
    """Trusted test files by relative name, with the other files that they import or read. They replace files of the
    same name. Only configuration files of pytest and Python in here are used."""
    visible: tuple[str, ...] = ()
    """Node ids such as `test_add.py::test_zero[1]`, from a run on a reference solution."""
    hidden: tuple[str, ...] = ()
    solution: str = "solution.py"
    """File name of the program."""
    workspace: Mapping[str, bytes] = field(default_factory=dict)
    """Other files of the policy, untrusted. No test passes if they cannot be written."""
    decoys: bool = True
    """Add a copy of each test with asserts that has a wrong expectation. If both pass, the test is not passed; the
    solution tampered with it, unless all asserts are in a branch or a loop, which may not have been reached, or the
    test catches their errors. They run in the same process as the tests, in random order: set it to False for tests
    that depend on state which others leave in the solution's modules."""

    def __post_init__(self) -> None:
        _check_tests(self, str, self.visible, self.hidden)
        both = (*self.visible, *self.hidden)
        if len(set(both)) != len(both):
            raise ConfigError(
                f"PytestSuite: expected each node id once, got {sorted(both)!r:.400}. Remove the duplicates."
            )
        unknown = sorted({node.split("::")[0] for node in both} - set(self.files))
        if unknown:
            raise ConfigError(f"PytestSuite: expected node ids in its files, got {unknown!r:.400}. Add the files.")
        if self.solution in self.files:
            raise ConfigError(
                f"PytestSuite.solution: expected a name other than those of test files, got {self.solution!r}."
            )
        check_names((self.solution, *self.files), "PytestSuite")


TestSuite = StdioSuite | FunctionSuite | AssertSuite | PytestSuite
"""Any suite that `grade` accepts."""
