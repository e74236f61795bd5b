"""Hostile programs against the sandbox of this machine: at every level, as root, as a user, and as in a container.

What the host sees (files, listeners, processes, secrets) decides, not the program's output: see `escapes/world.py`. A
level that is not available on this machine is skipped with the sandbox's own reason.
"""

import asyncio
import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

import agentenv
from agentenv.errors import ConfigError
from agentenv.sandbox import ExecStatus, Isolation
from agentenv.sandbox.guest import linux
from agentenv.sandbox.guest.files import used
from agentenv.sandbox.local import plan
from tests.sandbox.conftest import opened
from tests.sandbox.escapes.cases import LIMITS, SHORT
from tests.sandbox.escapes.run import Bare, all_cases, descendants, run_case, swap_policies, wait_for_descendants
from tests.sandbox.escapes.world import SECRET, plant_environment
from tests.waits import until

CASES = all_cases()
LEVELS = (Isolation.NAMESPACES, Isolation.LANDLOCK, Isolation.UID)
DOCUMENTED = {"stat_canary", "metadata", "stdin_again_to_write", "name_of_the_host"}
"""Landlock has no hook for what lstat and uname say; the metadata of files is seen, the content is not."""
OF_USERS = {"core_dumps"}
"""There at the landlock level a program stays dumpable, so that its open files can be counted; a core has one byte."""
OF_CONTAINERS = {*OF_USERS, "disk_by_unlinked_files"} | {case.name for case in CASES if "hidden_disk" in case.name}
"""Root without CAP_SYS_PTRACE cannot look: the bound is num_files x file_mb."""
USER = 23456
ROOT = Path(agentenv.__file__).parent.parent


@pytest.fixture(autouse=True, scope="module")
def planted():
    """Secrets in the environment that the sandbox is started from."""
    secrets = plant_environment()
    os.environ.update(secrets)
    yield secrets
    for name in secrets:
        del os.environ[name]


async def test_our_packages_are_empty_in_the_sandbox_if_installed_next_to_others(monkeypatch):
    folder = os.path.realpath(os.path.dirname(xml.__file__))
    monkeypatch.setattr(plan, "own_folders", lambda: (folder,))
    async with await opened(isolation=Isolation.NAMESPACES) as sandbox:
        result = await sandbox.run(
            f"import os; print(os.listdir({os.path.dirname(folder)!r}) != [], os.listdir({folder!r}))"
        )
        assert result.stdout == "True []\n"


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[LEVELS[0], *(pytest.param(level, marks=pytest.mark.slow) for level in LEVELS[1:])],
    ids=str,
)
async def attacked(request, planted):
    """A sandbox of each level, started from an environment with secrets."""
    before = set(descendants())
    async with await opened(isolation=request.param) as sandbox:
        yield sandbox
    assert wait_for_descendants(before, 30) == {}, "processes outlive the sandbox"


# --- every attack, at every level -------------------------------------------------------------------------------------

WAITS = {case.name for case in CASES if case.census or case.limits.wall_s < LIMITS.wall_s}
"""Cases that take seconds."""


async def is_contained(sandbox, case, planted):
    if sandbox.isolation in case.excepted:
        pytest.skip("a documented exception of this level")
    assert await run_case(sandbox, case, planted) == []


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "case", [pytest.param(each, id=each.name, marks=[pytest.mark.long] * (each.name in WAITS)) for each in CASES]
)
async def test_an_attack_is_contained(attacked, case, planted):
    await is_contained(attacked, case, planted)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", swap_policies(CASES), ids=lambda case: case.name)
async def test_an_attack_is_contained_under_the_other_policy(attacked, case, planted):
    await is_contained(attacked, case, planted)


def test_the_exceptions_of_the_levels_are_those_that_are_documented():
    assert not {case.name for case in CASES if Isolation.NAMESPACES in case.excepted}
    assert {case.name for case in CASES if Isolation.LANDLOCK in case.excepted} == DOCUMENTED


# --- the attacks do attack --------------------------------------------------------------------------------------------

QUICK = "read_canary environment kill_victim udp chmod_owned artifact_symlink daemon_with_setsid bytearray"


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK.split())
async def test_an_attack_succeeds_on_a_plain_process(name, planted):
    (case,) = [case for case in CASES if case.name == name]
    assert await run_case(Bare(), case, planted) != []


