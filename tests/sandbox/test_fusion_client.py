"""FusionSandbox: what servers answer is a result or nothing at all, and never somebody else's failure as a verdict."""

import asyncio
import base64
import socket
from contextlib import contextmanager
from dataclasses import replace

import pytest
import pytest_asyncio

from agentenv._util.http.client import HTTPClient
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.sandbox import ExecLimits, ExecStatus, Isolation, SandboxUnavailable
from agentenv.sandbox.fusion.client import MAX_ATTEMPTS, FusionSandbox
from agentenv.sandbox.fusion.server import FusionServer
from agentenv.sandbox.fusion.wire import BadAnswer, read_result
from agentenv.sandbox.grading import (
    AssertSuite,
    AssertTest,
    FunctionSuite,
    FunctionTest,
    StdioSuite,
    StdioTest,
    Verdict,
    grade,
)
from agentenv.tools.python import PythonTool
from tests.rewards.models import rm_servers
from tests.rewards.models.rm_servers import HANG, Status, http
from tests.sandbox.fusion_servers import OK, cut, scripted
from tests.waits import until

LIMITS = ExecLimits()
ours = pytest.mark.asyncio(loop_scope="module")


def client(*servers, **options):
    """Quick to try again."""
    urls = [each if isinstance(each, str) else each.url for each in servers]
    return FusionSandbox(urls, **{"pause_s": 0.01, **options})


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"status": "ok"},
        {**OK, "status": "infra", "detail": "no room"},
        {**OK, "status": "Success"},
        {**OK, "stdout": 42},
        {**OK, "wall_s": "1"},
        {**OK, "files": {"a": "!"}},
        {**OK, "stdout_data": 7},
        {**OK, "layers": None},
        {**OK, "run_result": {}},
    ],
)
def test_an_answer_that_says_nothing_of_the_program_is_not_a_result(body):
    with pytest.raises(BadAnswer, match="no room" if body.get("detail") else "expected a result, got"):
        read_result(body)


@pytest.mark.parametrize(
    "given", [{"files": {"/etc/passwd": b""}}, {"files": {"../a": b""}}, {"fetch": ("/etc/passwd",)}, {"policy": "all"}]
)
async def test_a_program_that_cannot_run_is_refused_before_it_is_sent(given):
    with pytest.raises(ConfigError):
        await FusionSandbox("http://127.0.0.1:9").run("print(42)", **given)


def num_runs(server):
    return server.paths.count("/run")


async def held(go_on):
    """An answer that comes when it is let go on."""
    await go_on.wait()
    return http(OK)


# --- attempts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [
        http({"detail": "x", "traceback": []}, code=500),
        http({"detail": "busy"}, code=429, headers={"retry-after": "0"}),
        http({"detail": "busy"}, code=503, headers={"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        http({**OK, "status": "infra", "detail": "no room"}),
        http({"some": "other service"}),
        http("<html>Bad Gateway</html>"),
        http([]),
        cut(),
        b"",
    ],
)
async def test_a_servers_failure_is_tried_again(first):
    async with scripted(first, http(OK)) as server, client(server) as sandbox:
        result = await sandbox.run("print(42)")
        assert (result.status, result.stdout, result.attempts, num_runs(server)) == (ExecStatus.OK, "42\n", 2, 2)


@pytest.mark.parametrize("verdict", ["signal", "wall_timeout"])
async def test_a_programs_failure_is_never_tried_again(verdict):
    async with scripted(http({**OK, "status": verdict}), http(OK)) as server, client(server) as sandbox:
        result = await sandbox.run("print(42)")
        assert (result.status, result.attempts, num_runs(server)) == (verdict, 1, 1)


@pytest.mark.long
@pytest.mark.parametrize("always", [http(b"", code=500), http({**OK, "status": "infra"}), http({}), cut()])
async def test_without_a_verdict_in_any_attempt_the_result_is_infra_without_a_score(always):
    async with scripted(always) as server, client(server) as sandbox:
        result = await sandbox.run("print(42)")
        assert (result.status, result.attempts, num_runs(server)) == (ExecStatus.INFRA, MAX_ATTEMPTS, MAX_ATTEMPTS)
        assert server.url in result.detail
        graded = await grade(sandbox, "print(42)", StdioSuite(hidden=(StdioTest("", "42"),)))
        assert graded.score is None


