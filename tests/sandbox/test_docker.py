"""Programs in containers. Here a container is a process with Docker's restrictions, by a `docker` command of ours.

With AGENTENV_TEST_DOCKER_IMAGE set to an image that a real daemon has, the same is done in real containers, and the
whole escape matrix too.
"""

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import pytest_asyncio

from agentenv.errors import InfraError
from agentenv.sandbox import ExecLimits, ExecStatus, Isolation, SandboxUnavailable
from agentenv.sandbox.escapes.run import all_cases, run_matrix
from agentenv.sandbox.escapes.world import plant_environment
from agentenv.sandbox.grading import FunctionSuite, FunctionTest, grade
from agentenv.sandbox.remote import docker
from agentenv.sandbox.remote import pipe as _remote_pipe
from agentenv.sandbox.remote.docker import DockerSandbox
from tests.sandbox import backends

pytestmark = pytest.mark.asyncio(loop_scope="module")
IMAGE = os.environ.get("AGENTENV_TEST_DOCKER_IMAGE", "")
real_docker = pytest.mark.skipif(not IMAGE, reason="AGENTENV_TEST_DOCKER_IMAGE names no image")
SLEEP = "import time; time.sleep(300)"


@pytest.fixture(scope="module")
def folder():
    """Where the command lies; users of the sandbox pass through it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as path:
        os.chmod(path, 0o711)
        yield path


@pytest.fixture(scope="module")
def command(folder):
    return backends.make_docker(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(command):
    sandbox = await backends.opened(DockerSandbox(image="x", command=command, flags=("--cpus", "2")))
    yield sandbox
    await sandbox.aclose()


@pytest.fixture
def own_folder():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as path:
        os.chmod(path, 0o711)
        yield Path(path)


@pytest_asyncio.fixture(loop_scope="module")
async def own_sandbox(own_folder):
    """One for this test alone: its container may be broken."""
    sandbox = await backends.opened(DockerSandbox(image="x", command=backends.make_docker(own_folder)))
    yield sandbox
    await sandbox.aclose()


def pid_of(folder, sandbox):
    return int(Path(folder, sandbox._container.name).read_text())


# --- what it does ----------------------------------------------------------------------------------------------------


@pytest.mark.long
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


async def test_the_results_say_what_stands_around_a_program(sandbox):
    result = await sandbox.run("1")
    assert result.isolation is Isolation.REMOTE
    assert result.layers[:3] == ("container", "no network", "read-only image")
    assert "seccomp" in result.layers


async def test_the_container_has_no_more_than_it_needs(sandbox, folder):
    asked = next(words for words in backends.commands(folder) if words[0] == "run")
    pairs = set(itertools.pairwise(asked))
    assert pairs >= {
        ("--network", "none"), ("--ipc", "none"), ("--cap-drop", "ALL"), ("--security-opt", "no-new-privileges"),
        ("--pull", "never"), ("--log-driver", "none"), ("--ulimit", "core=1"), ("--memory", "4096m"),
        ("--memory-swap", "4096m"), ("--pids-limit", "1024"),
    }  # fmt: skip
    assert {"--read-only", "--rm", "--init", "--interactive"} <= set(asked)
    user = asked[asked.index("--user") + 1].split(":")[0]
    assert int(user) >= 10_000
    assert not [word for word in asked if word.startswith(("--cap-add", "--volume", "--mount", "-v"))]
    assert asked.index("--cpus") > asked.index("--pids-limit")


async def test_nothing_of_this_process_gets_into_a_container(sandbox, folder, monkeypatch):
    asked = next(words for words in backends.commands(folder) if words[0] == "run")
    given = [asked[at + 1] for at, word in enumerate(asked) if word == "--env"]
    assert given == ["TMPDIR=/work", "HOME=/work"]


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_a_container_that_dies_is_replaced_and_what_ran_in_it_runs_again(own_sandbox, own_folder):
    first, link = pid_of(own_folder, own_sandbox), own_sandbox._container.link
    execution = await own_sandbox.start(SLEEP)
    session = own_sandbox.session()
    await session.open()
    calls = len(link._answers)
    task = asyncio.ensure_future(own_sandbox.run("import time; time.sleep(2); print(1)"))
    await backends.until(lambda: len(link._answers) > calls)
    os.kill(first, signal.SIGKILL)
    result = await task
    assert (result.status, result.stdout, result.attempts) == (ExecStatus.OK, "1\n", 2)
    assert (await execution.finish()).status is ExecStatus.INFRA
    assert (await session.run("1")).status is ExecStatus.INFRA
    assert pid_of(own_folder, own_sandbox) != first
    await session.aclose()


@pytest.mark.long
async def test_a_daemon_that_goes_is_not_a_verdict(own_sandbox, own_folder):
    (own_folder / "trouble").write_text("no daemon")
    os.kill(pid_of(own_folder, own_sandbox), signal.SIGKILL)
    suite = FunctionSuite("add", hidden=(FunctionTest((1, 2), 3),))
    graded = await grade(own_sandbox, "def add(a, b): return 0", suite)
    assert (graded.sandbox_failed, graded.score) == (True, None)
    assert "Cannot connect to the Docker daemon" in graded.infra_detail
    with pytest.raises(InfraError):
        await own_sandbox.start("1")
    (own_folder / "trouble").unlink()
    assert (await own_sandbox.run("print(1)")).stdout == "1\n"


@pytest.mark.slow
async def test_a_container_that_is_stopped_is_replaced(own_sandbox, own_folder, monkeypatch):
    monkeypatch.setattr(docker, "_CLOSE_S", 0.2)
    with pytest.MonkeyPatch.context() as impatient:
        impatient.setattr(_remote_pipe, "_PING_S", 0.2)
        await own_sandbox.aclose()
        await own_sandbox.open()
    link = own_sandbox._container.link
    first, name = pid_of(own_folder, own_sandbox), own_sandbox._container.name
    task = asyncio.ensure_future(own_sandbox.run("import time; time.sleep(2); print(1)"))
    await backends.until(lambda: link._answers)
    os.kill(first, signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as impatient:
        impatient.setattr(_remote_pipe, "WEDGED_S", 1.0)
        await backends.until(lambda: link.lost)
    assert (await task).stdout == "1\n"
    assert pid_of(own_folder, own_sandbox) != first
    assert not Path(f"/proc/{first}").exists()
    assert [words for words in backends.commands(own_folder) if words[0] == "rm"] == [["rm", "-f", name]]


@pytest.mark.slow
async def test_garbage_is_not_a_verdict(own_sandbox, own_folder):
    (own_folder / "trouble").write_text("garbage")
    os.kill(pid_of(own_folder, own_sandbox), signal.SIGKILL)
    result = await own_sandbox.run("print(1)")
    assert (result.status, result.attempts) == (ExecStatus.INFRA, 3)
    assert "expected a message, got one that cannot be read" in result.detail


@pytest.mark.slow
async def test_a_container_without_isolation_is_not_a_verdict_once_there_was_one_with_it(own_sandbox, own_folder):
    (own_folder / "trouble").write_text("no landlock")
    os.kill(pid_of(own_folder, own_sandbox), signal.SIGKILL)
    result = await own_sandbox.run("print(1)")
    assert (result.status, result.attempts) == (ExecStatus.INFRA, 3)
    assert "landlock" in result.detail


@pytest.mark.parametrize(
    ("trouble", "text"), [("no daemon", "Start the daemon, or set DOCKER_HOST"), ("no image", "pull other:1")]
)
async def test_what_is_missing_at_the_start_is_named_with_its_fix(own_folder, trouble, text):
    command = backends.make_docker(own_folder)
    (own_folder / "trouble").write_text(trouble)
    with pytest.raises(SandboxUnavailable, match=f"DockerSandbox: expected a container of 'other:1' to run.*{text}"):
        await DockerSandbox(image="other:1", command=command).open()


async def test_a_command_that_is_missing_is_named():
    with pytest.raises(SandboxUnavailable, match="expected the command 'no-such-docker', got none on PATH"):
        await DockerSandbox(command="no-such-docker").open()


# --- what is left ----------------------------------------------------------------------------------------------------


def row(identity, **changes):
    labels = docker.owner_labels() | {f"agentenv.{key}": value for key, value in changes.items()}
    return "\t".join([identity, *labels.values()])


@pytest.mark.long
async def test_containers_of_processes_that_are_gone_are_removed_and_no_others(own_folder):
    command = backends.make_docker(own_folder)
    rows = [
        row("ours"), row("pid-used-again", started="1"), row("rebooted", boot="other"), row("other-host", host="other"),
        row("other-boot-and-host", boot="other", host="other"), row("not-visible", pids="pid:[1]", started="1"), "odd",
        row("gone", pid="999999999"),
    ]  # fmt: skip
    (own_folder / "ps").write_text("\n".join(rows) + "\n")
    sandbox = await backends.opened(DockerSandbox(image="x", command=command))
    await sandbox.aclose()
    removed = [words[2:] for words in backends.commands(own_folder) if words[0] == "rm"]
    assert removed[0] == ["pid-used-again", "rebooted", "gone"]


@pytest.mark.long
async def test_closing_ends_the_container_and_what_runs_in_it(own_sandbox, own_folder):
    pid = pid_of(own_folder, own_sandbox)
    task = asyncio.ensure_future(own_sandbox.run(SLEEP))
    execution = await own_sandbox.start(SLEEP)
    await own_sandbox.aclose()
    await own_sandbox.aclose()
    assert (await task).status is ExecStatus.INFRA
    assert (await execution.finish()).status in (ExecStatus.SIGNAL, ExecStatus.INFRA)
    assert not Path(f"/proc/{pid}").exists()
    assert (await own_sandbox.run("print(1)")).stdout == "1\n"


@pytest.mark.slow
async def test_a_container_ends_with_a_process_that_is_killed(own_folder):
    command = backends.make_docker(own_folder)
    program = f"""
