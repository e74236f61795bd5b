"""A far host over two streams of bytes, and the source that it is made of there."""

from __future__ import annotations

import ast
import asyncio
import base64
import itertools
import json
import zlib
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

from agentenv.errors import AgentEnvError
from agentenv.sandbox._remote_link import LinkLost, seen, value_of
from agentenv.sandbox._remote_wire import Splitter, encode

START_S = 120.0
"""For a far side to be there and answer."""
WEDGED_S = 20.0
"""Without a word although it is asked: it is stopped, or stuck."""
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
from agentenv.sandbox import _remote_host
_remote_host.main(armoured="armoured" in sys.argv)
"""
"""Run by an interpreter that has nothing of ours: `python3 -I -S -c BOOT`; reads our source as its first line."""
_STARTED = ("_remote_host", "_zygote", "_probes", "_session_driver")
"""Modules of ours that run there as programs; what they import comes with them."""

_BESIDE = ("errors", "outside")
"""Of `agentenv`: modules that import nothing of it."""


@cache
def source_line() -> bytes:
    """What the far side needs of this package, as one line."""
    package = Path(__file__).parent
    files = {"agentenv/__init__.py": ""}
    files |= {f"agentenv/{name}.py": (package.parent / f"{name}.py").read_text("utf-8") for name in _BESIDE}
    todo = ["__init__", *_STARTED]
    while todo:
        name = f"agentenv/sandbox/{todo[-1]}.py"
        path = package / f"{todo.pop()}.py"
        if name not in files and path.exists():
            files[name] = path.read_text("utf-8")
            todo += _imported(files[name])
    return base64.b64encode(zlib.compress(json.dumps(files).encode(), 9)) + b"\n"


def _imported(source: str) -> list[str]:
    """Modules of this package that it may import."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "agentenv.sandbox":
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agentenv.sandbox."):
            found.append(str(node.module).split(".")[2])
    return found


class PipeLink:
    """Calls of a far host over two streams of bytes; the backend feeds what it hears."""

    def __init__(
        self,
        write: Callable[[bytes], Awaitable[None]],
        name: str,
        *,
        on_lost: Callable[[], None] = lambda: None,
        armoured: bool = False,
    ) -> None:
        """`write` is called for one message at a time; `on_lost` once, to end the far side.

        Args:
            write: sends bytes.
            name: of the far side, for messages.
            on_lost: what is to be done when it takes no more calls.
            armoured: the way carries text only.
        """
        self.lost: str | None = None
        """Why it takes no more calls."""
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._hello: asyncio.Future[str] = self._loop.create_future()
        self._armoured = armoured
        self._splitter = Splitter(armoured=armoured)
        self._heard = self._loop.time()
        self._tasks = [asyncio.ensure_future(self._write_all(write)), asyncio.ensure_future(self._watch())]

    async def opened(self, options: dict[str, Any]) -> dict[str, Any]:
        """Wait until it is there, and have it open its sandbox with these options of LocalSandbox: what it found.

        Raises:
            LinkLost: it did not come up.
            AgentEnvError: it found no isolation.
        """
        self._outbox.put_nowait(source_line())
        try:
            async with asyncio.timeout(START_S):
                await asyncio.shield(self._hello)
                found: dict[str, Any] = await self.call("open", options=options)
                return found
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
            self._heard = self._loop.time()
        self._answers[number] = answer
        self._tell({"call": number, "method": method, "value": arguments})
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await self._cancel(number, answer)
            raise
        finally:
            self._answers.pop(number, None)

    async def _cancel(self, number: int, answer: asyncio.Future[Any]) -> None:
        """Have the far side end what it does for a call, and wait for it to say so."""
        answer.add_done_callback(seen)
        if not self.lost and not answer.done():
            self._tell({"cancel": number})
            await asyncio.wait([answer], timeout=_CANCEL_S)
            if not answer.done():
                self.lose(f"{self._name}: expected it to end a program within {_CANCEL_S:g} s, it did not")

    def _tell(self, message: dict[str, Any]) -> None:
        self._outbox.put_nowait(encode(message, armoured=self._armoured))

    def feed(self, data: bytes) -> None:
        """What was heard of it; nothing at all is its end."""
        if self.lost:
            return
        self._heard = self._loop.time()
        try:
            for message in self._splitter.feed(data):
                self._heed(message)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            self.lose(f"{self._name}: it said what is no message ({error})")

    def _heed(self, message: dict[str, Any]) -> None:
        if "hello" in message and not self._hello.done():
            self._hello.set_result(str(message["hello"]))
        answer = self._answers.get(message.get("answer", 0))
        if answer is not None and not answer.done():
            try:
                answer.set_result(value_of(message))
            except AgentEnvError as error:
                answer.set_exception(error)

    def lose(self, reason: str) -> None:
        """Take no more calls, and tell who waits; again is harmless."""
        if self.lost:
            return
        self.lost = reason
        for waiting in [*self._answers.values(), self._hello]:
            if not waiting.done():
                waiting.set_exception(LinkLost(reason))
                waiting.add_done_callback(seen)
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
        """Ping while it is asked; one that does not answer is lost."""
        while True:
            await asyncio.sleep(_PING_S)
            if not self._answers or not self._hello.done():
                continue
            if self._loop.time() - self._heard > WEDGED_S:
                self.lose(f"{self._name}: expected an answer within {WEDGED_S:g} s, got none")
                return
            self._tell({"ping": 1})

    async def drained(self) -> None:
        """Wait for its tasks to end, once it is lost."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
