"""What fails around programs: zygotes that die, stop or lie, a trainer that dies, no room, no descriptors; soaks."""

import asyncio
import contextlib
import errno
import gc
import json
import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentenv.errors import ConfigError
from agentenv.sandbox import ExecLimits, ExecStatus, Isolation, LocalSandbox, SandboxUnavailable
from agentenv.sandbox.guest import files, watch
from agentenv.sandbox.local import execution as _execution
from agentenv.sandbox.local import plan as _plan
from agentenv.sandbox.local import zygote_client as _client
from agentenv.sandbox.local.execution import CROWDED, classify
from agentenv.sandbox.local.queue import FairQueue
from tests.sandbox.conftest import opened
from tests.sandbox.escapes.run import descendants, live_processes
from tests.waits import until

ROOT = Path(__file__).parents[2]
SLEEP = "import time; print('up', flush=True); time.sleep(60)"


@pytest.fixture(params=[Isolation.NAMESPACES, Isolation.LANDLOCK, Isolation.UID], ids=str)
def level(request):
    return request.param


@pytest.fixture(autouse=True)
def room(monkeypatch):
    """Temporary files of this test alone, where other users may pass through; none is left."""
    room = tempfile.mkdtemp(prefix="agentenv-test-")
    os.chmod(room, 0o711)
    monkeypatch.setattr(tempfile, "tempdir", room)
    monkeypatch.setenv("TMPDIR", room)
    yield room
    os.rmdir(room)


def guardian(sandbox):
    return sandbox._pool.zygotes[0].pid


def zygote(sandbox):
    """The process that forks, which the guardian watches."""
    (pid,) = [child for child, (parent, _) in live_processes().items() if parent == guardian(sandbox)]
    return pid


# --- zygotes that die, stop or lie ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("victim", [guardian, zygote])
async def test_a_killed_zygote_is_replaced_and_its_program_run_again(own_sandbox, victim):
    task = asyncio.create_task(
        own_sandbox.run("import time; time.sleep(2.0); print('done')", limits=ExecLimits(wall_s=120))
    )
    await until(lambda: descendants(zygote(own_sandbox)))
    os.kill(victim(own_sandbox), signal.SIGKILL)
    result = await task
    assert (result.status, result.stdout) == (ExecStatus.OK, "done\n"), result
    assert result.attempts == 2


@pytest.mark.long
@pytest.mark.parametrize("level", [Isolation.LANDLOCK, Isolation.UID], ids=str)
@pytest.mark.parametrize("other_level", ["the same", Isolation.NAMESPACES], ids=str)
@pytest.mark.parametrize("policy", ["pure", "proc"])
async def test_a_program_ends_no_program_of_another_sandbox(level, other_level, policy):
    other_level = level if other_level == "the same" else other_level
    async with await opened(isolation=level) as one, await opened(isolation=other_level) as other:
        victim = await other.start(SLEEP, policy=policy, limits=ExecLimits(wall_s=120))
        await until(lambda: descendants(zygote(other)))
        await one.run("import os\nfor _ in range(3): os.kill(-1, 9)", policy=policy)
        assert descendants(zygote(other)), "the program of the other sandbox is gone"
        assert (await victim.kill()).detail == "killed by the caller"


@pytest.mark.long
async def test_a_sandbox_says_that_all_user_ids_are_in_use(monkeypatch):
    first = 0x7A000000 + os.getpid() % 4096 * 1024  # that no other test takes
    monkeypatch.setattr(_plan, "user_ranges", lambda: (first, 1024, 2))
    async with await opened(isolation=Isolation.UID):
        with pytest.raises(SandboxUnavailable, match="expected a range that no sandbox uses, got 1 in use"):
            await LocalSandbox(isolation=Isolation.UID).open()
    await (await opened(isolation=Isolation.UID)).aclose()  # they are free again


@pytest.mark.long
async def test_a_cancelled_run_leaves_nothing_when_it_returns(own_sandbox):
    forks = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: break\nos.write(1, b'u')\ntime.sleep(60)"
    for program in (SLEEP, "while True: pass", forks):
        policy, least = ("proc", 4) if program is forks else ("pure", 1)
        task = asyncio.create_task(own_sandbox.run(program, policy=policy, limits=ExecLimits(cpu_s=60, wall_s=60)))
        await until(lambda least=least: len(descendants(zygote(own_sandbox))) >= least)
        task.cancel()
        started = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not descendants(zygote(own_sandbox))
        assert time.monotonic() - started < 30  # milliseconds, where nothing else runs; by itself it ends after 60 s


