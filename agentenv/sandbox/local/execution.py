"""One program as the trainer sees it: its output, its lease, and its result.

The trainer holds the lease, one end of a socket pair; the zygote kills the program as soon as the lease is closed. The
status comes from the zygote's report: the host's fault needs a record, and all else is a verdict.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import fcntl
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from agentenv._util.calls import MAX_GIVEN_BACK
from agentenv._util.off_loop import off_loop
from agentenv._util.virtual_time import external_work
from agentenv.errors import InfraError
from agentenv.sandbox.guest import files
from agentenv.sandbox.local.zygote_client import Zygote, ZygoteLost
from agentenv.sandbox.types import ExecLimits, ExecResult, ExecStatus, Isolation, Policy

UNHEARD_S = 0.5
BACKSTOP_S = 5.0
"""Time past the wall limit in which the zygote must report a program; otherwise the zygote is lost."""
FLOOD_FACTOR = 64
"""A program is killed when an output exceeds this many times its kept size."""
_TAIL_BYTES = 400
_ADD_SEALS, _ALL_SEALS = 1033, 1 | 2 | 4 | 8
_FETCHED_OFFSET = 4096 * 16
_INVALID = {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(128, 256)}
_ESCAPES = {**{code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}, **_INVALID}
_ESCAPED = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\udc80-\udcff]")
_PIECE = 1 << 14
"""Characters that are escaped by one call, which lets no other thread run."""
_LIMIT_MESSAGES = {
    ExecStatus.MEMORY: re.compile(rb"^(MemoryError|.*Cannot allocate memory)", re.ASCII),
    ExecStatus.DISK_LIMIT: re.compile(rb"^OSError: \[Errno (27|28|122)\]"),
}
"""Last lines of stderr that show that a limit was reached."""
_NO_THREAD = re.compile(rb"^(RuntimeError: can't start new thread|BlockingIOError: \[Errno 11\])")
CROWDED = "host: expected threads for the program, its neighbors had them. Run as root, or allow namespaces"
"""Detail of a program that may have more threads where it runs alone. Its status is that of a program that ran so."""
_FULL = "host: expected free space for temporary files, the disk is full. Free some, or set TMPDIR"
_ENDS: Mapping[str, tuple[ExecStatus, str | None]] = {
    "wall": (ExecStatus.WALL_TIMEOUT, None),
    "memory": (ExecStatus.MEMORY, None),
    "disk": (ExecStatus.DISK_LIMIT, None),
    "cancelled": (ExecStatus.SIGNAL, "killed by the caller"),
    "killed": (
        ExecStatus.INFRA,
        "host: expected the program to end by itself, got a kill by the host, as when its memory runs out",
    ),
}
"""Status and detail by the cause of an end, where it needs no more than that."""
_NEARLY = 0.75
"""Share of the CPU limit from which an unexplained kill counts as the kernel's, whose CPU count runs ahead."""


def memory_file(name: str, *parts: bytes) -> int:
    """Return a descriptor of a memory file with these contents, sealed against changes."""
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


def readable(data: bytes, *, truncated: bool = False) -> str:
    """Return bytes as text that is safe to print: invalid UTF-8 and control characters are escaped.

    Args:
        data: the bytes; newline and tab are kept.
        truncated: drop an incomplete character at the end.
    """
    return decoded(data, _ESCAPES, truncated=truncated)


def decoded(data: bytes, escapes: Mapping[int, str] = MappingProxyType(_INVALID), *, truncated: bool = False) -> str:
    """Return bytes as text, with the characters of `escapes` replaced; by default, only invalid UTF-8 is escaped."""
    text = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(data, not truncated)
    pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
    return "".join(piece.translate(escapes) if _ESCAPED.search(piece) else piece for piece in pieces)