import asyncio
from agentenv.sandbox.remote.docker import DockerSandbox
async def main():
    sandbox = DockerSandbox(image="x", command={command!r})
    await sandbox.open()
    print("open", flush=True)
    await sandbox.run("while True: pass")
asyncio.run(main())
"""
    environment = os.environ | {"PYTHONPATH": str(backends.ROOT)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE)
    try:
        if not process.stdout.readline():
            pytest.skip("no sandbox")
    finally:
        process.kill()
        process.communicate()
    pids = [int(path.read_text()) for path in own_folder.glob("agentenv-*")]
    await backends.until(lambda: pids and not any(Path(f"/proc/{pid}").exists() for pid in pids))


# --- with a daemon ---------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def in_docker():
    assert shutil.which("docker"), "AGENTENV_TEST_DOCKER_IMAGE is set, and there is no docker"
    async with DockerSandbox(image=IMAGE) as sandbox:
        yield sandbox


@real_docker
@pytest.mark.parametrize(
    "behaviour",
    [
        backends.programs_run_as_they_do_here,
        backends.executions_are_talked_to,
        backends.sessions_stay_between_turns,
        backends.graders_judge,
    ],
    ids=lambda behaviour: behaviour.__name__,
)
async def test_in_docker_as_every_backend(in_docker, behaviour):
    await behaviour(in_docker)


@real_docker
async def test_in_docker_a_container_without_memory_is_not_a_verdict():
    program = "x = bytearray(400 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1"
    async with DockerSandbox(image=IMAGE, memory_mb=160, limits=ExecLimits(memory_mb=1024)) as small:
        assert (await small.run(program)).detail.startswith("host:")
        assert (await (await small.start(program)).finish()).status is ExecStatus.INFRA
        assert (await small.run("import os; os.kill(os.getpid(), 9); os._exit(1)")).status is ExecStatus.NONZERO


@real_docker
@pytest.mark.slow
async def test_in_docker_nothing_gets_out(in_docker, monkeypatch):
    planted = plant_environment()
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    found = await run_matrix(in_docker, all_cases(), planted, jobs=2)
    # Its own sealed input, and of itself: documented for the landlock level.
    assert {name for name, wrong in found.items() if wrong} <= {"stdin_again_to_write", "core_dumps"}


@real_docker
async def test_in_docker_a_container_that_is_killed_is_replaced(in_docker):
    task = asyncio.ensure_future(in_docker.run("import time; time.sleep(1); print(1)", limits=ExecLimits()))
    await asyncio.sleep(0.3)
    subprocess.run(["docker", "kill", in_docker._container.name], check=True, capture_output=True)
    result = await task
    assert (result.status, result.stdout, result.attempts) == (ExecStatus.OK, "1\n", 2)