@pytest.mark.long
async def test_an_answer_that_never_comes_is_given_up_after_the_programs_time_and_the_patience():
    async with scripted(HANG) as server, client(server, patience_s=0.1) as sandbox:
        result = await sandbox.run("print(42)", limits=replace(LIMITS, wall_s=0.1))
        assert result.status is ExecStatus.INFRA
        await until(lambda: server.num_gone >= 1)


async def test_an_answer_may_take_the_time_that_a_busy_server_gives_back(monkeypatch):
    async with scripted(http(OK)) as server, client(server, patience_s=60.0) as sandbox:
        attempt, given = HTTPClient.attempt, []

        async def noted(*args, **options):
            given.append(options["timeout_s"])
            return await attempt(*args, **options)

        monkeypatch.setattr(HTTPClient, "attempt", noted)
        await sandbox.run("print(42)", limits=replace(LIMITS, wall_s=100.0))
        assert given == [360.0]


@pytest.mark.long
async def test_an_answer_without_end_is_not_read():
    limits = replace(LIMITS, stdout_kb=1, stderr_kb=1, channel_kb=1, fetch_mb=1)
    async with scripted(http(b"[" + b" " * (20 << 20))) as server, client(server) as sandbox:
        result = await sandbox.run("print(42)", limits=limits)
        assert result.status is ExecStatus.INFRA
        assert "expected at most" in result.detail


@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 413, 422])
async def test_a_request_that_is_refused_is_an_error_of_the_configuration_and_not_tried_again(status):
    async with scripted(http({"detail": "no"}, code=status, headers={"location": "/elsewhere"})) as server:
        sandbox = client(server)
        with pytest.raises(ConfigError, match=f"got {status}"):
            await sandbox.run("print(42)")
        await sandbox.aclose()
        assert num_runs(server) == 1


@pytest.mark.parametrize(
    ("token", "hint"), [("", "Set AGENTENV_SANDBOX_TOKEN"), ("old", "The token differs from the server")]
)
async def test_a_refused_token_is_distinguished_from_a_missing_one(token, hint):
    async with scripted(http({"detail": "no"}, code=401)) as server:
        sandbox = client(server, token=token)
        with pytest.raises(ConfigError, match=hint):
            await sandbox.run("print(42)")
        await sandbox.aclose()


async def test_an_endpoint_that_failed_is_avoided_for_a_while_and_then_asked_again():
    async with scripted(http(b"", code=500), http(OK)) as bad, scripted(http(OK)) as good, client(bad, good) as sandbox:
        for _ in range(4):
            assert (await sandbox.run("print(42)")).status is ExecStatus.OK
        assert num_runs(bad) == 1
        sandbox.endpoints[0].avoided_until = 0.0
        for _ in range(4):
            await sandbox.run("print(42)")
        assert num_runs(bad) > 1


async def test_the_endpoint_with_the_least_to_do_is_asked():
    go_on = asyncio.Event()
    async with scripted(lambda: held(go_on)) as busy, scripted(http(OK)) as free, client(busy, free) as sandbox:
        while not num_runs(busy):
            first = asyncio.create_task(sandbox.run("print(42)"))
            await until(lambda task=first: num_runs(busy) or task.done())
        before = num_runs(busy)
        for _ in range(4):
            await sandbox.run("print(42)")
        assert num_runs(busy) == before
        go_on.set()
        assert (await first).status is ExecStatus.OK


async def test_no_more_requests_are_under_way_than_allowed():
    go_on = asyncio.Event()
    async with scripted(lambda: held(go_on)) as server, client(server, max_concurrent=2) as sandbox:
        work = [asyncio.create_task(sandbox.run("print(42)")) for _ in range(6)]
        await until(lambda: num_runs(server) == 2)
        go_on.set()
        results = await asyncio.gather(*work)
        assert (server.most, len(results)) == (2, 6)


