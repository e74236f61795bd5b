"""A sandbox for tests that isolates nothing: a subprocess with limits, and a socket at file descriptor 3."""

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from agentenv.sandbox.local.execution import readable
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation

BOOT = """
import os, resource, sys
channel, cpu_s, memory = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
if channel >= 0:
    os.dup2(channel, 3)
os.closerange(4 if channel >= 0 else 3, 64)
resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 1))
resource.setrlimit(resource.RLIMIT_AS, (memory << 20, memory << 20))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.path.pop(0) if sys.path and sys.path[0] == "" else None
source = open(sys.argv[4], encoding="utf-8").read()
os.unlink(sys.argv[4])
names = {"__name__": "__main__", "__builtins__": __builtins__}
del sys.argv[1:]
exec(compile(source, "<program>", "exec"), names)
"""


class PlainExecution:
    """A subprocess; `finish` waits for it, `kill` ends it and its group."""

    def __init__(self, limits):
        self.limits = limits
        self.begun = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="plain-"))
        self.ours, theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.theirs = theirs
        self.process = None
        self.result = None
        self.fetch = ()
        self.kept = b""

    async def launch(self, program, *, stdin=b"", files=None, channel=True):
        """Start the program."""
        work = self.folder / "work"
        work.mkdir()
        for name, content in (files or {}).items():
            path = work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        (self.folder / "program").write_text(program, encoding="utf-8", errors="surrogateescape")
        (self.folder / "stdin").write_bytes(stdin)
        theirs = self.theirs.fileno()
        arguments = [theirs if channel else -1, self.limits.cpu_s, self.limits.memory_mb + 100, self.folder / "program"]
        with (
            open(self.folder / "stdin", "rb") as source,
            open(self.folder / "out", "wb") as out,
            open(self.folder / "err", "wb") as err,
        ):
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-c", BOOT, *map(str, arguments),
                stdin=source, stdout=out, stderr=err, cwd=work, pass_fds=(theirs,), start_new_session=True,
                env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "HOME": str(work)},
            )  # fmt: skip
        self.theirs.close()
        return self

    async def send(self, data):
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(self.ours, data)

    async def receive(self, max_bytes=65536):
        try:
            async with asyncio.timeout(self._left()):
                return await asyncio.get_running_loop().sock_recv(self.ours, max_bytes)
        except (TimeoutError, OSError):
            return b""

    def _left(self):
        return max(0.0, self.begun + self.limits.wall_s - time.monotonic())

    async def drain(self):
        """Read the channel until it is closed or the time is over."""
        parts, size = [], 0
        while chunk := await self.receive():
            parts.append(chunk[: max(0, self.limits.channel_kb * 1024 - size)])
            size += len(chunk)
        self.kept = b"".join(parts)

    async def finish(self):
        if self.result is None:
            late = False
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            before = usage.ru_utime + usage.ru_stime
            try:
                async with asyncio.timeout(self._left()):
                    await self.process.wait()
            except TimeoutError:
                late = True
            await self._end()
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            self.result = self._told(late, usage.ru_utime + usage.ru_stime - before)
            shutil.rmtree(self.folder, ignore_errors=True)
            self.ours.close()
        return self.result

    async def _end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()

    def _told(self, late, cpu_s):
        out, err = (self.folder / "out").read_bytes(), (self.folder / "err").read_bytes()
        kept, code = self.limits.stdout_kb * 1024, self.process.returncode
        if late:
            status = ExecStatus.WALL_TIMEOUT
        elif code in (-signal.SIGXCPU, -signal.SIGKILL):
            status = ExecStatus.CPU_TIMEOUT
        elif code < 0:
            status = ExecStatus.SIGNAL
        else:
            status = ExecStatus.NONZERO if code else ExecStatus.OK
        if status is ExecStatus.NONZERO and b"MemoryError" in err[-200:]:
            status = ExecStatus.MEMORY
        files = {}
        for name in self.fetch:
            path = self.folder / "work" / name
            if path.is_file() and not path.is_symlink():
                files[name] = path.read_bytes()
        return ExecResult(
            status,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stdout=readable(out[:kept]),
            stderr=readable(err[: self.limits.stderr_kb * 1024]),
            stdout_truncated=len(out) > kept,
            stderr_truncated=len(err) > self.limits.stderr_kb * 1024,
            stdout_bytes=len(out),
            channel=self.kept,
            files=files,
            wall_s=time.monotonic() - self.begun,
            cpu_s=cpu_s,
            backend="plain",
        )

    async def kill(self):
        await self._end()
        return await self.finish()


class PlainSandbox:
    """What graders need of a sandbox, without its walls."""

    isolation = Isolation.NONE
    backend = "plain"
    limits = ExecLimits()
    run_slots = 8

    def __init__(self):
        self.executions = []

    async def run(self, program, *, stdin=b"", files=None, fetch=(), limits=None, channel=False, **_):
        execution = await self._started(program, stdin=stdin, files=files, limits=limits, channel=channel)
        execution.fetch = fetch
        try:
            await execution.drain()
            return await execution.finish()
        finally:
            await execution.kill()

    async def start(self, program, *, files=None, limits=None, **_):
        return await self._started(program, stdin=b"", files=files, limits=limits, channel=True)

    async def _started(self, program, *, stdin, files, limits, channel):
        execution = PlainExecution(limits or self.limits)
        self.executions.append(execution)
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        launched = asyncio.ensure_future(execution.launch(program, stdin=data, files=files, channel=channel))
        try:
            return await asyncio.shield(launched)
        except asyncio.CancelledError:
            await (await launched).kill()
            raise

    async def aclose(self):
        """Nothing outlives its execution."""

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        await self.aclose()
