"""The trainer's side of one program: what it says is kept up to a limit, and always read; its lease, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import json
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentenv.outside import outside
from agentenv.sandbox._client import Zygote, ZygoteLost
from agentenv.sandbox._verdicts import classify
from agentenv.sandbox.types import ExecLimits, ExecResult, Isolation, Policy, Status

GIVE_UP_S = 0.5
BACKSTOP_S = 5.0
"""Past its wall limit a program must have been reported; else its zygote is lost."""
FLOOD = 64
"""Times what is kept of an output: who writes more is ended."""
_TAIL = 400
_ADD_SEALS, _ALL_SEALS = 1033, 1 | 2 | 4 | 8
_FETCHED_AT = 4096 * 16
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@functools.lru_cache(maxsize=256)
def _as_dict(limits: ExecLimits) -> dict[str, float]:
    return asdict(limits)


def memory_file(name: str, *parts: bytes) -> int:
    """A file in memory that nobody can change any more."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(fd, rest) :]
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(fd, _ADD_SEALS, _ALL_SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def readable(data: bytes, *, cut: bool = False) -> str:
    """Bytes as text that is safe to show: what is not UTF-8, and controls but newline and tab, as escapes."""
    if cut:
        # Not half a character at the end of what was kept.
        for length in range(1, min(4, len(data)) + 1):
            if data[-length] & 0xC0 == 0xC0:
                data = data[:-length] if length < _utf8_length(data[-length]) else data
                break
            if data[-length] < 0x80:
                break
    text = data.decode("utf-8", "backslashreplace")
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _utf8_length(first: int) -> int:
    return 2 if first < 0xE0 else 3 if first < 0xF0 else 4


class Capture:
    """Reads a pipe to its end: keeps the beginning, counts all, remembers the last bytes."""

    def __init__(self, fd: int, keep: int, on_flood: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = fd
        self._keep = keep
        self._on_flood = on_flood
        self._kept = bytearray()
        self._tail = b""
        self.total = 0
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read, 4)

    def _read(self, times: int) -> None:
        for _ in range(times):
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            self.total += len(data)
            self._kept += data[: max(self._keep - len(self._kept), 0)]
            self._tail = (self._tail + data[-_TAIL:])[-_TAIL:]
            if self.total > FLOOD * max(self._keep, 4096):
                self._on_flood()

    def drain(self) -> None:
        """Read what is there now."""
        if self._fd >= 0:
            self._read(64)

    def close(self) -> None:
        """Read no more."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    @property
    def truncated(self) -> bool:
        """Whether more was written than is kept."""
        return self.total > len(self._kept)

    @property
    def last_line(self) -> bytes:
        """The last line that was written, kept or not."""
        return self._tail.strip().rpartition(b"\n")[2]

    def data(self) -> bytes:
        """What is kept."""
        return bytes(self._kept)

    def text(self) -> str:
        """What is kept, as text."""
        return readable(self.data(), cut=self.truncated)

    def take(self) -> tuple[str, bool]:
        """What was kept since the last time and whether that is not all, for those who read while it runs."""
        self.drain()
        text, cut = self.text(), self.truncated
        self._kept.clear()
        self.total = 0
        return text, cut


@dataclass(frozen=True)
class Program:
    """What is to be executed, checked, and ready to be handed over any number of times."""

    header: Mapping[str, Any]
    """argv, names and sizes of files, names to fetch."""
    source: bytes
    contents: tuple[bytes, ...]
    stdin: bytes
    policy: Policy
    limits: ExecLimits
    channel: str
    """"" none, "collect" its bytes are in the result, "talk" a socket."""

    def payload(self) -> int:
        """All of it in one file: the length of the header, the header unless there is only source, it, the files."""
        plain = not any(self.header[name] for name in ("argv", "files", "fetch"))
        header = b"" if plain else json.dumps({**self.header, "source": len(self.source)}).encode()
        return memory_file("program", len(header).to_bytes(8, "little"), header, self.source, *self.contents)


class LocalExecution:
    """A program that runs; made by `launch`."""

    def __init__(self, program: Program, isolation: Isolation, layers: tuple[str, ...] = ()) -> None:
        self._loop = asyncio.get_running_loop()
        self._program = program
        self._isolation = isolation
        self._layers = layers
        self._lease: socket.socket | None = None
        self._flooded = False
        self._captures: dict[str, Capture] = {}
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._zygote: Zygote | None = None
        self._backstop: asyncio.TimerHandle | None = None
        self._report: asyncio.Future[dict[str, Any]] | None = None
        self.ended: asyncio.Future[ExecResult] = self._loop.create_future()
        """Its result; never an exception."""

    async def launch(self, zygote: Zygote, number: int) -> None:
        """Hand the program over.

        Raises:
            ZygoteLost: it takes none.
            OSError: too many files are open here, or the like.
        """
        self._zygote = zygote
        program, limits = self._program, self._program.limits
        theirs: dict[str, int] = {}
        try:
            self._wire(theirs)
            theirs["payload"] = program.payload()
            if program.stdin:
                theirs["stdin"] = memory_file("stdin", program.stdin)
            if program.channel:
                await self._open_channel(theirs)
            more = [name for name in ("stdin", "channel") if name in theirs]
            request = {
                "id": number,
                "policy": program.policy,
                "argv": program.header["argv"] is not None,
                "limits": _as_dict(limits),
                "fetch": bool(program.header["fetch"]),
                "fds": more,
            }
            names = ("stdout", "stderr", "lease", "payload", *more)
            report = await zygote.submit(request, [theirs[name] for name in names])
        except BaseException:
            self._close()
            raise
        finally:
            for fd in theirs.values():
                os.close(fd)
        self._report = report
        self._backstop = self._loop.call_later(limits.wall_s + BACKSTOP_S, self._give_up)
        report.add_done_callback(self._finish)

    def _wire(self, theirs: dict[str, int]) -> None:
        limits = self._program.limits
        for name, keep in (("stdout", limits.stdout_kb), ("stderr", limits.stderr_kb)):
            ours, theirs[name] = os.pipe()
            self._captures[name] = Capture(ours, keep * 1024, self._flood)
        self._lease, their = socket.socketpair()
        theirs["lease"] = their.detach()

    async def _open_channel(self, theirs: dict[str, int]) -> None:
        ours, their = socket.socketpair()
        theirs["channel"] = their.detach()
        limit = self._program.limits.channel_kb * 1024
        if self._program.channel == "collect":
            self._captures["channel"] = Capture(ours.detach(), limit, self._flood)
        else:
            self._streams = await asyncio.open_connection(sock=ours, limit=max(limit, 65536))

    # --- while it runs ---------------------------------------------------------------------------------------------

    async def send(self, data: bytes) -> None:
        """Give it bytes on its descriptor 3; harmless once it has ended."""
        if self._streams is None:
            return
        with contextlib.suppress(OSError):
            self._streams[1].write(data)
            await self._streams[1].drain()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Some of what it wrote to descriptor 3, `b""` once it has ended or closed its side."""
        if self._streams is None:
            return b""
        with contextlib.suppress(OSError), outside():
            return await self._streams[0].read(max_bytes)
        return b""

    def take_output(self, name: str) -> tuple[str, bool]:
        """What it wrote to "stdout" or "stderr" since the last time, and whether that is not all."""
        return self._captures[name].take()

    async def finish(self) -> ExecResult:
        """Wait until it has ended by itself or by its limits."""
        result = await asyncio.shield(self.ended)
        self.close_streams()
        return result

    async def kill(self) -> ExecResult:
        """End it now, and wait until it and all that it started are gone."""
        self.release()
        return await self.finish()

    def close_streams(self) -> None:
        """Read and write no more on its descriptor 3."""
        if self._streams:
            self._streams[1].close()

    # --- its end ---------------------------------------------------------------------------------------------------

    def _flood(self) -> None:
        self._flooded = True
        self.release()

    def release(self) -> None:
        """The zygote ends it as soon as nobody holds the lease."""
        if self._lease is not None:
            with contextlib.suppress(OSError):
                self._lease.shutdown(socket.SHUT_RDWR)  # a fork of the trainer may hold it as well
            self._lease.close()
            self._lease = None

    def _give_up(self, *, again: bool = False) -> None:
        if self._report is None or self._report.done() or self._zygote is None:
            return
        if not again:  # this loop may have been held up: what has been said is heard first
            self._backstop = self._loop.call_later(GIVE_UP_S, functools.partial(self._give_up, again=True))
        else:
            self._zygote.lose(f"zygote: expected a report within {BACKSTOP_S:g} s of the limit, got none")

    def _finish(self, report: asyncio.Future[dict[str, Any]]) -> None:
        fetched: dict[str, bytes] = {}
        try:
            told = report.result()
            for capture in self._captures.values():
                capture.drain()
            if "fetched" in told:
                fetched = _read_fetched(told["fetched"], self._program.header["fetch"])
            elif self._program.header["fetch"] and told["cause"] != "setup":
                told = {"cause": "setup", "error": "the files to fetch were lost: too many files are open here"}
            result = self._result(told, fetched)
        except (ZygoteLost, OSError, ValueError, KeyError, TypeError) as error:
            result = self._result({"cause": "setup", "error": f"zygote: {error}"}, {})
        self._close()
        if not self.ended.done():
            self.ended.set_result(result)

    def _close(self) -> None:
        for capture in self._captures.values():
            capture.close()
        if self._backstop:
            self._backstop.cancel()
        self.release()

    def _result(self, told: Mapping[str, Any], fetched: Mapping[str, bytes]) -> ExecResult:
        out, err = self._captures["stdout"], self._captures["stderr"]
        status, detail = classify(told, self._program.limits, err.last_line)
        if told["cause"] == "cancelled" and self._flooded:
            status, detail = Status.OUTPUT_LIMIT, None
        ended_itself = told["cause"] == "exit"
        channel = self._captures.get("channel")
        return ExecResult(
            status=status,
            exit_code=told["code"] if ended_itself and not told["signal"] else None,
            signal=told["signal"] or None if ended_itself else None,
            stdout=out.text(),
            stdout_data=out.data(),
            stderr=err.text(),
            stdout_truncated=out.truncated,
            stderr_truncated=err.truncated,
            stdout_bytes=out.total,
            channel=channel.data() if channel else b"",
            files=fetched,
            wall_s=told.get("wall_s", 0.0),
            cpu_s=told.get("cpu_s", 0.0),
            run_delay_s=told.get("delay_s", 0.0),
            peak_memory_bytes=told.get("peak_bytes"),
            isolation=self._isolation,
            layers=self._layers,
            backend="local",
            detail=detail,
        )


def _read_fetched(fd: int, names: Sequence[str]) -> dict[str, bytes]:
    with open(fd, "rb") as file:
        file.seek(0)
        sizes = json.loads(file.readline())
        file.seek(_FETCHED_AT)
        return {name: file.read(size) for name, size in zip(names, sizes, strict=True) if size >= 0}
