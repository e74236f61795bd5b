"""The server in SandboxFusion's form: its exact answers, what it lets in, what it does when there is no room."""

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from agentenv._util.http.access import AccessPolicy
from agentenv.cli.main import main
from agentenv.errors import InfraError
from agentenv.sandbox import ExecLimits, ExecResult, ExecStatus, Isolation
from agentenv.sandbox.fusion.client import FusionSandbox
from agentenv.sandbox.fusion.run_code import MAX_LIMITS, read_run_request
from agentenv.sandbox.fusion.server import FusionServeOptions, FusionServer
from agentenv.sandbox.local.sandbox import MIN_MEMORY_MB
from tests.ports import held_port
from tests.waits import until

ROOT = Path(__file__).parents[2]
ours = pytest.mark.asyncio(loop_scope="module")
HELLO = {"code": "print(6 * 7)", "language": "python"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(local):
    """An HTTP client of a server of a real sandbox."""
    async with FusionServer(local) as server, at(server) as http:
        http.server = server
        yield http


class Gate:
    """A sandbox whose programs wait until they are let go on; it remembers what became of them."""

    isolation, run_slots = Isolation.NONE, 1

    def __init__(self, result=None):
        self.go_on = asyncio.Event()
        self.result = result or ExecResult(ExecStatus.OK, exit_code=0, stdout="42\n", stdout_bytes=3)
        self.started, self.cancelled, self.given = 0, 0, {}

    async def run(self, program, **given):
        self.started, self.given = self.started + 1, {"program": program, **given}
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def serving(sandbox, **options):
    return FusionServer(sandbox, FusionServeOptions(**{"grace_s": 5.0, **options}))


def at(server, **more):
    return httpx.AsyncClient(base_url=server.url, trust_env=False, verify=False, **more)


async def asked(sandbox, body=HELLO, path="/run_code", **options):
    """The answer of a server of this sandbox, which lets its programs go on."""
    sandbox.go_on.set()
    async with serving(sandbox, **options) as server, at(server) as http:
        return await http.post(path, json=body)


# --- /run_code --------------------------------------------------------------------------------------------------------


FOREVER = "while True: pass"
KILLED = "import resource\nresource.setrlimit(0, (0, 0))\n" + FOREVER
BASH = {"language": "bash", "stdin": "in"}


@pytest.mark.long
@ours
@pytest.mark.parametrize(
    ("body", "status", "code", "stdout", "stderr"),
    [
        ({"code": "print(6 * 7)"}, "Finished", 0, "42\n", ""),
        ({"code": "import sys; sys.exit(3)"}, "Finished", 3, "", ""),
        ({"code": "print(1, flush=True)\n" + FOREVER, "run_timeout": 0.3}, "TimeLimitExceeded", None, "1\n", ""),
        ({"code": "import ctypes; ctypes.string_at(0)"}, "Finished", -11, "", ""),
        ({"code": KILLED}, "Finished", -9, "", ""),
        ({"code": "cat; echo $((6 * 7)) >&2; exit 4", **BASH}, "Finished", 4, "in", "42\n"),
    ],
)
async def test_answers_have_the_fields_of_sandbox_fusion_and_no_other(served, body, status, code, stdout, stderr):
    response = await served.post("/run_code", json={"language": "python", **body})
    reply = response.json()
    assert response.status_code == 200
    assert list(reply) == ["status", "message", "compile_result", "run_result", "executor_pod_name", "files"]
    run = {"status": status, "return_code": code, "stdout": stdout, "stderr": stderr}
    assert reply.pop("run_result").items() >= run.items()
    ended = "Failed" if code != 0 else "Success"
    assert reply == {"status": ended, "message": "", "compile_result": None, "executor_pod_name": None, "files": {}}


# The requests of verl's, ROLL's and SkyRL's clients: their fields, with values of ours.
VERL = {"compile_timeout": 10, "run_timeout": 10, "code": "print(input())", "stdin": "7", "memory_limit_MB": 1024,
        "language": "python", "files": {}, "fetch_files": []}  # fmt: skip
ROLL = {"compile_timeout": 30, "run_timeout": 30, "code": "import sys\nsys.setrecursionlimit(6*10**5)\nprint(input())",
        "language": "python", "stdin": "7", "expected_stdout": "7"}  # fmt: skip
SKYRL = {"language": "python", "code": "print(input())", "stdin": "7", "run_timeout": 10}
UNLIMITED = {**VERL, "memory_limit_MB": -1}


@ours
@pytest.mark.parametrize("body", [VERL, ROLL, SKYRL, UNLIMITED, {**VERL, "stdin": None, "code": "print(7)"}])
async def test_the_requests_of_other_frameworks_clients_are_understood(served, body):
    headers = {"Accept": "application/json", "eagleeye-traceid": "x"}
    reply = (await served.post("/run_code", json=body, headers=headers)).json()
    assert (reply["status"], reply["run_result"]["stdout"]) == ("Success", "7\n")


@ours
async def test_output_longer_than_a_pipe_is_not_a_timeout(served):
    reply = (await served.post("/run_code", json={"code": "print('x' * 400_000)", "language": "python"})).json()
    assert (reply["status"], reply["run_result"]["stdout"]) == ("Success", "x" * 400_000 + "\n")


@ours
async def test_outputs_come_as_they_were_written(served):
    code = "import os; os.write(1, b'\\x1b[0m \\\\x1b \\r\\n \\xff')"
    reply = (await served.post("/run_code", json={"code": code, "language": "python"})).json()
    assert reply["run_result"]["stdout"] == "\x1b[0m \\x1b \r\n \\xff"


@ours
async def test_files_go_in_and_come_out_and_one_without_content_is_left_out(served):
    body = {
        "code": "import os\nopen('out', 'wb').write(open('a/b', 'rb').read()[::-1])\nprint(os.path.exists('none'))",
        "language": "python",
        "files": {"a/b": base64.b64encode(b"\x00\xff").decode(), "none": None},
        "fetch_files": ["out", "lacks"],
    }
    reply = (await served.post("/run_code", json=body)).json()
    assert (reply["run_result"]["stdout"], reply["files"]) == (
        "False\n",
        {"out": base64.b64encode(b"\xff\x00").decode()},
    )


@ours
@pytest.mark.parametrize("name", ["/etc/passwd", "a/../../x", "a\x00b"])
@pytest.mark.parametrize("field", ["files", "fetch_files"])
async def test_files_outside_of_the_folder_are_neither_written_nor_read(served, field, name):
    body = {**HELLO, field: {name: "eA=="} if field == "files" else [name]}
    response = await served.post("/run_code", json=body)
    assert response.status_code == 422
    assert "root:" not in response.text


@ours
@pytest.mark.parametrize("language", ["cpp", "java", "pytest", "Python 3"])
async def test_a_language_that_is_not_offered_is_reported_in_their_form(served, language):
    reply = (await served.post("/run_code", json={**HELLO, "language": language})).json()
    assert reply["status"] == "SandboxError"
    assert "not supported" in reply["message"]
    assert reply["run_result"]["status"] == "Error"


@ours
@pytest.mark.parametrize(
    "body",
    [
        [], {}, {"code": "x"}, {**HELLO, "language": None}, {**HELLO, "code": None}, {**HELLO, "stdin": 7},
        {**HELLO, "run_timeout": 0}, {**HELLO, "run_timeout": "10"}, {**HELLO, "run_timeout": True},
        {**HELLO, "run_timeout": 1e-320}, {**HELLO, "run_timeout": -1},
        {**HELLO, "memory_limit_MB": -5}, {**HELLO, "files": {"a": "!"}}, {**HELLO, "files": ["a"]},
        {**HELLO, "files": {"a": "eA==", "a/b": "eA=="}}, {**HELLO, "fetch_files": "a"}, {**HELLO, "fetch_files": [1]},
    ],
)  # fmt: skip
async def test_input_that_is_not_a_request_is_refused_with_its_reason(served, body):
    response = await served.post("/run_code", json=body)
    assert (response.status_code, list(response.json())) == (422, ["detail"])


@ours
@pytest.mark.parametrize(
    ("content", "status"),
    [(json.dumps({**HELLO, "run_timeout": 10**400}), 422), (b" " * (9 << 20), 413), (json.dumps(HELLO), 200)],
)
async def test_bodies_are_json_of_a_limited_size(served, content, status):
    headers = {"content-type": "application/json"}
    assert (await served.post("/run_code", content=content, headers=headers)).status_code == status


@ours
@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"limits": {"cpu_s": 10**400}}, "limits.cpu_s: expected a number from 1e-06 to 1e+06"),
        ({"limits": {"cpu_s": "1"}}, "limits.cpu_s: expected a number"),
        ({"limits": {"other": 1}}, "limits: expected limits of this version, got {'other': 1}"),
        ({"policy": "root"}, "policy: expected 'pure' or 'proc', got 'root'"),
        ({"program": ["ls"]}, "policy: expected 'proc' for the command 'ls'"),
        ({"files": {"../a": ""}}, "expected a relative POSIX file name, got '../a'"),
        ({"stdin": "!"}, "expected a program"),
        ({"other": 1}, "other fields"),
    ],
)
async def test_a_program_of_fusion_sandbox_is_checked(served, changed, problem):
    body = {"program": "print(7)", "stdin": "", "files": {}, "fetch": [], "policy": "pure", "limits": {"cpu_s": 1},
            "channel": False, **changed}  # fmt: skip
    response = await served.post("/run", json=body)
    assert response.status_code == (422 if problem else 200)
    assert (problem or "7\\n") in response.text


