"""Settings of all tests: signals, the cost of collection, and the tests that `make test` leaves out."""

import gc
import signal

import pytest
from hypothesis import HealthCheck, settings

from tests.chat.families import ONE_OF_EACH, Family
from tests.peers.matrix import cell, lost, pytest_runtest_logreport  # noqa: F401

# A busy machine is not a failure. The examples are the same each time; `make fuzz` tries others.
settings.register_profile("agentenv", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("fuzz", settings.get_profile("agentenv"), derandomize=False, print_blob=True)
settings.load_profile("agentenv")

SLOW = "mark.slow"
LONGEST_FIRST = (
    "test_docs.py", "test_planted.py", "test_verl.py", "test_ray.py", "test_invariants.py", "test_weight_sync.py",
    "test_vllm_real.py", "test_train.py",
    "test_run_faults.py", "test_files.py", "test_with_molt.py", "test_endpoint_run.py",
    "test_run.py", "test_stalls.py", "test_tiny_math.py", "test_ranks.py", "test_bridge.py",
    "test_train_faults.py", "test_escapes.py", "test_sandbox_faults.py", "test_rollout.py",
)  # fmt: skip
"""Files whose tests take long together. They start first, so that no process ends alone with one of them."""
NEVER_AT_ONCE = tuple(
    f"tests/sandbox/{name}.py" for name in ("test_sandbox_faults", "test_escapes", "grading/test_cheats")
)
"""The first one makes a program run out of memory; the sandbox then takes that for the end of other killed programs."""


def pytest_configure(config):
    """Restore the signals that a shell's background jobs (Ctrl-C) and `nohup` (hangup) ignore: tests send them."""
    config.left_out = {"long": 0, "slow": 0}
    gc.disable()  # until all is collected: a fifth of the collection's time
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_ignore_collect(collection_path, config):
    """With `-m slow`, import only the files that have slow tests: the others take most of the collection's time."""
    without = collection_path.suffix == ".py" and SLOW not in collection_path.read_text()
    return True if without and config.option.markexpr == "slow" else None


def pytest_itemcollected(item):
    """Check what `pytest_ignore_collect` relies on: the mark is written out in the file of a slow test."""
    if item.get_closest_marker("slow") and SLOW not in item.path.read_text():
        raise ValueError(f"{item.path}: expected pytest.{SLOW} in the file of a slow test. Write it there.")


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config, log):
    """Give the files of NEVER_AT_ONCE to one process."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return NEVER_AT_ONCE[0] if file in NEVER_AT_ONCE else file

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave one template family of each kind to `make test`, and start the longest files first."""
    for item in items:
        family = item.callspec.params.get("family") if hasattr(item, "callspec") else None
        if isinstance(family, Family) and family not in ONE_OF_EACH:
            item.add_marker("long")
    rank = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_deselected(items):
    """Count the tests that a marker expression leaves out."""
    for item in items:
        kind = "slow" if item.get_closest_marker("slow") else "long" if item.get_closest_marker("long") else None
        if kind is not None:
            item.config.left_out[kind] += 1


def pytest_collection_finish():
    """Freeze what is imported and collected by now: the garbage collector need not look through it again."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session):
    """Send the counts of a worker process to its controller."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Receive the counts of a worker process of pytest-xdist."""
    node.config.left_out = getattr(node, "workeroutput", {}).get("left_out", node.config.left_out)


def pytest_terminal_summary(terminalreporter, config):
    """Name on one line what a marker expression left out, and the command that runs it."""
    num_long, num_slow = config.left_out["long"], config.left_out["slow"]
    if num_long or num_slow:
        terminalreporter.write_line(f"left out: {num_long} long and {num_slow} slow tests; `make test-all` runs them")


def pytest_unconfigure():
    """Unfreeze, or nanobind, which looks at the end, reports leaks."""
    gc.unfreeze()