@pytest.mark.long
async def test_a_stopped_zygote_is_noticed_and_replaced(strongest):
    stopped = strongest._pool.zygotes[0]
    os.kill(zygote(strongest), signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as impatient:
        impatient.setattr(_client, "WEDGED_S", 0.5)
        impatient.setattr(_client, "_PING_S", 0.2)
        task = asyncio.create_task(strongest.run("print('done')"))
        await until(lambda: stopped.lost)
    result = await task  # by one that may take its time to answer
    assert (result.status, result.stdout, result.attempts) == (ExecStatus.OK, "done\n", 2)


@pytest.mark.parametrize(
    ("number", "lasting"),
    [(errno.EAGAIN, False), (errno.ENOMEM, False), (errno.EMFILE, False), (errno.ENFILE, False), (errno.ENOSPC, True),
     (errno.EPERM, True), (errno.ENOSYS, True), (0, True)],
)  # fmt: skip
def test_a_setup_that_failed_for_lack_of_room_is_tried_again_as_after_a_death(number, lasting):
    starting = SimpleNamespace(_clock_stopped=contextlib.ExitStack())
    with pytest.raises(_client.ZygoteLost, match=f"fork: no .errno {number}.") as lost:
        _client.Zygote._handle(starting, json.dumps({"failed": "fork: no", "errno": number}).encode(), [])
    assert isinstance(lost.value, _client.SetupFailed) is lasting


@pytest.mark.long
async def test_a_report_that_never_comes_is_an_infra_failure(strongest, monkeypatch):
    monkeypatch.setattr(_execution, "BACKSTOP_S", 0.0)
    limits = ExecLimits(wall_s=0.05)
    results = [await strongest.run(SLEEP, limits=limits) for _ in range(2)]
    assert {result.status for result in results} <= {ExecStatus.INFRA, ExecStatus.WALL_TIMEOUT}
    assert (await strongest.run("print(1)")).stdout == "1\n"


async def running(sandbox, program=SLEEP, **options):
    """An execution that has begun, and its process."""
    known = {*descendants(zygote(sandbox))}
    execution = await sandbox.start(program, **options)
    pids = set()
    await until(lambda: pids.update(descendants(zygote(sandbox)).keys() - known) or pids)
    status = Path(f"/proc/{min(pids)}/status")
    await until(lambda: "Seccomp:\t2" in status.read_text())
    return execution, min(pids)


@pytest.mark.long
async def test_a_program_that_the_host_killed_is_run_again(own_sandbox):
    task = asyncio.create_task(own_sandbox.run("import time; time.sleep(2); print('done')"))
    pids = []
    await until(lambda: pids.extend(descendants(zygote(own_sandbox))) or pids)
    status = Path(f"/proc/{pids[0]}/status")
    await until(lambda: "Seccomp:\t2" in status.read_text())
    os.kill(pids[0], signal.SIGKILL)
    result = await task
    assert (result.status, result.stdout, result.attempts) == (ExecStatus.OK, "done\n", 2)


@contextlib.contextmanager
def small_memory(pid, mib):
    """A cgroup with less memory than programs may use, in which a process forks from now on."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(root, f"agentenv-test-{os.getpid()}")
        with contextlib.suppress(OSError):
            folder.mkdir()
            if (folder / limit).exists():
                break
            folder.rmdir()
    else:
        pytest.skip("no cgroup can be made here")
    own = Path(f"/proc/{pid}/cgroup").read_text()
    before = re.search(r"^\d+:memory:(.*)$" if "memory.l" in limit else r"^0::(.*)$", own, re.M)[1].lstrip("/")
    try:
        try:
            (folder / limit).write_text(str(mib << 20))
            (folder / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            pytest.skip(f"the memory of a cgroup cannot be limited here: {error}")
        yield folder
    finally:
        with contextlib.suppress(OSError):
            Path(root, before, "cgroup.procs").write_text(str(pid))
        for _ in range(100):
            with contextlib.suppress(OSError):
                folder.rmdir()
            if not folder.exists():
                break
            time.sleep(0.05)


FAILS_ALONE = {
    "wrong": "raise ValueError",
    "killed by itself": "import os\nfor _ in range(9): os.kill(os.getpid(), 9)\nos._exit(1)",
    "killed by its limit": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass",
}


@pytest.mark.long
async def test_a_group_that_takes_the_memory_of_its_container_has_verdicts_all_the_same(own_temporary_folder, level):
    """Each stays within its limits, and the kernel kills some of them; what it killed runs again alone."""
    hog = "import time\nhoard = bytearray(b'x') * (120 << 20)\ntime.sleep(1)\nraise ValueError"
    async with await opened(isolation=level, run_slots=4) as sandbox:
        await sandbox.run("pass")
        with small_memory(zygote(sandbox), 250):
            programs = [hog] * 4 + [f"import time\ntime.sleep(0.5)\n{end}" for end in FAILS_ALONE.values()]
            limits = ExecLimits(memory_mb=200, cpu_s=2.0, wall_s=60)
            results = await asyncio.gather(*(sandbox.run(program, limits=limits) for program in programs))
    assert [result.detail for result in results if result.status is ExecStatus.INFRA] == []
    assert {result.status for result in results[:4]} == {ExecStatus.NONZERO}


def test_memory_that_programs_lack_together_is_named(monkeypatch):
    files = {
        "/proc/self/cgroup": ["4:memory:/a/b", "0::/c"],
        "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": [str(1000 << 20)],
        "/sys/fs/cgroup/c/memory.max": ["max"],
    }
    monkeypatch.setattr(_plan, "_lines", lambda path: files.get(os.path.normpath(path), []))
    assert _plan.missing_memory(250, 4) == ""
    assert "4 programs of 251 MiB, got 1000 MiB" in _plan.missing_memory(251, 4)
    files["/sys/fs/cgroup/memory.max"] = [str(500 << 20)]
    assert "got 500 MiB" in _plan.missing_memory(250, 4)


async def test_opening_warns_where_programs_lack_memory_together(monkeypatch, caplog):
    monkeypatch.setattr(_plan, "_memory_limits", lambda: iter([300 << 20]))
    async with await opened(run_slots=2):
        assert "2 programs of 256 MiB, got 300 MiB" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("victim", [guardian, zygote])
async def test_nothing_of_a_program_outlives_a_killed_guardian_or_zygote(own_sandbox, victim):
    program = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.prctl(1, 0, 0, 0, 0)
libc.prctl(15, b'\\xff) R 1', 0, 0, 0)
for _ in range(3):
    if os.fork() == 0: break
print('up', flush=True)
time.sleep(60)
"""
    execution = await own_sandbox.start(program, policy="proc")
    await until(lambda: len(descendants(zygote(own_sandbox))) >= 4)
    children = descendants(guardian(own_sandbox))
    os.kill(victim(own_sandbox), signal.SIGKILL)
    assert (await execution.finish()).status is ExecStatus.INFRA
    await until(lambda: not children.keys() & live_processes().keys())


@pytest.mark.long
async def test_an_event_of_one_program_never_ends_the_next(strongest):
    """The next one gets the descriptors of one that ended, while a word about those is still to be read."""
    execution, pid = await running(strongest)
    forker = zygote(strongest)
    os.kill(forker, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    following = asyncio.create_task(strongest.run("import time; time.sleep(0.3); print('mine')"))
    await until(lambda: strongest._pool.zygotes[0].in_flight == 2)
    execution.release()
    os.kill(forker, signal.SIGCONT)
    result = await following
    assert (result.status, result.stdout) == (ExecStatus.OK, "mine\n")
    await execution.finish()


@pytest.mark.long
async def test_programs_end_although_a_fork_of_the_trainer_holds_its_descriptors(strongest, monkeypatch):
    execution, _ = await running(strongest, limits=ExecLimits(wall_s=120))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        fork = os.fork()
    if fork == 0:
        time.sleep(300)
        os._exit(0)
    try:
        result = await asyncio.wait_for(execution.kill(), 30)
        assert result.status is ExecStatus.SIGNAL
        process = strongest._pool.zygotes[0]._process
        monkeypatch.setattr(_client, "WEDGED_S", 60.0)  # after which it would be killed
        await strongest.aclose()
        assert process.returncode == 0, "the guardian did not notice that it should end"
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


@pytest.mark.long
async def test_a_loop_that_was_held_up_takes_no_zygote_for_lost(strongest, monkeypatch):
    monkeypatch.setattr(_client, "_PING_S", 600.0)  # so that what comes first is a report
    monkeypatch.setattr(_client, "WEDGED_S", 700.0)
    loop, forker, one = asyncio.get_running_loop(), zygote(strongest), strongest._pool.zygotes[0]
    neighbor, _ = await running(strongest, limits=ExecLimits(wall_s=3000))
    task = asyncio.create_task(strongest.run("print('done')", limits=ExecLimits(wall_s=60)))
    while one.in_flight < 2:
        await asyncio.sleep(0)
    assert select.select([one._control], [], [], 60)[0], "no report came"
    # The loop has not read it. Now its clock is past the ping, and past all limits of the program, as if a trainer had
    # copied weights meanwhile; then once more, where nothing is to be read.
    time_s = loop.time
    monkeypatch.setattr(loop, "time", lambda: time_s() + 1000)
    result = await task
    assert (result.status, result.stdout, result.attempts) == (ExecStatus.OK, "done\n", 1)
    monkeypatch.setattr(loop, "time", lambda: time_s() + 2000)
    assert (await strongest.run("print(1)")).attempts == 1
    assert (await neighbor.kill()).detail == "killed by the caller"
    assert zygote(strongest) == forker


@pytest.mark.long
async def test_a_program_whose_setting_up_took_its_time_is_unknown_and_not_wrong(own_sandbox):
    files = {f"f{number}": bytes(30_000) for number in range(900)}
    result = await own_sandbox.run("", files=files, limits=ExecLimits(wall_s=0.001))
    assert (result.status, result.attempts) == (ExecStatus.INFRA, 3)
    assert "while it was set up" in result.detail


@pytest.mark.parametrize(
    ("name", "wrong"),
    [*(("wall_s", wrong) for wrong in (0, -1, math.nan, math.inf, 1e9, "5")), ("num_inodes", 0), ("memory_mb", 15)],
)
async def test_invalid_limits_are_refused(name, wrong):
    with pytest.raises(ConfigError, match=f"limits.{name}: expected"):
        await LocalSandbox().run("", limits=ExecLimits(**{name: wrong}))


# --- the trainer dies -----------------------------------------------------------------------------------------------

TRAINER = """
import asyncio, sys
from agentenv.sandbox import Isolation, LocalSandbox
FORKS = "import os, time\\nfor _ in range(3):\\n    if os.fork() == 0: break\\ntime.sleep(60)"
async def main():
    sandbox = LocalSandbox(isolation=Isolation(sys.argv[1]), run_slots=2)
    await sandbox.open()
    tasks = [asyncio.create_task(sandbox.run(FORKS, policy="proc")) for _ in range(2)]
    print(sandbox._pool.zygotes[0].pid, sandbox._pool.zygotes[0]._base, flush=True)
    await asyncio.gather(*tasks)
asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("level", [Isolation.NAMESPACES, Isolation.LANDLOCK], ids=str)
async def test_nothing_outlives_a_killed_trainer(level):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(level)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        message = await asyncio.to_thread(trainer.stdout.readline)
        if not message:
            pytest.skip(trainer.stderr.read()[-2000:])
        started, base = [*message.split(), ""][:2]
        await until(lambda: len(descendants(int(started))) >= 7)
        ours = {*descendants(int(started)), int(started)}
        trainer.kill()
        await until(lambda: not ours & live_processes().keys())
        await until(lambda: not base or not os.path.exists(base))
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
        trainer.stderr.close()


# --- no room, no descriptors, no cores ------------------------------------------------------------------------------


@contextlib.contextmanager
def no_descriptors(spare):
    """As many may be opened here, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        # Without a spare one nothing that is closed meanwhile makes room either.
        most = max(map(int, os.listdir("/proc/self/fd"))) + 2 if spare else 3
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(spare):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_file_descriptors_it_is_an_infra_failure_and_passes(strongest):
    with no_descriptors(spare=1):
        result = await strongest.run("print(1)")
    assert result.status is ExecStatus.INFRA
    assert "Too many open files" in result.detail
    assert (await strongest.run("print(1)")).status is ExecStatus.OK


@pytest.mark.long
async def test_without_file_descriptors_no_fetched_file_is_taken_for_absent(strongest):
    task = asyncio.create_task(strongest.run("open('f', 'w').write('x')\nimport time; time.sleep(2)", fetch=["f"]))
    await until(lambda: strongest._pool.zygotes[0].in_flight)
    with no_descriptors(spare=0):
        result = await task
    assert result.status is ExecStatus.INFRA, result.files
    assert (await strongest.run("open('f', 'w').write('x')", fetch=["f"])).files == {"f": b"x"}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "message"), [("NOFILE", "open files|files are open"), ("NPROC", "unavailable")])
