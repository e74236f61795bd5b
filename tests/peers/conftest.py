"""The trainers of peers take minutes each: CI runs those of the day, and says which; `make test-peers` runs all.

A test that compares an environment in a trainer records it for the matrix page: see matrix.py.
"""

import datetime
import os

import pytest

DAYS = (("test_verl.py",), ("test_trl.py", "test_prime_rl.py"), ("test_tinker_training.py",), ("test_skyrl.py",))
"""Files of tests, of which CI runs one group a day."""


def pytest_collection_modifyitems(items):
    """Skip the trainers that are not of this day, in CI only."""
    if not os.environ.get("CI"):
        return
    of_today = datetime.datetime.now(datetime.UTC).toordinal() % len(DAYS)
    others = {name for day, names in enumerate(DAYS) for name in names if day != of_today}
    for item in items:
        if item.path.parent.name == "peers" and item.path.name in others:
            item.add_marker(pytest.mark.skip(reason=f"CI runs {', '.join(DAYS[of_today])} today: make test-peers"))
