"""What fails around programs: zygotes that die, stop or lie, a trainer that dies, no room, no descriptors; soaks."""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from agentenv.errors import ConfigError
from agentenv.sandbox import (
    ExecLimits,
    Isolation,
    LocalSandbox,
    SandboxUnavailable,
    Status,
    _client,
    _execution,
    _pool,
    files,
)
from agentenv.sandbox._execution import classify
from agentenv.sandbox.queue import FairQueue

ROOT = Path(__file__).parents[2]
SLEEP = "import time; print('up', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def room(monkeypatch):
    """Temporary files of this test alone, where other users may pass through; none is left."""
    room = tempfile.mkdtemp(prefix="agentenv-test-")
    os.chmod(room, 0o711)
    monkeypatch.setattr(tempfile, "tempdir", room)
    monkeypatch.setenv("TMPDIR", room)
    yield room
    os.rmdir(room)


def processes(marker=b"_zygote"):
    """Processes of ours: guardians, zygotes, and what was forked from them, by pid."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                line = Path(entry.path, "cmdline").read_bytes()
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if marker in line and fields[0] != "Z":
                found[int(entry.name)] = int(fields[1])
    return found


def below(pid):
    """The processes under one, all generations."""
    everything = processes(b"")
    found, todo = set(), [pid]
    while todo:
        parent = todo.pop()
        children = [child for child, its in everything.items() if its == parent]
        found.update(children)
        todo += children
    return found


async def until(condition, seconds=20.0):
    """Wait for something that is about to be so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        await asyncio.sleep(0.01)


def guardian(sandbox):
    return sandbox._pool.zygotes[0].pid


def zygote(sandbox):
    """The process that forks, which the guardian watches."""
    (pid,) = [child for child, parent in processes(b"").items() if parent == guardian(sandbox)]
    return pid


# --- zygotes that die, stop or lie ----------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [guardian, zygote])
async def test_a_killed_zygote_is_replaced_and_its_program_run_again(own_sandbox, victim):
    task = asyncio.create_task(own_sandbox.run("import time; time.sleep(0.5); print('done')"))
    await asyncio.sleep(0.2)
    os.kill(victim(own_sandbox), signal.SIGKILL)
    result = await task
    assert (result.status, result.stdout) == (Status.OK, "done\n"), result.detail
    assert result.attempts == 2


async def test_a_program_whose_zygote_always_dies_is_an_infra_failure(own_sandbox):
    async def killer():
        while True:
            await asyncio.sleep(0.02)
            for one in own_sandbox._pool.zygotes:
                if one.in_flight:
                    os.kill(one.pid, signal.SIGKILL)

    task = asyncio.create_task(killer())
    result = await own_sandbox.run("import time; time.sleep(30)")
    task.cancel()
    assert (result.status, result.attempts) == (Status.INFRA, 3)
    assert result.detail


async def test_what_a_killed_zygote_ran_is_gone(own_sandbox):
    program = (
        "import os, time\nfor _ in range(3):\n    if os.fork() == 0: break\nprint('up', flush=True)\ntime.sleep(60)"
    )
    execution = await own_sandbox.start(program, policy="proc")
    started = guardian(own_sandbox)
    await until(lambda: len(below(started)) >= 4)
    children = below(started)
    os.kill(zygote(own_sandbox), signal.SIGKILL)
    assert (await execution.finish()).status is Status.INFRA
    await until(lambda: not children & processes(b"").keys())


async def test_a_program_is_never_root_of_the_host(own_sandbox):
    execution = await own_sandbox.start(SLEEP)
    pids = []
    await until(lambda: pids.extend(below(zygote(own_sandbox))) or pids)
    status = Path(f"/proc/{pids[0]}/status")
    await until(lambda: "Seccomp:\t2" in status.read_text())
    assert "0" not in uids(pids[0])
    status = status.read_text()
    await execution.kill()
    assert "NoNewPrivs:\t1" in status
    assert "CapEff:\t0000000000000000" in status


