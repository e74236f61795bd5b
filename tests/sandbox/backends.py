"""What every backend with our own sandbox on its far side does alike, and containers and machines made of processes."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import pytest

from agentenv.errors import ConfigError
from agentenv.sandbox import ExecLimits, ExecStatus, SandboxUnavailable
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

LIMITS = ExecLimits(cpu_s=60.0, wall_s=200.0)  # which only a hang reaches
ECHO = "import os\nwhile data := os.read(3, 100):\n    os.write(3, data.upper())\n"
ROOT = Path(__file__).parents[2]


async def opened(sandbox):
    """An open sandbox, or a skip that says why this machine has none."""
    try:
        await sandbox.open()
    except SandboxUnavailable as error:
        pytest.skip("; ".join(line for line in str(error).splitlines() if line.startswith("- level")) or str(error))
    return sandbox


async def programs_run_as_they_do_here(sandbox):
    """All that `run` is given gets there, and all that a program leaves comes back."""
    program = "import os, sys\nprint(input(), open('d/a').read())\nopen('b', 'wb').write(bytes(range(256)))\n"
    program += "os.write(3, b'\\xff\\0')\nprint('e\\x1b\\udcff', file=sys.stderr)\nsys.exit(3)"
    result = await sandbox.run(
        program, stdin="in\udcff", files={"d/a": b"\xc3\xa4"}, fetch=["b", "c"], channel=True, tenant="t", limits=LIMITS
    )
    assert (result.status, result.exit_code, result.detail) == (ExecStatus.NONZERO, 3, None)
    assert result.stdout == "in\\xed\\xb3\\xbf ä\n"
    assert result.stderr == "e\\x1b\\udcff\n"
    assert (result.files, result.channel) == ({"b": bytes(range(256))}, b"\xff\0")
    assert (result.backend, result.isolation, result.attempts) == (sandbox.backend, sandbox.isolation, 1)
    assert result.layers == sandbox.layers != ()
    command = await sandbox.run(["sh", "-c", "echo $((6 * 7))"], policy="proc", limits=LIMITS)
    assert (command.status, command.stdout) == (ExecStatus.OK, "42\n")
    spent = await sandbox.run("while True: pass", limits=ExecLimits(cpu_s=0.2, wall_s=200))
    assert spent.status is ExecStatus.CPU_TIMEOUT
    for wrong in ({"files": {"../a": b""}}, {"policy": "root"}, {"fetch": ["/etc/passwd"]}):
        with pytest.raises(ConfigError):
            await sandbox.run("1", **wrong)


async def executions_are_talked_to(sandbox):
    """Bytes go both ways, nothing is lost to a caller who gave up waiting, and the end is told."""
    execution = await sandbox.start(ECHO, limits=LIMITS, tenant="t")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await execution.receive()
    await execution.send(b"hello")
    assert await execution.receive(2) == b"HE"
    assert await execution.receive() == b"LLO"
    killed = await execution.kill()
    assert (killed.status, killed.backend) == (ExecStatus.SIGNAL, sandbox.backend)
    assert await execution.receive() == b""
    await execution.send(b"to nobody")
    assert await execution.finish() == killed
    last = await sandbox.start("import os; os.write(3, b'last words'); print('x')", limits=LIMITS)
    result = await asyncio.wait_for(asyncio.shield(last.ended), 60)
    assert (result.status, result.stdout) == (ExecStatus.OK, "x\n")
    assert await last.receive() == b"last words"
    assert (await last.receive(), await last.finish()) == (b"", result)


async def sessions_stay_between_turns(sandbox):
    """What one turn defines the next one finds, and a session that ended says so."""
    async with sandbox.session(limits=LIMITS) as session:
        assert (await session.run("x = 6; print('one')")).stdout == "one\n"
        turn = await session.run("x * 7")
        assert (turn.value, turn.status, turn.isolation) == ("42", ExecStatus.OK, sandbox.isolation)
        assert not session.over
        last = await session.run("print('gone', flush=True); import os; os._exit(1)")
        assert (last.ended, last.stdout, session.over) == (True, "gone\n", True)
        again = await session.run("1")
        assert (again.ended, again.status, again.stdout) == (True, ExecStatus.NONZERO, "")
    async with sandbox.session(idle_s=0.05) as session:
        await until(lambda: session.over)
        assert (await session.run("1")).detail == "session: ended after 0.05 s without a turn"
    async with PythonTool(sandbox, limits=LIMITS) as tool:
        await tool.python("x = 6")
        assert await tool.python("x * 7") == "42"
    session = sandbox.session()
    async with session:
        pass
    assert (await session.run("1")).detail == "session: closed"


async def graders_judge(sandbox):
    """Right ones pass and wrong ones fail, by each way of judging that needs no more than a backend's programs."""
    function = FunctionSuite("add", hidden=(FunctionTest((1, 2), 3), FunctionTest((2, 2), 4)))
    proxied = AssertSuite(("add",), hidden=(AssertTest("assert add(1, 2) == 3"), AssertTest("assert add(2, 2) == 4")))
    stdio = StdioSuite(hidden=(StdioTest("1 2\n", "3\n"),))
    right, wrong = "def add(a, b): return a + b\n", "def add(a, b): return 3\n"
    for suite in (function, proxied):
        assert (await grade(sandbox, right, suite, limits=LIMITS)).score == 1.0
        failed = await grade(sandbox, wrong, suite, limits=LIMITS)
        assert [test.verdict for test in failed.tests] == [Verdict.PASSED, Verdict.FAILED]
    assert (await grade(sandbox, "print(sum(map(int, input().split())))", stdio, limits=LIMITS)).score == 1.0
    assert (await grade(sandbox, "print(4)", stdio, limits=LIMITS)).score == 0.0


