"""`agentenv check` finds faults that only valid actions, limits or elapsed time show, and names no other property."""

import os

import pytest

from agentenv.testing.conformance.context import ConformanceOptions
from agentenv.testing.conformance.suite import make_context, run_suite
from tests.testing.planted import hidden_faults


def broken(cls):
    """The broken properties of a class."""
    skip = {} if cls is hidden_faults.Doors else {"portability": "it starts processes"}
    outcomes = run_suite(make_context(ConformanceOptions(cls)), skip=skip)
    return {one.name: str(one) for one in outcomes if one.state == "broken"}


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    monkeypatch.setattr("agentenv.testing.conformance.cancellation._SETTLE_S", 0.1)
    yield
    while hidden_faults.LEFT_CACHE:
        file, path = hidden_faults.LEFT_CACHE.pop()
        os.close(file)
        os.unlink(path)


@pytest.mark.long
@pytest.mark.parametrize("cls", hidden_faults.PLANTED, ids=lambda cls: cls.__name__)
def test_a_fault_behind_valid_actions_is_found(cls):
    found = broken(cls)
    assert cls.found in found, "\n".join(found.values())
    assert set(found) - getattr(cls, "also", set()) == {cls.found}, "\n".join(found.values())


@pytest.mark.long
@pytest.mark.parametrize("cls", hidden_faults.SOUND, ids=lambda cls: cls.__name__)
def test_an_environment_with_limits_and_clocks_without_a_fault_has_none(cls):
    assert broken(cls) == {}