def uids(pid):
    """Real, effective, saved and file system user, as the host sees them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1:] for line in lines if line.startswith("Uid:"))


async def test_a_stopped_zygote_is_noticed_and_replaced(own_sandbox, monkeypatch):
    monkeypatch.setattr(_client, "WEDGED_S", 0.5)
    monkeypatch.setattr(_client, "_PING_S", 0.2)
    os.kill(zygote(own_sandbox), signal.SIGSTOP)
    result = await own_sandbox.run("print('done')")
    assert (result.status, result.stdout, result.attempts) == (Status.OK, "done\n", 2)


async def test_one_that_says_garbage_is_lost(own_sandbox):
    task = asyncio.create_task(own_sandbox.run("import time; time.sleep(0.3); print('done')"))
    await asyncio.sleep(0.1)
    own_sandbox._pool.zygotes[0]._control.send(b"garbage")  # which the zygote takes for the end
    result = await task
    assert (result.status, result.attempts) == (Status.OK, 2)
    one = own_sandbox._pool.zygotes[0]
    for said in (b"{", b"[]", b'{"id": 99}', b'"x"'):
        with pytest.raises((ValueError, KeyError, TypeError)):
            one._heed(said, [])


async def test_a_report_that_never_comes_is_an_infra_failure(own_sandbox, monkeypatch):
    monkeypatch.setattr(_execution, "BACKSTOP_S", 0.0)
    limits = ExecLimits(wall_s=0.05)
    results = [await own_sandbox.run(SLEEP, limits=limits) for _ in range(2)]
    assert {result.status for result in results} <= {Status.INFRA, Status.WALL_TIMEOUT}
    assert (await own_sandbox.run("print(1)")).stdout == "1\n"


# --- the trainer dies -----------------------------------------------------------------------------------------------

TRAINER = """
import asyncio, sys
from agentenv.sandbox import Isolation, LocalSandbox
FORKS = "import os, time\\nfor _ in range(3):\\n    if os.fork() == 0: break\\ntime.sleep(60)"
async def main():
    sandbox = LocalSandbox(isolation=Isolation(sys.argv[1]), run_slots=2)
    await sandbox.open()
    tasks = [asyncio.create_task(sandbox.run(FORKS, policy="proc")) for _ in range(2)]
    await asyncio.sleep(0.3)
    print(sandbox._pool.zygotes[0].pid, sandbox._pool.zygotes[0]._base, flush=True)
    await asyncio.gather(*tasks)
