"""Programs in E2B's machines, which are processes here: its package is a stub with its signatures."""

import asyncio
import importlib.util
import inspect

import pytest
import pytest_asyncio

from agentenv.errors import MissingDependency
from agentenv.sandbox import Isolation, SandboxUnavailable, Status, _owner, e2b
from agentenv.sandbox.e2b import E2BSandbox
from tests.sandbox import backends, e2b_stub

SLEEP = "import time; time.sleep(300)"


@pytest_asyncio.fixture
async def sandbox(monkeypatch):
    e2b_stub.install(monkeypatch)
    sandbox = await backends.opened(E2BSandbox(template="t", api_key="k", max_machines=2, metadata={"episode": "7"}))
    yield sandbox
    await sandbox.aclose()
    assert not e2b_stub.MACHINES


def machines(tenant):
    return [each for each in e2b_stub.MACHINES.values() if each.metadata["agentenv.tenant"] == tenant]


async def test_as_every_backend(sandbox):
    await backends.programs_run_as_they_do_here(sandbox)
    await backends.executions_are_talked_to(sandbox)
    await backends.sessions_stay_between_turns(sandbox)
    await backends.graders_judge(sandbox)
    await backends.cancelling_reaches_the_program(sandbox)


async def test_a_machine_has_no_internet_and_says_whose_it_is(sandbox):
    asked = e2b_stub.CREATED[0]
    assert (asked["allow_internet_access"], asked["template"], asked["api_key"]) == (False, "t", "k")
    assert asked["metadata"].items() >= {"episode": "7", "agentenv.tenant": "", **_owner.owner()}.items()
    assert all(isinstance(value, str) for value in asked["metadata"].values())
    result = await sandbox.run("1")
    assert result.isolation is Isolation.REMOTE
    assert result.layers[:2] == ("virtual machine", "no internet")


async def test_each_tenant_has_a_machine_of_its_own_and_no_more_are_there_than_allowed(sandbox):
    counts = []

    async def ask(tenant):
        result = await sandbox.run("print(1)", tenant=tenant)
        counts.append(len(e2b_stub.MACHINES))
        return result

    results = await asyncio.gather(*(ask(tenant) for tenant in "abcabc"))
    assert [result.stdout for result in results] == ["1\n"] * 6
    assert max(counts) <= 2
    tenants = [asked["metadata"]["agentenv.tenant"] for asked in e2b_stub.CREATED]
    assert sorted(tenants) == ["", "a", "b", "c"]


@pytest.mark.slow
async def test_who_has_to_wait_for_a_machine_may_give_up(sandbox):
    held = [await sandbox.start(SLEEP, tenant=tenant) for tenant in "ab"]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await sandbox.run("1", tenant="c")
    assert (await held[0].kill()).status is Status.SIGNAL
    assert (await sandbox.run("print(1)", tenant="c")).stdout == "1\n"
    await held[1].kill()


async def test_a_machine_that_vanishes_is_no_verdict_and_its_programs_run_on_another(sandbox):
    task = asyncio.ensure_future(sandbox.run("import time; time.sleep(0.5); print(1)", tenant="a"))
    execution = await sandbox.start(SLEEP, tenant="a")
    (machine,) = machines("a")
    await machine.kill()
    result = await task
    assert (result.status, result.stdout, result.attempts) == (Status.OK, "1\n", 2)
    ended = await execution.finish()
    assert ended.status is Status.INFRA
    assert ended.detail.startswith("e2b machine")


@pytest.mark.slow
async def test_a_machine_that_is_not_found_any_more_is_no_verdict(sandbox):
    await sandbox.run("1", tenant="a")
    (machine,) = machines("a")
    del e2b_stub.MACHINES[machine.sandbox_id]  # only requests notice
    result = await sandbox.run("print(1)", tenant="a")
    assert (result.status, result.attempts) == (Status.OK, 2)
    e2b_stub.MACHINES[machine.sandbox_id] = machine
    await machine.kill()


@pytest.mark.slow
async def test_a_service_without_room_is_asked_again_and_one_that_fails_is_no_verdict(sandbox, monkeypatch):
    monkeypatch.setattr(e2b.random, "uniform", lambda low, high: 0.0)
    e2b_stub.TROUBLE["create"] = [e2b_stub.RateLimitException("20 are there"), e2b_stub.ServiceBusyException("later")]
    assert (await sandbox.run("print(1)", tenant="a")).attempts == 1
    e2b_stub.TROUBLE["create"] = [e2b_stub.SandboxException("no"), ValueError("odd"), e2b_stub.TemplateException("x")]
    result = await sandbox.run("print(1)", tenant="b")
    assert (result.status, result.attempts) == (Status.INFRA, 3)


async def test_what_is_wrong_from_the_start_is_named(monkeypatch):
    e2b_stub.install(monkeypatch)
    e2b_stub.TROUBLE["create"] = [e2b_stub.AuthenticationException("no key")]
    with pytest.raises(SandboxUnavailable, match=r"AuthenticationException: no key\. Check E2B_API_KEY"):
        await E2BSandbox().open()


async def test_without_the_package_the_message_has_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "e2b", None)
    with pytest.raises(MissingDependency, match=r"pip install 'agentenv\[e2b\]'"):
        await E2BSandbox().open()


async def test_an_idle_machine_is_given_back_and_one_in_use_is_prolonged(sandbox, monkeypatch):
    monkeypatch.setattr(e2b, "IDLE_S", 0.05)
    execution = await sandbox.start(SLEEP, tenant="a")
    (machine,) = machines("a")
    sandbox._lifetime_s = 0
    await sandbox.run("1", tenant="a")
    assert machine.timeouts == [0]
    await asyncio.sleep(0.2)
    assert machines("a") == [machine]
    await execution.kill()
    await backends.until(lambda: not machines("a"))


async def test_machines_of_processes_that_are_gone_are_ended(monkeypatch):
    e2b_stub.install(monkeypatch)
    gone = await e2b_stub.AsyncSandbox.create(metadata=_owner.owner() | {"agentenv.pid": "999999999"})
    ours = await e2b_stub.AsyncSandbox.create(metadata=_owner.owner())
    others = await e2b_stub.AsyncSandbox.create(metadata={"agentenv.host": _owner.owner()["agentenv.host"]})
    sandbox = await backends.opened(E2BSandbox())
    late = await e2b_stub.AsyncSandbox.create(metadata={e2b.RUN: sandbox._run})  # whose creation was given up
    await sandbox.aclose()
    assert set(e2b_stub.MACHINES) == {ours.sandbox_id, others.sandbox_id}
    assert gone.sandbox_id != late.sandbox_id


@pytest.mark.skipif(importlib.util.find_spec("e2b") is None, reason="e2b is not installed")
def test_the_stub_has_the_signatures_of_the_package():
    import e2b as package
    from e2b.sandbox_async.commands.command import Commands

    def names(function):
        return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]

    for name in ("create", "list", "set_timeout"):
        assert names(getattr(e2b_stub.AsyncSandbox, name)) == names(getattr(package.AsyncSandbox, name))
    for name in ("run", "send_stdin"):
        assert names(getattr(e2b_stub.Commands, name)) == names(getattr(Commands, name))
    for name in vars(e2b_stub):
        if name.endswith("Exception"):
            assert issubclass(getattr(package.exceptions, name), Exception)
    assert {"metadata", "sandbox_id"} <= {*package.SandboxInfo.__dataclass_fields__}
    assert "metadata" in package.SandboxQuery.__dataclass_fields__
