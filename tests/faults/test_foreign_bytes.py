"""The event loop turns while many bytes of programs, policies, clients and servers are handled.

A neighbor ticks: each function whose time grows with foreign bytes first waits, in its thread, until the loop has
turned.
One that is called on the loop itself, where nothing can turn meanwhile, is named.
"""

import asyncio
import json
import threading
from collections.abc import Mapping

import httpx
import pytest

from agentenv.sandbox import ExecLimits, ExecResult
from agentenv.sandbox.fusion import answers, requests
from agentenv.sandbox.fusion import server as fusion_server
from agentenv.sandbox.fusion.client import FusionSandbox
from agentenv.sandbox.fusion.server import FusionServer
from agentenv.sandbox.grading import FunctionSuite, FunctionTest, StdioSuite, StdioTest, grade
from agentenv.sandbox.grading import stdio as stdio_grading
from agentenv.sandbox.local import execution
from agentenv.sandbox.local import session as session_module
from tests.sandbox.conftest import opened

pytestmark = pytest.mark.long
LARGE = 100_000
"""Bytes or characters that take time on a loop."""
WATCHED = [
    (json, "loads"),
    (json, "dumps"),
    (json.JSONEncoder, "iterencode"),
    (execution, "readable"),
    (session_module, "readable"),
    (requests, "readable"),
    (fusion_server, "read_submit_request"),
    (fusion_server, "same_output"),
    (answers, "run_answer"),
    (stdio_grading, "_output_verdict"),
    (stdio_grading, "own_traceback"),
]
"""What takes time that grows with its arguments."""


def size_of(value):
    """How many bytes and characters a value has."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, ExecResult):
        return size_of((value.stdout, value.stderr))
    if isinstance(value, Mapping):
        return sum(map(size_of, (*value, *value.values())))
    return sum(map(size_of, value)) if isinstance(value, list | tuple) else 0


class Neighbor:
    """Ticks beside the work."""

    def __init__(self):
        self.loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
        self.delayed, self.handled = [], []
        """Functions that were called on the loop with much, and those during which it turned."""

    def beside(self, name, function):
        """The function, which waits for a tick."""

        def called(*args, **more):
            if size_of(args) + size_of(more) >= LARGE:
                if threading.get_ident() == self.thread:
                    self.delayed.append(name)
                else:
                    ticked = threading.Event()
                    self.loop.call_soon_threadsafe(ticked.set)
                    assert ticked.wait(60)
                    self.handled.append(name)
            return function(*args, **more)

        return called


@pytest.fixture
async def neighbor(monkeypatch):
    """One that watches."""
    neighbor = Neighbor()
    for owner, name in WATCHED:
        monkeypatch.setattr(owner, name, neighbor.beside(name, getattr(owner, name)))
    yield neighbor
    assert neighbor.delayed == []
    assert neighbor.handled


async def answer_to(server, path, body, **headers):
    """The JSON that a server answers to a client in a thread of its own."""

    def ask():
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60, headers=headers) as http:
            return http.post(path, json=body).json()

    return await asyncio.to_thread(ask)


CONTROLS = "import os\nfor fd in 1, 2:\n    os.write(fd, b'\\x01' * 60_000)\n    os.write(fd, b'\\xff' * 60_000)\n"
KEPT = ExecLimits(stdout_kb=256, stderr_kb=256)
ESCAPED = "\\x01" * 60_000 + "\\xff" * 60_000


async def a_program(sandbox):
    result = await sandbox.run(CONTROLS, limits=KEPT)
    assert result.stdout == result.stderr == ESCAPED


async def a_session(sandbox):
    async with sandbox.session(limits=KEPT) as turns:
        turn = await turns.run(CONTROLS + "'\\x01\\u20ac' * 60_000")
        assert turn.stdout == turn.stderr == ESCAPED


async def a_session_whose_program_ends(sandbox):
    async with sandbox.session(limits=KEPT) as turns:
        turn = await turns.run(CONTROLS + "os._exit(0)")
        assert turn.stdout == turn.stderr == ESCAPED


async def graded_functions(sandbox):
    suite = FunctionSuite("f", hidden=(FunctionTest((1,), 1),))
    result = await grade(sandbox, CONTROLS + "def f(x): return 'y' * 100_000", suite, limits=KEPT)
    assert result.score == 0.0


@pytest.mark.parametrize("mode", ["exact", "lines", "tokens", "floats", "apps", "livecodebench"])
async def test_graded_output(neighbor, mode):
    sandbox = await opened()
    suite = StdioSuite(hidden=(StdioTest("", "1 " * 60_000),), mode=mode)
    program = "import os, sys\nsys.stderr.write('  File \"x\", line 1\\n' * 9000)\nsys.stdout.write('1 ' * 60_000)"
    assert (await grade(sandbox, program, suite, limits=KEPT)).score == 1.0
    await sandbox.aclose()


async def served(sandbox):
    async with FusionServer(sandbox) as server:
        found = await answer_to(server, "/run_code", {"code": CONTROLS, "language": "python"})
        assert found["run_result"]["stdout"] == "\x01" * 60_000 + "\\xff" * 60_000


async def submitted(sandbox):
    row = {"id": 1, "test": [{"input": {"stdin": "x" * 150_000}, "output": {"stdout": "x"}}] * 3}
    body = {
        "completion": f"```python\n{CONTROLS}\n```",
        "id": 1,
        "config": {"language": "python", "provided_data": row, "extra": {"run_all_cases": True}},
    }
    async with FusionServer(sandbox) as server:
        found = await answer_to(server, "/submit", body)
        assert [test["passed"] for test in found["tests"]] == [False] * 3


async def a_fusion_client(sandbox):
    async with FusionServer(sandbox) as server, FusionSandbox(server.url) as far:
        assert (await far.run(CONTROLS, limits=KEPT)).stdout.startswith("\\x01" * 60_000)


SANDBOX = [a_program, a_session, a_session_whose_program_ends, graded_functions, served, submitted, a_fusion_client]


@pytest.mark.parametrize("path", SANDBOX, ids=lambda path: path.__name__)
async def test_outputs_of_programs(neighbor, path):
    sandbox = await opened()
    await path(sandbox)
    await sandbox.aclose()
