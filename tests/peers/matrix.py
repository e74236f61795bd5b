"""The fixture `cell`: what a test with a peer's own code compared becomes a cell of docs/interop/matrix.md.

A test calls it after its last assertion, with figures that it counted in what it compared::

    def test_tokens_are_those_of_our_trajectories(trained, cell):
        ...
        cell("math_retry", "TRL", "GRPOTrainer, rollout_func", versions("trl"), episodes=len(rows), equal_masks=...)

The cell is kept only if the test passes. `make matrix` runs these tests and writes the data and the page.
"""

import datetime
import json
import os
from pathlib import Path

import pytest

VARIABLE = "AGENTENV_MATRIX"
"""Names the file that the cells are appended to, one JSON object a line; without it nothing is written."""


@pytest.fixture
def cell(record_property, request):
    """Return a function that records a cell: environment, trainer, code of the trainer, versions, figures."""

    def record(environment, trainer, code, versions, **figures):
        assert figures["episodes"] > 0, "expected episodes that were compared"
        made = {"environment": environment, "trainer": trainer, "code": code, "versions": versions, "figures": figures}
        test = request.node.nodeid.partition("[")[0]
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        record_property("cell", {**made, "test": test, "date": day})

    return record


def pytest_runtest_logreport(report):
    """Append the cells of a test that passed; pytest-xdist's workers leave it to the process that started them."""
    path = os.environ.get(VARIABLE)
    if path and report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(path).open("a") as file:
            for name, value in report.user_properties:
                if name == "cell":
                    file.write(json.dumps(value) + "\n")