async def test_a_zygote_without_room_says_so_and_stays(own_sandbox, kind, message):
    if own_sandbox.isolation is not Isolation.NAMESPACES and kind == "NPROC" and os.geteuid() == 0:
        pytest.skip("the host's root has no limit of processes")
    limit, forker = getattr(resource, f"RLIMIT_{kind}"), zygote(own_sandbox)
    before = resource.prlimit(forker, limit)
    resource.prlimit(forker, limit, (20 if kind == "NOFILE" else 1, before[1]))
    result = await own_sandbox.run("print(1)", fetch=["x"])
    resource.prlimit(forker, limit, before)
    assert (result.status, result.attempts) == (ExecStatus.INFRA, 3)
    assert re.search(message, result.detail)
    assert (await own_sandbox.run("print(1)")).stdout == "1\n"
    assert zygote(own_sandbox) == forker


@contextlib.contextmanager
def small_disk(room, monkeypatch, options="size=4m,nr_inodes=1k"):
    """A folder of temporary files on a disk of its own."""
    folder = os.path.join(room, "disk")
    os.mkdir(folder, 0o711)
    mount = ["mount", "-t", "tmpfs", "-o", f"{options},mode=711", "none", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        os.rmdir(folder)
        pytest.skip("no disk of our own can be mounted here")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
        os.rmdir(folder)


async def test_a_full_disk_of_the_host_is_not_a_fault_of_the_program(room, monkeypatch):
    with small_disk(room, monkeypatch) as folder:
        async with await opened(isolation=Isolation.LANDLOCK) as sandbox:
            Path(folder, "of the host").write_bytes(bytes(3 << 20))
            with contextlib.suppress(OSError):
                Path(folder, "also").write_bytes(bytes(3 << 20))
            for program in ("print(1)", "raise OSError(28, 'No space')", "raise ValueError"):
                result = await sandbox.run(program)
                assert (result.status, result.attempts) == (ExecStatus.INFRA, 2), "whatever the program does"
                assert "the disk is full" in result.detail


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("raise OSError(28, 'No space')", ExecStatus.INFRA),
        ("raise ValueError", ExecStatus.NONZERO),
        ("os._exit(1)", ExecStatus.NONZERO),
        ("print(1)", ExecStatus.OK),
    ],
)
async def test_only_a_program_that_lacked_the_disk_has_no_verdict_where_the_host_fills_it_meanwhile(
    room, monkeypatch, end, status
):
    program = "import os, time\nopen('up', 'w').close()\nwhile os.statvfs('.').f_bavail: time.sleep(0.01)\n"
    with small_disk(room, monkeypatch) as folder:
        async with await opened(isolation=Isolation.LANDLOCK) as sandbox:
            running = asyncio.create_task(sandbox.run(program + end))
            await until(lambda: any(Path(folder).rglob("up")))
            with contextlib.suppress(OSError):
                Path(folder, "of the host").write_bytes(bytes(5 << 20))
            assert (await running).status is status


