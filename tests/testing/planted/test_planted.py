"""`agentenv check` and `agentenv audit` find planted faults, and nothing in the environments without one."""

import asyncio
import os
from pathlib import Path

import pytest

from agentenv.core.dataset import in_messages, read_tasks
from agentenv.core.types import Limits
from agentenv.episode.source import EnvSource
from agentenv.testing.audit.auditing import AuditOptions, audit_env
from agentenv.testing.conformance.context import ConformanceOptions
from agentenv.testing.conformance.suite import PROPERTIES, make_context, run_suite
from tests.testing.planted import faults, more_faults

LIMITS = Limits(max_length=200_000, max_turns=8, step_timeout_s=10.0)  # a call that never ends is waited for


def checked(cls, only=()):
    """The broken properties, by name."""
    outcomes = run_suite(make_context(ConformanceOptions(cls)), only=only)
    return {one.name: [str(problem) for problem in one.problems] for one in outcomes if one.state == "broken"}


async def audited(cls, policies=()):
    """The findings that fail or warn with why they matter, by id."""
    tasks = [in_messages(task) for path in cls.datasets.values() for task in read_tasks(str(path))]
    options = AuditOptions(policies=policies, limits=LIMITS, max_tokens=2_000)
    result = await audit_env(EnvSource(cls), tasks, options=options)
    return {each.id: f"{each.summary}. {each.why}" for each in result.findings if each.severity != "note"}


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    monkeypatch.setattr("agentenv.testing.conformance.cancellation._SETTLE_S", 0.1)
    yield
    faults.GO.set()
    while faults.OPEN_CACHE:
        file = faults.OPEN_CACHE.pop()
        file.close()
        os.unlink(file.name)
    faults.GO.clear()


@pytest.mark.long
@pytest.mark.parametrize("cls", [*faults.PLANTED, *more_faults.PLANTED], ids=lambda cls: cls.__name__)
async def test_a_planted_fault_is_found(cls):
    if cls.found == "nothing":
        assert await asyncio.to_thread(checked, cls) == await audited(cls) == {}
        return
    if cls.found == "runs-code":
        problems = await asyncio.to_thread(checked, cls, ["contract"])
        assert "no code of an action in this process" in problems["contract"][0]
    if cls.found in PROPERTIES:
        found = await asyncio.to_thread(checked, cls)
    else:
        found = await audited(cls)
    assert cls.found in found, found


@pytest.mark.long
@pytest.mark.parametrize("cls", [faults.Sum, faults.Desk, *more_faults.SOUND], ids=lambda cls: cls.__name__)
async def test_an_environment_without_a_fault_has_none(cls):
    assert await asyncio.to_thread(checked, cls) == {}
    assert await audited(cls) == {}


@pytest.mark.long
def test_the_first_example_has_no_fault():
    assert checked(f"{Path(__file__).parents[3] / 'examples/hello.py'}:GuessNumber") == {}


def test_forty_faults_are_planted_half_of_them_with_tools():
    assert len(faults.PLANTED) == 40
    assert sum(issubclass(cls, faults.Desk) for cls in faults.PLANTED) == 20
    assert sum(cls.found != "nothing" for cls in faults.PLANTED) >= 36
