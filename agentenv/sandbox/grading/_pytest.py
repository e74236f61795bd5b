"""Inside: runs pytest in this interpreter and reports each test as it ends. The solution can change all of it.

This text, after those of `_codec.py` and `_serve.py`, is the program that a sandbox runs; nothing imports it.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from agentenv.sandbox.grading._codec import dump_line
from agentenv.sandbox.grading._serve import Lines, Watch

_MAX_REPORT = 3000


class Audit(Watch):
    """Notes what the solution does to the tests, too, as far as the interpreter tells."""

    def __init__(self, solution: str, tests: list[str]) -> None:
        super().__init__(os.path.abspath(solution))
        self._tests = {os.path.abspath(test) for test in tests}

    def concerned(self, event: str, args: tuple[Any, ...]) -> bool:
        """Opening a test file is, too."""
        if event == "open":
            return isinstance(args[0], str) and os.path.abspath(args[0]) in self._tests
        return super().concerned(event, args)

    def signal(self, event: str) -> str:
        """The name that it is noted by."""
        return "test_file_open" if event == "open" else super().signal(event)


class Reporter:
    """A plugin of pytest's that writes a line per phase of each test."""

    def __init__(self, channel: Lines, wanted: list[str]) -> None:
        self._channel = channel
        self._wanted = {node: place for place, node in enumerate(wanted)}

    def pytest_collection(self) -> None:
        """Say that pytest works; what it imports next is the solution's doing."""
        self._channel.send(dump_line({"begin": True}))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Run what is asked for, in that order."""
        items[:] = sorted(
            (item for item in items if item.nodeid in self._wanted), key=lambda item: self._wanted[item.nodeid]
        )

    def pytest_collectreport(self, report: Any) -> None:
        """Say why a file could not be collected."""
        if report.failed:
            self._channel.send(dump_line({"collect": report.nodeid, "detail": str(report.longrepr)[-_MAX_REPORT:]}))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Say how one phase of a test ended."""
        outcome = "expected failure" if hasattr(report, "wasxfail") else report.outcome
        detail = "" if report.passed else str(report.longrepr)[-_MAX_REPORT:]
        self._channel.send(
            dump_line({"node": report.nodeid, "when": report.when, "outcome": outcome, "detail": detail})
        )


def run_pytest(*, _exit: Callable[[int], Any] = os._exit) -> None:
    """Import pytest from where it is, then let it run the tests that standard input names."""
    channel = Lines(0)
    request = next(iter(channel))
    sys.dont_write_bytecode = True
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path += [path for path in request["path"] if path not in sys.path]
    try:
        import pytest
    except ImportError as error:
        sys.stderr.write(f"{error}. Open the sandbox with preimport=('pytest',).\n")
        sys.stderr.flush()
        _exit(1)
    audit = Audit(request["solution"], request["files"])
    sys.path.append(os.getcwd())  # after the libraries, so that no file of the policy's shadows one
    sys.addaudithook(audit)
    reporter = Reporter(channel, request["nodes"])
    code = int(pytest.main([*request["options"], *request["files"]], plugins=[reporter]))
    channel.send(dump_line({"end": True, "exit": code, "signals": sorted(audit.signals)}))
    _exit(code)