@ours
async def test_a_body_without_a_length_is_cut_off_too(served):
    sent = 0

    async def endless():
        nonlocal sent
        while sent < 400:
            sent += 1
            yield b" " * (1 << 20)

    try:
        response = await served.post("/run_code", content=endless(), headers={"content-type": "application/json"})
        assert response.status_code == 413
    except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        pass  # it was cut off while it was still sending
    assert sent < 100
    assert (await served.post("/run_code", json=HELLO)).status_code == 200


ENDS = [
    (ExecStatus.MEMORY, -9, "memory"),
    (ExecStatus.OUTPUT_LIMIT, -9, "output"),
    (ExecStatus.DISK_LIMIT, -25, "disk"),
    (ExecStatus.POLICY, -31, "system call"),
]
MORE_TIME, MORE_MEMORY = {**HELLO, "run_timeout": 1000}, {**HELLO, "memory_limit_MB": 100_000}


def test_a_request_for_less_memory_than_an_interpreter_has_gets_that_much():
    assert read_run_request({**HELLO, "memory_limit_MB": 1}, MAX_LIMITS).limits.memory_mb == MIN_MEMORY_MB
    assert read_run_request({**HELLO, "memory_limit_MB": 64}, MAX_LIMITS).limits.memory_mb == 64


async def test_ends_at_a_limit_are_failures_with_a_note():
    gate = Gate()
    gate.go_on.set()
    async with serving(gate) as server, at(server) as http:
        for status, code, note in ENDS:
            gate.result = ExecResult(status)
            reply = (await http.post("/run_code", json=HELLO)).json()
            assert (reply["status"], reply["run_result"]["return_code"]) == ("Failed", code)
            assert note in reply["run_result"]["stderr"]


