"""What holds for all tests: what collecting costs, in seconds and afterwards."""

import gc

SLOW = "mark.slow"


def pytest_ignore_collect(collection_path, config):
    """`-m slow` imports the files that have such tests only; the others are most of the time that collecting takes."""
    without = collection_path.suffix == ".py" and SLOW not in collection_path.read_text()
    return True if without and config.option.markexpr == "slow" else None


def pytest_itemcollected(item):
    """Hold what that relies on: the mark is written out in the file itself."""
    if item.get_closest_marker("slow") and SLOW not in item.path.read_text():
        raise ValueError(f"{item.path}: expected pytest.{SLOW} in the file of a slow test. Write it there.")


def pytest_collection_finish():
    """What is imported and collected by now stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Or nanobind, which looks at the end, says that it leaks."""
    gc.unfreeze()
