"""The fixtures `cell` and `lost`: what a test with a peer's own code found becomes a cell of docs/interop/matrix.md.

A test calls it after its last assertion, with figures that it counted in what it compared::

    def test_tokens_are_those_of_our_trajectories(trained, cell):
        ...
        cell("math_retry", "TRL", "GRPOTrainer, rollout_func", versions("trl"), episodes=len(rows), equal_masks=...)

`lost` records a row of docs/interop/lost-episodes.md. Both are kept only if the test passes. `make matrix` runs these
tests and writes the data and the pages.
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
        record_property("cell", {**made, **origin(request)})

    return record


@pytest.fixture
def lost(record_property, request):
    """Return a function that records what a lost episode does to three right siblings, whose advantages have to be 0.

    `advantages` has two lists of an estimator: what the siblings have, and would have with a reward of 0 in its place.
    Both are of the trainer's own code.
    """

    def record(trainer, code, versions, *, gets, again, counted, advantages):
        for siblings, instead in advantages.values():
            assert siblings == pytest.approx([0.0] * 3, abs=1e-6)
            assert instead == pytest.approx([instead[0]] * 3, abs=1e-6)
        figures = {name: [siblings[0], instead[0]] for name, (siblings, instead) in advantages.items()}
        made = {"trainer": trainer, "code": code, "versions": versions, "gets": gets, "again": again}
        record_property("cell", {**made, "counted": counted, "lost": figures, **origin(request)})

    return record


def origin(request):
    """Name the test and the day."""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"test": request.node.nodeid.partition("[")[0], "date": day}


def pytest_runtest_logreport(report):
    """Append the cells of a test that passed; pytest-xdist's workers leave it to the process that started them."""
    path = os.environ.get(VARIABLE)
    if path and report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(path).open("a") as file:
            for name, value in report.user_properties:
                if name == "cell":
                    file.write(json.dumps(value) + "\n")