async def test_a_program_that_ends_at_a_cap_having_asked_for_more_has_no_verdict():
    gate = Gate()
    gate.go_on.set()
    async with serving(gate) as server, at(server) as http:
        for status, body, capped in (
            (ExecStatus.CPU_TIMEOUT, MORE_TIME, True),
            (ExecStatus.WALL_TIMEOUT, MORE_TIME, True),
            (ExecStatus.CPU_TIMEOUT, HELLO, False),
            (ExecStatus.MEMORY, MORE_MEMORY, True),
            (ExecStatus.MEMORY, MORE_TIME, False),
        ):
            gate.result = ExecResult(status)
            reply = (await http.post("/run_code", json=body)).json()
            assert (reply["status"] == "SandboxError") is capped
            assert gate.given["limits"].cpu_s <= MAX_LIMITS.cpu_s
            assert gate.given["limits"].memory_mb <= MAX_LIMITS.memory_mb
        async with FusionSandbox(server.url, pause_s=0.01) as sandbox:
            result = await sandbox.run("pass", limits=ExecLimits(memory_mb=100_000))
            assert result.status is ExecStatus.INFRA
            assert "below the requested one: memory_mb = 1024" in result.detail


@pytest.mark.long
async def test_a_failure_of_the_sandbox_is_not_a_verdict():
    reply = (await asked(Gate(ExecResult(ExecStatus.INFRA, detail="the zygote ended")))).json()
    assert (reply["status"], reply["message"]) == ("SandboxError", "the zygote ended")
    response = await asked(Gate(InfraError("no room")))
    assert (response.status_code, "retry-after" in response.headers) == (503, True)