asyncio.run(main())
"""


@pytest.mark.parametrize("level", [Isolation.NAMESPACES, Isolation.LANDLOCK], ids=str)
async def test_nothing_outlives_a_killed_trainer(level):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(level)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        said = await asyncio.to_thread(trainer.stdout.readline)
        if not said:
            pytest.skip(trainer.stderr.read()[-2000:])
        started, base = [*said.split(), ""][:2]
        ours = below(int(started)) | {int(started)}
        assert len(ours) >= 8
        trainer.kill()
        await until(lambda: not ours & processes(b"").keys())
        await until(lambda: not base or not os.path.exists(base))
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
        trainer.stderr.close()


# --- no room, no descriptors, no cores ------------------------------------------------------------------------------


async def test_without_file_descriptors_it_is_an_infra_failure_and_passes(own_sandbox):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        os.close(taken.pop())
        result = await own_sandbox.run("print(1)")
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert result.status is Status.INFRA
    assert "Too many open files" in result.detail
    assert (await own_sandbox.run("print(1)")).status is Status.OK


async def test_files_that_do_not_fit_are_as_if_the_program_had_written_them(own_sandbox):
    files, limits = {"a": bytes(3 << 20)}, ExecLimits(disk_mb=1)
    result = await own_sandbox.run("print(1)", files=files, limits=limits)
    assert result.status is Status.DISK_LIMIT
    assert "more than 1 MiB" in result.detail
    with pytest.raises(ConfigError, match="expected what fits, got its files take more than 1 MiB"):
        await own_sandbox.start("print(1)", files=files, limits=limits)


async def test_bombs_next_door_are_not_felt(own_sandbox):
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    limits = ExecLimits(cpu_s=2, wall_s=3, num_processes=8)
    bombs = [await own_sandbox.start(bomb, policy="proc", limits=limits) for _ in range(2)]
    results = [await own_sandbox.run("print(1)", limits=ExecLimits(wall_s=60)) for _ in range(5)]
    assert [result.stdout for result in results] == ["1\n"] * 5
    for one in bombs:
        assert (await one.kill()).status is not Status.INFRA


def told(**changes):
    base = {"cause": "wall", "cpu_s": 0.1, "leader_cpu_s": 0.1, "wall_s": 10.0, "delay_s": 0.0, "code": 0, "signal": 9}
    return base | changes


@pytest.mark.parametrize(
    ("report", "status"),
    [
        (told(), Status.WALL_TIMEOUT),
        (told(delay_s=5.0), Status.INFRA),
        (told(delay_s=5.0, crowded=True), Status.WALL_TIMEOUT),
        (told(cause="cpu"), Status.CPU_TIMEOUT),
        (told(delay_s=5.0, cpu_s=3.0, leader_cpu_s=3.0), Status.WALL_TIMEOUT),
        (told(delay_s=2.1, cpu_s=2.1, leader_cpu_s=0.1), Status.WALL_TIMEOUT),
        (told(cpu_s=5.0), Status.CPU_TIMEOUT),
        (told(cause="exit", signal=0, cpu_s=5.1), Status.CPU_TIMEOUT),
        (told(cause="exit", signal=0), Status.OK),
        (told(cause="exit", signal=34), Status.SIGNAL),
        (told(cause="exit", signal=31), Status.POLICY),
        (told(cause="exit", signal=25), Status.DISK_LIMIT),
        (told(cause="setup", error="x"), Status.INFRA),
        (told(cause="processes"), Status.POLICY),
    ],
)
def test_a_verdict_is_by_cpu_and_an_overloaded_host_gives_none(report, status):
    assert classify(report, ExecLimits(cpu_s=5.0), b"")[0] is status


async def test_an_overloaded_host_gives_no_verdict_after_one_retry(own_sandbox):
    """A core that is taken by others for most of the time, and a limit too short for what is left."""
    core = min(os.sched_getaffinity(0))
    pids = [zygote(own_sandbox)]
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        for pid in [*pids, *(hog.pid for hog in hogs)]:
            os.sched_setaffinity(pid, {core})
        result = await own_sandbox.run("while True: pass", limits=ExecLimits(cpu_s=1.5, wall_s=1.0))
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert result.status is Status.INFRA, (result.cpu_s, result.run_delay_s)
    assert result.attempts == 2
    assert result.detail.startswith("host:")


# --- nothing is left ------------------------------------------------------------------------------------------------


def belongings():
    """What a leak would show in."""
    gc.collect()
    mounts = Path("/proc/self/mountinfo").read_text().count("\n")
    return {"fds": len(os.listdir("/proc/self/fd")), "mounts": mounts, "temporary": os.listdir(tempfile.gettempdir())}


async def soak(sandbox, count):
    program = "import os; open('left', 'w').write('x'); print(len(os.listdir('.')))"
    for _ in range(count // 100):
        kinds = [
            sandbox.run(program, files={"in/a": b"1"}, fetch=["left"], stdin="x", channel=True) if i % 10 == 0
            else sandbox.run(program)
            for i in range(100)
        ]  # fmt: skip
        for index, result in enumerate(await asyncio.gather(*kinds)):
            assert result.stdout == ("2\n" if index % 10 == 0 else "1\n"), result


async def leaves_nothing(sandbox, count):
    await sandbox.run("pass")
    started, before = guardian(sandbox), belongings()
    inside = len(os.listdir(f"/proc/{zygote(sandbox)}/fd")) if os.geteuid() == 0 else 0
    await soak(sandbox, count)
    assert belongings() == before
    if guardian(sandbox) == started:
        assert len(below(started)) == 1
        zombies = [child for child, parent in processes(b"").items() if parent == zygote(sandbox)]
        assert zombies == []
        if inside:
            assert len(os.listdir(f"/proc/{zygote(sandbox)}/fd")) == inside
    if base := sandbox._pool.zygotes[0]._base:
        assert os.listdir(base) == []


async def test_a_thousand_runs_leave_nothing(own_sandbox):
    await leaves_nothing(own_sandbox, 700 if own_sandbox.isolation is Isolation.NAMESPACES else 300)


async def test_an_old_zygote_is_replaced_while_it_works(own_sandbox, monkeypatch):
    monkeypatch.setattr(_pool, "MAX_SERVED", 10)
    first = guardian(own_sandbox)
    long = asyncio.create_task(own_sandbox.run("import time; time.sleep(1); print('done')"))
    results = await asyncio.gather(*(own_sandbox.run("print(1)", tenant=str(i)) for i in range(25)))
    assert {(result.stdout, result.attempts) for result in results} == {("1\n", 1)}
    assert (await long).attempts == 1
    await until(lambda: first not in processes(b""))


async def test_closing_leaves_nothing(own_temporary_folder):
    before = belongings()
    sandbox = LocalSandbox()
    execution = await sandbox.start(SLEEP)
    session = sandbox.session()
    await session.open()
    started = guardian(sandbox)
    await sandbox.aclose()
    assert (await execution.finish()).status is Status.INFRA
    await session.aclose()
    await asyncio.sleep(0)
    assert started not in processes(b"")
    await until(lambda: belongings() == before)


async def test_failed_starts_leave_nothing():
    before = belongings()
    with pytest.raises(SandboxUnavailable, match="no_such_package"):
        await LocalSandbox(preimport=("no_such_package",)).open()
    await until(lambda: belongings() == before)


def test_what_is_used_is_counted_as_far_as_anybody_needs(room):
    tmp_path = Path(room, "tree")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "f").write_bytes(bytes(8192))
    size, count = files.used(str(tmp_path), max_inodes=100)
    assert (size >= 8192, count) == (True, 3)
    assert files.used(str(tmp_path), max_inodes=1)[1] > 1
    here = tmp_path
    for _ in range(files.MAX_WALKED_DEPTH + 1):
        here = here / "d"
        here.mkdir()
    assert files.used(str(tmp_path), max_inodes=1000)[1] > 1000
    assert files.used(str(tmp_path / "none"), max_inodes=1) == (0, 0)
    files.remove_tree(str(tmp_path))


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

    async def one(tenant):
        async with queue.slot(tenant):
            order.append(tenant)

    tasks = [asyncio.create_task(one(tenant)) for tenant in ["a"] * 4 + ["b"] * 2 + ["c"]]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)
    assert queue.num_waiting == 6
    queue.release()
    tasks[0].cancel()  # its turn has come, and it never takes it
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["b", "c", "a", "b", "a"]
    assert queue.num_waiting == 0
    await asyncio.wait_for(queue.acquire("y"), 1)