FILLS = """
import os
try:
    for name in "fgh": open(name, "wb", buffering=0).write(bytes(3 << 20))
except OSError: pass
"""


@pytest.mark.parametrize("end", ["os._exit(1)", "raise OSError(28, 'No space')", "import ctypes; ctypes.string_at(0)"])
async def test_a_program_that_fills_the_disk_within_its_quota_has_a_verdict(room, monkeypatch, end):
    with small_disk(room, monkeypatch):
        async with await opened(isolation=Isolation.LANDLOCK, run_slots=4) as sandbox:
            programs = [FILLS + "import time; time.sleep(0.3)\n" + end] * 3 + ["import time; time.sleep(0.1)\n" + end]
            results = await asyncio.gather(*(sandbox.run(program) for program in programs))
            assert [result.detail for result in results if result.status is ExecStatus.INFRA] == []
            honest = "import time; time.sleep(0.1)\nopen('x', 'wb', buffering=0).write(bytes(1 << 20))\nprint(1)"
            filling = asyncio.create_task(sandbox.run(programs[0]))
            assert (await sandbox.run(honest)).stdout == "1\n"
            await filling


async def test_a_program_whose_files_the_disk_has_no_room_for_runs_again_alone(room, monkeypatch):
    with small_disk(room, monkeypatch) as folder:
        async with await opened(isolation=Isolation.LANDLOCK, run_slots=2) as sandbox:
            neighbor = "open('f', 'wb', buffering=0).write(bytes(3 << 20))\nimport time; time.sleep(2)"
            filling = asyncio.create_task(sandbox.run(neighbor))
            await until(lambda: os.statvfs(folder).f_bavail <= 256)
            result = await sandbox.run("raise ValueError", files={"x": bytes(2 << 20)})
            assert (result.status, result.attempts) == (ExecStatus.NONZERO, 2), result.detail
            await filling