# --- who may ask ------------------------------------------------------------------------------------------------------


async def test_a_token_is_asked_for_by_all_but_the_ping():
    gate = Gate()
    gate.go_on.set()
    async with serving(gate, access=AccessPolicy(token="hush")) as server, at(server) as http:
        for token, status in (("hush", 200), ("hus", 401)):
            headers = {"authorization": f"Bearer {token}"}
            assert (await http.post("/run_code", json=HELLO, headers=headers)).status_code == status
            assert (await http.get("/health", headers=headers)).status_code == status
        assert (await http.get("/v1/ping")).status_code == 200


# --- no room ----------------------------------------------------------------------------------------------------------


async def test_a_full_queue_is_answered_429_with_a_time():
    gate = Gate()
    async with serving(gate, max_waiting=1) as server, at(server, timeout=60) as http:
        work = [asyncio.create_task(http.post("/run_code", json=HELLO)) for _ in range(2)]
        await until(lambda: server.running == 1 and server._queue.num_waiting == 1)
        health = (await http.get("/health")).json()
        assert (health["running"], health["waiting"], health["run_slots"], health["max_waiting"]) == (1, 1, 1, 1)
        response = await http.post("/run_code", json=HELLO)
        assert (response.status_code, int(response.headers["retry-after"]) >= 1) == (429, True)
        gate.go_on.set()
        assert [(await task).status_code for task in work] == [200, 200]
        health = (await http.get("/health")).json()
        assert (health["served"], health["refused"], health["running"], health["waiting"]) == (2, 1, 0, 0)


async def test_a_request_that_waits_too_long_is_answered_504_which_verls_client_retries():
    gate = Gate()
    async with serving(gate, max_queue_s=0.05) as server, at(server, timeout=60) as http:
        work = asyncio.create_task(http.post("/run_code", json=HELLO))
        await until(lambda: server.running == 1)
        assert (await http.post("/run_code", json=HELLO)).status_code == 504
        gate.go_on.set()
        assert (await work).status_code == 200


async def test_a_client_that_goes_away_ends_its_program_and_leaves_the_queue():
    gate = Gate()
    async with serving(gate) as server, at(server) as http:
        work = [asyncio.create_task(http.post("/run_code", json=HELLO)) for _ in range(2)]
        await until(lambda: server.running == 1 and server._queue.num_waiting == 1)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        await until(lambda: gate.cancelled == gate.started and server.running == server._queue.num_waiting == 0)


async def test_stopping_lets_what_runs_end_and_sends_away_who_waits():
    gate = Gate()
    server = serving(gate)
    await server.start()
    async with httpx.AsyncClient(trust_env=False, verify=False) as http:
        work = [asyncio.create_task(http.post(f"{server.url}/run_code", json=HELLO)) for _ in range(2)]
        await until(lambda: server.running == 1 and server._queue.num_waiting == 1)
        stop = asyncio.create_task(server.close())
        done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().status_code for task in done] == [503]
        gate.go_on.set()
        assert sorted([(await task).status_code for task in work]) == [200, 503]
        await stop
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{server.url}/v1/ping")
        await server.close()


async def test_a_program_that_still_runs_after_the_grace_is_cancelled_and_answered_without_a_traceback(caplog):
    gate = Gate()
    async with serving(gate, grace_s=0.0) as server, at(server, timeout=60) as http:
        work = asyncio.create_task(http.post("/run_code", json=HELLO))
        await until(lambda: server.running == 1)
        await server.close()
        assert (gate.cancelled, (await work).status_code) == (1, 503)
    assert [each.exc_info for each in caplog.records if each.exc_info] == []


async def test_an_address_that_asks_many_times_lets_others_wait_for_one_turn():
    gate = Gate()
    other_address = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    async with serving(gate) as server, at(server, timeout=60) as http, at(server, transport=other_address) as other:
        order = []

        async def ask(http):
            await http.post("/run_code", json=HELLO)
            order.append(http)

        work = []
        for _ in range(5):
            work.append(asyncio.create_task(ask(http)))
            await until(lambda: server._queue.num_waiting == len(work) - 1)
        work.append(asyncio.create_task(ask(other)))
        await until(lambda: server._queue.num_waiting == 5)
        gate.go_on.set()
        await asyncio.gather(*work)
        assert order.index(other) <= 3