class Capture:
    """A reader of a pipe that keeps the beginning, counts all bytes and remembers the last ones."""

    def __init__(self, fd: int, max_bytes: int, on_flood: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = fd
        self._max_bytes = max_bytes
        self._on_flood = on_flood
        self._data = bytearray()
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
            self._data += data[: max(self._max_bytes - len(self._data), 0)]
            self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
            if self.total > FLOOD_FACTOR * max(self._max_bytes, 4096):
                self._on_flood()

    def drain(self) -> None:
        """Read the bytes that are available now."""
        if self._fd >= 0:
            self._read(64)

    def close(self) -> None:
        """Stop reading and close the pipe."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    @property
    def truncated(self) -> bool:
        """True if more was written than is kept."""
        return self.total > len(self._data)

    @property
    def last_line(self) -> bytes:
        """The last line that was written, even if it is not kept."""
        return self._tail.strip().rpartition(b"\n")[2]

    def data(self) -> bytes:
        """Return the kept bytes."""
        return bytes(self._data)

    async def take(self) -> tuple[str, bool]:
        """Return the text since the last call and True if it is truncated; the next call starts from there."""
        self.drain()
        data, truncated = self.data(), self.truncated
        self._data.clear()
        self.total = 0
        return await off_loop(len(data), readable, data, truncated=truncated), truncated


@dataclass(frozen=True)
class Program:
    """A validated program that can be launched any number of times."""

    header: Mapping[str, Any]
    """The argv, and the names and sizes of the files."""
    fetch: tuple[str, ...]
    """The names of the files to fetch."""
    source: bytes
    contents: tuple[bytes, ...]
    stdin: bytes
    policy: Policy
    limits: ExecLimits
    channel: str
    """Use of descriptor 3: "" none, "collect" for the result, "interactive" a socket."""

    def payload(self) -> int:
        """Return a memory file: the length of the header (8 bytes), the header, the source, the files.

        The header is empty if there is only source.
        """
        plain = not any(self.header.values())
        header = b"" if plain else json.dumps({**self.header, "source": len(self.source)}).encode()
        return memory_file("program", len(header).to_bytes(8, "little"), header, self.source, *self.contents)


class LocalExecution:
    """A running program; started by `launch`."""

    def __init__(self, program: Program, isolation: Isolation, layers: tuple[str, ...] = ()) -> None:
        self._loop = asyncio.get_running_loop()
        self._program = program
        self._isolation = isolation
        self._layers = layers
        self._lease: socket.socket | None = None
        self._flooded = False
        self._captures: dict[str, Capture] = {}
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._backstop: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[ExecResult] = self._loop.create_future()
        """The result of the program; never an exception."""

    async def launch(self, zygote: Zygote, number: int) -> None:
        """Send the program to a zygote.

        Raises:
            ZygoteLost: the zygote accepts no programs.
            OSError: for example, too many files are open in this process.
        """
        program, limits = self._program, self._program.limits
        fds: dict[str, int] = {}
        try:
            for name, max_kb in (("stdout", limits.stdout_kb), ("stderr", limits.stderr_kb)):
                reader, fds[name] = os.pipe()
                self._captures[name] = Capture(reader, max_kb * 1024, self._flood)
            self._lease, zygote_end = socket.socketpair()
            fds["lease"] = zygote_end.detach()
            fds["payload"] = program.payload()
            if program.fetch:
                fds["names"] = memory_file("names", files.pack_names(program.fetch))
            if program.stdin:
                fds["stdin"] = memory_file("stdin", program.stdin)
            if program.channel:
                ours, program_end = socket.socketpair()
                fds["channel"] = program_end.detach()
                max_bytes = limits.channel_kb * 1024
                if program.channel == "collect":
                    self._captures["channel"] = Capture(ours.detach(), max_bytes, self._flood)
                else:
                    self._streams = await asyncio.open_connection(sock=ours, limit=max(max_bytes, 65536))
            optional = [name for name in ("names", "stdin", "channel") if name in fds]
            request = {
                "id": number,
                "policy": program.policy,
                "argv": program.header["argv"] is not None,
                "limits": {**asdict(limits), "given_back_s": MAX_GIVEN_BACK * limits.wall_s},
                "fds": optional,
            }
            names = ("stdout", "stderr", "lease", "payload", *optional)
            report = await zygote.submit(request, [fds[name] for name in names])
        except BaseException:
            self._close()
            self.close_streams()
            raise
        finally:
            for fd in fds.values():
                os.close(fd)
        longest_s = (1 + MAX_GIVEN_BACK) * limits.wall_s + BACKSTOP_S
        self._backstop = self._loop.call_later(longest_s, self._end_unheard, zygote, report)
        report.add_done_callback(self._finish)

    # --- while the program runs --------------------------------------------------------------------------------------

    async def send(self, data: bytes) -> None:
        """Send bytes to the program's descriptor 3; no effect once the program has ended."""
        if self._streams is None:
            return
        with contextlib.suppress(OSError):
            self._streams[1].write(data)
            await self._streams[1].drain()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return bytes that the program wrote to descriptor 3; `b""` once it has ended or closed its side."""
        if self._streams is None:
            return b""
        with contextlib.suppress(OSError), external_work():
            return await self._streams[0].read(max_bytes)
        return b""

    async def take_output(self, name: str) -> tuple[str, bool]:
        """Return the output to "stdout" or "stderr" since the last call, and True if it is truncated."""
        return await self._captures[name].take()

    async def finish(self) -> ExecResult:
        """Wait for the end of the program, by itself or by its limits."""
        result = await asyncio.shield(self.ended)
        self.close_streams()
        return result

    async def kill(self) -> ExecResult:
        """Kill the program and wait until it and its processes are gone."""
        self.release()
        try:
            return await self.finish()
        finally:
            self.close_streams()  # also if this is cancelled

    def close_streams(self) -> None:
        """Close this side of the program's descriptor 3."""
        if self._streams:
            self._streams[1].close()

    # --- the end of the program --------------------------------------------------------------------------------------

    def _flood(self) -> None:
        self._flooded = True
        self.release()

    def release(self) -> None:
        """Close the lease, so that the zygote kills the program."""
        if self._lease is not None:
            with contextlib.suppress(OSError):
                self._lease.shutdown(socket.SHUT_RDWR)  # a fork of the trainer may hold it as well
            self._lease.close()
            self._lease = None

    def _end_unheard(self, zygote: Zygote, report: asyncio.Future[dict[str, Any]], again: bool = False) -> None:
        if not report.done() and not again:  # this loop may have been blocked: read pending messages first
            self._backstop = self._loop.call_later(UNHEARD_S, self._end_unheard, zygote, report, True)
        elif not report.done():
            zygote.lose(f"zygote: expected a report within {BACKSTOP_S:g} s of the limit, got none")

    def _finish(self, report: asyncio.Future[dict[str, Any]]) -> None:
        fetched: dict[str, bytes] = {}
        try:
            outcome = report.result()
            for capture in self._captures.values():
                capture.drain()
            names = self._program.fetch
            if "fetched" in outcome:
                with open(outcome["fetched"], "rb") as file:
                    file.seek(0)
                    sizes = json.loads(file.readline())
                    file.seek(_FETCHED_OFFSET)
                    fetched = {name: file.read(size) for name, size in zip(names, sizes, strict=True) if size >= 0}
            elif names and outcome["cause"] not in ("setup", "full"):
                outcome = {"cause": "setup", "error": "the files to fetch were lost: too many files are open here"}
            result = self._result(outcome, fetched)
        except (ZygoteLost, OSError, ValueError, KeyError, TypeError) as error:
            result = self._result({"cause": "setup", "error": f"zygote: {error}"}, {})
        self._close()
        self._ending = self._loop.create_task(self._end(result))

    async def _end(self, result: ExecResult) -> None:
        """Add the texts of the output, which a program may have filled with characters to escape, and end."""
        out, err = self._captures["stdout"], self._captures["stderr"]
        try:
            result = replace(result, stdout=(await out.take())[0], stderr=(await err.take())[0])
        except InfraError as error:
            result = replace(result, status=ExecStatus.INFRA, detail=str(error))
        finally:
            if not self.ended.done():
                self.ended.set_result(result)

    def _close(self) -> None:
        for capture in self._captures.values():
            capture.close()
        if self._backstop:
            self._backstop.cancel()
        self.release()

    def _result(self, outcome: Mapping[str, Any], fetched: Mapping[str, bytes]) -> ExecResult:
        out, err = self._captures["stdout"], self._captures["stderr"]
        status, detail = classify(outcome, self._program.limits, err.last_line)
        if outcome["cause"] == "cancelled" and self._flooded:
            status, detail = ExecStatus.OUTPUT_LIMIT, None
        exited = outcome["cause"] == "exit"
        channel = self._captures.get("channel")
        return ExecResult(
            status=status,
            exit_code=outcome["code"] if exited and not outcome["signal"] else None,
            signal=outcome["signal"] or None if exited else None,
            stdout_data=out.data(),
            stdout_truncated=out.truncated,
            stderr_truncated=err.truncated,
            stdout_bytes=out.total,
            channel=channel.data() if channel else b"",
            files=fetched,
            wall_s=outcome.get("wall_s", 0.0),
            cpu_s=outcome.get("cpu_s", 0.0),
            run_delay_s=outcome.get("delay_s", 0.0),
            peak_memory_bytes=outcome.get("peak_bytes"),
            isolation=self._isolation,
            layers=self._layers,
            detail=detail,
        )


def classify(report: Mapping[str, Any], limits: ExecLimits, last_line: bytes) -> tuple[ExecStatus, str | None]:
    """Return the status for a zygote's report, and a detail for the user."""
    cause = report["cause"]
    if cause in ("setup", "full"):
        return ExecStatus.INFRA, _FULL if cause == "full" else str(report.get("error"))
    if cause == "cpu" or report["cpu_s"] >= limits.cpu_s:
        return ExecStatus.CPU_TIMEOUT, None
    if cause in _ENDS:
        return _ENDS[cause]
    if cause == "processes":
        return ExecStatus.POLICY, f"more than {limits.num_processes} processes"
    if report["signal"] == signal.SIGKILL and report["cpu_s"] >= _NEARLY * limits.cpu_s:
        return ExecStatus.CPU_TIMEOUT, None
    if report["signal"]:
        statuses = {int(signal.SIGSYS): ExecStatus.POLICY, int(signal.SIGXFSZ): ExecStatus.DISK_LIMIT}
        return statuses.get(report["signal"], ExecStatus.SIGNAL), None
    detail = CROWDED if report.get("shared_user") and _NO_THREAD.match(last_line) else None
    if report["code"] == 0:
        return ExecStatus.OK, detail
    reached = (status for status, message in _LIMIT_MESSAGES.items() if message.match(last_line))
    status = next(reached, ExecStatus.NONZERO)
    if report.get("full") and status is ExecStatus.DISK_LIMIT:  # it was not when the program began
        return ExecStatus.INFRA, _FULL
    return status, detail
