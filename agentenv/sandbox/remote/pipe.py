"""The connection to a remote host over two byte streams, and the source code that is sent to it."""

from __future__ import annotations

import ast
import asyncio
import base64
import itertools
import json
import zlib
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from agentenv._util.paths import PACKAGE
from agentenv.errors import AgentEnvError
from agentenv.sandbox.remote.link import LinkLost, retrieve_exception, value_of
from agentenv.sandbox.remote.wire import Splitter, encode

START_S = 120.0
"""Time limit for the remote host to start and answer."""
WEDGED_S = 20.0
"""Silence during a call after which the remote host counts as lost."""
_PING_S = 2.0
_CANCEL_S = 15.0
BOOT = """
import base64, json, os, sys, tempfile, zlib
if sys.version_info < (3, 11):
    sys.exit("expected Python 3.11 or newer, got " + sys.version.split()[0])
files = json.loads(zlib.decompress(base64.b64decode(sys.stdin.buffer.readline())))
folder = tempfile.mkdtemp(prefix="agentenv-")
for name, text in files.items():
    os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        file.write(text)
sys.path.insert(0, folder)
from agentenv.sandbox.remote import host
host.main()
"""
"""Program for an interpreter without agentenv, `python3 -I -S -c BOOT`; stdin begins with `source_line()`."""
_STARTED = ("remote.host", "guest.zygote", "guest.probes", "guest.session_driver")
"""Modules of `agentenv.sandbox` that run there as programs; their imports are sent along."""


@cache
def source_line() -> bytes:
    """Return the source files that the remote host needs, packed into one line."""
    files = {"agentenv/__init__.py": ""}
    todo = [f"agentenv.sandbox.{name}" for name in _STARTED]
    while todo:
        parts = todo.pop().split(".")
        todo += [".".join(parts[:-1])] if len(parts) > 2 else []  # the package that contains it
        for name in ("/".join(parts) + ".py", "/".join([*parts, "__init__.py"])):
            path = PACKAGE.parent / name
            if name not in files and path.exists():
                files[name] = path.read_text("utf-8")
                todo += [
                    f"{node.module}.{alias.name}"  # a module, or a name in one
                    for node in ast.walk(ast.parse(files[name]))
                    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agentenv.")
                    for alias in node.names
                ]
    return base64.b64encode(zlib.compress(json.dumps(files).encode(), 9)) + b"\n"


class PipeLink:
    """A `Link` over two byte streams; the backend passes received bytes to `feed`."""

    def __init__(
        self,
        write: Callable[[bytes], Awaitable[None]],
        name: str,
        *,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the tasks that write messages and watch the host.

        Args:
            write: sends bytes; called for one message at a time.
            name: name of the remote host, for error messages.
            on_lost: called once, when the link stops accepting calls; must end the remote host.
        """
        self.lost: str | None = None
        """Reason why the link accepts no more calls; None while it does."""
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._hello: asyncio.Future[str] = self._loop.create_future()
        self._splitter = Splitter()
        self._last_message_at = self._loop.time()
        self._tasks = [asyncio.ensure_future(self._write_all(write)), asyncio.ensure_future(self._watch())]

    async def opened(self, options: dict[str, Any]) -> dict[str, Any]:
        """Wait for the host, let it open its sandbox with these options of LocalSandbox, and return what it reports.

        Raises:
            LinkLost: the host did not start.
            AgentEnvError: the host has no isolation.
        """
        self._outbox.put_nowait(source_line())
        try:
            async with asyncio.timeout(START_S):
                await asyncio.shield(self._hello)
                level: dict[str, Any] = await self.call("open", options=options)
                return level
        except TimeoutError:
            self.lose(f"{self._name}: expected an answer within {START_S:g} s of its start, got none")
            raise LinkLost(str(self.lost)) from None

    async def call(self, method: str, **arguments: Any) -> Any:
        """See `Link.call`."""
        if self.lost:
            raise LinkLost(self.lost)
        number = next(self._numbers)
        answer: asyncio.Future[Any] = self._loop.create_future()
        if not self._answers:
            self._last_message_at = self._loop.time()
        self._answers[number] = answer
        self._send({"call": number, "method": method, "value": arguments})
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            # Let the host stop the work of the call, and wait until it has.
            answer.add_done_callback(retrieve_exception)
            if not self.lost and not answer.done():
                self._send({"cancel": number})
                await asyncio.wait([answer], timeout=_CANCEL_S)
                if not answer.done():
                    self.lose(f"{self._name}: expected it to end a program within {_CANCEL_S:g} s, it is still running")
            raise
        finally:
            self._answers.pop(number, None)

    def _send(self, message: dict[str, Any]) -> None:
        self._outbox.put_nowait(encode(message))

    def feed(self, data: bytes) -> None:
        """Take bytes from the host. Bytes that are not messages end the link."""
        if self.lost:
            return
        self._last_message_at = self._loop.time()
        try:
            for message in self._splitter.feed(data):
                if "hello" in message and not self._hello.done():
                    self._hello.set_result(str(message["hello"]))
                answer = self._answers.get(message.get("answer", 0))
                if answer is not None and not answer.done():
                    try:
                        answer.set_result(value_of(message))
                    except AgentEnvError as error:
                        answer.set_exception(error)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            self.lose(f"{self._name}: expected a message, got one that cannot be read ({error})")

    def lose(self, reason: str) -> None:
        """Accept no more calls and fail those that wait. Repeated calls have no effect."""
        if self.lost:
            return
        self.lost = reason
        for waiting in [*self._answers.values(), self._hello]:
            if not waiting.done():
                waiting.set_exception(LinkLost(reason))
                waiting.add_done_callback(retrieve_exception)
        for task in self._tasks:
            task.cancel()
        self._on_lost()

    async def _write_all(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            data = await self._outbox.get()
            try:
                await write(data)
            except (OSError, AgentEnvError) as error:
                self.lose(f"{self._name}: {error}")
                return

    async def _watch(self) -> None:
        """Ping the host while calls wait; a host that stays silent is lost."""
        while True:
            await asyncio.sleep(_PING_S)
            if not self._answers or not self._hello.done():
                continue
            if self._loop.time() - self._last_message_at > WEDGED_S:
                self.lose(f"{self._name}: expected an answer within {WEDGED_S:g} s, got none")
                return
            self._send({"ping": 1})

    async def drained(self) -> None:
        """Wait for the tasks of a lost link to end."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