def test_a_disk_of_unknown_size_does_not_count_as_full():
    assert not files.is_full("/proc")


async def test_without_room_for_a_folder_the_sandbox_says_so(room, monkeypatch):
    with small_disk(room, monkeypatch, "nr_inodes=1"), pytest.raises(SandboxUnavailable, match="No space left"):
        await LocalSandbox(isolation=Isolation.LANDLOCK).open()


async def test_files_that_do_not_fit_are_as_if_the_program_had_written_them(strongest):
    files, limits = {"a": bytes(3 << 20)}, ExecLimits(disk_mb=1)
    result = await strongest.run("print(1)", files=files, limits=limits)
    assert result.status is ExecStatus.DISK_LIMIT
    assert "more than 1 MiB" in result.detail
    with pytest.raises(ConfigError, match="expected files that fit, got files that take more than 1 MiB"):
        await strongest.start("print(1)", files=files, limits=limits)


def report(**changes):
    base = {"cause": "wall", "cpu_s": 0.1, "wall_s": 10.0, "delay_s": 0.0, "code": 0, "signal": 9}
    return base | changes


@pytest.mark.parametrize(
    ("report", "status"),
    [
        (report(), ExecStatus.WALL_TIMEOUT),
        (report(delay_s=9.0), ExecStatus.WALL_TIMEOUT),  # it had that time again
        (report(cause="cpu"), ExecStatus.CPU_TIMEOUT),
        (report(cause="killed"), ExecStatus.INFRA),
        (report(cause="exit", signal=0, code=1, full=True), ExecStatus.NONZERO),
        (report(cause="exit", full=True), ExecStatus.SIGNAL),
        (report(cause="exit", signal=0, full=True), ExecStatus.OK),
        (report(cpu_s=5.0), ExecStatus.CPU_TIMEOUT),
        (report(cause="exit", signal=0, cpu_s=5.1), ExecStatus.CPU_TIMEOUT),
        (report(cause="exit", signal=0), ExecStatus.OK),
        (report(cause="exit", cpu_s=4.84), ExecStatus.CPU_TIMEOUT),
        (report(cause="exit", cpu_s=3.0), ExecStatus.SIGNAL),
        (report(cause="exit", signal=11, cpu_s=4.84), ExecStatus.SIGNAL),
        (report(cause="exit", signal=34), ExecStatus.SIGNAL),
        (report(cause="exit", signal=31), ExecStatus.POLICY),
        (report(cause="exit", signal=25), ExecStatus.DISK_LIMIT),
        (report(cause="setup", error="x"), ExecStatus.INFRA),
        (report(cause="processes"), ExecStatus.POLICY),
    ],
)
def test_a_verdict_is_by_cpu_and_none_is_by_waiting(report, status):
    assert classify(report, ExecLimits(cpu_s=5.0), b"")[0] is status