@ours
async def test_turns_of_sessions_alternate_between_addresses_and_no_session_expires_in_the_queue(local):
    there = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    async with (
        serving(local) as server,
        at(server, timeout=60) as http,
        at(server, transport=there, timeout=60) as other,
    ):
        order = []

        async def ask(http, name):
            reply = await http.post(f"/session/{name}", json={"code": "1"})
            order.append((http, reply.json()["value"]))

        asking = (http, http, http, other)
        times = {"limits": asdict(ExecLimits()), "idle_s": 60, "max_s": 600}
        names = [(await each.post("/session", json=times)).json()["session"] for each in asking]
        await server._queue.acquire(alone=True)
        work = []
        for each, name in zip(asking, names, strict=True):
            work.append(asyncio.create_task(ask(each, name)))
            await until(lambda: server._queue.num_waiting == len(work))
        assert all(session._idle.cancelled() for session in server._sessions.values())
        server._queue.release()  # one slot
        await asyncio.gather(*work)
        assert order == [(each, "1") for each in (http, other, http, http)]


# --- the command ------------------------------------------------------------------------------------------------------


def serving_at(*flags, **variables):
    """The command, and its address as soon as it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentenv.cli", "sandbox", "serve", *flags], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}", **variables},
    )  # fmt: skip
    return process, process.stdout.readline().split()[1].rstrip(",")


@pytest.mark.slow
def test_the_command_serves_until_it_is_stopped():
    process, url = serving_at("--port", "0", "--preimport", "pytest", AGENTENV_SANDBOX_TOKEN="hush")
    try:
        auth = {"authorization": "Bearer hush"}
        code = "def test_a(): assert 1 + 1 == 2\ndef test_b(): assert 1 == 2"
        body = {"language": "pytest", "code": code, "run_timeout": 60}
        reply = httpx.post(f"{url}/run_code", json=body, headers=auth, timeout=100).json()
        assert "1 failed, 1 passed" in reply["run_result"]["stdout"], reply
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
async def test_a_server_that_is_killed_and_started_again_costs_attempts_and_no_verdict():
    with held_port() as port:
        flags = ("--port", str(port), "--run_slots", "2")  # few slots, so that programs wait when it is killed
        process, url = await asyncio.to_thread(serving_at, *flags)
        try:
            async with FusionSandbox(url, pause_s=8.0) as sandbox:  # four attempts outlast a slow start
                work = [
                    asyncio.create_task(sandbox.run(f"import time; time.sleep(0.3); print({n})")) for n in range(12)
                ]
                await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
                process.kill()
                process.communicate()
                process, _ = await asyncio.to_thread(serving_at, *flags)
                results = await asyncio.gather(*work)
                assert [(result.status, result.stdout) for result in results] == [
                    (ExecStatus.OK, f"{n}\n") for n in range(12)
                ]
                assert max(result.attempts for result in results) > 1
        finally:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_second_signal_ends_what_runs():
    process, url = serving_at("--port", "0")
    with process, ThreadPoolExecutor() as pool:
        body = {"code": "while True: pass", "language": "python", "run_timeout": 100}
        task = pool.submit(httpx.post, f"{url}/run_code", json=body, timeout=200)
        while httpx.get(f"{url}/health").json()["running"] == 0:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert "stopping; 1 program still runs" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        words = None if task.exception(60) else task.result()
        assert words is None or words.status_code >= 500 or words.json()["status"] == "SandboxError"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "0.0.0.0"], "expected a token"),
        (["--max_waiting", "0"], "--max_waiting"),
        (["--port", "70000"], "--port"),
        (["--run_slots", "0"], "--run_slots"),
        (["--token_file", "/none"], "--token_file"),
        (["--prot", "1"], "--port"),
    ],
)
def test_the_command_refuses_what_cannot_be(flags, words, capsys):
    assert main(["sandbox", "serve", *flags]) == 2
    assert words in capsys.readouterr().err
