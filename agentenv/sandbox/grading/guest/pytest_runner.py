"""Runs pytest in the solution's interpreter and reports each test as it ends. Runs inside the sandbox.

The source of this file, after that of `codec.py` and `serve.py`, is the program of the sandbox. The solution can change
any of it at run time.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from agentenv.sandbox.grading.codec import dump_line
from agentenv.sandbox.grading.guest.serve import Lines, Watch, tell_lack

_MAX_REPORT = 3000


class Reporter:
    """A pytest plugin that writes a line per phase of each test."""

    def __init__(self, channel: Lines, wanted: list[str]) -> None:
        self._channel = channel
        self._wanted = {node: place for place, node in enumerate(wanted)}
        self.has_begun = False

    def pytest_cmdline_parse(self) -> None:
        """Report that pytest has loaded its own plugins; from here on, a conftest may import the solution."""
        sys.path.append(os.getcwd())  # after the libraries, so that no file of the policy shadows one
        self.has_begun = True
        self._channel.send(dump_line({"begin": True}))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Run only the requested tests, in the requested order."""
        items[:] = sorted(
            (item for item in items if item.nodeid in self._wanted), key=lambda item: self._wanted[item.nodeid]
        )

    def pytest_collectreport(self, report: Any) -> None:
        """Report why a file could not be collected."""
        if report.failed:
            self._channel.send(dump_line({"collect": report.nodeid, "detail": str(report.longrepr)[-_MAX_REPORT:]}))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Report the outcome of one phase of a test."""
        outcome = "expected failure" if hasattr(report, "wasxfail") else report.outcome
        detail = "" if report.passed else str(report.longrepr)[-_MAX_REPORT:]
        tell_lack(detail)
        self._channel.send(
            dump_line({"node": report.nodeid, "when": report.when, "outcome": outcome, "detail": detail})
        )


def run_pytest(*, _exit: Callable[[int], Any] = os._exit) -> None:
    """Import pytest and run the tests that standard input names."""
    channel = Lines(0)
    request = next(iter(channel))
    sys.dont_write_bytecode = True
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path += [path for path in request["path"] if path not in sys.path]
    audit = Watch(os.path.abspath(request["solution"]), request["files"])
    reporter = Reporter(channel, request["nodes"])
    sys.addaudithook(audit)
    try:
        import pytest

        code = int(pytest.main([*request["options"], *request["files"]], plugins=[reporter]))
    except Exception as error:
        if reporter.has_begun or isinstance(error, (OSError, MemoryError)):  # may be the host's
            raise
        code, ended = 1, str(error)
    else:
        ended = f"exit code {code}"
    if not reporter.has_begun:
        channel.send(dump_line({"missing": ended}))
        _exit(1)
    channel.send(dump_line({"end": True, "exit": code, "signals": sorted(audit.signals)}))
    _exit(code)
