"""What holds for all tests: which signals are heeded, and what collecting costs, in seconds and afterwards."""

import gc
import signal

SLOW = "mark.slow"
LONGEST_FIRST = (
    "test_readme.py", "test_ray.py", "test_invariants.py", "test_weight_sync.py", "test_vllm_real.py", "test_train.py",
    "test_run_faults.py", "test_files.py", "test_endpoint_vllm.py", "test_with_molt.py", "test_endpoint_run.py",
    "test_run.py", "test_engine_faults.py", "test_stalls.py", "test_tiny_math.py", "test_ranks.py", "test_bridge.py",
    "test_train_faults.py", "test_escapes.py", "test_sandbox_faults.py", "test_rollout.py", "test_server_files.py",
)  # fmt: skip
"""Files whose tests take long together; begun last, one process would end with them alone."""


def pytest_configure():
    """A shell's background jobs ignore Ctrl-C, and `nohup`'s a hangup, which tests send to themselves and to others."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_ignore_collect(collection_path, config):
    """`-m slow` imports the files that have such tests only; the others are most of the time that collecting takes."""
    without = collection_path.suffix == ".py" and SLOW not in collection_path.read_text()
    return True if without and config.option.markexpr == "slow" else None


def pytest_itemcollected(item):
    """Hold what that relies on: the mark is written out in the file itself."""
    if item.get_closest_marker("slow") and SLOW not in item.path.read_text():
        raise ValueError(f"{item.path}: expected pytest.{SLOW} in the file of a slow test. Write it there.")


def pytest_collection_modifyitems(items):
    """Order files by how long they take, as `--no-loadscope-reorder` then hands them out."""
    rank = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_collection_finish():
    """What is imported and collected by now stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Or nanobind, which looks at the end, says that it leaks."""
    gc.unfreeze()