@pytest.mark.parametrize(("code", "status"), [(0, ExecStatus.OK), (1, ExecStatus.NONZERO)])
def test_a_lack_of_threads_decides_nothing_but_that_a_program_runs_again(code, status):
    lacking, line = report(cause="exit", signal=0, code=code), b"RuntimeError: can't start new thread"
    assert classify(lacking | {"shared_user": True}, ExecLimits(), line) == (status, CROWDED)
    assert classify(lacking | {"shared_user": False}, ExecLimits(), line) == (status, None)


@pytest.mark.parametrize(
    ("ran_s", "waited_s", "cpu_s", "lowered", "crowded", "kept"),
    [
        (0.1, 0.0, 0.1, 0, False, 0.0),
        (0.1, 3.0, 0.1, 0, False, 3.0),
        (0.1, 9.0, 0.1, 0, False, 9.0),
        (0.1, 3.0, 2.1, 0, False, 1.0),  # it waited for its own threads
        (0.1, 3.0, 5.1, 0, False, 0.0),
        (0.1, 3.0, 0.1, 1, False, 0.0),  # or gave way
        (0.1, 3.0, 0.1, 0, True, 0.0),
    ],
)
def test_time_is_given_back_that_the_host_kept_a_program_waiting(
    monkeypatch, ran_s, waited_s, cpu_s, lowered, crowded, kept
):
    killed = []
    loop = SimpleNamespace(
        _nice=10, _setting=SimpleNamespace(proc=0), _host_pid=lambda _: "1", _excess=lambda _: "",
        _kill=lambda _, cause: killed.append(cause),
        _kept_waiting_s=lambda run: watch.ProgramLoop._kept_waiting_s(loop, run),
    )  # fmt: skip
    monkeypatch.setattr(watch.linux, "read_at", lambda *_: f"{int(ran_s * 1e9)} {int(waited_s * 1e9)} 7\n")
    monkeypatch.setattr(watch.os, "getpriority", lambda *_: 10 + lowered)
    monkeypatch.setattr(watch.time, "clock_gettime", lambda _: cpu_s)
    run = watch._RunningProgram(1, 1, 1, 1, 1, 1, "pure", {"wall_s": 2.0, "given_back_s": 4.0}, 100.0, crowded=crowded)
    assert run.due() <= 102.0
    given_back = min(kept, 4.0)
    watch.ProgramLoop._look(loop, run, 102.0 + given_back - 0.01)
    assert killed == []
    watch.ProgramLoop._look(loop, run, 102.0 + given_back)
    assert killed == ["wall"]