def running(mark):
    """Processes of this machine with these words in memory that they were started with, or fork from those."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [int(path.parent.name)] * (mark in path.read_bytes())
        except OSError:
            continue
    return found


async def cancelling_reaches_the_program(sandbox):
    """A program whose caller gave up is gone when the caller hears of it."""
    mark = f"cancelled-{os.getpid()}-{time.monotonic_ns()}"
    task = asyncio.ensure_future(sandbox.run(["sh", "-c", f"sleep 300; : {mark}"], policy="proc", limits=LIMITS))
    await until(lambda: running(mark.encode()))
    link = await sandbox._acquire("")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running(mark.encode()) == []
    assert link.lost is None, "the far side did not heed it, and was given up"
    assert (await sandbox.run("print(1)", limits=LIMITS)).attempts == 1


async def until(condition, wait_s=60.0):
    """Wait for something to become true."""
    deadline = time.monotonic() + wait_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came about"
        await asyncio.sleep(0.02)
    return found


DOCKER = """#!{python}
import json, os, signal, sys
folder, root, args = {folder!r}, {root!r}, sys.argv[1:]
with open(folder + "/log", "a") as log:
    log.write(json.dumps(args) + "\\n")
trouble = open(folder + "/trouble").read() if os.path.exists(folder + "/trouble") else ""
if trouble == "no daemon":
    sys.exit("docker: Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?")
if args[0] == "ps":
    print(open(folder + "/ps").read() if os.path.exists(folder + "/ps") else "", end="")
elif args[0] == "rm":
    for name in args[2:]:
        if os.path.exists(folder + "/" + name):
            os.kill(int(open(folder + "/" + name).read()), signal.SIGKILL)
elif args[0] == "run":
    if trouble == "no image":
        print("docker: Error response from daemon: No such image: x", file=sys.stderr)
        sys.exit(125)
    if trouble == "garbage":
        sys.stdin.buffer.readline()
        os.write(1, b"not ours" * 100)
        sys.stdin.read()
    name = args[args.index("--name") + 1]
    with open(folder + "/" + name, "w") as file:
        file.write(str(os.getpid()))
    work = folder + "/work-" + name
    os.mkdir(work)
    os.chmod(work, 0o711)
    inside = args[args.index("--entrypoint") + 3:]
    os.chdir("/")
    flags = ["--docker", *["--no-landlock"] * (trouble == "no landlock")]
    restricted = [sys.executable, root + "/tests/sandbox/restricted.py", *flags, "--", sys.executable, *inside]
    os.execve(sys.executable, restricted, {{"PATH": os.environ["PATH"], "TMPDIR": work, "HOME": work}})
"""


def make_docker(folder):
    """A `docker` command in a folder: its containers are processes that may do what Docker's may, and no more."""
    path = Path(folder, "docker")
    path.write_text(DOCKER.format(python=sys.executable, folder=str(folder), root=str(ROOT)))
    path.chmod(0o755)
    return str(path)


def commands(folder):
    """What it was asked for, as lists of words."""
    path = Path(folder, "log")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
