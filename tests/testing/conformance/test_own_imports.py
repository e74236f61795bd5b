"""An import of agentenv's is not the environment's work, whatever it takes."""

import sys
import threading

import pytest

from agentenv import AgentInstance, StepResult
from agentenv._util.paths import PACKAGE, is_own_import
from agentenv.testing.conformance import blocking
from agentenv.testing.conformance.context import ConformanceOptions
from agentenv.testing.conformance.suite import make_context, run_suite


def importer(file):
    """A function of this file that imports a module which takes long."""
    names = {}
    exec(compile("def load():\n    import takes_long", str(file), "exec"), names)
    return names["load"]


@pytest.mark.parametrize(
    ("file", "state"), [(PACKAGE / "tools" / "calling.py", "held"), (PACKAGE.parent / "mine.py", "broken")]
)
def test_only_an_import_of_its_own_counts_as_blocking(tmp_path, monkeypatch, file, state):
    (tmp_path / "takes_long.py").write_text(
        "import time\nfrom agentenv.testing.conformance import blocking\nuntil = time.monotonic() + 0.4\n"
        "while time.monotonic() < until:\n    blocking.was_seen.clear()\n    blocking.was_seen.wait(60)\n"
    )  # it ends when it was looked at, however late a busy machine does that
    was_seen = threading.Event()

    def seen(frame):
        was_seen.set()
        return is_own_import(frame)

    monkeypatch.setattr(blocking, "was_seen", was_seen, raising=False)
    monkeypatch.setattr(blocking, "is_own_import", seen)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "takes_long", raising=False)
    monkeypatch.setattr(blocking, "_NUM_TRIES", 1)
    monkeypatch.setattr(blocking, "BLOCKS_S", 0.3)
    load = importer(file)

    class Late(AgentInstance):
        async def step(self, states):
            load()
            return StepResult(terminated=True)

    context = make_context(ConformanceOptions(Late))
    context.reached = []  # looking for cases would import it before
    (outcome,) = run_suite(context, only=["blocking"])
    assert outcome.state == state, outcome.problems
    del sys.modules["takes_long"]
