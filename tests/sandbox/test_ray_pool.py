"""One pool of zygotes on each Ray node, shared by all who ask there; Ray is started once, on this machine."""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
import pytest_asyncio

from agentenv.errors import MissingDependency
from agentenv.sandbox import ExecStatus, SandboxUnavailable
from agentenv.sandbox.remote import ray_pool
from agentenv.sandbox.remote.ray_pool import NodeHost, RaySandbox
from tests.sandbox import backends

pytestmark = pytest.mark.asyncio(loop_scope="module")
SLEEP = "import time; time.sleep(300)"


async def test_without_ray_the_message_has_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"pip install 'agentenv-rl\[ray\]'"):
        await RaySandbox().open()


async def test_the_actor_answers_as_a_sandbox_does_and_carries_our_errors_by_name():
    host = NodeHost(60.0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as Ray may leave it, and zygotes would inherit it
    try:
        opened = await host.answer(1, "open", {"options": {"min_isolation": "landlock"}})
        if "error" in opened:
            pytest.skip(opened["error"][1])
        ran = await host.answer(2, "run", {"program": "print(1)"})
        assert (ran["value"].status, ran["value"].stdout) == (ExecStatus.OK, "1\n")
        assert (await host.answer(3, "run", {"program": []}))["error"][0] == "ConfigError"
        assert (await host.answer(4, "aclose", {}))["error"][0] == "InfraError"
        assert (await host.answer(5, "run", {"programme": ""}))["error"][0] == "InfraError"
        assert not host.busy
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        host._watching.cancel()
        await host.aclose()


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray")
    from agentenv._util.ray.cluster import ClusterConfig, ray_session

    with ray_session(ClusterConfig(cpus=2.0)):
        yield ray


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(ray):
    sandbox = await backends.opened(RaySandbox(run_slots=2))
    yield sandbox
    await sandbox.aclose()


def pids():
    """Of the actors' processes, of the Ray that was started here."""
    ours = descendants([os.getpid()])
    return [pid for pid in backends.running(b"ray::NodeHost") if pid in ours]


@pytest.mark.slow
@pytest.mark.parametrize(
    "behaviour",
    [
        backends.programs_run_as_they_do_here,
        backends.executions_are_talked_to,
        backends.sessions_stay_between_turns,
        backends.graders_judge,
        backends.cancelling_reaches_the_program,
    ],
    ids=lambda behaviour: behaviour.__name__,
)
async def test_as_every_backend(sandbox, behaviour):
    await behaviour(sandbox)


@pytest.mark.slow
async def test_all_callers_on_a_node_share_one_pool_in_any_order(ray, sandbox):
    @ray.remote(num_cpus=0)
    class Asker:
        async def ask(self):
            async with RaySandbox(run_slots=1) as sandbox:
                result = await sandbox.run("import os; print(os.getpid())")
                return result.status, result.backend

    before = len(pids())
    answers = await asyncio.gather(*(Asker.remote().ask.remote() for _ in range(2)))
    assert answers == [(ExecStatus.OK, "ray")] * 2
    assert len(pids()) == before + 1


@pytest.mark.slow
async def test_an_actor_that_dies_is_replaced_and_what_ran_there_runs_again(sandbox):
    link = sandbox._link
    execution = await sandbox.start(SLEEP)
    session = sandbox.session()
    await session.open()
    calls = len(link._calls)
    task = asyncio.ensure_future(sandbox.run("import time; time.sleep(2); print(1)"))
    await backends.until(lambda: len(link._calls) > calls)
    programs = descendants(pids())
    assert programs
    for pid in pids():
        os.kill(pid, signal.SIGKILL)
    result = await task
    assert (result.status, result.stdout, result.attempts) == (ExecStatus.OK, "1\n", 2)
    assert (await execution.finish()).status is ExecStatus.INFRA
    assert (await session.run("1")).status is ExecStatus.INFRA
    await session.aclose()
    assert sandbox._link is not link
    await backends.until(lambda: not [pid for pid in programs if Path(f"/proc/{pid}").exists()])


def descendants(roots):
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    below = set(roots)
    while fresh := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= fresh
    return below - set(roots)


@pytest.mark.slow
async def test_an_actor_that_is_stopped_is_not_a_verdict(ray, sandbox, monkeypatch):
    monkeypatch.setattr(ray_pool, "WEDGED_S", 1.0)
    known = {*pids()}
    own = await backends.opened(RaySandbox(run_slots=3))
    (new,) = {*pids()} - known
    task = asyncio.ensure_future(own.run(SLEEP))
    await asyncio.sleep(0.2)
    os.kill(new, signal.SIGSTOP)
    try:
        async with asyncio.timeout(120):
            result = await own.run("print(1)")
        assert result.status in (ExecStatus.OK, ExecStatus.INFRA)
        assert result.attempts > 1
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for pid in pids():
            os.kill(pid, signal.SIGCONT)
        await own.aclose()


@pytest.mark.slow
async def test_an_unused_pool_ends_by_itself(ray):
    before = {*pids()}
    sandbox = await backends.opened(RaySandbox(idle_s=0.5))
    first = await sandbox.run("print(1)")
    await backends.until(lambda: before >= {*pids()})
    assert first.stdout == "1\n"
    await sandbox.aclose()


@pytest.mark.slow
async def test_closing_ends_what_was_asked_for_here_and_leaves_the_pool_to_others(sandbox):
    other = await backends.opened(RaySandbox(run_slots=2))
    task = asyncio.ensure_future(other.run(SLEEP))
    execution = await other.start(SLEEP)
    await asyncio.sleep(0.3)
    await other.aclose()
    assert (await task).status is ExecStatus.INFRA
    assert (await execution.finish()).status in (ExecStatus.SIGNAL, ExecStatus.INFRA)
    assert (await sandbox.run("print(1)")).attempts == 1


@pytest.mark.long
async def test_without_a_running_ray_that_is_reported(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    logging.getLogger("ray").setLevel(logging.ERROR)
    with pytest.raises(SandboxUnavailable, match="expected a running Ray, got none"):
        await RaySandbox().open()
