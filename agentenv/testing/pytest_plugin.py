"""The pytest plugin: episodes in tests. It loads with agentenv and does nothing in a suite that does not use it.

Fixtures with the same names in a suite or its conftest take precedence; for `env`, `episode` and `golden` also those of
other plugins.

Fixtures: `scripted_engine`, `tiny_model`, `run_episode`, `run_group`, `run_episodes`, `virtual_clock`, `golden`; for
tests with the marker `agentenv` also `env` and `episode`. They work in plain tests and in async ones, with
pytest-asyncio and without.

Example::

    @pytest.mark.agentenv("math_retry", policy=["I think 41.", "#### 42"], data=Task("What is 6 * 7?", "42"))
    def test_the_second_attempt_counts(episode):
        assert episode.reward == 1.0
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from agentenv.core.trajectory import Trajectory
    from agentenv.engines.scripted import ScriptedEngine
    from agentenv.testing.clock import VirtualClock
    from agentenv.testing.episodes import Setup
    from agentenv.testing.fixtures import Bench
    from agentenv.testing.golden import Golden

_MARKER = (
    "agentenv(env, policy=('',), *, expects_error=False, **setup): the environment of the fixtures `env`, `episode` "
    "and `run_episode`; the arguments are those of agentenv.testing.Setup. `episode` fails if the episode failed, "
    "unless expects_error is True"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag of golden traces."""
    group = parser.getgroup("agentenv", "agentenv: episodes of environments")
    group.addoption(
        "--agentenv-record",
        action="store_true",
        help="write what the fixture `golden` is given as the traces that later runs are compared with",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test that asks for `virtual_clock` on it, whichever plugin runs the other async tests."""
    clock = _if_ours(pyfuncitem.funcargs.get("virtual_clock"))
    drawn: Any = getattr(pyfuncitem.obj, "hypothesis", None)  # of a test with @given: what it calls for each example
    tested = pyfuncitem.obj if drawn is None else drawn.inner_test
    function = inspect.unwrap(tested, stop=inspect.iscoroutinefunction)  # pytest-asyncio has wrapped it
    if clock is None or not inspect.iscoroutinefunction(function):
        return None

    @functools.wraps(function)
    def on_the_clock(*args: Any, **values: Any) -> None:
        clock.run(function(*args, **values))

    if drawn is not None:
        drawn.inner_test = on_the_clock
        return None
    names = [name for name in inspect.signature(function).parameters if name in pyfuncitem.funcargs]
    on_the_clock(**{name: pyfuncitem.funcargs[name] for name in names})
    return True


def _if_ours(clock: Any) -> VirtualClock | None:
    """Return the value of the fixture `virtual_clock`, or None if another fixture has the same name."""
    module = sys.modules.get("agentenv.testing.clock")
    return clock if module is not None and isinstance(clock, module.VirtualClock) else None


@pytest.fixture
def virtual_clock() -> Iterator[VirtualClock]:
    """A virtual clock for async tests and the other fixtures of the plugin; see `agentenv.testing.VirtualClock`.

    Async fixtures run on the event loop of their plugin.
    """
    from agentenv.testing.clock import VirtualClock

    with VirtualClock() as clock:
        yield clock


@pytest.fixture
def agentenv_bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Yield the bench on which the other fixtures run episodes."""
    from agentenv.testing.fixtures import Bench

    clock = _if_ours(request.getfixturevalue("virtual_clock")) if "virtual_clock" in request.fixturenames else None
    marker = request.node.get_closest_marker("agentenv")
    bench = Bench.of_marker(marker and (marker.args, marker.kwargs), clock=clock)
    yield bench
    if forgotten := bench.num_forgotten():
        pytest.fail(f"run_episode: expected await in an async test, got {forgotten} calls without. Await them.")


@pytest.fixture
def scripted_engine(agentenv_bench: Bench) -> Callable[..., ScriptedEngine]:
    """Make a policy with scripted actions: `scripted_engine(["41", "42"], latency_s=0.5)`.

    The arguments are those of `agentenv.testing.ScriptedEngine`; without a tokenizer it is the one of `run_episode`.
    """
    return agentenv_bench.scripted_engine


@pytest.fixture(scope="session")
def tiny_model() -> str:
    """Return the folder of the model that comes with agentenv: it knows a little arithmetic, and needs no download."""
    from agentenv.engines.models import resolve_model

    return resolve_model("tiny-math")


@pytest.fixture
def run_episode(agentenv_bench: Bench) -> Callable[..., Any]:
    """Run one episode: `run_episode("math_retry", ["#### 42"], seed=1)` returns its Trajectory.

    The arguments are those of `agentenv.testing.Setup`; omitted ones come from the marker, if the test has one. In an
    async test, await the call: `await run_episode(…)`.
    """
    return agentenv_bench.run_episode


@pytest.fixture
def run_group(agentenv_bench: Bench) -> Callable[..., Any]:
    """Run `n` episodes of one task: `run_group("math_retry", policy, n=8)` returns their Group.

    Await it in async tests.
    """
    return agentenv_bench.run_group


@pytest.fixture
def run_episodes(agentenv_bench: Bench) -> Callable[..., Any]:
    """Run many: `run_episodes("math_retry", policy, num_tasks=10, num_samples=2)` returns a list of trajectories.

    Await it in async tests.
    """
    return agentenv_bench.run_episodes


def _others(request: pytest.FixtureRequest, ours: Callable[[Bench], Any]) -> Any:
    """Return the value of another plugin's fixture of this name if there is one, or else the value of `ours`."""
    with contextlib.suppress(pytest.FixtureLookupError):
        return request.getfixturevalue(str(request.fixturename))
    return ours(request.getfixturevalue("agentenv_bench"))  # outside the handler, which errors of ours would name


@pytest.fixture
def env(request: pytest.FixtureRequest) -> Setup:
    """Return the Setup of the test's marker: its `tasks()`, and by `stepped()` episodes to step through by hand."""
    return _others(request, lambda bench: bench.marked_env())  # type: ignore[no-any-return]


@pytest.fixture
def episode(request: pytest.FixtureRequest) -> Trajectory:
    """Return an episode of the marker's policy on the first task of the marker's environment.

    It fails with the error of an episode that failed, unless the marker has `expects_error=True`.
    """
    return _others(request, lambda bench: bench.marked_episode())  # type: ignore[no-any-return]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare a trajectory with the trace next to the test, in `golden/FILE/TEST.json`: `golden(trajectory)`.

    Traces are written with `--agentenv-record`; one that is missing fails the test. See `agentenv.testing.Golden`.
    """

    def ours(bench: Bench) -> Golden:
        from agentenv.testing.golden import Golden

        file = Path(request.path)
        test = request.node.nodeid.rpartition("::")[0].partition("::")[2].replace("::", ".")
        name = f"{test}.{request.node.name}" if test else request.node.name
        record = bool(request.config.getoption("--agentenv-record"))
        return Golden(file.parent / "golden" / file.stem, name, record=record, tokenizer_of=lambda: bench.tokenizer)

    return _others(request, ours)  # type: ignore[no-any-return]