# --- opening ----------------------------------------------------------------------------------------------------------


@contextmanager
def deaf():
    """An address that nobody else takes and where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


async def test_no_endpoint_that_answers_is_reported_at_once():
    with deaf() as gone:
        sandbox = client(gone)
        with pytest.raises(SandboxUnavailable, match="expected an endpoint that answers"):
            await sandbox.open()
        await sandbox.aclose()
        await sandbox.aclose()


async def test_one_endpoint_that_answers_is_enough():
    with deaf() as gone:
        async with scripted(http(OK)) as server, client(gone, server) as sandbox:
            assert (await sandbox.run("print(42)")).status is ExecStatus.OK


@pytest.mark.parametrize("path", ["", "/", "/run_code"])
async def test_an_address_may_name_the_route_as_other_clients_want(path):
    async with scripted(http(OK)) as server, client(server.url + path) as sandbox:
        await sandbox.run("print(42)")
        assert server.paths == ["/health", "/run"]


@pytest.mark.parametrize("urls", [[], ["127.0.0.1:8080"], ["ftp://x"], ["http://"], ["http://x:99999"], [7]])
def test_input_that_is_not_an_address_is_refused(urls):
    with pytest.raises(ConfigError, match="endpoints: expected"):
        FusionSandbox(urls)


@pytest.mark.parametrize("how", ["argument", "environment", "address"])
async def test_a_token_is_sent_and_never_shown(how, monkeypatch):
    options = {"token": "hush-hush"} if how == "argument" else {}
    if how == "environment":
        monkeypatch.setenv("AGENTENV_SANDBOX_TOKEN", "hush-hush")
    async with scripted(http(b"", code=500)) as server:
        url = server.url.replace("//", "//me:hush-hush@") if how == "address" else server.url
        async with client(url, **options) as sandbox:
            result = await sandbox.run("print(42)")
        given = server.headers[-1]["authorization"]
        assert given == (
            "Basic " + base64.b64encode(b"me:hush-hush").decode() if how == "address" else "Bearer hush-hush"
        )
        assert "hush" not in result.detail


async def test_what_only_a_caller_on_the_same_machine_can_do_is_refused():
    with pytest.raises(ConfigError, match=r"Use grade\(\) or session\(\)"):
        await FusionSandbox("http://127.0.0.1:9").start("pass")


async def test_a_second_event_loop_uses_it_as_well():
    async with scripted(http(OK)) as server, client(server, max_concurrent=1) as sandbox, sandbox._slot():
        assert (await asyncio.to_thread(asyncio.run, sandbox.run("print(42)"))).status is ExecStatus.OK


# --- against our own server -------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def remote(local):
    async with FusionServer(local) as server, client(server) as sandbox:
        sandbox.server = server
        yield sandbox


ENDLESS = replace(LIMITS, cpu_s=0.5, wall_s=100.0)  # for what never ends: time to use it up beside others
TINY = replace(ENDLESS, memory_mb=64, stdout_kb=1, stderr_kb=1, disk_mb=1, file_mb=4)


@pytest.mark.long
@ours
@pytest.mark.parametrize(
    ("program", "given"),
    [
        ("print(input()[::-1])", {"stdin": "abc\n"}),
        ("import sys; print('é\\x1b\\r', end=''); sys.stderr.write('e')", {}),
        ("raise SystemExit(7)", {}),
        ("import ctypes; ctypes.string_at(0)", {}),
        ("while True: pass", {}),
        ("b = bytearray(200 << 20)", {}),
        ("while True: print('x' * 5000)", {}),
        ("open('big', 'wb').write(bytes(2 << 20))", {}),
        ("open('out', 'wb').write(open('a/b', 'rb').read())", {"files": {"a/b": b"\xff"}, "fetch": ["out", "none"]}),
        ("import os; os.fork()", {}),
        ("import os; os.waitpid(os.fork(), 0)", {"policy": "proc"}),
        (["sh", "-c", "echo $((6 * 7)) \"$0\"", "it's"], {"policy": "proc"}),
        ("import sys; print(sys.stdin.buffer.read())", {"stdin": b"\xff\0"}),
        ("import os; os.write(3, b'\xff')", {"channel": True}),
        ("\ud800", {}),
    ],
)  # fmt: skip
async def test_a_result_from_afar_is_the_one_from_here(local, remote, program, given):
    here = await local.run(program, limits=TINY, **given)
    there = await remote.run(program, limits=TINY, **given)
    names = ["status", "exit_code", "signal", "stdout", "stdout_truncated", "files", "channel"]
    names += ["stdout_data"] * (not here.stdout_truncated)
    names += ["stdout_bytes"] * (here.status is not ExecStatus.OUTPUT_LIMIT)  # how far it came is chance
    assert {name: getattr(there, name) for name in names} == {name: getattr(here, name) for name in names}
    assert (there.isolation, there.layers[0]) == (Isolation.REMOTE, str(local.isolation))
    if program != "\ud800":
        assert there.stderr.splitlines()[-1:] == here.stderr.splitlines()[-1:]


@ours
async def test_cancelling_ends_the_program_there(remote):
    task = asyncio.create_task(remote.run("while True: pass", limits=replace(LIMITS, cpu_s=60.0, wall_s=100.0)))
    await until(lambda: remote.server.running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: remote.server.running == 0)


ADD = FunctionSuite(
    "add",
    visible=(FunctionTest((1, 2), 3),),
    hidden=(FunctionTest((2, 2), 4), FunctionTest(("a", "b"), "ab"), FunctionTest(((1,), (2,)), (1, 2))),
)
ASSERTS = AssertSuite(
    ("add",),
    visible=(AssertTest("assert add(1, 2) == 3\nassert add([1], [2]) == [1, 2]"),),
    hidden=(AssertTest("try:\n    add(1, 'a')\nexcept TypeError:\n    pass\nelse:\n    assert False"),),
)
STDIO = StdioSuite(visible=(StdioTest("1 2\n", "3\n"),), hidden=(StdioTest("2 2\n", "4\n"),))


@pytest.mark.long
@ours
@pytest.mark.parametrize(
    ("suite", "code", "score"),
    [
        (ADD, "def add(a, b):\n    print('chatter', a)\n    return a + b", 1.0),
        (ASSERTS, "import os\ndef add(a, b): os._exit(0)", 0.0),
        (STDIO, "print(3)", 0.5),
    ],
)  # fmt: skip
async def test_programs_are_graded_from_afar_as_here_and_cheats_have_nothing_of_it(local, remote, suite, code, score):
    here, there = [await grade(sandbox, code, suite, limits=ENDLESS) for sandbox in (local, remote)]
    assert there.score == score, [(test.verdict, test.detail) for test in there.tests]
    assert [test.verdict for test in there.tests] == [test.verdict for test in here.tests]


@ours
async def test_limits_above_the_servers_are_refused(remote):
    with pytest.raises(ConfigError, match=r"limits: expected at most cpu_s = 120"):
        await grade(remote, "def add(a, b): return a + b", ADD, limits=replace(LIMITS, cpu_s=1000.0))


@ours
async def test_a_checker_is_not_sent(remote):
    with pytest.raises(ConfigError, match="without a checker"):
        await grade(remote, "", FunctionSuite("f", hidden=(FunctionTest((), 1),), checker=lambda *_: True))


@ours
async def test_tests_that_call_nothing_are_an_error_of_the_data_from_afar_too(remote):
    suite = AssertSuite(("add",), hidden=(AssertTest("assert len([1]) == 1"),))
    with pytest.raises(DataError, match="expected tests that call add"):
        await grade(remote, "def add(a, b): return a + b", suite)


@ours
async def test_the_time_for_all_tests_ends_there_and_waiting_is_given_back(monkeypatch, remote):
    given_back = []
    monkeypatch.setattr("agentenv.sandbox.fusion.client.seconds_left", lambda: 0.5)
    monkeypatch.setattr("agentenv.sandbox.fusion.client.give_back", given_back.append)
    result = await grade(remote, "def add(a, b): return a + b", ADD)
    assert [test.verdict for test in result.tests] == [Verdict.TIMEOUT, *[Verdict.SKIPPED] * 3]
    assert len(given_back) == 1
    assert 0 <= given_back[0] < 30


GRADE = {"grade": {"tests": [], "integrity": "outside", "tamper_signals": [], "isolation": "none"}, "spent_s": 0.1}


@pytest.mark.parametrize("body", [b"<html>", {}, [], {"grade": None}, GRADE, {**GRADE, "spent_s": None}])
async def test_an_answer_that_is_no_grade_is_a_failure_of_the_server(body):
    async with scripted(http(body)) as server, client(server) as sandbox:
        with pytest.raises(InfraError):
            await grade(sandbox, "def add(a, b): return a + b", ADD)
        assert len(server.paths) == 1 + MAX_ATTEMPTS


async def test_another_server_of_sandbox_fusion_is_refused():
    def reply(path, _):
        return {"/v1/ping": "pong", "/run_code": {"status": "Success"}}.get(path, Status(404, {"detail": "Not Found"}))

    async with rm_servers.server(reply) as other:
        sandbox = client(other)
        for ask in (sandbox.open, lambda: sandbox.run("pass"), lambda: grade(sandbox, "pass", ADD)):
            with pytest.raises(ConfigError, match=r"got 404.*Start `agentenv sandbox serve` of this version"):
                await ask()
        await sandbox.aclose()


# --- sessions ---------------------------------------------------------------------------------------------------------


@ours
async def test_a_session_stays_between_turns(remote):
    async with remote.session(limits=LIMITS) as session:
        assert (await session.run("x = 6; print('one')")).stdout == "one\n"
        turn = await session.run("x * 7")
        assert (turn.value, turn.status, turn.isolation) == ("42", ExecStatus.OK, Isolation.REMOTE)
        assert not session.over
        last = await session.run("print('gone', flush=True); import os; os._exit(1)")
        assert (last.ended, last.stdout, session.over) == (True, "gone\n", True)
        again = await session.run("1")
        assert (again.ended, again.status, again.stdout) == (True, ExecStatus.NONZERO, "")
    async with PythonTool(remote, limits=LIMITS) as tool:
        await tool.python("x = 6")
        assert await tool.python("x * 7") == "42"
    session = remote.session()
    async with session:
        pass
    assert (await session.run("1")).detail == "session: closed"
    with pytest.raises(ConfigError, match="expected an open session"):
        await remote.session().run("1")


@ours
async def test_a_session_that_expired_says_so(remote):
    async with remote.session(idle_s=0.05) as session:
        await until(lambda: session.over)
        turn = await session.run("1")
        assert (turn.ended, turn.detail) == (True, "session: ended after 0.05 s without a turn")


@ours
async def test_a_turn_that_is_given_up_ends_its_session_there(remote):
    async with remote.session(limits=replace(LIMITS, cpu_s=60.0, wall_s=100.0)) as session:
        there = remote.server._sessions[session._place[1]]
        task = asyncio.create_task(session.run("while True: pass"))
        await until(lambda: there._turn.locked())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert session.over
        await until(lambda: there.over)


async def test_a_session_that_its_server_lost_is_infra_and_not_tried_again():
    async with scripted(http({"session": "x"}), http(b"", code=500)) as server, client(server) as sandbox:
        session = sandbox.session()
        await session.open()
        turn = await session.run("1")
        assert (turn.status, turn.ended, session.over) == (ExecStatus.INFRA, True, True)
        assert server.paths[1:] == ["/session", "/session/x"]


@ours
async def test_an_unknown_session_has_ended(remote):
    async with remote.session() as session:
        await remote.server._sessions.pop(session._place[1]).aclose()
        turn = await session.run("1")
        assert (turn.status, turn.ended) == (ExecStatus.INFRA, True)