WAITERS = {
    "spins": "while True: pass",
    "sleeps": "import time\ntime.sleep(60)",
    "yields and sleeps": """
import os, time
while True:
    end = time.monotonic() + 0.02
    while time.monotonic() < end: os.sched_yield()
    time.sleep(0.01)
""",
    "gives way": "import os\nos.nice(1)\nwhile True: pass",
    "hands over": """
import os, threading
reader, writer = os.pipe()
def answer():
    while True: os.read(reader, 1)
threading.Thread(target=answer, daemon=True).start()
while True: os.write(writer, b"x")
""",
}


@pytest.mark.long
@pytest.mark.parametrize("program", WAITERS.values(), ids=WAITERS.keys())
async def test_no_program_becomes_unknown_by_waiting_on_a_busy_host(strongest, program):
    """A core that is taken by others for most of the time."""
    with busy_core(strongest):
        result = await strongest.run(program, limits=ExecLimits(cpu_s=20.0, wall_s=1.0))
    assert result.status is ExecStatus.WALL_TIMEOUT
    assert result.attempts == 1


@contextlib.contextmanager
def busy_core(sandbox):
    core = min(os.sched_getaffinity(0))
    spin = [sys.executable, "-c", "while True: pass"]  # the kernel may share a core by sessions
    hogs = [subprocess.Popen(spin, start_new_session=True) for _ in range(3)]
    try:
        for pid in [zygote(sandbox), *(hog.pid for hog in hogs)]:
            os.sched_setaffinity(pid, {core})
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


@pytest.mark.long
async def test_a_program_that_a_busy_host_keeps_waiting_ends_by_itself(strongest):
    program = "import select\nwhile not select.select([3], [], [], 0)[0]: pass\nprint('done')"
    with busy_core(strongest):  # which leaves it a quarter of a core at most
        execution = await strongest.start(program, limits=ExecLimits(cpu_s=60.0, wall_s=8.0))
        await asyncio.sleep(9)
        await execution.send(b"end")
        result = await execution.finish()
    assert (result.status, result.stdout) == (ExecStatus.OK, "done\n")
    assert result.wall_s > 8


# --- nothing is left ------------------------------------------------------------------------------------------------


def belongings():
    """What a leak would show in."""
    gc.collect()
    # Those of others on this machine come and go.
    mounts = [
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if re.search(" /(sandbox-)?work ", line)
    ]
    return {"fds": len(os.listdir("/proc/self/fd")), "mounts": mounts, "temporary": os.listdir(tempfile.gettempdir())}


def seen_inside(sandbox):
    """Descriptors and mounts of the zygote; where they are its own, for the host's come and go."""
    place = Path(f"/proc/{zygote(sandbox)}")
    own = sandbox.isolation is Isolation.NAMESPACES
    return len(os.listdir(place / "fd")), (place / "mountinfo").read_text().count("\n") if own else 0


@pytest.mark.long
async def test_a_hundred_runs_leave_nothing(own_sandbox):
    program = "import os; open('left', 'w').write('x'); print(len(os.listdir('.')))"
    await own_sandbox.run("pass")
    started, before = guardian(own_sandbox), belongings()
    inside = seen_inside(own_sandbox) if os.geteuid() == 0 else ()
    more = {"files": {"in/a": b"1"}, "fetch": ["left"], "stdin": "x", "channel": True}
    results = await asyncio.gather(*(own_sandbox.run(program, **more if i % 10 == 0 else {}) for i in range(100)))
    assert [result.stdout for result in results] == ["2\n", *["1\n"] * 9] * 10
    await until(lambda: belongings() == before)
    if guardian(own_sandbox) == started:
        await until(lambda: len(descendants(started)) == 1)  # the zygote
        if inside:
            await until(lambda: seen_inside(own_sandbox) == inside)
    if base := own_sandbox._pool.zygotes[0]._base:
        await until(lambda: os.listdir(base) == [])


@pytest.mark.long
async def test_an_old_zygote_is_replaced_while_it_works(strongest, monkeypatch):
    monkeypatch.setattr(_client, "MAX_SERVED", 10)
    first = guardian(strongest)
    long = asyncio.create_task(strongest.run("import time; time.sleep(1); print('done')"))
    results = await asyncio.gather(*(strongest.run("print(1)") for _ in range(25)))
    assert {(result.stdout, result.attempts) for result in results} == {("1\n", 1)}
    assert (await long).attempts == 1
    await until(lambda: first not in live_processes())


async def test_closing_leaves_nothing(own_temporary_folder):
    before = belongings()
    sandbox = LocalSandbox()
    execution = await sandbox.start(SLEEP)
    session = sandbox.session()
    await session.open()
    started = guardian(sandbox)
    await sandbox.aclose()
    assert (await execution.finish()).status is ExecStatus.INFRA
    await session.aclose()
    await asyncio.sleep(0)
    assert started not in live_processes()
    await until(lambda: belongings() == before)