async def test_a_program_that_dies_before_its_attack_is_not_a_pass(planted):
    case = replace(CASES[0], program="import nothing_of_the_kind")
    found = await run_case(Bare(), case, planted)
    assert len(found) == 1
    assert "never tried" in found[0]


async def test_a_program_that_dies_in_its_attack_is_not_a_pass(planted):
    case = replace(CASES[0], program="attempt('divide', lambda: 1 / 0)")
    (found,) = await run_case(Bare(), case, planted)
    assert "no answer" in found


async def test_a_lie_of_a_program_is_seen(planted):
    case = replace(CASES[0], program="say('TRYING')\nopen(W['open_file'], 'a').write('x')\nsay('HELD')")
    assert await run_case(Bare(), case, planted) == ["open was changed, made or removed"]


# --- as somebody else -------------------------------------------------------------------------------------------------


def restricted(*flags, command, timeout_s=550):
    """A command of tests/sandbox/restricted.py, in the environment that this process has, less what a user lacks."""
    where = os.pathsep.join([str(ROOT), str(ROOT / "envs"), *(path for path in sys.path if path.endswith("-packages"))])
    return subprocess.run(
        [sys.executable, "-m", "tests.sandbox.restricted", *flags, "--", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": where, "HOME": "/"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture
def as_user(tmp_path_factory, monkeypatch):
    """Flags and interpreter with which a plain user runs our tests; a skip that says why where none can."""
    if os.getuid() != 0:
        pytest.skip("these tests run as a plain user already")
    where = next((place for place in ("/mnt", "/opt") if os.access(place, os.W_OK)), None)
    with tempfile.TemporaryDirectory(prefix="escape-python-", dir=where) as folder:
        os.chmod(folder, 0o755)
        suid = Path(folder) / "suid"
        shutil.copyfile("/usr/bin/id", suid)
        suid.chmod(0o4755)
        monkeypatch.setenv("ESCAPE_SUID", str(suid))
        # The interpreter may lie in root's home: it is shown at another place, to this process alone.
        place = Path(folder) / "python"
        inside = Path(os.path.realpath(sys.executable)).relative_to(sys.base_prefix)
        for flags, python in (
            (["--uid", str(USER)], sys.executable),
            (["--uid", str(USER), "--bind", sys.base_prefix, str(place)], str(place / inside)),
        ):
            probe = restricted(*flags, command=[python, "-c", "import agentenv.sandbox, tests.sandbox.escapes.run"])
            if probe.returncode == 0:
                yield flags, python
                return
    pytest.skip(f"user {USER} reaches no interpreter with our packages: {probe.stderr.strip()[-300:]}")


def reported(ran):
    """The report of the matrix, or a skip with the sandbox's own reason."""
    if ran.returncode == 3:
        pytest.skip(json.loads(ran.stdout)["unavailable"])
    assert ran.returncode in (0, 1), ran.stderr[-2000:]
    return json.loads(ran.stdout)


NEIGHBORS = """
import asyncio, sys
from agentenv.sandbox import LocalSandbox
from agentenv.sandbox.grading import AssertSuite, AssertTest, FunctionSuite, FunctionTest, PytestSuite, grade

HOARDS = '''
import threading, time
threading.stack_size(1 << 16)
try:
    while True: threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
except RuntimeError: time.sleep(3)
'''
HONEST = '''
import time
from concurrent.futures import ThreadPoolExecutor
time.sleep(1)
with ThreadPoolExecutor(8) as pool: print(sum(pool.map(lambda x: (time.sleep(.05), x)[1], range(40))))
'''
CLAIMS = "import time\\ntime.sleep(1)\\nraise RuntimeError(\\"can't start new thread\\")"

async def main():
    async with LocalSandbox(isolation="landlock", run_slots=5) as sandbox:
        ran = await asyncio.gather(*map(sandbox.run, [HONEST, CLAIMS, HOARDS, HOARDS, HOARDS, HOARDS]))
        print(ran[0].stdout, ran[0].attempts, ran[1].status.value, ran[1].attempts)
    async with LocalSandbox(isolation="landlock", run_slots=16) as sandbox:  # two zygotes, each with one program
        ran = await asyncio.gather(*map(sandbox.run, [HONEST, HOARDS]))
        print(ran[0].stdout, ran[0].attempts)

SUITES = (
    FunctionSuite("f", hidden=(FunctionTest((), 780),)),
    AssertSuite(("f",), hidden=(AssertTest("assert f() == 780"),)),
    PytestSuite({"t.py": b"from solution import f\\ndef test_it(): assert f() == 780"}, hidden=("t.py::test_it",)),
)
DEFINES = "def f():\\n" + HONEST.replace("\\n", "\\n    ").replace("print", "return ").replace("sleep(1)", "sleep(2)")

async def graded():
    async with LocalSandbox(isolation="landlock", run_slots=5, preimport=("pytest",)) as sandbox:
        async def hoard():
            await asyncio.sleep(0.5)  # they may have more threads than whoever began before
            await sandbox.run(HOARDS.replace("3", "6"))
        for suite in SUITES:
            result, *_ = await asyncio.gather(grade(sandbox, DEFINES, suite), *(hoard() for _ in range(4)))
            print(result.score, result.num_executions)

asyncio.run(main() if sys.argv[1] == "programs" else graded())
"""


@pytest.mark.long
def test_a_program_whose_neighbors_of_the_same_user_hoard_threads_runs_again_alone(as_user):
    flags, python = as_user
    ran = restricted(*flags, command=[python, "-c", NEIGHBORS, "programs"])
    assert ran.stdout == "780\n 2 nonzero 2\n780\n 2\n", ran.stderr


@pytest.mark.long
def test_an_answer_whose_neighbors_of_the_same_user_hoard_threads_keeps_its_grade(as_user):
    flags, python = as_user
    ran = restricted(*flags, command=[python, "-c", NEIGHBORS, "graded"])
    assert ran.stdout == "1.0 1\n1.0 4\n1.0 1\n", ran.stderr


FEW = (
    "read_canary,environment,kill_victim,fork_when_pure,artifact_symlink,stdlib_works,subprocess_works,forged_report,"
    "own_end_by_lowered_cpu_limit,own_end_by_kill_of_itself,hidden_memory_by_name,hidden_memory_unmapped"
)


@pytest.mark.parametrize("cases", [FEW, pytest.param("", marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("level", LEVELS[:2], ids=str)
def test_every_attack_is_contained_for_a_plain_user(level, cases, as_user):
    flags, python = as_user
    but = OF_USERS if level is Isolation.LANDLOCK else ()
    command = [python, "-m", "tests.sandbox.escapes", level, "--cases", cases, "--but", ",".join(but)]
    report = reported(restricted(*flags, command=command))
    assert report == {"uid": USER, "holes": {}}


@pytest.mark.parametrize("who", ["root", "user"])
@pytest.mark.parametrize("cases", [FEW, pytest.param("", marks=pytest.mark.slow)], ids=["few", "all"])
def test_every_attack_is_contained_in_a_container_like_dockers(who, cases, request):
    if who == "user":
        flags, python = request.getfixturevalue("as_user")
    elif os.getuid() == 0:
        flags, python = [], sys.executable
    else:
        pytest.skip("not root")
    command = [python, "-m", "tests.sandbox.escapes", "landlock", "--cases", cases, "--but", ",".join(OF_CONTAINERS)]
    assert reported(restricted("--docker", *flags, command=command))["holes"] == {}


NOTHING = """
import asyncio, os, sys
from agentenv.sandbox import LocalSandbox, SandboxUnavailable
async def main():
    for options in ({}, {"allow_unsafe": True}):
        os.environ.pop("AGENTENV_ALLOW_UNSAFE_SANDBOX", None)
        if not options:
            os.environ["AGENTENV_ALLOW_UNSAFE_SANDBOX"] = "1"
        sandbox = LocalSandbox(**options)
        for attempt in (sandbox.open, lambda: sandbox.run("open(sys.argv[1], 'w')"), lambda: sandbox.start("1")):
            try:
                await attempt()
            except SandboxUnavailable as error:
                print("REFUSED:", error)
            else:
                print("IT RAN")
        await sandbox.aclose()
asyncio.run(main())
"""


@pytest.mark.long
def test_with_neither_namespaces_nor_landlock_nothing_runs_and_the_reasons_are_named():
    ran = restricted("--docker", "--no-landlock", command=[sys.executable, "-c", NOTHING])
    assert ran.returncode == 0, ran.stderr
    assert "IT RAN" not in ran.stdout
    refusals = ran.stdout.split("REFUSED: ")[1:]
    assert len(refusals) == 6
    for reason in refusals:
        assert "namespaces" in reason
        assert "landlock" in reason
        assert re.search(r"not permitted|EPERM", reason)
        assert re.search(r"not implemented|ENOSYS|absent", reason)


BELOW_TMP = """
import asyncio, sys
from agentenv.sandbox import Isolation, LocalSandbox, SandboxUnavailable
async def main():
    for level in (Isolation.NAMESPACES, Isolation.LANDLOCK):
        try:
            async with LocalSandbox(isolation=level, preimport=("pytest",)) as sandbox:
                program = "import os, sys, tempfile, wave; tempfile.TemporaryFile(); print(sys.prefix)"
                for argv in (program, ["python3", "-c", program]):
                    result = await sandbox.run(argv, policy="proc")
                    print(result.stdout, result.stderr, result.detail or "")
        except SandboxUnavailable as error:
            print(sys.prefix, error, sys.prefix)
asyncio.run(main())
"""


@pytest.mark.long
def test_an_interpreter_that_lies_below_tmp_is_found_inside():
    if os.getuid() != 0:
        pytest.skip("a folder cannot be shown at another place")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        place = Path(folder) / "python"
        python = place / Path(os.path.realpath(sys.executable)).relative_to(sys.base_prefix)
        ran = restricted("--bind", sys.base_prefix, str(place), command=[str(python), "-c", BELOW_TMP])
    if ran.returncode and "bind" in ran.stderr:
        pytest.skip(ran.stderr[-300:])
    assert ran.stdout.count(str(place)) == 4, (ran.stdout, ran.stderr)


async def test_packages_in_a_folder_of_the_name_of_the_working_folder_are_shown_and_programs_work_in_another(
    monkeypatch,
):
    """Once a package that pytest imports when it is needed was hidden, and right programs failed their tests."""
    first = os.path.join("/", Path(pytest.__file__).resolve().parts[1])
    monkeypatch.setattr(plan, "_WORK_FOLDERS", (first, "/sandbox-work"))
    program = "import os, pytest; open('x', 'w'); print(os.getcwd(), os.path.isfile(pytest.__file__), os.listdir('.'))"
    async with await opened(isolation=Isolation.NAMESPACES, preimport=("pytest",)) as sandbox:
        result = await sandbox.run(program)
    assert (result.stdout, result.stderr) == ("/sandbox-work True ['x']\n", "")


# --- what only the host can see ---------------------------------------------------------------------------------------


@pytest.fixture(params=LEVELS[:2], ids=str)
async def sandbox(request):
    async with await opened(isolation=request.param, limits=replace(LIMITS, cpu_s=30.0, wall_s=60.0)) as sandbox:
        yield sandbox


@pytest.mark.long
async def test_no_process_of_a_program_is_the_hosts_root(sandbox):
    before = set(descendants())
    execution = await sandbox.start("import os, time\nos.write(3, b'up')\ntime.sleep(60)")
    try:
        assert await execution.receive() == b"up"
        new = [pid for pid in descendants() if pid not in before]
        assert new
        for pid in new:
            status = Path(f"/proc/{pid}/status").read_text()
            ids = re.findall(r"^[UG]id:\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)$", status, re.M)
            assert len(ids) == 2
            assert "0" not in {number for line in ids for number in line}, status
            assert re.search(r"^CapEff:\s+0+$", status, re.M)
            assert re.search(r"^NoNewPrivs:\s+1$", status, re.M)
            assert re.search(r"^Seccomp:\s+2$", status, re.M)
    finally:
        await execution.kill()


def written_memory(pid):
    """The private memory of a process that it can write."""
    data = []
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for start, end in re.findall(r"^(\w+)-(\w+) rw", maps.read(), re.M):
            memory.seek(int(start, 16))
            with contextlib.suppress(OSError):  # a part that is reserved, and not there
                data.append(memory.read(int(end, 16) - int(start, 16)))
    return b"".join(data)


MANY_NAMES = """
import os, time
os.symlink(name + '-target', name + '-link')
for number in range(200):
    os.makedirs(f'{name}-{number % 20}/{name}/{number}')
os.chmod(name + '-1', 0)
gone = open(name + '-gone', 'w')
os.unlink(gone.name)
time.sleep(0.3)
"""


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS[:2], ids=str)
async def test_nothing_of_a_program_stays_in_a_process_that_forks_the_next(level):
    mark = "of-a-program-" + os.urandom(8).hex()
    text = f"{mark}\n" * 4000
    before = set(descendants())
    async with await opened(isolation=level) as sandbox:
        for given in (
            {"fetch": [mark, *(f"{mark}-{number}" for number in range(200))]},
            {"fetch": [mark], "files": {f"{mark}.txt": text.encode()}, "stdin": text},
            {"fetch": [mark], "policy": "proc", "channel": True},
        ):
            for size in (40, 600, len(text)):
                program = f"open({mark!r}, 'w').write({text[:size]!r})"
                result = await sandbox.run(program, **given)
                assert result.files[mark].decode() == text[:size], result
                assert (await sandbox.run(f"{program}\nraise OSError(28, {mark!r})", **given)).exit_code == 1
            assert (await sandbox.run(f"name = {mark!r}\n{MANY_NAMES}", **given)).exit_code == 0
        await sandbox.run(["cat", mark], files={mark: text.encode()}, policy="proc", fetch=[mark])
        async with sandbox.session() as session:
            await session.run(program)
        alive = [pid for pid in descendants() if pid not in before]
        assert len(alive) >= 2, "the guardian and the zygote"
        for pid in alive:
            try:
                memory = written_memory(pid)
            except PermissionError as error:
                pytest.skip(str(error))
            assert b"agentenv" in memory
            assert mark.encode() not in memory


SPY = """
import ctypes, json, os, socket
found = []
reply = json.loads(input())
def tried(what, deed):
    try:
        found.append((what, str(deed())))
    except (OSError, MemoryError):
        pass
for place in {reply['cwd'] + '/mark', '/tmp/mark', '/work/mark', 'mark', f"/proc/{reply['pid']}/cwd/mark"}:
    tried(place, lambda: open(place).read())
if reply['cwd'] != os.getcwd():
    tried('their folder', lambda: os.listdir(reply['cwd']))
    tried('all folders', lambda: os.listdir(os.path.dirname(reply['cwd'])))
tried('abstract', lambda: socket.socket(socket.AF_UNIX).connect('\\0' + reply['mark']))
libc = ctypes.CDLL(None, use_errno=True)
for number, args in ((29, (4711, 1, 0)), (68, (4711, 0)), (64, (4711, 1, 0))):
    if libc.syscall(number, *args) >= 0:
        found.append(('ipc', number))
if os.getpid() != reply['pid']:
    tried('signal', lambda: os.kill(reply['pid'], 9))
print(found)
"""
NEIGHBOR = """
import ctypes, json, os, socket, time
open('mark', 'w').write('theirs')
libc = ctypes.CDLL(None)
libc.syscall(29, 4711, 1, 0o1666)
try:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind('\\0mark-of-a-neighbor')
    listener.listen()
except OSError:
    pass
os.write(3, json.dumps({'cwd': os.getcwd(), 'pid': os.getpid(), 'mark': 'mark-of-a-neighbor'}).encode())
time.sleep(60)
"""


@pytest.mark.long
async def test_two_programs_at_a_time_do_not_meet(sandbox):
    neighbor = await sandbox.start(NEIGHBOR)
    try:
        reply = await neighbor.receive()
        spied = await sandbox.run(SPY, stdin=reply + b"\n")
        assert (spied.status, spied.stdout) == (ExecStatus.OK, "[]\n"), spied
    finally:
        ended = await neighbor.kill()
    assert ended.status is not ExecStatus.OK


PASSED = """
import array, os, socket
pair = socket.socket(fileno=3)
for _ in range(200):
    fds = [os.open('.', os.O_RDONLY) for _ in range(20)]
    pair.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', fds))])
    [os.close(fd) for fd in fds]
"""


@pytest.mark.long
async def test_descriptors_that_a_program_passes_are_not_taken(sandbox):
    await sandbox.run("pass")
    before = len(os.listdir("/proc/self/fd"))
    execution = await sandbox.start(PASSED)
    while await execution.receive():
        assert len(os.listdir("/proc/self/fd")) < before + 20
    await execution.finish()
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before)


@pytest.mark.long
async def test_a_program_cannot_make_itself_unknown(sandbox):
    """Infra failures are not graded: whoever can cause one is never wrong."""
    programs = (
        "import os\nos.rmdir(os.getcwd())\nos._exit(1)",
        "import os\nos.rename(os.getcwd(), '../gone')\nos._exit(1)",
        "import os\nos.mkdir('x')\nos.chdir('x')\nos.rmdir('../x')\nos._exit(1)",
        "import threading, time\nfor _ in range(8): threading.Thread(target=lambda: time.sleep(100)).start()",
        "import time\nwhile True: time.sleep(0.0001)",
        "import os\nopen('x', 'w').close()\nos.chmod('.', 0)\nos._exit(1)",
        "\0",
        "(" * 5000,
        "x = '\ud800'",
        "",
    )
    results = await asyncio.gather(*(sandbox.run(text, fetch=["x"], limits=SHORT) for text in programs))
    assert [result.detail for result in results if result.status is ExecStatus.INFRA] == []
    assert sum(result.status is ExecStatus.OK for result in results) == 1, "the empty one"


HOG = """
import os
for _ in range(2 * os.cpu_count() + 2):
    if os.fork() == 0:
        while True: pass
while True: pass
"""


@pytest.mark.long
async def test_a_program_cannot_make_itself_unknown_by_its_own_children(sandbox):
    """They keep it from running, so that the host looks overloaded; how it ends is told all the same."""
    limits = replace(LIMITS, cpu_s=7.0, wall_s=3.0, num_processes=1000)
    result = await sandbox.run(HOG, policy="proc", limits=limits)
    assert result.status in (ExecStatus.WALL_TIMEOUT, ExecStatus.CPU_TIMEOUT), result.detail


@pytest.mark.long
@pytest.mark.parametrize(
    "given",
    [
        {"files": {"a": bytes(3 << 20)}},
        {"files": {f"a{number}": b"x" for number in range(60)}},
        {"stdin": "\ud800"},
        {"files": {"\ud800": b""}},
        {"fetch": ["\ud800"]},
        {"fetch": [f"f{number}" for number in range(20_000)]},
    ],
    ids=["big file", "many files", "odd input", "odd name", "odd name to fetch", "many to fetch"],
)
async def test_inputs_of_a_program_cannot_make_its_outcome_unknown(given, sandbox):
    """A model may have chosen it: refused at once, or run, but no infra failure and no exception of somebody else's."""
    try:
        result = await sandbox.run("print(1)", **given, limits=replace(LIMITS, disk_mb=2, num_inodes=20))
    except ConfigError:
        return
    assert result.status in (ExecStatus.OK, ExecStatus.DISK_LIMIT), result.detail


def test_an_entry_that_vanishes_or_that_is_closed_while_usage_is_counted(tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / "tree" / name).mkdir(parents=True)
    assert used(str(tmp_path / "tree"), max_inodes=9)[1] == 3
    actual = linux.syscall

    def failing(name, *arguments):
        if name in wrong:
            raise linux.StepError(wrong[name], name)
        return actual(name, *arguments)

    monkeypatch.setattr(linux, "syscall", failing)
    wrong = {"newfstatat": errno.ENOENT, "openat": errno.ENOENT}
    assert used(str(tmp_path / "tree"), max_inodes=9) == (0, 3)
    wrong = {"openat": errno.EACCES}
    assert used(str(tmp_path / "tree"), max_inodes=9)[1] > 9


def test_no_secret_prefix_is_in_the_programs_themselves():
    assert not [case.name for case in CASES if SECRET in case.program + case.then]