async def test_failed_starts_leave_nothing():
    before = belongings()
    with pytest.raises(SandboxUnavailable, match="no_such_package"):
        await LocalSandbox(preimport=("no_such_package",)).open()
    await until(lambda: belongings() == before)


@pytest.mark.parametrize(("took", "pause"), [(0.0, watch.TICK_S), (0.02, 0.18), (3.0, 0.5)])
def test_a_look_that_takes_long_is_repeated_after_half_a_second_at_most(monkeypatch, took, pause):
    run = watch._RunningProgram(1, 2, 3, 4, 5, 6, "proc", {"wall_s": 60.0}, 100.0)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: 101.0 + took))
    watch.ProgramLoop._look(SimpleNamespace(_excess=lambda run: ""), run, 101.0)
    assert run.next_look == pytest.approx(101.0 + took + pause)


@pytest.mark.long
async def test_a_tree_that_takes_long_to_remove_does_not_delay_others(own_sandbox):
    deep = "import os\nfor _ in range(300):\n    os.mkdir('d'); os.chdir('d')"
    wide = "import os\nfor n in range(500): os.mkdir(str(n))"
    limits = ExecLimits(num_inodes=100_000, disk_mb=500, cpu_s=60, wall_s=120)
    hostile = [asyncio.create_task(own_sandbox.run(program, limits=limits)) for program in (deep, wide)]
    beside = [await own_sandbox.run("print(1)", limits=ExecLimits(wall_s=60)) for _ in range(10)]
    assert {(result.stdout, result.attempts) for result in beside} == {("1\n", 1)}
    for result in await asyncio.gather(*hostile):
        assert result.status in (ExecStatus.OK, ExecStatus.DISK_LIMIT), result.detail
        assert result.attempts == 1
    if base := own_sandbox._pool.zygotes[0]._base:
        await until(lambda: os.listdir(base) == [], 120)


def test_a_hostile_tree_is_removed():
    # In memory where that can be had: this is about depth, not about the disk.
    base = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    here = os.open(base, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        os.close(os.open("f", os.O_CREAT, dir_fd=here))
        below_it = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below_it
    os.close(here)
    (base / "closed").mkdir()
    (base / "closed" / "x").mkdir()
    (base / "closed").chmod(0)
    (base / "link").symlink_to("/etc")
    (base / "odd\n\udcff").mkdir()
    files.remove_tree(str(base))
    assert not base.exists()
    assert Path("/etc").exists()
    files.remove_tree(str(base))


# --- turns ----------------------------------------------------------------------------------------------------------


async def test_turns_go_round_and_none_is_lost_when_waiters_leave():
    queue, order = FairQueue(1, max_waiting=100), []
    await queue.acquire("x")

    async def one(name):
        async with queue.slot(name):
            order.append(name)

    tasks = [asyncio.create_task(one(name)) for name in ["a"] * 4 + ["b"] * 2 + ["c"]]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)
    assert queue.num_waiting == 6
    queue.release()
    tasks[0].cancel()  # its turn has come, and it never takes it
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["b", "c", "a", "b", "a"]
    assert queue.num_waiting == 0
    await asyncio.wait_for(queue.acquire("y"), 60)


async def test_whoever_is_to_be_alone_gets_all_slots_and_is_not_overtaken():
    queue, order = FairQueue(3, max_waiting=100), []
    for _ in range(2):
        await queue.acquire("x")

    async def one(name, alone=False):
        async with queue.slot(name, alone=alone):
            order.append((name, queue._free))
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(one(*who)) for who in [("a", True), ("b",), ("c", True), ("b",), ("a",)]]
    await asyncio.sleep(0)
    assert order == []
    queue.release()
    await asyncio.sleep(0)
    assert order == [], "one runs"
    tasks[2].cancel()
    queue.release()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [name for name, _ in order] == ["a", "b", "a", "b"]
    assert order[0] == ("a", 0)
    assert queue._free == 3

    await queue.acquire("x")
    waits, next_one = (asyncio.create_task(one("y", alone=alone)) for alone in (True, False))
    await asyncio.sleep(0)
    waits.cancel()  # the one behind it need not wait
    await next_one


IGNORING = """
import asyncio, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from agentenv.sandbox import LocalSandbox

async def main():
    async with LocalSandbox() as sandbox:
        print((await sandbox.run("print(1)")).status)
        print((await sandbox.run(["sh", "-c", "true; true"], policy="proc")).status)

asyncio.run(main())
"""


@pytest.mark.long
async def test_a_process_that_ignores_its_childrens_ends_has_a_sandbox():
    await (await opened()).aclose()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", IGNORING, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert out.decode() == "ok\nok\n", err.decode()
